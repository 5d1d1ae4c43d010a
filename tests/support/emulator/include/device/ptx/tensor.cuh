// device/ptx/tensor.cuh for the emulator: no copies by tensor maps.
#pragma once
#include "device/ptx/bulk.cuh"

struct alignas(64) TensorMap {
    uint64 word[16];
};
