/* io_uring by its system calls: open, submit, reap. Knows nothing of what is read or written.
 *
 * Its rule: one thread uses a ring, and has at most as many operations under way as it was opened for, so that neither
 * queue runs over. Layout and order of accesses: io_uring(7), io_uring_setup(2), io_uring_enter(2). */

#include <errno.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* `RingState` of uring.py. */
struct ring {
    int64_t fd;
    uint8_t *queues; /* both, in one mapping */
    uint64_t queues_bytes;
    struct io_uring_sqe *entries;
    uint64_t entries_bytes;
    uint32_t *submit_head, *submit_tail, *submit_mask, *submit_array;
    uint32_t *done_head, *done_tail, *done_mask;
    struct io_uring_cqe *done;
};

/* `OPERATION` of uring.py. */
struct operation {
    uint64_t vector;
    uint64_t offset;
    uint64_t id;
    int32_t fd;
    uint32_t num_buffers;
    uint32_t opcode;
    uint32_t flags;
};

/* `OUTCOME` of uring.py. */
struct outcome {
    uint64_t id;
    int64_t result;
};

EXPORT void ring_close(struct ring *ring)
{
    if (ring->entries)
        munmap(ring->entries, ring->entries_bytes);
    if (ring->queues)
        munmap(ring->queues, ring->queues_bytes);
    close((int)ring->fd);
}

static int64_t mapped(struct ring *ring, const struct io_uring_params *params)
{
    const struct io_sqring_offsets *sq = &params->sq_off;
    const struct io_cqring_offsets *cq = &params->cq_off;
    uint64_t sq_bytes = sq->array + params->sq_entries * sizeof(uint32_t);
    uint64_t cq_bytes = cq->cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE, fd = (int)ring->fd;
    ring->queues_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->entries_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    void *queues = mmap(0, ring->queues_bytes, protection, flags, fd, IORING_OFF_SQ_RING);
    if (queues == MAP_FAILED)
        return -errno;
    ring->queues = queues;
    void *entries = mmap(0, ring->entries_bytes, protection, flags, fd, IORING_OFF_SQES);
    if (entries == MAP_FAILED)
        return -errno;
    ring->entries = entries;
    ring->submit_head = (uint32_t *)(ring->queues + sq->head);
    ring->submit_tail = (uint32_t *)(ring->queues + sq->tail);
    ring->submit_mask = (uint32_t *)(ring->queues + sq->ring_mask);
    ring->submit_array = (uint32_t *)(ring->queues + sq->array);
    ring->done_head = (uint32_t *)(ring->queues + cq->head);
    ring->done_tail = (uint32_t *)(ring->queues + cq->tail);
    ring->done_mask = (uint32_t *)(ring->queues + cq->ring_mask);
    ring->done = (struct io_uring_cqe *)(ring->queues + cq->cqes);
    return 0;
}

/* 0, or an errno below it; then there is nothing to close. */
EXPORT int64_t ring_open(struct ring *ring, uint32_t num_entries)
{
    struct io_uring_params params;
    memset(&params, 0, sizeof params);
    memset(ring, 0, sizeof *ring);
    ring->fd = syscall(__NR_io_uring_setup, num_entries, &params);
    if (ring->fd < 0)
        return -errno;
    /* Since Linux 5.4; older kernels map the queues apart. */
    int64_t error = params.features & IORING_FEAT_SINGLE_MMAP ? mapped(ring, &params) : -ENOSYS;
    if (error)
        ring_close(ring);
    return error;
}

/* How many of `operations` were begun, from the first. The others were not, and will not be. */
EXPORT int64_t ring_submit(struct ring *ring, const struct operation *operations, uint32_t count)
{
    uint32_t begin = *ring->submit_tail, mask = *ring->submit_mask, end = begin + count;
    for (uint32_t number = 0; number < count; number++) {
        const struct operation *wanted = operations + number;
        uint32_t index = (begin + number) & mask;
        struct io_uring_sqe *entry = ring->entries + index;
        memset(entry, 0, sizeof *entry);
        entry->opcode = (uint8_t)wanted->opcode;
        entry->flags = (uint8_t)wanted->flags;
        entry->fd = wanted->fd;
        entry->addr = wanted->vector;
        entry->len = wanted->num_buffers;
        entry->off = wanted->offset;
        entry->user_data = wanted->id;
        ring->submit_array[index] = index;
    }
    __atomic_store_n(ring->submit_tail, end, __ATOMIC_RELEASE);
    uint32_t head = __atomic_load_n(ring->submit_head, __ATOMIC_ACQUIRE);
    while (head != end) {
        long begun = syscall(__NR_io_uring_enter, (int)ring->fd, end - head, 0, 0, 0, 0);
        head = __atomic_load_n(ring->submit_head, __ATOMIC_ACQUIRE);
        if (begun < 0 && errno != EINTR)
            break;
    }
    __atomic_store_n(ring->submit_tail, head, __ATOMIC_RELEASE); /* takes back what was not begun */
    return head - begin;
}

/* How many have ended, into `outcomes`; at most `room`. Does not wait. */
EXPORT int64_t ring_reap(struct ring *ring, struct outcome *outcomes, uint32_t room)
{
    uint32_t head = *ring->done_head, mask = *ring->done_mask, count = 0;
    uint32_t tail = __atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE);
    for (; head != tail && count < room; head++, count++) {
        outcomes[count].id = ring->done[head & mask].user_data;
        outcomes[count].result = ring->done[head & mask].res;
    }
    __atomic_store_n(ring->done_head, head, __ATOMIC_RELEASE);
    return count;
}
