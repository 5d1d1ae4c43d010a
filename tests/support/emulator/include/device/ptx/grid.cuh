// Kernels of a stream run one after the other here, so there is nothing to wait for.
#pragma once
#include "device/ptx/types.cuh"

__device__ __forceinline__ void let_next_kernel_begin() {}
__device__ __forceinline__ void wait_for_earlier_kernels() {}
