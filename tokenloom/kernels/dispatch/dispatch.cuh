// Dispatch: every row goes straight to its final place on the ranks that hold its experts.
//
//   all blocks   count the routes before their chunk; the last block sends the totals to all ranks      (route.cuh)
//   all blocks   wait for all ranks' counts; go on only if all ranks mean the same call (device/sync/call.cuh)
//   all warps    stream their rows to all of their destinations, with ids, weights and scales
//   all blocks   say so to all ranks; wait for all ranks' blocks (layout expert), or block 0 does (others)
//   all warps    layout expert: copy rows to the places of their further routes, and clear the padding
//   last block   advances the epoch
//
// README.md has the protocol and why it is safe to reuse the region.
#pragma once
#include "device/pipe/row_stream.cuh"
#include "kernels/dispatch/route.cuh"

template <class Shape>
struct DispatchShared {
    static constexpr int kWarps = Shape::threads / 32;
    using Stream = RowStream<Shape::row_bytes, Shape::stage_bytes, Shape::stages>;
    typename Stream::Shared stream[kWarps];
    alignas(8) uint64 loaded[kWarps][Shape::stages];
    RouteShared<Shape> route;
};

// Place of the row (or -1) that token `token` sends to rank `lane`; lanes beyond W get -1.
template <class Shape>
__device__ __forceinline__ int32 row_place(const DispatchArgs& args, const RouteShared<Shape>& route,
                                           const int32* places, int32 token, int lane) {
    if (lane >= Shape::num_ranks) return -1;
    const int32 slot = args.slots[static_cast<int64>(token) * Shape::num_ranks + lane];
    if (slot < 0) return -1;
    if constexpr (Shape::layout == kLayoutExpert) {
        for (int k = 0; k < Shape::top_k; ++k) {  // the first route there that fits
            const int64 index = static_cast<int64>(token) * Shape::top_k + k;
            const int32 expert = expert_of<Shape>(args, index);
            if (expert >= 0 && expert / Shape::experts_per_rank == lane && places[index] < args.capacity)
                return places[index];
        }
        return -1;
    } else {
        const int32 place = route.row_base[lane] + slot;
        return Shape::layout == kLayoutRank || place < args.capacity ? place : -1;
    }
}

// Ids, weights, places and scales of a token's rows. The lanes share the work.
template <class Shape>
__device__ void send_metadata(const DispatchArgs& args, const RouteShared<Shape>& route, const int32* places,
                              int32 token, int lane) {
    const int64 index = static_cast<int64>(token) * Shape::top_k + lane;
    const int32 expert = lane < Shape::top_k ? expert_of<Shape>(args, index) : -1;
    const float weight = expert >= 0 && args.topk_weights != nullptr ? args.topk_weights[index] : 0.0f;
    const int32 own_row = lane < Shape::num_ranks
                              ? args.slots[static_cast<int64>(token) * Shape::num_ranks + lane]
                              : -1;
    for (int r = 0; r < Shape::num_ranks; ++r) {
        const int32 slot = __shfl_sync(~0u, own_row, r);
        if (slot < 0) continue;
        const int32 row = route.row_base[r] + slot;
        if (Shape::layout == kLayoutToken && row >= args.capacity) continue;
        const bool here = expert >= 0 && expert / Shape::experts_per_rank == r;
        if (lane < Shape::top_k) {
            const int64 to = static_cast<int64>(row) * Shape::top_k + lane;
            at_peer<int32>(args.peers, r, args.row_ids)[to] = here ? expert % Shape::experts_per_rank : -1;
            if (args.topk_weights != nullptr)
                at_peer<float>(args.peers, r, args.row_weights)[to] = here ? weight : 0.0f;
            if constexpr (Shape::layout == kLayoutExpert)
                at_peer<int32>(args.peers, r, args.row_places)[to] = here ? places[index] : -1;
        }
    }
    if constexpr (Shape::scales_per_row > 0) {
        const int32 own_place = row_place<Shape>(args, route, places, token, lane);
        for (int r = 0; r < Shape::num_ranks; ++r) {
            const int32 place = __shfl_sync(~0u, own_place, r);
            if (place < 0) continue;
            const float* from = args.scales + static_cast<int64>(token) * Shape::scales_per_row;
            float* to = at_peer<float>(args.peers, r, args.row_scales) +
                        static_cast<int64>(place) * Shape::scales_per_row;
            for (int i = lane; i < Shape::scales_per_row; i += 32) to[i] = from[i];
        }
    }
}

// Block 0: the counts of this rank's output, clamped to the capacity so that they are safe to address it with.
template <class Shape>
__device__ void publish_counts(const DispatchArgs& args, const RouteShared<Shape>& route,
                               const AllCounts<Shape>& counts) {
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    for (int i = threadIdx.x; i < Shape::num_ranks * kCounts; i += Shape::threads)
        args.all_counts[i] = counts.rows(i / kCounts, i % kCounts);
    if (threadIdx.x == 0) {
        int32 needed = 0;
        for (int r = 0; r < Shape::num_ranks; ++r) needed = max(needed, route.needed[r]);
        if (needed > args.capacity) store_release_sys(&args.call.record->needed_rows, needed);
        *args.num_rows = min(route.needed[args.call.rank], args.capacity);
        int32 rows = 0;
        for (int s = 0; s < Shape::num_ranks; ++s) {
            const int32 begin = Shape::layout == kLayoutToken ? min(rows, args.capacity) : rows;
            rows += counts.rows(s, args.call.rank);
            args.source_counts[s] = (Shape::layout == kLayoutToken ? min(rows, args.capacity) : rows) - begin;
        }
        int32 start = 0;
        for (int l = 0; l < Shape::experts_per_rank; ++l) {
            int32 routes = 0;
            const int expert = args.call.rank * Shape::experts_per_rank + l;
            for (int s = 0; s < Shape::num_ranks; ++s) routes += counts.routes(s, expert);
            if constexpr (Shape::layout == kLayoutExpert) {
                const int32 begin = min(start, args.capacity);
                start += (routes + args.alignment - 1) / args.alignment * args.alignment;
                args.expert_offsets[l] = begin;
                args.expert_offsets[l + 1] = min(start, args.capacity);
                routes = min(routes, min(start, args.capacity) - begin);
            }
            args.expert_counts[l] = routes;
        }
    }
}

// Layout expert, after all rows are here: rows with several local routes go to their other places too.
// A warp looks at 32 rows at a time and streams those that need it.
template <class Shape, class Stream>
__device__ void fill_further_places(const DispatchArgs& args, Stream& stream, int32 num_rows, int32 first,
                                    int32 stride) {
    const int32* all_places = at_peer<const int32>(args.peers, args.call.rank, args.row_places);
    unsigned char* rows = at_peer<unsigned char>(args.peers, args.call.rank, args.rows);
    float* scales = at_peer<float>(args.peers, args.call.rank, args.row_scales);
    const auto place_of = [&](int64 row, int k) {
        const int32 place = all_places[row * Shape::top_k + k];
        return place < args.capacity ? place : -1;
    };
    const auto first_place = [&](int64 row) {
        for (int k = 0; k < Shape::top_k; ++k)
            if (place_of(row, k) >= 0) return place_of(row, k);
        return -1;
    };
    for (int32 base = first; base < num_rows; base += 32 * stride) {
        int places = 0;
        if (base + stream.lane * stride < num_rows)
            for (int k = 0; k < Shape::top_k; ++k) places += place_of(base + stream.lane * stride, k) >= 0;
        const uint32 needing = __ballot_sync(~0u, places > 1);
        const auto row_of = [&](int i) -> int64 { return base + static_cast<int64>(__fns(needing, 0, i + 1)) * stride; };
        const auto further_place = [&](int i) {  // this lane's, or -1
            const int64 row = row_of(i);
            const int32 place = stream.lane < Shape::top_k ? place_of(row, stream.lane) : -1;
            return place != first_place(row) ? place : -1;
        };
        stream.run(
            __popc(needing), [&](int i) { return rows + static_cast<int64>(first_place(row_of(i))) * Shape::row_bytes; },
            rows,
            [&](int i) {
                const int32 place = further_place(i);
                return place >= 0 ? static_cast<int64>(place) * Shape::row_bytes : Stream::kNowhere;
            });
        if constexpr (Shape::scales_per_row > 0) {
            for (int i = 0; i < __popc(needing); ++i) {
                const float* from = scales + static_cast<int64>(first_place(row_of(i))) * Shape::scales_per_row;
                const int32 own = further_place(i);
                for (uint32 rest = __ballot_sync(~0u, own >= 0); rest != 0; rest &= rest - 1) {
                    float* to = scales + static_cast<int64>(__shfl_sync(~0u, own, __ffs(rest) - 1)) *
                                             Shape::scales_per_row;
                    for (int c = stream.lane; c < Shape::scales_per_row; c += 32) to[c] = from[c];
                }
            }
        }
    }
}

// Layout expert: rows between a group's last route and the next group are zero.
template <class Shape>
__device__ void clear_padding(const DispatchArgs& args, const RouteShared<Shape>& route, int32 block, int32 blocks) {
    unsigned char* rows = at_peer<unsigned char>(args.peers, args.call.rank, args.rows);
    float* scales = at_peer<float>(args.peers, args.call.rank, args.row_scales);
    int32 start = 0;
    for (int l = 0; l < Shape::experts_per_rank; ++l) {
        const int32 routes = route.expert_total[args.call.rank * Shape::experts_per_rank + l];
        const int32 end = start + (routes + args.alignment - 1) / args.alignment * args.alignment;
        for (int32 place = start + routes + block; place < min(end, args.capacity); place += blocks) {
            for (int i = threadIdx.x; i < Shape::row_bytes / 16; i += Shape::threads)
                store_16(rows + static_cast<int64>(place) * Shape::row_bytes + i * 16, Vec16{{0, 0, 0, 0}});
            for (int i = threadIdx.x; i < Shape::scales_per_row; i += Shape::threads)
                scales[static_cast<int64>(place) * Shape::scales_per_row + i] = 0.0f;
        }
        start = end;
    }
}

template <class Shape>
__device__ bool wait_for_rows(const DispatchArgs& args, uint32 epoch, int32 blocks) {
    const Deadline deadline{args.call.fault, args.call.fault_claimed, args.call.timeout_ns};
    const auto* flags = at_peer<const uint32>(args.call.peers, args.call.rank, args.done_flags);
    bool here = true;
    for (int i = threadIdx.x; i < Shape::num_ranks * blocks; i += Shape::threads) {
        const int peer = i / blocks, block = i % blocks;
        here = here && wait_for_flag(flags + peer * Shape::max_blocks + block, epoch, deadline, peer, kPhaseRows);
    }
    fence_global_to_bulk();
    return __syncthreads_and(here);
}

template <class Shape>
__device__ void dispatch(const DispatchArgs& args) {
    extern __shared__ __align__(128) unsigned char memory[];
    static_assert(sizeof(DispatchShared<Shape>) <= Shape::shared_bytes, "launch.py asks for the shared memory that this needs");
    auto& shared = *reinterpret_cast<DispatchShared<Shape>*>(memory);
    auto& route = shared.route;
    using Stream = typename DispatchShared<Shape>::Stream;
    constexpr int kCounts = RouteShared<Shape>::kCounts;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32 block = blockIdx.x, blocks = gridDim.x;
    const uint32 epoch = *args.call.epoch + 1;
    const Chunk chunk = chunk_of(args.num_tokens, block, blocks);

    for (int i = threadIdx.x; i < kCounts; i += Shape::threads) route.before[i] = route.chunk[i] = 0;
    if (lane < Shape::stages) mbarrier_init(&shared.loaded[warp][lane], 1);
    mbarrier_init_fence();
    __syncthreads();
    count_routes<Shape>(args, 0, chunk.begin, route.before);
    count_routes<Shape>(args, chunk.begin, chunk.end, route.chunk);
    __syncthreads();
    if (block == blocks - 1)
        announce_call<Shape::num_ranks, kCounts, Shape::threads>(
            args.call, epoch, kCounts, [&](int i) { return route.before[i] + route.chunk[i]; });
    const Opened opened = await_call<Shape::num_ranks, kCounts>(args.call, epoch);
    if (opened == Opened::kExpired) return;
    if (opened == Opened::kRefused) return close_call(args.call, epoch);

    const AllCounts<Shape> counts{at_peer<const int32>(args.call.peers, args.call.rank,
                                                       row_offset<Shape::num_ranks, kCounts>(args.call, epoch, 0)) +
                                  kHeaderWords};
    find_bases<Shape>(args, route, counts);
    if (block == 0) publish_counts<Shape>(args, route, counts);
    find_slots<Shape>(args, route, chunk);
    int32* places = args.slots + static_cast<int64>(args.num_tokens) * Shape::num_ranks;
    if constexpr (Shape::layout == kLayoutExpert) find_places<Shape>(args, route, chunk, places);
    bool all_fit = true;
    for (int r = 0; r < Shape::num_ranks; ++r) all_fit = all_fit && route.needed[r] <= args.capacity;
    if (!all_fit && args.stop_on_overflow) return close_call(args.call, epoch);

    Stream stream(shared.stream[warp], shared.loaded[warp], lane);
    const int32 first = chunk.begin + warp, stride = DispatchShared<Shape>::kWarps;
    stream.run(
        first < chunk.end ? (chunk.end - first + stride - 1) / stride : 0,
        [&](int i) {
            return static_cast<const unsigned char*>(args.x) +
                   static_cast<int64>(first + i * stride) * Shape::row_bytes;
        },
        lane < Shape::num_ranks ? at_peer<unsigned char>(args.peers, lane, args.rows) : nullptr,
        [&](int i) {
            const int32 token = first + i * stride;
            send_metadata<Shape>(args, route, places, token, lane);
            const int32 place = row_place<Shape>(args, route, places, token, lane);
            return place >= 0 ? static_cast<int64>(place) * Shape::row_bytes : Stream::kNowhere;
        });
    stream.finish();
    __syncthreads();
    if (threadIdx.x < Shape::num_ranks)
        store_release_sys(at_peer<uint32>(args.call.peers, threadIdx.x, args.done_flags) +
                              args.call.rank * Shape::max_blocks + block,
                          epoch);

    if (Shape::layout == kLayoutExpert || block == 0) {
        if (!wait_for_rows<Shape>(args, epoch, blocks)) return;
    }
    if constexpr (Shape::layout == kLayoutExpert) {
        int32 num_rows = 0;
        for (int s = 0; s < Shape::num_ranks; ++s) num_rows += counts.rows(s, args.call.rank);
        fill_further_places<Shape>(args, stream, num_rows, block * stride + warp, blocks * stride);
        clear_padding<Shape>(args, route, block, blocks);
        stream.finish();
    }
    close_call(args.call, epoch);
}
