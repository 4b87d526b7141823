/* The requests of a pool: found by handle, and those that may be evicted in the order in which they go.
 *
 * Records are dense and stay where they are; the index over them is open addressing with linear probing and 8 bytes per
 * slot. Of evictable requests each class has a heap; both lie in one array, one from each end. twin.py has a dict.
 */
#define NONE UINT32_MAX
#define ARITY 4 /* half the levels of a binary heap, and siblings share a cache line */

typedef struct {
    uint64_t handle;
    uint64_t rank;        /* the least is evicted first */
    uint32_t first, last; /* blocks; `first` of an unused record is the next unused one */
    uint32_t num_blocks, promised, num_runs;
    uint32_t place; /* in its heap + 1, 0 = not evictable */
    uint32_t uses;
    uint16_t pins;
    uint8_t priority, idle;
} Record;

typedef struct {
    uint32_t record; /* + 1, 0 = empty */
    uint32_t tag;    /* of its handle; also tells its home */
} Slot;

typedef struct {
    Record *records;
    Slot *slots;
    uint32_t *heap;
    uint64_t num_slots, seed;
    uint32_t num_used, max_requests; /* records that ever were in use */
    uint32_t unused;                 /* one of them that is not any more, or NONE */
    uint32_t count, num_evictable[2];
} Requests;

/* Two thirds full at most: then a search for who is there looks at 2 slots on average (Knuth, vol. 3, 6.4). */
static uint64_t num_slots_for(uint64_t max_requests) { return max_requests + max_requests / 2 + 8; }

/* The finalizer of MurmurHash3: handles that differ anywhere differ in all bits. */
static uint32_t tag_of(const Requests *all, uint64_t handle) {
    handle ^= all->seed;
    handle = (handle ^ handle >> 33) * 0xFF51AFD7ED558CCDull;
    handle = (handle ^ handle >> 33) * 0xC4CEB9FE1A85EC53ull;
    return (uint32_t)((handle ^ handle >> 33) >> 32);
}

static uint64_t home_of(const Requests *all, uint32_t tag) { return (uint64_t)tag * all->num_slots >> 32; }

static uint64_t after(const Requests *all, uint64_t at) { return at + 1 == all->num_slots ? 0 : at + 1; }

/* The slot of `handle`, or the empty one where it belongs. */
static uint64_t slot_of(const Requests *all, uint64_t handle) {
    uint32_t tag = tag_of(all, handle);
    uint64_t at = home_of(all, tag);
    for (Slot slot; (slot = all->slots[at]).record; at = after(all, at))
        if (slot.tag == tag && all->records[slot.record - 1].handle == handle) break;
    return at;
}

static Record *find(const Requests *all, uint64_t handle) {
    uint32_t record = all->slots[slot_of(all, handle)].record;
    return record ? &all->records[record - 1] : NULL;
}

/* A record for `handle`, which has none, without blocks. There is room. */
static Record *add(Requests *all, uint64_t handle) {
    uint32_t number = all->unused;
    if (number == NONE)
        number = all->num_used++;
    else
        all->unused = all->records[number].first;
    if (all->unused != NONE) __builtin_prefetch(&all->records[all->unused], 1); /* for whoever comes next */
    all->slots[slot_of(all, handle)] = (Slot){number + 1, tag_of(all, handle)};
    all->count++;
    Record *record = &all->records[number];
    *record = (Record){.handle = handle, .first = NONE, .last = NONE, .uses = 1};
    return record;
}

/* Entries behind the hole move up unless that is before their home, so that no search ends too early. */
static void close_gap(Requests *all, uint64_t hole) {
    for (uint64_t at = after(all, hole); all->slots[at].record; at = after(all, at)) {
        uint64_t home = home_of(all, all->slots[at].tag);
        int stays = hole < at ? hole < home && home <= at : hole < home || home <= at;
        if (stays) continue;
        all->slots[hole] = all->slots[at];
        hole = at;
    }
    all->slots[hole] = (Slot){0, 0};
}

static void drop(Requests *all, Record *record) {
    close_gap(all, slot_of(all, record->handle));
    record->first = all->unused;
    all->unused = (uint32_t)(record - all->records);
    all->count--;
}

/* -- heaps */

static uint32_t *seat(const Requests *all, int high, uint32_t at) {
    return &all->heap[high ? all->max_requests - 1 - at : at];
}

static uint64_t rank_at(const Requests *all, int high, uint32_t at) {
    return all->records[*seat(all, high, at)].rank;
}

static void sit(Requests *all, int high, uint32_t at, uint32_t record) {
    *seat(all, high, at) = record;
    all->records[record].place = at + 1;
}

/* Seats `record` at `at` or wherever its rank belongs from there. */
static void settle(Requests *all, int high, uint32_t at, uint32_t record) {
    uint64_t rank = all->records[record].rank;
    uint32_t count = all->num_evictable[high];
    for (uint32_t above; at && rank < rank_at(all, high, above = (at - 1) / ARITY); at = above)
        sit(all, high, at, *seat(all, high, above));
    for (;;) {
        uint64_t first = (uint64_t)at * ARITY + 1;
        if (first >= count) break;
        uint32_t least = (uint32_t)first;
        for (uint64_t each = first + 1; each < first + ARITY && each < count; each++)
            if (rank_at(all, high, (uint32_t)each) < rank_at(all, high, least)) least = (uint32_t)each;
        if (rank <= rank_at(all, high, least)) break;
        sit(all, high, at, *seat(all, high, least));
        at = least;
    }
    sit(all, high, at, record);
}

static void heap_add(Requests *all, Record *record) {
    int high = record->priority > 0;
    uint32_t at = all->num_evictable[high]++;
    settle(all, high, at, (uint32_t)(record - all->records));
}

static void heap_remove(Requests *all, Record *record) {
    int high = record->priority > 0;
    uint32_t at = record->place - 1, end = --all->num_evictable[high], last = *seat(all, high, end);
    record->place = 0;
    if (at != end) settle(all, high, at, last);
}
