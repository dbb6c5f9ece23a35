/* Point to point, and the collectives that are made of it.
 *
 * Data moves through rings, all parts of a batch at once and in order per peer and direction.
 */
#include <stdlib.h>
#include <string.h>

#include "hccl.h"

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
    hccl_send_over(c, p->peer, bytes);
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

int hccl_exchange(Communicator *c, Part *part, int parts) {
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

/* All to all: a batch of a send and a receive with every rank, itself included. */
int HcclAlltoAllV(const char *in, const uint64_t *sends, const uint64_t *send_at, int send_type, char *out,
                  const uint64_t *receives, const uint64_t *receive_at, int receive_type, Communicator *c, EmuStream *s) {
  size_t send_width = hccl_width(send_type), receive_width = hccl_width(receive_type);
  if (!send_width || !receive_width) return HCCL_NOT_SUPPORT;
  Operation *o = hccl_operation(BATCH, NULL, NULL, 0, 0, c, s);
  o->name = "AlltoAll";
  o->part = calloc(2 * (size_t)c->size, sizeof(Part));
  for (int k = 0; k < c->size; k++) {
    int to = (c->rank + k) % c->size, from = (c->rank - k + c->size) % c->size;
    o->part[o->parts++] = (Part){1, (char *)in + send_at[to] * send_width, sends[to] * send_width, 0, send_width, to};
    o->part[o->parts++] = (Part){0, out + receive_at[from] * receive_width, receives[from] * receive_width, 0, receive_width, from};
  }
  return hccl_start(o);
}
/* Rank r sends matrix[r * size + k] elements to rank k, packed one after another, as they also arrive. */
int HcclAlltoAllVC(const char *in, const uint64_t *matrix, int send_type, char *out, int receive_type, Communicator *c, EmuStream *s) {
  uint64_t send_at[HCCL_MAX_RANKS], receives[HCCL_MAX_RANKS], receive_at[HCCL_MAX_RANKS];
  for (int k = 0; k < c->size; k++) {
    receives[k] = matrix[k * c->size + c->rank];
    send_at[k] = k ? send_at[k - 1] + matrix[c->rank * c->size + k - 1] : 0;
    receive_at[k] = k ? receive_at[k - 1] + receives[k - 1] : 0;
  }
  return HcclAlltoAllV(in, matrix + c->rank * c->size, send_at, send_type, out, receives, receive_at, receive_type, c, s);
}
int HcclAllGatherV(char *in, uint64_t sends, char *out, const uint64_t *receives, const uint64_t *receive_at, int type,
                   Communicator *c, EmuStream *s) {
  uint64_t send_count[HCCL_MAX_RANKS], send_at[HCCL_MAX_RANKS];
  for (int k = 0; k < c->size; k++) send_count[k] = sends, send_at[k] = 0;
  if (receives[c->rank] != sends) {
    emu_fail("HCCL: rank %d gathers %llu elements of its own but sends %llu", c->rank, (unsigned long long)receives[c->rank],
             (unsigned long long)sends);
    return HCCL_PARA;
  }
  return HcclAlltoAllV(in, send_count, send_at, type, out, receives, receive_at, type, c, s);
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
    int error = hccl_start(group[i]);
    if (error) result = error;
  }
  group_size = 0;
  return result;
}

static int transfer(int send, void *data, uint64_t n, int type, uint32_t peer, Communicator *c, EmuStream *s) {
  if (peer >= (uint32_t)c->size || !hccl_width(type)) return HCCL_PARA;
  Operation *o = hccl_operation(BATCH, NULL, NULL, 0, 0, c, s);
  o->part = malloc(sizeof(Part));
  o->parts = 1;
  o->part[0] = (Part){send, data, n * hccl_width(type), 0, hccl_width(type), (int)peer};
  o->name = send ? "Send" : "Recv";
  return group_depth ? join_group(o) : hccl_start(o);
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
  Operation *o = hccl_operation(BATCH, NULL, NULL, 0, 0, c, s);
  o->part = calloc(items ? items : 1, sizeof(Part));
  for (uint32_t i = 0; i < items; i++) {
    size_t width = hccl_width(item[i].type), bytes = item[i].count * width;
    o->part[o->parts++] = (Part){item[i].kind == 0, item[i].data, bytes, 0, width, (int)item[i].peer};
  }
  return hccl_start(o);
}
