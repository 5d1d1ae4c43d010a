// Blocks of one cluster: each can arrive on the others' barriers, and one load can fill the shared memory of all.
#pragma once
#include "device/ptx/types.cuh"

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks. No block may leave while another still arrives on its barriers.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32 map_to_block(uint32 shared_address, uint32 rank) {
    uint32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address), "r"(rank));
    return there;
}

__device__ __forceinline__ void mbarrier_arrive_there(uint32 mapped_address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_address) : "memory");
}

__device__ __forceinline__ void store_there(uint32 mapped_address, int32 value) {
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(mapped_address), "r"(value) : "memory");
}

// Between stores to other blocks and the arrivals that announce them.
__device__ __forceinline__ void fence_acq_rel_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
