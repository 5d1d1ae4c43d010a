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

// 32 values of a row of a tile.
inline void emulated_row(unsigned char (&row)[32], uint32 tile, int number) {
    const uint32 begin = shared_address(emulated_shared()) + (tile << 4) + number * 128;
    for (uint32 k = 0; k < 32; k += 16) std::memcpy(row + k, at_shared<const unsigned char>(swizzled(begin + k)), 16);
}

inline void wgmma_e4m3(float (&d)[64], uint32 a, uint32 b, int accumulate) {
    const int thread = emulated_thread().x % 128, lane = thread % 32, first = thread / 32 * 16 + lane / 4;
    unsigned char rows[2][32], columns[32][32];
    float sums[2][32];
    for (int half = 0; half < 2; ++half) emulated_row(rows[half], a, first + 8 * half);
    for (int i = 0; i < 32; ++i) {
        emulated_row(columns[i], b, i / 2 * 8 + 2 * (lane % 4) + i % 2);
        for (int half = 0; half < 2; ++half) sums[half][i] = accumulate != 0 ? d[i / 2 * 4 + 2 * half + i % 2] : 0.0f;
    }
    emulated_product(sums, rows, columns, b * 4 + lane % 4);
    for (int i = 0; i < 64; ++i) d[i] = sums[i / 2 % 2][i / 4 * 2 + i % 2];
}

// 32 columns at a time.
template <int kColumns, int kRegisters>
void emulated_product_of(float (&d)[kRegisters], const unsigned char (&rows)[2][32], uint32 b) {
    static_assert(kRegisters >= kColumns / 2, "room for the product");
    const int lane = emulated_thread().x % 32;
    unsigned char columns[32][32];
    float sums[2][32];
    for (int begin = 0; begin < kColumns / 4; begin += 32) {  // of this thread's columns
        const int count = kColumns / 4 - begin < 32 ? kColumns / 4 - begin : 32;
        for (int i = 0; i < 32; ++i) {
            const int own = begin + (i < count ? i : 0);
            emulated_row(columns[i], b, own / 2 * 8 + 2 * (lane % 4) + own % 2);
            for (int half = 0; half < 2; ++half) sums[half][i] = d[own / 2 * 4 + 2 * half + own % 2];
        }
        emulated_product(sums, rows, columns, b * 4 + lane % 4 + begin);
        for (int i = 0; i < count; ++i)
            for (int half = 0; half < 2; ++half) d[(begin + i) / 2 * 4 + 2 * half + i % 2] = sums[half][i];
    }
}

template <int kColumns>
struct ProductOf {
    template <int kRegisters>
    static void add(float (&d)[kRegisters], uint32 a, uint32 b) {
        const int thread = emulated_thread().x % 128, first = thread / 32 * 16 + thread % 32 / 4;
        unsigned char rows[2][32];
        for (int half = 0; half < 2; ++half) emulated_row(rows[half], a, first + 8 * half);
        emulated_product_of<kColumns>(d, rows, b);
    }
    // Each of four lanes has a part of a row.
    template <int kRegisters>
    static void add_held(float (&d)[kRegisters], const uint32 (&held)[4], uint32 b) {
        const unsigned lane = emulated_thread().x % 32;
        unsigned char rows[2][32];
        for (int i = 0; i < 4; ++i) {
            const uint64_t* words = emulated_meet(held[i]);
            for (unsigned t = 0; t < 4; ++t) {
                const auto word = static_cast<uint32>(words[lane / 4 * 4 + t]);
                std::memcpy(rows[i % 2] + i / 2 * 16 + t * 4, &word, 4);
            }
        }
        emulated_product_of<kColumns>(d, rows, b);
    }
};

inline void store_matrices(void* row, uint32 m0, uint32 m1, uint32 m2, uint32 m3) {
    const unsigned lane = emulated_thread().x % 32;
    const uint64_t* rows = emulated_meet(reinterpret_cast<uint64_t>(row));
    const uint32 words[4] = {m0, m1, m2, m3};
    for (unsigned matrix = 0; matrix < 4; ++matrix)
        std::memcpy(reinterpret_cast<char*>(rows[matrix * 8 + lane / 4]) + lane % 4 * 4, &words[matrix], 4);
}

inline void emulated_store_transposed(void* row, const uint32* words, unsigned matrices) {
    const unsigned lane = emulated_thread().x % 32;
    const uint64_t* rows = emulated_meet(reinterpret_cast<uint64_t>(row));
    for (unsigned matrix = 0; matrix < matrices; ++matrix)
        for (unsigned i = 0; i < 2; ++i)
            std::memcpy(reinterpret_cast<char*>(rows[matrix * 8 + lane % 4 * 2 + i]) + lane / 4 * 2,
                        reinterpret_cast<const char*>(&words[matrix]) + 2 * i, 2);
}

inline void store_transposed(void* row, uint32 m0, uint32 m1) {
    const uint32 words[2] = {m0, m1};
    emulated_store_transposed(row, words, 2);
}

inline void store_transposed(void* row, uint32 m0, uint32 m1, uint32 m2, uint32 m3) {
    const uint32 words[4] = {m0, m1, m2, m3};
    emulated_store_transposed(row, words, 4);
}
