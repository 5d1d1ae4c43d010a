// A warp adds rows in a fixed order: it streams the terms of one sum after another through its own ring of stages.
//
// Rows are cut into segments of one stage. For each sum, segment by segment, the terms arrive in ascending order and
// are added in registers, each product and each addition rounded by itself. The leader loads ahead, across sums.
#pragma once
#include "device/ptx/bulk.cuh"
#include "device/tile/values.cuh"

template <int kDtype, int kHidden, int kGroupValues, int kStageBytes, int kStages, int kMaxTerms>
struct SumStream {
    static constexpr int kRowBytes = kHidden * kValueBytes<kDtype>;
    static constexpr int kSegments = (kRowBytes + kStageBytes - 1) / kStageBytes;
    static constexpr int kGroupBytes = kGroupValues * kValueBytes<kDtype>;
    static constexpr int kSegmentGroups = kStageBytes / kGroupBytes;
    static constexpr int kLaneGroups = (kSegmentGroups + 31) / 32;
    static constexpr int kSums = kStages + 1;  // sums that are described at once
    static_assert(kStageBytes % kGroupBytes == 0, "a stage holds whole groups");

    struct Terms {
        int32 count;  // 0: the sum is zero; kNotANumber: it is NaN
        float weight[kMaxTerms];
        const unsigned char* row[kMaxTerms];
    };
    static constexpr int32 kNotANumber = -1;

    struct Shared {
        alignas(128) unsigned char stage[kStages][kStageBytes];
        alignas(8) uint64 loaded[kStages];
        Terms terms[kSums];
    };

    Shared& shared;
    uint32 num_issued = 0, num_added = 0;  // segments of terms, over all calls
    int lane;

    __device__ SumStream(Shared& shared_, int lane_) : shared(shared_), lane(lane_) {}

    static __device__ void init(Shared& shared, int lane) {
        if (lane < kStages) mbarrier_init(&shared.loaded[lane], 1);
    }

    static __device__ constexpr int segment_groups(int segment) {
        return segment + 1 < kSegments ? kSegmentGroups : (kRowBytes - (kSegments - 1) * kStageBytes) / kGroupBytes;
    }

    // Sums 0..num_sums-1. All lanes call these together:
    //   describe(i, row, weight, dropped) -> bool   this lane's term of sum i (row is null for none), terms in the
    //                                               order of lanes; `dropped` if the sum is NaN; false ends the run
    //   emit(i, segment, lane_group, sum)           this lane's group `lane + 32 * lane_group` of a segment
    //   finish(i, segment)                          all groups of a segment were emitted
    template <class Describe, class Emit, class Finish>
    __device__ bool run(int num_sums, Describe describe, Emit emit, Finish finish) {
        Cursor next{0, 0, 0, false};
        int in_flight = 0;
        for (int i = 0; i < num_sums; ++i) {
            for (int segment = 0; segment < kSegments; ++segment) {
                while (in_flight < kStages && load_next(next, i, num_sums, describe, in_flight)) {
                }
                if (next.failed) return false;
                const Terms& terms = shared.terms[i % kSums];
                const int groups = segment_groups(segment);
                Group<kGroupValues> sum[kLaneGroups];
                const float start = terms.count == kNotANumber ? __uint_as_float(0x7fffffff) : 0.0f;
#pragma unroll
                for (int j = 0; j < kLaneGroups; ++j) sum[j] = filled_group<kGroupValues>(start);
                for (int term = 0; term < terms.count; ++term) {
                    const uint32 stage = num_added % kStages;
                    mbarrier_wait(&shared.loaded[stage], (num_added / kStages) & 1);
                    const float weight = terms.weight[term];
#pragma unroll
                    for (int j = 0; j < kLaneGroups; ++j) {
                        if (lane + 32 * j >= groups) continue;
                        auto value = load_group<kDtype, kGroupValues>(shared.stage[stage] +
                                                                      (lane + 32 * j) * kGroupBytes);
                        scale_group(value, weight);
                        if (term == 0) sum[j] = value;
                        else add_group(sum[j], value);
                    }
                    ++num_added;
                    --in_flight;
                    __syncwarp();  // all lanes have read the stage that the next load overwrites
                    load_next(next, i, num_sums, describe, in_flight);
                    if (next.failed) return false;
                }
#pragma unroll
                for (int j = 0; j < kLaneGroups; ++j)
                    if (lane + 32 * j < groups) emit(i, segment, j, sum[j]);
                finish(i, segment);
            }
        }
        return true;
    }

   private:
    struct Cursor {  // the next segment to load
        int sum, segment, term;
        bool failed;
    };

    // Loads the segment at the cursor, if there is one that may be described beside sum `current`.
    template <class Describe>
    __device__ bool load_next(Cursor& next, int current, int num_sums, Describe& describe, int& in_flight) {
        while (next.sum < num_sums && next.sum - current < kSums) {
            Terms& terms = shared.terms[next.sum % kSums];
            if (next.segment == 0 && next.term == 0 && !fill(terms, next.sum, describe)) {
                next.failed = true;
                return false;
            }
            if (terms.count > 0) {
                const uint32 stage = num_issued % kStages;
                if (lane == 0) {
                    const int bytes = segment_groups(next.segment) * kGroupBytes;
                    mbarrier_arrive_expect(&shared.loaded[stage], bytes);
                    bulk_load(shared.stage[stage], terms.row[next.term] + next.segment * kStageBytes, bytes,
                              &shared.loaded[stage]);
                }
                ++num_issued;
                ++in_flight;
                if (++next.term == terms.count) {
                    next.term = 0;
                    if (++next.segment == kSegments) {
                        next.segment = 0;
                        ++next.sum;
                    }
                }
                return true;
            }
            ++next.sum;  // nothing to load
        }
        return false;
    }

    template <class Describe>
    __device__ bool fill(Terms& terms, int i, Describe& describe) {
        const unsigned char* row = nullptr;
        float weight = 1.0f;
        bool dropped = false;
        __syncwarp();  // all lanes are done with the sum that was described here
        if (!describe(i, row, weight, dropped)) return false;
        const uint32 present = __ballot_sync(~0u, row != nullptr);
        const bool not_a_number = __any_sync(~0u, dropped);
        const int place = __popc(present & ((1u << lane) - 1));
        if (row != nullptr) {
            terms.row[place] = row;
            terms.weight[place] = weight;
        }
        if (lane == 0) terms.count = not_a_number ? kNotANumber : __popc(present);
        __syncwarp();
        return true;
    }
};
