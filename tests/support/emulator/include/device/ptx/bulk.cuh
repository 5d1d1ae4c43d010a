// device/ptx/bulk.cuh for the emulator.
#pragma once
#include "device/ptx/types.cuh"

inline bool is_elected() { return threadIdx.x % 32 == 0; }

// Shared memory lies at addresses of 32 bits (emulator.cpp).
inline uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(reinterpret_cast<uintptr_t>(pointer));
}
template <class T>
inline T* at_shared(uint32 address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline void mbarrier_init(uint64* barrier, uint32 arrivals) {
    emulated_barrier_init(reinterpret_cast<uint64_t*>(barrier), arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint64* barrier) { emulated_barrier_expect(reinterpret_cast<uint64_t*>(barrier), 0); }
inline void mbarrier_arrive_expect(uint64* barrier, uint32 bytes) {
    emulated_barrier_expect(reinterpret_cast<uint64_t*>(barrier), bytes);
}
inline void mbarrier_wait(uint64* barrier, uint32 parity) {
    emulated_barrier_wait(reinterpret_cast<uint64_t*>(barrier), parity);
}
inline void bulk_load(void* shared, const void* global, uint32 bytes, uint64* barrier) {
    emulated_bulk_load(shared, global, bytes, reinterpret_cast<uint64_t*>(barrier));
}
inline void bulk_load_once(void* shared, const void* global, uint32 bytes, uint64* barrier) {
    bulk_load(shared, global, bytes, barrier);
}
inline void bulk_store(void* global, const void* shared, uint32 bytes) { emulated_bulk_store(global, shared, bytes); }
inline void bulk_commit() { emulated_commit(0); }
template <int Pending>
inline void bulk_wait_read() {
    emulated_wait(0, Pending, 0);
}
template <int Pending>
inline void bulk_wait_written() {
    emulated_wait(0, Pending, 1);
}
inline void copy_16_async(void* shared, const void* global) { emulated_copy(shared, global, 16); }
inline void copy_4_async(void* shared, const void* global) { emulated_copy(shared, global, 4); }
inline void copies_commit() { emulated_commit(1); }
// Waits for what a GPU does not wait for.
inline void mbarrier_arrive_after_copies(uint64* barrier) {
    emulated_commit(1);
    emulated_wait(1, 0, 1);
    mbarrier_arrive(barrier);
}
template <int Pending>
inline void copies_wait() {
    emulated_wait(1, Pending, 1);
}
inline void fence_shared_to_bulk() {}
inline void fence_global_to_bulk() {}
