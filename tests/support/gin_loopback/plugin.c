// Loopback network for NCCL's GPU-initiated networking (GIN), PROXY backend, between the GPUs of one host.
//
// A put travels like this:
//   1. The sender's kernel writes a 64-byte descriptor into host memory; NCCL's GIN progress thread reads it and
//      calls iput here. We append a message to a ring in shared memory that belongs to the receiver.
//   2. The receiver's GIN progress thread calls progress() here. It takes a batch of messages, copies each source
//      straight out of the sender's GPU memory (mapped at registration) into its own, then adds to the signals.
//   3. It moves the ring's `done` count; the sender's test() sees that and NCCL frees the descriptor.
//
// Every GPU action is a copy-engine copy on one high-priority stream: no kernel is ever launched, so a user kernel
// that spins on a signal with all SMs in its hands cannot block the signal it waits for.
// Signals are added by reading 8 bytes back, adding on the host, writing 8 bytes: they lie in memory that cannot be
// exported, and only this thread (and the kernel's own reset) writes them. Data copies have completed, as an event
// tells, before any signal of the same batch is written, and rings are first-in first-out, so a visible signal means
// that all earlier puts of the same sender on the same connection are visible (a "strong" signal).
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"
#include "cuda_dl.h"

enum { RING = 1024, BATCH = 128, PER_RING = 32, MAX_MRS = 1 << 14, MAX_RANKS = 256, INLINE_BYTES = 16 };
#define MAGIC 0x67696e6c6f6f7031ull

// One translation unit in four parts, each of which uses those before it.
#include "state.h"    // what ranks share, and what each has
#include "setup.h"    // sockets, CUDA, listen and connect
#include "windows.h"  // registration
#include "serve.h"    // puts: the sending side, and the receiving side, which copies

// ------------------------------------------------------------------------------------------------------------ tables

static int context_v13(void* coll, void* config, void** ctx, void** device_handle) {
  (void)config, (void)device_handle;  // NCCL's proxy makes the device handle itself
  *ctx = coll;
  return RC_OK;
}
static int context_v14(void* coll, void* config, void** ctx) {
  (void)config;
  *ctx = coll;
  return RC_OK;
}
static int destroy_context(void* ctx) {
  (void)ctx;
  return RC_OK;
}

#define EXPORT __attribute__((visibility("default")))
#define NAME "ginloop"

EXPORT gin_v11 ncclGinPlugin_v11 = {
    NAME,        gl_init,       gl_devices, gl_props_v11,  gl_listen,       gl_connect, 0,           gl_reg_mr,
    0,           gl_dereg_mr,   0,          gl_close_coll, gl_close_listen, iput,       iput_signal, gl_test,
    gl_progress, gl_last_error, gl_finalize};

EXPORT gin_v12 ncclGinPlugin_v12 = {NAME,
                                    gl_init,
                                    gl_devices,
                                    gl_props_v11,
                                    gl_listen,
                                    gl_connect_v12,
                                    0,
                                    gl_reg_mr,
                                    0,
                                    gl_dereg_mr,
                                    0,
                                    gl_close_coll,
                                    gl_close_listen,
                                    iput_v12,
                                    iput_signal_v12,
                                    gl_test,
                                    gl_progress,
                                    gl_last_error,
                                    gl_finalize};

EXPORT gin_v13 ncclGinPlugin_v13 = {
    NAME,   gl_init,     gl_devices,      gl_props_v12,  gl_listen,       gl_connect, context_v13,     gl_reg_mr,
    0,      gl_dereg_mr, destroy_context, gl_close_coll, gl_close_listen, iput_v13,   iput_signal_v13, iget,
    iflush, gl_test,     gl_progress,     gl_last_error, gl_finalize};

EXPORT gin_v13 ncclRmaPlugin_v13 = {
    NAME,   gl_init,     gl_devices,      gl_props_v12,  gl_listen,       gl_connect, context_v13,     gl_reg_mr,
    0,      gl_dereg_mr, destroy_context, gl_close_coll, gl_close_listen, iput_v13,   iput_signal_v13, iget,
    iflush, gl_test,     gl_progress,     gl_last_error, gl_finalize};

EXPORT rma_v14 ncclRmaPlugin_v14 = {
    NAME,   gl_init,     gl_devices,      gl_props_v12,  gl_listen,       gl_connect, context_v14,     gl_reg_mr_v14,
    0,      gl_dereg_mr, destroy_context, gl_close_coll, gl_close_listen, iput_v13,   iput_signal_v14, iget,
    iflush, gl_test,     gl_progress,     gl_last_error, gl_finalize};
