// The two-sided half of the plugin: NCCL 2.28 takes GIN only from a library that also brings a net, and it uses that
// net for ordinary collectives between the pretended nodes. Plain UNIX stream sockets and host memory: right before
// fast.
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "abi.h"

#define NET_MAGIC 0x67696e6c6e657431ull
enum { SLOTS = 2 * NET_MAX_REQUESTS };

struct net_handle {
  uint64_t magic;
  uint32_t name_len;
  char name[100];
};
_Static_assert(sizeof(struct net_handle) <= HANDLE_BYTES, "NCCL hands 128 bytes from rank to rank");

struct net_comm;
struct net_request {
  struct net_comm* comm;
  int used, complete;
  char* data;
  uint64_t room, size, moved, head_moved;  // size: as sent, told by an 8-byte head in front of the data
};

struct net_comm {
  int fd, sending;
  struct net_request slot[SLOTS];
  struct net_request* queue[SLOTS];
  uint64_t first, last;  // queue[first..last) are in flight, in order
};

static log_fn net_log;
static int complain(const char* what) {
  fprintf(stderr, "[ginloop ERROR net pid %d] %s: %s\n", (int)getpid(), what, strerror(errno));
  if (net_log)
    net_log(LOG_WARN, (unsigned long)SUBSYS_ALL, __FILE__, __LINE__, "ginloop net: %s: %s", what, strerror(errno));
  return RC_SYSTEM;
}

static int n_init(void** ctx, uint64_t id, void* config, log_fn log, profiler_fn profiler) {
  (void)id, (void)config, (void)profiler;
  net_log = log;
  if (ctx) *ctx = &net_log;
  return RC_OK;
}
static int n_finalize(void* ctx) {
  (void)ctx;
  return RC_OK;
}
static int n_devices(int* n) {
  *n = 1;
  return RC_OK;
}
static int n_props(int dev, net_props_v11* p) {
  (void)dev;
  memset(p, 0, sizeof *p);
  p->name = "ginloop0";
  p->guid = 1;
  p->ptr_support = PTR_HOST;  // NCCL then stages collectives through host buffers
  p->speed_mbps = 400000;
  p->max_comms = 1 << 16;
  p->max_recvs = 1;
  p->device_type = DEVICE_HOST;
  p->virt.n = 1;
  p->max_p2p_bytes = p->max_coll_bytes = (size_t)1 << 40;
  p->max_multi_request = 1;
  return RC_OK;
}

static socklen_t address(const struct net_handle* h, struct sockaddr_un* a) {
  memset(a, 0, sizeof *a);
  a->sun_family = AF_UNIX;
  memcpy(a->sun_path + 1, h->name, h->name_len);
  return offsetof(struct sockaddr_un, sun_path) + 1 + h->name_len;
}

static int n_listen(void* ctx, int dev, void* handle, void** listen_comm) {
  (void)ctx, (void)dev;
  static _Atomic uint32_t count;
  struct net_handle h = {.magic = NET_MAGIC};
  h.name_len = snprintf(h.name, sizeof h.name, "ginloop.net.%d.%u", (int)getpid(), atomic_fetch_add(&count, 1));
  struct sockaddr_un a;
  socklen_t len = address(&h, &a);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0 || bind(fd, (struct sockaddr*)&a, len) || listen(fd, 128)) return complain("listen");
  memcpy(handle, &h, sizeof h);
  *listen_comm = (void*)(uintptr_t)(fd + 1);
  return RC_OK;
}
static int n_close_listen(void* listen_comm) {
  close((int)(uintptr_t)listen_comm - 1);
  return RC_OK;
}

static struct net_comm* make(int fd, int sending) {
  int bytes = 4 << 20;
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  struct net_comm* c = calloc(1, sizeof *c);
  c->fd = fd, c->sending = sending;
  return c;
}

// Both return with a null comm when they would block; NCCL calls again.
static int n_connect(void* ctx, int dev, void* handle, void** comm, void** device) {
  (void)ctx, (void)dev, (void)device;
  struct net_handle h;
  memcpy(&h, handle, sizeof h);
  *comm = 0;
  if (h.magic != NET_MAGIC || h.name_len >= sizeof h.name) {
    errno = EPROTO;
    return complain("connect: not our handle");
  }
  struct sockaddr_un a;
  socklen_t len = address(&h, &a);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return complain("socket");
  if (connect(fd, (struct sockaddr*)&a, len)) {
    int again = errno == EAGAIN || errno == EINTR;
    int rc = again ? RC_OK : complain("connect");
    close(fd);
    return rc;
  }
  *comm = make(fd, 1);
  return RC_OK;
}
static int n_accept(void* listen_comm, void** comm, void** device) {
  (void)device;
  *comm = 0;
  int fd = accept4((int)(uintptr_t)listen_comm - 1, 0, 0, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return errno == EAGAIN || errno == EINTR ? RC_OK : complain("accept");
  *comm = make(fd, 0);
  return RC_OK;
}
static int n_close(void* comm) {
  struct net_comm* c = comm;
  if (c) close(c->fd);
  free(c);
  return RC_OK;
}

static int n_reg_mr(void* comm, void* data, size_t size, int type, void** mr) {
  (void)data, (void)size;
  *mr = comm;
  return type == PTR_HOST ? RC_OK : RC_ARG;
}
static int n_dereg_mr(void* comm, void* mr) {
  (void)comm, (void)mr;
  return RC_OK;
}

static int queue(struct net_comm* c, void* data, size_t size, void** request) {
  *request = 0;
  if (c->last - c->first >= SLOTS) return RC_OK;
  for (int i = 0; i < SLOTS; i++) {
    struct net_request* q = &c->slot[i];
    if (q->used) continue;
    *q = (struct net_request){.comm = c, .used = 1, .data = data, .room = size, .size = size};
    c->queue[c->last++ % SLOTS] = q;
    *request = q;
    break;
  }
  return RC_OK;
}
static int n_isend(void* comm, void* data, size_t size, int tag, void* mr, void* event, void** request) {
  (void)tag, (void)mr, (void)event;
  return queue(comm, data, size, request);
}
static int n_irecv(void* comm, int n, void** data, size_t* sizes, int* tags, void** mrs, void** events,
                   void** request) {
  (void)tags, (void)mrs, (void)events;
  return n == 1 ? queue(comm, data[0], sizes[0], request) : RC_ARG;
}
static int n_iflush(void* comm, int n, void** data, int* sizes, void** mrs, void** request) {
  (void)comm, (void)n, (void)data, (void)sizes, (void)mrs;
  *request = 0;
  return RC_OK;
}

// 1: all there; 0: would block; -1: broken
static int move(struct net_comm* c, void* at, uint64_t total, uint64_t* moved) {
  while (*moved < total) {
    ssize_t k = c->sending ? send(c->fd, (char*)at + *moved, total - *moved, MSG_NOSIGNAL | MSG_DONTWAIT)
                           : recv(c->fd, (char*)at + *moved, total - *moved, MSG_DONTWAIT);
    if (k > 0)
      *moved += k;
    else if (k == 0)
      return errno = ECONNRESET, -1;
    else
      return errno == EAGAIN || errno == EINTR ? 0 : -1;
  }
  return 1;
}

static int n_test(void* request, int* done, int* sizes) {
  struct net_request* asked = request;
  struct net_comm* c = asked->comm;
  *done = 0;
  while (c->first != c->last) {
    struct net_request* q = c->queue[c->first % SLOTS];
    int k = move(c, &q->size, 8, &q->head_moved);
    if (k > 0 && q->size > q->room) {
      errno = EMSGSIZE;
      return complain("receive");
    }
    if (k > 0) k = move(c, q->data, q->size, &q->moved);
    if (k < 0) return complain(c->sending ? "send" : "receive");
    if (k == 0) break;
    q->complete = 1;
    c->first++;
  }
  if (asked->complete) {
    *done = 1;
    if (sizes) sizes[0] = (int)asked->size;
    asked->used = 0;
  }
  return RC_OK;
}

__attribute__((visibility("default"))) net_v11 ncclNetPlugin_v11 = {
    "ginloop", n_init,   n_devices, n_props, n_listen, n_connect,      n_accept, n_reg_mr, 0, n_dereg_mr, n_isend,
    n_irecv,   n_iflush, n_test,    n_close, n_close,  n_close_listen, 0,        0,        0, n_finalize, 0};
