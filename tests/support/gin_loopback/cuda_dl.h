// The CUDA driver functions that the plugin and its self-test use, looked up at run time, so that nothing
// links against libcuda and mock_cuda.c can stand in for it (GINLOOP_LIBCUDA names the library).
#pragma once
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#if CUDA_VERSION < 13000
#error "needs the cuda.h of CUDA 13.0 or newer (cuMemcpyBatchAsync without failIdx)"
#endif

#define CUDA_FUNCTIONS(X)                                                                                             \
  X(cuInit)                                                                                                           \
  X(cuGetErrorName)                                                                                                   \
  X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDriverGetVersion)                 \
      X(cuDeviceCanAccessPeer) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxGetCurrent)            \
          X(cuCtxSetCurrent) X(cuCtxGetDevice) X(cuCtxGetStreamPriorityRange) X(cuThreadExchangeStreamCaptureMode)    \
              X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamQuery) X(cuEventCreate) X(cuEventDestroy)    \
                  X(cuEventRecord) X(cuEventQuery) X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost)      \
                      X(cuMemcpyAsync) X(cuMemcpyBatchAsync) X(cuMemGetAddressRange) X(cuMemGetAllocationGranularity) \
                          X(cuMemCreate) X(cuMemRelease) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap)       \
                              X(cuMemUnmap) X(cuMemSetAccess) X(cuMemRetainAllocationHandle)                          \
                                  X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)

struct cuda_api {
#define X(f) __typeof__(&f) f##_;
  CUDA_FUNCTIONS(X)
#undef X
  int ready;
};

// cuda.h renames functions to their newest version (cuMemAlloc -> cuMemAlloc_v2); both the member and the
// looked-up symbol go through that macro, so they stay in step.
#define CUDA_STR_(x) #x
#define CUDA_STR(x) CUDA_STR_(x)
static inline int cuda_load(struct cuda_api* api, char* why, size_t why_size) {
  if (api->ready) return 0;
  const char* name = getenv("GINLOOP_LIBCUDA");
  void* lib = dlopen(name ? name : "libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!lib) {
    snprintf(why, why_size, "%s", dlerror());
    return -1;
  }
#define X(f)                                                   \
  api->f##_ = (__typeof__(&f))dlsym(lib, CUDA_STR(f));         \
  if (!api->f##_) {                                            \
    snprintf(why, why_size, "libcuda has no %s", CUDA_STR(f)); \
    return -1;                                                 \
  }
  CUDA_FUNCTIONS(X)
#undef X
  api->ready = 1;
  return 0;
}
