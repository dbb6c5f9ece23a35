/* Device memory that other processes can map.
 *
 * It is ranges of one sparse file of the process, which has no name. A handle says where another process finds a range:
 * process, file descriptor, and place in the file. A page before each range says how long it is and who may have it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emu.h"

#define MAGIC 0x56495254u
#define MAX_PIDS 256

typedef struct {
  uint32_t magic, anyone, pids;
  int32_t device;
  uint64_t bytes;
  int32_t pid[MAX_PIDS];
} Header;

typedef struct Imported { /* by key */
  char *address;
  size_t bytes;
  uint64_t handle;
  struct Imported *next;
} Imported;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Imported *imported;
static int file = -1;
static size_t end; /* of the file */

static uint64_t pack(size_t place) { return (uint64_t)getpid() << 42 | (uint64_t)file << 32 | place / EMU_GRANULE; }
static int process_of(uint64_t handle) { return (int)(handle >> 42); }
static int descriptor_of(uint64_t handle) { return (int)(handle >> 32) & 1023; }
static size_t place_of(uint64_t handle) { return (size_t)(uint32_t)handle * EMU_GRANULE; }
static off_t header_of(size_t place) { return (off_t)(place - EMU_GRANULE); }

int emu_new_range(size_t bytes, size_t *place) {
  pthread_mutex_lock(&lock);
  if (file < 0) file = memfd_create("ascend-emulator", MFD_CLOEXEC);
  *place = end + EMU_GRANULE;
  size_t grown = *place + (bytes + EMU_GRANULE - 1) / EMU_GRANULE * EMU_GRANULE;
  int there = file >= 0 && !ftruncate(file, (off_t)grown) ? file : -1;
  if (there >= 0) end = grown;
  pthread_mutex_unlock(&lock);
  return there;
}

uint64_t emu_publish(size_t place, size_t bytes, int device) {
  Header h = {.magic = MAGIC, .device = device, .bytes = bytes};
  return file < 1024 && pwrite(file, &h, sizeof h, header_of(place)) == sizeof h ? pack(place) : 0;
}

int emu_admit(uint64_t handle, int anyone, const int32_t *pids, size_t count) {
  Header h;
  off_t at = header_of(place_of(handle));
  if (process_of(handle) != getpid() || pread(file, &h, sizeof h, at) != sizeof h || h.magic != MAGIC) {
    emu_fail("this process shares no memory under the handle %016lx", (unsigned long)handle);
    return EMU_INVALID_PARAM;
  }
  if (h.pids + count > MAX_PIDS) return EMU_INVALID_PARAM;
  for (size_t i = 0; i < count; i++) h.pid[h.pids++] = pids[i];
  h.anyone |= (uint32_t)anyone;
  return pwrite(file, &h, sizeof h, at) == sizeof h ? EMU_OK : EMU_INVALID_PARAM;
}

int emu_open_shared(uint64_t handle, size_t *place, size_t *bytes, int *device) {
  Header h;
  char path[64];
  int owner = process_of(handle);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", owner, descriptor_of(handle));
  int found = open(path, O_RDWR | O_CLOEXEC);
  if (found < 0 || pread(found, &h, sizeof h, header_of(place_of(handle))) != sizeof h || h.magic != MAGIC) {
    emu_fail("process %d shares no memory under the handle %016lx", owner, (unsigned long)handle);
    if (found >= 0) close(found);
    return -1;
  }
  int may = h.anyone || owner == getpid();
  for (uint32_t i = 0; i < h.pids; i++) may |= h.pid[i] == getpid();
  if (!may) {
    emu_fail("process %d may not import the memory of process %d: it was not named", getpid(), owner);
    close(found);
    return -1;
  }
  *place = place_of(handle), *bytes = h.bytes, *device = h.device;
  return found;
}

uint64_t emu_share_pages(void *address, size_t bytes, int device) {
  size_t place = 0, done = 0;
  if (emu_new_range(bytes, &place) < 0) return 0;
  while (done < bytes) {
    ssize_t wrote = pwrite(file, (char *)address + done, bytes - done, (off_t)(place + done));
    if (wrote <= 0) return 0;
    done += (size_t)wrote;
  }
  if (mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, (off_t)place) == MAP_FAILED) return 0;
  return emu_publish(place, bytes, device);
}

/* Keys are handles in hexadecimal digits. */
static uint64_t handle_of(const char *key) { return strtoull(key, NULL, 16); }
int emu_write_key(uint64_t handle, uint64_t flags, char *key, size_t room) {
  if (snprintf(key, room, "%016lx", (unsigned long)handle) >= (int)room) return EMU_INVALID_PARAM;
  return flags & EMU_SHARE_ANYONE ? emu_admit(handle, 1, NULL, 0) : EMU_OK;
}
int aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count) { return emu_admit(handle_of(key), 0, pids, count); }

int aclrtIpcMemImportByKey(void **address, const char *key, uint64_t flags) {
  size_t place, bytes;
  int device, shared = emu_open_shared(handle_of(key), &place, &bytes, &device);
  if (shared < 0) return EMU_INVALID_PARAM;
  char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared, (off_t)place);
  close(shared);
  if (at == MAP_FAILED) return EMU_OUT_OF_MEMORY;
  Imported *i = malloc(sizeof *i);
  pthread_mutex_lock(&lock);
  *i = (Imported){at, bytes, handle_of(key), imported};
  imported = i;
  pthread_mutex_unlock(&lock);
  *address = at;
  return EMU_OK;
}

/* In an importing process the memory goes; in the exporting one it stays, until it is freed. */
int aclrtIpcMemClose(const char *key) {
  if (process_of(handle_of(key)) == getpid()) return EMU_OK;
  pthread_mutex_lock(&lock);
  Imported **link = &imported;
  while (*link && (*link)->handle != handle_of(key)) link = &(*link)->next;
  Imported *i = *link;
  if (i) {
    *link = i->next;
    munmap(i->address, i->bytes);
    free(i);
  }
  pthread_mutex_unlock(&lock);
  if (!i) emu_fail("no shared memory is open under the key %.16s", key);
  return i ? EMU_OK : EMU_INVALID_PARAM;
}

int aclrtDeviceGetBareTgid(int32_t *pid) {
  *pid = getpid();
  return EMU_OK;
}
