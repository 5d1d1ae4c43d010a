// A warp streams rows from global memory, through its own ring of shared-memory stages, to up to 32 places each.
//
// Rows are cut into segments of at most one stage. The leader loads kAhead segments before the one that it stores to
// every lane's target, so that one load feeds all targets. Bulk groups belong to the thread that issues them: the
// leader commits one group a segment, empty or not, and counts segments by counting its groups. The stages that the
// newest kStoring groups read and those that the next kAhead loads fill are never the same.
#pragma once
#include "device/ptx/bulk.cuh"

template <int kRowBytes, int kStageBytes, int kStages>
struct RowStream {
    static constexpr int kSegments = (kRowBytes + kStageBytes - 1) / kStageBytes;
    static constexpr int kStoring = kStages / 2;
    static constexpr int kAhead = kStages - kStoring;
    static constexpr int kTags = kAhead + 3;
    static_assert(kRowBytes % 16 == 0 && kStageBytes % 16 == 0 && kStages >= 2, "bulk copies move 16-byte units");

    struct Shared {
        alignas(128) unsigned char stage[kStages][kStageBytes];
    };
    struct Control {
        alignas(8) uint64 loaded[kStages];
        uint64 tag[kTags];  // of the rows from next to store
        uint32 begun;       // segments of runs before
    };

    Shared& shared;
    Control& control;
    int lane;

    __device__ RowStream(Shared& shared_, Control& control_, int lane_)
        : shared(shared_), control(control_), lane(lane_) {}

    static __device__ void init(Control& control, int lane) {
        if (lane < kStages) mbarrier_init(&control.loaded[lane], 1);
        if (lane == 0) control.begun = 0;
    }

    static __device__ constexpr int segment_bytes(int segment) {
        return segment + 1 < kSegments ? kStageBytes : kRowBytes - (kSegments - 1) * kStageBytes;
    }

    // Stream all rows there are. All lanes call these together, rows in order:
    //   next(from, tag) -> bool   the next row's address and what to remember of it; false: there are no more
    //   ahead(tag)                target is asked for this row next: what it needs may be loaded
    //   target(tag) -> int64      this lane's address for the row, or kNowhere
    //   issued(row, tag)          the stores of row number `row` have been issued
    // Returns with stores still in flight: wait_for_all_but and finish wait. Before another run, finish.
    //
    // Addresses are numbers, not pointers that may be null: with `pointer != nullptr` here, warps whose lanes had no
    // target at all stored to address 0 (compute-sanitizer, NVRTC 13.0); with numbers not. The cause is not known.
    static constexpr int64 kNowhere = -1;
    template <class Next, class Ahead, class Target, class Issued>
    __device__ void run(Next next, Ahead ahead, Target target, Issued issued) {
        fence_global_to_bulk();  // stores may go where the flags of a call that has opened said there is room
        const uint32 begun = control.begun;
        Loader<Next> loader(*this, next, begun);
        for (int i = 0; i < kAhead; ++i) loader.load();
        uint64 tag = 0;
        int64 to = kNowhere;
        int segment = 0;
        uint32 row = 0, rows_ahead = 0;
        const auto look_ahead = [&](uint32 until) {
            if (rows_ahead == until || rows_ahead == loader.num_rows) return;
            ahead(control.tag[rows_ahead++ % kTags]);
        };
        look_ahead(1);
        for (uint32 stored = begun; stored != loader.num_loads; ++stored) {
            if (segment == 0) {
                tag = control.tag[row % kTags];
                to = target(tag);
            }
            look_ahead(row + 2);
            const uint32 stage = stored % kStages;
            mbarrier_wait(&control.loaded[stage], (stored / kStages) & 1);
            for (uint32 storing = __ballot_sync(~0u, to >= 0); storing != 0; storing &= storing - 1) {
                const int64 address = __shfl_sync(~0u, to, __ffs(storing) - 1);
                if (lane == 0)
                    bulk_store(reinterpret_cast<unsigned char*>(address) + segment * kStageBytes, shared.stage[stage],
                               segment_bytes(segment));
            }
            if (lane == 0) {
                bulk_commit();
                bulk_wait_read<kStoring>();
            }
            __syncwarp();
            loader.load();
            if (++segment == kSegments) {
                issued(row, tag);
                segment = 0;
                ++row;
            }
        }
        if (lane == 0) control.begun = loader.num_loads;
    }

    // The stores of all rows but the newest kRows have arrived where they go, on this GPU or a peer.
    template <int kRows>
    __device__ void wait_for_all_but() {
        if (lane == 0) bulk_wait_written<kRows * kSegments>();
        __syncwarp();
    }

    __device__ void finish() { wait_for_all_but<0>(); }

   private:
    // Loads segment after segment. It has always asked for the row after those that are loaded to their ends.
    template <class Next>
    struct Loader {
        RowStream& stream;
        Next& next;
        uint32 num_loads;  // of all runs
        const unsigned char* from = nullptr;
        int segment = 0;
        uint32 num_rows = 0;  // that `next` has given
        bool more = true;

        __device__ Loader(RowStream& stream_, Next& next_, uint32 num_loads_)
            : stream(stream_), next(next_), num_loads(num_loads_) {
            find_next();
        }

        __device__ void find_next() {
            uint64 tag;
            more = next(from, tag);
            if (!more) return;
            if (stream.lane == 0) stream.control.tag[num_rows % kTags] = tag;
            ++num_rows;
            __syncwarp();
        }

        __device__ void load() {
            if (!more) return;
            const uint32 stage = num_loads % kStages;
            if (stream.lane == 0) {
                uint64* loaded = &stream.control.loaded[stage];
                mbarrier_arrive_expect(loaded, segment_bytes(segment));
                bulk_load(stream.shared.stage[stage], from + segment * kStageBytes, segment_bytes(segment), loaded);
            }
            ++num_loads;
            if (++segment == kSegments) {
                segment = 0;
                find_next();
            }
        }
    };
};
