// Puts: the sending side queues them, the receiving side copies and signals. Part of plugin.c.
#pragma once
// ---------------------------------------------------------------------------------------------------- sending side

static int push(struct ring* r, const struct msg* m, uint64_t* index) {
  uint64_t t = atomic_load_explicit(&r->tail, memory_order_relaxed);
  if (t - atomic_load_explicit(&r->done, memory_order_acquire) >= RING) return 0;
  r->slot[t % RING] = *m;
  atomic_store_explicit(&r->tail, t + 1, memory_order_release);
  *index = t;
  return 1;
}

static int submit(struct coll* c, int to, const struct msg* m, void** request) {
  if (to < 0 || to >= c->n) {
    say(LOG_WARN, c->rank, "put to rank %d of %d", to, c->n);
    return RC_ARG;
  }
  pthread_mutex_lock(&c->lock);
  if (c->failed) {
    pthread_mutex_unlock(&c->lock);
    return RC_REMOTE;
  }
  struct request* q = c->free_requests;
  if (q)
    c->free_requests = q->next;
  else
    q = malloc(sizeof *q);
  q->next = 0, q->ring = 0, q->rank = to;
  if (!c->waiting_head[to] && push(c->out[to], m, &q->index)) {
    q->ring = c->out[to];
  } else {
    q->msg = *m;
    if (c->waiting_head[to])
      c->waiting_tail[to]->next = q;
    else
      c->waiting_head[to] = q;
    c->waiting_tail[to] = q;
  }
  pthread_mutex_unlock(&c->lock);
  *request = q;
  return RC_OK;
}

static void push_waiting(struct coll* c) {
  for (int r = 0; r < c->n; r++)
    while (c->waiting_head[r] && push(c->out[r], &c->waiting_head[r]->msg, &c->waiting_head[r]->index)) {
      struct request* q = c->waiting_head[r];
      c->waiting_head[r] = q->next, q->next = 0, q->ring = c->out[r];
    }
}

static int put(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst, int rank,
               uint64_t sig_off, void* sig, uint64_t add, void** request) {
  struct coll* c = coll;
  struct mr *s = src, *d = dst, *g = sig;
  struct msg m = {.src_rank = c->rank};
  if (size && d) {  // a bare signal comes with size 0 and null handles
    if (!s) return RC_ARG;
    m.dst = d->id, m.dst_off = dst_off, m.size = size;
    if (s->type == PTR_HOST) {  // a value that the kernel put inline; NCCL keeps it in its own host memory
      if (size > INLINE_BYTES || src_off + size > s->size) {
        say(LOG_WARN, c->rank, "put of %zu bytes from host memory: only inline values are supported", size);
        return RC_ARG;
      }
      m.kind |= HAS_INLINE;
      memcpy(m.inline_data, s->addr + src_off, size);
    } else {
      m.kind |= HAS_DATA;
      m.src = s->id, m.src_off = src_off;
    }
  }
  if (g) m.kind |= HAS_SIGNAL, m.sig = g->id, m.sig_off = sig_off, m.sig_add = add;
  return submit(c, rank, &m, request);
}

static int iput(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst, uint32_t rank,
                void** request) {
  return put(coll, src_off, src, size, dst_off, dst, rank, 0, 0, 0, request);
}
static int iput_v12(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst, uint32_t rank,
                    int context, void** request) {
  (void)context;
  return put(coll, src_off, src, size, dst_off, dst, rank, 0, 0, 0, request);
}
static int iput_v13(void* coll, int context, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst,
                    uint32_t rank, void** request) {
  (void)context;
  return put(coll, src_off, src, size, dst_off, dst, rank, 0, 0, 0, request);
}
static int iput_signal(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst,
                       uint32_t rank, uint64_t sig_off, void* sig, uint64_t value, uint32_t op, void** request) {
  if (op != SIGNAL_INC && op != SIGNAL_ADD) return RC_ARG;
  return put(coll, src_off, src, size, dst_off, dst, rank, sig_off, sig, op == SIGNAL_INC ? 1 : value, request);
}
static int iput_signal_v12(void* coll, uint64_t src_off, void* src, size_t size, uint64_t dst_off, void* dst,
                           uint32_t rank, uint64_t sig_off, void* sig, uint64_t value, uint32_t op, int context,
                           void** request) {
  (void)context;
  return iput_signal(coll, src_off, src, size, dst_off, dst, rank, sig_off, sig, value, op, request);
}
static int iput_signal_v13(void* coll, int context, uint64_t src_off, void* src, size_t size, uint64_t dst_off,
                           void* dst, uint32_t rank, uint64_t sig_off, void* sig, uint64_t value, uint32_t op,
                           void** request) {
  (void)context;
  return iput_signal(coll, src_off, src, size, dst_off, dst, rank, sig_off, sig, value, op, request);
}
static int iput_signal_v14(void* coll, int context, uint64_t src_off, void* src, size_t size, uint64_t dst_off,
                           void* dst, uint32_t rank, uint64_t sig_off, void* sig, uint64_t value, uint32_t op,
                           bool strong, void** request) {
  (void)context, (void)strong;  // ours are all strong
  return iput_signal(coll, src_off, src, size, dst_off, dst, rank, sig_off, sig, value, op, request);
}
// A get is a put to oneself out of the peer's mapped window.
static int iget(void* coll, int context, uint64_t remote_off, void* remote, size_t size, uint64_t local_off,
                void* local, uint32_t rank, void** request) {
  (void)context;
  struct coll* c = coll;
  struct msg m = {.kind = HAS_DATA,
                  .src_rank = rank,
                  .src = ((struct mr*)remote)->id,
                  .src_off = remote_off,
                  .dst = ((struct mr*)local)->id,
                  .dst_off = local_off,
                  .size = size};
  return submit(c, c->rank, &m, request);
}
// A get's request is done only when its data has landed, so there is nothing left to flush.
static int iflush(void* coll, int context, void* mr, uint32_t rank, void** request) {
  (void)coll, (void)context, (void)mr, (void)rank;
  *request = 0;
  return RC_OK;
}

static int gl_test(void* coll, void* request, int* done) {
  struct coll* c = coll;
  struct request* q = request;
  *done = 0;
  if (!q) {
    *done = 1;
    return RC_OK;
  }
  pthread_mutex_lock(&c->lock);
  int rc = RC_OK;
  if (q->ring && atomic_load_explicit(&q->ring->done, memory_order_acquire) > q->index) {
    *done = 1;
    q->next = c->free_requests, c->free_requests = q;
  } else if (q->ring && atomic_load_explicit(&q->ring->failed, memory_order_relaxed)) {
    if (!c->failed) say(LOG_WARN, c->rank, "rank %d gave up serving our puts; its own message says why", q->rank);
    c->failed = 1, rc = RC_REMOTE;
  }
  pthread_mutex_unlock(&c->lock);
  return rc;
}

// -------------------------------------------------------------------------------------------------- receiving side

// Where [off, off+size) of window `id` of `rank` lies in our address space; 0 if nowhere.
static CUdeviceptr locate(struct coll* c, uint64_t id, int rank, uint64_t off, uint64_t size, const char* what) {
  struct mr* m = id < MAX_MRS ? c->mrs[id] : 0;
  if (m && m->type == PTR_CUDA) {
    if (rank == c->rank && off + size <= m->size) return (CUdeviceptr)m->addr + off;
    if (rank != c->rank && m->n && off + size <= m->peer_size[rank]) return m->peer[rank] + off;
  }
  say(LOG_WARN, c->rank, "%s: registration #%llu of rank %d, offset %llu, %llu bytes: %s", what,
      (unsigned long long)id, rank, (unsigned long long)off, (unsigned long long)size,
      m ? "out of bounds or not mapped" : "no such registration (any more)");
  return 0;
}

static int known(struct coll* c,
                 const struct msg* m) {  // a peer may be quicker with a put than we with a registration
  uint64_t n = atomic_load(&c->n_mrs);
  return !((m->kind & (HAS_DATA | HAS_INLINE)) && m->dst >= n) && !((m->kind & HAS_DATA) && m->src >= n) &&
         !((m->kind & HAS_SIGNAL) && m->sig >= n);
}

static int add_signal(struct coll* c, const struct msg* m) {
  CUdeviceptr a = locate(c, m->sig, c->rank, m->sig_off, 8, "signal");
  if (!a || a % 8) return RC_ARG;
  int i = 0;
  while (i < c->n_sigs && c->sig_addr[i] != a) i++;
  if (i == c->n_sigs) c->sig_addr[c->n_sigs] = a, c->sig_add[c->n_sigs++] = 0;
  c->sig_add[i] += m->sig_add;
  return RC_OK;
}

// Connections, of which NCCL makes one for each context, are held back each by itself. So nothing that a kernel sends
// on two contexts comes in the order of sending, as on a real network; what goes over one connection keeps its order.
static int is_held_back(struct coll* c) {
  if (c->delay <= 0) return 0;
  int any = 0;
  for (int r = 0; r < c->n; r++) any |= c->head[r] < atomic_load_explicit(&c->in[r].tail, memory_order_acquire);
  if (!any) return 0;
  if (c->release == 0) {
    c->random ^= c->random << 13, c->random ^= c->random >> 7, c->random ^= c->random << 17;
    c->release = now() + c->delay * ((c->random >> 11) * 0x1p-53);
  }
  if (now() < c->release) return 1;
  c->release = 0;
  return 0;
}

static int start_batch(struct coll* c) {
  if (is_held_back(c)) return RC_OK;
  CUdeviceptr dst[BATCH], src[BATCH];
  size_t size[BATCH];
  int n_copies = 0;
  c->n_batch = c->n_sigs = 0;
  memset(c->taken, 0, c->n * sizeof *c->taken);
  for (int i = 0; i < c->n && c->n_batch < BATCH; i++) {
    int r = (c->next_ring + i) % c->n;
    uint64_t tail = atomic_load_explicit(&c->in[r].tail, memory_order_acquire);
    for (; c->head[r] < tail && c->taken[r] < PER_RING && c->n_batch < BATCH; c->head[r]++) {
      struct msg* m = &c->in[r].slot[c->head[r] % RING];
      if (!known(c, m)) {
        if (!c->blocked_since) c->blocked_since = now();
        if (now() - c->blocked_since > 3 && !c->warned)
          c->warned = 1, say(LOG_WARN, c->rank, "rank %d puts to a registration that we have not made yet (3 s)", r);
        break;
      }
      c->blocked_since = 0;
      if (m->kind & (HAS_DATA | HAS_INLINE)) {
        CUdeviceptr to = locate(c, m->dst, c->rank, m->dst_off, m->size, "destination of a put");
        if (!to) return RC_ARG;
        CUdeviceptr from = HOST(c->inlines + c->n_batch * INLINE_BYTES);
        if (m->kind & HAS_DATA)
          from = locate(c, m->src, m->src_rank, m->src_off, m->size, "source of a put");
        else
          memcpy(c->inlines + c->n_batch * INLINE_BYTES, m->inline_data, INLINE_BYTES);
        if (!from) return RC_ARG;
        dst[n_copies] = to, src[n_copies] = from, size[n_copies++] = m->size;
        c->stat_bytes += m->size;
      }
      if (m->kind & HAS_SIGNAL) TRY(add_signal(c, m));
      c->taken[r]++, c->n_batch++;
    }
  }
  c->next_ring = (c->next_ring + 1) % c->n;
  if (!c->n_batch) return RC_OK;
  TRY(copy(c, dst, src, size, n_copies, c->stream));
  for (int i = 0; i < c->n_sigs; i++) dst[i] = HOST(&c->sig_read[i]), src[i] = c->sig_addr[i], size[i] = 8;
  TRY(copy(c, dst, src, size, c->n_sigs, c->stream));
  CU(cuEventRecord_(c->event, c->stream));
  c->phase = COPYING;
  c->batch_start = c->phase_start = now();
  return RC_OK;
}

static int start_signals(struct coll* c) {
  CUdeviceptr dst[BATCH], src[BATCH];
  size_t size[BATCH];
  for (int i = 0; i < c->n_sigs; i++) {
    c->sig_write[i] = c->sig_read[i] + c->sig_add[i];
    dst[i] = c->sig_addr[i], src[i] = HOST(&c->sig_write[i]), size[i] = 8;
  }
  TRY(copy(c, dst, src, size, c->n_sigs, c->stream));
  CU(cuEventRecord_(c->event, c->stream));
  c->phase = SIGNALLING;
  c->phase_start = now();
  return RC_OK;
}

static void finish_batch(struct coll* c) {
  for (int r = 0; r < c->n; r++)
    if (c->taken[r]) atomic_store_explicit(&c->in[r].done, c->done[r] += c->taken[r], memory_order_release);
  double spent = now() - c->batch_start;
  c->stat_msgs += c->n_batch, c->stat_sigs += c->n_sigs, c->stat_batches++, c->stat_busy += spent;
  if (spent > c->stat_worst) c->stat_worst = spent;
  c->phase = IDLE, c->warned = 0;
}

static int step(struct coll* c) {
  push_waiting(c);
  if (c->phase == IDLE) return start_batch(c);
  CUresult r = cu.cuEventQuery_(c->event);
  if (r == CUDA_ERROR_NOT_READY) {
    double waited = now() - c->phase_start;
    if (waited > 3 && !c->warned) {
      c->warned = 1;
      say(LOG_WARN, c->rank,
          "a batch of %d messages has been %s for 3 s. Likely: a spinning kernel shares a hardware queue with "
          "our stream (set CUDA_DEVICE_MAX_CONNECTIONS=32) or another thread waits for the GPU inside CUDA (cudaFree, "
          "first load of a kernel: "
          "set CUDA_MODULE_LOADING=EAGER)",
          c->n_batch, c->phase == COPYING ? "copying" : "signalling");
    }
    if (waited > c->timeout) {
      say(LOG_WARN, c->rank, "giving up on that batch after %.0f s", waited);
      return RC_SYSTEM;
    }
    return RC_OK;
  }
  if (r != CUDA_SUCCESS) {
    say(LOG_WARN, c->rank, "copying: %s (an earlier kernel may have failed)", cuda_name(r));
    return RC_CUDA;
  }
  if (c->phase == COPYING && c->n_sigs) return start_signals(c);
  finish_batch(c);
  return start_batch(c);
}

static int gl_progress(void* coll) {
  struct coll* c = coll;
  if (pthread_mutex_trylock(&c->lock)) return RC_OK;
  int rc = RC_OK;
  if (!c->failed) {
    rc = bind_thread(c);
    if (!rc) rc = step(c);
    if (rc) {
      c->failed = 1;
      for (int r = 0; r < c->n; r++) atomic_store(&c->in[r].failed, 1);
      say(LOG_WARN, c->rank, "stopped serving puts (error %d)", rc);
    }
  }
  pthread_mutex_unlock(&c->lock);
  return rc;
}

static int gl_last_error(void* coll, bool* has_error) {
  *has_error = coll && ((struct coll*)coll)->failed;
  return RC_OK;
}
