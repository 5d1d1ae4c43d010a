// Rows that say by themselves that they are here: no flag follows them, so nobody orders or counts anything.
//
// Memory where such rows come lies full of kAbsent, word by word. Who sends never stores that word. Who waits polls the
// words that it needs anyway, and sets them back when it has read them: that is in time for the next rows that come
// there, as those wait for the end of its call (device/transport/call.cuh).
//
// Every access is relaxed, at system scope, and a word is its own signal. So it is right in whatever order words come.
#pragma once
#include "device/sync/wait.cuh"

constexpr uint32 kAbsent = 0xffffffffu;  // buffers.py fills memory with it

// Stores of rows that are awaited so, for what takes PlainStores too. One word becomes another: it loses a sign, and stays
// NaN in every dtype.
struct ArrivingStores {
    static __device__ __forceinline__ void store(void* to, Vec16 v) {
#pragma unroll
        for (uint32& word : v.word) word = present(word);
        store_16_relaxed_sys(to, v);
    }

    static __device__ __forceinline__ void store(uint32* to, uint32 word) { store_relaxed_sys(to, present(word)); }

   private:
    static __device__ __forceinline__ uint32 present(uint32 word) { return word == kAbsent ? kAbsent >> 1 : word; }
};

// The first type if rows arrive so, else the second.
template <bool kArrives, class Arriving, class Signalled>
struct IfArrives {
    using Type = Signalled;
};

template <class Arriving, class Signalled>
struct IfArrives<true, Arriving, Signalled> {
    using Type = Arriving;
};

__device__ __forceinline__ bool has_arrived(const Vec16& v) {
    return v.word[0] != kAbsent && v.word[1] != kAbsent && v.word[2] != kAbsent && v.word[3] != kAbsent;
}

// One thread waits for 16 bytes of a peer. False: expired.
__device__ __forceinline__ bool wait_for_16(const void* from, uint32 epoch, const Deadline& deadline, uint32 peer,
                                            uint32 phase) {
    const auto look = [from] { return static_cast<uint32>(has_arrived(load_16_relaxed_sys(from))); };
    return poll(look, [](uint32 here) { return here != 0; }, epoch, deadline, peer, phase);
}

// The same for words of 32 bits, which are asked for together. Null: there is none.
template <int kWords>
__device__ __forceinline__ bool wait_for_words(const uint32* const (&from)[kWords], uint32 (&words)[kWords], uint32 epoch,
                                               const Deadline& deadline, uint32 peer, uint32 phase) {
    bool here = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = from[i] == nullptr ? 0 : load_relaxed_sys(from[i]);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        if (words[i] != kAbsent) continue;
        const auto look = [&] { return words[i] = load_relaxed_sys(from[i]); };
        here = here && poll(look, [](uint32 word) { return word != kAbsent; }, epoch, deadline, peer, phase);
    }
    return here;
}

// One thread, of what it has read. A plain store: its own loads come before, and others write there behind this kernel.
__device__ __forceinline__ void set_back_16(void* address) {
    store_16(address, Vec16{{kAbsent, kAbsent, kAbsent, kAbsent}});
}
