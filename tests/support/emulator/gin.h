// The few names of NCCL's GPU-initiated networking that kernels use, for the emulator. Puts land late: payloads in any
// order, a signal when the payloads of its put and of earlier ones of its rank, peer and context are there.
#pragma once
#include "emulator.h"
#define NCCL_VERSION_CODE 22809

constexpr int kEmulatedContexts = 4;

// One rank's view; all ranks' tables are the same.
struct ncclDevComm {
    int rank, nRanks;
    uint64_t signals[32];  // of each rank: uint64_t [contexts][signals]
    uint64_t num_signals;
};

struct ncclWindow_vidmem {
    uint64_t bases[32];  // of each rank
};
typedef ncclWindow_vidmem* ncclWindow_t;

struct ncclTeam {};
inline ncclTeam ncclTeamWorld(const ncclDevComm&) { return {}; }
struct ncclGin_SignalInc {
    uint32_t signal;
};
struct ncclGin_None {};
struct ncclCoopThread {};
struct alignas(16) ncclGinDescriptorSmem {
    char space[64];
};
struct ncclGin_DescriptorSmem {
    ncclGinDescriptorSmem* descriptor;
};

extern "C" void emulated_put(int rank, int peer, int context, void* to, const void* from, uint64_t bytes,
                             uint64_t* signal);

struct ncclGin {
    const ncclDevComm& comm;
    int context;

    ncclGin(const ncclDevComm& comm_, int context_) : comm(comm_), context(context_) {}

    uint64_t* signal_of(int rank, uint32_t signal) const {
        return reinterpret_cast<uint64_t*>(comm.signals[rank]) + context * comm.num_signals + signal;
    }
    void put(ncclTeam, int peer, ncclWindow_t to_window, size_t to, ncclWindow_t from_window, size_t from, size_t bytes,
             ncclGin_SignalInc action, ncclGin_None, ncclCoopThread, ncclGin_DescriptorSmem) const {
        emulated_put(comm.rank, peer, context, reinterpret_cast<void*>(to_window->bases[peer] + to),
                     reinterpret_cast<const void*>(from_window->bases[comm.rank] + from), bytes,
                     signal_of(peer, action.signal));
        emulated_yield();
    }
    void signal(ncclTeam, int peer, ncclGin_SignalInc action, ncclCoopThread, ncclGin_DescriptorSmem) const {
        emulated_put(comm.rank, peer, context, nullptr, nullptr, 0, signal_of(peer, action.signal));
        emulated_yield();
    }
    void resetSignal(uint32_t signal) const { *signal_of(comm.rank, signal) = 0; }
    uint64_t readSignal(uint32_t signal) const {
        emulated_yield();
        return *static_cast<volatile uint64_t*>(signal_of(comm.rank, signal));
    }
};
