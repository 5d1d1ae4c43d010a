// A stand-in for libcuda.so on a machine without a GPU, only as wide as plugin.c and selftest.c need.
// "GPU memory" is memfd pages, so exporting, passing and importing file descriptors between processes is real.
// Streams are lazy: queued copies run a few at a time when someone queries an event, which shows up any code that
// reuses a buffer, or believes a copy done, too early.
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct op {
  struct op* next;
  void *dst, *src;
  size_t size;
  struct event* event;
};
struct stream {
  struct op *first, **last;
};
struct event {
  struct stream* stream;
  int pending;
};
struct alloc {
  int fd;
  size_t size;
  int refs, exportable;
};
struct map {
  CUdeviceptr at;
  size_t size;
  struct alloc* alloc;
  struct map* next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct map* maps;
static __thread CUcontext current;

static void run(struct stream* s, int n) {
  while (n-- && s->first) {
    struct op* o = s->first;
    if (!(s->first = o->next)) s->last = &s->first;
    if (o->event)
      o->event->pending--;
    else
      memmove(o->dst, o->src, o->size);
    free(o);
  }
}
static void enqueue(CUstream h, struct op o) {
  struct stream* s = (struct stream*)h;
  struct op* p = malloc(sizeof *p);
  *p = o, p->next = 0;
  *s->last = p, s->last = &p->next;
}

CUresult cuInit(unsigned f) {
  (void)f;
  return 0;
}
CUresult cuGetErrorName(CUresult r, const char** s) {
  *s = r == CUDA_ERROR_NOT_READY ? "NOT_READY" : r ? "MOCK_ERROR" : "SUCCESS";
  return 0;
}
CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
CUresult cuDeviceGetCount(int* n) {
  *n = 64;
  return 0;
}
CUresult cuDeviceGet(CUdevice* d, int i) {
  *d = i;
  return 0;
}
CUresult cuDeviceGetName(char* s, int n, CUdevice d) {
  snprintf(s, n, "mock GPU %d", d);
  return 0;
}
CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) {
  (void)a, (void)d;
  *v = 1;
  return 0;
}
CUresult cuDeviceCanAccessPeer(int* v, CUdevice a, CUdevice b) {
  (void)a, (void)b;
  *v = 1;
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  *c = (CUcontext)(uintptr_t)(d + 1);
  return 0;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice d) {
  (void)d;
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = current;
  return 0;
}
CUresult cuCtxSetCurrent(CUcontext c) {
  current = c;
  return 0;
}
CUresult cuCtxGetDevice(CUdevice* d) {
  *d = (int)(uintptr_t)current - 1;
  return current ? 0 : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuCtxGetStreamPriorityRange(int* l, int* h) {
  *l = 0, *h = -5;
  return 0;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* m) {
  static __thread CUstreamCaptureMode mode;
  CUstreamCaptureMode old = mode;
  mode = *m, *m = old;
  return 0;
}
CUresult cuStreamCreateWithPriority(CUstream* s, unsigned f, int p) {
  (void)f, (void)p;
  struct stream* n = calloc(1, sizeof *n);
  n->last = &n->first;
  *s = (CUstream)n;
  return 0;
}
CUresult cuStreamDestroy(CUstream s) {
  run((struct stream*)s, -1);
  free(s);
  return 0;
}
CUresult cuStreamQuery(CUstream s) {
  run((struct stream*)s, 2);
  return ((struct stream*)s)->first ? CUDA_ERROR_NOT_READY : 0;
}
CUresult cuEventCreate(CUevent* e, unsigned f) {
  (void)f;
  *e = calloc(1, sizeof(struct event));
  return 0;
}
CUresult cuEventDestroy(CUevent e) {
  free(e);
  return 0;
}
CUresult cuEventRecord(CUevent e, CUstream s) {
  ((struct event*)e)->stream = (struct stream*)s;
  ((struct event*)e)->pending++;
  enqueue(s, (struct op){.event = (struct event*)e});
  return 0;
}
CUresult cuEventQuery(CUevent h) {
  struct event* e = (struct event*)h;
  if (e->pending) run(e->stream, 1 + rand() % 3);
  return e->pending ? CUDA_ERROR_NOT_READY : 0;
}
CUresult cuMemAlloc(CUdeviceptr* p, size_t n) {
  *p = (CUdeviceptr)calloc(1, n);
  return 0;
}
CUresult cuMemFree(CUdeviceptr p) {
  free((void*)p);
  return 0;
}
CUresult cuMemHostAlloc(void** p, size_t n, unsigned f) {
  (void)f;
  *p = calloc(1, n);
  return 0;
}
CUresult cuMemFreeHost(void* p) {
  free(p);
  return 0;
}
CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream h) {
  enqueue(h, (struct op){.dst = (void*)d, .src = (void*)s, .size = n});
  return 0;
}
CUresult cuMemcpyBatchAsync(CUdeviceptr* d, CUdeviceptr* s, size_t* z, size_t n, CUmemcpyAttributes* a, size_t* i,
                            size_t k, CUstream h) {
  (void)a, (void)i, (void)k;
  for (size_t j = n; j-- > 0;) cuMemcpyAsync(d[j], s[j], z[j], h);  // a batch promises no order: go backwards
  return 0;
}
CUresult cuMemGetAllocationGranularity(size_t* g, const CUmemAllocationProp* p, CUmemAllocationGranularity_flags f) {
  (void)p, (void)f;
  *g = 2 << 20;
  return 0;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp* p, unsigned long long f) {
  (void)f;
  struct alloc* a = calloc(1, sizeof *a);
  a->fd = memfd_create("mockgpu", MFD_CLOEXEC);
  if (ftruncate(a->fd, n)) return CUDA_ERROR_OUT_OF_MEMORY;
  a->size = n, a->refs = 1, a->exportable = p->requestedHandleTypes != 0;
  *h = (CUmemGenericAllocationHandle)a;
  return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  struct alloc* a = (struct alloc*)h;
  if (--a->refs == 0) close(a->fd), free(a);
  return 0;
}
CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t al, CUdeviceptr at, unsigned long long f) {
  (void)al, (void)at, (void)f;
  void* v = mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *p = (CUdeviceptr)v;
  return v == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : 0;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { return munmap((void*)p, n) ? CUDA_ERROR_INVALID_VALUE : 0; }
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t off, CUmemGenericAllocationHandle h, unsigned long long f) {
  (void)f;
  struct alloc* a = (struct alloc*)h;
  if (off || n > a->size) return CUDA_ERROR_INVALID_VALUE;
  if (mmap((void*)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, a->fd, 0) == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  struct map* m = malloc(sizeof *m);
  a->refs++;
  pthread_mutex_lock(&lock);
  *m = (struct map){p, n, a, maps}, maps = m;
  pthread_mutex_unlock(&lock);
  return 0;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc* d, size_t k) {
  (void)d, (void)k;
  return mprotect((void*)p, n, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : 0;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  pthread_mutex_lock(&lock);
  for (struct map** q = &maps; *q; q = &(*q)->next)
    if ((*q)->at == p) {
      struct map* m = *q;
      *q = m->next;
      mmap((void*)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
      pthread_mutex_unlock(&lock);
      cuMemRelease((CUmemGenericAllocationHandle)m->alloc);
      free(m);
      return 0;
    }
  pthread_mutex_unlock(&lock);
  return CUDA_ERROR_INVALID_VALUE;
}
static struct map* find(CUdeviceptr p) {
  pthread_mutex_lock(&lock);
  struct map* m = maps;
  while (m && !(m->at <= p && p < m->at + m->size)) m = m->next;
  pthread_mutex_unlock(&lock);
  return m;
}
CUresult cuMemGetAddressRange(CUdeviceptr* b, size_t* n, CUdeviceptr p) {
  struct map* m = find(p);
  if (!m) return CUDA_ERROR_INVALID_VALUE;
  if (b) *b = m->at;
  if (n) *n = m->size;
  return 0;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* h, void* p) {
  struct map* m = find((CUdeviceptr)p);
  if (!m) return CUDA_ERROR_INVALID_VALUE;
  m->alloc->refs++;
  *h = (CUmemGenericAllocationHandle)m->alloc;
  return 0;
}
CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType t,
                                      unsigned long long f) {
  (void)f;
  struct alloc* a = (struct alloc*)h;
  if (!a->exportable || t != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  *(int*)out = dup(a->fd);
  return 0;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* h, void* os, CUmemAllocationHandleType t) {
  (void)t;
  struct alloc* a = calloc(1, sizeof *a);
  a->fd = dup((int)(uintptr_t)os), a->refs = 1, a->exportable = 1;
  a->size = lseek(a->fd, 0, SEEK_END);
  *h = (CUmemGenericAllocationHandle)a;
  return a->fd < 0 ? CUDA_ERROR_INVALID_VALUE : 0;
}
