/* What the parts of the emulated CANN share.
 *
 * Compute runs on the host, in the calling thread. Only communication, and work ordered after it, is queued on a
 * stream; a stream that ever had such a task gets one worker thread.
 */
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum {
  EMU_OK = 0,
  EMU_INVALID_PARAM = 107000,
  EMU_INVALID_DEVICE = 107001,
  EMU_CONTEXT_NULL = 107002,
  EMU_OUT_OF_MEMORY = 207001,
  EMU_NOT_SUPPORTED = 207000,
  EMU_REPORT_TIMEOUT = 107014,
  EMU_DEVICE_BUSY = 507033,
  EMU_STREAM_TIMEOUT = 507046,
  EMU_STREAM_ERROR = 507048,
  EMU_OP_NOT_FOUND = 500002,
};
#define EMU_MAX_DEVICES 64

typedef struct EmuTask {
  void (*run)(void *);
  void *argument;
  struct EmuTask *next;
} EmuTask;

typedef struct EmuStream {
  int id, device, alive, worker, stop, error, overflow;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  EmuTask *head, *tail;
  uint64_t issued, done;
  struct EmuStream *next; /* all streams of the process; never freed, so that late waits stay valid */
} EmuStream;

/* runtime.c */
long emu_setting(const char *name, long fallback);
int emu_device(void); /* the calling thread's device, or -1 */
void emu_fail(const char *format, ...); /* remember a message for aclGetRecentErrMsg */

/* faults.c */
void emu_fault_before(const char *op);
int emu_fault_error(const char *op);
void emu_fault_after(const char *op, void *data, size_t count, size_t width);
int emu_fault_busy(void);

/* stream.c */
extern _Atomic int emu_pending; /* tasks not yet done in the whole process; read by the operator layer */
void emu_enqueue(EmuStream *stream, void (*run)(void *), void *argument);
int emu_stream_busy(EmuStream *stream);
int emu_wait_stream(EmuStream *stream, int64_t timeout_ms); /* 0 done, 1 timeout, 2 stream error */
void emu_set_stream_error(EmuStream *stream, int error);

/* memory.c: a device's account */
int emu_take_memory(int device, size_t bytes); /* 0, and a message, when there is no room */
void emu_give_memory(int device, size_t bytes);

/* shared.c: ranges of a file that other processes can map */
#define EMU_GRANULE ((size_t)2 << 20)
#define EMU_SHARE_ANYONE 1u                        /* flag of an export: no process need be named */
int emu_new_range(size_t bytes, size_t *place);    /* the file, or -1 */
uint64_t emu_publish(size_t place, size_t bytes, int device);          /* a handle, or 0 */
uint64_t emu_share_pages(void *address, size_t bytes, int device);     /* the same, and the pages are the file's now */
int emu_admit(uint64_t handle, int anyone, const int32_t *pids, size_t count);
int emu_open_shared(uint64_t handle, size_t *place, size_t *bytes, int *device); /* the file, or -1 and a message */
int emu_write_key(uint64_t handle, uint64_t flags, char *key, size_t room);
