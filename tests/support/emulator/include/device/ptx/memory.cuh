// device/ptx/memory.cuh for the emulator: fibers see each other's writes at once, so only atomicity and turns matter.
#pragma once
#include "device/ptx/types.cuh"

inline uint32 emulated_load(const uint32* address) {
    emulated_yield();
    return *static_cast<const volatile uint32*>(address);
}
inline void emulated_store(uint32* address, uint32 value) {
    *static_cast<volatile uint32*>(address) = value;
    emulated_yield();
}
inline uint32 load_relaxed_sys(const uint32* address) { return emulated_load(address); }
inline uint32 load_acquire_sys(const uint32* address) { return emulated_load(address); }
inline uint32 load_acquire_gpu(const uint32* address) { return emulated_load(address); }
inline uint32 load_acquire_cta(uint32* shared) { return emulated_load(shared); }
inline void store_release_sys(uint32* address, uint32 value) { emulated_store(address, value); }
inline void store_relaxed_sys(uint32* address, uint32 value) { emulated_store(address, value); }
inline void store_release_gpu(uint32* address, uint32 value) { emulated_store(address, value); }
inline void store_release_cta(uint32* shared, uint32 value) { emulated_store(shared, value); }
inline void fence_acquire_sys() { emulated_yield(); }
inline void fence_acq_rel_sys() { emulated_yield(); }
inline uint32 add_relaxed_gpu(uint32* address, uint32 value) { return atomicAdd(address, value); }
inline uint32 add_acq_rel_gpu(uint32* address, uint32 value) {
    emulated_yield();
    return atomicAdd(address, value);
}
inline uint32 compare_and_swap_gpu(uint32* address, uint32 expected, uint32 value) {
    const uint32 before = *address;
    if (before == expected) *address = value;
    return before;
}

inline uint32 compare_and_swap_relaxed_sys(uint32* address, uint32 expected, uint32 value) {
    const uint32 before = *address;
    if (before == expected) *address = value;
    return before;
}
inline StampedWord load_relaxed_sys(const StampedWord* address) {
    emulated_yield();
    return *address;
}
inline void store_relaxed_sys(StampedWord* address, StampedWord word) {
    *address = word;
    emulated_yield();
}
inline void compare_and_swap_relaxed_sys(StampedWord* address, StampedWord expected, StampedWord word) {
    if (address->value == expected.value && address->epoch == expected.epoch) *address = word;
}
inline Vec16 load_16_once(const void* address) { return *static_cast<const Vec16*>(address); }
inline Vec16 load_shared_16(const void* shared) { return *static_cast<const Vec16*>(shared); }
inline void store_16(void* address, Vec16 v) { *static_cast<Vec16*>(address) = v; }
// Words come one by one, in any order, so who polls sees parts of what is stored.
inline Vec16 load_16_relaxed_sys(const void* address) {
    emulated_yield();
    return *static_cast<const Vec16*>(address);
}
inline void store_16_relaxed_sys(void* address, Vec16 v) {
    for (uint32 i = 0, first = emulated_chance() % 4; i < 4; ++i) {
        const uint32 word = (first + i) % 4;
        emulated_store(static_cast<uint32*>(address) + word, v.word[word]);
    }
}
inline void add_release_gpu(uint32* address, uint32 value) {
    emulated_yield();
    atomicAdd(address, value);
}
inline void add_relaxed_sys(uint32* address, uint32 value) {
    emulated_yield();
    atomicAdd(address, value);
}

inline void add_release_sys(uint32* address, uint32 value) {
    emulated_yield();
    atomicAdd(address, value);
}
inline void sync_threads(int barrier, int threads) { emulated_named_barrier(barrier, threads); }
template <int kRegisters>
inline void keep_registers() {}
template <int kRegisters>
inline void take_registers() {}
inline uint64 global_timer_ns() { return emulated_clock(); }
inline void sleep_ns(uint32) { emulated_yield(); }
