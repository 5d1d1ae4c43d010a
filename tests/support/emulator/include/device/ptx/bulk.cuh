// device/ptx/bulk.cuh for the emulator.
#pragma once
#include "device/ptx/types.cuh"

inline void mbarrier_init(uint64* barrier, uint32 arrivals) {
    emulated_barrier_init(reinterpret_cast<uint64_t*>(barrier), arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(uint64* barrier, uint32 bytes) {
    emulated_barrier_expect(reinterpret_cast<uint64_t*>(barrier), bytes);
}
inline void mbarrier_wait(uint64* barrier, uint32 parity) {
    while (!emulated_barrier_try_wait(reinterpret_cast<uint64_t*>(barrier), parity)) emulated_yield();
}
inline void bulk_load(void* shared, const void* global, uint32 bytes, uint64* barrier) {
    emulated_bulk_load(shared, global, bytes, reinterpret_cast<uint64_t*>(barrier));
}
inline void bulk_store(void* global, const void* shared, uint32 bytes) { emulated_bulk_store(global, shared, bytes); }
inline void bulk_commit() { emulated_bulk_commit(); }
template <int Pending>
inline void bulk_wait_read() {
    emulated_bulk_wait(Pending, 0);
}
template <int Pending>
inline void bulk_wait_written() {
    emulated_bulk_wait(Pending, 1);
}
inline void fence_shared_to_bulk() {}
inline void fence_global_to_bulk() {}
