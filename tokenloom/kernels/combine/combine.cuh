// Combine: partial sums go home, one row per (token, rank), and are added there in ascending rank.
//
//   all blocks       wait until all ranks have begun this combine, so that their buffers are free
//   pushing blocks   stream chunks of rows into their home ranks' buffers, and raise the chunk's flag there
//   summing blocks   take this rank's tokens in order, wait for the chunks that hold their partial sums, add them
//   last block out   advances the epoch
//
// A chunk is kChunkRows consecutive rows of one (expert rank, home rank) pair, so home can start long before the
// last row is sent. README.md has the protocol.
#pragma once
#include "device/pipe/row_stream.cuh"
#include "device/pipe/sum_stream.cuh"
#include "device/sync/call.cuh"

struct CombineArgs {
    Call call;
    const void* y;             // rows in the dispatch's layout
    const int32* row_places;   // [R][K] place of each route of a received row (layout expert)
    const float* row_weights;  // [R][K], or null: unweighted (layout expert)
    const int32* slots;        // [T][W], from the dispatch: which of the rows that went to rank r, or -1
    const int32* all_counts;   // [W][W + E], from the dispatch
    void* out;                 // [T] rows of Shape::out_dtype
    uint64 chunk_flags;        // in the control buffer: uint32 [W][Shape::max_chunks]: this chunk of rank r is here
    const uint64* peers;       // the data buffers
    uint64 home;               // [M * min(W, K)] rows of Shape::wire_dtype, sorted by expert rank, then token
    int32 num_tokens;
    int32 max_tokens;   // M
    int32 capacity;     // rows of y; what lies beyond was dropped
    int32 push_blocks;  // the first so many blocks push, the others sum
};

constexpr int kChunkRows = 16;

template <class Shape>
struct CombineShared {
    static constexpr int kWarps = Shape::threads / 32;
    static constexpr int kWireBytes = Shape::hidden * kValueBytes<Shape::wire_dtype>;
    static constexpr int kRouteTerms = Shape::layout == kLayoutExpert ? Shape::top_k : 1;
    using Copy = RowStream<kWireBytes, Shape::copy_stage_bytes, Shape::copy_stages>;
    using RouteSum = SumStream<Shape::y_dtype, Shape::hidden, Shape::group, Shape::y_stage_bytes, Shape::sum_stages,
                               kRouteTerms>;
    using RankSum = SumStream<Shape::wire_dtype, Shape::hidden, Shape::group, Shape::wire_stage_bytes,
                              Shape::sum_stages, Shape::num_ranks>;
    static_assert(RouteSum::kSegments == RankSum::kSegments, "segments hold the same values in both dtypes");

    struct CopyRole {
        typename Copy::Shared ring[kWarps];
        alignas(8) uint64 loaded[kWarps][Shape::copy_stages];
    };
    struct RouteSumRole {
        typename RouteSum::Shared ring[kWarps];
        alignas(128) unsigned char out[kWarps][2][Shape::wire_stage_bytes];  // sums on their way home
    };
    union {  // a block has one role: it pushes rows as they are, or pushes sums of routes, or sums what arrives
        CopyRole copy;
        RouteSumRole route_sum;
        typename RankSum::Shared rank_sum[kWarps];
    };
    int32 received_base[Shape::num_ranks];  // first received row that came from rank s
    int32 received[Shape::num_ranks];       // how many did
    int32 home_base[Shape::num_ranks];      // where this rank's rows begin in the buffer of home rank s
    int32 own_base[Shape::num_ranks];       // where rank r's rows begin in this rank's buffer
};

template <class Shape>
__device__ void find_bases(const CombineArgs& args, CombineShared<Shape>& shared) {
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    if (threadIdx.x < Shape::num_ranks) {
        const int i = threadIdx.x;
        int32 received = 0, home = 0, own = 0;
        for (int s = 0; s < i; ++s) {
            received += args.all_counts[s * kCounts + args.call.rank];
            own += args.all_counts[args.call.rank * kCounts + s];
        }
        for (int r = 0; r < args.call.rank; ++r) home += args.all_counts[i * kCounts + r];
        shared.received_base[i] = received;
        shared.received[i] = args.all_counts[i * kCounts + args.call.rank];
        shared.home_base[i] = home;
        shared.own_base[i] = own;
    }
    __syncthreads();
}

// The rows of one chunk, home, just as they are in y.
template <class Shape>
__device__ void push_copies(const CombineArgs& args, typename CombineShared<Shape>::Copy& stream, int64 row,
                            int32 num_rows, unsigned char* to) {
    constexpr int kRowBytes = CombineShared<Shape>::kWireBytes;
    const auto* from = static_cast<const unsigned char*>(args.y) + row * kRowBytes;
    const int32 kept = static_cast<int32>(max(0ll, min(static_cast<int64>(num_rows), args.capacity - row)));
    stream.run(
        kept, [&](int i) { return from + static_cast<int64>(i) * kRowBytes; },
        to, [&](int i) { return stream.lane == 0 ? static_cast<int64>(i) * kRowBytes : stream.kNowhere; });
    // Rows that the dispatch dropped come home as NaN. All bits but the sign set is NaN in every dtype.
    constexpr uint32 kNan = Shape::wire_dtype == kFloat32 ? 0x7fffffffu : 0x7fff7fffu;
    for (int64 at = kept * static_cast<int64>(kRowBytes) + stream.lane * 16; at < num_rows * static_cast<int64>(kRowBytes);
         at += 32 * 16)
        store_16(to + at, Vec16{{kNan, kNan, kNan, kNan}});
}

// The rows of one chunk, home, as sums over the routes of each received row, or converted to the wire's dtype.
template <class Shape>
__device__ void push_sums(const CombineArgs& args, typename CombineShared<Shape>::RouteSum& stream,
                          unsigned char (*out)[Shape::wire_stage_bytes], int64 row, int32 num_rows, unsigned char* to) {
    constexpr int kRowBytes = Shape::hidden * kValueBytes<Shape::y_dtype>;
    constexpr int kWireGroupBytes = Shape::group * kValueBytes<Shape::wire_dtype>;
    using RouteSum = typename CombineShared<Shape>::RouteSum;
    const int lane = stream.lane;
    const auto* y = static_cast<const unsigned char*>(args.y);
    int buffer = 0;
    stream.run(
        num_rows,
        [&](int i, const unsigned char*& term, float& weight, bool& dropped) {
            int64 place = -1;
            if (Shape::layout != kLayoutExpert) {
                if (lane == 0) place = row + i;
            } else if (lane < Shape::top_k) {
                const int64 route = (row + i) * Shape::top_k + lane;
                place = args.row_places[route];
                if (args.row_weights != nullptr) weight = args.row_weights[route];
            }
            dropped = place >= args.capacity;
            if (place >= 0 && !dropped) term = y + place * kRowBytes;
            return true;
        },
        [&](int, int, int lane_group, const Group<Shape::group>& sum) {
            store_group<Shape::wire_dtype>(out[buffer] + (lane + 32 * lane_group) * kWireGroupBytes, sum);
        },
        [&](int i, int segment) {
            fence_shared_to_bulk();
            __syncwarp();
            if (lane == 0) {
                bulk_store(to + static_cast<int64>(i) * CombineShared<Shape>::kWireBytes +
                               segment * Shape::wire_stage_bytes,
                           out[buffer], RouteSum::segment_groups(segment) * kWireGroupBytes);
                bulk_commit();
                bulk_wait_read<1>();  // the other buffer is free
            }
            __syncwarp();
            buffer ^= 1;
        });
}

// One warp takes chunk after chunk, home ranks in turn so that all links are busy. `push(row, num_rows, to)` sends
// the rows of a chunk; the leader issues their bulk stores, so it can say when they have arrived.
template <class Shape, class Push>
__device__ void push_chunks(const CombineArgs& args, const CombineShared<Shape>& shared, uint32 epoch, Push push) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32 most = 0;
    for (int s = 0; s < Shape::num_ranks; ++s) most = max(most, shared.received[s]);
    const int32 num_items = (most + kChunkRows - 1) / kChunkRows * Shape::num_ranks;
    const int32 stride = args.push_blocks * CombineShared<Shape>::kWarps;
    for (int32 item = warp * args.push_blocks + blockIdx.x; item < num_items; item += stride) {
        const int32 chunk = item / Shape::num_ranks;
        const int home = (item + args.call.rank) % Shape::num_ranks;
        const int32 begin = chunk * kChunkRows, end = min(begin + kChunkRows, shared.received[home]);
        if (begin >= end) continue;
        const int64 row = Shape::layout == kLayoutRank ? static_cast<int64>(home) * args.max_tokens + begin
                                                       : shared.received_base[home] + begin;
        push(row, end - begin,
             at_peer<unsigned char>(args.peers, home, args.home) +
                 static_cast<int64>(shared.home_base[home] + begin) * CombineShared<Shape>::kWireBytes);
        if (lane == 0) bulk_wait_written<0>();
        __syncwarp();  // the other lanes' ordinary stores come before the leader's release
        if (lane == 0)
            store_release_sys(at_peer<uint32>(args.call.peers, home, args.chunk_flags) +
                                  args.call.rank * Shape::max_chunks + chunk,
                              epoch);
        __syncwarp();
    }
}

// One warp takes token after token: wait for its partial sums, add them in ascending rank, round once.
template <class Shape>
__device__ void sum_partials(const CombineArgs& args, CombineShared<Shape>& shared, uint32 epoch) {
    using RankSum = typename CombineShared<Shape>::RankSum;
    constexpr int kGroupBytes = Shape::group * kValueBytes<Shape::out_dtype>;
    constexpr int64 kOutBytes = static_cast<int64>(Shape::hidden) * kValueBytes<Shape::out_dtype>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Deadline deadline{args.call.fault, args.call.fault_claimed, args.call.timeout_ns};
    const auto* flags = at_peer<const uint32>(args.call.peers, args.call.rank, args.chunk_flags);
    const auto* home = at_peer<const unsigned char>(args.peers, args.call.rank, args.home);
    auto* out = static_cast<unsigned char*>(args.out);
    const int32 first = (blockIdx.x - args.push_blocks) * CombineShared<Shape>::kWarps + warp;
    const int32 stride = (gridDim.x - args.push_blocks) * CombineShared<Shape>::kWarps;
    int32 known_chunk = -1;  // lane r: the last chunk of rank r that is known to be here
    RankSum stream(shared.rank_sum[warp], lane);
    stream.run(
        first < args.num_tokens ? (args.num_tokens - first + stride - 1) / stride : 0,
        [&](int i, const unsigned char*& term, float&, bool&) {
            const int64 token = first + static_cast<int64>(i) * stride;
            const int32 slot = lane < Shape::num_ranks ? args.slots[token * Shape::num_ranks + lane] : -1;
            bool here = true;
            if (slot >= 0) {
                const int32 chunk = slot / kChunkRows;
                if (chunk != known_chunk)
                    here = wait_for_flag(flags + lane * Shape::max_chunks + chunk, epoch, deadline, lane,
                                         kPhasePartials);
                known_chunk = chunk;
                term = home + static_cast<int64>(shared.own_base[lane] + slot) * CombineShared<Shape>::kWireBytes;
            }
            const bool all_here = __all_sync(~0u, here);
            __syncwarp();
            fence_global_to_bulk();  // what lane r acquired, the leader's bulk loads may read
            return all_here;
        },
        [&](int i, int segment, int lane_group, const Group<Shape::group>& sum) {
            const int64 token = first + static_cast<int64>(i) * stride;
            store_group<Shape::out_dtype>(
                out + token * kOutBytes + (segment * RankSum::kSegmentGroups + lane + 32 * lane_group) * kGroupBytes,
                sum);
        },
        [](int, int) {});
}

template <class Shape>
__device__ void combine(const CombineArgs& args) {
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(CombineShared<Shape>) <= Shape::shared_bytes, "launch.py asks for the shared memory that this needs");
    auto& shared = *reinterpret_cast<CombineShared<Shape>*>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32 epoch = *args.call.epoch + 1;
    constexpr int kCounts = Shape::num_ranks + Shape::num_experts;
    if (blockIdx.x == 0)
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, epoch, 0, [](int) { return 0; });
    const bool pushes = blockIdx.x < args.push_blocks;
    if (!pushes) CombineShared<Shape>::RankSum::init(shared.rank_sum[warp], lane);
    else if (!Shape::copies_rows) CombineShared<Shape>::RouteSum::init(shared.route_sum.ring[warp], lane);
    else if (lane < Shape::copy_stages) mbarrier_init(&shared.copy.loaded[warp][lane], 1);
    mbarrier_init_fence();
    find_bases<Shape>(args, shared);
    const Opened opened = await_call<Shape::num_ranks, kCounts>(args.call, epoch);
    if (opened == Opened::kExpired) return;
    if (opened == Opened::kRefused) return close_call(args.call, epoch);
    if (!pushes) {
        sum_partials<Shape>(args, shared, epoch);
    } else if constexpr (Shape::copies_rows != 0) {
        typename CombineShared<Shape>::Copy stream(shared.copy.ring[warp], shared.copy.loaded[warp], lane);
        push_chunks<Shape>(args, shared, epoch, [&](int64 row, int32 num_rows, unsigned char* to) {
            push_copies<Shape>(args, stream, row, num_rows, to);
        });
    } else {
        typename CombineShared<Shape>::RouteSum stream(shared.route_sum.ring[warp], lane);
        push_chunks<Shape>(args, shared, epoch, [&](int64 row, int32 num_rows, unsigned char* to) {
            push_sums<Shape>(args, stream, shared.route_sum.out[warp], row, num_rows, to);
        });
    }
    close_call(args.call, epoch);
}
