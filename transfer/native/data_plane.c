/* The data plane: copies rows of bytes, and moves them over a stream socket in both directions at once, hashing them.
 *
 * Called through ctypes, so without the GIL. Addresses are not checked: the callers check bounds and keep the memory
 * alive. Allocates nothing and keeps no state except Flow. memory/data_plane.py repeats the structures and constants.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "xxh3.h"

#define MAX_IOVECS 1024 /* IOV_MAX of Linux */
/* Above a size somewhere below 1 MiB, glibc's memcpy bypasses the caches, which is a fifth slower here (LOG.md). */
#define COPY_STEP ((size_t)256 << 10)
#define VERIFY_STEP ((size_t)64 << 10) /* source and copy together fit into the L2 cache several times */
#define ROW_PREFETCH ((size_t)512)
/* Number of waits without spinning after a spin in vain: the peer may share this core, and then it cannot answer
   during a spin. Peers on two cores find each other awake after seven waits at most (LOG.md). */
#define REST 7
/* The kernel treats a receiver that also sends as interactive and delays its acknowledgements, for which a sender with
   a full buffer waits. From this many expected bytes on, the receiver acknowledges at once; a fifth faster (LOG.md). */
#define STREAM ((int64_t)64 << 10)
/* Bytes and pieces received or sent at a time while hashing: still in the cache, and few enough system calls. Received
   are at most half of the bytes that are left, so that little is left to hash after the last one (LOG.md). */
#define HASH_STEP ((int64_t)512 << 10)
#define LEAST_HASH_STEP ((int64_t)128 << 10)
#define HASH_PIECES 128
/* Up to this many last bytes of a sealed payload are hashed first, so that they leave together with their seal. */
#define LAST_STEP ((int64_t)256 << 10)
/* Length of a piece of the output whose 8 bytes are the number of bytes before it, more than SHORT_VALUE, to be replaced
   by their XXH3-64. Then its length is SEAL_BYTES. */
#define UNSEALED ((size_t)1 << 62)
#define SEAL_BYTES 8
#define PUBLIC __attribute__((visibility("default")))

enum { IN_DONE = 1, OUT_DONE, TIMEOUT, HANGUP, FAILED };
enum { LENGTH = 2, COLUMNS = 3 }; /* columns of a row: remote offset, local offset, length */

typedef int64_t unaligned_int64 __attribute__((aligned(1), may_alias)); /* rows may be in a received frame */
typedef const unaligned_int64 Row[COLUMNS];

typedef struct {
    struct iovec *vectors;
    int64_t count, index, offset; /* the first unfinished piece, and its number of finished bytes */
    int64_t moved;                /* bytes, in total */
} Queue;

/* Values whose bytes arrive next, one after another. Those too short for xxh3.h are skipped. */
typedef struct {
    const uint64_t *lengths;
    uint64_t *sums;
    int64_t count, index; /* the first value that has not arrived in full */
    Xxh3 hash;
} Hashing;

typedef struct {
    Queue out, into;
    int64_t wanted; /* the input is done when into.moved reaches it */
    int64_t active_at_ns;
    int32_t error, descriptor;
    int32_t rest; /* remaining waits without spinning */
    Hashing hashing;
    int64_t num_unsealed; /* pieces of the output with the length UNSEALED */
    Xxh3 seal;            /* of the bytes before the first of them, as far as they are hashed */
} Flow;

static void copy(char *to, const char *source, size_t length) {
    for (; length > COPY_STEP; length -= COPY_STEP, to += COPY_STEP, source += COPY_STEP)
        memcpy(to, source, COPY_STEP);
    memcpy(to, source, length);
}

/* Fetches the beginning of a row's bytes on both sides into the cache. The processor itself begins to fetch ahead only
   after a few lines of each page, and never looks up the page's address ahead: a seventh of a copy of 4 KiB (LOG.md). */
static void prefetch_row(char *to, const char *source, Row *row, int32_t to_column) {
    size_t length = (size_t)(*row)[LENGTH] < ROW_PREFETCH ? (size_t)(*row)[LENGTH] : ROW_PREFETCH;
    for (size_t at = 0; at < length; at += 64) {
        __builtin_prefetch(source + (*row)[1 - to_column] + at);
        __builtin_prefetch(to + (*row)[to_column] + at, 1);
    }
}

PUBLIC void copy_rows(char *to, const char *source, Row *rows, int64_t count, int32_t to_column) {
    for (int64_t i = 0; i < count; i++) {
        if (i + 1 < count) prefetch_row(to, source, rows + i + 1, to_column);
        copy(to + rows[i][to_column], source + rows[i][1 - to_column], (size_t)rows[i][LENGTH]);
    }
}

/* Copies rows and compares each piece with its source while both are in the nearest caches. Returns 0 at the first
   difference, else 1. Hashing both sides, or comparing larger pieces, takes at least twice as long (LOG.md). */
PUBLIC int32_t copy_rows_verified(char *to, const char *source, Row *rows, int64_t count, int32_t to_column) {
    for (int64_t i = 0; i < count; i++) {
        char *into = to + rows[i][to_column];
        const char *from = source + rows[i][1 - to_column];
        if (i + 1 < count) prefetch_row(to, source, rows + i + 1, to_column);
        for (size_t left = (size_t)rows[i][LENGTH], piece; left; left -= piece, into += piece, from += piece) {
            piece = left < VERIFY_STEP ? left : VERIFY_STEP;
            memcpy(into, from, piece);
            __asm__ volatile("" ::: "memory"); /* else the compiler elides the comparison */
            if (memcmp(into, from, piece)) return 0;
        }
    }
    return 1;
}

/* Returns 1 if each row's bytes are the same on both sides, else 0. */
PUBLIC int32_t rows_equal(const char *at, const char *source, Row *rows, int64_t count, int32_t column) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(at + rows[i][column], source + rows[i][1 - column], (size_t)rows[i][LENGTH])) return 0;
    return 1;
}

/* Joins each row with its predecessor if they are adjacent on both sides, and drops empty rows, in place. Returns the
   number of rows left and adds up their bytes; -1 if a row leaves [0, local_bytes) or [0, remote_bytes). */
PUBLIC int64_t join_rows(int64_t (*rows)[COLUMNS], int64_t count, int64_t local_bytes, int64_t remote_bytes,
                         int64_t *bytes) {
    int64_t left = 0;
    *bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t remote = rows[i][0], local = rows[i][1], length = rows[i][LENGTH];
        if (remote < 0 || local < 0 || length < 0) return -1;
        if (length > local_bytes - local || length > remote_bytes - remote) return -1;
        if (!length) continue;
        *bytes += length;
        int64_t *last = rows[left - (left > 0)];
        if (left && last[0] + last[LENGTH] == remote && last[1] + last[LENGTH] == local) {
            last[LENGTH] += length;
            continue;
        }
        int64_t *next = rows[left++];
        next[0] = remote, next[1] = local, next[LENGTH] = length;
    }
    return left;
}

/* Writes the rows to `vectors`, adjacent rows as one piece. Returns the number of pieces, at most `count`. */
PUBLIC int64_t fill_iovecs(struct iovec *vectors, char *base, Row *rows, int64_t count, int32_t column) {
    int64_t filled = 0;
    char *end = NULL; /* end of the last piece */
    for (int64_t i = 0; i < count; i++) {
        char *start = base + rows[i][column];
        size_t length = (size_t)rows[i][LENGTH];
        if (!length) continue;
        if (filled && start == end)
            vectors[filled - 1].iov_len += length;
        else
            vectors[filled++] = (struct iovec){.iov_base = start, .iov_len = length};
        end = start + length;
    }
    return filled;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Marks `count` more bytes as done, and empty pieces behind them too. */
static void advance(Queue *queue, size_t count) {
    queue->moved += (int64_t)count;
    count += (size_t)queue->offset;
    while (queue->index < queue->count && count >= queue->vectors[queue->index].iov_len)
        count -= queue->vectors[queue->index++].iov_len;
    queue->offset = queue->index < queue->count ? (int64_t)count : 0;
}

static void keep_descriptor(Flow *flow, struct msghdr *message) {
    struct cmsghdr *control = CMSG_FIRSTHDR(message);
    if (!control || control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) return;
    if (flow->descriptor >= 0) close(flow->descriptor); /* the caller did not take the one before */
    memcpy(&flow->descriptor, CMSG_DATA(control), sizeof flow->descriptor);
}

static ssize_t receive(int fd, Flow *flow, struct msghdr *message) {
    /* CMSG_LEN, not CMSG_SPACE: room for exactly one descriptor; the kernel closes any others. */
    union { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    message->msg_control = &control;
    message->msg_controllen = CMSG_LEN(sizeof(int));
    ssize_t moved = recvmsg(fd, message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (moved > 0) keep_descriptor(flow, message);
    return moved;
}

/* Does one system call. Returns the bytes moved, 0 if the peer closed its side, or -errno; -EAGAIN if idle. */
static ssize_t move_some(int fd, Flow *flow, Queue *queue) {
    struct iovec *first = queue->vectors + queue->index, whole;
    int64_t left = queue->count - queue->index;
    struct msghdr message = {.msg_iov = first, .msg_iovlen = left < MAX_IOVECS ? (size_t)left : MAX_IOVECS};
    if (!left) return -EAGAIN;
    whole = *first;
    first->iov_base = (char *)whole.iov_base + queue->offset;
    first->iov_len -= (size_t)queue->offset;
    ssize_t moved = queue == &flow->into ? receive(fd, flow, &message)
                                         : sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    int error = errno;
    *first = whole; /* the caller's array stays unchanged */
    if (moved < 0) return -error;
    advance(queue, (size_t)moved);
    return moved;
}

static void hash_bytes(Hashing *to, const uint8_t *bytes, uint64_t count) {
    for (; to->index < to->count; to->index++) {
        uint64_t length = to->lengths[to->index], some = length - to->hash.position;
        if (some > count) some = count;
        if (length > SHORT_VALUE)
            xxh3_add(&to->hash, bytes, some, length);
        else
            to->hash.position += some;
        if (to->hash.position < length) return;
        if (length > SHORT_VALUE) to->sums[to->index] = xxh3_end(&to->hash);
        to->hash.position = 0;
        bytes += some, count -= some;
    }
}

static int64_t smaller(int64_t one, int64_t other) {
    return one < other ? one : other;
}

/* Adds the next pieces of the queue, of at most `room` bytes in all, to the message. Returns the bytes added. */
static int64_t take_pieces(const Queue *queue, struct msghdr *message, int64_t room) {
    int64_t offset = queue->offset, taken = 0;
    for (int64_t i = queue->index; i < queue->count && taken < room && message->msg_iovlen < HASH_PIECES; i++) {
        struct iovec whole = queue->vectors[i];
        int64_t count = smaller((int64_t)whole.iov_len - offset, room - taken);
        message->msg_iov[message->msg_iovlen++] = (struct iovec){(char *)whole.iov_base + offset, (size_t)count};
        taken += count, offset = 0;
    }
    return taken;
}

/* Like move_some, for a step of the input, which it hashes. */
static ssize_t receive_and_hash(int fd, Flow *flow) {
    Queue *queue = &flow->into;
    struct iovec pieces[HASH_PIECES];
    struct msghdr message = {.msg_iov = pieces};
    int64_t half = (flow->wanted - queue->moved) / 2;
    take_pieces(queue, &message, half > LEAST_HASH_STEP ? smaller(half, HASH_STEP) : LEAST_HASH_STEP);
    ssize_t moved = receive(fd, flow, &message);
    if (moved < 0) return -errno;
    size_t left = (size_t)moved, count;
    for (struct iovec *piece = pieces; left; piece++, left -= count) {
        count = left < piece->iov_len ? left : piece->iov_len;
        hash_bytes(&flow->hashing, piece->iov_base, count);
    }
    advance(queue, (size_t)moved);
    return moved;
}

/* Hashes the next bytes of a payload of `length` bytes. The first `before` bytes of the pieces are no part of it. */
static void hash_pieces(Xxh3 *hash, const struct iovec *piece, int64_t before, int64_t count, uint64_t length) {
    for (; count > 0; piece++) {
        int64_t skipped = smaller(before, (int64_t)piece->iov_len);
        int64_t some = smaller((int64_t)piece->iov_len - skipped, count);
        xxh3_add(hash, (const uint8_t *)piece->iov_base + skipped, (uint64_t)some, length);
        before -= skipped, count -= some;
    }
}

/* Like move_some, for output with a payload and its seal. The payload is hashed in steps that the kernel has just copied:
   then they are in the cache, and the receiver already copies them. */
static ssize_t send_and_hash(int fd, Flow *flow) {
    Queue *queue = &flow->out;
    struct iovec pieces[HASH_PIECES], *seal = queue->vectors + queue->index;
    struct msghdr message = {.msg_iov = pieces};
    int64_t distance = -queue->offset; /* bytes before the seal */
    for (; seal->iov_len != UNSEALED; seal++) distance += (int64_t)seal->iov_len;
    uint64_t length = word(seal->iov_base);
    int64_t unhashed = (int64_t)(length - flow->seal.position), before = distance - unhashed;
    int sealing = unhashed <= LAST_STEP;
    int64_t room = sealing ? distance : before + smaller(unhashed - LAST_STEP, HASH_STEP);
    int64_t taken = take_pieces(queue, &message, room);
    if (sealing && taken == distance && message.msg_iovlen < HASH_PIECES) {
        hash_pieces(&flow->seal, pieces, before, unhashed, length);
        uint64_t sum = xxh3_end(&flow->seal);
        memcpy(seal->iov_base, &sum, SEAL_BYTES);
        seal->iov_len = SEAL_BYTES;
        flow->num_unsealed--;
        pieces[message.msg_iovlen++] = *seal;
        before = INT64_MAX; /* all is hashed */
    }
    ssize_t moved = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (moved < 0) return -errno;
    advance(queue, (size_t)moved);
    hash_pieces(&flow->seal, pieces, before, moved - before, length);
    return moved;
}

static int wants_input(const Flow *flow) {
    return flow->into.moved < flow->wanted && flow->into.index < flow->into.count;
}

static int is_open(ssize_t result) {
    return result > 0 || result == -EAGAIN || result == -EINTR;
}

static int ended(Flow *flow, ssize_t result) {
    if (result == 0 || result == -EPIPE || result == -ECONNRESET) return HANGUP;
    flow->error = (int32_t)-result;
    return FAILED;
}

/* Sleeps until the socket is ready for one of `events`, or for at most timeout_ns. Returns true if it is ready. */
static int wait_ready(int fd, int events, int64_t timeout_ns) {
    struct pollfd watched = {.fd = fd, .events = (short)events};
    struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    /* A failure counts as ready and shows in the next system call on the socket. */
    return ppoll(&watched, 1, &timeout, NULL) != 0;
}

static int alone_on_one_core(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == 1;
}

/* Polls the socket repeatedly until it is ready, but not beyond until_ns. Returns true if it is ready. Polls instead
   of trying to send: the buffer counts as writable when a third is free, while each try would send the few bytes that
   fit. Yields the processor only if the process has a single core: among busy neighbours, a thread that yields gets
   the core back milliseconds later. */
static int spin_until(int fd, int events, int64_t until_ns) {
    int yields = alone_on_one_core();
    do {
        if (yields) sched_yield();
        if (wait_ready(fd, events, 0)) return 1;
    } while (now_ns() < until_ns);
    return 0;
}

/* The kernel resets the option at the next send, so it is set again before each long wait for input. */
static void acknowledge_at_once(int fd) {
    int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &yes, sizeof yes); /* a Unix socket has nothing to acknowledge */
}

PUBLIC int32_t pump(int32_t fd, Flow *flow, int64_t timeout_ns, int64_t spin_ns) {
    int64_t deadline_ns = now_ns() + timeout_ns;
    int receiving, broken = 0; /* a broken pipe may still have input */
    advance(&flow->out, 0);
    advance(&flow->into, 0);
    receiving = wants_input(flow);
    if (receiving && flow->wanted - flow->into.moved >= STREAM) acknowledge_at_once(fd);
    for (;;) {
        int hashing = flow->hashing.index < flow->hashing.count;
        ssize_t received = !receiving ? -EAGAIN
                           : hashing  ? receive_and_hash(fd, flow)
                                      : move_some(fd, flow, &flow->into);
        int sealing = flow->num_unsealed > 0;
        ssize_t sent = broken    ? -EAGAIN
                       : sealing ? send_and_hash(fd, flow)
                                 : move_some(fd, flow, &flow->out);
        int64_t now = now_ns();
        if (received > 0 || sent > 0) flow->active_at_ns = now;
        if (receiving && !wants_input(flow)) return IN_DONE;
        if (!is_open(received)) return ended(flow, received);
        if (!is_open(sent)) {
            if (!receiving || sent != -EPIPE) return ended(flow, sent);
            broken = 1;
            continue;
        }
        int sending = !broken && flow->out.index < flow->out.count;
        if (!receiving && !sending) return OUT_DONE;
        if (now >= deadline_ns) return TIMEOUT;
        if (received > 0 || sent > 0) continue;
        int events = (receiving ? POLLIN : 0) | (sending ? POLLOUT : 0);
        int64_t until_ns = flow->active_at_ns + spin_ns;
        if (until_ns > deadline_ns) until_ns = deadline_ns;
        if (now < until_ns && !flow->rest) {
            if (!spin_until(fd, events, until_ns)) flow->rest = REST;
            continue;
        }
        if (flow->rest) flow->rest--;
        wait_ready(fd, events, deadline_ns - now);
    }
}

#include "windows.h"
#include "leased_writes.h"
#include "traffic.h"
#include "inline_copies.h"
#include "frames.h"
