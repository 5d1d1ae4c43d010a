// Sets signals of NCCL's GIN to zero. They belong to a communicator, so a new device communicator may get those that an
// earlier one has raised.
//
//   the one block   every signal of every context
//
// Nobody may put meanwhile: the host lets all ranks meet behind it.
#pragma once
#include "device/transport/gin.cuh"

struct SignalsArgs {
    uint64 comm;  // const ncclDevComm*: the device communicator, in device memory
    int32 signals;  // of each kind of traffic
    int32 padding;
};

template <class Shape>
__device__ void signals(const SignalsArgs& args) {
    for (int i = threadIdx.x; i < kTraffics * args.signals; i += Shape::threads)
        reset_signal(args.comm, static_cast<Traffic>(i / args.signals), i % args.signals);
}
