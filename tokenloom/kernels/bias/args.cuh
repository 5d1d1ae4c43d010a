// Biases of the second GEMM of an expert, on rows grouped by expert: the arguments of both directions.
#pragma once
#include "device/tile/expert_of_row.cuh"
#include "device/tile/rows.cuh"

struct BiasArgs {
    void* rows;             // [rows] of H: results, or their gradient
    const void* bias;       // [experts] of H
    float* weights;         // [rows]: factors of the bias, or sums to add to
    const int32* ends;      // [experts] the end of each one's rows
    const int32* num_rows;  // [1] rows in use, the last end; others are neither read nor written
};

// A row of H values in groups of 16 bytes, one for each lane and step, with up to kMostSteps steps in flight.
template <class Shape, int kMostSteps = 8>
struct BiasRow {
    static constexpr int kDtype = Shape::dtype, kValues = 16 / kValueBytes<kDtype>;
    static constexpr int64 kBytes = static_cast<int64>(Shape::hidden) * kValueBytes<kDtype>;
    using Row = Tiles<Shape::hidden / kValues, kMostSteps>;
    using Packed = PackedGroup<kDtype, kValues>;
    using Values = Group<kValues>;

    static __device__ __forceinline__ Packed load(const unsigned char* row, int index) {
        return load_group_once<kDtype, kValues>(row + index * 16);
    }
    // From caches: rows of one expert follow each other.
    static __device__ __forceinline__ Values bias(const unsigned char* row, int index) {
        return unpack(Packed{{reinterpret_cast<const Vec16*>(row)[index]}});
    }
};
