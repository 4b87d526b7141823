/* Heaps of records by rank.
 *
 * Called through ctypes. Addresses are not checked: Python allocates the columns, zeroed, passes their lengths, and
 * keeps them alive.
 */
#include <stddef.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))
#define ARITY 4 /* half the levels of a binary heap, and siblings share a cache line */

typedef struct {
    uint32_t *records;     /* in heap order; `room` of them */
    uint32_t *positions;   /* by record: place in the heap + 1, 0 = not in the heap */
    uint64_t *secondaries; /* by record */
    double *primaries;     /* by record; NULL while all are 0 */
    uint64_t count, room, num_records;
} Heap;

static int precedes(const Heap *heap, uint32_t a, uint32_t b) {
    if (heap->primaries && heap->primaries[a] != heap->primaries[b]) return heap->primaries[a] < heap->primaries[b];
    return heap->secondaries[a] < heap->secondaries[b];
}

static void seat(Heap *heap, uint64_t at, uint32_t record) {
    heap->records[at] = record;
    heap->positions[record] = (uint32_t)at + 1;
}

static uint64_t rise(Heap *heap, uint64_t at, uint32_t record) {
    while (at) {
        uint64_t above = (at - 1) / ARITY;
        if (!precedes(heap, record, heap->records[above])) break;
        seat(heap, at, heap->records[above]);
        at = above;
    }
    return at;
}

static uint64_t least_below(const Heap *heap, uint64_t at) {
    uint64_t first = at * ARITY + 1, least = first;
    for (uint64_t each = first + 1; each < first + ARITY && each < heap->count; each++)
        if (precedes(heap, heap->records[each], heap->records[least])) least = each;
    return least;
}

static uint64_t sink(Heap *heap, uint64_t at, uint32_t record) {
    while (at * ARITY + 1 < heap->count) {
        uint64_t below = least_below(heap, at);
        if (!precedes(heap, heap->records[below], record)) break;
        seat(heap, at, heap->records[below]);
        at = below;
    }
    return at;
}

static void settle(Heap *heap, uint64_t at, uint32_t record) {
    seat(heap, sink(heap, rise(heap, at, record), record), record);
}

/* Sets the rank of a record. Returns 0 if columns must be allocated or grown first. */
PUBLIC int32_t heap_rank(Heap *heap, uint32_t record, double primary, uint64_t secondary) {
    if (record >= heap->num_records || (primary != 0 && !heap->primaries)) return 0;
    if (heap->primaries) heap->primaries[record] = primary;
    heap->secondaries[record] = secondary;
    if (heap->positions[record]) settle(heap, heap->positions[record] - 1, record);
    return 1;
}

/* Gives the records, whose columns exist, the ranks (0, secondary), (0, secondary + 1), … in order. */
PUBLIC void heap_rank_all(Heap *heap, const int64_t *records, int64_t count, uint64_t secondary) {
    for (int64_t i = 0; i < count; i++) heap_rank(heap, (uint32_t)records[i], 0, secondary + (uint64_t)i);
}

/* Adds a record. Returns 0 if `records` must grow first; -1 if the record has no rank. */
PUBLIC int32_t heap_offer(Heap *heap, uint32_t record) {
    if (record >= heap->num_records) return -1;
    if (heap->positions[record]) return 1;
    if (heap->count == heap->room) return 0;
    settle(heap, heap->count++, record);
    return 1;
}

PUBLIC void heap_discard(Heap *heap, uint32_t record) {
    if (record >= heap->num_records || !heap->positions[record]) return;
    uint64_t at = heap->positions[record] - 1;
    heap->positions[record] = 0;
    uint32_t last = heap->records[--heap->count];
    if (last != record) settle(heap, at, last);
}
