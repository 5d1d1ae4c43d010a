// device/ptx/wgmma.cuh for the emulator. Products are sums in float32, at once.
#pragma once
#include "device/ptx/tensor.cuh"

// All lanes of a warp meet in them.
inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() { __syncwarp(); }
template <int Pending>
inline void wgmma_wait() {
    __syncwarp();
}
inline uint32 wgmma_tile(uint32 address) { return (address & 0x3ffff) >> 4; }

inline const float* emulated_e4m3_values() {
    static float values[256];
    static const bool filled = [] {
        for (int code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15, fraction = code & 7;
            const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                                  : std::ldexp(static_cast<float>(fraction | 8), exponent - 10);
            values[code] = (code & 127) == 127 ? NAN : code & 128 ? -magnitude : magnitude;
        }
        return true;
    }();
    return filled ? values : nullptr;
}

// 32 values of a row of a tile.
inline void emulated_row(float (&row)[32], uint32 tile, int number) {
    const float* values = emulated_e4m3_values();
    const uint32 begin = shared_address(emulated_shared()) + (tile << 4) + number * 128;
    for (uint32 k = 0; k < 32; k += 16) {
        const auto* unit = at_shared<const unsigned char>(swizzled(begin + k));
        for (int i = 0; i < 16; ++i) row[k + i] = values[unit[i]];
    }
}

inline void wgmma_e4m3(float (&d)[64], uint32 a, uint32 b, int accumulate) {
    const int thread = emulated_thread().x % 128, lane = thread % 32, first = thread / 32 * 16 + lane / 4;
    float rows[2][32], column[32];
    emulated_row(rows[0], a, first);
    emulated_row(rows[1], a, first + 8);
    for (int j = 0; j < 16; ++j)
        for (int side = 0; side < 2; ++side) {
            emulated_row(column, b, 8 * j + 2 * (lane % 4) + side);
            for (int half = 0; half < 2; ++half) {
                float sum = accumulate != 0 ? d[4 * j + 2 * half + side] : 0.0f;
                for (int k = 0; k < 32; ++k) sum += rows[half][k] * column[k];
                d[4 * j + 2 * half + side] = sum;
            }
        }
}

inline void store_matrices(void* row, uint32 m0, uint32 m1, uint32 m2, uint32 m3) {
    const unsigned lane = emulated_thread().x % 32;
    const uint64_t* rows = emulated_meet(reinterpret_cast<uint64_t>(row));
    const uint32 words[4] = {m0, m1, m2, m3};
    for (unsigned matrix = 0; matrix < 4; ++matrix)
        std::memcpy(reinterpret_cast<char*>(rows[matrix * 8 + lane / 4]) + lane % 4 * 4, &words[matrix], 4);
}
