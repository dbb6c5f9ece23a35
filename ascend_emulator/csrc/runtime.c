/* Devices, contexts, settings and device facts. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"

long emu_setting(const char *name, long fallback) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : fallback;
}

/* A message is given once: a later error must not seem to have the cause of an earlier one. */
static char last_message[1024];
static pthread_mutex_t message_lock = PTHREAD_MUTEX_INITIALIZER;

void emu_fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&message_lock);
  vsnprintf(last_message, sizeof last_message, format, arguments);
  pthread_mutex_unlock(&message_lock);
  va_end(arguments);
}

const char *aclGetRecentErrMsg(void) {
  static __thread char given[sizeof last_message];
  pthread_mutex_lock(&message_lock);
  memcpy(given, last_message, sizeof given);
  last_message[0] = 0;
  pthread_mutex_unlock(&message_lock);
  return given;
}

/* ASCEND_RT_VISIBLE_DEVICES as CANN reads it: ids up to the first that is missing or no number. One that is repeated or
 * out of order, or none at all, leaves no device. The parser of torch_npu (npu.device_count) follows the same rules. */
static int visible[EMU_MAX_DEVICES], visible_count = -1;

static int devices_of_machine(void) {
  long devices = emu_setting("ASCEND_EMULATOR_DEVICES", 8);
  return (int)(devices > EMU_MAX_DEVICES ? EMU_MAX_DEVICES : devices);
}

/* The driver counts what is there, whatever is visible. */
int drvGetDevNum(uint32_t *count) {
  *count = (uint32_t)devices_of_machine();
  return EMU_OK;
}

static void read_visible(void) {
  int devices = devices_of_machine();
  const char *mask = getenv("ASCEND_RT_VISIBLE_DEVICES");
  visible_count = 0;
  if (!mask) {
    for (int i = 0; i < devices; i++) visible[visible_count++] = i;
    return;
  }
  int previous = -1;
  while (*mask >= '0' && *mask <= '9') {
    char *end;
    long id = strtol(mask, &end, 10);
    if (id <= previous) visible_count = 0;
    if (id <= previous || id >= devices) break;
    visible[visible_count++] = previous = (int)id;
    if (*end != ',') break;
    mask = end + 1;
  }
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int device_count(void) {
  pthread_once(&once, read_visible);
  return visible_count;
}

static __thread int current = -1;
static int touched_pid; /* the process that first bound a device; its forked children may not */
static char contexts[EMU_MAX_DEVICES];
static char active[EMU_MAX_DEVICES]; /* devices that this process has a context on */
extern int getpid(void);

int emu_device(void) { return current; }

int aclInit(const char *path) { return EMU_OK; }
int aclFinalize(void) { return EMU_OK; }

int aclrtGetDeviceCount(uint32_t *count) {
  *count = (uint32_t)device_count();
  return EMU_OK;
}

int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) {
    emu_fail("device %d does not exist: %d devices are visible", device, device_count());
    return EMU_INVALID_DEVICE;
  }
  if (touched_pid && touched_pid != getpid()) {
    emu_fail("the NPU was used before fork(): a forked child cannot use it again; start processes with spawn");
    return EMU_STREAM_ERROR;
  }
  if (touched_pid != getpid() && emu_fault_busy()) {
    emu_fail("device %d is busy: the last process on it may still be ending; try again in about ten seconds", device);
    return EMU_DEVICE_BUSY;
  }
  touched_pid = getpid();
  current = device;
  active[device] = 1;
  return EMU_OK;
}

int aclrtGetDevice(int32_t *device) {
  if (current < 0) return EMU_CONTEXT_NULL;
  *device = current;
  return EMU_OK;
}

int aclrtResetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return EMU_INVALID_DEVICE;
  active[device] = 0;
  return EMU_OK;
}

int aclrtGetCurrentContext(void **context) {
  if (current < 0) return EMU_CONTEXT_NULL;
  *context = &contexts[current];
  return EMU_OK;
}

int aclrtSetCurrentContext(void *context) {
  long device = (char *)context - contexts;
  if (device < 0 || device >= device_count()) return EMU_INVALID_PARAM;
  return aclrtSetDevice((int32_t)device);
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *is_active) {
  if (device < 0 || device >= device_count()) return EMU_INVALID_DEVICE;
  if (flags) *flags = 0;
  *is_active = touched_pid == getpid() && active[device]; /* a forked child has none of its parent's contexts */
  return EMU_OK;
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
  *can = 1;
  return EMU_OK;
}
int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return EMU_OK; }

const char *aclrtGetSocName(void) {
  const char *name = getenv("ASCEND_EMULATOR_SOC");
  return name && *name ? name : "Ascend910B1";
}

int aclGetDeviceCapability(uint32_t device, int info, int64_t *value) {
  *value = 24; /* AI cores */
  return EMU_OK;
}

int aclrtGetRunMode(int *mode) {
  *mode = 1; /* host */
  return EMU_OK;
}

/* Options are kept and given back, so that a set is seen by the next get. */
static int64_t options[64];
int aclrtGetSysParamOpt(int option, int64_t *value) {
  if (option < 0 || option >= 64) return EMU_INVALID_PARAM;
  *value = options[option];
  return EMU_OK;
}
int aclrtSetSysParamOpt(int option, int64_t value) {
  if (option < 0 || option >= 64) return EMU_INVALID_PARAM;
  options[option] = value;
  return EMU_OK;
}
int aclrtCtxGetSysParamOpt(int option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

/* Time limits and compile options change nothing here: operators run on the host and are compiled already. */
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return EMU_OK; }
int aclrtSetOpExecuteTimeOutWithMs(uint32_t milliseconds) { return EMU_OK; }
int aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t *actual) {
  *actual = microseconds;
  return EMU_OK;
}
int aclrtSetOpWaitTimeout(uint32_t seconds) { return EMU_OK; }
int aclSetCompileopt(int option, const char *value) { return EMU_OK; }
int aclrtPeekAtLastError(int level) { return EMU_OK; }
int aclrtGetLastError(int level) { return EMU_OK; }

/* Profiling and logging hooks of the runtime: there is no profiler to feed. */
long MsprofGetHashId(void) { return 0; }
long MsprofRegisterCallback(void) { return 0; }
long MsprofReportAdditionalInfo(void) { return 0; }
long MsprofReportApi(void) { return 0; }
long MsprofReportCompactInfo(void) { return 0; }
long MsprofSysCycleTime(void) { return 0; }
void aclAppLog(void) {}
