/* Host ports: each device's HCCL listens on one, and a second process on the same machine cannot have it.
 *
 * HCCL_IF_BASE_PORT (60000) plus the device's number, or the first free one of HCCL_HOST_SOCKET_PORT_RANGE
 * ("60000-60050", or "auto"). The ports are those of the emulated machine: two such machines on one host do not clash.
 * With ASCEND_EMULATOR_TCP_PORTS=1 a port that a program of the host listens on is taken as well.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "hccl.h"

static int held[EMU_MAX_DEVICES]; /* the port this process holds for a device */
static int holder;                /* the process that holds them; a forked child holds none */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int taken_on_host(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
  setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  int taken = bind(s, (struct sockaddr *)&address, sizeof address) != 0;
  close(s);
  return taken;
}

/* The socket stays open, and the name taken, until the process ends: children that it leaves behind keep it too. */
static int take(int port) {
  const char *machine = getenv("ASCEND_EMULATOR_MACHINE");
  if (emu_setting("ASCEND_EMULATOR_TCP_PORTS", 0) && taken_on_host(port)) return 0;
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "ascend-emulator/%.60s/%d/%d", machine ? machine : "alone",
                        hccl_node(), port);
  int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
  if (s >= 0 && !bind(s, (struct sockaddr *)&address, size)) return 1;
  close(s);
  return 0;
}

int hccl_take_port(int device) {
  int first = (int)emu_setting("HCCL_IF_BASE_PORT", 60000) + device, last = first;
  const char *range = getenv("HCCL_HOST_SOCKET_PORT_RANGE");
  if (range && !strcmp(range, "auto")) first = 1024, last = 65535;
  else if (range && *range && sscanf(range, "%d-%d", &first, &last) == 1) last = first;
  if (device < 0 || device >= EMU_MAX_DEVICES) return HCCL_PARA;
  pthread_mutex_lock(&lock);
  if (holder != getpid()) memset(held, 0, sizeof held), holder = getpid();
  for (int port = first; !held[device] && port <= last; port++)
    if (take(port)) held[device] = port;
  int have = held[device];
  pthread_mutex_unlock(&lock);
  if (have) return HCCL_OK;
  emu_fail("HCCL: the port %d%s of device %d is bound already by another process; set HCCL_IF_BASE_PORT or "
           "HCCL_HOST_SOCKET_PORT_RANGE differently for each job on a machine", first, last > first ? " and those after it" : "", device);
  return HCCL_UNAVAIL;
}
int emu_port(int device) { return device >= 0 && device < EMU_MAX_DEVICES && holder == getpid() ? held[device] : 0; }
