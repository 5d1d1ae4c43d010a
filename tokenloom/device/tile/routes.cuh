// Routes as the caller gives them: expert ids, int32 or int64.
#pragma once
#include "device/ptx/types.cuh"

// The expert of an id, or -1 for none. Ids out of range count as none, never as addresses.
template <int kExperts, class Id>
__device__ __forceinline__ int32 expert_of_id(Id id) {
    return id >= 0 && id < kExperts ? static_cast<int32>(id) : -1;
}

template <int kExperts>
__device__ __forceinline__ int32 expert_of(const void* ids, int32 ids_are_int64, int64 index) {
    return ids_are_int64 ? expert_of_id<kExperts>(static_cast<const int64*>(ids)[index])
                         : expert_of_id<kExperts>(static_cast<const int32*>(ids)[index]);
}
