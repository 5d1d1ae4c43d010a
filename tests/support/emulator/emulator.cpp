// Fibers for the threads of kernels, streams of kernels for GPUs, and copies that happen some time. emulator.py is the
// other side.
#include "emulator.h"
#include "product.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kStackBytes = 128 << 10;

constexpr size_t kSharedBytes = 256 << 10;  // of a block: matrix descriptors hold the lower 18 bits of addresses

struct Copy {
    Piece first;
    uint64_t* barrier;  // of a load
    std::vector<Piece> rest = {};
    std::vector<unsigned char> bytes = {};
    int left = 2;  // steps: read, write
    size_t size() const {
        size_t sum = first.size;
        for (const Piece& piece : rest) sum += piece.size;
        return sum;
    }
};

// A put over the network, until its signal is raised.
struct Put {
    int rank, peer, context;
    void* to;
    const void* from;
    size_t size;
    uint64_t* signal;
    std::vector<unsigned char> read;  // what it brings, where the source was read at once
    bool landed = false;
};

// Of __builtin_setjmp, which saves less than setjmp: there are millions of switches.
using Jump = void* [5];

struct Block;

struct Fiber {
    ucontext_t context;
    Jump jump;
    void* stack = nullptr;
    Block* block = nullptr;
    unsigned thread = 0;
    bool begun = false, done = false, waits = false;
    using Groups = std::vector<std::vector<std::shared_ptr<Copy>>>;
    Groups groups[2];  // of bulk stores, and of copies by single threads; the last of each is not committed
};

struct Warp {
    uint64_t slots[2][32] = {};
    unsigned turn = 0, arrived = 0, alive = 32;
};

struct Kernel {
    void (*run)(const void*);
    std::vector<unsigned char> args;
    unsigned blocks, threads, cluster;
    size_t shared_bytes;
};

struct Meeting {
    unsigned arrived = 0;
    std::vector<Fiber*> waiting = {};
};

struct Launch;

struct Block {
    Launch* launch;
    unsigned index;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    unsigned char* shared;  // kSharedBytes
    std::map<int, Meeting> named;
    std::unordered_map<int, std::vector<unsigned char>> statics;
    unsigned arrived = 0, alive, count = 0;
    int threads_then[2] = {}, count_then[2] = {};
    unsigned turn = 0;
};

struct Stream;

struct Launch {
    Kernel kernel;
    const Stream* stream;
    std::vector<std::unique_ptr<Block>> blocks;
    std::map<unsigned, Meeting> clusters;
    size_t fibers_left;
};

struct Stream {
    std::deque<Kernel> waiting;
    std::unique_ptr<Launch> running;
    uint64_t finished = 0;
    uint64_t slowness = 1;  // its fibers run every so many turns that they could have
};

std::vector<Stream> streams;
std::deque<Fiber*> ready;
std::vector<std::shared_ptr<Copy>> copies;
uint64_t copy_slowness = 1;  // a copy makes a step every so many turns
constexpr uint64_t kPutSlowness = 64;
uint64_t put_slowness = kPutSlowness;  // the same of a put
std::unordered_map<const uint64_t*, std::vector<Fiber*>> at_barriers;  // who waits for its phase to end
std::vector<Put> on_their_way;  // in the order in which they were issued
std::map<std::pair<uint64_t, uint32_t>, std::vector<unsigned char>> posted;  // to all-to-alls, by number and rank
std::vector<void*> stacks;
std::vector<unsigned char*> free_shared;
std::mt19937_64 chance(1);
Fiber* current = nullptr;
Jump scheduler;
uint64_t ticks = 0;

Warp& warp_of(Fiber& fiber) { return fiber.block->warps[fiber.thread / 32]; }

// Not the function of a setjmp, as the compiler wants it.
[[noreturn, gnu::noinline]] void to_scheduler() { __builtin_longjmp(scheduler, 1); }

void switch_out() {
    if (__builtin_setjmp(current->jump) == 0) to_scheduler();
}

void make_ready(Fiber& fiber) {
    fiber.waits = false;
    ready.push_back(&fiber);
}

void release_warp(Block& block, unsigned index) {
    Warp& warp = block.warps[index];
    warp.arrived = 0;
    ++warp.turn;
    for (unsigned lane = 0; lane < 32; ++lane) {
        Fiber& fiber = block.fibers[index * 32 + lane];
        if (!fiber.done && fiber.waits) make_ready(fiber);
    }
}

void release_block(Block& block) {
    block.threads_then[block.turn & 1] = static_cast<int>(block.alive);
    block.count_then[block.turn & 1] = static_cast<int>(block.count);
    block.arrived = block.count = 0;
    ++block.turn;
    for (Fiber& fiber : block.fibers)
        if (!fiber.done && fiber.waits) make_ready(fiber);
}

void body(unsigned low, unsigned high) {
    auto* fiber = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(low) | static_cast<uintptr_t>(high) << 32);
    Block& block = *fiber->block;
    block.launch->kernel.run(block.launch->kernel.args.data());
    fiber->done = true;
    Warp& warp = warp_of(*fiber);
    --warp.alive;
    --block.alive;
    if (warp.alive != 0 && warp.arrived == warp.alive) release_warp(block, fiber->thread / 32);
    if (block.alive != 0 && block.arrived == block.alive) release_block(block);
    --block.launch->fibers_left;
    to_scheduler();
}

// Shared memory of a block, at an address of 32 bits and a multiple of its size, as its addresses are on GPUs.
unsigned char* take_shared() {
    if (free_shared.empty()) {
        constexpr size_t kTogether = 64;
        void* found = mmap(nullptr, (kTogether + 1) * kSharedBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_32BIT, -1, 0);
        if (found == MAP_FAILED) std::abort();
        auto first = (reinterpret_cast<uintptr_t>(found) + kSharedBytes - 1) / kSharedBytes * kSharedBytes;
        for (size_t i = 0; i < kTogether; ++i)
            free_shared.push_back(reinterpret_cast<unsigned char*>(first + i * kSharedBytes));
    }
    unsigned char* shared = free_shared.back();
    free_shared.pop_back();
    return shared;
}

void end(Stream& stream) {
    for (const auto& block : stream.running->blocks) free_shared.push_back(block->shared);
    stream.running.reset();
}

// Not among those that are ready, until somebody wakes it.
void sleep_among(std::vector<Fiber*>& waiting) {
    waiting.push_back(current);
    switch_out();
}

void wake(std::vector<Fiber*>& waiting) {
    ready.insert(ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

void meet(Meeting& meeting, unsigned threads) {
    if (++meeting.arrived < threads) return sleep_among(meeting.waiting);
    meeting.arrived = 0;
    wake(meeting.waiting);
}

void begin(Stream& stream) {
    stream.running = std::make_unique<Launch>();
    Launch& launch = *stream.running;
    launch.kernel = std::move(stream.waiting.front());
    launch.stream = &stream;
    stream.waiting.pop_front();
    const Kernel& kernel = launch.kernel;
    launch.fibers_left = static_cast<size_t>(kernel.blocks) * kernel.threads;
    for (unsigned index = 0; index < kernel.blocks; ++index) {
        auto block = std::make_unique<Block>();
        block->launch = &launch;
        block->index = index;
        block->fibers = std::vector<Fiber>(kernel.threads);
        block->warps = std::vector<Warp>((kernel.threads + 31) / 32);
        block->alive = kernel.threads;
        block->shared = take_shared();
        std::memset(block->shared, 0xcd, kernel.shared_bytes);  // what lay there before is nobody's
        for (unsigned thread = 0; thread < kernel.threads; ++thread) {
            Fiber& fiber = block->fibers[thread];
            fiber.block = block.get();
            fiber.thread = thread;
            for (auto& groups : fiber.groups) groups.emplace_back();
            make_ready(fiber);
        }
        launch.blocks.push_back(std::move(block));
    }
}

void take_stack(Fiber& fiber) {
    if (stacks.empty()) {
        fiber.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    } else {
        fiber.stack = stacks.back();
        stacks.pop_back();
    }
}

void run_fiber(Fiber& fiber) {
    current = &fiber;
    if (__builtin_setjmp(scheduler) == 0) {
        if (fiber.begun) __builtin_longjmp(fiber.jump, 1);
        fiber.begun = true;
        take_stack(fiber);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = nullptr;
        const auto address = reinterpret_cast<uintptr_t>(&fiber);
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(body), 2, static_cast<unsigned>(address),
                    static_cast<unsigned>(address >> 32));
        setcontext(&fiber.context);
    }
    if (current->done) stacks.push_back(current->stack);
    current = nullptr;
}

void complete(uint64_t* barrier, uint32_t bytes);

void step(Copy& copy) {
    if (copy.left == 2) {
        const auto read = [&](const Piece& piece) {
            const auto* from = static_cast<const unsigned char*>(piece.from);
            copy.bytes.insert(copy.bytes.end(), from, from + piece.size);
        };
        read(copy.first);
        for (const Piece& piece : copy.rest) read(piece);
    } else if (copy.left == 1) {
        const unsigned char* from = copy.bytes.data();
        const auto write = [&](const Piece& piece) {
            std::memcpy(piece.to, from, piece.size);
            from += piece.size;
        };
        write(copy.first);
        for (const Piece& piece : copy.rest) write(piece);
        if (copy.barrier != nullptr) complete(copy.barrier, static_cast<uint32_t>(copy.size()));
    }
    --copy.left;
}

void step_copies() {
    if (copies.empty() || (copy_slowness > 1 && chance() % copy_slowness != 0)) return;
    const size_t i = chance() % copies.size();
    step(*copies[i]);
    if (copies[i]->left == 0) {
        copies[i] = copies.back();
        copies.pop_back();
    }
}

// The payload of a put lands, or its signal, if no payload before it is missing. The network takes its time: what is put
// from is read as late, or at once.
void step_puts() {
    if (on_their_way.empty() || chance() % put_slowness != 0) return;
    const size_t i = chance() % on_their_way.size();
    Put& put = on_their_way[i];
    if (!put.landed) {
        if (put.size != 0) std::memcpy(put.to, put.read.empty() ? put.from : put.read.data(), put.size);
        put.landed = true;
        return;
    }
    for (size_t before = 0; before < i; ++before) {
        const Put& other = on_their_way[before];
        if (!other.landed && other.rank == put.rank && other.peer == put.peer && other.context == put.context) return;
    }
    ++*put.signal;
    on_their_way.erase(on_their_way.begin() + static_cast<std::ptrdiff_t>(i));
}

// A barrier in 64 bits: arrivals a phase needs, arrivals and bytes that are missing in this phase, and the phase.
struct Barrier {
    uint16_t needed, missing;
    int32_t phase_and_bytes;  // bytes * 2 + phase; bytes may be negative for a while
    int phase() const { return phase_and_bytes & 1; }
    int bytes() const { return phase_and_bytes >> 1; }
    void set(int bytes, int phase) { phase_and_bytes = bytes * 2 + phase; }
};

Barrier& barrier_of(uint64_t* word) { return *reinterpret_cast<Barrier*>(word); }

void settle(uint64_t* word) {
    Barrier& barrier = barrier_of(word);
    if (barrier.missing != 0 || barrier.bytes() != 0) return;
    barrier.missing = barrier.needed;
    barrier.set(0, barrier.phase() ^ 1);
    const auto found = at_barriers.find(word);
    if (found != at_barriers.end()) wake(found->second);
}

void complete(uint64_t* word, uint32_t bytes) {
    Barrier& barrier = barrier_of(word);
    barrier.set(barrier.bytes() - static_cast<int>(bytes), barrier.phase());
    settle(word);
}

}  // namespace

extern "C" {

Index emulated_thread() { return {current->thread}; }
Index emulated_block() { return {current->block->index}; }
Index emulated_grid() { return {current->block->launch->kernel.blocks}; }
unsigned char* emulated_shared() { return current->block->shared; }
uint64_t emulated_clock() { return ticks; }

void* emulated_static(int key, size_t bytes) {
    auto& memory = current->block->statics[key];
    if (memory.empty()) memory.assign(bytes + 16, 0xcd);
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
}

uint64_t emulated_chance() { return chance(); }

void emulated_yield() {
    ready.push_back(current);
    switch_out();
}

const uint64_t* emulated_meet(uint64_t value) {
    Fiber& fiber = *current;
    Warp& warp = warp_of(fiber);
    const unsigned turn = warp.turn & 1;
    warp.slots[turn][fiber.thread % 32] = value;
    if (++warp.arrived == warp.alive) {
        release_warp(*fiber.block, fiber.thread / 32);
    } else {
        fiber.waits = true;
        switch_out();
    }
    return warp.slots[turn];
}

void emulated_block_barrier(int predicate, int* threads, int* count) {
    Fiber& fiber = *current;
    Block& block = *fiber.block;
    const unsigned turn = block.turn & 1;
    block.count += static_cast<unsigned>(predicate);
    if (++block.arrived == block.alive) {
        release_block(block);
    } else {
        fiber.waits = true;
        switch_out();
    }
    *threads = block.threads_then[turn];
    *count = block.count_then[turn];
}

void emulated_bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    copies.push_back(std::make_shared<Copy>(Copy{{to, from, bytes}, barrier}));
}

void emulated_load_pieces(const Piece* pieces, size_t count, uint64_t* barrier) {
    copies.push_back(std::make_shared<Copy>(Copy{pieces[0], barrier, {pieces + 1, pieces + count}}));
}

unsigned emulated_cluster_rank() { return current->block->index % current->block->launch->kernel.cluster; }

unsigned char* emulated_shared_of(unsigned rank) {
    const Block& own = *current->block;
    return own.launch->blocks[own.index - emulated_cluster_rank() + rank]->shared;
}

void emulated_cluster_barrier() {
    Launch& launch = *current->block->launch;
    const Kernel& kernel = launch.kernel;
    meet(launch.clusters[current->block->index / kernel.cluster], kernel.cluster * kernel.threads);
}

void emulated_named_barrier(int barrier, int threads) {
    meet(current->block->named[barrier], static_cast<unsigned>(threads));
}

void emulated_bulk_store(void* to, const void* from, uint32_t bytes) {
    auto copy = std::make_shared<Copy>(Copy{{to, from, bytes}, nullptr});
    copies.push_back(copy);
    current->groups[0].back().push_back(copy);
}

void emulated_copy(void* to, const void* from, uint32_t bytes) {
    auto copy = std::make_shared<Copy>(Copy{{to, from, bytes}, nullptr});
    copies.push_back(copy);
    current->groups[1].back().push_back(copy);
}

void emulated_put(int rank, int peer, int context, void* to, const void* from, uint64_t bytes, uint64_t* signal) {
    on_their_way.push_back({rank, peer, context, to, from, bytes, signal, {}});
    const auto* first = static_cast<const unsigned char*>(from);
    if (bytes != 0 && chance() % 2 == 0) on_their_way.back().read.assign(first, first + bytes);
}

void emulated_commit(int kind) { current->groups[kind].emplace_back(); }

void emulated_wait(int kind, int pending, int written) {
    auto& groups = current->groups[kind];
    const auto is_over = [&]() {
        const int committed = static_cast<int>(groups.size()) - 1;
        for (int i = 0; i < committed - pending; ++i)
            for (const auto& copy : groups[i])
                if (copy->left > (written ? 0 : 1)) return false;
        return true;
    };
    while (!is_over()) emulated_yield();
    while (groups.size() > 1) {  // forget what is written
        bool over = true;
        for (const auto& copy : groups.front()) over = over && copy->left == 0;
        if (!over) break;
        groups.erase(groups.begin());
    }
}

void emulated_barrier_init(uint64_t* barrier, uint32_t arrivals) {
    Barrier& found = barrier_of(barrier);
    found.needed = found.missing = static_cast<uint16_t>(arrivals);
    found.set(0, 0);
}

void emulated_barrier_expect(uint64_t* word, uint32_t bytes) {
    Barrier& barrier = barrier_of(word);
    barrier.set(barrier.bytes() + static_cast<int>(bytes), barrier.phase());
    --barrier.missing;
    settle(word);
}

void emulated_barrier_wait(uint64_t* word, uint32_t parity) {
    while (barrier_of(word).phase() == static_cast<int>(parity)) sleep_among(at_barriers[word]);
}

// -- for emulator.py ----------------------------------------------------------------------------------------------

void emulator_reset(unsigned num_streams, uint64_t seed) {
    for (Stream& stream : streams)
        if (stream.running) end(stream);
    streams = std::vector<Stream>(num_streams);
    ready.clear();
    copies.clear();
    at_barriers.clear();
    copy_slowness = 1;
    put_slowness = kPutSlowness;
    on_their_way.clear();
    posted.clear();
    chance.seed(seed);
}

void emulator_slow_down(unsigned stream, uint64_t slowness) { streams[stream].slowness = slowness; }

void emulator_slow_copies(uint64_t slowness) { copy_slowness = slowness; }

void emulator_slow_network(uint64_t slowness) { put_slowness = slowness; }

void emulator_launch(unsigned stream, void (*run)(const void*), const void* args, size_t args_bytes, unsigned blocks,
                     unsigned threads, unsigned cluster, size_t shared_bytes) {
    const auto* first = static_cast<const unsigned char*>(args);
    streams[stream].waiting.push_back({run, {first, first + args_bytes}, blocks, threads, cluster, shared_bytes});
}

// An all-to-all of the host's, as a kernel of a stream: parts of equal size, of ranks in a mask, by rank.
struct AllToAll {
    uint64_t from, to, part_bytes, sequence;  // the same sequence on all ranks
    uint32_t rank, ranks;
};

void emulated_all_to_all(const void* args) {
    const auto& given = *static_cast<const AllToAll*>(args);
    if (emulated_thread().x != 0) return;
    for (uint64_t turns = chance() % 512; turns > 0; --turns) emulated_yield();
    const auto number = [](uint32_t ranks) { return static_cast<uint64_t>(__builtin_popcount(ranks)); };
    const auto* from = reinterpret_cast<const unsigned char*>(given.from);
    posted[{given.sequence, given.rank}] = {from, from + number(given.ranks) * given.part_bytes};
    const uint64_t own = number(given.ranks & ((1u << given.rank) - 1));
    auto* to = reinterpret_cast<unsigned char*>(given.to);
    for (uint32_t rank = 0; rank < 32; ++rank) {
        if ((given.ranks >> rank & 1) == 0) continue;
        while (posted.count({given.sequence, rank}) == 0) emulated_yield();
        std::memcpy(to, posted[{given.sequence, rank}].data() + own * given.part_bytes, given.part_bytes);
        to += given.part_bytes;
    }
}

// Runs what there is to run, for so many turns of fibers. Returns: kernels that have not finished.
size_t emulator_run(uint64_t turns) {
    for (uint64_t turn = 0; turn < turns; ++turn) {
        ++ticks;
        size_t unfinished = 0;
        if (turn % 64 == 0 || ready.empty()) {
            for (Stream& stream : streams) {
                if (stream.running && stream.running->fibers_left == 0) {
                    end(stream);
                    ++stream.finished;
                }
                if (!stream.running && !stream.waiting.empty()) begin(stream);
                unfinished += stream.waiting.size() + (stream.running ? 1 : 0);
            }
            if (unfinished == 0 && copies.empty()) return 0;
        }
        step_copies();
        step_puts();
        if (ready.empty()) continue;
        // Mostly the one that has waited longest: polls would starve the others.
        if (chance() % 4 == 0) std::swap(ready.front(), ready[chance() % ready.size()]);
        Fiber* fiber = ready.front();
        ready.pop_front();
        const uint64_t slowness = fiber->block->launch->stream->slowness;
        if (slowness > 1 && chance() % slowness != 0) ready.push_back(fiber);
        else run_fiber(*fiber);
    }
    size_t unfinished = 0;
    for (Stream& stream : streams) unfinished += stream.waiting.size() + (stream.running ? 1 : 0);
    return unfinished;
}

// Ends what runs on a stream, wherever its threads are, and forgets what waits there. Bulk copies to and from its shared
// memory do not happen any more.
void emulator_kill(unsigned index) {
    Stream& stream = streams[index];
    stream.waiting.clear();
    if (!stream.running) return;
    Launch* launch = stream.running.get();
    for (size_t i = ready.size(); i-- > 0;)
        if (ready[i]->block->launch == launch) ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(i));
    const auto is_of_it = [&](const void* address) {
        for (const auto& block : launch->blocks) {
            if (address >= block->shared && address < block->shared + kSharedBytes) return true;
        }
        return false;
    };
    for (size_t i = copies.size(); i-- > 0;)
        if (is_of_it(copies[i]->first.to) || is_of_it(copies[i]->first.from)) copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
    for (auto each = at_barriers.begin(); each != at_barriers.end();)
        each = is_of_it(each->first) ? at_barriers.erase(each) : std::next(each);
    for (const auto& block : launch->blocks)
        for (Fiber& fiber : block->fibers)
            if (fiber.begun && !fiber.done) stacks.push_back(fiber.stack);
    end(stream);
}

uint64_t emulator_finished(unsigned stream) { return streams[stream].finished; }
}
