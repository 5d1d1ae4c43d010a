// Regions carried by puts and signals of NCCL's GPU-initiated networking (GIN).
//
// Names of NCCL come before this header, from the headers beside the library that runs (jit/nccl_headers.py: PRELUDE).
// Without them it declares no transport.
//
// - A put and its signal are one request. A signal stands for its put and all earlier ones from this rank on the same
//   context; so each kind of call has a context, and one thread puts the chunks of a node, in their order.
// - Signals only grow, and are polled within a deadline: NCCL's own waits have no limit.
// - A put may block while the queue of (context, peer) is full, so chunks times turns are fewer than kQueueDepth.
#pragma once
#include "device/transport/rail.cuh"

constexpr int kQueueDepth = 32;  // of NCCL's proxy, for each context and peer

#ifdef NCCL_VERSION_CODE
// One thread sets a signal to zero. Nobody may raise it meanwhile.
__device__ __forceinline__ void reset_signal(uint64 comm, Traffic traffic, uint32 signal) {
    const ncclGin net(*reinterpret_cast<const ncclDevComm*>(comm), traffic);
    net.resetSignal(signal);
}

template <>
struct RailTransport<kByGin> {
    const Rail& rail;

    // Two calls may be open, and received in either order; so a receiving half finds what its sending half has left.
    template <int kPart>
    __device__ __forceinline__ uint64 before(Traffic traffic, uint32 epoch) const {
        return kPart == kReceive ? rail.counts[traffic].before[epoch % kTurns] : rail.counts[traffic].sent;
    }

    // All blocks have asked for `before`.
    __device__ __forceinline__ void count_call(Traffic traffic, uint32 epoch) const {
        SignalCount& count = rail.counts[traffic];
        count.before[epoch % kTurns] = count.sent;
        count.sent += rail.chunks;
    }

    // Where a wait has expired nothing was put, and others wait in vain.
    __device__ __forceinline__ void give_up(const Call&, int, int) const {}

    // Puts bytes of this rank's window to a peer's, and adds 1 to a signal there behind them. It releases at the scope of
    // the device, which the network needs and other GPUs do not see. What other threads have written is released with
    // it if this thread has acquired it.
    __device__ __forceinline__ void put(Traffic traffic, int peer, uint64 to, uint64 from, uint64 bytes, uint32 signal,
                                        void* descriptor) const {
        static_assert(sizeof(ncclGinDescriptorSmem) <= kDescriptorBytes && alignof(ncclGinDescriptorSmem) <= 64,
                      "requests are written there first");
        const auto& device_comm = *reinterpret_cast<const ncclDevComm*>(rail.comm);
        const auto memory = reinterpret_cast<ncclWindow_t>(rail.window);
        const ncclGin net(device_comm, traffic);
        const auto team = ncclTeamWorld(device_comm);
        const ncclGin_SignalInc action{signal};
        const ncclGin_DescriptorSmem where{static_cast<ncclGinDescriptorSmem*>(descriptor)};
        if (bytes == 0) net.signal(team, peer, action, ncclCoopThread(), where);
        else net.put(team, peer, memory, to, memory, from, bytes, action, ncclGin_None(), ncclCoopThread(), where);
    }

    // How often a signal was raised.
    __device__ __forceinline__ uint64 count(Traffic traffic, uint32 signal) const {
        ncclGin net(*reinterpret_cast<const ncclDevComm*>(rail.comm), traffic);
        return net.readSignal(signal);
    }

    // Waits until a signal has been raised so often. Behind a barrier its block may read what was put. False: a wait has
    // expired.
    __device__ __forceinline__ bool wait(Traffic traffic, uint32 signal, uint64 wanted, const Deadline& deadline,
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
};
#endif
