// The binary interface between NCCL and a network plugin, restated from facts:
// the order and the types of the fields that NCCL 2.28 to 2.30 reads. No NCCL header is needed.
//
//   symbol              read by            what it carries
//   ncclNetPlugin_v11   2.28.3 and later   two-sided net (host memory only here)
//   ncclGinPlugin_v11   2.28.3 - 2.30.4    GIN, one context per connection
//   ncclGinPlugin_v12   2.29.7 - 2.30.4    + a context number in each put, + queue depth
//   ncclGinPlugin_v13   2.30.3 and later   + get and flush, config struct   (2.30.7 skips PROXY type here)
//   ncclRmaPlugin_v13   2.30.3 and later   same struct as GIN v13
//   ncclRmaPlugin_v14   2.30.7             host side of GIN PROXY: NCCL's own proxy runs on top of it
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// ncclResult_t
enum { RC_OK = 0, RC_CUDA = 1, RC_SYSTEM = 2, RC_INTERNAL = 3, RC_ARG = 4, RC_USAGE = 5, RC_REMOTE = 6 };

enum { PTR_HOST = 1, PTR_CUDA = 2, PTR_DMABUF = 4 };
enum { DEVICE_HOST = 0, DEVICE_GIN_PROXY = 2 };
enum { MR_FORCE_ORDER = 1 };  // set on memory that holds signals
enum { SIGNAL_INC = 1, SIGNAL_ADD = 2 };
enum { HANDLE_BYTES = 128, NET_MAX_REQUESTS = 32 };
enum { LOG_WARN = 2, LOG_INFO = 3 };
enum { SUBSYS_INIT = 1, SUBSYS_NET = 0x10, SUBSYS_ALL = -1 };

typedef void (*log_fn)(int level, unsigned long subsys, const char* file, int line, const char* fmt, ...);
typedef int (*profiler_fn)(void** event, int type, void* parent, int64_t plugin, void* data);

#define NET_PROPS_HEAD                                                                  \
  char* name;                                                                           \
  char* pci_path; /* null: NCCL hangs the device under the first CPU of the topology */ \
  uint64_t guid;                                                                        \
  int ptr_support, reg_is_global, force_flush, speed_mbps, port;                        \
  float latency;                                                                        \
  int max_comms, max_recvs;                                                             \
  int device_type, device_version

typedef struct {
  NET_PROPS_HEAD;
  struct {
    int n, dev[4];
  } virt;
  size_t max_p2p_bytes, max_coll_bytes;
  int max_multi_request;
} net_props_v11;

typedef struct {
  NET_PROPS_HEAD;
  struct {
    int n, dev[8];
  } virt;
  size_t max_p2p_bytes, max_coll_bytes;
  int max_multi_request;
  int16_t rail, plane;
} net_props_v12;

typedef struct {
  const char* name;
  int (*init)(void** ctx, uint64_t comm_id, void* config, log_fn log, profiler_fn profiler);
  int (*devices)(int* n);
  int (*get_properties)(int dev, net_props_v11* props);
  int (*listen)(void* ctx, int dev, void* handle, void** listen_comm);
  int (*connect)(void* ctx, int dev, void* handle, void** send_comm, void** device_handle);
  int (*accept)(void* listen_comm, void** recv_comm, void** device_handle);
  int (*reg_mr)(void* comm, void* data, size_t size, int type, void** mr);
  int (*reg_mr_dmabuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd, void** mr);
  int (*dereg_mr)(void* comm, void* mr);
  int (*isend)(void* comm, void* data, size_t size, int tag, void* mr, void* event, void** request);
  int (*irecv)(void* comm, int n, void** data, size_t* sizes, int* tags, void** mrs, void** events, void** request);
  int (*iflush)(void* comm, int n, void** data, int* sizes, void** mrs, void** request);
  int (*test)(void* request, int* done, int* sizes);
  int (*close_send)(void* comm);
  int (*close_recv)(void* comm);
  int (*close_listen)(void* comm);
  int (*get_device_mr)(void* comm, void* mr, void** device_mr);
  int (*irecv_consumed)(void* comm, int n, void* request);
  int (*make_vdevice)(int* dev, void* props);
  int (*finalize)(void* ctx);
  int (*set_attr)(void* ctx, void* attr);
} net_v11;

// GIN and RMA tables differ in few places; the shared runs of fields are named once.
#define GIN_HEAD(PROPS)                                  \
  const char* name;                                      \
  int (*init)(void** ctx, uint64_t comm_id, log_fn log); \
  int (*devices)(int* n);                                \
  int (*get_properties)(int dev, PROPS* props);          \
  int (*listen)(void* ctx, int dev, void* handle, void** listen_comm)

#define GIN_REG                                                                                                \
  int (*reg_mr)(void* coll, void* data, size_t size, int type, uint64_t flags, void** mr, void** device_mr);   \
  int (*reg_mr_dmabuf)(void* coll, void* data, size_t size, int type, uint64_t offset, int fd, uint64_t flags, \
                       void** mr, void** device_mr);                                                           \
  int (*dereg_mr)(void* coll, void* mr);                                                                       \
  int (*destroy_context)(void* ctx);                                                                           \
  int (*close_coll)(void* coll);                                                                               \
  int (*close_listen)(void* listen_comm)

#define GIN_TAIL                                       \
  int (*test)(void* coll, void* request, int* done);   \
  int (*progress)(void* coll_or_ctx);                  \
  int (*query_last_error)(void* ctx, bool* has_error); \
  int (*finalize)(void* ctx)

typedef struct {
  GIN_HEAD(net_props_v11);
  int (*connect)(void* ctx, void* handles[], int n_ranks, int rank, void* listen_comm, void** coll);
  int (*create_context)(void* coll, int n_signals, int n_counters, void** gin_ctx, void** device_handle);
  GIN_REG;
  int (*iput)(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst, uint32_t rank,
              void** request);
  int (*iput_signal)(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst, uint32_t rank,
                     uint64_t sig_off, void* sig, uint64_t value, uint32_t op, void** request);
  GIN_TAIL;
} gin_v11;

typedef struct {
  GIN_HEAD(net_props_v11);
  int (*connect)(void* ctx, void* handles[], int n_ranks, int rank, int n_connections, int queue_depth,
                 void* listen_comm, void** coll);
  int (*create_context)(void* coll, int n_signals, int n_counters, int n_contexts, void** gin_ctx,
                        void** device_handle);
  GIN_REG;
  int (*iput)(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst, uint32_t rank,
              int context, void** request);
  int (*iput_signal)(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst, uint32_t rank,
                     uint64_t sig_off, void* sig, uint64_t value, uint32_t op, int context, void** request);
  GIN_TAIL;
} gin_v12;

typedef struct {
  GIN_HEAD(net_props_v12);
  int (*connect)(void* ctx, void* handles[], int n_ranks, int rank, void* listen_comm, void** coll);
  int (*create_context)(void* coll, void* config, void** gin_ctx, void** device_handle);
  GIN_REG;
  int (*iput)(void* gin_ctx, int context, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst,
              uint32_t rank, void** request);
  int (*iput_signal)(void* gin_ctx, int context, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst,
                     uint32_t rank, uint64_t sig_off, void* sig, uint64_t value, uint32_t op, void** request);
  int (*iget)(void* gin_ctx, int context, uint64_t remote_off, void* remote, size_t size, uint64_t local_off,
              void* local, uint32_t rank, void** request);
  int (*iflush)(void* gin_ctx, int context, void* mr, uint32_t rank, void** request);
  GIN_TAIL;
} gin_v13;

typedef struct {
  GIN_HEAD(net_props_v12);
  int (*connect)(void* ctx, void* handles[], int n_ranks, int rank, void* listen_comm, void** coll);
  int (*create_context)(void* coll, void* config, void** rma_ctx);
  int (*reg_mr)(void* coll, void* data, size_t size, int type, uint64_t flags, void** mr);
  int (*reg_mr_dmabuf)(void* coll, void* data, size_t size, int type, uint64_t offset, int fd, uint64_t flags,
                       void** mr);
  int (*dereg_mr)(void* coll, void* mr);
  int (*destroy_context)(void* ctx);
  int (*close_coll)(void* coll);
  int (*close_listen)(void* listen_comm);
  int (*iput)(void* rma_ctx, int context, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst,
              uint32_t rank, void** request);
  int (*iput_signal)(void* rma_ctx, int context, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst,
                     uint32_t rank, uint64_t sig_off, void* sig, uint64_t value, uint32_t op, bool strong,
                     void** request);
  int (*iget)(void* rma_ctx, int context, uint64_t remote_off, void* remote, size_t size, uint64_t local_off,
              void* local, uint32_t rank, void** request);
  int (*iflush)(void* rma_ctx, int context, void* mr, uint32_t rank, void** request);
  GIN_TAIL;
} rma_v14;
