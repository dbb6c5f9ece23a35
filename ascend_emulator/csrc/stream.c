/* Streams: a queue of communication tasks, and the waits for them. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "emu.h"

_Atomic int emu_pending;
static EmuStream *streams;
static int next_id;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;

static int create(void **out) {
  EmuStream *s = calloc(1, sizeof *s);
  s->device = emu_device();
  s->alive = 1;
  pthread_mutex_init(&s->lock, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&s->changed, &attributes);
  pthread_mutex_lock(&list_lock);
  s->id = ++next_id;
  s->next = streams;
  streams = s;
  pthread_mutex_unlock(&list_lock);
  *out = s;
  return EMU_OK;
}
int aclrtCreateStream(void **stream) { return create(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return create(stream); }

static void *work(void *argument) {
  EmuStream *s = argument;
  pthread_mutex_lock(&s->lock);
  for (;;) {
    while (!s->head && !s->stop) pthread_cond_wait(&s->changed, &s->lock);
    if (!s->head) break;
    EmuTask *task = s->head;
    s->head = task->next;
    if (!s->head) s->tail = NULL;
    pthread_mutex_unlock(&s->lock);
    task->run(task->argument);
    free(task);
    pthread_mutex_lock(&s->lock);
    s->done++;
    emu_pending--;
    pthread_cond_broadcast(&s->changed);
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

void emu_enqueue(EmuStream *s, void (*run)(void *), void *argument) {
  EmuTask *task = malloc(sizeof *task);
  *task = (EmuTask){run, argument, NULL};
  pthread_mutex_lock(&s->lock);
  s->issued++;
  emu_pending++;
  if (s->tail) s->tail->next = task;
  else s->head = task;
  s->tail = task;
  if (!s->worker) {
    pthread_t thread;
    s->worker = 1;
    pthread_create(&thread, NULL, work, s);
    pthread_detach(thread);
  }
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

int emu_stream_busy(EmuStream *s) {
  pthread_mutex_lock(&s->lock);
  int busy = s->done < s->issued;
  pthread_mutex_unlock(&s->lock);
  return busy;
}

int emu_wait_stream(EmuStream *s, int64_t timeout_ms) {
  if (!s) return 0;
  struct timespec end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  if (timeout_ms >= 0) {
    end.tv_sec += timeout_ms / 1000;
    end.tv_nsec += (timeout_ms % 1000) * 1000000;
    if (end.tv_nsec >= 1000000000) end.tv_sec++, end.tv_nsec -= 1000000000;
  }
  int result = 0;
  pthread_mutex_lock(&s->lock);
  uint64_t wanted = s->issued;
  while (s->done < wanted && !result) {
    if (timeout_ms < 0) pthread_cond_wait(&s->changed, &s->lock);
    else if (pthread_cond_timedwait(&s->changed, &s->lock, &end) == ETIMEDOUT) result = 1;
  }
  if (!result && s->error) result = 2;
  pthread_mutex_unlock(&s->lock);
  return result;
}

void emu_set_stream_error(EmuStream *s, int error) {
  pthread_mutex_lock(&s->lock);
  s->error = error;
  pthread_mutex_unlock(&s->lock);
}

static int synchronize(EmuStream *s, int64_t timeout_ms) {
  int result = emu_wait_stream(s, timeout_ms);
  return result == 1 ? EMU_STREAM_TIMEOUT : result == 2 ? s->error : EMU_OK;
}
int aclrtSynchronizeStream(EmuStream *s) { return synchronize(s, -1); }
int aclrtSynchronizeStreamWithTimeout(EmuStream *s, int32_t timeout_ms) { return synchronize(s, timeout_ms); }

int aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  int device = emu_device();
  for (EmuStream *s = streams; s; s = s->next) {
    if (!s->alive || !s->worker || s->device != device) continue;
    int result = synchronize(s, timeout_ms);
    if (result) return result;
  }
  return EMU_OK;
}
int aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

int aclrtStreamQuery(EmuStream *s, int *status) {
  *status = s && emu_stream_busy(s); /* 0 complete, 1 not ready */
  return EMU_OK;
}

static int destroy(EmuStream *s, int drain) {
  if (drain) emu_wait_stream(s, -1);
  pthread_mutex_lock(&s->lock);
  s->alive = 0;
  s->stop = 1;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
  return EMU_OK;
}
int aclrtDestroyStream(EmuStream *s) { return destroy(s, 1); }
int aclrtDestroyStreamForce(EmuStream *s) { return destroy(s, 0); }

int aclrtStreamGetId(EmuStream *s, int32_t *id) {
  *id = s ? s->id : 0;
  return EMU_OK;
}
int aclrtSetStreamFailureMode(EmuStream *s, uint64_t mode) { return EMU_OK; }

/* Host functions keep their place in the queue. */
int aclrtLaunchHostFunc(EmuStream *s, void (*run)(void *), void *argument) {
  if (s && emu_stream_busy(s)) emu_enqueue(s, run, argument);
  else run(argument);
  return EMU_OK;
}
int aclrtLaunchCallback(void (*run)(void *), void *argument, int block, EmuStream *s) {
  return aclrtLaunchHostFunc(s, run, argument);
}
int aclrtSubscribeReport(uint64_t thread, EmuStream *s) { return EMU_OK; }
int aclrtUnSubscribeReport(uint64_t thread, EmuStream *s) { return EMU_OK; }
int aclrtProcessReport(int32_t timeout_ms) { /* callbacks run by themselves; there is never one to fetch */
  usleep(1000);
  return EMU_REPORT_TIMEOUT;
}
