// device/ptx/cluster.cuh for the emulator.
#pragma once
#include "device/ptx/bulk.cuh"

inline uint32 cluster_rank() { return emulated_cluster_rank(); }
inline void cluster_sync() { emulated_cluster_barrier(); }
inline uint32 map_to_block(uint32 address, uint32 rank) {
    return address - shared_address(emulated_shared()) + shared_address(emulated_shared_of(rank));
}
inline void mbarrier_arrive_there(uint32 mapped_address) { mbarrier_arrive(at_shared<uint64>(mapped_address)); }
inline void fence_acq_rel_cluster() { emulated_yield(); }
inline void store_there(uint32 mapped_address, int32 value) { *at_shared<int32>(mapped_address) = value; }
