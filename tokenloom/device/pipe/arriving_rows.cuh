// A warp adds rows that come from other ranks as soon as they are here (device/sync/arrival.cuh), and others that lie in
// this GPU's memory among them.
//
// All terms of a tile are asked for together, up to kTermsAtOnce. If something is missing, each lane polls the last that
// it misses, and then all of them ask again.
#pragma once
#include "device/pipe/term_stream.cuh"
#include "device/sync/arrival.cuh"

template <int kTermDtype, int kOutDtype, int kHidden, int kGroupValues, int kMostTerms>
struct ArrivingSum {
    static constexpr int kGroups = kHidden / kGroupValues;
    static constexpr int kTermBytes = kGroupValues * kValueBytes<kTermDtype>;
    static constexpr int kOutBytes = kGroupValues * kValueBytes<kOutDtype>;
    static constexpr bool kAllAtOnce = kMostTerms <= 8;
    static constexpr int kTermsAtOnce = kAllAtOnce ? kMostTerms : 8;
    static constexpr int kRegisters = 64;  // of what is asked for together
    static constexpr int kMostSteps = kRegisters / (kTermsAtOnce * kTermBytes / 4);
    using Row = Tiles<kGroups, (kMostSteps > 1 ? kMostSteps : 1)>;
    using Packed = PackedGroup<kTermDtype, kGroupValues>;
    using Sum = Group<kGroupValues>;
    struct Shared {};

    // The first term of a mask: where its row lies, and whether it comes from elsewhere.
    struct TermUnits {
        unsigned char* row;
        bool arrives;

        __device__ __forceinline__ TermUnits(uint32 lanes, uint32 arriving, uint64 address)
            : row(reinterpret_cast<unsigned char*>(of_lane(address, lanes))),
              arrives((arriving >> (__ffs(lanes) - 1) & 1) != 0) {}

        // This lane's units of 16 bytes of a tile: take(step, number in the group, address).
        template <class Take>
        __device__ __forceinline__ void for_each(int tile, int lane, Take take) const {
            int index;
#pragma unroll
            for (int step = 0; step < Row::kSteps; ++step)
                if (Row::unit(tile, step, lane, index))
#pragma unroll
                    for (int i = 0; i < kTermBytes / 16; ++i) take(step, i, row + index * kTermBytes + 16 * i);
        }
    };

    // The next terms of a mask, up to kTermsAtOnce, of one tile.
    struct Batch {
        Packed packed[kTermsAtOnce][Row::kSteps];
        int count;                     // of them
        const unsigned char* missing;  // a unit that this lane misses, or null,
        uint32 peer;                   // and who sends it

        // Takes them from the mask once all of them are here. False in all lanes: a wait has expired.
        template <class Await>
        __device__ __forceinline__ bool bring(uint32& lanes, uint32 arriving, uint64 address, uint32 rank, int tile,
                                              int lane, Await await) {
            load(lanes, arriving, address, rank, tile, lane);
            while (__any_sync(~0u, missing != nullptr)) {
                const bool here = missing == nullptr || await(missing, peer);
                if (!__all_sync(~0u, here)) return false;
                load(lanes, arriving, address, rank, tile, lane);
            }
            count = 0;
#pragma unroll
            for (int t = 0; t < kTermsAtOnce; ++t) {
                if (lanes == 0) continue;
                const TermUnits units(lanes, arriving, address);
                if (units.arrives)
                    units.for_each(tile, lane, [&](int, int, unsigned char* unit) { set_back_16(unit); });
                lanes &= lanes - 1;
                ++count;
            }
            return true;
        }

        __device__ __forceinline__ void add_to(Sum& sum, int step) const {
#pragma unroll
            for (int t = 0; t < kTermsAtOnce; ++t)
                if (t < count) add_group(sum, unpack(packed[t][step]));
        }

       private:
        // All loads are on their way together.
        __device__ __forceinline__ void load(uint32 lanes, uint32 arriving, uint64 address, uint32 rank, int tile,
                                             int lane) {
            uint32 rest = lanes;
#pragma unroll
            for (int t = 0; t < kTermsAtOnce; ++t) {
                if (rest == 0) continue;
                const TermUnits units(rest, arriving, address);
                units.for_each(tile, lane, [&](int step, int i, const unsigned char* unit) {
                    packed[t][step].part[i] = units.arrives ? load_16_relaxed_sys(unit) : load_16_once(unit);
                });
                rest &= rest - 1;
            }
            missing = nullptr;
            rest = lanes;
#pragma unroll
            for (int t = 0; t < kTermsAtOnce; ++t) {
                if (rest == 0) continue;
                const TermUnits units(rest, arriving, address);
                const uint32 sender = of_lane(rank, rest);
                units.for_each(tile, lane, [&](int step, int i, const unsigned char* unit) {
                    if (units.arrives && !has_arrived(packed[t][step].part[i])) missing = unit, peer = sender;
                });
                rest &= rest - 1;
            }
        }
    };

    // Adds the terms in the order of lanes, of which some arrive, and stores the sum to `to`. `rank` sends this lane's
    // term; await(address, rank) waits for 16 bytes in one lane. False in all lanes: a wait has expired.
    template <class Await>
    static __device__ __forceinline__ bool add(unsigned char* to, const Terms& terms, uint32 arriving, uint32 rank,
                                               int lane, Await await) {
#pragma unroll 1
        for (int tile = terms.begin; tile < terms.end; ++tile) {
            Batch batch;
            uint32 lanes = terms.lanes;
            if constexpr (kAllAtOnce) {  // one sum after the other, for which registers are left
                if (!batch.bring(lanes, arriving, terms.address, rank, tile, lane, await)) return false;
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step) {
                    Sum sum = begin();
                    batch.add_to(sum, step);
                    store(to, tile, step, lane, sum);
                }
            } else {
                Sum sum[Row::kSteps];
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step) sum[step] = begin();
                while (lanes != 0) {
                    if (!batch.bring(lanes, arriving, terms.address, rank, tile, lane, await)) return false;
#pragma unroll
                    for (int step = 0; step < Row::kSteps; ++step) batch.add_to(sum[step], step);
                }
#pragma unroll
                for (int step = 0; step < Row::kSteps; ++step) store(to, tile, step, lane, sum[step]);
            }
        }
        return true;
    }

   private:
    // x + -0 is x for every x, so the sum starts from its first term.
    static __device__ __forceinline__ Sum begin() { return filled_group<kGroupValues>(-0.0f); }

    static __device__ __forceinline__ void store(unsigned char* to, int tile, int step, int lane, const Sum& sum) {
        int index;
        if (Row::unit(tile, step, lane, index)) store_group<kOutDtype>(to + index * kOutBytes, sum);
    }
};
