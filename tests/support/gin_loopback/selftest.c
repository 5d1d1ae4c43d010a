// The plugin without NCCL: one process per GPU makes the calls that NCCL's GIN proxy makes, in its order, and checks
// every byte and signal. If this passes and driver.py fails, look at NCCL's settings; if this fails, look at the
// plugin or at the host's CUDA. With GINLOOP_LIBCUDA=<libmockcuda.so> it runs on a machine without a GPU.
//
//   selftest <plugin.so> [ranks]
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "cuda_dl.h"

enum { MAX = 16, BLOCK = 64 << 10, WINDOW = 8 << 20, MANY = 4096, LIMIT_S = 20 };

static struct cuda_api cu;
static struct shared {
  _Atomic int arrived, round, failed;
  char handles[MAX][HANDLE_BYTES], net_handles[MAX][HANDLE_BYTES];
}* world;
static int n_ranks, rank;
static const char* step_name = "start";

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static void die(const char* what, int code) {
  fprintf(stderr, "selftest rank %d: FAIL in step '%s': %s (%d)\n", rank, step_name, what, code);
  atomic_store(&world->failed, 1);
  _exit(1);
}
#define NEED(x)                  \
  do {                           \
    if (!(x)) die(#x, __LINE__); \
  } while (0)
#define RC(x)              \
  do {                     \
    int rc_ = (x);         \
    if (rc_) die(#x, rc_); \
  } while (0)
#define CUDA(x)                    \
  do {                             \
    CUresult r_ = cu.x;            \
    if (r_) {                      \
      const char* s_ = "?";        \
      cu.cuGetErrorName_(r_, &s_); \
      fprintf(stderr, "%s\n", s_); \
      die(#x, r_);                 \
    }                              \
  } while (0)

static void barrier(void) {
  int round = atomic_load(&world->round);
  if (atomic_fetch_add(&world->arrived, 1) + 1 == n_ranks) {
    atomic_store(&world->arrived, 0);
    atomic_fetch_add(&world->round, 1);
    return;
  }
  double deadline = now() + LIMIT_S;
  while (atomic_load(&world->round) == round) {
    if (atomic_load(&world->failed)) _exit(2);
    if (now() > deadline) die("another rank did not arrive in time", 0);
    usleep(20);
  }
}

// --- GPU memory ---
static CUstream stream;
static CUevent event;
static char* pinned;

static void settle(void) {
  CUDA(cuEventRecord_(event, stream));
  double deadline = now() + LIMIT_S;
  while (cu.cuEventQuery_(event) == CUDA_ERROR_NOT_READY)
    if (now() > deadline) die("a copy did not finish", 0);
}
static void to_gpu(CUdeviceptr d, const void* p, size_t n) {
  memcpy(pinned, p, n);
  CUDA(cuMemcpyAsync_(d, (CUdeviceptr)(uintptr_t)pinned, n, stream));
  settle();
}
static void from_gpu(void* p, CUdeviceptr d, size_t n) {
  CUDA(cuMemcpyAsync_((CUdeviceptr)(uintptr_t)pinned, d, n, stream));
  settle();
  memcpy(p, pinned, n);
}
static CUdeviceptr gpu_alloc(CUdevice dev, size_t* size, int handle_type, int rdma) {
  CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .requestedHandleTypes = handle_type,
                              .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev}};
  prop.allocFlags.gpuDirectRDMACapable = rdma;
  CUmemAccessDesc access = {.location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  size_t grain;
  CUmemGenericAllocationHandle h;
  CUdeviceptr p;
  CUDA(cuMemGetAllocationGranularity_(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  *size = (*size + grain - 1) / grain * grain;
  CUDA(cuMemCreate_(&h, *size, &prop, 0));
  CUDA(cuMemAddressReserve_(&p, *size, grain, 0, 0));
  CUDA(cuMemMap_(p, *size, 0, h, 0));
  CUDA(cuMemSetAccess_(p, *size, &access, 1));
  CUDA(cuMemRelease_(h));
  return p;
}

// --- what NCCL 2.28's GIN proxy needs from the host, beyond what the plugin needs ---
static void probe(CUdevice dev, int count) {
  struct {
    const char* name;
    int attribute;
  } attrs[] = {{"virtual memory management", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
               {"export as file descriptor", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED},
               {"fabric handles (MNNVL)", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED},
               {"GPUDirect RDMA with VMM (NCCL >= 2.29 wants 1 for GIN)",
                CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED},
               {"host NUMA id", CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID},
               {"host NUMA VMM", CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED}};
  char name[64] = "";
  int version = 0, v = 0, p2p = 1;
  cu.cuDriverGetVersion_(&version);
  cu.cuDeviceGetName_(name, sizeof name, dev);
  printf("  probe: driver %d, %d devices, device 0 is %s\n", version, count, name);
  for (size_t i = 0; i < sizeof attrs / sizeof *attrs; i++) {
    v = -1;
    cu.cuDeviceGetAttribute_(&v, attrs[i].attribute, dev);
    printf("  probe: %-58s %d\n", attrs[i].name, v);
  }
  for (int i = 1; i < n_ranks && i < count; i++) {
    cu.cuDeviceCanAccessPeer_(&v, dev, i);
    p2p &= v;
  }
  printf("  probe: %-58s %d\n", "peer access from device 0 to all others", p2p);
  // ncclCuMemHostAlloc: GIN's descriptor queue lies in such memory, with no other way in 2.28
  CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                              .location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = 0}};
  cu.cuDeviceGetAttribute_(&prop.location.id, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, dev);
  if (prop.location.id < 0) prop.location.id = 0;
  CUmemGenericAllocationHandle h;
  CUresult r = cu.cuMemCreate_(&h, 2 << 20, &prop, 0);
  printf("  probe: %-58s %s\n", "cuMemCreate on the host's NUMA node (NCCL's GIN queues)",
         r ? "FAILS: NCCL GIN PROXY cannot work here" : "ok");
  if (!r) cu.cuMemRelease_(h);
  prop.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};
  prop.allocFlags.gpuDirectRDMACapable = 1;
  r = cu.cuMemCreate_(&h, 2 << 20, &prop, 0);
  printf("  probe: %-58s %s\n", "cuMemCreate with gpuDirectRDMACapable (ncclDevCommCreate)",
         r ? "FAILS: ncclDevCommCreate cannot work here" : "ok");
  if (!r) cu.cuMemRelease_(h);
  fflush(stdout);
}

// --- the plugin, as the proxy drives it ---
enum { LINKS = 2 };
static gin_v11* gin;
static gin_v13* gin13;
static net_v11* net;
static struct link {
  void *coll, *listen;
  void *sig_mr, *inline_mr, *send_mr, *recv_mr, *unused;
  CUdeviceptr sig;
  uint64_t inlines[64];
} link_[LINKS];
static CUdeviceptr send_buf, recv_buf;
static void* requests[MANY * 2];
static int n_requests;

static void turn(void) {
  for (int l = 0; l < LINKS; l++) RC(gin->progress(link_[l].coll));
}
static void drain(int l) {
  double deadline = now() + LIMIT_S;
  while (n_requests) {
    turn();
    int kept = 0;
    for (int i = 0; i < n_requests; i++) {
      int done = 0;
      RC(gin->test(link_[l].coll, requests[i], &done));
      if (!done) requests[kept++] = requests[i];
    }
    n_requests = kept;
    if (now() > deadline) die("puts did not complete", n_requests);
    if (atomic_load(&world->failed)) _exit(2);
  }
}
static uint64_t signal_value(int l, int id) {
  uint64_t v;
  from_gpu(&v, link_[l].sig + 8 * id, 8);
  return v;
}
static void await(int l, int id, uint64_t least) {
  double deadline = now() + LIMIT_S;
  while (signal_value(l, id) < least) {
    turn();
    if (now() > deadline) die("signal did not arrive", (int)signal_value(l, id));
    if (atomic_load(&world->failed)) _exit(2);
  }
}
static void finish(int l) {  // serve others until all are through, as NCCL's progress thread would
  drain(l);
  int round = atomic_load(&world->round);
  if (atomic_fetch_add(&world->arrived, 1) + 1 == n_ranks) {
    atomic_store(&world->arrived, 0);
    atomic_fetch_add(&world->round, 1);
  }
  for (double deadline = now() + LIMIT_S; atomic_load(&world->round) == round;) {
    turn();
    if (atomic_load(&world->failed)) _exit(2);
    if (now() > deadline) die("another rank did not finish", 0);
  }
}
static void put(int l, int to, uint64_t from, uint64_t at, size_t n) {
  NEED(n_requests < 2 * MANY);
  RC(gin->iput(link_[l].coll, from, link_[l].send_mr, n, at, link_[l].recv_mr, to, &requests[n_requests++]));
}
static void put_signal(int l, int to, uint64_t from, uint64_t at, size_t n, int id, uint64_t add) {
  RC(gin->iput_signal(link_[l].coll, from, n ? link_[l].send_mr : 0, n, at, n ? link_[l].recv_mr : 0, to, 8 * id,
                      link_[l].sig_mr, add, add == 1 ? SIGNAL_INC : SIGNAL_ADD, &requests[n_requests++]));
}
static uint32_t word(int from, int to, uint32_t i, uint32_t salt) {
  return from * 0x01000193u + to * 0x9e3779b1u + i * 2654435761u + salt;
}
static void fill(int to, uint64_t at, size_t n, uint32_t salt) {
  uint32_t* p = malloc(n);
  for (size_t i = 0; i < n / 4; i++) p[i] = word(rank, to, i, salt);
  to_gpu(send_buf + at, p, n);
  free(p);
}
static void check(int from, uint64_t at, size_t n, uint32_t salt) {
  uint32_t* p = malloc(n);
  from_gpu(p, recv_buf + at, n);
  for (size_t i = 0; i < n / 4; i++)
    if (p[i] != word(from, rank, i, salt)) {
      fprintf(stderr, "rank %d: word %zu from rank %d: got %08x, want %08x\n", rank, i, from, p[i],
              word(from, rank, i, salt));
      die("wrong data", (int)i);
    }
  free(p);
}
static _Atomic int stop;
static void* serve(void* unused) {
  (void)unused;
  while (!atomic_load(&stop)) turn(), usleep(1);
  return 0;
}
static double started;
static void step(const char* name) {
  barrier();
  if (rank == 0 && started)
    printf("  selftest: %-60s ok  %.0f ms\n", step_name, (now() - started) * 1e3), fflush(stdout);
  barrier();
  step_name = name, started = now();
}

static void test_net(void) {
  void *ctx, *listen_comm, *send_comm = 0, *recv_comm = 0, *s[3] = {0}, *r[3] = {0};
  RC(net->init(&ctx, 1, 0, 0, 0));
  RC(net->listen(ctx, 0, world->net_handles[rank], &listen_comm));
  barrier();
  for (double deadline = now() + LIMIT_S; !send_comm || !recv_comm;) {
    if (!send_comm) RC(net->connect(ctx, 0, world->net_handles[(rank + 1) % n_ranks], &send_comm, 0));
    if (!recv_comm) RC(net->accept(listen_comm, &recv_comm, 0));
    NEED(now() < deadline);
  }
  size_t sizes[3] = {5 << 20, 0, 77};
  char *out = malloc(6 << 20), *in[3];
  for (int i = 0; i < 6 << 20; i++) out[i] = (char)(i * 7 + rank);
  for (int i = 0; i < 3; i++) {
    in[i] = calloc(1, 6 << 20);
    size_t room = 6 << 20;
    int tag = 0;
    void* p = in[i];
    RC(net->irecv(recv_comm, 1, &p, &room, &tag, &p, 0, &r[i]));
    RC(net->isend(send_comm, out, sizes[i], 0, 0, 0, &s[i]));
  }
  for (double deadline = now() + LIMIT_S; s[0] || s[1] || s[2] || r[0] || r[1] || r[2];)
    for (int i = 0; i < 3; i++) {
      int done = 0, size = -1;
      if (s[i]) {
        RC(net->test(s[i], &done, 0));
        if (done) s[i] = 0;
      }
      done = 0;
      if (r[i]) {
        RC(net->test(r[i], &done, &size));
        if (done) {
          r[i] = 0;
          NEED(size == (int)sizes[i]);
        }
      }
      NEED(now() < deadline);
    }
  int left = (rank + n_ranks - 1) % n_ranks;
  for (int i = 0; i < 3; i++)
    for (size_t j = 0; j < sizes[i]; j++) NEED(in[i][j] == (char)(j * 7 + left));
  barrier();
  RC(net->close_send(send_comm));
  RC(net->close_recv(recv_comm));
  RC(net->close_listen(listen_comm));
}

static void run_rank(const char* plugin) {
  char why[200];
  int count;
  CUdevice dev;
  CUcontext ctx;
  if (cuda_load(&cu, why, sizeof why)) die(why, 0);
  CUDA(cuInit_(0));
  CUDA(cuDeviceGetCount_(&count));
  CUDA(cuDeviceGet_(&dev, rank % count));
  CUDA(cuDevicePrimaryCtxRetain_(&ctx, dev));
  CUDA(cuCtxSetCurrent_(ctx));
  if (rank == 0) probe(dev, count);
  int low, high;
  CUDA(cuCtxGetStreamPriorityRange_(&low, &high));
  CUDA(cuStreamCreateWithPriority_(&stream, CU_STREAM_NON_BLOCKING, high));
  CUDA(cuEventCreate_(&event, CU_EVENT_DISABLE_TIMING));
  CUDA(cuMemHostAlloc_((void**)&pinned, WINDOW, CU_MEMHOSTALLOC_PORTABLE));

  step("load the plugin");
  void* lib = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
  if (!lib) die(dlerror(), 0);
  NEED(gin = dlsym(lib, "ncclGinPlugin_v11"));
  NEED(dlsym(lib, "ncclGinPlugin_v12") && (gin13 = dlsym(lib, "ncclGinPlugin_v13")) &&
       dlsym(lib, "ncclRmaPlugin_v14"));
  NEED(net = dlsym(lib, "ncclNetPlugin_v11"));
  void* gin_ctx;
  int n = 0;
  net_props_v11 props;
  RC(gin->init(&gin_ctx, 1, 0));
  RC(gin->devices(&n));
  RC(gin->get_properties(0, &props));
  NEED(n == 1 && props.device_type == DEVICE_GIN_PROXY && !(props.ptr_support & PTR_DMABUF));

  step("listen, connect (UNIX sockets, shared memory, first copies)");
  for (int l = 0; l < LINKS; l++) {
    RC(gin->listen(gin_ctx, 0, world->handles[rank], &link_[l].listen));
    barrier();
    void* handles[MAX];
    for (int r = 0; r < n_ranks; r++) handles[r] = world->handles[r];
    RC(gin->connect(gin_ctx, handles, n_ranks, rank, link_[l].listen, &link_[l].coll));
    RC(gin->close_listen(link_[l].listen));
    barrier();
  }

  step("register: signals (not exportable), inline values (host)");
  for (int l = 0; l < LINKS; l++) {
    size_t size = 64 << 10;
    link_[l].sig = gpu_alloc(dev, &size, CU_MEM_HANDLE_TYPE_NONE, 0);
    char zero[4096] = {0};
    to_gpu(link_[l].sig, zero, sizeof zero);
    RC(gin->reg_mr(link_[l].coll, (void*)link_[l].sig, size, PTR_CUDA, MR_FORCE_ORDER, &link_[l].sig_mr,
                   &link_[l].unused));
    RC(gin->reg_mr(link_[l].coll, link_[l].inlines, sizeof link_[l].inlines, PTR_HOST, 0, &link_[l].inline_mr,
                   &link_[l].unused));
  }

  step("register: windows (exported, mapped by all peers, read once)");
  size_t size = WINDOW;
  int rdma = 0;  // as ncclMemAlloc does it
  cu.cuDeviceGetAttribute_(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, dev);
  send_buf = gpu_alloc(dev, &size, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, rdma == 1);
  recv_buf = gpu_alloc(dev, &size, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, rdma == 1);
  for (int l = 0; l < LINKS; l++) {
    RC(gin->reg_mr(link_[l].coll, (void*)send_buf, size, PTR_CUDA, 0, &link_[l].send_mr, &link_[l].unused));
    RC(gin->reg_mr(link_[l].coll, (void*)recv_buf, size, PTR_CUDA, 0, &link_[l].recv_mr, &link_[l].unused));
  }
  barrier();

  int across = (rank + n_ranks / 2) % n_ranks, back = (rank - n_ranks / 2 + n_ranks) % n_ranks;
  step("put with signal to the rank across");
  fill(across, 0, BLOCK, 1);
  put_signal(0, across, 0, 0, BLOCK, 3, 1);
  await(0, 3, 1);
  check(back, 0, BLOCK, 1);
  finish(0);

  step("all to all, itself included, both connections");
  for (int l = 0; l < LINKS; l++) {
    for (int r = 0; r < n_ranks; r++) fill(r, r * BLOCK, BLOCK, 2 + l);
    barrier();
    for (int r = 0; r < n_ranks; r++) put_signal(l, r, r * BLOCK, rank * BLOCK, BLOCK, 4, 1);
    await(l, 4, n_ranks);
    for (int r = 0; r < n_ranks; r++) check(r, r * BLOCK, BLOCK, 2 + l);
    finish(l);
  }

  const char* delay = getenv("GINLOOP_DELAY_US");
  int early = 0;
  step("order on a connection, and none between two");
  for (int round = 0; round < 100 && delay; round++) {
    uint32_t salt = 1000 + round, last;
    fill(across, 0, BLOCK, salt);
    barrier();
    put(0, across, 0, 0, BLOCK);
    put_signal(1, across, 0, 0, 0, 10, 1);  // says nothing about the payload
    await(1, 10, round + 1);
    from_gpu(&last, recv_buf + BLOCK - 4, 4);
    early += last != word(back, rank, BLOCK / 4 - 1, salt);
    put_signal(0, across, 0, 0, 0, 10, 1);  // comes behind the payload
    await(0, 10, round + 1);
    check(back, 0, BLOCK, salt);
    finish(0);
    finish(1);
  }
  if (delay && atoi(delay) > 0) NEED(early > 0);

  step("600 small puts, then a bare signal (null handles)");
  fill(across, 0, 600 * 512, 5);
  for (int i = 0; i < 600; i++) put(0, across, i * 512, i * 512, 512);
  put_signal(0, across, 0, 0, 0, 5, 1);
  await(0, 5, 1);
  check(back, 0, 600 * 512, 5);
  finish(0);

  step("inline values");
  for (int i = 0; i < 64; i++) link_[1].inlines[i] = 0x1122334455667788ull + 1000 * rank + i;
  for (int i = 0; i < 64; i++)
    RC(gin->iput_signal(link_[1].coll, 8 * i, link_[1].inline_mr, 8, 4096 + 8 * i, link_[1].recv_mr, across, 8 * 6,
                        link_[1].sig_mr, 1, SIGNAL_INC, &requests[n_requests++]));
  await(1, 6, 64);
  uint64_t values[64];
  from_gpu(values, recv_buf + 4096, sizeof values);
  for (int i = 0; i < 64; i++) NEED(values[i] == 0x1122334455667788ull + 1000 * back + i);
  finish(1);

  step("signals add up over all senders; reset starts from 0");
  for (int round = 0; round < 3; round++) {
    for (int r = 0; r < n_ranks; r++)
      for (int k = 1; k <= 5; k++) put_signal(0, r, 0, 0, 0, 7, 1000000000000ull + k);
    await(0, 7, n_ranks * (5 * 1000000000000ull + 15));
    NEED(signal_value(0, 7) == n_ranks * (5 * 1000000000000ull + 15));
    finish(0);
    uint64_t zero = 0;
    to_gpu(link_[0].sig + 8 * 7, &zero, 8);
    barrier();
  }

  step("4000 puts to one rank before any is tested (rings overflow)");
  fill(0, 0, 4000 * 64, 8);
  barrier();
  for (int i = 0; i < 4000; i++) put_signal(1, 0, i * 64, (rank * 4000 + i) * 64, 64, 8, 1);
  if (rank == 0) await(1, 8, 4000ull * n_ranks);
  for (int r = 0; r < n_ranks && rank == 0; r++) check(r, r * 4000 * 64, 4000 * 64, 8);
  finish(1);

  step("windows come and go while a progress thread serves puts");
  pthread_t thread;
  NEED(pthread_create(&thread, 0, serve, 0) == 0);
  for (int round = 0; round < 4; round++) {
    size_t extra_size = 2 << 20;
    CUdeviceptr extra = gpu_alloc(dev, &extra_size, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    void *mr, *unused;
    RC(gin->reg_mr(link_[0].coll, (void*)extra, extra_size, PTR_CUDA, 0, &mr, &unused));
    barrier();
    void* request[8];
    for (int i = 0; i < 8; i++)
      RC(gin->iput_signal(link_[0].coll, 0, link_[0].send_mr, BLOCK, i * BLOCK, mr, across, 8 * 9, link_[0].sig_mr, 1,
                          SIGNAL_INC, &request[i]));
    double deadline = now() + LIMIT_S;
    for (int i = 0, done = 0; i < 8; i += done) {
      RC(gin->test(link_[0].coll, request[i], &done));
      NEED(now() < deadline);
    }
    while (signal_value(0, 9) < 8ull * (round + 1)) NEED(now() < deadline);
    barrier();
    RC(gin->dereg_mr(link_[0].coll, mr));
  }
  atomic_store(&stop, 1);
  pthread_join(thread, 0);

  step("get");
  fill(across, 0, BLOCK, 9);
  barrier();
  RC(gin13->iget(link_[0].coll, 0, 0, link_[0].send_mr, BLOCK, 2 * BLOCK, link_[0].recv_mr, back,
                 &requests[n_requests++]));
  drain(0);
  check(back, 2 * BLOCK, BLOCK, 9);
  finish(0);

  step("two-sided net");
  test_net();

  step("deregister, close");
  for (int l = 0; l < LINKS; l++) {
    RC(gin->dereg_mr(link_[l].coll, link_[l].recv_mr));
    RC(gin->dereg_mr(link_[l].coll, link_[l].send_mr));
    RC(gin->dereg_mr(link_[l].coll, link_[l].sig_mr));
    RC(gin->dereg_mr(link_[l].coll, link_[l].inline_mr));
    RC(gin->close_coll(link_[l].coll));
  }
  RC(gin->finalize(gin_ctx));
  RC(gin->finalize(0));
  dlclose(lib);
  step("end");
}

int main(int argc, char** argv) {
  n_ranks = argc > 2 ? atoi(argv[2]) : 8;
  if (argc < 2 || n_ranks < 2 || n_ranks > MAX) return fprintf(stderr, "usage: selftest plugin.so [2..%d]\n", MAX), 2;
  world = mmap(0, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t pids[MAX];
  for (rank = 0; rank < n_ranks; rank++) {
    fflush(stdout);
    if ((pids[rank] = fork()) == 0) {
      run_rank(argv[1]);
      fflush(stdout);
      _exit(0);
    }
  }
  int bad = 0, left = n_ranks;
  for (double deadline = now() + 45; left;) {
    int status;
    pid_t p = waitpid(-1, &status, WNOHANG);
    if (p > 0) {
      left--;
      if (!WIFEXITED(status) || WEXITSTATUS(status)) {
        bad = 1;
        atomic_store(&world->failed, 1);
        if (WIFSIGNALED(status)) fprintf(stderr, "selftest: pid %d died of signal %d\n", (int)p, WTERMSIG(status));
      }
    } else if (now() > deadline) {
      fprintf(stderr, "selftest: FAIL, out of time; ending the ranks\n");
      for (int r = 0; r < n_ranks; r++) kill(pids[r], SIGKILL);
      bad = 1;
      deadline = now() + 60;
    } else {
      usleep(1000);
    }
  }
  printf("selftest: %s\n", bad ? "FAILED" : "PASSED");
  return bad;
}
