// What ranks share, and what each of them has. Part of plugin.c.
#pragma once
// ---------------------------------------------------------------------------------------------------- small things

static struct cuda_api cu;
static log_fn nccl_log;
static int debug_level;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static double env_number(const char* name, double otherwise) {
  const char* v = getenv(name);
  return v && *v ? atof(v) : otherwise;
}

// Failures go to stderr as well as to NCCL's log: NCCL 2.28 ignores what test() and progress() return.
static void say(int level, int rank, const char* fmt, ...) {
  if (level > LOG_WARN && !debug_level) return;
  char text[512];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  fprintf(stderr, "[ginloop %s rank %d pid %d] %s\n", level == LOG_WARN ? "ERROR" : "info", rank, (int)getpid(), text);
  if (nccl_log)
    nccl_log(level, level == LOG_WARN ? (unsigned long)SUBSYS_ALL : SUBSYS_NET, __FILE__, __LINE__, "ginloop: %s",
             text);
}

static const char* cuda_name(CUresult r) {
  const char* s = "?";
  if (cu.ready) cu.cuGetErrorName_(r, &s);
  return s;
}

#define CU(call)                                                       \
  do {                                                                 \
    CUresult cu_result = cu.call;                                      \
    if (cu_result != CUDA_SUCCESS) {                                   \
      say(LOG_WARN, c->rank, "%s -> %s", #call, cuda_name(cu_result)); \
      return RC_CUDA;                                                  \
    }                                                                  \
  } while (0)

#define TRY(call)                      \
  do {                                 \
    int try_result = (call);           \
    if (try_result) return try_result; \
  } while (0)

// ---------------------------------------------------------------------------------------------------------- layout

// What a sender asks a receiver to do. Memory is named by registration number: registration is collective, so the
// n-th registration of a connection is the same window on every rank.
enum { HAS_DATA = 1, HAS_INLINE = 2, HAS_SIGNAL = 4 };
struct msg {
  uint32_t kind, src_rank;
  uint64_t src, src_off, dst, dst_off, size;
  uint64_t sig, sig_off, sig_add;
  uint8_t inline_data[INLINE_BYTES];
  uint8_t pad[128 - 88];
};
_Static_assert(sizeof(struct msg) == 128, "one message is two cache lines");

struct ring {                            // in the receiver's shared memory, one per sender
  _Alignas(64) _Atomic uint64_t tail;    // messages ever written; the sender's
  _Alignas(64) _Atomic uint64_t done;    // messages ever completed; the receiver's
  _Alignas(64) _Atomic uint32_t failed;  // the receiver gave up
  _Alignas(64) struct msg slot[RING];
};

struct mr {
  uint32_t id;
  int type;
  char* addr;
  size_t size;
  int n;              // entries of the two arrays; 0: only the owner can reach this memory
  CUdeviceptr* peer;  // where each rank's window starts in our address space
  size_t *peer_size, *map_size;
  CUdeviceptr* map;  // what to unmap
};

struct request {
  struct request* next;
  struct ring* ring;  // null while it waits for room
  uint64_t index;
  int rank;
  struct msg msg;  // used only while it waits
};

struct packet {  // datagram between ranks at setup; a file descriptor rides along
  uint64_t magic, token;
  uint32_t kind, from;
  uint64_t id, size, offset;
  int32_t has_fd, pad;
};
enum { PACKET_INBOX = 1, PACKET_MR = 2 };

struct stash {
  struct stash* next;
  struct packet packet;
  int fd;
};

struct handle {
  uint64_t magic, uid;
  uint32_t name_len;
  char name[96];
};
_Static_assert(sizeof(struct handle) <= HANDLE_BYTES, "NCCL hands 128 bytes from rank to rank");

struct listener {
  int sock;
  struct handle handle;
};

enum phase { IDLE, COPYING, SIGNALLING };

struct coll {
  int n, rank, sock;
  uint64_t token;
  struct sockaddr_un* addr;
  socklen_t* addr_len;
  struct stash* stash;
  double timeout;

  CUcontext ctx;
  CUdevice dev;
  CUstream stream, setup_stream;
  CUevent event, setup_event;
  CUdeviceptr scratch;
  uint64_t* sig_read;   // pinned
  uint64_t* sig_write;  // pinned
  uint8_t* inlines;     // pinned
  int use_batch_copy;

  struct ring* in;    // [n], ours
  struct ring** out;  // [n], ours in each peer's shared memory
  struct ring** peer_in;
  uint64_t *head, *done;  // [n], per ring of `in`
  int next_ring;

  pthread_mutex_t lock;
  struct mr* mrs[MAX_MRS];
  _Atomic uint32_t n_mrs;
  struct request *free_requests, **waiting_head, **waiting_tail;
  int failed, warned;

  enum phase phase;
  double phase_start, batch_start, blocked_since;
  uint32_t taken[MAX_RANKS];
  int n_batch, n_sigs;
  CUdeviceptr sig_addr[BATCH];
  uint64_t sig_add[BATCH];

  uint64_t stat_msgs, stat_bytes, stat_sigs, stat_batches;
  double stat_busy, stat_worst;

  double delay,
      release;  // seconds: a batch is held back by up to `delay`; until when the next one is, 0: not yet drawn
  uint64_t random;
};
