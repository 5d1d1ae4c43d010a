// Transport between nodes: puts and signals of NCCL's GPU-initiated networking (GIN) to the other ranks of a rail.
//
// Names of NCCL come before this header, from the headers beside the library that runs (jit/nccl_headers.py: PRELUDE).
// Without them it only declares. docs/explanation/between-nodes.md is the protocol, with the reason for each rule.
//
// - A put and its signal are one request. A signal stands for its put and all earlier ones from this rank on the same
//   context; so each kind of call has a context, and one thread puts the chunks of a node, in their order.
// - Signals only grow, and are polled within a deadline: NCCL's own waits have no limit.
// - A put may block while the queue of (context, peer) is full, so chunks times turns are fewer than kQueueDepth.
#pragma once
#include "device/transport/call.cuh"

// Kinds of traffic: each is a context, and a signal for each node.
enum Traffic : int { kDispatches = 0, kCombines = 1, kTraffics = 2 };

constexpr int kQueueDepth = 32;  // of NCCL's proxy, for each context and peer
constexpr int kDescriptorBytes = 128;  // in shared memory, aligned to 64: where a thread writes its request first

// How often each node has signalled, in one kind of calls. Only kernels that send rows change it.
struct SignalCount {
    uint64 sent;            // in all calls that have been sent
    uint64 before[kTurns];  // in those before the last call of each turn
};

struct Rail {
    uint64 comm;       // const ncclDevComm*: the device communicator, in device memory
    uint64 window;     // ncclWindow_t: memory that every rank has registered
    uint64 base;       // where this rank's part of the window begins
    uint64 put_from;   // offsets in it: [turns][nodes] regions of region_bytes each, that rows are put from,
    uint64 put_to;     // and to
    uint64 region_bytes;
    SignalCount* counts;  // device memory [kTraffics]
    uint32* blocks;       // device memory [blocks]: this block has written what shall be put, in this call
    int32 chunks;      // puts for each node
    int32 chunk_rows;  // rows of a chunk

    // Regions for a node: where its rows are put from, and where those from it arrive.
    template <int kNodes>
    __device__ __forceinline__ uint64 region(uint64 first, int turn, int node) const {
        return first + (static_cast<uint64>(turn) * kNodes + node) * region_bytes;
    }

    // One thread puts bytes of its rank's window to a peer's, and adds 1 to a signal there behind them. It releases at
    // the scope of the device, which the network needs and other GPUs do not see. What other threads have written is
    // released with it if this thread has acquired it.
    __device__ __forceinline__ void put(Traffic traffic, int peer, uint64 to, uint64 from, uint64 bytes, uint32 signal,
                                        void* descriptor) const;

    // How often each node has signalled in calls before this one. Two may be open, and received in either order; so a
    // receiving half finds what its sending half has left.
    template <int kPart>
    __device__ __forceinline__ uint64 before(Traffic traffic, uint32 epoch) const {
        return kPart == kReceive ? counts[traffic].before[epoch % kTurns] : counts[traffic].sent;
    }

    // One thread of a kernel that sends, when all blocks have asked for that: the rows of this call are put.
    __device__ __forceinline__ void count_call(Traffic traffic, uint32 epoch) const {
        SignalCount& count = counts[traffic];
        count.before[epoch % kTurns] = count.sent;
        count.sent += chunks;
    }

    // How often a signal was raised.
    __device__ __forceinline__ uint64 count(Traffic traffic, uint32 signal) const;

    // One thread waits until a signal has been raised so often. Behind a barrier its block may read what was put.
    // False: a wait has expired.
    __device__ __forceinline__ bool wait(Traffic traffic, uint32 signal, uint64 wanted, const Deadline& deadline,
                                         uint32 peer, uint32 phase, uint32 epoch) const;
};

// One thread sets a signal to zero. Nobody may raise it meanwhile.
__device__ __forceinline__ void reset_signal(uint64 comm, Traffic traffic, uint32 signal);

#ifdef NCCL_VERSION_CODE
__device__ __forceinline__ void reset_signal(uint64 comm, Traffic traffic, uint32 signal) {
    const ncclGin net(*reinterpret_cast<const ncclDevComm*>(comm), traffic);
    net.resetSignal(signal);
}

__device__ __forceinline__ void Rail::put(Traffic traffic, int peer, uint64 to, uint64 from, uint64 bytes,
                                          uint32 signal, void* descriptor) const {
    static_assert(sizeof(ncclGinDescriptorSmem) <= kDescriptorBytes && alignof(ncclGinDescriptorSmem) <= 64,
                  "requests are written there first");
    const auto& device_comm = *reinterpret_cast<const ncclDevComm*>(comm);
    const auto memory = reinterpret_cast<ncclWindow_t>(window);
    const ncclGin net(device_comm, traffic);
    const auto team = ncclTeamWorld(device_comm);
    const ncclGin_SignalInc action{signal};
    const ncclGin_DescriptorSmem where{static_cast<ncclGinDescriptorSmem*>(descriptor)};
    if (bytes == 0) net.signal(team, peer, action, ncclCoopThread(), where);
    else net.put(team, peer, memory, to, memory, from, bytes, action, ncclGin_None(), ncclCoopThread(), where);
}

__device__ __forceinline__ uint64 Rail::count(Traffic traffic, uint32 signal) const {
    ncclGin net(*reinterpret_cast<const ncclDevComm*>(comm), traffic);
    return net.readSignal(signal);
}

__device__ __forceinline__ bool Rail::wait(Traffic traffic, uint32 signal, uint64 wanted, const Deadline& deadline,
                                           uint32 peer, uint32 phase, uint32 epoch) const {
    uint64 began = 0;
    for (uint32 polls = 1; static_cast<int64>(count(traffic, signal) - wanted) < 0; ++polls) {
        sleep_ns(64);
        if (polls % kPollsPerClock != 0) continue;
        const uint64 now = global_timer_ns();
        if (began == 0) began = now;
        if (now - began > deadline.timeout_ns) {
            record_fault(deadline.fault, deadline.fault_claimed, peer, phase, epoch, static_cast<uint32>(wanted),
                         static_cast<uint32>(count(traffic, signal)));
            return false;
        }
        if (has_expired(deadline)) return false;
    }
    return true;
}
#endif
