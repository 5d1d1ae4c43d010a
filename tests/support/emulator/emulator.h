// CUDA as far as tokenloom's kernels use it, for the host's compiler. Every thread of every block is a
// fiber; emulator.cpp runs them in a random order. Names are CUDA's, so sources of kernels compile unchanged.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

using std::max;
using std::min;
inline unsigned min(unsigned a, int b) { return std::min(a, static_cast<unsigned>(b)); }

#define __device__
#define __forceinline__ inline
#define __align__(n) alignas(n)

struct Index {
    unsigned x;
};

extern "C" {
Index emulated_thread();
Index emulated_block();
Index emulated_grid();
unsigned char* emulated_shared();               // dynamic shared memory of this block
void* emulated_static(int key, size_t bytes);   // static shared memory of this block
void emulated_yield();                          // others may run
uint64_t emulated_clock();
uint64_t emulated_chance();                     // any number
// All lanes of the warp meet; slots are what each of them brought.
const uint64_t* emulated_meet(uint64_t value);
// All threads of the block meet; how many of them there are, and for how many the predicate is true.
void emulated_block_barrier(int predicate, int* threads, int* count);
// Asynchronous copies. They happen some time, in any order; `read_only_source` none: loads complete a barrier.
void emulated_bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
void emulated_bulk_store(void* to, const void* from, uint32_t bytes);
// A load of many pieces, which completes a barrier once.
struct Piece {
    void* to;
    const void* from;
    size_t size;
};
void emulated_load_pieces(const Piece* pieces, size_t count, uint64_t* barrier);
// Clusters: this block's number in its own, the dynamic shared memory of its blocks, and a meeting of all their threads.
unsigned emulated_cluster_rank();
unsigned char* emulated_shared_of(unsigned rank);
void emulated_cluster_barrier();
// A barrier of some threads of the block, by its number.
void emulated_named_barrier(int barrier, int threads);
void emulated_copy(void* to, const void* from, uint32_t bytes);
// Groups of this thread: 0 of bulk stores, 1 of its own copies.
void emulated_commit(int kind);
void emulated_wait(int kind, int pending, int written);
void emulated_barrier_init(uint64_t* barrier, uint32_t arrivals);
void emulated_barrier_expect(uint64_t* barrier, uint32_t bytes);
void emulated_barrier_wait(uint64_t* barrier, uint32_t parity);
// d[2][32] += rows[2][32 values] * columns[32][32 values]^T, of E4M3. Decoded columns are kept at a place, for who
// brings the same ones there next.
void emulated_product(float (*d)[32], const unsigned char (*rows)[32], const unsigned char (*columns)[32],
                      unsigned place);
}

#define threadIdx (emulated_thread())
#define blockIdx (emulated_block())
#define gridDim (emulated_grid())

struct uint2 {
    unsigned x, y;
};
struct float2 {
    float x, y;
};

template <class T>
inline uint64_t emulated_bits(T value) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
inline T emulated_value(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

inline void __syncthreads() {
    int threads, count;
    emulated_block_barrier(0, &threads, &count);
}
inline int __syncthreads_and(int predicate) {
    int threads, count;
    emulated_block_barrier(predicate != 0, &threads, &count);
    return threads == count;
}
inline int __syncthreads_or(int predicate) {
    int threads, count;
    emulated_block_barrier(predicate != 0, &threads, &count);
    return count != 0;
}

inline void __syncwarp() { emulated_meet(0); }

template <class T>
inline T __shfl_sync(unsigned, T value, int lane) {
    return emulated_value<T>(emulated_meet(emulated_bits(value))[lane & 31]);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
    const int lane = emulated_thread().x % 32;
    return emulated_value<T>(emulated_meet(emulated_bits(value))[lane ^ mask]);
}
template <class T>
inline T __shfl_up_sync(unsigned, T value, unsigned distance) {
    const unsigned lane = emulated_thread().x % 32;
    const uint64_t* all = emulated_meet(emulated_bits(value));
    return lane < distance ? value : emulated_value<T>(all[lane - distance]);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    const uint64_t* all = emulated_meet(predicate != 0);
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(all[lane]) << lane;
    return mask;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate == 0) == 0; }
template <class T>
inline unsigned __match_any_sync(unsigned, T value) {
    const uint64_t* all = emulated_meet(emulated_bits(value));
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(all[lane] == emulated_bits(value)) << lane;
    return mask;
}

inline int __reduce_add_sync(unsigned, int value) {
    const uint64_t* all = emulated_meet(emulated_bits(value));
    unsigned sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += emulated_value<unsigned>(all[lane]);
    return static_cast<int>(sum);
}
inline int __reduce_max_sync(unsigned, int value) {
    const uint64_t* all = emulated_meet(emulated_bits(value));
    for (int lane = 0; lane < 32; ++lane) value = max(value, emulated_value<int>(all[lane]));
    return value;
}
inline int __reduce_min_sync(unsigned mask, int value) { return ~__reduce_max_sync(mask, ~value); }

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(unsigned word) { return __builtin_ffs(static_cast<int>(word)); }
inline int __ffsll(unsigned long long word) { return __builtin_ffsll(static_cast<long long>(word)); }
inline int __clz(int word) { return word == 0 ? 32 : __builtin_clz(static_cast<unsigned>(word)); }
inline float __uint_as_float(unsigned word) { return emulated_value<float>(word); }
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(emulated_bits(value)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
template <class T>
inline T atomicAdd(T* address, T value) {
    const T before = *address;
    *address = before + value;
    return before;
}

template <class T>
inline T atomicMax(T* address, T value) {
    const T before = *address;
    *address = std::max(before, value);
    return before;
}

// What the instructions of asm statements do; emulator.py puts calls in their places.
inline unsigned ptx_prmt_b32(unsigned low, unsigned high, unsigned select) {
    const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    unsigned found = 0;
    for (unsigned i = 0; i < 4; ++i) found |= static_cast<unsigned>(bytes >> (select >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return found;
}
inline float ptx_div_rn_f32(float a, float b) { return a / b; }
inline float ptx_div_full_f32(float a, float b) { return a / b; }
inline float ptx_min_NaN_f32(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::min(a, b); }
inline float ptx_max_NaN_f32(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }
inline float ptx_cvt_f32_f16(uint16_t bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::ldexp(static_cast<float>(fraction | 1024), static_cast<int>(exponent) - 25);
    return sign != 0 ? -magnitude : magnitude;
}
// To a float with so many bits of fraction and such a least exponent, to nearest even; as its code without a sign.
inline unsigned emulated_round(float magnitude, int fraction_bits, int least_exponent) {
    int exponent;
    if (magnitude == 0.0f) return 0;
    std::frexp(magnitude, &exponent);  // magnitude = f * 2^exponent, f in [0.5, 1)
    exponent = std::max(exponent - 1, least_exponent);
    const double scaled = std::ldexp(static_cast<double>(magnitude), fraction_bits - exponent);
    const auto rounded = static_cast<unsigned>(std::nearbyint(scaled));
    return rounded + (static_cast<unsigned>(exponent - least_exponent) << fraction_bits);
}
inline unsigned emulated_bfloat16(float value) {
    unsigned bits = __float_as_uint(value);
    if (std::isnan(value)) return 0x7fff;
    bits += 0x7fff + (bits >> 16 & 1);
    return bits >> 16;
}
inline unsigned emulated_float16(float value) {
    if (std::isnan(value)) return 0x7fff;
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000u;
    if (std::fabs(value) >= 65520.0f) return sign | 0x7c00;
    return sign | emulated_round(std::fabs(value), 10, -14);
}
inline unsigned emulated_e4m3(float value) {
    if (std::isnan(value)) return 0x7f;
    const unsigned sign = __float_as_uint(value) >> 24 & 0x80u;
    if (std::fabs(value) >= 448.0f) return sign | 0x7e;
    return sign | emulated_round(std::fabs(value), 3, -6);
}
inline unsigned ptx_cvt_rn_bf16x2_f32(float high, float low) {
    return emulated_bfloat16(high) << 16 | emulated_bfloat16(low);
}
inline unsigned ptx_cvt_rn_f16x2_f32(float high, float low) {
    return emulated_float16(high) << 16 | emulated_float16(low);
}
inline uint16_t ptx_cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
    return static_cast<uint16_t>(emulated_e4m3(high) << 8 | emulated_e4m3(low));
}
