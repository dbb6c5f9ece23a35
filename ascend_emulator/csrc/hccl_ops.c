/* Collectives and point to point. Each becomes a task on its stream.
 *
 * Collectives copy chunk by chunk through the ranks' slots, with a barrier before and after reading. Point to point
 * and all-to-all move through rings, all parts of a batch at once and in order per peer and direction.
 */
#include <stdlib.h>
#include <string.h>

#include "hccl.h"

enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SCATTER, BATCH, BARRIER };

typedef struct {
  int send;
  char *data;
  size_t bytes, moved;
  int peer;
} Part;

typedef struct {
  int kind, type, op, root, parts;
  Communicator *comm;
  EmuStream *stream;
  char *in, *out;
  size_t count;
  Part *part;
} Operation;

static int move(Communicator *c, Part *p) {
  int from = p->send ? c->rank : p->peer, to = p->send ? p->peer : c->rank;
  int index = from * c->size + to;
  Ring *ring = &c->ring[index];
  char *data = c->rings + (size_t)index * HCCL_RING_BYTES;
  uint64_t written = ring->written, read = ring->read;
  size_t room = p->send ? HCCL_RING_BYTES - (size_t)(written - read) : (size_t)(written - read);
  size_t bytes = p->bytes - p->moved < room ? p->bytes - p->moved : room;
  if (!bytes) return 0;
  size_t at = (p->send ? written : read) % HCCL_RING_BYTES;
  size_t first = bytes < HCCL_RING_BYTES - at ? bytes : HCCL_RING_BYTES - at;
  char *mine = p->data + p->moved;
  if (p->send) {
    memcpy(data + at, mine, first);
    memcpy(data, mine + first, bytes - first);
    ring->written = written + bytes;
  } else {
    memcpy(mine, data + at, first);
    memcpy(mine + first, data, bytes - first);
    ring->read = read + bytes;
  }
  p->moved += bytes;
  return 1;
}

static int exchange(Communicator *c, Part *part, int parts) {
  double start = hccl_now(), limit = (double)emu_setting("HCCL_EXEC_TIMEOUT", 1836);
  for (int idle = 0;;) {
    uint64_t sending = 0, receiving = 0;
    uint32_t activity = c->shared->activity;
    int open = 0, moved = 0;
    for (int i = 0; i < parts; i++) {
      Part *p = &part[i];
      uint64_t *busy = p->send ? &sending : &receiving, bit = 1ull << p->peer;
      if (p->moved == p->bytes) continue;
      open = 1;
      if (*busy & bit) continue; /* an earlier part to the same peer goes first */
      *busy |= bit;
      moved |= move(c, p);
    }
    if (!open) return HCCL_OK;
    if (moved) {
      idle = 0;
      atomic_fetch_add(&c->shared->activity, 1);
      hccl_wake(&c->shared->activity);
      continue;
    }
    if (idle++ < 20) continue;
    hccl_wait(&c->shared->activity, activity, 20);
    int error = hccl_check(c);
    if (error) return error;
    if (limit > 0 && hccl_now() - start > limit) {
      emu_fail("HCCL: a transfer of %s waited %.0f s for its peer (HCCL_EXEC_TIMEOUT)", c->name, limit);
      c->shared->broken = 1;
      return c->error = HCCL_TIMEOUT;
    }
  }
}

/* One chunk of one collective between its two barriers: put in, then take out. */
static void put(Operation *o, size_t at, size_t bytes, size_t total, size_t share) {
  Communicator *c = o->comm;
  char *slot = hccl_slot(c, c->rank);
  if (o->kind == REDUCE_SCATTER || o->kind == SCATTER) {
    if (o->kind == REDUCE_SCATTER || c->rank == o->root)
      for (int d = 0; d < c->size; d++) memcpy(slot + (size_t)d * share, o->in + (size_t)d * total + at, bytes);
  } else if (o->kind != BROADCAST || c->rank == o->root) {
    memcpy(slot, o->in + at, bytes);
  }
}

static int take(Operation *o, size_t at, size_t bytes, size_t total, size_t share) {
  Communicator *c = o->comm;
  void *parts[HCCL_MAX_RANKS];
  size_t offset = o->kind == REDUCE_SCATTER ? (size_t)c->rank * share : 0;
  for (int r = 0; r < c->size; r++) parts[r] = hccl_slot(c, r) + offset;
  switch (o->kind) {
    case REDUCE:
      if (c->rank != o->root) return HCCL_OK; /* fall through for the root */
    case ALL_REDUCE:
    case REDUCE_SCATTER:
      return hccl_reduce(o->out + at, parts, c->size, bytes / hccl_width(o->type), o->type, o->op);
    case BROADCAST:
      if (c->rank != o->root) memcpy(o->out + at, parts[o->root], bytes);
      return HCCL_OK;
    case SCATTER:
      memcpy(o->out + at, hccl_slot(c, o->root) + (size_t)c->rank * share, bytes);
      return HCCL_OK;
    case ALL_GATHER:
      for (int r = 0; r < c->size; r++) memcpy(o->out + (size_t)r * total + at, parts[r], bytes);
      return HCCL_OK;
  }
  return HCCL_INTERNAL;
}

static int perform(Operation *o) {
  Communicator *c = o->comm;
  if (o->kind == BATCH) return exchange(c, o->part, o->parts);
  if (o->kind == BARRIER) return hccl_barrier(c);
  size_t width = hccl_width(o->type), total = o->count * width;
  int shared = o->kind == REDUCE_SCATTER || o->kind == SCATTER;
  size_t share = HCCL_SLOT_BYTES / (shared ? (size_t)c->size : 1) / width * width;
  for (size_t at = 0; at < total; at += share) {
    size_t bytes = total - at < share ? total - at : share;
    put(o, at, bytes, total, share);
    int error = hccl_barrier(c);
    if (!error) error = take(o, at, bytes, total, share);
    if (!error) error = hccl_barrier(c);
    if (error) return error;
  }
  return HCCL_OK;
}

static void run(void *argument) {
  Operation *o = argument;
  int error = o->comm->error ? o->comm->error : perform(o);
  if (error) {
    if (!o->comm->error) o->comm->error = error;
    if (o->stream) emu_set_stream_error(o->stream, EMU_STREAM_ERROR);
  }
  free(o->part);
  free(o);
}

static Operation *operation(int kind, const void *in, void *out, uint64_t count, int type, Communicator *c, EmuStream *s) {
  Operation *o = calloc(1, sizeof *o);
  *o = (Operation){.kind = kind, .type = type, .comm = c, .stream = s, .in = (char *)in, .out = out, .count = count};
  return o;
}

static int start(Operation *o) {
  int moves_types = o->kind != BATCH && o->kind != BARRIER;
  int error = o->comm->suspended ? HCCL_SUSPENDING : moves_types && !hccl_width(o->type) ? HCCL_NOT_SUPPORT : HCCL_OK;
  if (error) {
    free(o->part);
    free(o);
    return error;
  }
  if (!o->stream) {
    Communicator *c = o->comm;
    run(o);
    return c->error;
  }
  emu_enqueue(o->stream, run, o);
  return HCCL_OK;
}

static int reducible(int type, int op) {
  char zero[16] = {0}, out[16];
  void *parts[1] = {zero};
  return hccl_reduce(out, parts, 1, 1, type, op);
}

int HcclAllReduce(void *in, void *out, uint64_t n, int type, int op, Communicator *c, EmuStream *s) {
  int error = reducible(type, op);
  Operation *o = error ? NULL : operation(ALL_REDUCE, in, out, n, type, c, s);
  if (o) o->op = op;
  return o ? start(o) : error;
}
int HcclReduce(void *in, void *out, uint64_t n, int type, int op, uint32_t root, Communicator *c, EmuStream *s) {
  int error = reducible(type, op);
  Operation *o = error ? NULL : operation(REDUCE, in, out, n, type, c, s);
  if (o) o->op = op, o->root = (int)root;
  return o ? start(o) : error;
}
int HcclReduceScatter(void *in, void *out, uint64_t n, int type, int op, Communicator *c, EmuStream *s) {
  int error = reducible(type, op);
  Operation *o = error ? NULL : operation(REDUCE_SCATTER, in, out, n, type, c, s);
  if (o) o->op = op;
  return o ? start(o) : error;
}
int HcclBroadcast(void *data, uint64_t n, int type, uint32_t root, Communicator *c, EmuStream *s) {
  Operation *o = operation(BROADCAST, data, data, n, type, c, s);
  o->root = (int)root;
  return start(o);
}
int HcclScatter(void *in, void *out, uint64_t n, int type, uint32_t root, Communicator *c, EmuStream *s) {
  Operation *o = operation(SCATTER, in, out, n, type, c, s);
  o->root = (int)root;
  return start(o);
}
int HcclAllGather(void *in, void *out, uint64_t n, int type, Communicator *c, EmuStream *s) {
  return start(operation(ALL_GATHER, in, out, n, type, c, s));
}
int HcclBarrier(Communicator *c, EmuStream *s) { return start(operation(BARRIER, NULL, NULL, 0, 0, c, s)); }

/* All to all: a batch of a send and a receive with every rank, itself included. */
int HcclAlltoAllV(const char *in, const uint64_t *sends, const uint64_t *send_at, int send_type, char *out,
                  const uint64_t *receives, const uint64_t *receive_at, int receive_type, Communicator *c, EmuStream *s) {
  size_t send_width = hccl_width(send_type), receive_width = hccl_width(receive_type);
  if (!send_width || !receive_width) return HCCL_NOT_SUPPORT;
  Operation *o = operation(BATCH, NULL, NULL, 0, 0, c, s);
  o->part = calloc(2 * (size_t)c->size, sizeof(Part));
  for (int k = 0; k < c->size; k++) {
    int to = (c->rank + k) % c->size, from = (c->rank - k + c->size) % c->size;
    o->part[o->parts++] = (Part){1, (char *)in + send_at[to] * send_width, sends[to] * send_width, 0, to};
    o->part[o->parts++] = (Part){0, out + receive_at[from] * receive_width, receives[from] * receive_width, 0, from};
  }
  return start(o);
}
int HcclAlltoAll(const char *in, uint64_t sends, int send_type, char *out, uint64_t receives, int receive_type,
                 Communicator *c, EmuStream *s) {
  uint64_t send_count[HCCL_MAX_RANKS], send_at[HCCL_MAX_RANKS], receive_count[HCCL_MAX_RANKS], receive_at[HCCL_MAX_RANKS];
  for (int k = 0; k < c->size; k++) {
    send_count[k] = sends, send_at[k] = sends * (uint64_t)k;
    receive_count[k] = receives, receive_at[k] = receives * (uint64_t)k;
  }
  return HcclAlltoAllV(in, send_count, send_at, send_type, out, receive_count, receive_at, receive_type, c, s);
}

/* Between HcclGroupStart and HcclGroupEnd, transfers of one communicator and stream become one batch. */
static __thread int group_depth, group_size;
static __thread Operation *group[64];

static int join_group(Operation *o) {
  for (int i = 0; i < group_size; i++) {
    Operation *g = group[i];
    if (g->comm != o->comm || g->stream != o->stream) continue;
    g->part = realloc(g->part, (size_t)(g->parts + o->parts) * sizeof(Part));
    memcpy(g->part + g->parts, o->part, (size_t)o->parts * sizeof(Part));
    g->parts += o->parts;
    free(o->part);
    free(o);
    return HCCL_OK;
  }
  if (group_size == 64) return HCCL_INTERNAL;
  group[group_size++] = o;
  return HCCL_OK;
}
int HcclGroupStart(void) {
  group_depth++;
  return HCCL_OK;
}
int HcclGroupEnd(void) {
  int result = HCCL_OK;
  if (group_depth == 0 || --group_depth) return HCCL_OK;
  for (int i = 0; i < group_size; i++) {
    int error = start(group[i]);
    if (error) result = error;
  }
  group_size = 0;
  return result;
}

static int transfer(int send, void *data, uint64_t n, int type, uint32_t peer, Communicator *c, EmuStream *s) {
  if (peer >= (uint32_t)c->size || !hccl_width(type)) return HCCL_PARA;
  Operation *o = operation(BATCH, NULL, NULL, 0, 0, c, s);
  o->part = malloc(sizeof(Part));
  o->parts = 1;
  o->part[0] = (Part){send, data, n * hccl_width(type), 0, (int)peer};
  return group_depth ? join_group(o) : start(o);
}
int HcclSend(void *data, uint64_t n, int type, uint32_t peer, Communicator *c, EmuStream *s) {
  return transfer(1, data, n, type, peer, c, s);
}
int HcclRecv(void *data, uint64_t n, int type, uint32_t peer, Communicator *c, EmuStream *s) {
  return transfer(0, data, n, type, peer, c, s);
}

typedef struct {
  int kind; /* 0 send, 1 receive */
  void *data;
  uint64_t count;
  int type;
  uint32_t peer;
} SendRecvItem;

int HcclBatchSendRecv(SendRecvItem *item, uint32_t items, Communicator *c, EmuStream *s) {
  Operation *o = operation(BATCH, NULL, NULL, 0, 0, c, s);
  o->part = calloc(items ? items : 1, sizeof(Part));
  for (uint32_t i = 0; i < items; i++) {
    size_t bytes = item[i].count * hccl_width(item[i].type);
    o->part[o->parts++] = (Part){item[i].kind == 0, item[i].data, bytes, 0, (int)item[i].peer};
  }
  return start(o);
}
