// Groups of values of one dtype, as floats: 16-byte loads and stores of global memory, rounded to nearest even.
#pragma once
#include "device/ptx/memory.cuh"

enum Dtype : int { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

template <int kDtype>
constexpr int kValueBytes = kDtype == kFloat32 ? 4 : 2;

// All bits but the sign set is NaN in every dtype.
template <int kDtype>
constexpr uint32 kNanWord = kDtype == kFloat32 ? 0x7fffffffu : 0x7fff7fffu;

__device__ __forceinline__ float bfloat16_to_float(uint32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float float16_to_float(uint32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16>(bits)));
    return value;
}

// Rounds two floats into one word, `low` in its lower half.
template <int kDtype>
__device__ __forceinline__ uint32 pack_pair(float low, float high) {
    uint32 word;
    if constexpr (kDtype == kBfloat16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <int kDtype>
__device__ __forceinline__ float2 unpack_pair(uint32 word) {
    if constexpr (kDtype == kBfloat16) return {bfloat16_to_float(word & 0xffff), __uint_as_float(word & 0xffff0000u)};
    else return {float16_to_float(word & 0xffff), float16_to_float(word >> 16)};
}

// Values that a lane handles at once: 8 or 16, or 4 of float32, as where a row is not a multiple of 8 values.
template <int kValues>
struct Group {
    float value[kValues];
};

// The same values as they lie in memory.
template <int kDtype, int kValues>
struct PackedGroup {
    static constexpr int kBytes = kValues * kValueBytes<kDtype>;
    static_assert(kBytes % 16 == 0, "a row is a multiple of 16 bytes");
    Vec16 part[kBytes / 16];
};

template <int kDtype, int kValues>
__device__ __forceinline__ PackedGroup<kDtype, kValues> load_group_once(const unsigned char* global) {
    PackedGroup<kDtype, kValues> packed;
#pragma unroll
    for (int i = 0; i < packed.kBytes / 16; ++i) packed.part[i] = load_16_once(global + 16 * i);
    return packed;
}

template <int kDtype, int kValues>
__device__ __forceinline__ Group<kValues> unpack(const PackedGroup<kDtype, kValues>& packed) {
    Group<kValues> group;
#pragma unroll
    for (int i = 0; i < packed.kBytes / 4; ++i) {
        const uint32 word = packed.part[i / 4].word[i % 4];
        if constexpr (kDtype == kFloat32) {
            group.value[i] = __uint_as_float(word);
        } else {
            const float2 pair = unpack_pair<kDtype>(word);
            group.value[2 * i] = pair.x;
            group.value[2 * i + 1] = pair.y;
        }
    }
    return group;
}

// Stores that a signal behind them announces, or a kernel's end.
struct PlainStores {
    static __device__ __forceinline__ void store(void* to, Vec16 v) { store_16(to, v); }
    static __device__ __forceinline__ void store(uint32* to, uint32 word) { *to = word; }
};

template <int kDtype, int kValues, class Stores = PlainStores>
__device__ __forceinline__ void store_group(unsigned char* global, const Group<kValues>& group) {
    PackedGroup<kDtype, kValues> packed;
#pragma unroll
    for (int i = 0; i < packed.kBytes / 4; ++i) {
        uint32& word = packed.part[i / 4].word[i % 4];
        if constexpr (kDtype == kFloat32) word = __float_as_uint(group.value[i]);
        else word = pack_pair<kDtype>(group.value[2 * i], group.value[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < packed.kBytes / 16; ++i) Stores::store(global + 16 * i, packed.part[i]);
}

// a + b and a * w, each result rounded by itself, as the semantics ask.
template <int kValues>
__device__ __forceinline__ void add_group(Group<kValues>& sum, const Group<kValues>& term) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum.value[i] = __fadd_rn(sum.value[i], term.value[i]);
}

template <int kValues>
__device__ __forceinline__ void scale_group(Group<kValues>& group, float weight) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) group.value[i] = __fmul_rn(group.value[i], weight);
}

template <int kValues>
__device__ __forceinline__ Group<kValues> filled_group(float value) {
    Group<kValues> group;
#pragma unroll
    for (int i = 0; i < kValues; ++i) group.value[i] = value;
    return group;
}
