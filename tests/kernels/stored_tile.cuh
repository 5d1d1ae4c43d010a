// One tile that is stored by itself, on the emulator. The math warpgroups come late; only then does the wait for the tile's
// rows expire, if it does.
#pragma once
#include "device/roles/arrivals.cuh"
#include "device/roles/bf16_epilogue.cuh"
#include "device/roles/store.cuh"

struct StoredTileArgs {
    const uint64* peers;    // [1] the rank's buffer
    const uint32* homes;    // [128] of the tile's rows
    uint32* fault_claimed;  // [1] 0 before
    int32 expires;          // whether the wait for the tile's rows does
    int32 turns;            // by which the warpgroups are late
};

template <class Epilogue>
struct StoredTileShared {
    typename Epilogue::Staged staging;
    uint64 peers[1];
};

template <class Shape>
void stored_tile(const StoredTileArgs& args) {
    using Epilogue = Bf16Epilogue<kRowsOfB>;
    auto& [staging, peers] = *reinterpret_cast<StoredTileShared<Epilogue>*>(emulated_shared());
    const int group = threadIdx.x / kGroupThreads, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        staging.init(kStagingArrivals, kStoreArrivals);
        peers[0] = args.peers[0];
    }
    __syncthreads();
    const Tile tile{0, 0, kRowsOfA, 0, false, false};
    if (group == kGroups) {
        const uint64 offset = 0;
        const uint32 *homes = args.homes, *fault_claimed = args.fault_claimed;
        const RowsToHomes<1> to{homes, peers, offset, fault_claimed, Epilogue::kRowBytes};
        store_tile<Epilogue>(staging, to, tile, 0, threadIdx.x % kGroupThreads);
    } else {
        for (int i = 0; i < args.turns; ++i) __syncwarp();
        if (args.expires && threadIdx.x == 0) *args.fault_claimed = 1;
        for (int i = threadIdx.x % kGroupThreads; i < kGroupRows * Epilogue::kTileRowBytes; i += kGroupThreads)
            staging.rows[group][i / Epilogue::kTileRowBytes * Epilogue::Staged::Lines::kPitch + i % Epilogue::kTileRowBytes] = 1;
        for (int i = 0; i < args.turns; ++i) __syncwarp();
        staging.publish(group, lane);
    }
}
