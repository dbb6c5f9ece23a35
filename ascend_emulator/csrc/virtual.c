/* Virtual memory: addresses are reserved, memory is allocated physically, and one is mapped to the other. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emu.h"

typedef struct {
  int file, device, imported, freed, mapped;
  size_t place, bytes;
  uint64_t handle;
} Physical;

typedef struct Range { /* of addresses */
  char *address;
  size_t bytes;
  Physical *physical;
  struct Range *next;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range *reserved, *mapped;

static void insert(Range **list, char *address, size_t bytes, Physical *physical) {
  Range *r = malloc(sizeof *r);
  *r = (Range){address, bytes, physical, *list};
  *list = r;
}
static Range **find(Range **list, const char *address) {
  while (*list && (*list)->address != address) list = &(*list)->next;
  return list;
}

int aclrtReserveMemAddress(void **address, size_t bytes, size_t alignment, void *wanted, uint64_t flags) {
  if (!bytes || wanted || (alignment & (alignment - 1))) return EMU_INVALID_PARAM;
  if (alignment < EMU_GRANULE) alignment = EMU_GRANULE;
  char *start = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    emu_fail("no %zu bytes of addresses are left", bytes);
    return EMU_OUT_OF_MEMORY;
  }
  char *aligned = (char *)(((uintptr_t)start + alignment - 1) & ~(uintptr_t)(alignment - 1));
  size_t length = (bytes + 4095) & ~(size_t)4095;
  if (aligned > start) munmap(start, (size_t)(aligned - start));
  if (aligned + length < start + bytes + alignment) munmap(aligned + length, (size_t)(start + bytes + alignment - aligned) - length);
  pthread_mutex_lock(&lock);
  insert(&reserved, aligned, length, NULL);
  pthread_mutex_unlock(&lock);
  *address = aligned;
  return EMU_OK;
}

int aclrtReleaseMemAddress(void *address) {
  pthread_mutex_lock(&lock);
  Range **link = find(&reserved, address), *r = *link;
  int busy = 0;
  for (Range *m = mapped; r && m; m = m->next) busy |= m->address >= r->address && m->address < r->address + r->bytes;
  if (r && !busy) {
    *link = r->next;
    munmap(r->address, r->bytes);
    free(r);
  }
  pthread_mutex_unlock(&lock);
  if (!r) emu_fail("%p is not the start of reserved addresses", address);
  else if (busy) emu_fail("memory is still mapped in the addresses from %p", address);
  return r && !busy ? EMU_OK : EMU_INVALID_PARAM;
}

typedef struct {
  int handle_type, allocation_type, attribute;
  struct {
    uint32_t id;
    int type;
  } location;
  uint64_t reserved;
} PhysicalProperties;

int aclrtMallocPhysical(Physical **handle, size_t bytes, const PhysicalProperties *properties, uint64_t flags) {
  if (!bytes || bytes % EMU_GRANULE) {
    emu_fail("physical memory comes in multiples of %zu bytes, not %zu", EMU_GRANULE, bytes);
    return EMU_INVALID_PARAM;
  }
  int device = (int)properties->location.id;
  if (device < 0 || device >= EMU_MAX_DEVICES) return EMU_INVALID_DEVICE;
  if (!emu_take_memory(device, bytes)) return EMU_OUT_OF_MEMORY;
  size_t place;
  int file = emu_new_range(bytes, &place);
  if (file < 0) {
    emu_give_memory(device, bytes);
    emu_fail("the host has no room for %zu bytes", bytes);
    return EMU_OUT_OF_MEMORY;
  }
  *handle = malloc(sizeof **handle);
  **handle = (Physical){.file = file, .device = device, .place = place, .bytes = bytes};
  return EMU_OK;
}

/* Memory that was never exported goes back to the host at once; other processes may hold the rest. */
static void drop(Physical *p) {
  if (!p->freed || p->mapped) return;
  if (p->imported) close(p->file);
  else if (!p->handle) fallocate(p->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)p->place, (off_t)p->bytes);
  if (!p->imported) emu_give_memory(p->device, p->bytes);
  free(p);
}

int aclrtFreePhysical(Physical *p) {
  pthread_mutex_lock(&lock);
  p->freed = 1;
  drop(p);
  pthread_mutex_unlock(&lock);
  return EMU_OK;
}

int aclrtMapMem(void *address, size_t bytes, size_t offset, Physical *p, uint64_t flags) {
  char *at = address;
  int result = EMU_INVALID_PARAM;
  pthread_mutex_lock(&lock);
  Range *r = reserved;
  while (r && (at < r->address || at + bytes > r->address + r->bytes)) r = r->next;
  int taken = 0;
  for (Range *m = mapped; m; m = m->next) taken |= at < m->address + m->bytes && m->address < at + bytes;
  if (!r) emu_fail("%p with %zu bytes is not within reserved addresses", address, bytes);
  else if (taken) emu_fail("memory is mapped at %p already", address);
  else if (offset + bytes > p->bytes) emu_fail("%zu bytes from %zu are more than the %zu allocated", bytes, offset, p->bytes);
  else if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p->file, (off_t)(p->place + offset)) != MAP_FAILED) {
    insert(&mapped, at, bytes, p);
    p->mapped++;
    result = EMU_OK;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

int aclrtUnmapMem(void *address) {
  pthread_mutex_lock(&lock);
  Range **link = find(&mapped, address), *r = *link;
  if (r) {
    *link = r->next;
    mmap(r->address, r->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    r->physical->mapped--;
    drop(r->physical);
    free(r);
  }
  pthread_mutex_unlock(&lock);
  if (!r) emu_fail("no memory is mapped at %p", address);
  return r ? EMU_OK : EMU_INVALID_PARAM;
}

int aclrtMemExportToShareableHandle(Physical *p, int type, uint64_t flags, uint64_t *handle) {
  if (p->imported) return EMU_INVALID_PARAM;
  if (!p->handle) p->handle = emu_publish(p->place, p->bytes, p->device);
  *handle = p->handle;
  if (!p->handle) return EMU_NOT_SUPPORTED;
  return flags & EMU_SHARE_ANYONE ? emu_admit(p->handle, 1, NULL, 0) : EMU_OK;
}
int aclrtMemSetPidToShareableHandle(uint64_t handle, int32_t *pids, size_t count) { return emu_admit(handle, 0, pids, count); }

int aclrtMemImportFromShareableHandle(uint64_t handle, int32_t device, Physical **out) {
  Physical p = {.imported = 1, .handle = handle};
  p.file = emu_open_shared(handle, &p.place, &p.bytes, &p.device);
  if (p.file < 0) return EMU_INVALID_PARAM;
  *out = malloc(sizeof **out);
  **out = p;
  return EMU_OK;
}
