/* Operations, each a task on its stream, and the collectives.
 *
 * Collectives copy chunk by chunk through the ranks' slots, with a barrier before and after reading.
 */
#include <stdlib.h>
#include <string.h>

#include "hccl.h"

static const char *const names[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "Scatter", "BatchSendRecv", "Barrier"};

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

/* What a ring sends from each rank to the next: the whole for a broadcast, (n-1)/n of it for gathering and scattering,
 * twice that for an all-reduce. A broadcast or scatter does not enter its root, a reduction to a root does not leave it. */
static void charge(Operation *o, size_t total) {
  Communicator *c = o->comm;
  size_t n = (size_t)c->size;
  int next = (c->rank + 1) % c->size;
  if (n == 1) return;
  if ((o->kind == BROADCAST || o->kind == SCATTER) && next == o->root) return;
  if (o->kind == REDUCE && c->rank == o->root) return;
  size_t bytes = o->kind == ALL_REDUCE                                     ? 2 * total * (n - 1) / n
                 : o->kind == ALL_GATHER || o->kind == REDUCE_SCATTER      ? total * (n - 1)
                 : o->kind == SCATTER ? total * (size_t)((o->root - c->rank - 1 + c->size) % c->size)
                                      : total;
  hccl_send_over(c, next, bytes);
}

static int perform(Operation *o) {
  Communicator *c = o->comm;
  if (o->kind == BATCH) return hccl_exchange(c, o->part, o->parts);
  if (o->kind == BARRIER) return hccl_barrier(c);
  size_t width = hccl_width(o->type), total = o->count * width;
  int shared = o->kind == REDUCE_SCATTER || o->kind == SCATTER;
  charge(o, total);
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

/* A corrupted element is one of the result: of a batch, of the first part received. */
static void damage(Operation *o) {
  if (o->kind != BATCH) {
    emu_fault_after(o->name, o->out, o->kind == ALL_GATHER ? o->count * (size_t)o->comm->size : o->count, hccl_width(o->type));
    return;
  }
  for (int i = 0; i < o->parts; i++) {
    if (o->part[i].send) continue;
    emu_fault_after(o->name, o->part[i].data, o->part[i].bytes / o->part[i].width, o->part[i].width);
    return;
  }
}

static void run(void *argument) {
  Operation *o = argument;
  emu_fault_before(o->name);
  int error = o->comm->error ? o->comm->error : perform(o);
  if (!error) damage(o);
  if (error) {
    if (!o->comm->error) o->comm->error = error;
    if (o->stream) emu_set_stream_error(o->stream, EMU_STREAM_ERROR);
  }
  free(o->part);
  free(o);
}

Operation *hccl_operation(int kind, const void *in, void *out, uint64_t count, int type, Communicator *c, EmuStream *s) {
  Operation *o = calloc(1, sizeof *o);
  *o = (Operation){.name = names[kind], .kind = kind, .type = type, .comm = c, .stream = s, .in = (char *)in, .out = out, .count = count};
  return o;
}

int hccl_start(Operation *o) {
  int moves_types = o->kind != BATCH && o->kind != BARRIER;
  int error = emu_fault_error(o->name);
  if (!error) error = o->comm->suspended ? HCCL_SUSPENDING : moves_types && !hccl_width(o->type) ? HCCL_NOT_SUPPORT : HCCL_OK;
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
  Operation *o = error ? NULL : hccl_operation(ALL_REDUCE, in, out, n, type, c, s);
  if (o) o->op = op;
  return o ? hccl_start(o) : error;
}
int HcclReduce(void *in, void *out, uint64_t n, int type, int op, uint32_t root, Communicator *c, EmuStream *s) {
  int error = reducible(type, op);
  Operation *o = error ? NULL : hccl_operation(REDUCE, in, out, n, type, c, s);
  if (o) o->op = op, o->root = (int)root;
  return o ? hccl_start(o) : error;
}
int HcclReduceScatter(void *in, void *out, uint64_t n, int type, int op, Communicator *c, EmuStream *s) {
  int error = reducible(type, op);
  Operation *o = error ? NULL : hccl_operation(REDUCE_SCATTER, in, out, n, type, c, s);
  if (o) o->op = op;
  return o ? hccl_start(o) : error;
}
/* Segments of several lengths: one reduction to a root after another, each rank the root of its own. */
int HcclReduceScatterV(char *in, const uint64_t *counts, const uint64_t *at, char *out, uint64_t n, int type, int op,
                       Communicator *c, EmuStream *s) {
  int error = counts[c->rank] == n ? HCCL_OK : HCCL_PARA;
  for (int k = 0; k < c->size && !error; k++)
    if (counts[k]) error = HcclReduce(in + at[k] * hccl_width(type), out, counts[k], type, op, (uint32_t)k, c, s);
  return error;
}
int HcclBroadcast(void *data, uint64_t n, int type, uint32_t root, Communicator *c, EmuStream *s) {
  Operation *o = hccl_operation(BROADCAST, data, data, n, type, c, s);
  o->root = (int)root;
  return hccl_start(o);
}
int HcclScatter(void *in, void *out, uint64_t n, int type, uint32_t root, Communicator *c, EmuStream *s) {
  Operation *o = hccl_operation(SCATTER, in, out, n, type, c, s);
  o->root = (int)root;
  return hccl_start(o);
}
int HcclAllGather(void *in, void *out, uint64_t n, int type, Communicator *c, EmuStream *s) {
  return hccl_start(hccl_operation(ALL_GATHER, in, out, n, type, c, s));
}
int HcclBarrier(Communicator *c, EmuStream *s) { return hccl_start(hccl_operation(BARRIER, NULL, NULL, 0, 0, c, s)); }

