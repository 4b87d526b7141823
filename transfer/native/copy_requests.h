/* Serves the WRITE_FROM requests of one connection (transfer/tcp/frames.py): receives, checks, copies, answers.
 *
 * Its rule: bytes are stored only while the window is entered. Serves requests along one route: from one memory of the
 * initiator into one window. Any other request, and any that fails a check, is left to the caller, which checks again.
 * Included by data_plane.c; memory/data_plane.py repeats the structures.
 */

/* Flag of a window's state; the rest is the number of stores in flight. */
#define CLOSED ((int64_t)1 << 62)
#define MAX_ROWS 4096 /* of scatter.py */

PUBLIC int32_t window_enter(int64_t *state) {
    if (__atomic_add_fetch(state, 1, __ATOMIC_SEQ_CST) < CLOSED) return 1;
    __atomic_sub_fetch(state, 1, __ATOMIC_SEQ_CST);
    return 0;
}

PUBLIC void window_leave(int64_t *state) {
    __atomic_sub_fetch(state, 1, __ATOMIC_SEQ_CST);
}

/* Refuses later stores. */
PUBLIC void window_close(int64_t *state) {
    __atomic_or_fetch(state, CLOSED, __ATOMIC_SEQ_CST);
}

/* Closes a window without stores in flight. Returns 1 if it is closed now, also if it was before. */
PUBLIC int32_t window_close_if_idle(int64_t *state) {
    int64_t idle = 0;
    return __atomic_compare_exchange_n(state, &idle, CLOSED, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) || idle >= CLOSED;
}

/* Header of a frame, in the layout of frames.py on a little-endian machine. */
typedef struct {
    char magic[2];
    uint8_t kind, code;
    uint32_t entries;
    int64_t segment_id, window_id, source_id, nbytes;
    uint64_t checksum;
} Header;

typedef struct {
    Header served;               /* a request along the route, without its number of rows */
    int64_t *window;             /* its state */
    const int64_t *starts, *ends; /* the window's ranges, in order */
    int64_t num_ranges;
    char *to;
    const char *source;
    const uint8_t *live; /* 1 until the initiator deregisters the source */
    int64_t source_bytes, max_bytes;
    int32_t verified;
    Header header; /* the last request */
    int64_t rows[MAX_ROWS][COLUMNS];
} Route;

static int32_t receive_all(int32_t fd, Flow *flow, void *into, size_t count, int64_t timeout_ns, int64_t spin_ns) {
    struct iovec whole = {.iov_base = into, .iov_len = count};
    flow->into = (Queue){.vectors = &whole, .count = 1, .moved = flow->into.moved};
    flow->wanted = flow->into.moved + (int64_t)count;
    int32_t end = pump(fd, flow, timeout_ns, spin_ns);
    flow->into.vectors = NULL;
    return end;
}

static int32_t send_all(int32_t fd, Flow *flow, void *from, size_t count, int64_t timeout_ns, int64_t spin_ns) {
    struct iovec whole = {.iov_base = from, .iov_len = count};
    flow->out = (Queue){.vectors = &whole, .count = 1, .moved = flow->out.moved};
    int32_t end = pump(fd, flow, timeout_ns, spin_ns);
    flow->out.vectors = NULL;
    return end;
}

static int has_hung_up(int32_t fd) {
    struct pollfd ended = {.fd = fd, .events = POLLRDHUP};
    int events;
    do events = poll(&ended, 1, 0);
    while (events < 0 && errno == EINTR);
    return events != 0;
}

static int is_on_route(const Route *route) {
    Header header = route->header;
    uint32_t entries = header.entries;
    header.entries = 0;
    return entries > 0 && entries <= MAX_ROWS && !memcmp(&header, &route->served, sizeof header);
}

/* Returns 1 if the bytes are within one of the ranges, which are in order. */
static int is_in_ranges(const int64_t *starts, const int64_t *ends, int64_t count, int64_t start, int64_t length) {
    int64_t low = 0, high = count; /* the last range that begins at or before `start` is in [low, high) */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (starts[middle] <= start)
            low = middle;
        else
            high = middle;
    }
    return high > 0 && start >= starts[low] && start <= ends[low] && length <= ends[low] - start;
}

/* Returns 1 if each row copies from within the source into the window, and all are short enough for one step. */
static int are_allowed(const Route *route) {
    int64_t left = route->max_bytes;
    for (uint32_t i = 0; i < route->header.entries; i++) {
        const int64_t *row = route->rows[i];
        if (row[1] < 0 || row[LENGTH] < 0 || row[LENGTH] > left || row[LENGTH] > route->source_bytes - row[1]) return 0;
        if (!is_in_ranges(route->starts, route->ends, route->num_ranges, row[0], row[LENGTH])) return 0;
        left -= row[LENGTH];
    }
    return 1;
}

/* Copies the last request's rows. Returns 0 if the caller must serve it, which repeats the copy. */
static int copy_request(const Route *route) {
    int32_t copied = 1;
    if (!are_allowed(route) || !window_enter(route->window)) return 0;
    if (route->verified)
        copied = copy_rows_verified(route->to, route->source, route->rows, route->header.entries, 0);
    else
        copy_rows(route->to, route->source, route->rows, route->header.entries, 0);
    window_leave(route->window);
    return copied && *route->live == 1; /* looked up after the copy, so that the copy is covered */
}

/* Serves requests until one is left to the caller, or the connection ends. Returns IN_DONE with that request's header
   in the route, ROWS_DONE with its rows too, or how the connection ended. Waits endlessly for a request, and stall_ns
   for the rest of one. */
PUBLIC int32_t serve_copies(int32_t fd, Flow *flow, Route *route, void *reply, int64_t stall_ns, int64_t spin_ns) {
    for (;;) {
        int32_t end = receive_all(fd, flow, &route->header, sizeof route->header, INT64_MAX / 4, spin_ns);
        if (end != IN_DONE || flow->descriptor >= 0 || !is_on_route(route)) return end;
        end = receive_all(fd, flow, route->rows, route->header.entries * sizeof *route->rows, stall_ns, spin_ns);
        if (end != IN_DONE) return end;
        if (has_hung_up(fd)) return HANGUP; /* the initiator may have reused its memory */
        if (!copy_request(route)) return ROWS_DONE;
        end = send_all(fd, flow, reply, sizeof(Header), stall_ns, spin_ns);
        if (end != OUT_DONE) return end;
    }
}
