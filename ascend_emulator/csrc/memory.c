/* Device memory is host memory with an owner and a limit per device. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "emu.h"

typedef struct Block {
  void *address;
  size_t bytes;
  int device;
  struct Block *next;
} Block;

#define BUCKETS 4096
static Block *table[BUCKETS];
static size_t used[EMU_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t capacity(void) { return (size_t)emu_setting("ASCEND_EMULATOR_MEMORY_MB", 65536) << 20; }
static unsigned bucket(const void *address) { return ((uintptr_t)address >> 9) % BUCKETS; }

int aclrtMalloc(void **address, size_t bytes, int policy) {
  int device = emu_device();
  *address = NULL;
  if (device < 0) return EMU_CONTEXT_NULL;
  if (!bytes) return EMU_INVALID_PARAM;
  pthread_mutex_lock(&lock);
  int fits = used[device] + bytes <= capacity();
  if (fits && posix_memalign(address, 512, bytes)) fits = 0;
  if (fits) {
    Block *block = malloc(sizeof *block);
    *block = (Block){*address, bytes, device, table[bucket(*address)]};
    table[bucket(*address)] = block;
    used[device] += bytes;
  } else {
    emu_fail("device %d: %zu bytes asked for, %zu of %zu in use", device, bytes, used[device], capacity());
  }
  pthread_mutex_unlock(&lock);
  return fits ? EMU_OK : EMU_OUT_OF_MEMORY;
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
  free(found);
  free(address);
  return EMU_OK;
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
int aclrtHostRegister(void *address, uint64_t bytes, int type, void **device) {
  *device = address;
  return EMU_OK;
}
int aclrtHostRegisterV2(void *address, uint64_t bytes, uint32_t flags) { return EMU_OK; }
int aclrtHostUnregister(void *address) { return EMU_OK; }

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
