// How every call of several ranks opens and closes.
//
// A rank puts its header into every rank's control buffer: it has begun the call, and this is what the call means to it.
// Headers lie by the epoch's turn and by source. Each word carries the epoch, so it says itself that it is here, and
// that its rank has let go of what it received before. In a dispatch, counts follow once they are known.
//
// A call is one kernel, or two: one that sends and one that receives, between which the next call may be opened. So up
// to two calls are open at a time: whoever opens call n has received call n - 2, as the host makes sure.
//
// Four headers of each source suffice: a rank that writes a header of epoch n + 4 has received call n + 2, so it has
// seen all flags of n + 2, so everyone has received call n. The same holds for regions that take turns by four, which a
// rank therefore writes without waiting for anybody.
#pragma once
#include "device/ptx/grid.cuh"
#include "device/sync/arrival.cuh"
#include "device/transport/peer.cuh"

constexpr int kHeaderWords = 4;  // status, region, hash of the options; counts come behind them
constexpr int kMostBlocks = 64;
constexpr int kMostArrivals = 8;
constexpr int kStatusWord = 0;
constexpr int kRegionWord = 1;
constexpr int kHashWord = 2;
constexpr int kClaims = 3;  // kinds of work in one kernel that warps claim: rows to send, to fill or add, own ones
constexpr int kOwnRows = 2;
constexpr int kTurnWords = 3;  // of a Turn in memory: the epoch, then the mask
constexpr int32 kOwnFault = 1;  // status of a rank that cannot make the call; outcomes.py has the others

// In pinned host memory. All but `sequence` is written only when something is wrong; each rank finds the same.
// kernel_reports.py mirrors it.
struct CallRecord {
    uint32 needed_rows;     // rows that the fullest rank (in layout slots: expert) needs, if over the capacity
    uint32 capacity;        // the capacity then
    uint32 faulty_rank;     // 1 + the lowest rank with a fault of its own, else with any status, or 0
    int32 status;           // its status
    uint32 differing_rank;  // 1 + the lowest rank with another hash than the lowest that takes part, or 0
    uint32 sequence;        // of the last call that is over, whatever became of it; written behind all else
};

// Memory where rows say by themselves that they are here (device/sync/arrival.cuh), by turns.
struct Arrivals {
    unsigned char* first;  // of this rank
    uint64 turn_bytes;     // from one turn's to the next
    uint64 num_bytes;      // of each turn; 0: there is none
};

struct Call {
    const uint64* peers;  // [W] device memory: every rank's control buffer
    uint64 headers;       // StampedWord [kTurns][W][header_words<counts>]
    uint32* epoch;        // device memory [kTurnWords]: calls opened so far; who takes no part, from the next call on
    uint32* half_epoch;   // the same: the turn of the call whose halves are two kernels, from send to receive
    uint32* blocks_out;   // device memory: blocks that have left this call, and how many of them in vain
    uint32* claimed;      // device memory [kClaims]: items that warps have claimed, of each kind of work
    FaultRecord* fault;
    uint32* fault_claimed;
    uint64 open_timeout_ns;  // for other ranks to begin the call: their hosts may be busy with something else
    uint64 timeout_ns;       // for everything after that
    uint64* trace;           // null, or [blocks][kMarks] times in ns
    uint64 some_flags;       // in the control buffer, behind headers: flags, which only some calls raise,
    uint64 num_some_flags;   // and how many
    uint32* block_flags;     // null, or device memory [2][kMostBlocks]: flags that blocks raise for each other
    uint64 left_flags;       // in the control buffer: uint32 [W]: a rank sends nothing more in this call, which was refused
    const Arrivals* arrivals;  // null, or device memory [kMostArrivals]
    // What every call is told anew lies side by side, so that the host writes it at once.
    uint64 options_hash;     // of all that ranks must agree on; the host knows the options themselves
    CallRecord* record;
    int32 status;  // 0, or what went wrong here before the call: then nobody sends anything
    int32 region;  // where this rank wants what it receives; may be another one on every rank
    uint32 sequence;  // what the last block out writes to the record; 0 writes nothing, since nobody waits for a replay
    int32 rank;
};

// Which part of a call a kernel is.
enum Part : int { kWhole = 0, kSend = 1, kReceive = 2 };

// Which call this is, and who takes no part in it: nothing is sent to masked ranks or awaited from them, and what lies
// where they write means nothing. All blocks of all kernels of a call find the same.
struct Turn {
    uint32 epoch;
    uint64 masked;  // bit r: rank r is masked

    template <int kRanks>
    __device__ __forceinline__ RankMask<kRanks> mask() const {
        return static_cast<RankMask<kRanks>>(masked);
    }

    template <int kRanks>
    __device__ __forceinline__ bool leaves_out(int rank) const {
        return (mask<kRanks>() >> rank & 1) != 0;
    }
};

// The epoch is never 0, which flags show that nobody has raised; 4 instead, since turns go on. A kernel that may begin
// before the one before it has ended waits for that first: then its rank has let go of what it received before.
template <int kPart = kWhole>
__device__ __forceinline__ Turn turn_of(const Call& call) {
    const uint32* found = kPart == kReceive ? call.half_epoch : call.epoch;
    const uint32 epoch = found[0];
    const uint64 masked = found[1] | static_cast<uint64>(found[2]) << 32;
    if constexpr (kPart == kReceive) return {epoch, masked};
    return {epoch + 1 != 0 ? epoch + 1 : kTurns, masked};
}

// The lowest rank of a mask that has one.
__device__ __forceinline__ int lowest_rank(uint32 mask) { return __ffs(mask) - 1; }
__device__ __forceinline__ int lowest_rank(uint64 mask) { return __ffsll(mask) - 1; }

// A turn without the ranks of other nodes: those that this rank reaches over NVLink.
template <int kNodeRanks>
__device__ __forceinline__ Turn near(Turn turn, int rank) {
    const uint32 neighbours = (kNodeRanks == 32 ? ~0u : (1u << kNodeRanks % 32) - 1) << rank / kNodeRanks * kNodeRanks;
    return {turn.epoch, turn.masked | ~neighbours};
}

// What a block has done, for measurements (kernels/common/call.py has the words).
enum Mark { kBegun, kCounted, kHeard, kPlaced, kSent, kNotified, kFilled, kSummed, kDone };
constexpr int kMarks = 16;

// Of several warps with the same mark the last one counts.
__device__ __forceinline__ void mark(const Call& call, Mark what) {
    if (call.trace != nullptr) call.trace[blockIdx.x * kMarks + what] = global_timer_ns();
}

enum class Opened { kGo, kRefused, kExpired };

// For waits that end when other ranks have begun the call.
__device__ __forceinline__ Deadline opening_deadline_of(const Call& call) {
    return {call.fault, call.fault_claimed, call.open_timeout_ns};
}

// For waits inside a call that has opened.
__device__ __forceinline__ Deadline deadline_of(const Call& call) {
    return {call.fault, call.fault_claimed, call.timeout_ns};
}

template <int kRanks>
__device__ __forceinline__ const PeerWindow<kRanks>& window_of(const uint64* peers) {
    return *reinterpret_cast<const PeerWindow<kRanks>*>(peers);
}

template <int kCounts>
constexpr int header_words = (kHeaderWords + kCounts + 3) / 4 * 4;  // between nodes they travel as units of 16 bytes

template <int kRanks, int kCounts>
__device__ __forceinline__ uint64 header_offset(const Call& call, uint32 epoch, int source) {
    return call.headers +
           static_cast<uint64>(epoch % kTurns * kRanks + source) * header_words<kCounts> * sizeof(StampedWord);
}

// All ranks' headers of a call, in the order of ranks.
template <int kRanks, int kCounts>
__device__ __forceinline__ const StampedWord* headers_of(const Call& call, uint32 epoch) {
    return window_of<kRanks>(call.peers).template local<const StampedWord>(
        call.rank, header_offset<kRanks, kCounts>(call, epoch, 0));
}

// The rank that writes here what comes from a source: the source itself, or the one that forwards on its node's behalf.
template <int kRanks, int kNodeRanks>
__device__ __forceinline__ int writer_for(const Call& call, int source) {
    if constexpr (kNodeRanks == kRanks) return source;
    return call.rank / kNodeRanks * kNodeRanks + source % kNodeRanks;
}

// Where flags of a call begin, so many for each rank. On one node they are raised in the order of calls. Forwarders raise
// those of other nodes in the order in which calls are received, so between nodes each turn has flags of its own.
template <int kRanks, int kNodeRanks>
__device__ __forceinline__ uint64 flags_of(uint64 first, uint32 epoch, int of_rank) {
    if constexpr (kNodeRanks == kRanks) return first;
    return first + static_cast<uint64>(epoch % kTurns) * kRanks * of_rank * sizeof(uint32);
}

// Words [kBegin, kEnd) of a source's header to all ranks. A block calls it with all its threads.
template <int kRanks, int kCounts, int kThreads, int kBegin, int kEnd>
__device__ __forceinline__ void tell_ranks(const Call& call, Turn turn, int source, const int32* header) {
    constexpr int kWords = kEnd - kBegin;
    const uint64 place = header_offset<kRanks, kCounts>(call, turn.epoch, source);
    for (int i = threadIdx.x; i < kWords * kRanks; i += kThreads) {
        const int rank = i / kWords, word = kBegin + i % kWords;
        if (turn.leaves_out<kRanks>(rank)) continue;
        auto* to = window_of<kRanks>(call.peers).template staging<StampedWord>(rank, place) + word;
        store_relaxed_sys(to, StampedWord{header[word], turn.epoch});
    }
}

// This rank has begun the call: what it means to it, to all ranks. One block calls it, with all its threads. Its first
// kHeaderWords of `header`, in shared memory, are filled in here.
template <int kRanks, int kCounts, int kThreads>
__device__ void announce_call(const Call& call, Turn turn, int32* header) {
    if (threadIdx.x < kHeaderWords)
        header[threadIdx.x] = threadIdx.x == kStatusWord   ? call.status
                              : threadIdx.x == kRegionWord ? call.region
                              : threadIdx.x == kHashWord   ? static_cast<int32>(call.options_hash)
                                                           : static_cast<int32>(call.options_hash >> 32);
    __syncthreads();
    // Whoever hears it may overwrite what earlier kernels have read, and reads what this block has sent before.
    if (threadIdx.x < kRanks * kHeaderWords) fence_acq_rel_sys();
    tell_ranks<kRanks, kCounts, kThreads, 0, kHeaderWords>(call, turn, call.rank, header);
}

// This rank's counts, behind kHeaderWords in `header`, to all ranks. The block that announces calls it.
template <int kRanks, int kCounts, int kThreads>
__device__ void tell_counts(const Call& call, Turn turn, const int32* header) {
    tell_ranks<kRanks, kCounts, kThreads, kHeaderWords, kHeaderWords + kCounts>(call, turn, call.rank, header);
}

// One thread waits for a word of a header. False: expired. Behind fence_acquire_sys, what its rank
// did before it announced the call is visible.
__device__ __forceinline__ bool wait_for_word(const StampedWord* word, uint32 epoch, const Deadline& deadline,
                                              uint32 peer, StampedWord& found) {
    const auto look = [word, &found] { return (found = load_relaxed_sys(word)).epoch; };
    return poll(look, [epoch](uint32 seen) { return seen == epoch; }, epoch, deadline, peer, kPhaseOpen);
}

// All ranks have begun the call, and all of them mean the same. Every block calls it, with all its threads, and gets the
// same answer on all ranks, unless a wait expires; block 0 records what is wrong, unless another kernel of the same call
// does.
template <int kRanks, int kCounts, int kThreads, bool kRecords = true, int kNodeRanks = kRanks>
__device__ Opened await_call(const Call& call, Turn turn) {
    constexpr int kStride = header_words<kCounts>;
    const Deadline deadline = opening_deadline_of(call);
    const StampedWord* all = headers_of<kRanks, kCounts>(call, turn.epoch);
    const int first = lowest_rank(~turn.mask<kRanks>());
    bool here = true, same = true;
    for (int i = threadIdx.x; i < kRanks * kHeaderWords; i += kThreads) {
        const int peer = i / kHeaderWords, word = i % kHeaderWords;
        if (turn.leaves_out<kRanks>(peer)) continue;
        const StampedWord *own = all + peer * kStride + word, *other = all + first * kStride + word;
        StampedWord value = load_relaxed_sys(own), wanted = load_relaxed_sys(other);
        const auto wait = [&](const StampedWord* from, int source, StampedWord& found) {
            return found.epoch == turn.epoch ||
                   wait_for_word(from, turn.epoch, deadline, writer_for<kRanks, kNodeRanks>(call, source), found);
        };
        here = here && wait(own, peer, value) && wait(other, first, wanted);
        if (word == kStatusWord) same = same && value.value == 0;
        if (word >= kHashWord) same = same && value.value == wanted.value;
    }
    fence_acquire_sys();
    if (!__syncthreads_and(here)) return Opened::kExpired;
    if (__syncthreads_and(same)) return Opened::kGo;
    if (kRecords && blockIdx.x == 0 && threadIdx.x < 32) {
        const auto ranks_where = [&](auto is_so) {
            RankMask<kRanks> ranks = 0;
            for (int begin = 0; begin < kRanks; begin += 32) {
                const int rank = begin + threadIdx.x;
                const bool takes_part = rank < kRanks && !turn.leaves_out<kRanks>(rank);
                const uint32 found = __ballot_sync(~0u, takes_part && is_so(all + rank * kStride));
                ranks |= static_cast<RankMask<kRanks>>(found) << begin;
            }
            return ranks;
        };
        // Who only follows a fault of the call before comes behind who has one of this call.
        auto faulty = ranks_where([](const StampedWord* header) { return header->value == kOwnFault; });
        if (faulty == 0) faulty = ranks_where([](const StampedWord* header) { return header->value != 0; });
        const auto differing = ranks_where([&](const StampedWord* header) {
            bool differs = false;
            for (int word = kHashWord; word < kHeaderWords; ++word)
                differs = differs || header[word].value != all[first * kStride + word].value;
            return differs;
        });
        if (threadIdx.x == 0 && faulty != 0) {
            call.record->status = all[lowest_rank(faulty) * kStride].value;
            store_release_sys(&call.record->faulty_rank, lowest_rank(faulty) + 1);
        }
        if (threadIdx.x == 0 && differing != 0)
            store_release_sys(&call.record->differing_rank, lowest_rank(differing) + 1);
    }
    return Opened::kRefused;
}

// All ranks' counts, or the first kTold of each rank, are here, of a call that has opened. A block calls it with all its
// threads. False: a wait has expired.
template <int kRanks, int kCounts, int kThreads, int kNodeRanks = kRanks, int kTold = kCounts>
__device__ bool await_counts(const Call& call, Turn turn) {
    constexpr int kAtOnce = 4;  // loads of a thread
    const StampedWord* all = headers_of<kRanks, kCounts>(call, turn.epoch) + kHeaderWords;
    const auto word_of = [&](int i) { return all + i / kTold * header_words<kCounts> + i % kTold; };
    bool here = true;
    for (int i = threadIdx.x; i < kRanks * kTold; i += kAtOnce * kThreads) {
        uint32 seen[kAtOnce];
#pragma unroll
        for (int j = 0, at = i; j < kAtOnce; ++j, at += kThreads)
            seen[j] = at < kRanks * kTold ? load_relaxed_sys(word_of(at)).epoch : turn.epoch;
#pragma unroll
        for (int j = 0, at = i; j < kAtOnce; ++j, at += kThreads) {
            if (seen[j] == turn.epoch || turn.leaves_out<kRanks>(at / kTold)) continue;
            StampedWord count;
            here = here && wait_for_word(word_of(at), turn.epoch, deadline_of(call),
                                         writer_for<kRanks, kNodeRanks>(call, at / kTold), count);
        }
    }
    fence_acquire_sys();
    return __syncthreads_and(here);
}

// Every one of `blocks` blocks of every rank has raised its flag: what it sends is here. Flags of a rank begin `stride`
// behind those of the one before. A block calls it with all its threads. False: a wait has expired.
template <int kRanks, int kThreads, int kNodeRanks = kRanks>
__device__ bool wait_for_blocks(const Call& call, const PeerSignals& flags, int32 stride, int32 blocks, Turn turn,
                                Phase phase) {
    const Deadline deadline = deadline_of(call);
    bool here = true;
    for (int i = threadIdx.x; i < kRanks * blocks; i += kThreads) {
        const int peer = i / blocks, block = i % blocks;
        here = here && (turn.leaves_out<kRanks>(peer) ||
                        flags.from(peer * stride).wait(block, turn.epoch, deadline,
                                                       writer_for<kRanks, kNodeRanks>(call, peer), phase));
    }
    return __syncthreads_and(here);
}

// One warp forgets flags, and words of headers, that came long ago. Calls count in 32 bits: what nobody has written since
// would count again, 2^32 calls later. Ranks that are ahead may write it meanwhile.
__device__ __forceinline__ void forget_old_flags(const Call& call, uint32 epoch, int lane) {
    constexpr int kOld = 2 * kTurns;
    const uint64 own = reinterpret_cast<const uint64*>(call.peers)[call.rank];
    const auto is_old = [epoch](uint32 seen) { return seen != 0 && static_cast<int32>(epoch - seen) > kOld; };
    auto* flags = reinterpret_cast<uint32*>(own + call.some_flags);
    for (uint64 i = lane; i < call.num_some_flags; i += 32) {
        const uint32 seen = load_relaxed_sys(flags + i);
        if (is_old(seen)) compare_and_swap_relaxed_sys(flags + i, seen, 0);
    }
    auto* words = reinterpret_cast<StampedWord*>(own + call.headers);
    for (uint64 i = lane; i < (call.some_flags - call.headers) / sizeof(StampedWord); i += 32) {
        const StampedWord seen = load_relaxed_sys(words + i);
        if (is_old(seen.epoch)) compare_and_swap_relaxed_sys(words + i, seen, StampedWord{0, 0});
    }
}

// One warp: whether there is memory where rows say by themselves that they are here.
__device__ __forceinline__ bool has_arrivals(const Call& call, int lane) {
    return call.arrivals != nullptr &&
           __any_sync(~0u, lane < kMostArrivals && call.arrivals[lane].num_bytes != 0);
}

__device__ __forceinline__ PeerSignals left_flags_of(const Call& call, int rank) {
    return {reinterpret_cast<uint32*>(reinterpret_cast<const uint64*>(call.peers)[rank] + call.left_flags)};
}

// One warp tells all ranks that this one sends no row more in this call.
template <int kRanks>
__device__ __forceinline__ void tell_that_all_is_sent(const Call& call, Turn turn, int lane) {
#pragma unroll
    for (int first = 0; first < kRanks; first += 32) {
        const int rank = first + lane;
        if (rank < kRanks && !turn.leaves_out<kRanks>(rank)) left_flags_of(call, rank).raise(call.rank, turn.epoch);
    }
}

// One warp, of a call that was refused: rows may be on their way that nobody will read. When no rank sends any more, all
// words of this turn are absent again. Each rank has heard the same, so each comes here, or has told before.
template <int kRanks>
__device__ __forceinline__ void set_arrivals_back(const Call& call, Turn turn, int lane) {
    bool over = true;
#pragma unroll
    for (int first = 0; first < kRanks; first += 32) {
        const int rank = first + lane;
        over = over && (rank >= kRanks || turn.leaves_out<kRanks>(rank) ||
                        left_flags_of(call, call.rank).wait(rank, turn.epoch, deadline_of(call), rank, kPhasePartials));
    }
    if (!__all_sync(~0u, over)) return;
    __syncwarp();
    for (int number = 0; number < kMostArrivals; ++number) {
        const Arrivals& found = call.arrivals[number];
        unsigned char* first = found.first + turn.epoch % kTurns * found.turn_bytes;
        for (uint64 at = 16 * lane; at < found.num_bytes; at += 16 * 32) set_back_16(first + at);
    }
}

// Every block's last step, with all its threads, whatever became of the call. The last block out advances the epoch:
// all blocks have read it then. (Of two kernels the first does, and leaves it to the second.)
//
// If any thread of any block was not `done`, the call was refused or a wait has expired. Then warp 0 of the last block
// out calls `publish`, which makes results safe to go on with. Nobody else writes any.
//
// Last of all the host learns that the call is over. The release at system scope covers all that this rank has written.
template <int kRanks, int kPart = kWhole, class Publish>
__device__ __forceinline__ void close_call(const Call& call, Turn turn, bool done, Publish publish) {
    constexpr uint32 kInVain = 1 << 16;  // a grid has fewer blocks
    constexpr uint32 kForgets = 1u << 30;  // calls after which old flags are forgotten; not where epochs wrap
    const uint32 own = __syncthreads_and(done) ? 1 : kInVain + 1;
    if (threadIdx.x >= 32) return;
    bool last = false, in_vain = false;
    if (threadIdx.x == 0) {
        const uint32 out = add_acq_rel_gpu(call.blocks_out, own) + own;
        last = out % kInVain == gridDim.x;
        in_vain = last && out >= kInVain;
        if (last) {
            *call.blocks_out = 0;
#pragma unroll
            for (int kind = 0; kind < kClaims; ++kind) call.claimed[kind] = 0;
            if constexpr (kPart != kReceive) *call.epoch = turn.epoch;
            if constexpr (kPart == kSend) {
                call.half_epoch[0] = turn.epoch;
                call.half_epoch[1] = static_cast<uint32>(turn.masked);
                if constexpr (kRanks > 32) call.half_epoch[2] = static_cast<uint32>(turn.masked >> 32);
            }
        }
    }
    if (kPart != kReceive && __any_sync(~0u, last)) {
        __syncwarp();  // behind what thread 0 has acquired
        if (call.block_flags != nullptr)
            for (int i = threadIdx.x; i < 2 * kMostBlocks; i += 32) call.block_flags[i] = 0;
        if (turn.epoch % kForgets == kForgets / 2) forget_old_flags(call, turn.epoch, threadIdx.x);
        // Who receives later may refuse the call then, and nobody waits for that.
        if (kPart == kSend && has_arrivals(call, threadIdx.x)) tell_that_all_is_sent<kRanks>(call, turn, threadIdx.x);
    }
    if (__any_sync(~0u, in_vain)) {
        __syncwarp();  // the other lanes write behind what thread 0 has acquired
        publish();
        __syncwarp();
        const bool expired = __any_sync(~0u, has_expired(deadline_of(call)));
        if (kPart != kSend && !expired && has_arrivals(call, threadIdx.x)) {
            if constexpr (kPart == kWhole) tell_that_all_is_sent<kRanks>(call, turn, threadIdx.x);
            set_arrivals_back<kRanks>(call, turn, threadIdx.x);
        }
        __syncwarp();
    }
    if (last && call.sequence != 0) store_release_sys(&call.record->sequence, call.sequence);
}
