/* Links: who is on which node, how many bytes went where, and how long that takes.
 *
 * ASCEND_EMULATOR_LINK_MBPS and ASCEND_EMULATOR_CROSS_MBPS are megabytes per second in one direction: of each pair of
 * devices within a node, and of each pair of nodes, shared by all their ranks. 0, the default, is as fast as the host.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "hccl.h"

static _Atomic uint64_t sent[2]; /* bytes this process sent: within its node, to other nodes */

uint64_t emu_traffic(int cross) { return sent[cross != 0]; }
void emu_reset_traffic(void) { sent[0] = sent[1] = 0; }

int hccl_node(void) {
  long node = emu_setting("ASCEND_EMULATOR_NODE", 0);
  return node < 0 || node >= HCCL_MAX_NODES ? 0 : (int)node;
}

/* When the link between two nodes is free again, in nanoseconds; shared by all processes of the emulated machine. */
static _Atomic uint64_t *cross_links(void) {
  static _Atomic uint64_t *links;
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  if (!links) {
    const char *machine = getenv("ASCEND_EMULATOR_MACHINE");
    size_t bytes = sizeof *links * HCCL_MAX_NODES * HCCL_MAX_NODES;
    char path[200];
    snprintf(path, sizeof path, "/dev/shm/ascend-emulator-links-%.100s", machine ? machine : "alone");
    int file = open(path, O_RDWR | O_CREAT, 0600);
    void *base = file < 0 || ftruncate(file, (off_t)bytes) ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    links = base == MAP_FAILED ? calloc(1, bytes) : base;
  }
  pthread_mutex_unlock(&lock);
  return links;
}

/* Account for bytes from this rank to another and wait as long as the link needs for them. */
void hccl_send_over(Communicator *c, int peer, size_t bytes) {
  if (peer == c->rank || !bytes) return;
  int from = c->shared->node[c->rank], to = c->shared->node[peer], cross = from != to;
  sent[cross] += bytes;
  long speed = emu_setting(cross ? "ASCEND_EMULATOR_CROSS_MBPS" : "ASCEND_EMULATOR_LINK_MBPS", 0);
  if (speed <= 0) return;
  uint64_t now = (uint64_t)(hccl_now() * 1e9), cost = (uint64_t)((double)bytes * 1e3 / (double)speed), end = now + cost;
  if (cross) {
    _Atomic uint64_t *free_at = &cross_links()[from * HCCL_MAX_NODES + to];
    uint64_t seen = *free_at;
    do end = (seen > now ? seen : now) + cost;
    while (!atomic_compare_exchange_weak(free_at, &seen, end));
  }
  struct timespec until = {(time_t)(end / 1000000000u), (long)(end % 1000000000u)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}
