// A row of bfloat16 activations becomes E4M3 with one scale, a power of two.
#pragma once
#include "device/tile/fp8.cuh"

// One warp. `to` may be `from`: then the codes take the first half of the row's place. A row of one tile is loaded once.
template <int kWidth>
__device__ __forceinline__ void quantize_activations(const unsigned char* from, unsigned char* to, float* scale,
                                                     int lane) {
    using Quantized = RowToQuantize<kBfloat16, kWidth>;
    typename Quantized::Packed packed[Quantized::Row::kSteps];
    constexpr int kTiles = Quantized::Row::kCount;
    if constexpr (kTiles == 1) Quantized::load(packed, from, 0, lane);
    const float largest = kTiles == 1 ? Quantized::largest_of(packed, 0, lane) : Quantized::largest(from, lane);
    const Fp8Scale found = fp8_scale<true>(largest);
    if constexpr (kTiles == 1)  // unpacked again: as floats they take twice the registers
#pragma unroll
        for (auto& group : packed)
#pragma unroll
            for (auto& part : group.part)
#pragma unroll
                for (uint32& word : part.word) asm volatile("" : "+r"(word));
    for (int tile = 0; tile < kTiles; ++tile) {
        if constexpr (kTiles > 1) Quantized::load(packed, from, tile, lane);
        __syncwarp();  // all lanes have loaded what the first tile's codes may overwrite
        Quantized::put_codes(found.factor, packed, tile, lane, [&](bool inside, int index, const Vec16& codes) {
            if (inside) reinterpret_cast<Vec16*>(to)[index] = codes;
        });
    }
    if (lane == 0) *scale = found.scale;
}
