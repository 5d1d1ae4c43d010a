// Tensor-map copies (tiled TMA): a box of a tensor that the host has described, to shared memory.
#pragma once
#include "device/ptx/bulk.cuh"

// What the driver's cuTensorMapEncodeTiled made; opaque.
struct alignas(64) TensorMap {
    uint64 word[16];
};

__device__ __forceinline__ void tensor_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// What the host has copied to this map's place in device memory is what this thread's next copies go by. Maps that are
// kernel arguments need no fence.
__device__ __forceinline__ void tensor_map_fence(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// The box at column `x`, row `y` of a matrix. What lies outside of it is zero, and counts as arrived too.
__device__ __forceinline__ void tensor_load(void* shared, const TensorMap* map, int32 x, int32 y, uint64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
        : "memory");
}

// The same of a stack of matrices.
__device__ __forceinline__ void tensor_load(void* shared, const TensorMap* map, int32 x, int32 y, int32 z,
                                            uint64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
        : "memory");
}

// The same of what nobody reads again soon: the second-level cache drops it before anything else.
__device__ __forceinline__ void tensor_load_once(void* shared, const TensorMap* map, int32 x, int32 y, int32 z,
                                                 uint64* barrier) {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// The same, to the same place in all blocks of the cluster whose bits are set; it counts on each block's own barrier.
__device__ __forceinline__ void tensor_load_to_all(void* shared, const TensorMap* map, int32 x, int32 y,
                                                   uint64* barrier, uint16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void tensor_load_to_all(void* shared, const TensorMap* map, int32 x, int32 y, int32 z,
                                                   uint64* barrier, uint16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}
