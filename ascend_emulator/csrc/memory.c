/* Device memory is host memory with an owner and a limit per device. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emu.h"

typedef struct Block {
  void *address;
  size_t bytes;
  int device;
  uint64_t shared; /* shareable handle, once exported */
  struct Block *next;
} Block;

#define BUCKETS 4096
static Block *table[BUCKETS];
static size_t used[EMU_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t capacity(void) { return (size_t)emu_setting("ASCEND_EMULATOR_MEMORY_MB", 65536) << 20; }
static unsigned bucket(const void *address) { return ((uintptr_t)address >> 9) % BUCKETS; }
static size_t pages(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

int emu_take_memory(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  int fits = used[device] + bytes <= capacity();
  if (fits) used[device] += bytes;
  else emu_fail("device %d: %zu bytes asked for, %zu of %zu in use", device, bytes, used[device], capacity());
  pthread_mutex_unlock(&lock);
  return fits;
}
void emu_give_memory(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  used[device] -= bytes;
  pthread_mutex_unlock(&lock);
}

/* Pages come from the host when they are first written, so a large device does not need a large host. */
int aclrtMalloc(void **address, size_t bytes, int policy) {
  int device = emu_device();
  *address = NULL;
  if (device < 0) return EMU_CONTEXT_NULL;
  if (!bytes) return EMU_INVALID_PARAM;
  if (!emu_take_memory(device, bytes)) return EMU_OUT_OF_MEMORY;
  void *memory = mmap(NULL, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    emu_give_memory(device, bytes);
    emu_fail("the host has no room for %zu bytes", bytes);
    return EMU_OUT_OF_MEMORY;
  }
  Block *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  *block = (Block){memory, bytes, device, 0, table[bucket(memory)]};
  table[bucket(memory)] = block;
  pthread_mutex_unlock(&lock);
  *address = memory;
  return EMU_OK;
}
int aclrtMallocAlign32(void **address, size_t bytes, int policy) { return aclrtMalloc(address, bytes, policy); }

int aclrtFree(void *address) {
  Block *found = NULL;
  pthread_mutex_lock(&lock);
  for (Block **link = &table[bucket(address)]; *link; link = &(*link)->next) {
    if ((*link)->address != address) continue;
    found = *link;
    *link = found->next;
    used[found->device] -= found->bytes;
    break;
  }
  pthread_mutex_unlock(&lock);
  if (!found) {
    emu_fail("%p was freed, but is no device memory", address);
    return EMU_INVALID_PARAM;
  }
  munmap(address, pages(found->bytes));
  free(found);
  return EMU_OK;
}

/* Memory for other processes: a block moves, in place, to pages of the file that shared.c keeps. */
int aclrtIpcMemGetExportKey(void *address, size_t bytes, char *key, size_t room, uint64_t flags) {
  int result = EMU_INVALID_PARAM;
  pthread_mutex_lock(&lock);
  for (Block *b = table[bucket(address)]; b; b = b->next) {
    if (b->address != address) continue;
    if (!b->shared) b->shared = emu_share_pages(address, pages(b->bytes), b->device);
    if (b->shared) result = emu_write_key(b->shared, flags, key, room);
  }
  pthread_mutex_unlock(&lock);
  if (result) emu_fail("%p is not the start of device memory that can be shared", address);
  return result;
}

int aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total) {
  int device = emu_device();
  if (device < 0) return EMU_CONTEXT_NULL;
  pthread_mutex_lock(&lock);
  *total = capacity();
  *free_bytes = *total - used[device];
  pthread_mutex_unlock(&lock);
  return EMU_OK;
}

int aclrtMallocHost(void **address, size_t bytes) {
  return posix_memalign(address, 4096, bytes ? bytes : 4096) ? EMU_OUT_OF_MEMORY : EMU_OK;
}
int aclrtMallocHostWithCfg(void **address, uint64_t bytes, void *config) { return aclrtMallocHost(address, bytes); }
int aclrtFreeHost(void *address) {
  free(address);
  return EMU_OK;
}
/* Host memory that a device may use: registered once, and unregistered at most once. */
typedef struct Registered {
  void *address;
  struct Registered *next;
} Registered;
static Registered *registered;

static int register_host(void *address, uint64_t bytes) {
  if (!address || !bytes) {
    emu_fail("%p with %lu bytes is no host memory to register", address, (unsigned long)bytes);
    return EMU_INVALID_PARAM;
  }
  Registered *r = malloc(sizeof *r);
  pthread_mutex_lock(&lock);
  *r = (Registered){address, registered};
  registered = r;
  pthread_mutex_unlock(&lock);
  return EMU_OK;
}
int aclrtHostRegister(void *address, uint64_t bytes, int type, void **device) {
  *device = address;
  return register_host(address, bytes);
}
int aclrtHostRegisterV2(void *address, uint64_t bytes, uint32_t flags) { return register_host(address, bytes); }
int aclrtHostUnregister(void *address) {
  pthread_mutex_lock(&lock);
  Registered **link = &registered;
  while (*link && (*link)->address != address) link = &(*link)->next;
  Registered *r = *link;
  if (r) *link = r->next;
  pthread_mutex_unlock(&lock);
  if (!r) emu_fail("%p is no registered host memory", address);
  free(r);
  return r ? EMU_OK : EMU_INVALID_PARAM;
}

typedef struct {
  struct {
    uint32_t id;
    int type; /* 0 host, 1 device, 2 unregistered */
  } location;
  uint32_t page_size, reserved[4];
} PointerAttributes;

int aclrtPointerGetAttributes(const void *address, PointerAttributes *attributes) {
  memset(attributes, 0, sizeof *attributes);
  attributes->location.type = 2;
  pthread_mutex_lock(&lock);
  for (Block *b = table[bucket(address)]; b; b = b->next) {
    if (b->address != address) continue;
    attributes->location.type = 1;
    attributes->location.id = (uint32_t)b->device;
  }
  pthread_mutex_unlock(&lock);
  return EMU_OK;
}

/* Copies wait for what their stream still holds. */
static int copy(void *to, size_t room, const void *from, size_t bytes) {
  if (bytes > room) {
    emu_fail("a copy of %zu bytes into room for %zu", bytes, room);
    return EMU_INVALID_PARAM;
  }
  memmove(to, from, bytes);
  return EMU_OK;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) { return copy(to, room, from, bytes); }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, EmuStream *stream) {
  if (emu_pending && stream) emu_wait_stream(stream, -1);
  return copy(to, room, from, bytes);
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return EMU_INVALID_PARAM;
  memset(to, value, bytes);
  return EMU_OK;
}
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, EmuStream *stream) {
  if (emu_pending && stream) emu_wait_stream(stream, -1);
  return aclrtMemset(to, room, value, bytes);
}
