/* READs out of a peer's mapped memory in the caller's thread, one call each: checks, copies, counts.
 *
 * Its rule: a READ succeeded if the local segment was held during the copy, and if after the copy the peer lived and had
 * its memory registered. Any READ that fails a check is left to the caller, which checks again and raises the error.
 * Included by data_plane.c; segments.py, memfd.py and shm/transport.py make the structures, as arrays.
 */

/* A segment. Its users are counted like a window's stores: no more once it is deregistered. */
typedef struct {
    char *base;
    int64_t bytes, users;
} LocalMemory;

typedef struct {
    const char *base;
    int64_t bytes;
    const uint8_t *live; /* 1 until the owner deregisters the memory */
} MappedMemory;

typedef struct {
    int64_t max_bytes, fd, verified;
} ReadRoute;

PUBLIC int32_t segment_hold(LocalMemory *segment) {
    return window_enter(&segment->users);
}

PUBLIC void segment_release(LocalMemory *segment) {
    window_leave(&segment->users);
}

PUBLIC int32_t segment_close_if_unused(LocalMemory *segment) {
    return window_close_if_idle(&segment->users);
}

static int has_hung_up(int32_t fd) {
    struct pollfd ended = {.fd = fd, .events = POLLRDHUP};
    return poll(&ended, 1, 0) != 0;
}

/* Returns the number of bytes if each row is inside both memories and there are not too many bytes, else 0. */
static int64_t readable_bytes(const ReadRoute *route, const MappedMemory *from, const LocalMemory *to, Row *rows,
                              int64_t count) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t remote = rows[i][0], local = rows[i][1], length = rows[i][LENGTH];
        if (remote < 0 || local < 0 || length < 0 || length > route->max_bytes - bytes) return 0;
        if (length > from->bytes - remote || length > to->bytes - local) return 0;
        bytes += length;
    }
    return bytes;
}

/* Returns 1 if the rows were read and counted, -1 if a copy differs from its source, 0 if another check failed. */
PUBLIC int32_t read_inline(const ReadRoute *route, Path *path, const MappedMemory *from, LocalMemory *to, Row *rows,
                           int64_t count) {
    int64_t began_ns = now_ns(), bytes = readable_bytes(route, from, to, rows, count);
    int32_t copied = 1;
    if (!bytes || !segment_hold(to)) return 0;
    if (route->verified)
        copied = copy_rows_verified(to->base, from->base, rows, count, 1);
    else
        copy_rows(to->base, from->base, rows, count, 1);
    segment_release(to);
    /* Looked up after the copy, so that the copy is covered. */
    if (has_hung_up((int32_t)route->fd) || *(const volatile uint8_t *)from->live != 1) return 0;
    if (!copied) return -1;
    count_inline(path, bytes, now_ns() - began_ns);
    return 1;
}
