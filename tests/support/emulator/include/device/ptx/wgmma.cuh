// device/ptx/wgmma.cuh for the emulator: no products, but what stores them.
#pragma once
#include "device/ptx/bulk.cuh"

inline void store_matrices(void* row, uint32 m0, uint32 m1, uint32 m2, uint32 m3) {
    const unsigned lane = emulated_thread().x % 32;
    const uint64_t* rows = emulated_meet(reinterpret_cast<uint64_t>(row));
    const uint32 words[4] = {m0, m1, m2, m3};
    for (unsigned matrix = 0; matrix < 4; ++matrix)
        std::memcpy(reinterpret_cast<char*>(rows[matrix * 8 + lane / 4]) + lane % 4 * 4, &words[matrix], 4);
}
