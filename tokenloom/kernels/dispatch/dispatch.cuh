// Dispatch: every row goes straight to its final place on the ranks that hold its experts.
//
//   all blocks      count the routes before their chunk; the last block sends the totals to all ranks      (route.cuh)
//   all blocks      wait for all ranks' counts; go on only if all ranks mean the same call   (device/sync/call.cuh)
//   sending warps   take token after token: stream its row, or quantise it, to all of its destinations, with ids,
//                   weights and scales
//   layouts token, rank
//     all blocks    say so to all ranks; block 0 waits for all ranks' blocks
//   layout expert
//     telling warp  raises a flag per row that has been sent
//     filling warps clear the padding, then copy each row that arrives to the places of its further routes
//   last block out  advances the epoch
//
// README.md has the protocol and why it is safe to reuse the region.
#pragma once
#include "device/pipe/row_stream.cuh"
#include "device/sync/progress.cuh"
#include "device/tile/fp8.cuh"
#include "kernels/dispatch/route.cuh"

enum Quantize : int { kAsIs = 0, kToFp8 = 1, kToFp8PowerOfTwo = 2 };

template <class Shape>
struct DispatchShared {
    using Stream = RowStream<Shape::row_bytes, Shape::stage_bytes, Shape::stages>;
    static constexpr bool kStreams = Shape::quantize == kAsIs;
    static constexpr int kRings = kStreams ? Shape::send_warps : 1;
    union {
        typename Stream::Shared stream[kRings];
        RunningCounts<Shape> running;
    };
    typename Stream::Control control_of_stream[kRings];
    uint64 control[Shape::num_ranks];  // addresses of all ranks' control buffers,
    uint64 data[Shape::num_ranks];     // and of where they want what they receive: here they are read fast
    Progress<Shape::send_warps> progress;
    RouteShared<Shape> route;
};

// The routes of one token: lane k has the k-th.
struct TokenRoutes {
    int32 expert;      // -1: none
    int32 rank;        // that holds it
    int32 row;         // the token's row among those that the rank receives
    int32 place;       // of the route there
    float weight;
    uint32 same_rank;  // lanes with routes to that rank
    bool is_target;    // the row goes to this place: the first of its rank, and all places on this rank
};

template <class Shape>
__device__ __forceinline__ TokenRoutes routes_of(const DispatchArgs& args, const RouteShared<Shape>& route,
                                                 const int32* places, int64 token, int lane) {
    TokenRoutes routes{-1, -1, 0, -1, 0.0f, 0, false};
    const int64 index = token * Shape::top_k + lane;
    if (lane < Shape::top_k) {
        routes.expert = expert_of<Shape>(args, index);
        if (args.topk_weights != nullptr) routes.weight = args.topk_weights[index];
        if constexpr (Shape::layout == kLayoutExpert) routes.place = places[index];
        if (routes.expert >= 0) {
            routes.rank = routes.expert / Shape::experts_per_rank;
            routes.row = route.row_base[routes.rank] + args.slots[token * Shape::num_ranks + routes.rank];
            if constexpr (Shape::layout != kLayoutExpert) routes.place = routes.row;
        }
    }
    routes.same_rank = __match_any_sync(~0u, routes.rank);
    const bool fits = routes.place >= 0 && (Shape::layout == kLayoutRank || routes.place < args.capacity);
    const bool first = (routes.same_rank & __ballot_sync(~0u, fits) & ((1u << lane) - 1)) == 0;
    routes.is_target = fits && (first || (Shape::layout == kLayoutExpert && routes.rank == args.call.rank));
    return routes;
}

// Ids, weights, places and scales of a token's rows. The lanes share the work.
template <class Shape>
__device__ __forceinline__ void send_metadata(const DispatchArgs& args, const DispatchShared<Shape>& shared,
                                              const TokenRoutes& routes, int32 token, int lane) {
    const bool leads = routes.rank >= 0 && (routes.same_rank & ((1u << lane) - 1)) == 0;
    for (uint32 rest = __ballot_sync(~0u, leads); rest != 0; rest &= rest - 1) {
        const int32 rank = of_lane(routes.rank, rest), row = of_lane(routes.row, rest);
        if (Shape::layout == kLayoutToken && row >= args.capacity) continue;
        if (lane >= Shape::top_k) continue;
        const bool here = routes.rank == rank;
        const int64 to = static_cast<int64>(row) * Shape::top_k + lane;
        at_peer<int32>(shared.data, rank, args.row_ids)[to] = here ? routes.expert % Shape::experts_per_rank : -1;
        if (args.topk_weights != nullptr)
            at_peer<float>(shared.data, rank, args.row_weights)[to] = here ? routes.weight : 0.0f;
        if constexpr (Shape::layout == kLayoutExpert)
            at_peer<int32>(shared.data, rank, args.row_places)[to] = here ? routes.place : -1;
        if (Shape::layout != kLayoutRank && lane == 0) at_peer<int32>(shared.data, rank, args.row_tokens)[row] = token;
    }
    if constexpr (Shape::scales_per_row > 0 && Shape::quantize == kAsIs) {
        constexpr int kLaneScales = (Shape::scales_per_row + 31) / 32;
        const float* from = args.scales + static_cast<int64>(token) * Shape::scales_per_row;
        for (uint32 rest = __ballot_sync(~0u, routes.is_target); rest != 0; rest &= rest - 1) {
            float* to = at_peer<float>(shared.data, of_lane(routes.rank, rest), args.row_scales) +
                        static_cast<int64>(of_lane(routes.place, rest)) * Shape::scales_per_row;
#pragma unroll 4
            for (int i = 0; i < kLaneScales; ++i)
                if (lane + 32 * i < Shape::scales_per_row) to[lane + 32 * i] = from[lane + 32 * i];
        }
    }
}

// Block 0: the counts of this rank's output, clamped to the capacity so that they are safe to address it with.
template <class Shape>
__device__ void publish_counts(const DispatchArgs& args, const RouteShared<Shape>& route,
                               const AllCounts<Shape>& counts) {
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    const int32 clamp = Shape::layout == kLayoutToken ? args.capacity : 0x7fffffff;
    for (int i = threadIdx.x; i < Shape::num_ranks * kCounts; i += Shape::threads)
        args.all_counts[i] = counts.rows(i / kCounts, i % kCounts);
    for (int s = threadIdx.x; s < Shape::num_ranks; s += Shape::threads)
        args.source_counts[s] = min(route.received_base[s] + route.received[s], clamp) - min(route.received_base[s], clamp);
    const int32* routes = route.expert_total + args.call.rank * Shape::experts_per_rank;
    const auto padded = [&](int l) { return (routes[l] + args.alignment - 1) / args.alignment * args.alignment; };
    for (int l = threadIdx.x; l < Shape::experts_per_rank; l += Shape::threads) {
        int32 kept = routes[l];
        if constexpr (Shape::layout == kLayoutExpert) {
            int32 start = 0;
            for (int earlier = 0; earlier < l; ++earlier) start += padded(earlier);
            const int32 begin = min(start, args.capacity), end = min(start + padded(l), args.capacity);
            kept = min(kept, end - begin);
            args.expert_offsets[l] = begin;
            if (l + 1 == Shape::experts_per_rank) args.expert_offsets[l + 1] = end;
        }
        args.expert_counts[l] = kept;
    }
    if (threadIdx.x == 0) {
        int32 needed = 0;
        for (int r = 0; r < Shape::num_ranks; ++r) needed = max(needed, route.needed[r]);
        if (needed > args.capacity) {
            args.call.record->capacity = args.capacity;
            store_release_sys(&args.call.record->needed_rows, needed);
        }
        *args.num_rows = min(route.needed[args.call.rank], args.capacity);
    }
}

// The results of a dispatch that does not take place: no rows, here or elsewhere, so that nobody who goes on with them
// addresses anything.
template <class Shape>
__device__ void publish_nothing(const DispatchArgs& args) {
    const int64 thread = blockIdx.x * Shape::threads + threadIdx.x, stride = gridDim.x * Shape::threads;
    for (int64 i = thread; i < static_cast<int64>(args.num_tokens) * (Shape::num_ranks + Shape::top_k); i += stride)
        args.slots[i] = -1;
    for (int64 i = thread; i < Shape::num_ranks * RouteShared<Shape>::kCounts; i += stride) args.all_counts[i] = 0;
    for (int64 i = thread; i < Shape::num_ranks; i += stride) args.source_counts[i] = 0;
    for (int64 i = thread; i <= Shape::experts_per_rank; i += stride) {
        if (i < Shape::experts_per_rank) args.expert_counts[i] = 0;
        if (Shape::layout == kLayoutExpert) args.expert_offsets[i] = 0;
    }
    if (thread == 0) *args.num_rows = 0;
}

// The tokens that a sending warp takes: first one of its block's chunk, whose slots this block has found, then whatever
// is left of all chunks, once all blocks have found theirs.
template <class Shape>
struct TokenSource {
    const DispatchArgs& args;
    Claims claims;
    int32 own;      // the first token, or -1
    int32 size;     // of a chunk
    uint32 epoch;
    uint32 count = 0;
    bool expired = false;  // a block has left without finding its slots

    __device__ TokenSource(const DispatchArgs& args_, Chunk chunk, uint32 epoch_, int warp, int lane)
        : args(args_), claims(args_.call.claimed, lane), own(chunk.begin + warp), size(chunk_size(args_.num_tokens)),
          epoch(epoch_) {
        if (own >= chunk.end) own = -1;
    }

    __device__ bool next(int32& token) {
        token = own;
        own = -1;
        if (token >= 0) return true;
        const int32 rest = size - Shape::send_warps;  // of each chunk
        if (rest <= 0) return false;
        if (count++ == 0) {
            const auto* found = reinterpret_cast<const uint32*>(args.slots_found);
            const bool here = claims.lane >= gridDim.x ||
                              wait_for_block(found + claims.lane, epoch, deadline_of(args.call));
            expired = !__all_sync(~0u, here);
            __syncwarp();
            if (expired) return false;
        }
        const uint32 item = claims.take();
        token = item / rest * size + Shape::send_warps + item % rest;
        return token < args.num_tokens;
    }
};

// Layout expert: tells the other destinations of a token that its rows are here.
template <class Shape>
__device__ void raise_row_flags(const DispatchArgs& args, const DispatchShared<Shape>& shared, uint32 epoch,
                                int64 token) {
    for (int r = 0; r < Shape::num_ranks; ++r) {
        const int32 slot = args.slots[token * Shape::num_ranks + r];
        if (slot >= 0 && r != args.call.rank)
            store_relaxed_sys(at_peer<uint32>(shared.control, r, args.row_flags) + shared.route.row_base[r] + slot, epoch);
    }
}

// One sending warp. False: not all rows could be sent.
template <class Shape>
__device__ bool send_rows(const DispatchArgs& args, DispatchShared<Shape>& shared, const int32* places, Chunk chunk,
                          uint32 epoch, int warp, int lane) {
    using Stream = typename DispatchShared<Shape>::Stream;
    static_assert(Stream::kAhead + 4 < Progress<Shape::send_warps>::kRecent, "rows begun and not yet told");
    constexpr int kUnreported = 2;  // rows that are on their way when the one before them is reported
    constexpr bool kReports = Shape::layout == kLayoutExpert;
    TokenSource<Shape> tokens(args, chunk, epoch, warp, lane);
    TokenRoutes routes{};
    uint32 begun = 0;
    const auto row_of = [&](int64 token) {
        const int64 bytes = Shape::quantize == kAsIs ? Shape::row_bytes : Shape::hidden * kValueBytes<Shape::x_dtype>;
        return static_cast<const unsigned char*>(args.x) + token * bytes;
    };
    const auto begin = [&](int32& token) {
        if (!tokens.next(token)) return false;
        if (kReports) shared.progress.begin(warp, begun++, token, lane);
        return true;
    };
    const auto target = [&]() {  // this lane's address for the row, or nowhere
        if (!routes.is_target) return Stream::kNowhere;
        return static_cast<int64>(shared.data[routes.rank] + args.rows) +
               static_cast<int64>(routes.place) * Shape::row_bytes;
    };
    if constexpr (Shape::quantize == kAsIs) {
        Stream stream(shared.stream[warp], shared.control_of_stream[warp], lane);
        stream.run(
            [&](const unsigned char*& from, uint64& tag) {
                int32 token;
                if (!begin(token)) return false;
                tag = token;
                from = row_of(token);
                return true;
            },
            [&](uint64 token) {
                routes = routes_of<Shape>(args, shared.route, places, token, lane);
                send_metadata<Shape>(args, shared, routes, token, lane);
                return target();
            },
            [&](uint32 row, uint64) {
                if (!kReports || row < kUnreported) return;
                stream.template wait_for_all_but<kUnreported>();
                shared.progress.report(warp, row + 1 - kUnreported, lane);
            });
        stream.finish();
    } else {
        int32 token;
        for (uint32 row = 0; begin(token); ++row) {
            routes = routes_of<Shape>(args, shared.route, places, token, lane);
            send_metadata<Shape>(args, shared, routes, token, lane);
            const uint32 targets = __ballot_sync(~0u, routes.is_target);
            uint64 scales = 0;
            if (routes.is_target)
                scales = shared.data[routes.rank] + args.row_scales +
                         static_cast<int64>(routes.place) * Shape::scales_per_row * sizeof(float);
            quantize_row<Shape::x_dtype, Shape::hidden, Shape::quantize == kToFp8PowerOfTwo>(row_of(token), target(),
                                                                                           scales, targets, lane);
            if (kReports) shared.progress.report(warp, row + 1, lane);
        }
    }
    if (kReports) {
        shared.progress.report(warp, begun, lane);
        shared.progress.close(warp, lane);
    }
    return !tokens.expired;
}

// Layout expert: rows between a group's last route and the next group are zero.
template <class Shape>
__device__ void clear_padding(const DispatchArgs& args, const DispatchShared<Shape>& shared, int warp, int lane) {
    constexpr int kFillWarps = Shape::threads / 32 - Shape::send_warps - 1;
    auto* rows = at_peer<unsigned char>(shared.data, args.call.rank, args.rows);
    auto* scales = at_peer<float>(shared.data, args.call.rank, args.row_scales);
    int32 start = 0;
    for (int l = 0; l < Shape::experts_per_rank; ++l) {
        const int32 routes = shared.route.expert_total[args.call.rank * Shape::experts_per_rank + l];
        const int32 end = start + (routes + args.alignment - 1) / args.alignment * args.alignment;
        for (int32 place = start + routes + blockIdx.x * kFillWarps + warp; place < min(end, args.capacity);
             place += gridDim.x * kFillWarps) {
            fill_row<Shape::row_bytes>(rows + static_cast<int64>(place) * Shape::row_bytes, 0, lane);
            for (int i = lane; i < Shape::scales_per_row; i += 32)
                scales[static_cast<int64>(place) * Shape::scales_per_row + i] = 0.0f;
        }
        start = end;
    }
}

// Layout expert: every row from another rank that has several routes here goes to their places too, as soon as it has
// arrived. (Rows of this rank itself go to all of their places at once.)
// Warps take groups of rows in the order in which sources send them, sources in turn.
template <class Shape>
__device__ bool fill_further_places(const DispatchArgs& args, const DispatchShared<Shape>& shared, uint32 epoch,
                                    int warp, int lane) {
    constexpr int kFillWarps = Shape::threads / 32 - Shape::send_warps - 1;
    constexpr int kGroup = 32 / Shape::top_k;  // consecutive rows of one source, looked at together: lane (j, k)
    const Deadline deadline = deadline_of(args.call);
    const auto* flags = at_peer<const uint32>(shared.control, args.call.rank, args.row_flags);
    const auto* all_places = at_peer<const int32>(shared.data, args.call.rank, args.row_places);
    auto* rows = at_peer<unsigned char>(shared.data, args.call.rank, args.rows);
    auto* scales = at_peer<float>(shared.data, args.call.rank, args.row_scales);
    constexpr int kSources = Shape::num_ranks > 1 ? Shape::num_ranks - 1 : 1;
    const int in_group = lane / Shape::top_k;
    int32 longest = 0;
    for (int s = 0; s < Shape::num_ranks; ++s)
        if (s != args.call.rank) longest = max(longest, shared.route.received[s]);
    const int32 num_groups = (longest + kGroup - 1) / kGroup * (Shape::num_ranks - 1);
    Claims claims(args.call.claimed + 1, lane);
    for (int32 i = warp * gridDim.x + blockIdx.x; i < num_groups; i = gridDim.x * kFillWarps + claims.take()) {
        const int32 source = (args.call.rank + 1 + i % kSources) % Shape::num_ranks;
        const int32 in_source = i / kSources * kGroup + in_group;
        const int64 row = shared.route.received_base[source] + in_source;
        int32 place = -1;
        bool here = true;
        if (in_group < kGroup && in_source < shared.route.received[source]) {
            here = wait_for_flag(flags + row, epoch, deadline, source, kPhaseRows);
            if (here) place = all_places[row * Shape::top_k + lane % Shape::top_k];
        }
        if (!__all_sync(~0u, here)) return false;
        __syncwarp();
        const uint32 fitting = __ballot_sync(~0u, place >= 0 && place < args.capacity);
        for (int j = 0; j < kGroup; ++j) {
            const uint32 of_row = fitting & (0xffffffffu >> (32 - Shape::top_k)) << (j * Shape::top_k);
            const uint32 further = of_row & (of_row - 1);
            if (further == 0) continue;
            const int64 first = of_lane(place, of_row);
            copy_row<Shape::row_bytes>(rows + first * Shape::row_bytes,
                                       reinterpret_cast<uint64>(rows) + static_cast<int64>(place) * Shape::row_bytes,
                                       further, lane);
            if constexpr (Shape::scales_per_row > 0) {
                for (uint32 rest = further; rest != 0; rest &= rest - 1) {
                    const int64 to = of_lane(place, rest);
                    for (int c = lane; c < Shape::scales_per_row; c += 32)
                        scales[to * Shape::scales_per_row + c] = scales[first * Shape::scales_per_row + c];
                }
            }
        }
    }
    return true;
}

// Layouts token and rank: block 0 leaves when all rows are here.
template <class Shape>
__device__ bool wait_for_rows(const DispatchArgs& args, uint32 epoch, int32 blocks) {
    const Deadline deadline = deadline_of(args.call);
    const auto* flags = at_peer<const uint32>(args.call.peers, args.call.rank, args.done_flags);
    bool here = true;
    for (int i = threadIdx.x; i < Shape::num_ranks * blocks; i += Shape::threads) {
        const int peer = i / blocks, block = i % blocks;
        here = here && wait_for_flag(flags + peer * Shape::max_blocks + block, epoch, deadline, peer, kPhaseRows);
    }
    return __syncthreads_and(here);
}

template <class Shape>
__device__ void dispatch(const DispatchArgs& args) {
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(DispatchShared<Shape>) <= Shape::shared_bytes, "launch.py asks for the shared memory that this needs");
    auto& shared = *reinterpret_cast<DispatchShared<Shape>*>(memory);
    auto& route = shared.route;
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32 block = blockIdx.x, blocks = gridDim.x;
    const uint32 epoch = *args.call.epoch + 1;
    if (threadIdx.x == 0) mark(args.call, kBegun);
    if (__syncthreads_or(has_expired(deadline_of(args.call)))) return publish_nothing<Shape>(args);
    const Chunk chunk = chunk_of(args.num_tokens, block);

    if (warp == 0) shared.progress.clear(lane);
    if (warp < shared.kRings) DispatchShared<Shape>::Stream::init(shared.control_of_stream[warp], lane);
    if (threadIdx.x < Shape::num_ranks) {
        shared.control[threadIdx.x] = args.call.peers[threadIdx.x];
    }
    mbarrier_init_fence();
    if (!count_all_routes<Shape>(args, route, chunk, epoch)) return publish_nothing<Shape>(args);
    if (threadIdx.x == 0) mark(args.call, kCounted);
    if (block == blocks - 1) {
        for (int i = threadIdx.x; i < kCounts; i += Shape::threads)
            route.row[kHeaderWords + i] = route.before[i] + route.chunk[i];
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(args.call, epoch, kCounts, route.row);
    }
    const Opened opened = await_call<Shape::num_ranks, kCounts>(args.call, epoch);
    if (threadIdx.x == 0) mark(args.call, kHeard);
    if (opened != Opened::kGo) publish_nothing<Shape>(args);
    if (opened == Opened::kExpired) return;
    if (opened == Opened::kRefused) return close_call(args.call, epoch);

    const AllCounts<Shape> counts{at_peer<const int32>(args.call.peers, args.call.rank,
                                                       row_offset<Shape::num_ranks, kCounts>(args.call, epoch, 0)) +
                                  kHeaderWords};
    if (threadIdx.x < Shape::num_ranks)
        shared.data[threadIdx.x] = args.peers[threadIdx.x] + counts.region(threadIdx.x) * args.region_bytes;
    find_bases<Shape>(args, route, counts);
    if (block == 0) publish_counts<Shape>(args, route, counts);
    bool all_fit = true;
    for (int r = 0; r < Shape::num_ranks; ++r) all_fit = all_fit && route.needed[r] <= args.capacity;
    if (!all_fit && args.stop_on_overflow) return close_call(args.call, epoch);
    find_slots<Shape>(args, route, shared.running, chunk);
    int32* places = args.slots + static_cast<int64>(args.num_tokens) * Shape::num_ranks;
    if constexpr (Shape::layout == kLayoutExpert) find_places<Shape>(args, route, shared.running, chunk, places);
    fence_shared_to_bulk();  // the rings take over the memory of the running counts
    __syncthreads();
    if (threadIdx.x == 0) {
        store_release_gpu(reinterpret_cast<uint32*>(args.slots_found) + block, epoch);
        mark(args.call, kPlaced);
    }

    bool sent = true;
    if (warp < Shape::send_warps) {
        sent = send_rows<Shape>(args, shared, places, chunk, epoch, warp, lane);
        if (lane == 0) mark(args.call, kSent);
    } else if constexpr (Shape::layout == kLayoutExpert) {
        if (warp == Shape::send_warps) {
            shared.progress.watch(lane, [&](int32 token) { raise_row_flags<Shape>(args, shared, epoch, token); });
        } else {
            const int fill_warp = warp - Shape::send_warps - 1;
            clear_padding<Shape>(args, shared, fill_warp, lane);
            if (!fill_further_places<Shape>(args, shared, epoch, fill_warp, lane)) return;
            if (lane == 0) mark(args.call, kFilled);
        }
    }
    if constexpr (Shape::layout != kLayoutExpert) {
        if (!__syncthreads_and(sent)) return;
        if (threadIdx.x < Shape::num_ranks)
            store_release_sys(at_peer<uint32>(args.call.peers, threadIdx.x, args.done_flags) +
                                  args.call.rank * Shape::max_blocks + block,
                              epoch);
        if (threadIdx.x == 0) mark(args.call, kTold);
        if (block == 0 && !wait_for_rows<Shape>(args, epoch, blocks)) return;
    }
    if (threadIdx.x == 0) mark(args.call, kDone);
    close_call(args.call, epoch);
}
