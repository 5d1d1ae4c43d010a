// Kernels that follow each other on a stream, the later of which may begin before the earlier has ended.
//
// The host allows it (Kernel.overlaps_previous), and the earlier kernel says when. Without the host both do nothing.
#pragma once
#include "device/ptx/types.cuh"

// Once all blocks have said so, or have ended, blocks of the next kernel begin where there is room for them.
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The kernel before has ended, with all that its threads have waited for in the same way; what they wrote is visible.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
