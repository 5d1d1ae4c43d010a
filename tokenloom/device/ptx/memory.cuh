// Loads and stores with a scope and an order. `sys` is what another GPU can see; `gpu` is this GPU only.
// Every wrapper but those of registers clobbers memory: the compiler must not move ordinary accesses across them.
#pragma once
#include "device/ptx/types.cuh"

__device__ __forceinline__ uint32 load_relaxed_sys(const uint32* address) {
    uint32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32 load_acquire_sys(const uint32* address) {
    uint32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_sys(uint32* address, uint32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint32* address, uint32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32 load_acquire_gpu(const uint32* address) {
    uint32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_gpu(uint32* address, uint32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Between threads of a block, through shared memory. Loads and stores are atomic operations here: tools that look for
// races in shared memory know nothing of acquire and release.
__device__ __forceinline__ uint32 load_acquire_cta(uint32* shared) {
    uint32 value;
    asm volatile("atom.or.acquire.cta.b32 %0, [%1], 0;" : "=r"(value) : "l"(shared) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_cta(uint32* shared, uint32 value) {
    asm volatile("atom.exch.release.cta.b32 _, [%0], %1;" ::"l"(shared), "r"(value) : "memory");
}

// Behind relaxed loads: what was released before the values that they found is visible. Unlike the fence below it does not
// wait for what this SM has written.
__device__ __forceinline__ void fence_acquire_sys() { asm volatile("fence.acquire.sys;" ::: "memory"); }

__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ uint32 add_relaxed_gpu(uint32* address, uint32 value) {
    uint32 before;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}

__device__ __forceinline__ uint32 add_acq_rel_gpu(uint32* address, uint32 value) {
    uint32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
    return before;
}

__device__ __forceinline__ void add_release_gpu(uint32* address, uint32 value) {
    asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_relaxed_sys(uint32* address, uint32 value) {
    asm volatile("red.add.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release_sys(uint32* address, uint32 value) {
    asm volatile("red.add.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32 compare_and_swap_gpu(uint32* address, uint32 expected, uint32 value) {
    uint32 before;
    asm volatile("atom.cas.acq_rel.gpu.global.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(address), "r"(expected), "r"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ uint32 compare_and_swap_relaxed_sys(uint32* address, uint32 expected, uint32 value) {
    uint32 before;
    asm volatile("atom.cas.relaxed.sys.global.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(address), "r"(expected), "r"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ uint64 bits_of(StampedWord word) {
    return static_cast<uint64>(word.epoch) << 32 | static_cast<uint32>(word.value);
}

__device__ __forceinline__ StampedWord load_relaxed_sys(const StampedWord* address) {
    uint64 bits;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(bits) : "l"(address) : "memory");
    return {static_cast<int32>(static_cast<uint32>(bits)), static_cast<uint32>(bits >> 32)};
}

__device__ __forceinline__ void store_relaxed_sys(StampedWord* address, StampedWord word) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(address), "l"(bits_of(word)) : "memory");
}

__device__ __forceinline__ void compare_and_swap_relaxed_sys(StampedWord* address, StampedWord expected,
                                                             StampedWord word) {
    asm volatile("atom.cas.relaxed.sys.global.b64 _, [%0], %1, %2;" ::"l"(address), "l"(bits_of(expected)),
                 "l"(bits_of(word))
                 : "memory");
}

// Data that is read once: the first-level cache has no use for it.
__device__ __forceinline__ Vec16 load_16_once(const void* address) {
    Vec16 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(address)
                 : "memory");
    return v;
}

// Each of the four words by itself: nothing is assumed of 16 bytes together.
__device__ __forceinline__ Vec16 load_16_relaxed_sys(const void* address) {
    Vec16 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(address)
                 : "memory");
    return v;
}

// From shared memory, behind a wait for what asynchronous copies brought there.
__device__ __forceinline__ Vec16 load_shared_16(const void* shared) {
    Vec16 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "r"(static_cast<uint32>(__cvta_generic_to_shared(shared)))
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_16(void* address, Vec16 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ void store_16_relaxed_sys(void* address, Vec16 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ uint64 global_timer_ns() {
    uint64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

__device__ __forceinline__ void sleep_ns(uint32 duration) {
    asm volatile("nanosleep.u32 %0;" ::"r"(duration) : "memory");
}

// Registers of a warpgroup: all of its warps call it. The launch bounds must leave what is asked for.
template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier among some of the block's warps; barrier 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
