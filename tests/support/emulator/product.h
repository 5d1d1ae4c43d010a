// The products of wgmma, for emulator.cpp: of E4M3 values, in float32.
#pragma once
#include "emulator.h"

#include <vector>

// Values of 32 bytes of E4M3.
inline void decode(float* values, const unsigned char* codes) {
    for (int i = 0; i < 32; ++i) {
        const uint32_t code = codes[i], magnitude = code & 127;
        const uint32_t bits = (code & 128) << 24 | (magnitude == 127 ? 0x7fc00000u : magnitude << 20);
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        values[i] = value * 0x1p120f;  // the exponents' biases differ by 120; that of subnormal values too
    }
}

// Values of 32 columns, by k. Many threads ask for the same ones one after the other.
struct Columns {
    unsigned char codes[32][32] = {};
    float of_k[32][32] = {};  // all 0, as are the codes
};
std::vector<Columns> decoded(256);

#ifdef __x86_64__
#define WIDE_VECTORS __attribute__((target_clones("avx2", "default")))  // the same sums: nothing is contracted
#else
#define WIDE_VECTORS
#endif

// d[row][column] += sum over k of rows[row][k] * columns[column][k], in the order of k.
extern "C" WIDE_VECTORS void emulated_product(float (*d)[32], const unsigned char (*rows)[32], const unsigned char (*columns)[32],
                                 unsigned place) {
    Columns& found = decoded[place % decoded.size()];
    if (std::memcmp(found.codes, columns, sizeof(found.codes)) != 0) {
        std::memcpy(found.codes, columns, sizeof(found.codes));
        float column[32];
        for (int c = 0; c < 32; ++c) {
            decode(column, columns[c]);
            for (int k = 0; k < 32; ++k) found.of_k[k][c] = column[k];
        }
    }
    for (int r = 0; r < 2; ++r) {
        float row[32], sums[32];
        decode(row, rows[r]);
        std::memcpy(sums, d[r], sizeof(sums));
        for (int k = 0; k < 32; ++k)
            for (int c = 0; c < 32; ++c) sums[c] += row[k] * found.of_k[k][c];
        std::memcpy(d[r], sums, sizeof(sums));
    }
}
