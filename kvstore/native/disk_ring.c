/* An io_uring for one thread: starts vectored reads and writes of whole pages, and collects what has ended.
 *
 * Called through ctypes. Addresses are not checked: Python keeps the memory of an operation alive until it has ended, and
 * uses a slot for one operation at a time.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, MAX_VECTORS = 1024 /* IOV_MAX of Linux */ };

typedef struct {
    int fd;
    uint32_t sq_mask, *sq_tail, *sq_array;
    uint32_t cq_mask, *cq_head, *cq_tail;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *ended;
    void *queues;
    size_t queues_bytes, entries_bytes;
    uint32_t num_prepared; /* operations that the kernel has not accepted yet */
    struct iovec (*vectors)[MAX_VECTORS]; /* by slot: the kernel may read them later than they are submitted */
} Ring;

PUBLIC void ring_close(Ring *ring) {
    if (ring->queues) munmap(ring->queues, ring->queues_bytes);
    if (ring->entries) munmap(ring->entries, ring->entries_bytes);
    if (ring->fd >= 0) close(ring->fd);
    free(ring->vectors);
    free(ring);
}

static void *map_part(const Ring *ring, size_t nbytes, off_t part) {
    void *mapped = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, part);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static int fill(Ring *ring, uint32_t num_slots) {
    struct io_uring_params at = {0};
    ring->fd = (int)syscall(SYS_io_uring_setup, num_slots, &at);
    if (ring->fd < 0) return errno;
    if (!(at.features & IORING_FEAT_SINGLE_MMAP)) return ENOSYS; /* before Linux 5.4 */
    size_t sq_bytes = at.sq_off.array + at.sq_entries * sizeof(uint32_t);
    size_t cq_bytes = at.cq_off.cqes + at.cq_entries * sizeof *ring->ended;
    ring->queues_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->entries_bytes = at.sq_entries * sizeof *ring->entries;
    ring->vectors = calloc(num_slots, sizeof *ring->vectors);
    ring->queues = map_part(ring, ring->queues_bytes, IORING_OFF_SQ_RING);
    ring->entries = map_part(ring, ring->entries_bytes, IORING_OFF_SQES);
    if (!ring->vectors || !ring->queues || !ring->entries) return ENOMEM;
    char *queues = ring->queues;
    ring->sq_mask = at.sq_entries - 1, ring->cq_mask = at.cq_entries - 1;
    ring->sq_tail = (uint32_t *)(queues + at.sq_off.tail);
    ring->sq_array = (uint32_t *)(queues + at.sq_off.array);
    ring->cq_head = (uint32_t *)(queues + at.cq_off.head);
    ring->cq_tail = (uint32_t *)(queues + at.cq_off.tail);
    ring->ended = (struct io_uring_cqe *)(queues + at.cq_off.cqes);
    return 0;
}

/* Opens a ring with slots 0 … num_slots - 1. Returns 0, or the error number if the system has no io_uring for it. */
PUBLIC int32_t ring_open(uint32_t num_slots, Ring **opened) {
    Ring *ring = calloc(1, sizeof *ring);
    if (!ring) return ENOMEM;
    int error = fill(ring, num_slots);
    if (error)
        ring_close(ring);
    else
        *opened = ring;
    return error;
}

/* Returns the descriptor, which polls as readable while operations that have ended are not collected. */
PUBLIC int32_t ring_fd(const Ring *ring) {
    return ring->fd;
}

/* Hands prepared operations to the kernel. Returns 0, or the error number if it accepts none or not all for now. */
PUBLIC int32_t ring_submit(Ring *ring) {
    while (ring->num_prepared) {
        long accepted = syscall(SYS_io_uring_enter, ring->fd, ring->num_prepared, 0, 0, NULL, 0);
        if (accepted < 0 && errno == EINTR) continue;
        if (accepted <= 0) return accepted ? errno : EAGAIN;
        ring->num_prepared -= (uint32_t)accepted;
    }
    return 0;
}

/* Prepares an operation in a free slot. `vectors`: pairs of address and length; `in_thread`: started by a kernel thread,
 * not by `ring_submit`. */
PUBLIC void ring_prepare(Ring *ring, int32_t slot, int32_t writes, int32_t fd, int32_t page, const void *vectors,
                         int32_t num_vectors, int32_t in_thread) {
    memcpy(ring->vectors[slot], vectors, (size_t)num_vectors * sizeof(struct iovec));
    uint32_t tail = *ring->sq_tail, index = tail & ring->sq_mask;
    ring->entries[index] = (struct io_uring_sqe){
        .opcode = writes ? IORING_OP_WRITEV : IORING_OP_READV,
        .flags = in_thread ? IOSQE_ASYNC : 0,
        .fd = fd,
        .off = (uint64_t)(uint32_t)page * PAGE,
        .addr = (uint64_t)(uintptr_t)ring->vectors[slot],
        .len = (uint32_t)num_vectors,
        .user_data = (uint32_t)slot,
    };
    ring->sq_array[index] = index;
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    ring->num_prepared++;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Collects what has ended as pairs of slot and result: bytes, or a negative error number. If that is nothing, tries again
 * for `spin_ns`. Returns how many, at most one per slot. */
PUBLIC int32_t ring_collect(Ring *ring, int32_t *ended, int32_t spin_ns) {
    uint32_t head = *ring->cq_head, tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    int64_t until = head == tail && spin_ns ? now_ns() + spin_ns : 0;
    int32_t count = 0;
    while (head == tail && until && now_ns() < until) tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    for (; head != tail; head++, count++) {
        const struct io_uring_cqe *entry = &ring->ended[head & ring->cq_mask];
        ended[2 * count] = (int32_t)entry->user_data;
        ended[2 * count + 1] = entry->res;
    }
    __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
    return count;
}

#else /* compiled on a system that knows no io_uring: threads access the disk */

PUBLIC int32_t ring_open(uint32_t num_slots, void **opened) {
    (void)num_slots, (void)opened;
    return ENOSYS;
}

#endif
