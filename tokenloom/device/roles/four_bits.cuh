// Weights of four bits: E2M1 codes with a power of two for each 32 values of a row. They are decoded in registers, which hold
// operand A of a product, and nowhere else.
//
// A block is 128 rows x 128 of K, in one piece of memory as in a stage:
//
//   codes    [warp 8][half 2][lane 32][4 words]. A warp has 16 rows, a half two steps of 32 values. Lane 4g + t has of each
//            step the words of rows g and g + 8: values 4t ... 4t + 3 of the row, and those 16 further. Nibble i of a word
//            has the magnitude of its value i in the low three bits. The signs of values 0 to 3 are bits 7, 15, 23 and 31,
//            those of values 4 to 7 are bits 3, 11, 19 and 27.
//   scales   [warp 8][g 8][8]: for rows g and g + 8 a byte for each step, 8 * r with r = 1 ... 12. The weight is
//            E2M1 * 2^(r - 6), so all but 0 is a normal number of E4M3.
//
// The eight magnitudes of a step are two words that are linear in r:
//   {0, .5, 1, 1.5} -> {0, 8r, 8r + 8, 8r + 12}      {2, 3, 4, 6} -> {8r + 16, 8r + 20, 8r + 24, 8r + 28}
#pragma once
#include "device/roles/operand_ring.cuh"

constexpr int kFourBitCodes = kRowsOfA * kBlock / 2, kFourBitBlock = kFourBitCodes + kRowsOfA * kBlock / 32;

// In a stage, whose neighbour begins at a multiple of 1024 bytes.
struct FourBitOperand {
    static constexpr int kRowBytes = kBlock / 2;
    static constexpr int kStageBytes = (kFourBitBlock + 1023) / 1024 * 1024;
};

__device__ __forceinline__ uint32 permute_bytes(uint32 low, uint32 high, uint32 select) {
    uint32 found;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(select));
    return found;
}

// Eight values of one row: the first four, and the others.
__device__ __forceinline__ void decode_four_bits(uint32 word, uint32 scales, int step, uint32& first, uint32& second) {
    const uint32 r8 = permute_bytes(scales, 0, 0x4440 + step);
    const uint32 small = r8 * 0x01010100u + 0x0c080000u, large = r8 * 0x01010101u + 0x1c181410u;
    const uint32 select = word & 0x77777777u;
    first = permute_bytes(small, large, select) | (word & 0x80808080u);
    second = permute_bytes(small, large, select >> 16) | (word << 4 & 0x80808080u);
}

// This thread's words of a stage.
struct FourBitRows {
    Vec16 codes[2];
    uint2 scales;

    __device__ __forceinline__ FourBitRows(const unsigned char* stage, int group, int thread) {
        const int warp = group * kGroupWarps + thread / 32, lane = thread % 32;
        const auto* from = reinterpret_cast<const Vec16*>(stage) + warp * 64 + lane;
        codes[0] = from[0];
        codes[1] = from[32];
        scales = *reinterpret_cast<const uint2*>(stage + kFourBitCodes + warp * 64 + lane / 4 * 8);
    }

    // Operand A of a step.
    __device__ __forceinline__ void decode(int step, uint32 (&operand)[4]) const {
        const Vec16& words = codes[step / 2];
        const int first = step % 2 * 2;
        decode_four_bits(words.word[first], scales.x, step, operand[0], operand[2]);
        decode_four_bits(words.word[first + 1], scales.y, step, operand[1], operand[3]);
    }
};
