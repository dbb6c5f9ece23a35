/* A communicator of the emulated HCCL: ranks on one host that share one memory file. */
#pragma once
#include <stdatomic.h>

#include "emu.h"

enum {
  HCCL_OK = 0,
  HCCL_PARA = 1,
  HCCL_PTR = 2,
  HCCL_MEMORY = 3,
  HCCL_INTERNAL = 4,
  HCCL_NOT_SUPPORT = 5,
  HCCL_UNAVAIL = 7,
  HCCL_SYSCALL = 8,
  HCCL_TIMEOUT = 9,
  HCCL_REMOTE = 21,
  HCCL_SUSPENDING = 22,
};
#define HCCL_MAX_RANKS 64
#define HCCL_MAX_NODES 64
#define HCCL_SLOT_BYTES (256u << 10) /* each rank's window for collectives */
#define HCCL_RING_BYTES (128u << 10) /* each ordered pair's ring for point to point */

typedef struct {
  _Atomic uint64_t written, read;
  char padding[48];
} Ring;

typedef struct {
  _Atomic uint32_t joined, waiting, generation, broken, activity;
  _Atomic int32_t pid[HCCL_MAX_RANKS];
  _Atomic uint32_t arrivals[HCCL_MAX_RANKS]; /* barriers each rank has come to */
  int32_t node[HCCL_MAX_RANKS];
} Shared;

typedef struct Communicator {
  uint32_t magic;
  int rank, size;
  Shared *shared;
  char *slots, *rings;
  Ring *ring;
  char name[128];
  _Atomic int error, aborted, suspended;
} Communicator;

double hccl_now(void);
void hccl_wait(_Atomic uint32_t *word, uint32_t value, long ms);
void hccl_wake(_Atomic uint32_t *word);
int hccl_check(Communicator *c);   /* a dead or departed peer breaks the communicator for everyone */
int hccl_barrier(Communicator *c);
char *hccl_slot(Communicator *c, int rank);
int hccl_node(void);               /* of this process */
void hccl_send_over(Communicator *c, int peer, size_t bytes); /* account, and wait as long as the link needs */
int hccl_take_port(int device);    /* this process's host port for a device, or an error */
size_t hccl_width(int type);       /* bytes of an HcclDataType, 0 if unknown */
int hccl_reduce(void *out, void **parts, int ranks, size_t count, int type, int op);

/* Operations */
enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SCATTER, BATCH, BARRIER };
typedef struct {
  int send;
  char *data;
  size_t bytes, moved, width;
  int peer;
} Part;

typedef struct {
  const char *name;
  int kind, type, op, root, parts;
  Communicator *comm;
  EmuStream *stream;
  char *in, *out;
  size_t count;
  Part *part;
} Operation;

Operation *hccl_operation(int kind, const void *in, void *out, uint64_t count, int type, Communicator *c, EmuStream *s);
int hccl_start(Operation *o);      /* queue it on its stream, or perform it if it has none; takes it over */
int hccl_exchange(Communicator *c, Part *part, int parts);
