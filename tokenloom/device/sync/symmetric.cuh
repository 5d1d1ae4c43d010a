// The symmetric buffer: the same regions at the same offsets on every rank, each rank's at an address of its own.
#pragma once
#include "device/ptx/types.cuh"

enum Layout : int { kLayoutToken = 0, kLayoutExpert = 1, kLayoutRank = 2 };

// `peers` has every rank's address of its buffer, as this rank sees it.
template <class T>
__device__ __forceinline__ T* at_peer(const uint64* peers, int rank, uint64 offset) {
    return reinterpret_cast<T*>(peers[rank] + offset);
}
