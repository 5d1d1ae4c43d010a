// Registration: windows of other ranks become addresses of this one. Part of plugin.c.
#pragma once
// ------------------------------------------------------------------------------------------------------ registration

// Give the physical memory behind [addr, addr+size) a file descriptor. -1 if it was not created exportable.
static int export_memory(struct coll* c, void* addr, struct packet* p) {
  CUdeviceptr base = 0;
  size_t size = 0;
  CUmemGenericAllocationHandle h;
  int fd = -1;
  if (cu.cuMemGetAddressRange_(&base, &size, (CUdeviceptr)addr)) return -1;
  if (cu.cuMemRetainAllocationHandle_(&h, (void*)base)) return -1;
  if (cu.cuMemExportToShareableHandle_(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)) fd = -1;
  cu.cuMemRelease_(h);
  p->size = size, p->offset = (CUdeviceptr)addr - base;
  (void)c;
  return fd;
}

static int import_memory(struct coll* c, struct mr* m, int r, const struct packet* p, int fd) {
  CUmemGenericAllocationHandle h;
  CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = c->dev},
                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CU(cuMemImportFromShareableHandle_(&h, (void*)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  CU(cuMemAddressReserve_(&m->map[r], p->size, 0, 0, 0));
  CU(cuMemMap_(m->map[r], p->size, 0, h, 0));
  m->map_size[r] = p->size;
  CU(cuMemSetAccess_(m->map[r], p->size, &access, 1));
  CU(cuMemRelease_(h));
  m->peer[r] = m->map[r] + p->offset;
  m->peer_size[r] = p->size - p->offset;
  return RC_OK;
}

static void free_mr(struct mr* m) {
  for (int r = 0; r < m->n; r++) {
    if (m->map_size[r]) cu.cuMemUnmap_(m->map[r], m->map_size[r]);
    if (m->map[r]) cu.cuMemAddressFree_(m->map[r], m->map_size[r]);
  }
  free(m->peer), free(m->peer_size), free(m->map_size), free(m->map), free(m);
}

static int share_memory(struct coll* c, struct mr* m, uint64_t flags) {
  struct packet mine = {0}, *got = calloc(c->n, sizeof *got);
  int* fds = calloc(c->n, sizeof *fds);
  int fd = export_memory(c, m->addr, &mine);
  int rc = exchange(c, PACKET_MR, m->id, mine, fd, got, fds);
  int shared = rc == RC_OK;
  for (int r = 0; r < c->n; r++) shared &= got[r].has_fd;
  if (rc == RC_OK && !shared && !(flags & MR_FORCE_ORDER)) {
    say(LOG_WARN, c->rank,
        "registration #%u at %p: not exportable as a file descriptor here or on a peer. Windows must "
        "come from ncclMemAlloc or cuMemCreate with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
        m->id, (void*)m->addr);
    rc = RC_ARG;
  }
  if (rc == RC_OK && shared) {
    m->n = c->n;
    m->peer = calloc(c->n, sizeof *m->peer), m->peer_size = calloc(c->n, sizeof(size_t));
    m->map = calloc(c->n, sizeof *m->map), m->map_size = calloc(c->n, sizeof(size_t));
    m->peer[c->rank] = (CUdeviceptr)m->addr, m->peer_size[c->rank] = m->size;
    for (int r = 0; r < c->n && !rc; r++)
      if (r != c->rank) rc = import_memory(c, m, r, &got[r], fds[r]);
    // Read a few bytes through each mapping at once: a bad one should fail here, by name, not in some later put.
    for (int r = 0; r < c->n && !rc; r++) {
      rc = copy_one(c, c->scratch + 256, m->peer[r], 16, c->setup_stream);
      if (!rc && cu.cuEventRecord_(c->setup_event, c->setup_stream)) rc = RC_CUDA;
      if (!rc) rc = wait_event(c, c->setup_event, "first read through a peer's window");
      if (rc) say(LOG_WARN, c->rank, "registration #%u: cannot read the window of rank %d", m->id, r);
    }
  }
  for (int r = 0; r < c->n; r++)
    if (fds[r] >= 0) close(fds[r]);
  if (fd >= 0) close(fd);
  free(got), free(fds);
  return rc;
}

static int gl_reg_mr(void* coll, void* data, size_t size, int type, uint64_t flags, void** mr, void** device_mr) {
  struct coll* c = coll;
  struct mr* m = calloc(1, sizeof *m);
  m->id = atomic_load(&c->n_mrs), m->type = type, m->addr = data, m->size = size;
  int rc = m->id < MAX_MRS ? RC_OK : RC_SYSTEM;
  if (rc == RC_OK && type == PTR_CUDA) {
    struct cuda_scope scope;
    rc = enter(c, &scope);
    if (!rc) {
      rc = share_memory(c, m, flags);
      leave(c, &scope);
    }
  }
  if (rc) {
    say(LOG_WARN, c->rank, "registration #%u of %zu bytes at %p failed", m->id, size, data);
    free_mr(m);
    return rc;
  }
  say(LOG_INFO, c->rank, "registration #%u: %p, %zu bytes, %s%s, %s", m->id, data, size,
      type == PTR_CUDA ? "GPU" : "host", flags & MR_FORCE_ORDER ? ", signals" : "",
      m->n ? "mapped from all peers" : "local only");
  pthread_mutex_lock(&c->lock);
  c->mrs[m->id] = m;
  atomic_store(&c->n_mrs, m->id + 1);
  pthread_mutex_unlock(&c->lock);
  *mr = m;
  if (device_mr) *device_mr = m;  // descriptors carry this one, inline values and signals the other: keep them equal
  return RC_OK;
}
static int gl_reg_mr_v14(void* coll, void* data, size_t size, int type, uint64_t flags, void** mr) {
  return gl_reg_mr(coll, data, size, type, flags, mr, 0);
}

static int step(struct coll* c);

static int gl_dereg_mr(void* coll, void* mr) {
  struct coll* c = coll;
  struct mr* m = mr;
  if (!m) return RC_OK;
  struct cuda_scope scope;
  int rc = enter(c, &scope);
  pthread_mutex_lock(&c->lock);
  for (double deadline = now() + 2; !rc && c->phase != IDLE && !c->failed && now() < deadline;) rc = step(c);
  c->mrs[m->id] = 0;
  pthread_mutex_unlock(&c->lock);
  free_mr(m);  // host memory behind a registration may be gone already: it is not looked at
  leave(c, &scope);
  return RC_OK;
}
