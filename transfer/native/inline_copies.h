/* Copies by mapped memory of the peer, one call each: small READs and WRITEs in the caller's thread, which are counted
 * here, and WRITEs of a lane.
 *
 * Its rule: a copy succeeded if the local segment was held meanwhile, and if after it the peer lived and had its memory
 * registered. A WRITE needs a lease (leased_writes.h). Any copy that fails a check is left to the caller, which checks
 * again and raises the error. Included by data_plane.c; segments.py, memfd.py and shm/session.py make the structures, as
 * arrays.
 */

/* A segment. Its users are counted like a window's stores: no more once it is deregistered. */
typedef struct {
    char *base;
    int64_t bytes, users;
} LocalMemory;

typedef struct {
    char *base; /* mapped read-only without a lease */
    int64_t bytes;
    const uint8_t *live; /* 1 until the owner deregisters the memory */
} MappedMemory;

typedef struct {
    int64_t max_bytes, fd, verified;
    Lease *lease;
} InlineRoute;

PUBLIC int32_t segment_hold(LocalMemory *segment) {
    return window_enter(&segment->users);
}

PUBLIC void segment_release(LocalMemory *segment) {
    window_leave(&segment->users);
}

PUBLIC int32_t segment_close_if_unused(LocalMemory *segment) {
    return window_close_if_idle(&segment->users);
}

/* Returns the number of bytes if each row is inside both memories and there are not too many bytes, else 0. */
static int64_t allowed_bytes(const InlineRoute *route, const MappedMemory *peer, const LocalMemory *local, Row *rows,
                             int64_t count) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t remote = rows[i][0], at = rows[i][1], length = rows[i][LENGTH];
        if (remote < 0 || at < 0 || length < 0 || length > route->max_bytes - bytes) return 0;
        if (length > peer->bytes - remote || length > local->bytes - at) return 0;
        bytes += length;
    }
    return bytes;
}

static int has_hung_up(int32_t fd) {
    struct pollfd ended = {.fd = fd, .events = POLLRDHUP};
    int events;
    do events = poll(&ended, 1, 0);
    while (events < 0 && errno == EINTR);
    return events != 0;
}

/* Copies the rows, into the window or, if that is 0, out of the peer's memory. Returns 1 if they were copied and counted,
   -1 if a copy differs from its source, 0 if another check failed. `path`: NULL if the caller counts. */
PUBLIC int32_t copy_inline(const InlineRoute *route, Path *path, const MappedMemory *peer, LocalMemory *local, Row *rows,
                           int64_t count, int64_t window) {
    int64_t began_ns = now_ns(), bytes = allowed_bytes(route, peer, local, rows, count);
    int32_t copied = 1;
    if (!bytes || !segment_hold(local)) return 0;
    if (window)
        copied = write_leased(route->lease, window, peer->base, local->base, rows, count, route->verified);
    else if (!route->verified)
        copy_rows(local->base, peer->base, rows, count, 1);
    else if (!copy_rows_verified(local->base, peer->base, rows, count, 1))
        copied = -1;
    segment_release(local);
    /* Looked up after the copy, so that the copy is covered. */
    if (!copied || has_hung_up((int32_t)route->fd) || *(const volatile uint8_t *)peer->live != 1) return 0;
    if (copied > 0 && path) count_inline(path, window ? WRITE : READ, bytes, now_ns() - began_ns);
    return copied;
}
