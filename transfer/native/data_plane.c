/* The data plane: copying rows of bytes, and moving them over a stream socket in both directions at once.
 *
 * Called through ctypes, so without the GIL. Takes addresses as they are: bounds are checked by the callers
 * and memory is kept alive by them. Allocates nothing and keeps no state but what is in Flow. The structures
 * and constants are repeated in __init__.py.
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

#define MAX_IOVECS 1024 /* IOV_MAX of Linux */
/* From somewhere below 1 MiB on, glibc's memcpy goes past the caches; a fifth slower here (LOG.md). */
#define COPY_STEP ((size_t)256 << 10)
#define VERIFY_STEP ((size_t)64 << 10) /* source and copy fit into the second-level cache several times */
/* Waits without spinning from one on that span for nothing: the peer may share this very core, and then it cannot
   answer while we spin. Three halve the latency of peers on one core and cost those on two nothing (LOG.md). */
#define REST 3
/* A receiver that also sends counts as a conversation for the kernel: it delays acknowledgements, and a sender whose
   buffer is full waits for them. From so many expected bytes on it is a stream; a fifth faster (LOG.md). */
#define STREAM ((int64_t)64 << 10)
#define PUBLIC __attribute__((visibility("default")))

enum { IN_DONE = 1, OUT_DONE, TIMEOUT, HANGUP, FAILED };
enum { LENGTH = 2, COLUMNS = 3 }; /* of a row: remote offset, local offset, length */

typedef int64_t unaligned_int64 __attribute__((aligned(1), may_alias)); /* rows may lie in a received frame */
typedef const unaligned_int64 Row[COLUMNS];

typedef struct {
    struct iovec *vectors;
    int64_t count, index, offset; /* the first piece that is not done, and how many of its bytes are */
    int64_t moved;                /* bytes, ever */
} Queue;

typedef struct {
    Queue out, into;
    int64_t wanted; /* into.moved from which on the input is done */
    int64_t active_at_ns;
    int32_t error, descriptor;
    int32_t rest; /* waits that are to come without spinning */
} Flow;

static void copy(char *to, const char *source, size_t length) {
    for (; length > COPY_STEP; length -= COPY_STEP, to += COPY_STEP, source += COPY_STEP)
        memcpy(to, source, COPY_STEP);
    memcpy(to, source, length);
}

PUBLIC void copy_rows(char *to, const char *source, Row *rows, int64_t count, int32_t to_column) {
    for (int64_t i = 0; i < count; i++)
        copy(to + rows[i][to_column], source + rows[i][1 - to_column], (size_t)rows[i][LENGTH]);
}

/* Compares each piece with its source while both are in the nearest caches: 0 when one of them differs, which
   ends it. Hashing both sides, or comparing larger pieces, takes twice as long and more (LOG.md). */
PUBLIC int32_t copy_rows_verified(char *to, const char *source, Row *rows, int64_t count, int32_t to_column) {
    for (int64_t i = 0; i < count; i++) {
        char *into = to + rows[i][to_column];
        const char *from = source + rows[i][1 - to_column];
        for (size_t left = (size_t)rows[i][LENGTH], piece; left; left -= piece, into += piece, from += piece) {
            piece = left < VERIFY_STEP ? left : VERIFY_STEP;
            memcpy(into, from, piece);
            __asm__ volatile("" ::: "memory"); /* or the compiler knows the answer */
            if (memcmp(into, from, piece)) return 0;
        }
    }
    return 1;
}

/* Whether each row's bytes are the same on both sides. */
PUBLIC int32_t rows_equal(const char *at, const char *source, Row *rows, int64_t count, int32_t column) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(at + rows[i][column], source + rows[i][1 - column], (size_t)rows[i][LENGTH])) return 0;
    return 1;
}

/* Writes at most `count` pieces to `vectors` and returns how many. */
PUBLIC int64_t fill_iovecs(struct iovec *vectors, char *base, Row *rows, int64_t count, int32_t column) {
    int64_t filled = 0;
    char *end = NULL; /* of the last piece */
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

/* `count` more bytes are done; whatever is empty behind them is done too. */
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
    if (flow->descriptor >= 0) close(flow->descriptor); /* nobody took it */
    memcpy(&flow->descriptor, CMSG_DATA(control), sizeof flow->descriptor);
}

static ssize_t receive(int fd, Flow *flow, struct msghdr *message) {
    /* CMSG_LEN, not CMSG_SPACE: room for exactly one descriptor, the kernel closes the others. */
    union { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    message->msg_control = &control;
    message->msg_controllen = CMSG_LEN(sizeof(int));
    ssize_t moved = recvmsg(fd, message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (moved > 0) keep_descriptor(flow, message);
    return moved;
}

/* One system call: bytes moved, 0 when the peer has ended its side, -errno; -EAGAIN when there is nothing to do. */
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
    *first = whole; /* the caller's array stays as it was */
    if (moved < 0) return -error;
    advance(queue, (size_t)moved);
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

/* Sleeps until the socket can do something that is to be done, or until then; whether it can. */
static int wait_ready(int fd, int events, int64_t timeout_ns) {
    struct pollfd watched = {.fd = fd, .events = (short)events};
    struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    /* A failure shows in the next system call on the socket. */
    return ppoll(&watched, 1, &timeout, NULL) != 0;
}

static int alone_on_one_core(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == 1;
}

/* Asks again and again whether the socket is ready, but no longer than until then. It asks poll instead of
   trying to send: the buffer counts as writable when a third is free, while each try would send the few bytes
   that fit. It keeps the processor, unless there is only one: who gives it up among busy neighbours gets it
   back milliseconds later. */
static int spin_until(int fd, int events, int64_t until_ns) {
    int yields = alone_on_one_core();
    do {
        if (yields) sched_yield();
        if (wait_ready(fd, events, 0)) return 1;
    } while (now_ns() < until_ns);
    return 0;
}

/* The kernel forgets it as soon as something is sent, so it is said before each long wait for input. */
static void acknowledge_at_once(int fd) {
    int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &yes, sizeof yes); /* a Unix socket has nothing to acknowledge */
}

PUBLIC int32_t pump(int32_t fd, Flow *flow, int64_t timeout_ns, int64_t spin_ns) {
    int64_t deadline_ns = now_ns() + timeout_ns;
    int receiving, broken = 0; /* a broken pipe may still have something for us */
    advance(&flow->out, 0);
    advance(&flow->into, 0);
    receiving = wants_input(flow);
    if (receiving && flow->wanted - flow->into.moved >= STREAM) acknowledge_at_once(fd);
    for (;;) {
        ssize_t received = receiving ? move_some(fd, flow, &flow->into) : -EAGAIN;
        ssize_t sent = broken ? -EAGAIN : move_some(fd, flow, &flow->out);
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
