// Warps of a block report which items they have finished; one more, the notify warp, tells other ranks.
//
// A release at system scope waits until everything that the SM has written before is where it goes, which takes
// microseconds while rows are streaming out: the warps that stream must not wait for it, and one release serves all.
#pragma once
#include "device/ptx/memory.cuh"

template <int kWarps>
struct Progress {
    static constexpr int kRecent = 16;  // items of a warp that may be begun and not yet notified
    uint32 done[kWarps];                // in shared memory, as everything here
    uint32 notified[kWarps];
    uint32 closed[kWarps];              // no more items come
    uint32 item[kWarps][kRecent];
    static_assert(kWarps <= 32, "one lane watches one warp");

    __device__ void clear(int lane) {
        if (lane < kWarps) done[lane] = notified[lane] = closed[lane] = 0;
    }

    // This warp begins its item number `count`.
    __device__ void begin(int warp, uint32 count, int32 what, int lane) {
        while (count - load_acquire_cta(&notified[warp]) >= kRecent) {
        }
        if (lane == 0) store_release_cta(&item[warp][count % kRecent], what);
    }

    // All that the lanes of this warp have written for its first `count` items comes before.
    __device__ void report(int warp, uint32 count, int lane) {
        __syncwarp();
        if (lane == 0) store_release_cta(&done[warp], count);
    }

    __device__ void close(int warp, int lane) {
        if (lane == 0) store_release_cta(&closed[warp], 1);
    }

    // The notify warp. `notify(item)` is called by one lane each, in any order; what was written for the item is
    // ordered before what the lane stores then.
    template <class Notify>
    __device__ void watch(int lane, Notify notify) {
        uint32 before = 0;
        while (true) {
            const bool last = lane >= kWarps || load_acquire_cta(&closed[lane]) != 0;
            const uint32 now = lane < kWarps ? load_acquire_cta(&done[lane]) : 0;
            if (__any_sync(~0u, now != before)) {
                fence_acq_rel_sys();
                for (uint32 i = before; i != now; ++i)
                    notify(static_cast<int32>(load_acquire_cta(&item[lane][i % kRecent])));
                if (lane < kWarps && before != now) store_release_cta(&notified[lane], now);
                before = now;
                __syncwarp();
            } else if (__all_sync(~0u, last)) {
                return;
            } else {
                sleep_ns(100);
            }
        }
    }
};
