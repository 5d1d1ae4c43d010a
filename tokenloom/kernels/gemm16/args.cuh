// What a grouped GEMM of bfloat16 is given, and what a block keeps in shared memory.
#pragma once
#include "device/ptx/tensor.cuh"

struct Gemm16Args {
    TensorMap a;               // [rows, k], boxes of 64 values x 128 rows; of weights [rows, m], 64 x 64
    TensorMap b;               // [E, n, k], boxes of 64 x 128; across [E, k, n], of weights [rows, n], 64 x 64
    const int32* offsets;      // [E + 1] first row of each expert; device memory
    void* out;                 // [rows, n]; of weights [E, m, n]
    void* activations;         // with SwiGLU: [rows, n / 2]
    const float* row_weights;  // with SwiGLU: [rows]
    uint32* claimed;           // 0 when the kernel starts: items that clusters have taken
    int32 most_items;          // that a cluster takes before it leaves its SMs to whoever comes next
    int32 padding;
    uint64 spare[2];           // the maps make this a multiple of 64 bytes
};

constexpr int kGroups = 2, kGroupRows = 64;                      // math warpgroups, and the rows of each
constexpr int kTileRows = kGroups * kGroupRows, kTileColumns = 256;
constexpr int kHalves = 2, kHalfColumns = kTileColumns / kHalves;  // stored one after the other; SwiGLU: gates, ups
constexpr int kDepth = 64;                                       // values of the inner dimension at a time: 128 bytes
constexpr int kBoxBytes = 64 * 128;
constexpr int kMathWarps = 4 * kGroups, kWarpRows = 16;
constexpr int kItems = 2;                                        // that a cluster knows of

template <class Shape>
struct Gemm16Shared {
    static constexpr int kStageA = kTileRows * 128, kStageB = kTileColumns * 128;
    alignas(1024) unsigned char a[Shape::stages][kStageA];
    alignas(1024) unsigned char b[Shape::stages][kStageB];
    alignas(16) unsigned char out[kMathWarps][kWarpRows * kHalfColumns * 2];  // of a warp, on its way to memory
    alignas(8) uint64 full[Shape::stages];  // operands are here
    uint64 empty[Shape::stages];
    uint64 item_full[kItems];
    uint64 item_empty[kItems];
    int32 item[kItems];
    int32 offsets[Shape::num_experts + 1];
};

// The n-th use of a ring. Counted, not stepped: so the compiler sees that all threads of a role are at the same.
template <int kPlaces>
struct RingUse {
    int place;
    uint32 parity;
    __device__ __forceinline__ explicit RingUse(uint32 n) : place(n % kPlaces), parity(n / kPlaces & 1) {}
};
