// A warp streams rows from global memory, through its own ring of shared-memory stages, to up to 32 places each.
//
// Rows are cut into segments of at most one stage. The leader loads segment i + kAhead, then stores segment i to every
// lane's target, so that one load feeds all targets. Bulk groups belong to the thread that issues them: the leader
// commits one group a segment, empty or not, and counts segments by counting its groups.
#pragma once
#include "device/ptx/bulk.cuh"

template <int kRowBytes, int kStageBytes, int kStages>
struct RowStream {
    static constexpr int kSegments = (kRowBytes + kStageBytes - 1) / kStageBytes;
    static constexpr int kStoring = kStages / 2;         // newest segments whose stores may still read their stage
    static constexpr int kAhead = kStages - kStoring;    // segments that are being loaded
    static_assert(kRowBytes % 16 == 0 && kStageBytes % 16 == 0 && kStages >= 2, "bulk copies move 16-byte units");

    struct Shared {
        alignas(128) unsigned char stage[kStages][kStageBytes];
    };

    Shared& shared;
    uint64* loaded;     // [kStages] mbarriers, one arrival each
    uint32 num_issued;  // segments loaded so far, over all calls; stage and parity follow from it
    uint32 num_stored;
    int lane;

    __device__ RowStream(Shared& shared_, uint64* loaded_, int lane_)
        : shared(shared_), loaded(loaded_), num_issued(0), num_stored(0), lane(lane_) {}

    static __device__ constexpr int segment_bytes(int segment) {
        return segment + 1 < kSegments ? kStageBytes : kRowBytes - (kSegments - 1) * kStageBytes;
    }

    // Stream `num_rows` rows. `source(row)` is the address of a row; `target(row)` is this lane's place for it, in bytes
    // from this lane's `base`, or kNowhere. Returns with stores still in flight: finish() waits.
    //
    // Places are offsets, not pointers that may be null: with `pointer != nullptr` here, warps whose lanes had no target
    // at all stored to address 0 (compute-sanitizer, NVRTC 13.0). With offsets they do not; the cause is not known.
    static constexpr int64 kNowhere = -1;
    template <class Source, class Target>
    __device__ void run(int num_rows, Source source, unsigned char* base, Target target) {
        const int num_segments = num_rows * kSegments;
        int issued = 0;
        for (; issued < kAhead && issued < num_segments; ++issued) load(source, issued);
        int64 to = kNowhere;
        for (int i = 0; i < num_segments; ++i) {
            const int segment = i % kSegments;
            if (segment == 0) to = target(i / kSegments);
            const uint32 stage = num_stored % kStages;
            mbarrier_wait(&loaded[stage], (num_stored / kStages) & 1);
            const uint64 own_address = reinterpret_cast<uint64>(base) + to;
            for (uint32 storing = __ballot_sync(~0u, to >= 0); storing != 0; storing &= storing - 1) {
                const uint64 address = __shfl_sync(~0u, own_address, __ffs(storing) - 1);
                if (lane == 0)
                    bulk_store(reinterpret_cast<unsigned char*>(address) + segment * kStageBytes, shared.stage[stage],
                               segment_bytes(segment));
            }
            ++num_stored;
            if (lane == 0) {
                bulk_commit();
                bulk_wait_read<kStoring>();
            }
            __syncwarp();
            if (issued < num_segments) load(source, issued++);
        }
        if (lane == 0) bulk_wait_read<0>();
        __syncwarp();
    }

    // All stores have arrived where they go, on this GPU or a peer; the leader knows, a barrier tells the others.
    __device__ void finish() {
        if (lane == 0) bulk_wait_written<0>();
    }

   private:
    template <class Source>
    __device__ void load(Source source, int i) {
        const uint32 stage = num_issued % kStages;
        if (lane == 0) {
            const int segment = i % kSegments;
            const auto* from = static_cast<const unsigned char*>(source(i / kSegments)) + segment * kStageBytes;
            mbarrier_arrive_expect(&loaded[stage], segment_bytes(segment));
            bulk_load(shared.stage[stage], from, segment_bytes(segment), &loaded[stage]);
        }
        ++num_issued;
    }
};
