/* Answers the gets of one inline connection (kvstore/client/node_access/inline_protocol.py) until another kind of
 * request arrives.
 *
 * Called through ctypes, so without the GIL: a get does not wait for Python code. Addresses are not checked: Python
 * checks all bounds and keeps the memory alive. Knows no index: `locate` is `reader_locate` of published_index.c.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define PUBLIC __attribute__((visibility("default")))
#define KEY_BYTES 16
#define ROW_WORDS 4
#define GET 1
#define MAX_IOVECS 1024 /* IOV_MAX of Linux */
#define REST 3          /* waits without spinning after a spin in vain, as in transfer/native/data_plane.c */

/* Bytes: the peer must receive and verify the buffered bytes of an answer before it can send its next request. */
#define RECEIVED_PER_NS 8

enum { OTHER = 1, LATE, HANGUP, RETIRED };

typedef struct {
    uint8_t kind, pin;
    uint16_t tenant_bytes;
    uint32_t count, deadline_ms, zero;
    uint64_t bytes;
} Request;

typedef struct {
    uint8_t status, zeros[3];
    uint32_t count;
    uint64_t bytes;
} Answer;

typedef int64_t Locate(const void *mapping, const uint8_t *keys, const uint64_t *rooms, int64_t count, uint64_t budget,
                       uint8_t *rows, struct iovec *pieces);

typedef struct {
    Locate *locate;
    const void *mapping;
    uint8_t *request, *answer; /* each has room for a head, and for `most_keys` keys with rooms, or rows */
    struct iovec *pieces;       /* `most_keys` + 1 */
    uint64_t most_keys, most_bytes;
    int64_t most_ns, idle_ns, spin_ns;
    int64_t filled; /* received bytes of a request */
    int64_t active_at_ns; /* last activity of the peer, or the estimated time at which it has received the answer */
    int32_t rest;
} GetServer;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int is_ready(int fd, int events, int64_t timeout_ns) {
    struct pollfd watched = {.fd = fd, .events = (short)events};
    struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    return ppoll(&watched, 1, &timeout, NULL) != 0; /* a failure counts as ready and shows in the next call */
}

static int alone_on_one_core(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == 1;
}

static int spin(int fd, int64_t until_ns) {
    int yields = alone_on_one_core();
    do {
        if (yields) sched_yield();
        if (is_ready(fd, POLLIN, 0)) return 1;
    } while (now_ns() < until_ns);
    return 0;
}

/* Returns LATE after give_up_at, else 0. Shortly after the peer's last activity it spins, which saves a wake-up. */
static int wait_for_input(int fd, GetServer *server, int64_t give_up_at) {
    int64_t now = now_ns(), until_ns = server->active_at_ns + server->spin_ns;
    if (now >= give_up_at) return LATE;
    if (now < until_ns && !server->rest) {
        if (!spin(fd, until_ns < give_up_at ? until_ns : give_up_at)) server->rest = REST;
        return 0;
    }
    if (server->rest) server->rest--;
    is_ready(fd, POLLIN, give_up_at - now);
    return 0;
}

/* Returns 0 when `wanted` bytes of the request are received. */
static int fill(int fd, GetServer *server, int64_t wanted, int64_t give_up_at) {
    while (server->filled < wanted) {
        ssize_t some = recv(fd, server->request + server->filled, (size_t)(wanted - server->filled), MSG_DONTWAIT);
        if (some > 0) {
            server->filled += some;
            server->active_at_ns = now_ns();
            continue;
        }
        if (some == 0 || (errno != EAGAIN && errno != EINTR)) return HANGUP;
        int end = wait_for_input(fd, server, give_up_at);
        if (end) return end;
    }
    return 0;
}

/* Returns 0 when all pieces are sent. Modifies the pieces. */
static int send_all(int fd, struct iovec *piece, int64_t count, int64_t give_up_at) {
    while (count) {
        struct msghdr message = {.msg_iov = piece, .msg_iovlen = (size_t)(count < MAX_IOVECS ? count : MAX_IOVECS)};
        ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN && errno != EINTR) return HANGUP;
            int64_t left_ns = give_up_at - now_ns();
            if (left_ns <= 0) return LATE;
            is_ready(fd, POLLOUT, left_ns);
            continue;
        }
        for (; count && (size_t)sent >= piece->iov_len; piece++, count--) sent -= (ssize_t)piece->iov_len;
        if (!count) break;
        piece->iov_base = (char *)piece->iov_base + sent;
        piece->iov_len -= (size_t)sent;
    }
    return 0;
}

static int answer_one(int fd, GetServer *server, const Request *asked, int64_t give_up_at) {
    uint64_t count = asked->count, rows_bytes = count * ROW_WORDS * sizeof(uint64_t);
    const uint8_t *keys = server->request + sizeof *asked;
    const uint64_t *rooms = (const uint64_t *)(keys + count * KEY_BYTES);
    Answer head = {.count = (uint32_t)count, .bytes = rows_bytes};
    memcpy(server->answer, &head, sizeof head);
    int64_t pieces = server->locate(server->mapping, keys, rooms, (int64_t)count, asked->bytes,
                                  server->answer + sizeof head, server->pieces + 1);
    if (pieces < 0) return RETIRED;
    server->pieces[0] = (struct iovec){server->answer, sizeof head + rows_bytes};
    server->filled = 0;
    uint64_t sent = 0;
    for (int64_t i = 0; i <= pieces; i++) sent += server->pieces[i].iov_len;
    int end = send_all(fd, server->pieces, pieces + 1, give_up_at);
    server->active_at_ns = now_ns() + (int64_t)(sent / RECEIVED_PER_NS);
    return end;
}

/* Returns OTHER with the head of another request in `request`; RETIRED with a whole get in `request` that must be
   answered from another index; LATE or HANGUP if the connection is no longer usable. */
PUBLIC int32_t answer_gets(int32_t fd, GetServer *server) {
    for (;;) {
        Request asked;
        int end = fill(fd, server, sizeof asked, now_ns() + server->idle_ns);
        if (end) return end;
        memcpy(&asked, server->request, sizeof asked);
        if (asked.kind != GET || asked.count > server->most_keys || asked.bytes > server->most_bytes) return OTHER;
        int64_t most_ns = (int64_t)asked.deadline_ms * 1000000;
        int64_t give_up_at = now_ns() + (most_ns < server->most_ns ? most_ns : server->most_ns);
        end = fill(fd, server, (int64_t)(sizeof asked + asked.count * (KEY_BYTES + sizeof(uint64_t))), give_up_at);
        if (!end) end = answer_one(fd, server, &asked, give_up_at);
        if (end) return end;
    }
}
