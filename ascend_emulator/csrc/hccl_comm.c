/* Communicators: meeting, barriers, noticing dead peers, ending. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hccl.h"

#define MAGIC 0x48434f4d
#define ROOT_INFO_BYTES 4108
#define CONFIG_NAME_OFFSET 32 /* of hcclCommName in HcclCommConfig */
#define PREFIX "ascend-emulator-"

double hccl_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
void hccl_wait(_Atomic uint32_t *word, uint32_t value, long ms) {
  struct timespec t = {ms / 1000, (ms % 1000) * 1000000};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}
void hccl_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static int broken(Communicator *c, int error) {
  c->error = error;
  c->shared->broken = 1;
  hccl_wake(&c->shared->generation);
  hccl_wake(&c->shared->activity);
  return error;
}

/* Dead, or a zombie that nobody has waited for yet. */
static int gone(int pid) {
  char path[40], text[300];
  if (kill(pid, 0) < 0 && errno == ESRCH) return 1;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno == ENOENT;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[size > 0 ? size : 0] = 0;
  char *name_end = strrchr(text, ')');
  return name_end && name_end[1] && (name_end[2] == 'Z' || name_end[2] == 'X');
}

/* The ranks that have not come, for messages. */
static void missing(Communicator *c, int joining, char *out, size_t room) {
  size_t used = 0;
  out[0] = 0;
  for (int i = 0; i < c->size && used + 8 < room; i++) {
    int here = joining ? c->shared->pid[i] != 0 : c->shared->arrivals[i] >= c->shared->arrivals[c->rank];
    if (!here) used += (size_t)snprintf(out + used, room - used, "%s%d", used ? ", " : "", i);
  }
}

int hccl_check(Communicator *c) {
  if (c->aborted) return c->error ? c->error : HCCL_SUSPENDING;
  if (c->shared->broken) return c->error = HCCL_REMOTE;
  for (int i = 0; i < c->size; i++) {
    int pid = c->shared->pid[i];
    if (pid > 0 && gone(pid)) {
      emu_fail("HCCL: rank %d of %s is gone (process %d)", i, c->name, pid);
      return broken(c, HCCL_REMOTE);
    }
  }
  return 0;
}

int hccl_barrier(Communicator *c) {
  Shared *s = c->shared;
  uint32_t generation = s->generation;
  s->arrivals[c->rank]++;
  if (atomic_fetch_add(&s->waiting, 1) + 1 == (uint32_t)c->size) {
    s->waiting = 0;
    atomic_fetch_add(&s->generation, 1);
    hccl_wake(&s->generation);
    return 0;
  }
  double start = hccl_now(), limit = (double)emu_setting("HCCL_EXEC_TIMEOUT", 1836);
  while (s->generation == generation) {
    hccl_wait(&s->generation, generation, 50);
    if (s->generation != generation) break;
    int error = hccl_check(c);
    if (error) return error;
    if (limit > 0 && hccl_now() - start > limit) {
      char ranks[200];
      missing(c, 0, ranks, sizeof ranks);
      emu_fail("HCCL: rank %d of %s waited %.0f s in a collective for rank %s (HCCL_EXEC_TIMEOUT)", c->rank, c->name, limit, ranks);
      return broken(c, HCCL_TIMEOUT);
    }
  }
  return 0;
}

char *hccl_slot(Communicator *c, int rank) { return c->slots + (size_t)rank * HCCL_SLOT_BYTES; }

int HcclGetRootInfo(char *info) {
  unsigned long long random = 0;
  int file = open("/dev/urandom", O_RDONLY);
  if (file < 0 || read(file, &random, 8) != 8) return HCCL_SYSCALL;
  close(file);
  memset(info, 0, ROOT_INFO_BYTES);
  snprintf(info, 100, PREFIX "%d-%016llx", (int)getpid(), random);
  return HCCL_OK;
}

static int meet(Communicator *c, const char *path, double limit) {
  double start = hccl_now();
  Shared *s = c->shared;
  s->node[c->rank] = hccl_node();
  s->pid[c->rank] = getpid();
  atomic_fetch_add(&s->joined, 1);
  hccl_wake(&s->joined);
  for (uint32_t joined = s->joined; joined < (uint32_t)c->size; joined = s->joined) {
    hccl_wait(&s->joined, joined, 50);
    if (hccl_now() - start > limit) {
      char ranks[200];
      missing(c, 1, ranks, sizeof ranks);
      emu_fail("HCCL: %u of %d ranks met within %.0f s (HCCL_CONNECT_TIMEOUT); rank %s did not come", joined, c->size, limit, ranks);
      unlink(path);
      return HCCL_TIMEOUT;
    }
  }
  int error = hccl_barrier(c);
  if (!error && c->rank == 0) unlink(path);
  return error;
}

int HcclCommInitRootInfo(uint32_t size, const char *info, uint32_t rank, void **out) {
  if (size < 1 || size > HCCL_MAX_RANKS || rank >= size || strncmp(info, PREFIX, strlen(PREFIX))) return HCCL_PARA;
  int error = emu_fault_error("CommInit");
  if (!error) error = hccl_take_port(emu_device());
  if (error) return error;
  char path[300];
  snprintf(path, sizeof path, "/dev/shm/%.200s", info);
  size_t rings = (((size_t)size * size * sizeof(Ring)) + 4095) & ~(size_t)4095;
  size_t bytes = 4096 + (size_t)size * HCCL_SLOT_BYTES + rings + (size_t)size * size * HCCL_RING_BYTES;
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0) return HCCL_SYSCALL;
  char *base = ftruncate(file, (off_t)bytes) ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (base == MAP_FAILED) return HCCL_MEMORY;
  Communicator *c = calloc(1, sizeof *c);
  c->magic = MAGIC, c->rank = (int)rank, c->size = (int)size;
  c->shared = (Shared *)base;
  c->slots = base + 4096;
  c->ring = (Ring *)(c->slots + (size_t)size * HCCL_SLOT_BYTES);
  c->rings = (char *)c->ring + rings;
  snprintf(c->name, sizeof c->name, "%.120s", info);
  error = meet(c, path, (double)emu_setting("HCCL_CONNECT_TIMEOUT", 120));
  if (error) return error;
  *out = c;
  return HCCL_OK;
}

int HcclCommInitRootInfoConfig(uint32_t size, const char *info, uint32_t rank, const char *config, void **out) {
  int error = HcclCommInitRootInfo(size, info, rank, out);
  if (!error && config && config[CONFIG_NAME_OFFSET])
    snprintf(((Communicator *)*out)->name, 128, "%.127s", config + CONFIG_NAME_OFFSET);
  return error;
}
uint32_t HcclGetCommConfigCapability(void) { return 3; } /* buffer size, determinism, name */

int HcclGetCommName(Communicator *c, char *name) {
  snprintf(name, 128, "%s", c->name);
  return HCCL_OK;
}
int HcclGetRankSize(Communicator *c, uint32_t *size) {
  *size = (uint32_t)c->size;
  return HCCL_OK;
}
int HcclGetRankId(Communicator *c, uint32_t *rank) {
  *rank = (uint32_t)c->rank;
  return HCCL_OK;
}
int HcclGetCommAsyncError(Communicator *c, int *error) {
  if (!c) return HCCL_PTR;
  if (!c->error && c->shared->broken) c->error = HCCL_REMOTE;
  *error = c->error;
  return HCCL_OK;
}

const char *HcclGetErrorString(int error) {
  static const char *const text[] = {"no error",    "parameter error", "empty pointer",         "memory error",
                                     "internal error", "not support error", "not found specific resource", "resource unavailable",
                                     "call system interface error", "timeout error"};
  if (error >= 0 && error < 10) return text[error];
  return error == HCCL_REMOTE ? "remote error" : error == HCCL_SUSPENDING ? "suspending error" : "unknown error";
}

int HcclCommSuspend(Communicator *c) {
  c->suspended = 1;
  return HCCL_OK;
}
int HcclCommResume(Communicator *c) {
  c->suspended = 0;
  return HCCL_OK;
}
int HcclSetConfig(int config, int value) { return HCCL_OK; } /* determinism: sums here are always in rank order */

/* The mapping stays: a worker may still be inside. */
int HcclCommDestroy(Communicator *c) {
  if (!c || c->magic != MAGIC) return HCCL_OK;
  c->aborted = 1;
  c->magic = 0;
  return HCCL_OK;
}
