// Regions carried by a collective of the host's, an all-to-all of fixed sizes between two kernels: one packs, one finds
// what has arrived. The collective's place in the stream is the order, so there is nothing to put, to count or to wait
// for; each call has regions of its own, and one chunk for each node.
#pragma once
#include "device/transport/rail.cuh"

template <>
struct RailTransport<kByCollective> {
    const Rail& rail;

    template <int kPart>
    __device__ __forceinline__ uint64 before(Traffic, uint32) const {
        static_assert(kPart != kWhole, "the collective is between two kernels");
        return 0;
    }

    __device__ __forceinline__ void count_call(Traffic, uint32) const {}

    __device__ __forceinline__ void put(Traffic, int, uint64, uint64, uint64, uint32, void*) const {}

    __device__ __forceinline__ bool wait(Traffic, uint32, uint64, const Deadline&, uint32, uint32, uint32) const {
        return true;
    }

    // One warp of a kernel that sends, where a wait has expired: the collective carries its regions all the same, with
    // whatever lies in them. So each begins as that of a rank with a fault, and means another call.
    __device__ __forceinline__ void give_up(const Call& call, int nodes, int lane) const {
        if (lane >= nodes) return;
        auto* header = reinterpret_cast<int32*>(rail.region(rail.put_from, 0, lane));
        header[0] = kOwnFault;
        header[1] = call.rank + 1;
        header[kHashWord] = ~static_cast<int32>(call.options_hash);
        header[kHashWord + 1] = ~static_cast<int32>(call.options_hash >> 32);
    }
};
