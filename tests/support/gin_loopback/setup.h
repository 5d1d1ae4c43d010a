// Ranks meet: sockets, shared memory, CUDA, listen and connect. Part of plugin.c.
#pragma once
// ------------------------------------------------------------------------------------------------ setup between ranks

static int open_socket(struct listener* l) {
  static _Atomic uint32_t count;
  if (getrandom(&l->handle.uid, sizeof l->handle.uid, 0) != sizeof l->handle.uid)
    l->handle.uid = (uint64_t)(now() * 1e9);
  l->handle.magic = MAGIC;
  l->handle.name_len = snprintf(l->handle.name, sizeof l->handle.name, "ginloop.%d.%u.%016llx", (int)getpid(),
                                atomic_fetch_add(&count, 1), (unsigned long long)l->handle.uid);
  struct sockaddr_un a = {.sun_family = AF_UNIX};  // sun_path[0] stays 0: the abstract name space, no file left behind
  memcpy(a.sun_path + 1, l->handle.name, l->handle.name_len);
  l->sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (l->sock < 0 ||
      bind(l->sock, (struct sockaddr*)&a, offsetof(struct sockaddr_un, sun_path) + 1 + l->handle.name_len)) {
    say(LOG_WARN, -1, "listen: cannot bind a UNIX socket: %s", strerror(errno));
    return RC_SYSTEM;
  }
  return RC_OK;
}

static int send_packet(struct coll* c, int to, struct packet* p, int fd) {
  struct iovec iov = {p, sizeof *p};
  union {
    char buf[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
  } control = {0};
  struct msghdr m = {.msg_name = &c->addr[to], .msg_namelen = c->addr_len[to], .msg_iov = &iov, .msg_iovlen = 1};
  if (fd >= 0) {
    m.msg_control = control.buf;
    m.msg_controllen = sizeof control.buf;
    struct cmsghdr* h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
  }
  ssize_t k = sendmsg(c->sock, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (k == (ssize_t)sizeof *p) return 1;
  if (errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS || errno == EINTR) return 0;
  say(LOG_WARN, c->rank, "sendmsg to rank %d: %s", to, strerror(errno));
  return -1;
}

static int recv_packet(struct coll* c, struct packet* p, int* fd) {
  struct iovec iov = {p, sizeof *p};
  union {
    char buf[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
  } control;
  struct msghdr m = {
      .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof control.buf};
  *fd = -1;
  ssize_t k = recvmsg(c->sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (k < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
  struct cmsghdr* h = CMSG_FIRSTHDR(&m);
  if (h && h->cmsg_type == SCM_RIGHTS) memcpy(fd, CMSG_DATA(h), sizeof *fd);
  if (k == (ssize_t)sizeof *p && p->magic == MAGIC && p->token == c->token && p->from < (uint32_t)c->n) return 1;
  if (*fd >= 0) close(*fd);
  return 0;  // a stranger's packet
}

// All ranks give one packet (and perhaps a file descriptor) to all others. A quick rank may already be one exchange
// ahead: its packets wait in the stash.
static int exchange(struct coll* c, uint32_t kind, uint64_t id, struct packet mine, int my_fd, struct packet* got,
                    int* fds) {
  mine.magic = MAGIC, mine.token = c->token, mine.kind = kind, mine.from = c->rank, mine.id = id,
  mine.has_fd = my_fd >= 0;
  char *sent = calloc(c->n, 1), *have = calloc(c->n, 1);
  int left = 2 * (c->n - 1), rc = RC_OK;
  for (int r = 0; r < c->n; r++) fds[r] = -1;
  got[c->rank] = mine;
  double deadline = now() + c->timeout;
  while (left > 0 && rc == RC_OK) {
    int moved = 0;
    for (int i = 1; i < c->n; i++) {
      int to = (c->rank + i) % c->n;
      if (sent[to]) continue;
      int k = send_packet(c, to, &mine, my_fd);
      if (k < 0) rc = RC_SYSTEM;
      if (k > 0) sent[to] = 1, left--, moved = 1;
    }
    for (struct stash** s = &c->stash; *s;) {
      struct stash* x = *s;
      if (x->packet.kind == kind && x->packet.id == id && !have[x->packet.from]) {
        got[x->packet.from] = x->packet, fds[x->packet.from] = x->fd, have[x->packet.from] = 1, left--, moved = 1;
        *s = x->next;
        free(x);
      } else {
        s = &x->next;
      }
    }
    struct packet p;
    int fd, k = recv_packet(c, &p, &fd);
    if (k < 0) {
      say(LOG_WARN, c->rank, "recvmsg: %s", strerror(errno));
      rc = RC_SYSTEM;
    } else if (k > 0) {
      struct stash* x = calloc(1, sizeof *x);
      *x = (struct stash){c->stash, p, fd};
      c->stash = x;
      moved = 1;
    }
    if (!moved) {
      if (now() > deadline) {
        char who[128] = "";
        for (int r = 0; r < c->n; r++)
          if (r != c->rank && !have[r]) snprintf(who + strlen(who), sizeof who - strlen(who), " %d", r);
        say(LOG_WARN, c->rank, "exchange %s #%llu: nothing from rank(s)%s in %.0f s (is every rank in the same call?)",
            kind == PACKET_INBOX ? "inbox" : "registration", (unsigned long long)id, who, c->timeout);
        rc = RC_SYSTEM;
      }
      usleep(30);
    }
  }
  for (int r = 0; r < c->n && rc; r++)
    if (fds[r] >= 0) close(fds[r]), fds[r] = -1;
  free(sent), free(have);
  return rc;
}

// ------------------------------------------------------------------------------------------------------------- CUDA

// Setup calls run in the user's thread: keep its capture mode. The progress thread is NCCL's: bind it once.
struct cuda_scope {
  CUcontext before;
  CUstreamCaptureMode mode;
};
static int enter(struct coll* c, struct cuda_scope* s) {
  s->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CU(cuCtxGetCurrent_(&s->before));
  if (s->before != c->ctx) CU(cuCtxSetCurrent_(c->ctx));
  CU(cuThreadExchangeStreamCaptureMode_(&s->mode));
  return RC_OK;
}
static void leave(struct coll* c, struct cuda_scope* s) {
  cu.cuThreadExchangeStreamCaptureMode_(&s->mode);
  if (s->before != c->ctx) cu.cuCtxSetCurrent_(s->before);
}
static int bind_thread(struct coll* c) {
  static __thread CUcontext bound;
  if (bound == c->ctx) return RC_OK;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CU(cuCtxSetCurrent_(c->ctx));
  CU(cuThreadExchangeStreamCaptureMode_(&mode));
  bound = c->ctx;
  return RC_OK;
}

// Copies in any direction (host memory is pinned) that must not need an SM: the batch call has a flag that asks for
// the copy engines. GINLOOP_BATCH_COPY=0 takes plain asynchronous copies instead.
static int copy(struct coll* c, CUdeviceptr* dst, CUdeviceptr* src, size_t* size, int n, CUstream stream) {
  if (!n) return RC_OK;
  if (c->use_batch_copy) {
    CUmemcpyAttributes attr = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                               .flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE};
    size_t first = 0;
    CUresult r = cu.cuMemcpyBatchAsync_(dst, src, size, n, &attr, &first, 1, stream);
    if (r == CUDA_SUCCESS) return RC_OK;
    say(LOG_WARN, c->rank, "cuMemcpyBatchAsync -> %s; going on with cuMemcpyAsync", cuda_name(r));
    c->use_batch_copy = 0;
  }
  for (int i = 0; i < n; i++) CU(cuMemcpyAsync_(dst[i], src[i], size[i], stream));
  return RC_OK;
}
static int copy_one(struct coll* c, CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream) {
  return copy(c, &dst, &src, &size, 1, stream);
}

#define HOST(p) ((CUdeviceptr)(uintptr_t)(p))

static int wait_event(struct coll* c, CUevent e, const char* what) {
  double deadline = now() + c->timeout;
  for (;;) {
    CUresult r = cu.cuEventQuery_(e);
    if (r == CUDA_SUCCESS) return RC_OK;
    if (r != CUDA_ERROR_NOT_READY || now() > deadline) {
      say(LOG_WARN, c->rank, "%s: %s", what, r == CUDA_ERROR_NOT_READY ? "not finished in time" : cuda_name(r));
      return RC_CUDA;
    }
    usleep(10);
  }
}

static int open_cuda(struct coll* c) {
  int low, high;
  CU(cuCtxGetDevice_(&c->dev));
  CU(cuCtxGetStreamPriorityRange_(&low, &high));
  CU(cuStreamCreateWithPriority_(&c->stream, CU_STREAM_NON_BLOCKING, high));
  CU(cuStreamCreateWithPriority_(&c->setup_stream, CU_STREAM_NON_BLOCKING, high));
  CU(cuEventCreate_(&c->event, CU_EVENT_DISABLE_TIMING));
  CU(cuEventCreate_(&c->setup_event, CU_EVENT_DISABLE_TIMING));
  CU(cuMemAlloc_(&c->scratch, 4096));
  void* pinned;
  CU(cuMemHostAlloc_(&pinned, BATCH * (8 + 8 + INLINE_BYTES), CU_MEMHOSTALLOC_PORTABLE));
  c->sig_read = pinned, c->sig_write = c->sig_read + BATCH, c->inlines = (uint8_t*)(c->sig_write + BATCH);
  // Use every kind of copy once now: the driver sets up its channels at first use, which may wait for the GPU.
  for (int i = 0; i < 2; i++) {
    CUstream s = i ? c->stream : c->setup_stream;
    TRY(copy_one(c, c->scratch, HOST(c->sig_write), 64, s));
    TRY(copy_one(c, c->scratch + 128, c->scratch, 64, s));
    TRY(copy_one(c, HOST(c->sig_read), c->scratch + 128, 64, s));
    CU(cuEventRecord_(i ? c->event : c->setup_event, s));
    TRY(wait_event(c, i ? c->event : c->setup_event, "first copies"));
  }
  return RC_OK;
}

// ------------------------------------------------------------------------------------------------ listen and connect

static int gl_init(void** ctx, uint64_t comm_id, log_fn log) {
  (void)comm_id;
  nccl_log = log;
  debug_level = (int)env_number("GINLOOP_DEBUG", 0);
  if (ctx) *ctx = &cu;  // no state of its own; later calls may pass null, and that is fine
  return RC_OK;
}
static int gl_finalize(void* ctx) {
  (void)ctx;
  return RC_OK;
}
static int gl_devices(int* n) {
  *n = 1;
  return RC_OK;
}

#define FILL_PROPS(p)                                                                                  \
  do {                                                                                                 \
    memset(p, 0, sizeof *(p));                                                                         \
    (p)->name = "ginloop0";                                                                            \
    (p)->guid = 1;                                                                                     \
    (p)->ptr_support = PTR_HOST | PTR_CUDA; /* no DMABUF: NCCL then calls reg_mr, not reg_mr_dmabuf */ \
    (p)->speed_mbps = 400000;                                                                          \
    (p)->max_comms = 1 << 16;                                                                          \
    (p)->max_recvs = 8; /* NCCL's descriptor queue: 32 x this per peer, a power of two */              \
    (p)->device_type = DEVICE_GIN_PROXY;                                                               \
    (p)->virt.n = 1;                                                                                   \
    (p)->max_p2p_bytes = (p)->max_coll_bytes = (size_t)1 << 40;                                        \
    (p)->max_multi_request = 1;                                                                        \
  } while (0)

static int gl_props_v11(int dev, net_props_v11* p) {
  (void)dev;
  FILL_PROPS(p);
  return RC_OK;
}
static int gl_props_v12(int dev, net_props_v12* p) {
  (void)dev;
  FILL_PROPS(p);
  p->rail = p->plane = -1;
  return RC_OK;
}

static int gl_listen(void* ctx, int dev, void* handle, void** listen_comm) {
  (void)ctx, (void)dev;
  struct listener* l = calloc(1, sizeof *l);
  int rc = open_socket(l);
  if (rc) {
    free(l);
    return rc;
  }
  memcpy(handle, &l->handle, sizeof l->handle);
  *listen_comm = l;
  return RC_OK;
}
static int gl_close_listen(void* listen_comm) {
  struct listener* l = listen_comm;
  if (l && l->sock >= 0) close(l->sock);
  free(l);
  return RC_OK;
}

static int gl_close_coll(void* coll);

static int open_coll(struct coll* c, void* handles[], struct listener* l) {
  char why[200];
  if (cuda_load(&cu, why, sizeof why)) {
    say(LOG_WARN, c->rank, "no CUDA driver: %s", why);
    return RC_SYSTEM;
  }
  c->timeout = env_number("GINLOOP_TIMEOUT", 20);
  c->use_batch_copy = env_number("GINLOOP_BATCH_COPY", 1) != 0;
  static _Atomic uint32_t n_colls;
  c->delay = env_number("GINLOOP_DELAY_US", 0) * 1e-6;
  uint64_t seed = env_number("GINLOOP_SEED", 1), number = atomic_fetch_add(&n_colls, 1);
  c->random = ((seed * MAX_RANKS + c->rank) * 1024 + number + 1) * 0x9e3779b97f4a7c15ull;
  c->sock = l->sock, l->sock = -1;
  c->addr = calloc(c->n, sizeof *c->addr), c->addr_len = calloc(c->n, sizeof *c->addr_len);
  c->token = MAGIC;
  for (int r = 0; r < c->n; r++) {
    struct handle h;
    memcpy(&h, handles[r], sizeof h);
    if (h.magic != MAGIC || h.name_len >= sizeof h.name) {
      say(LOG_WARN, c->rank, "the handle of rank %d is not ours: do all ranks load this plugin?", r);
      return RC_ARG;
    }
    c->addr[r].sun_family = AF_UNIX;
    memcpy(c->addr[r].sun_path + 1, h.name, h.name_len);
    c->addr_len[r] = offsetof(struct sockaddr_un, sun_path) + 1 + h.name_len;
    c->token = (c->token ^ h.uid) * 0x100000001b3ull;
  }
  CU(cuCtxGetCurrent_(&c->ctx));
  if (!c->ctx) {
    say(LOG_WARN, c->rank, "connect: no current CUDA context");
    return RC_CUDA;
  }
  struct cuda_scope scope;
  TRY(enter(c, &scope));
  int rc = open_cuda(c);
  leave(c, &scope);
  TRY(rc);

  size_t bytes = c->n * sizeof(struct ring);
  int fd = memfd_create("ginloop", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, bytes)) {
    say(LOG_WARN, c->rank, "memfd: %s", strerror(errno));
    return RC_SYSTEM;
  }
  c->in = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  c->out = calloc(c->n, sizeof *c->out), c->peer_in = calloc(c->n, sizeof *c->peer_in);
  c->head = calloc(c->n, 8), c->done = calloc(c->n, 8);
  c->waiting_head = calloc(c->n, sizeof(void*)), c->waiting_tail = calloc(c->n, sizeof(void*));
  struct packet* got = calloc(c->n, sizeof *got);
  int* fds = calloc(c->n, sizeof *fds);
  rc = exchange(c, PACKET_INBOX, 0, (struct packet){.size = bytes}, fd, got, fds);
  for (int r = 0; r < c->n && !rc; r++) {
    c->peer_in[r] = r == c->rank ? c->in : mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[r], 0);
    if (c->peer_in[r] == MAP_FAILED || got[r].size != bytes)
      rc = RC_SYSTEM, c->peer_in[r] = 0;
    else
      c->out[r] = c->peer_in[r] + c->rank;
    if (fds[r] >= 0) close(fds[r]);
  }
  if (fd >= 0) close(fd);
  free(got), free(fds);
  if (!rc) say(LOG_INFO, c->rank, "connected %d ranks, device %d", c->n, (int)c->dev);
  return rc;
}

static int gl_connect(void* ctx, void* handles[], int n, int rank, void* listen_comm, void** coll) {
  (void)ctx;
  if (n < 1 || n > MAX_RANKS) return RC_ARG;
  struct coll* c = calloc(1, sizeof *c);
  c->n = n, c->rank = rank, c->sock = -1;
  pthread_mutex_init(&c->lock, 0);
  int rc = open_coll(c, handles, listen_comm);
  if (rc)
    gl_close_coll(c);
  else
    *coll = c;
  return rc;
}
static int gl_connect_v12(void* ctx, void* handles[], int n, int rank, int n_connections, int depth, void* l,
                          void** coll) {
  (void)n_connections, (void)depth;
  return gl_connect(ctx, handles, n, rank, l, coll);
}

static int gl_close_coll(void* coll) {
  struct coll* c = coll;
  if (!c) return RC_OK;
  if (c->stat_batches)
    say(LOG_INFO, c->rank,
        "served %llu messages, %llu signals, %.3f GB in %llu batches; batch mean %.1f us, worst %.1f us",
        (unsigned long long)c->stat_msgs, (unsigned long long)c->stat_sigs, c->stat_bytes * 1e-9,
        (unsigned long long)c->stat_batches, c->stat_busy / c->stat_batches * 1e6, c->stat_worst * 1e6);
  struct cuda_scope scope;
  if (cu.ready && c->ctx && !enter(c, &scope)) {
    if (c->event) cu.cuEventDestroy_(c->event);
    if (c->setup_event) cu.cuEventDestroy_(c->setup_event);
    if (c->stream) cu.cuStreamDestroy_(c->stream);
    if (c->setup_stream) cu.cuStreamDestroy_(c->setup_stream);
    if (c->sig_read) cu.cuMemFreeHost_(c->sig_read);
    if (c->scratch) cu.cuMemFree_(c->scratch);
    leave(c, &scope);
  }
  for (int r = 0; r < c->n; r++)
    if (c->peer_in && c->peer_in[r]) munmap(c->peer_in[r], c->n * sizeof(struct ring));
  if (c->sock >= 0) close(c->sock);
  for (struct stash* s = c->stash; s;) {
    struct stash* next = s->next;
    if (s->fd >= 0) close(s->fd);
    free(s);
    s = next;
  }
  for (struct request* q = c->free_requests; q;) {
    struct request* next = q->next;
    free(q);
    q = next;
  }
  free(c->addr), free(c->addr_len), free(c->out), free(c->peer_in), free(c->head), free(c->done);
  free(c->waiting_head), free(c->waiting_tail);
  pthread_mutex_destroy(&c->lock);
  free(c);
  return RC_OK;
}
