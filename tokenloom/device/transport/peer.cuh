// Transport between ranks whose memory this GPU addresses itself: the peers of one NVLink domain.
//
// README.md is the contract that every transport keeps. Nothing here takes registers or instructions of its own: an
// address is one load and one addition.
#pragma once
#include "device/sync/wait.cuh"

constexpr int kMostRanks = 64;

// A mask with a bit for each rank. Where 32 bits suffice, the machine code knows no others.
template <bool kIsLong>
struct MaskBits {
    using Type = uint32;
};

template <>
struct MaskBits<true> {
    using Type = uint64;
};

template <int kRanks>
using RankMask = typename MaskBits<(kRanks > 32)>::Type;

// Signals of one rank, in a row. Other ranks raise them, and their owner waits for them.
struct PeerSignals {
    uint32* first;

    // The signals from number `begin` on.
    template <class Index>
    __device__ __forceinline__ PeerSignals from(Index begin) const {
        return {first + begin};
    }

    // One thread raises a signal, with release at system scope. Whoever acquires it sees all that this thread has
    // written, and all that it has seen other threads write behind a barrier.
    template <class Index>
    __device__ __forceinline__ void raise(Index index, uint32 value) const {
        store_release_sys(first + index, value);
    }

    // The same without an order. The caller has fenced at system scope since it learned what it announces.
    template <class Index>
    __device__ __forceinline__ void raise_relaxed(Index index, uint32 value) const {
        store_relaxed_sys(first + index, value);
    }

    // As raise, of a signal that counts: it only grows, over all calls, and whoever waits knows how far.
    template <class Index>
    __device__ __forceinline__ void add(Index index, uint32 value) const {
        add_release_sys(first + index, value);
    }

    // As raise_relaxed, of a signal that counts.
    template <class Index>
    __device__ __forceinline__ void add_relaxed(Index index, uint32 value) const {
        add_relaxed_sys(first + index, value);
    }

    // One thread of the owner waits until a signal reaches `wanted`, and acquires at system scope: what its sender
    // ordered before it is visible to this thread then, and behind a barrier to its block. False: a wait has expired.
    template <class Index>
    __device__ __forceinline__ bool wait(Index index, uint32 wanted, const Deadline& deadline, uint32 peer,
                                         uint32 phase) const {
        return wait_for_flag(first + index, wanted, deadline, peer, phase);
    }

    // The same without waiting. False: not yet.
    template <class Index>
    __device__ __forceinline__ bool is_raised(Index index, uint32 wanted) const {
        return has_reached(load_acquire_sys(first + index), wanted);
    }
};

// A window: memory that every rank has, with the same things at the same offsets. A place in it is (rank, offset).
// This is the table of where each rank's part begins, as this GPU addresses it. The host's lies in device memory;
// kernels that look places up often keep a copy in shared memory.
template <int kRanks>
struct PeerWindow {
    static_assert(kRanks <= kMostRanks, "a bit of every mask for each rank");
    uint64 bases[kRanks];

    // This rank's own part. What others put there may be read once a signal behind it has been waited for.
    template <class T>
    __device__ __forceinline__ T* local(int self, uint64 offset) const {
        return reinterpret_cast<T*>(bases[self] + offset);
    }

    // Where this rank writes what shall lie at `offset` of `rank`: with stores, or bulk stores from shared memory. For
    // peers that is the destination itself, so nothing is left to send. Order: none, until a signal. (The offset comes
    // by reference to be loaded behind the base: then the machine code is that of `bases[rank] + offset`.)
    __device__ __forceinline__ uint64 staging_address(int rank, const uint64& offset) const {
        return bases[rank] + offset;
    }

    template <class T = unsigned char>
    __device__ __forceinline__ T* staging(int rank, uint64 offset) const {
        return reinterpret_cast<T*>(staging_address(rank, offset));
    }

    // One value from a register of this thread, to number `index` of those at `offset`. Order: none, until a signal.
    template <class T, class Index>
    __device__ __forceinline__ void put(int rank, uint64 offset, Index index, T value) const {
        staging<T>(rank, offset)[index] = value;
    }

    // The same of 16 bytes.
    template <class Index>
    __device__ __forceinline__ void put_16(int rank, uint64 offset, Index index, Vec16 value) const {
        store_16(staging(rank, offset) + index * 16, value);
    }

    // The signals at `offset` of a rank.
    __device__ __forceinline__ PeerSignals signals(int rank, uint64 offset) const {
        return {staging<uint32>(rank, offset)};
    }
};
