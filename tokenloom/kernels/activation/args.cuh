// The activation between the two GEMMs of an expert: the arguments of both directions, and what both compute of a
// value.
#pragma once
#include "device/tile/activation.cuh"
#include "device/tile/expert_of_row.cuh"
#include "device/tile/rows.cuh"

struct ActivationArgs {
    const void* hidden;      // [rows] of I gates, then I ups; interleaved: in turns; not gated: of I values
    const float* weights;    // [rows] factors of the activations
    const int32* num_rows;   // [1] rows in use; others are neither read nor written
    void* activations;       // [rows] of I, weighted and rounded
    const void* grad;        // backward: [rows] of I, the gradient of activations
    void* grad_hidden;       // backward: as hidden
    float* grad_weights;     // backward: [rows]
    const void* bias;        // biased: [experts], each as a row of hidden
    const int32* ends;       // biased: [experts] the end of each one's rows; the last is num_rows
    float alpha;             // adjusted: as in Activation; limit is infinite where there is none
    float limit;
    float up_offset;
    int32 spare;
};

// A value of hidden, and what the product takes of it.
struct GateAndUp {
    float gate, up;
    bool gate_passes, up_passes;  // whether they have a gradient
};

// A row of I activations in groups of 16 bytes, one for each lane and step, with up to kMostSteps steps in flight, and
// the gates and ups that belong to them.
template <class Shape, int kMostSteps>
struct ActivationRow {
    static constexpr int kDtype = Shape::dtype, kValues = 16 / kValueBytes<kDtype>;
    static constexpr int64 kBytes = static_cast<int64>(Shape::intermediate) * kValueBytes<kDtype>;
    static constexpr int kParts = Shape::gated ? 2 : 1;
    static constexpr int64 kHiddenBytes = kParts * kBytes;
    static constexpr bool kFast = kDtype != kFloat32;  // where results are rounded to 16 bits anyway
    using Row = Tiles<Shape::intermediate / kValues, kMostSteps>;
    using Packed = PackedGroup<kDtype, kValues>;
    using Values = Group<kValues>;


    static __device__ __forceinline__ Packed load(const unsigned char* row, int index) {
        return load_group_once<kDtype, kValues>(row + index * 16);
    }
    // Groups of both parts in turns share sectors of 32 bytes: the second load finds in L1 what the first brought.
    static __device__ __forceinline__ Packed load_hidden(const unsigned char* row, int index) {
        if constexpr (Shape::interleaved) return Packed{{reinterpret_cast<const Vec16*>(row)[index]}};
        else return load(row, index);
    }
    static __device__ __forceinline__ void store(unsigned char* row, int index, const Values& values) {
        store_group<kDtype, kValues>(row + index * 16, values);
    }

    // Where the second part of a row of hidden begins, and how far apart groups of a part lie: all gates, then all ups,
    // or two groups of gates and ups in turns.
    static constexpr int64 kSecondPart = Shape::interleaved ? 16 : kBytes;
    static constexpr int kPitch = Shape::interleaved ? 2 : 1;

    static __device__ __forceinline__ Values second_part(const Values& first, const Packed& second) {
        if constexpr (Shape::gated) return unpack(second);
        else return first;
    }

    // Gates and ups of two parts, and back; one part without gates.
    static __device__ __forceinline__ void separate(Values& gate, Values& up) {
        if constexpr (Shape::interleaved) {
            const Values part[2] = {gate, up};
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                gate.value[i] = part[2 * i / kValues].value[2 * i % kValues];
                up.value[i] = part[2 * i / kValues].value[2 * i % kValues + 1];
            }
        }
    }
    static __device__ __forceinline__ void join(Values& gate, Values& up) {
        if constexpr (Shape::interleaved) {
            Values part[2];
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                part[2 * i / kValues].value[2 * i % kValues] = gate.value[i];
                part[2 * i / kValues].value[2 * i % kValues + 1] = up.value[i];
            }
            gate = part[0];
            up = part[1];
        }
    }

    // The bias that belongs to a group of both parts, from caches: rows of one expert follow each other.
    static __device__ __forceinline__ void add_bias(Values& first, Values& second, const unsigned char* bias,
                                                    int index) {
        if constexpr (Shape::biased) {
            const auto* from = reinterpret_cast<const Vec16*>(bias) + index * kPitch;
            add_group(first, unpack(Packed{{*from}}));
            if constexpr (Shape::gated) add_group(second, unpack(Packed{{from[kSecondPart / 16]}}));
        }
    }

    static __device__ __forceinline__ GateAndUp product_takes(const ActivationArgs& args, float gate, float up) {
        GateAndUp taken{gate, up, true, true};
        if constexpr (Shape::adjusted && Shape::gated) {
            taken.gate_passes = !(gate > args.limit);
            taken.up_passes = !(fabsf(up) > args.limit);
            if (!taken.gate_passes) taken.gate = args.limit;
            if (!taken.up_passes) taken.up = copysignf(args.limit, up);
            taken.up += args.up_offset;
        }
        return taken;
    }

    using Function = FunctionAt<Shape::function, kFast>;
    static __device__ __forceinline__ Function function(const ActivationArgs& args, float x) {
        return Function(x, Shape::adjusted ? args.alpha * x : x);
    }
};

// The bias that belongs to a row, for rows in ascending order.
template <class Row, bool kBiased>
struct BiasOfRow {
    const void* const& bias;
    ExpertOfRow expert;

    __device__ __forceinline__ const unsigned char* find(int64 row) {
        if constexpr (kBiased) return static_cast<const unsigned char*>(bias) + expert.find(row) * Row::kHiddenBytes;
        return nullptr;
    }
};
