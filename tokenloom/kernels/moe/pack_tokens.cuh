// This rank's tokens as they are sent: values in E4M3, and behind them a scale for each 128 of them. The kernel that sends
// them is launched early: it counts routes and hears of all ranks' meanwhile.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/roles/trace.cuh"
#include "device/tile/fp8.cuh"

struct PackTokensArgs {
    const unsigned char* x;  // [T][H] of Shape::x_dtype, or E4M3
    const float* scales;     // with E4M3: [T][H / 128]
    unsigned char* packed;   // [T][Shape::packed_bytes]
    int32 num_tokens;
    int32 padding;
    uint64* trace;  // see mark_block
};

template <class Shape>
__device__ void pack_tokens(const PackTokensArgs& args) {
    constexpr int kWarps = Shape::threads / 32, kScales = Shape::hidden / kFp8Block;
    let_next_kernel_begin();
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) mark_block(args.trace, kBegins);
    for (int64 token = blockIdx.x * kWarps + threadIdx.x / 32; token < args.num_tokens; token += gridDim.x * kWarps) {
        unsigned char* to = args.packed + token * Shape::packed_bytes;
        auto* scales = reinterpret_cast<float*>(to + Shape::hidden);
        if constexpr (Shape::quantize != 0) {
            quantize_row<Shape::x_dtype, Shape::hidden, Shape::power_of_two != 0>(
                args.x + token * Shape::hidden * kValueBytes<Shape::x_dtype>, reinterpret_cast<uint64>(to),
                reinterpret_cast<uint64>(scales), 1, lane);
        } else {
            copy_row<Shape::hidden>(args.x + token * Shape::hidden, reinterpret_cast<uint64>(to), 1, lane);
            for (int i = lane; i < kScales; i += 32) scales[i] = args.scales[token * kScales + i];
        }
    }
    if (lane == 0) mark_block(args.trace, kEnds);
}
