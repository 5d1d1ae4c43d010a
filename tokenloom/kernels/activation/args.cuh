// SwiGLU between the two GEMMs of an expert: the arguments of both directions, and what both compute of a value.
#pragma once
#include "device/tile/rows.cuh"

struct SwigluArgs {
    const void* hidden;      // [rows] of I gates, then I ups
    const float* weights;    // [rows] factors of the activations
    const int32* num_rows;   // [1] rows in use; others are neither read nor written
    void* activations;       // [rows] of I, weighted and rounded
    const void* grad;        // backward: [rows] of I, the gradient of activations
    void* grad_hidden;       // backward: as hidden
    float* grad_weights;     // backward: [rows]
};

// A row of I values in groups of 16 bytes, one for each lane and step, with up to kMostSteps steps in flight.
template <class Shape, int kMostSteps>
struct SwigluRow {
    static constexpr int kDtype = Shape::dtype, kValues = 16 / kValueBytes<kDtype>;
    static constexpr int64 kBytes = static_cast<int64>(Shape::intermediate) * kValueBytes<kDtype>;
    using Row = Tiles<Shape::intermediate / kValues, kMostSteps>;
    using Packed = PackedGroup<kDtype, kValues>;
    using Values = Group<kValues>;

    static __device__ __forceinline__ Packed load(const unsigned char* row, int index) {
        return load_group_once<kDtype, kValues>(row + index * 16);
    }
    static __device__ __forceinline__ void store(unsigned char* row, int index, const Values& values) {
        store_group<kDtype, kValues>(row + index * 16, values);
    }
};

// Where results are rounded to 16 bits, the hardware's approximations: within a few units in the last place of float32.
template <int kDtype>
__device__ __forceinline__ float sigmoid(float x) {
    if constexpr (kDtype == kFloat32) return __fdiv_rn(1.0f, 1.0f + expf(-x));
    else return __fdividef(1.0f, 1.0f + __expf(-x));
}
