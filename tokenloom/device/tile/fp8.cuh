// Quantises a row to E4M3 with one scale per 128 values, as the semantics define it: IEEE divisions, each result
// rounded.
#pragma once
#include "device/tile/rows.cuh"

constexpr int kFp8Block = 128;

__device__ __forceinline__ float divide_rn(float a, float b) {
    float quotient;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

// Within 2 units in the last place.
__device__ __forceinline__ float divide_full(float a, float b) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

// Packs two values, or four, the first in the lowest byte. Beyond +-448 they saturate.
__device__ __forceinline__ uint16 pack_e4m3(float a, float b) {
    uint16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
}

__device__ __forceinline__ uint32 pack_e4m3(float a, float b, float c, float d) {
    return static_cast<uint32>(pack_e4m3(c, d)) << 16 | pack_e4m3(a, b);
}

struct Fp8Scale {
    float scale;   // of the block: value = code * scale
    float factor;  // code = round(value * factor)
};

template <bool kPowerOfTwo>
__device__ __forceinline__ Fp8Scale fp8_scale(float amax) {
    const float scale = divide_rn(fmaxf(amax, 1e-4f), 448.0f);
    if constexpr (kPowerOfTwo) {
        const uint32 bits = (__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u;  // rounded up
        return {__uint_as_float(bits), __uint_as_float((254u << 23) - bits)};      // and its exact reciprocal
    } else {
        return {scale, divide_rn(448.0f, fmaxf(amax, 1e-4f))};
    }
}

// A row that a warp quantises, in tiles. A lane takes 16 values at a step, so 8 neighbours share a block.
template <int kDtype, int kHidden>
struct RowToQuantize {
    static constexpr int kLaneValues = 16, kBlockLanes = kFp8Block / kLaneValues;
    using Row = Tiles<kHidden / kLaneValues, kDtype == kFloat32 ? 2 : 4>;
    using Packed = PackedGroup<kDtype, kLaneValues>;
    static_assert(kHidden % kFp8Block == 0, "whole blocks: 8 lanes are inside the row together, or beyond it");

    // All lanes call it together, and put(inside, index, codes, scale): 16 codes, number `index` of such units of the row
    // if they are inside of it, and the scale that they share with the other units of their block.
    template <bool kPowerOfTwo, class Put>
    static __device__ __forceinline__ void tile(const unsigned char* from, int tile, int lane, Put put) {
        Packed packed[Row::kSteps];
        load(packed, from, tile, lane);
        int index;
#pragma unroll
        for (int step = 0; step < Row::kSteps; ++step) {
            const bool inside = Row::unit(tile, step, lane, index);
            auto group = unpack(packed[step]);
            float amax = 0.0f;
#pragma unroll
            for (int i = 0; i < kLaneValues; ++i) amax = fmaxf(amax, fabsf(group.value[i]));
#pragma unroll
            for (int other = 1; other < kBlockLanes; other *= 2)
                amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, other));
            const Fp8Scale scale = fp8_scale<kPowerOfTwo>(amax);
            put(inside, index, codes_of(group, scale.factor), scale.scale);
        }
    }

    // For one scale of the whole row, which takes two passes. First: the largest magnitude of a tile, in all lanes. Plain
    // loads leave it in the first-level cache.
    static __device__ __forceinline__ float largest_of_tile(const unsigned char* from, int tile, int lane) {
        Packed packed[Row::kSteps];
        int index;
#pragma unroll
        for (int step = 0; step < Row::kSteps; ++step)
            if (Row::unit(tile, step, lane, index))
                packed[step] = *reinterpret_cast<const Packed*>(from + index * Packed::kBytes);
        return largest_of(packed, tile, lane);
    }

    static __device__ __forceinline__ float largest(const unsigned char* from, int lane) {
        float amax = 0.0f;
        for (int tile = 0; tile < Row::kCount; ++tile) amax = fmaxf(amax, largest_of_tile(from, tile, lane));
        return amax;
    }

    static __device__ __forceinline__ float largest_of(const Packed (&packed)[Row::kSteps], int tile, int lane) {
        float amax = 0.0f;
        int index;
#pragma unroll
        for (int step = 0; step < Row::kSteps; ++step) {
            if (!Row::unit(tile, step, lane, index)) continue;
            const auto group = unpack(packed[step]);
#pragma unroll
            for (int i = 0; i < kLaneValues; ++i) amax = fmaxf(amax, fabsf(group.value[i]));
        }
#pragma unroll
        for (int other = 1; other < 32; other *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, other));
        return amax;
    }

    // Second: put(inside, index, codes) for the units of a tile, by all lanes together.
    template <class Put>
    static __device__ __forceinline__ void tile_by(float factor, const unsigned char* from, int tile, int lane,
                                                   Put put) {
        Packed packed[Row::kSteps];
        load(packed, from, tile, lane);
        put_codes(factor, packed, tile, lane, put);
    }

    template <class Put>
    static __device__ __forceinline__ void put_codes(float factor, const Packed (&packed)[Row::kSteps], int tile,
                                                     int lane, Put put) {
        int index;
#pragma unroll
        for (int step = 0; step < Row::kSteps; ++step) {
            const bool inside = Row::unit(tile, step, lane, index);
            put(inside, index, codes_of(unpack(packed[step]), factor));
        }
    }

    // A tile's loads are all on their way before anything is stored.
    static __device__ __forceinline__ void load(Packed (&packed)[Row::kSteps], const unsigned char* from, int tile,
                                                int lane) {
        int index;
#pragma unroll
        for (int step = 0; step < Row::kSteps; ++step)
            if (Row::unit(tile, step, lane, index))
                packed[step] = load_group_once<kDtype, kLaneValues>(from + index * kLaneValues * kValueBytes<kDtype>);
    }

    template <class Group>
    static __device__ __forceinline__ Vec16 codes_of(Group group, float factor) {
        scale_group(group, factor);
        Vec16 codes;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            codes.word[i] = pack_e4m3(group.value[4 * i], group.value[4 * i + 1], group.value[4 * i + 2],
                                      group.value[4 * i + 3]);
        return codes;
    }
};

// Quantises a row of kDtype to the targets of all lanes in the mask, its scales to their scale targets.
template <int kDtype, int kHidden, bool kPowerOfTwo, class Stores = PlainStores>
__device__ __forceinline__ void quantize_row(const unsigned char* from, uint64 target, uint64 scale_target,
                                             uint32 targets, int lane) {
    using Row = RowToQuantize<kDtype, kHidden>;
    for (int tile = 0; tile < Row::Row::kCount; ++tile)
        Row::template tile<kPowerOfTwo>(from, tile, lane, [&](bool inside, int index, const Vec16& codes, float scale) {
            for (uint32 rest = targets; rest != 0; rest &= rest - 1) {
                auto* to = reinterpret_cast<unsigned char*>(of_lane(target, rest));
                auto* scales = reinterpret_cast<uint32*>(of_lane(scale_target, rest));
                if (inside) Stores::store(to + index * Row::kLaneValues, codes);
                if (inside && lane % Row::kBlockLanes == 0)
                    Stores::store(scales + index / Row::kBlockLanes, __float_as_uint(scale));
            }
        });
}

// Quantises a row of kDtype with one scale to the targets of all lanes in the mask, the scale to their scale targets.
template <int kDtype, int kHidden, bool kPowerOfTwo, class Stores = PlainStores>
__device__ __forceinline__ void quantize_whole_row(const unsigned char* from, uint64 target, uint64 scale_target,
                                                   uint32 targets, int lane) {
    using Row = RowToQuantize<kDtype, kHidden>;
    const Fp8Scale scale = fp8_scale<kPowerOfTwo>(Row::largest(from, lane));
    for (uint32 rest = targets; rest != 0; rest &= rest - 1) {
        auto* to = reinterpret_cast<uint32*>(of_lane(scale_target, rest));
        if (lane == 0) Stores::store(to, __float_as_uint(scale.scale));
    }
    for (int tile = 0; tile < Row::Row::kCount; ++tile)
        Row::tile_by(scale.factor, from, tile, lane, [&](bool inside, int index, const Vec16& codes) {
            for (uint32 rest = targets; rest != 0; rest &= rest - 1) {
                auto* to = reinterpret_cast<unsigned char*>(of_lane(target, rest));
                if (inside) Stores::store(to + index * Row::kLaneValues, codes);
            }
        });
}
