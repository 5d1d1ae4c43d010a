// How every call of several ranks opens and closes.
//
// A rank puts its header into every rank's control buffer and raises its flag there: it has begun the call, and this
// is what the call means to it. Headers lie by the epoch's turn and by source; in a dispatch, counts follow each. A
// flag that shows the epoch says that the header is here, and that its rank has let go of what it received before.
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

constexpr int kHeaderWords = 4;  // status, region, hash of the options
constexpr int kMostBlocks = 64;
constexpr int kMostArrivals = 4;
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
    uint64 flags;         // uint32 [W]; between nodes [kTurns][W]
    uint64 headers;       // int32 [kTurns][W][kHeaderWords + counts]
    uint32* epoch;        // device memory [kTurnWords]: calls opened so far; who takes no part, from the next call on
    uint32* half_epoch;   // the same: the turn of the call whose halves are two kernels, from send to receive
    uint32* blocks_out;   // device memory: blocks that have left this call, and how many of them in vain
    uint32* claimed;      // device memory [kClaims]: items that warps have claimed, of each kind of work
    FaultRecord* fault;
    uint32* fault_claimed;
    uint64 open_timeout_ns;  // for other ranks to begin the call: their hosts may be busy with something else
    uint64 timeout_ns;       // for everything after that
    uint64* trace;           // null, or [blocks][kMarks] times in ns
    uint64 some_flags;       // in the control buffer: flags that only some calls raise,
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
constexpr int header_words = (kHeaderWords + kCounts + 3) / 4 * 4;  // whole 16-byte units

template <int kRanks, int kCounts>
__device__ __forceinline__ uint64 header_offset(const Call& call, uint32 epoch, int source) {
    return call.headers + static_cast<uint64>(epoch % kTurns * kRanks + source) * header_words<kCounts> * sizeof(int32);
}

// All ranks' headers of a call, in the order of ranks, once it has opened.
template <int kRanks, int kCounts>
__device__ __forceinline__ const int32* headers_of(const Call& call, uint32 epoch) {
    return window_of<kRanks>(call.peers).template local<const int32>(
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

// The header of a source to all ranks, then its flag. One block calls it, with all its threads.
template <int kRanks, int kCounts, int kThreads, int kNodeRanks = kRanks>
__device__ __forceinline__ void tell_ranks(const Call& call, Turn turn, int source, int num_counts,
                                           const int32* header) {
    const uint64 place = header_offset<kRanks, kCounts>(call, turn.epoch, source);
    const int units = (kHeaderWords + num_counts + 3) / 4;
    for (int i = threadIdx.x; i < units * kRanks; i += kThreads)
        if (!turn.leaves_out<kRanks>(i % kRanks))
            window_of<kRanks>(call.peers).put_16(i % kRanks, place, i / kRanks,
                                                 reinterpret_cast<const Vec16*>(header)[i / kRanks]);
    __syncthreads();
    if (threadIdx.x < kRanks && !turn.leaves_out<kRanks>(threadIdx.x))
        window_of<kRanks>(call.peers)
            .signals(threadIdx.x, flags_of<kRanks, kNodeRanks>(call.flags, turn.epoch, 1))
            .raise(source, turn.epoch);
}

// This rank's header to all ranks, then its flag. One block calls it, with all its threads. `header`, in shared
// memory, has the counts behind kHeaderWords that are filled in here.
template <int kRanks, int kCounts, int kThreads, int kNodeRanks = kRanks>
__device__ void announce_call(const Call& call, Turn turn, int num_counts, int32* header) {
    if (threadIdx.x < kHeaderWords)
        header[threadIdx.x] = threadIdx.x == 0             ? call.status
                              : threadIdx.x == kRegionWord ? call.region
                              : threadIdx.x == kHashWord   ? static_cast<int32>(call.options_hash)
                                                           : static_cast<int32>(call.options_hash >> 32);
    __syncthreads();
    tell_ranks<kRanks, kCounts, kThreads, kNodeRanks>(call, turn, call.rank, num_counts, header);
}

// All ranks' headers are here, and all of them mean the same call. Every block calls it, with all its threads, and
// gets the same answer on all ranks, unless a wait expires; block 0 records what is wrong, unless another kernel of the
// same call does.
template <int kRanks, int kCounts, bool kRecords = true, int kNodeRanks = kRanks>
__device__ Opened await_call(const Call& call, Turn turn) {
    const Deadline deadline = opening_deadline_of(call);
    const int peer = threadIdx.x;
    bool here = true;
    if (peer < kRanks && !turn.leaves_out<kRanks>(peer)) {
        const PeerSignals flags = window_of<kRanks>(call.peers)
                                      .signals(call.rank, flags_of<kRanks, kNodeRanks>(call.flags, turn.epoch, 1));
        here = flags.template wait<Flag::kEveryCall>(peer, turn.epoch, deadline,
                                                     writer_for<kRanks, kNodeRanks>(call, peer), kPhaseOpen);
    }
    if (!__syncthreads_and(here)) return Opened::kExpired;
    constexpr int kOfLane = (kRanks + 31) / 32;
    int32 status[kOfLane] = {};  // of rank threadIdx.x + 32 i
    bool differs[kOfLane] = {};
    const auto look_at = [&](int i) {
        const int rank = threadIdx.x + 32 * i;
        if (rank >= kRanks || turn.leaves_out<kRanks>(rank)) return;
        const int32* all = headers_of<kRanks, kCounts>(call, turn.epoch);
        const int32* first = all + lowest_rank(~turn.mask<kRanks>()) * header_words<kCounts>;
        const int32* header = all + rank * header_words<kCounts>;
        status[i] = header[0];
        for (int word = kHashWord; word < kHeaderWords; ++word) differs[i] = differs[i] || header[word] != first[word];
    };
    look_at(0);
    if (__syncthreads_and(status[0] == 0 && !differs[0])) return Opened::kGo;
    if (kRecords && blockIdx.x == 0 && threadIdx.x < 32) {
#pragma unroll
        for (int i = 1; i < kOfLane; ++i) look_at(i);
        const auto ranks_where = [&](auto is_so) {
            RankMask<kRanks> ranks = 0;
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) ranks |= RankMask<kRanks>{__ballot_sync(~0u, is_so(i))} << 32 * i;
            return ranks;
        };
        // Who only follows a fault of the call before comes behind who has one of this call.
        auto faulty = ranks_where([&](int i) { return status[i] == kOwnFault; });
        if (faulty == 0) faulty = ranks_where([&](int i) { return status[i] != 0; });
        const auto differing = ranks_where([&](int i) { return differs[i]; });
        if (faulty != 0 && threadIdx.x == (lowest_rank(faulty) & 31)) {
            call.record->status = lowest_rank(faulty) < 32 ? status[0] : status[kOfLane - 1];
            store_release_sys(&call.record->faulty_rank, lowest_rank(faulty) + 1);
        }
        if (differing != 0 && threadIdx.x == (lowest_rank(differing) & 31))
            store_release_sys(&call.record->differing_rank, lowest_rank(differing) + 1);
    }
    return Opened::kRefused;
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

// One warp forgets flags that were raised long ago. Calls count in 32 bits: a flag that nobody has raised since would
// count again, 2^32 calls later. Ranks that are ahead may raise it meanwhile.
__device__ __forceinline__ void forget_old_flags(const Call& call, uint32 epoch, int lane) {
    constexpr int32 kOld = 2 * kTurns;
    const auto* bases = reinterpret_cast<const uint64*>(call.peers);
    auto* flags = reinterpret_cast<uint32*>(bases[call.rank] + call.some_flags);
    for (uint64 i = lane; i < call.num_some_flags; i += 32) {
        const uint32 seen = load_relaxed_sys(flags + i);
        if (seen != 0 && static_cast<int32>(epoch - seen) > kOld) compare_and_swap_relaxed_sys(flags + i, seen, 0);
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
