// device/ptx/tensor.cuh for the emulator. A map holds what tensor_map of support/emulator/gemm.py writes down.
#pragma once
#include <vector>

#include "device/ptx/cluster.cuh"

struct alignas(64) TensorMap {
    uint64 word[16];
};

inline void tensor_prefetch(const TensorMap*) {}
inline void tensor_map_fence(const TensorMap*) {}

// 128-byte swizzle: of 16-byte units in rows of 128 bytes, whose number is in the address.
inline uint32 swizzled(uint32 address) { return address ^ (address >> 7 & 7) << 4; }

inline void emulated_tensor_load(uint32 to, const TensorMap* map, int32 x, int32 y, int32 z, uint64* barrier) {
    static const unsigned char zeros[16] = {};
    const auto* base = reinterpret_cast<const unsigned char*>(map->word[0]);
    const int64 value_bytes = map->word[1], width = map->word[2], height = map->word[3], depth = map->word[4];
    const int64 box_bytes = map->word[5] * value_bytes, box_rows = map->word[6];
    const int unit = box_bytes % 16 == 0 ? 16 : 4;
    std::vector<Piece> pieces;
    for (int64 row = 0; row < box_rows; ++row)
        for (int64 byte = 0; byte < box_bytes; byte += unit) {
            const uint32 place = to + static_cast<uint32>(row * box_bytes + byte);
            const int64 column = x * value_bytes + byte;
            const bool inside = y + row < height && column < width * value_bytes && z < depth;
            const auto* from = inside ? base + z * map->word[8] + (y + row) * map->word[9] + column : zeros;
            pieces.push_back({at_shared<void>(map->word[7] != 0 ? swizzled(place) : place), from,
                              static_cast<size_t>(unit)});
        }
    emulated_load_pieces(pieces.data(), pieces.size(), reinterpret_cast<uint64_t*>(barrier));
}

inline void tensor_load(void* shared, const TensorMap* map, int32 x, int32 y, uint64* barrier) {
    emulated_tensor_load(shared_address(shared), map, x, y, 0, barrier);
}
inline void tensor_load(void* shared, const TensorMap* map, int32 x, int32 y, int32 z, uint64* barrier) {
    emulated_tensor_load(shared_address(shared), map, x, y, z, barrier);
}
inline void tensor_load_once(void* shared, const TensorMap* map, int32 x, int32 y, int32 z, uint64* barrier) {
    tensor_load(shared, map, x, y, z, barrier);
}
inline void tensor_load_to_all(void* shared, const TensorMap* map, int32 x, int32 y, int32 z, uint64* barrier,
                               uint16 blocks) {
    for (uint32 rank = 0; rank < 16; ++rank)
        if (blocks >> rank & 1)
            emulated_tensor_load(map_to_block(shared_address(shared), rank), map, x, y, z,
                                 at_shared<uint64>(map_to_block(shared_address(barrier), rank)));
}
inline void tensor_load_to_all(void* shared, const TensorMap* map, int32 x, int32 y, uint64* barrier, uint16 blocks) {
    tensor_load_to_all(shared, map, x, y, 0, barrier, blocks);
}
