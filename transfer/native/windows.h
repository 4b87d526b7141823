/* Windows (memory/write_windows.py): the number of stores in flight, which a close ends, and the ranges.
 *
 * Segments count their users in the same way (inline_copies.h). Included by data_plane.c.
 */

/* Flag of a window's state; the rest is the number of stores in flight. */
#define CLOSED ((int64_t)1 << 62)

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
