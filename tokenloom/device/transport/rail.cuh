// Transport between nodes: to and from the other ranks of a rail, which have the same number in their nodes.
//
// Rows for a node are packed into a region, and arrive in one there. What carries regions over the network is a type of
// its own, RailTransport<Shape::carrier>, made of a Rail: gin.cuh, collective.cuh. Each has
//
//   before<part>(traffic, epoch)      how often each node has signalled in calls before this one
//   count_call(traffic, epoch)        one thread of a kernel that sends: this call's puts are counted
//   put(traffic, peer, to, from, ...) one thread for each peer: bytes of a region, and behind them a signal
//   give_up(call, nodes, lane)        one warp of a kernel that sends, where a wait has expired
//   wait(traffic, signal, wanted, ..) one thread: a signal was raised so often, and what was put ahead of it is here
//
// docs/explanation/between-nodes.md is the protocol, with the reason for each rule.
#pragma once
#include "device/transport/call.cuh"

// Kinds of traffic, each with an order of its own.
enum Traffic : int { kDispatches = 0, kCombines = 1, kTraffics = 2 };

// What carries regions.
enum Carrier : int { kByGin = 0, kByCollective = 1 };

constexpr int kMostRanksOfNodes = 32;  // of all nodes together: a lane and a bit of a word for each
constexpr int kDescriptorBytes = 128;  // in shared memory, aligned to 64: where a thread writes its request first

// How often each node has signalled, in one kind of calls. Only kernels that send rows change it.
struct SignalCount {
    uint64 sent;            // in all calls that have been sent
    uint64 before[kTurns];  // in those before the last call of each turn
};

struct Rail {
    uint64 comm;       // const ncclDevComm*: the device communicator, in device memory (GIN)
    uint64 window;     // ncclWindow_t: memory that every rank has registered (GIN)
    uint64 base;       // where this rank's part of the window begins, or 0
    uint64 put_from;   // offsets from there: [turns][nodes] regions of region_bytes each, that rows are put from,
    uint64 put_to;     // and to
    uint64 region_bytes;
    uint64 turn_bytes;    // from the regions of a turn to those of the next; 0 if each call has its own
    SignalCount* counts;  // device memory [kTraffics] (GIN)
    uint32* blocks;       // device memory [blocks]: this block has written what shall be put, in this call
    int32 chunks;         // puts for each node
    int32 chunk_rows;     // rows of a chunk

    // Regions for a node: where its rows are put from, and where those from it arrive.
    __device__ __forceinline__ uint64 region(uint64 first, int turn, int node) const {
        return first + turn * turn_bytes + node * region_bytes;
    }
};

template <int kCarrier>
struct RailTransport;

// What carries the regions of a kernel.
template <class Shape>
__device__ __forceinline__ RailTransport<Shape::carrier> transport_of(const Rail& rail) {
    return {rail};
}
