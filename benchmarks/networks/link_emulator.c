/* A switch between hosts, in user space, for kernels without sch_netem: every host is a TUN device, and its packets
 * pass a link of limited rate with a queue of limited length, a delay, and random loss.
 *
 *   wires FD...      descriptors of TUN devices; host i has the address 10.77.0.(i+1)
 *
 * Commands are lines on stdin. The answer to each is "ok", or "what?" if the line is invalid:
 *   link HOST DELAY_US LOSS_PPM BYTES_PER_S QUEUE_BYTES     for all packets from HOST; BYTES_PER_S 0 = unlimited
 *   cut FROM TO | heal FROM TO                              one direction
 *   counts HOST                                             answers "ok SENT_PACKETS LOST CUT OVERFLOWN"
 *
 * Packets of one host stay in order. The program exits at the end of stdin.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HOSTS = 16, MAX_PACKET = 65536, AT_ONCE = 64 };
static const int64_t SECOND_NS = 1000000000;
static const uint32_t FIRST_ADDRESS = 0x0a4d0001; /* 10.77.0.1 */

struct packet {
  struct packet *next;
  int64_t due_ns;
  int to;
  size_t length;
  unsigned char bytes[];
};

struct host {
  int fd;
  int64_t delay_ns, loss_ppm, bytes_per_s, queue_bytes;
  int64_t busy_until_ns;
  struct packet *first, *last;
  int is_cut[MAX_HOSTS];
  uint64_t sent, lost, cut, overflown;
};

static struct host hosts[MAX_HOSTS];
static int num_hosts;
static uint64_t luck = 0x9e3779b97f4a7c15ULL;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * SECOND_NS + t.tv_nsec;
}

/* xorshift64 (Marsaglia 2003). */
static uint64_t draw(void) {
  luck ^= luck << 13;
  luck ^= luck >> 7;
  luck ^= luck << 17;
  return luck;
}

/* Returns the destination host of a packet, or -1 if the packet is not IPv4 to one of the hosts. */
static int destination(const unsigned char *packet, size_t length) {
  uint32_t address;
  if (length < 20 || packet[0] >> 4 != 4) return -1;
  memcpy(&address, packet + 16, sizeof address);
  uint32_t index = ntohl(address) - FIRST_ADDRESS;
  return index < (uint32_t)num_hosts ? (int)index : -1;
}

/* Returns the time at which the last byte leaves the link; 0 if the queue is full. */
static int64_t departure(struct host *from, size_t length, int64_t now) {
  if (!from->bytes_per_s) return now;
  int64_t begin = from->busy_until_ns > now ? from->busy_until_ns : now;
  if ((begin - now) / 1000 * from->bytes_per_s / 1000000 > from->queue_bytes) return 0;
  from->busy_until_ns = begin + (int64_t)length * SECOND_NS / from->bytes_per_s;
  return from->busy_until_ns;
}

static void take(struct host *from, const unsigned char *bytes, size_t length, int64_t now) {
  int to = destination(bytes, length);
  if (to < 0) return;
  from->sent++;
  if (from->is_cut[to]) {
    from->cut++;
    return;
  }
  int64_t departs = departure(from, length, now);
  if (!departs) {
    from->overflown++;
    return;
  }
  if ((int64_t)(draw() % 1000000) < from->loss_ppm) {
    from->lost++;
    return;
  }
  struct packet *packet = malloc(sizeof *packet + length);
  if (!packet) abort();
  *packet = (struct packet){.next = NULL, .due_ns = departs + from->delay_ns, .to = to, .length = length};
  memcpy(packet->bytes, bytes, length);
  if (from->last) from->last->next = packet;
  else from->first = packet;
  from->last = packet;
}

static void receive(struct host *from) {
  static unsigned char buffer[MAX_PACKET];
  for (int i = 0; i < AT_ONCE; i++) {
    ssize_t length = read(from->fd, buffer, sizeof buffer);
    if (length <= 0) return;
    take(from, buffer, (size_t)length, now_ns());
  }
}

/* Delivers the packets that are due. Returns the nanoseconds until the next one is due, or -1 if there is none. */
static int64_t deliver(struct host *from) {
  while (from->first) {
    struct packet *packet = from->first;
    int64_t early_ns = packet->due_ns - now_ns();
    if (early_ns > 0) return early_ns;
    /* The link may be cut while the packet is in flight. A full device drops packets, as any device does. */
    if (from->is_cut[packet->to]) from->cut++;
    else if (write(hosts[packet->to].fd, packet->bytes, packet->length) < 0 && errno != EAGAIN) from->lost++;
    from->first = packet->next;
    if (!from->first) from->last = NULL;
    free(packet);
  }
  return -1;
}

static struct host *host_at(int index) { return index >= 0 && index < num_hosts ? &hosts[index] : NULL; }

static void obey(const char *line) {
  int a, b;
  long long delay_us, loss_ppm, rate, queue;
  struct host *host;
  if (sscanf(line, "link %d %lld %lld %lld %lld", &a, &delay_us, &loss_ppm, &rate, &queue) == 5 && (host = host_at(a))) {
    host->delay_ns = delay_us * 1000;
    host->loss_ppm = loss_ppm;
    host->bytes_per_s = rate;
    host->queue_bytes = queue;
    host->busy_until_ns = 0;
    puts("ok");
  } else if (sscanf(line, "cut %d %d", &a, &b) == 2 && host_at(a) && host_at(b)) {
    hosts[a].is_cut[b] = 1;
    puts("ok");
  } else if (sscanf(line, "heal %d %d", &a, &b) == 2 && host_at(a) && host_at(b)) {
    hosts[a].is_cut[b] = 0;
    puts("ok");
  } else if (sscanf(line, "counts %d", &a) == 1 && (host = host_at(a))) {
    printf("ok %llu %llu %llu %llu\n", (unsigned long long)host->sent, (unsigned long long)host->lost,
           (unsigned long long)host->cut, (unsigned long long)host->overflown);
  } else {
    puts("what?");
  }
  fflush(stdout);
}

/* Executes the complete lines of stdin. Returns 0 at the end of stdin, or if a line is too long. */
static int listen_to_stdin(void) {
  static char text[4096];
  static size_t length;
  ssize_t count = read(STDIN_FILENO, text + length, sizeof text - 1 - length);
  if (count <= 0) return 0;
  length += (size_t)count;
  text[length] = 0;
  for (char *end; (end = memchr(text, '\n', length)) != NULL;) {
    *end = 0;
    obey(text);
    length -= (size_t)(end + 1 - text);
    memmove(text, end + 1, length + 1);
  }
  return length < sizeof text - 1;
}

int main(int argc, char **argv) {
  struct pollfd waits[MAX_HOSTS + 1];
  num_hosts = argc - 1;
  if (num_hosts < 1 || num_hosts > MAX_HOSTS) return 2;
  prctl(PR_SET_TIMERSLACK, 1);
  for (int i = 0; i < num_hosts; i++) {
    hosts[i].fd = atoi(argv[i + 1]);
    fcntl(hosts[i].fd, F_SETFL, fcntl(hosts[i].fd, F_GETFL) | O_NONBLOCK);
    waits[i] = (struct pollfd){.fd = hosts[i].fd, .events = POLLIN};
  }
  waits[num_hosts] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
  for (;;) {
    int64_t soonest_ns = -1;
    for (int i = 0; i < num_hosts; i++) {
      int64_t wait_ns = deliver(&hosts[i]);
      if (wait_ns >= 0 && (soonest_ns < 0 || wait_ns < soonest_ns)) soonest_ns = wait_ns;
    }
    struct timespec wait = {.tv_sec = soonest_ns / SECOND_NS, .tv_nsec = soonest_ns % SECOND_NS};
    if (ppoll(waits, (nfds_t)num_hosts + 1, soonest_ns < 0 ? NULL : &wait, NULL) < 0 && errno != EINTR) return 1;
    for (int i = 0; i < num_hosts; i++)
      if (waits[i].revents & POLLIN) receive(&hosts[i]);
    if (waits[num_hosts].revents && !listen_to_stdin()) return 0;
  }
}
