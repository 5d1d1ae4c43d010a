// Experts that this rank computes for others in one batch: their rows of all weights, from peers' memory to its own slots.
//
//   all blocks      find shares of other ranks' slots whose targets are empty here by the placement; copy a part of each
//                   of their rows from the slots that give
//
// Nobody writes weights while calls run, and a rank leaves the call only when all others have pulled. So there is
// nothing to wait for. README.md says who uses it.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/ptx/memory.cuh"
#include "device/tile/shares.cuh"

struct PullExpertsArgs {
    const uint64* peers;        // [W] every rank's memory of weights
    const uint64* parts;        // [num_parts][2]: where a tensor of slots begins in it, and the bytes of a slot
    const int32* experts;       // [W * slots_per_rank], the expert in each slot by the placement, or -1
    const Share* shares;        // of the batch (device/tile/shares.cuh)
    const int32* num_shares;    // [1]
    int32 num_parts;
    int32 rank;
};

__device__ __forceinline__ Vec16 load(const Vec16* from) { return load_16_once(from); }
__device__ __forceinline__ uint32 load(const uint32* from) { return *from; }
__device__ __forceinline__ void store(Vec16* to, Vec16 value) { store_16(to, value); }
__device__ __forceinline__ void store(uint32* to, uint32 value) { *to = value; }

// All threads of all blocks: `bytes` of a peer's memory. They are a multiple of a unit, as are both addresses.
template <class Unit, class Shape>
__device__ __forceinline__ void copy_row(const unsigned char* from, unsigned char* to, uint64 bytes) {
    constexpr int kAtOnce = 8;  // loads that are on their way together: the way to a peer is long
    const auto* source = reinterpret_cast<const Unit*>(from);
    auto* target = reinterpret_cast<Unit*>(to);
    const uint64 count = bytes / sizeof(Unit), stride = static_cast<uint64>(gridDim.x) * Shape::threads;
    for (uint64 i = static_cast<uint64>(blockIdx.x) * Shape::threads + threadIdx.x; i < count; i += kAtOnce * stride) {
        Unit found[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            if (i + j * stride < count) found[j] = load(source + i + j * stride);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            if (i + j * stride < count) store(target + i + j * stride, found[j]);
    }
}

template <class Shape>
__device__ void pull_experts(const PullExpertsArgs& args) {
    constexpr int kSlots = Shape::slots_per_rank;
    __shared__ int32 sources[kSlots];  // the slot that gives to each of this rank's, or -1
    for (int slot = threadIdx.x; slot < kSlots; slot += Shape::threads) sources[slot] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < *args.num_shares; i += Shape::threads) {
        const Share share = args.shares[i];
        // Several shares of one target are of slots with the same expert, so any of them will do.
        if (share.target / kSlots == args.rank && args.experts[share.target] < 0)
            sources[share.target % kSlots] = share.slot;
    }
    __syncthreads();
    for (int slot = 0; slot < kSlots; ++slot) {
        const int32 source = sources[slot];
        if (source < 0) continue;
        const uint64 peer = args.peers[source / kSlots], own = args.peers[args.rank];
        for (int part = 0; part < args.num_parts; ++part) {
            const uint64 begin = args.parts[2 * part], bytes = args.parts[2 * part + 1];
            const auto* from = reinterpret_cast<const unsigned char*>(peer + begin + source % kSlots * bytes);
            auto* to = reinterpret_cast<unsigned char*>(own + begin + slot * bytes);
            if (bytes % sizeof(Vec16) == 0) copy_row<Vec16, Shape>(from, to, bytes);
            else copy_row<uint32, Shape>(from, to, bytes);
        }
    }
}
