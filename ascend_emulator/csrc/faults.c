/* Faults on demand: late or killed ranks, corrupted elements, errors, a device that is busy at first.
 *
 * A specification is a list of entries separated by ';', each a kind and settings: "delay rank=1 op=AllReduce call=3
 * seconds=2". Settings: rank (of the environment variable RANK; any), op (any), call (the first matching call that is
 * hit, 1), times (how many from there, 1; 0 for all), seconds, element, bit, code, attempts.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "emu.h"

#define MAX_FAULTS 32
static const char *const kinds[] = {"delay", "kill", "corrupt", "error", "busy"};
typedef struct {
  int kind;
  char op[32];
  long rank, call, times, element, bit, code, attempts, seen;
  double seconds;
} Fault;
static Fault faults[MAX_FAULTS];
static int fault_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int setting(Fault *f, const char *key, const char *value) {
  struct {
    const char *key;
    long *place;
  } numbers[] = {{"rank", &f->rank}, {"call", &f->call}, {"times", &f->times},      {"element", &f->element},
                 {"bit", &f->bit},   {"code", &f->code}, {"attempts", &f->attempts}};
  char *end;
  if (!strcmp(key, "op")) return snprintf(f->op, sizeof f->op, "%s", value) < (int)sizeof f->op;
  if (!strcmp(key, "seconds")) return f->seconds = strtod(value, &end), *value && !*end;
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    if (!strcmp(key, numbers[i].key)) return *numbers[i].place = strtol(value, &end, 10), *value && !*end;
  return 0;
}

static int parse(char *text, Fault *f) {
  char *rest = NULL, *word = strtok_r(text, " ", &rest);
  *f = (Fault){.kind = -1, .rank = -1, .call = 1, .times = 1, .bit = -1, .code = 9, .attempts = 1};
  for (int k = 0; word && k < (int)(sizeof kinds / sizeof *kinds); k++)
    if (!strcmp(word, kinds[k])) f->kind = k;
  if (f->kind < 0) return 0;
  while ((word = strtok_r(NULL, " ", &rest))) {
    char *equals = strchr(word, '=');
    if (!equals) return 0;
    *equals = 0;
    if (!setting(f, word, equals + 1)) return 0;
  }
  return 1;
}

/* Replace all faults. Returns 0, or the number of the first entry that cannot be read; then nothing is changed. */
int emu_set_faults(const char *text) {
  Fault fresh[MAX_FAULTS];
  char copy[4096], *rest = NULL;
  int count = 0;
  if (strlen(text) >= sizeof copy) return MAX_FAULTS + 1;
  strcpy(copy, text);
  for (char *entry = strtok_r(copy, ";", &rest); entry; entry = strtok_r(NULL, ";", &rest))
    if (count == MAX_FAULTS || !parse(entry, &fresh[count++])) return count;
  pthread_mutex_lock(&lock);
  memcpy(faults, fresh, sizeof fresh);
  fault_count = count;
  pthread_mutex_unlock(&lock);
  return 0;
}

/* The fault of a kind that hits this call, if any. */
static int hit(const char *kind, const char *op, Fault *found) {
  const char *variable = getenv("RANK");
  long rank = variable ? atol(variable) : -1;
  int result = 0;
  if (!fault_count) return 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < fault_count; i++) {
    Fault *f = &faults[i];
    if (strcmp(kinds[f->kind], kind) || (f->rank >= 0 && f->rank != rank) || (*f->op && strcmp(f->op, op))) continue;
    f->seen++;
    if (result || f->seen < f->call || (f->times && f->seen >= f->call + f->times)) continue;
    *found = *f;
    result = 1;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

/* Before an operation is performed, on its stream. */
void emu_fault_before(const char *op) {
  Fault f;
  if (hit("kill", op, &f)) kill(getpid(), SIGKILL);
  if (hit("delay", op, &f)) {
    struct timespec t = {(time_t)f.seconds, (long)((f.seconds - (double)(time_t)f.seconds) * 1e9)};
    nanosleep(&t, NULL);
  }
}

/* What the call itself returns: 0, or an HCCL error code. */
int emu_fault_error(const char *op) {
  Fault f;
  if (!hit("error", op, &f)) return 0;
  emu_fail("HCCL: error %ld of %s was asked for", f.code, op);
  return (int)f.code;
}

/* After an operation: flip one bit of one element of its result; by default the highest bit of an exponent. */
void emu_fault_after(const char *op, void *data, size_t count, size_t width) {
  Fault f;
  if (!data || !width || !hit("corrupt", op, &f) || f.element < 0 || (size_t)f.element >= count) return;
  long bit = f.bit >= 0 ? f.bit : (long)width * 8 - 2;
  if (bit < (long)width * 8) ((unsigned char *)data)[(size_t)f.element * width + (size_t)bit / 8] ^= (unsigned char)(1 << bit % 8);
}

/* Whether the device cannot be had yet: the first attempts of this process fail. */
int emu_fault_busy(void) {
  int result = 0;
  if (!fault_count) return 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < fault_count; i++)
    if (!strcmp(kinds[faults[i].kind], "busy") && faults[i].attempts > 0) faults[i].attempts--, result = 1;
  pthread_mutex_unlock(&lock);
  return result;
}
