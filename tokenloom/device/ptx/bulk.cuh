// Bulk copies (the linear TMA path) and the mbarriers that their loads complete on.
// Sizes and addresses are multiples of 16 bytes. Peers' addresses of symmetric memory work in both directions.
#pragma once
#include "device/ptx/types.cuh"

// True in one lane of the warp, which the compiler then knows to be one.
__device__ __forceinline__ bool is_elected() {
    uint32 elected;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(elected));
    return elected != 0;
}

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64* barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes inits visible to the copy engine; then a block barrier makes them visible to the other threads.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint64* barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64* barrier, uint32 parity) {
    uint32 done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// A load of this GPU's own or a peer's memory always completes, so this wait needs no deadline.
__device__ __forceinline__ void mbarrier_wait(uint64* barrier, uint32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32 bytes, uint64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// The same of what nobody reads again soon: the second-level cache drops it before anything else.
__device__ __forceinline__ void bulk_load_once(void* shared, const void* global, uint32 bytes, uint64* barrier) {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most `Pending` of this thread's newest groups still read their shared memory.
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// At most `Pending` of this thread's newest groups are not yet written where they go.
template <int Pending>
__device__ __forceinline__ void bulk_wait_written() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// Between ordinary shared-memory stores and a bulk store that reads them (in every storing thread, then a barrier).
__device__ __forceinline__ void fence_shared_to_bulk() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Between an acquired flag, or another kernel's ordinary stores, and bulk loads or stores of this thread that depend on
// them.
__device__ __forceinline__ void fence_global_to_bulk() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Bytes of this thread, to shared memory: 16, or one value.
__device__ __forceinline__ void copy_16_async(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_4_async(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// The copies of this thread since its commit before are a group.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but this thread's newest `Pending` groups are there, for this thread.
template <int Pending>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Arrives on the barrier, which counts this thread, when all its copies are there.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
