/* Events: a count of recordings issued and one of recordings reached.
 *
 * torch_npu destroys an event while a wait for it is still queued, so events are reference counted; and it records an
 * event again while others wait for the previous recording, so every wait names the recording it is for.
 */
#include <stdlib.h>
#include <time.h>

#include "emu.h"

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t reached_more;
  int references;
  uint64_t recorded, reached;
  struct timespec time;
} Event;

typedef struct {
  Event *event;
  uint64_t recording;
} Ticket;

static int create(void **out) {
  Event *e = calloc(1, sizeof *e);
  e->references = 1;
  pthread_mutex_init(&e->lock, NULL);
  pthread_cond_init(&e->reached_more, NULL);
  *out = e;
  return EMU_OK;
}
int aclrtCreateEvent(void **event) { return create(event); }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return create(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return create(event); }

static void release(Event *e) {
  pthread_mutex_lock(&e->lock);
  int last = --e->references == 0;
  pthread_mutex_unlock(&e->lock);
  if (last) free(e);
}
int aclrtDestroyEvent(Event *e) {
  if (e) release(e);
  return EMU_OK;
}

static Ticket *ticket(Event *e, int new_recording) {
  Ticket *t = malloc(sizeof *t);
  pthread_mutex_lock(&e->lock);
  e->references++;
  if (new_recording) e->recorded++;
  *t = (Ticket){e, e->recorded};
  pthread_mutex_unlock(&e->lock);
  return t;
}

static void reach(void *argument) {
  Ticket *t = argument;
  Event *e = t->event;
  pthread_mutex_lock(&e->lock);
  if (t->recording > e->reached) {
    e->reached = t->recording;
    clock_gettime(CLOCK_MONOTONIC, &e->time);
  }
  pthread_cond_broadcast(&e->reached_more);
  pthread_mutex_unlock(&e->lock);
  free(t);
  release(e);
}

static void wait_for(void *argument) {
  Ticket *t = argument;
  Event *e = t->event;
  pthread_mutex_lock(&e->lock);
  while (e->reached < t->recording) pthread_cond_wait(&e->reached_more, &e->lock);
  pthread_mutex_unlock(&e->lock);
  free(t);
  release(e);
}

static int open_recording(Event *e) {
  pthread_mutex_lock(&e->lock);
  int open = e->reached < e->recorded;
  pthread_mutex_unlock(&e->lock);
  return open;
}

int aclrtRecordEvent(Event *e, EmuStream *s) {
  Ticket *t = ticket(e, 1);
  if (s && emu_stream_busy(s)) emu_enqueue(s, reach, t);
  else reach(t);
  return EMU_OK;
}
int aclrtResetEvent(Event *e, EmuStream *s) { return EMU_OK; }

int aclrtStreamWaitEvent(EmuStream *s, Event *e) {
  if (!open_recording(e)) return EMU_OK;
  Ticket *t = ticket(e, 0);
  if (s) emu_enqueue(s, wait_for, t);
  else wait_for(t);
  return EMU_OK;
}
int aclrtSynchronizeEvent(Event *e) {
  wait_for(ticket(e, 0));
  return EMU_OK;
}
int aclrtQueryEventStatus(Event *e, int *status) {
  *status = open_recording(e) ? 0 : 1; /* 1 complete */
  return EMU_OK;
}
int aclrtQueryEventWaitStatus(Event *e, int *status) {
  *status = open_recording(e) ? 1 : 0; /* here 0 is complete */
  return EMU_OK;
}
int aclrtEventElapsedTime(float *ms, Event *start, Event *end) {
  *ms = (float)(end->time.tv_sec - start->time.tv_sec) * 1e3f + (float)(end->time.tv_nsec - start->time.tv_nsec) / 1e6f;
  return EMU_OK;
}
int aclrtEventGetTimestamp(Event *e, uint64_t *microseconds) {
  *microseconds = (uint64_t)e->time.tv_sec * 1000000u + (uint64_t)e->time.tv_nsec / 1000u;
  return EMU_OK;
}
