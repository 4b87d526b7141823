/* Who holds what, who may take how much, and what goes when there is not enough. Under the lock throughout. */
enum { BUSY = -1, FULL = -2, UNKNOWN = -3, AGAIN = -4, WRONG = -5 }; /* answers below 0 */
enum { EXISTING = 1, AHEAD = 2, WAITS_NOT = 4 };                     /* how to allocate */
enum { LRU, LFU, FIFO };
#define SCATTERED (1ll << 32)  /* with the first block: the others are not all behind it */
#define MILLION 1000000ull
#define LFU_SHIFT 40           /* uses above, the moment below: about 10^12 moments, 16 million uses */
#define MOST_USES 0xFFFFFFu

typedef struct {
    uint64_t num_blocks, max_blocks, max_requests, reserved_ppm, policy, seed, prefault;
} Setting;

/* What is told of a pool, in this order. */
typedef struct {
    uint64_t end, retired, free, held[2], promised[2], requests, runs, evictable[2], evictable_blocks[2];
    uint64_t allocations, allocated, freed, refusals, evictions, evicted_blocks, in_place, metadata_bytes;
} Stats;

typedef struct {
    pthread_mutex_t lock;
    Space space;
    Requests requests;
    uint32_t *next; /* by block: the one after it in its chain */
    Setting setting;
    uint64_t clock;
    int64_t barrier; /* who ranks below waits behind those who wait already */
    Stats stats;
    uint64_t latencies[NUM_BUCKETS];
    uint64_t mapped_bytes;
} Pages;

/* -- arithmetic of who may take how much */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t above(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

static uint64_t capacity(const Pages *pages) { return pages->stats.end - pages->space.retired.count; }

/* Blocks that a request of this class can take, if so many of each class were given back before. */
static uint64_t available(const Pages *pages, int high, uint64_t normal_back, uint64_t high_back) {
    const Stats *stats = &pages->stats;
    uint64_t spare = pages->space.free.count - stats->promised[0] - stats->promised[1] + normal_back + high_back;
    if (high) return spare;
    uint64_t reserved = capacity(pages) * pages->setting.reserved_ppm / MILLION;
    uint64_t used = stats->held[0] + stats->promised[0] - normal_back;
    return least(spare, above(capacity(pages) - reserved, used));
}

/* -- what happens to a request's record */

static int is_high(const Record *record) { return record->priority > 0; }

static void count_evictable(Pages *pages, const Record *record, int sign) {
    uint64_t size = (uint64_t)record->num_blocks + record->promised;
    pages->stats.evictable_blocks[is_high(record)] += (uint64_t)sign * size;
}

/* Into the heap or out of it, as its state says. */
static void line_up(Pages *pages, Record *record) {
    int evictable = record->idle && !record->pins;
    if (evictable == (record->place != 0)) return;
    count_evictable(pages, record, evictable ? 1 : -1);
    if (evictable)
        heap_add(&pages->requests, record);
    else
        heap_remove(&pages->requests, record);
}

static void rest(Pages *pages, Record *record) {
    if (record->idle) return;
    uint64_t now = ++pages->clock;
    if (pages->setting.policy == LRU) record->rank = now;
    if (pages->setting.policy == LFU) record->rank = (uint64_t)record->uses << LFU_SHIFT | now;
    record->idle = 1;
    line_up(pages, record);
}

static void wake(Pages *pages, Record *record) {
    if (!record->idle) return;
    record->idle = 0;
    if (record->uses < MOST_USES) record->uses++;
    line_up(pages, record);
}

/* Out of line while something happens to it, and into its old place again. */
static int step_out(Pages *pages, Record *record) {
    int was_idle = record && record->idle;
    if (was_idle) record->idle = 0, line_up(pages, record);
    return was_idle;
}

static void step_in(Pages *pages, Record *record, int was_idle) {
    if (was_idle) record->idle = 1, line_up(pages, record);
}

static Record *enter(Pages *pages, uint64_t handle, uint32_t priority) {
    Record *record = add(&pages->requests, handle);
    record->priority = (uint8_t)priority;
    if (pages->setting.policy == FIFO) record->rank = ++pages->clock;
    return record;
}

static void promise(Pages *pages, Record *record, uint32_t count) {
    pages->stats.promised[is_high(record)] += (uint64_t)count - record->promised;
    record->promised = count;
}

static void leave(Pages *pages, Record *record) {
    record->idle = 0;
    line_up(pages, record);
    promise(pages, record, 0);
    drop(&pages->requests, record);
}

static void give_back(Pages *pages, Record *record) {
    uint32_t left = record->num_blocks, at = record->first;
    while (left) {
        uint32_t first = at, length = 1;
        for (; length < left && (at = pages->next[first + length - 1]) == first + length; length++) {}
        space_give(&pages->space, first, length);
        left -= length;
    }
    pages->stats.held[is_high(record)] -= record->num_blocks;
    pages->stats.runs -= record->num_runs;
    pages->stats.freed += record->num_blocks;
    record->num_blocks = record->num_runs = 0;
}

static void append(Pages *pages, Record *record, uint32_t first, uint32_t length) {
    if (!record->num_blocks)
        record->first = first;
    else
        pages->next[record->last] = first;
    if (!record->num_blocks || first != record->last + 1) record->num_runs++, pages->stats.runs++;
    for (uint32_t i = 0; i + 1 < length; i++) pages->next[first + i] = first + i + 1;
    record->last = first + length - 1;
    record->num_blocks += length;
}

/* `count` blocks, which are there, at the end of the request; first what lies behind its last one. */
static int64_t extend(Pages *pages, Record *record, uint32_t count, uint32_t room, uint32_t *out) {
    Space *space = &pages->space;
    int64_t answer = -1;
    uint64_t left = count, place = record->num_blocks ? (uint64_t)record->last + 1 : pages->setting.max_blocks;
    uint64_t length = place < pages->setting.max_blocks ? bits_run(&space->free, place, left) : 0;
    if (length == count) pages->stats.in_place++;
    while (left) {
        if (!length) {
            place = space_find(space, left > room ? left : room);
            length = bits_run(&space->free, place, left);
        }
        space_take(space, place, length);
        append(pages, record, (uint32_t)place, (uint32_t)length);
        if (out)
            for (uint64_t i = 0; i < length; i++) *out++ = (uint32_t)(place + i);
        answer = answer < 0 ? (int64_t)place | (length < count ? SCATTERED : 0) : answer;
        left -= length;
        length = 0;
    }
    pages->stats.held[is_high(record)] += count;
    pages->stats.allocated += count;
    return answer;
}

/* -- allocation */

typedef struct {
    uint64_t handle;
    uint32_t count, priority, room, flags;
} Wish;

static int64_t refuse(Pages *pages) {
    pages->stats.refusals++;
    return FULL;
}

/* Whether those who wait already go before; who holds something goes before newcomers of its priority. */
static int must_queue(const Pages *pages, const Record *record, const Wish *wish) {
    int64_t rank = record ? record->priority * 2 + 1 : (int64_t)wish->priority * 2;
    return !(wish->flags & AHEAD) && rank < pages->barrier;
}

/* Whether there would be enough if all that may go had gone. */
static int can_make_room(const Pages *pages, int high, uint64_t need, int is_new) {
    const uint64_t *back = pages->stats.evictable_blocks;
    const Requests *all = &pages->requests;
    uint32_t evictable = all->num_evictable[0] + (high ? all->num_evictable[1] : 0);
    if (is_new && all->count == all->max_requests && !evictable) return 0;
    return available(pages, high, back[0], high ? back[1] : 0) >= need;
}

static int lacks_room(const Pages *pages, int high, uint64_t need, int is_new) {
    if (is_new && pages->requests.count == pages->requests.max_requests) return 1;
    return available(pages, high, 0, 0) < need;
}

typedef struct {
    uint64_t *handles;
    int64_t room, count;
} Evicted;

/* Evicts until there is enough; normal requests before high ones, and never for somebody of less priority. 0 when there
 * is no place to tell of another. */
static int make_room(Pages *pages, int high, uint64_t need, int is_new, Evicted *evicted) {
    Requests *all = &pages->requests;
    while (lacks_room(pages, high, need, is_new)) {
        if (evicted->count == evicted->room) return 0;
        Record *record = &all->records[*seat(all, !all->num_evictable[0], 0)];
        evicted->handles[evicted->count++] = record->handle;
        pages->stats.evictions++;
        pages->stats.evicted_blocks += record->num_blocks;
        record->idle = 0;
        line_up(pages, record);
        give_back(pages, record);
        leave(pages, record);
    }
    return 1;
}

static int64_t fulfil(Pages *pages, const Wish *wish, uint32_t *out, Evicted *evicted) {
    Record *record = find(&pages->requests, wish->handle);
    if (!record && wish->flags & EXISTING) return UNKNOWN;
    uint32_t drawn = record ? (uint32_t)least(record->promised, wish->count) : 0;
    uint64_t need = wish->count - drawn;
    int high = record ? is_high(record) : wish->priority > 0;
    if (need && must_queue(pages, record, wish)) return refuse(pages);
    int was_idle = step_out(pages, record); /* who asks is not evicted for it */
    if (lacks_room(pages, high, need, !record)) {
        int possible = evicted && can_make_room(pages, high, need, !record);
        if (!possible || !make_room(pages, high, need, !record, evicted)) {
            step_in(pages, record, was_idle);
            return possible ? AGAIN : refuse(pages);
        }
    }
    if (!record) record = enter(pages, wish->handle, wish->priority);
    if (was_idle && record->uses < MOST_USES) record->uses++;
    promise(pages, record, record->promised - drawn);
    pages->stats.allocations++;
    return extend(pages, record, wish->count, wish->room, out);
}

/* -- other changes */

/* How many blocks it held. */
static int64_t end_of(Pages *pages, uint64_t handle) {
    Record *record = find(&pages->requests, handle);
    if (!record) return UNKNOWN;
    int64_t count = record->num_blocks;
    record->idle = 0;
    line_up(pages, record);
    give_back(pages, record);
    leave(pages, record);
    return count;
}

static int64_t set_promise(Pages *pages, const Wish *wish) {
    Record *record = find(&pages->requests, wish->handle);
    if (!record && !wish->count) return 1;
    uint64_t more = above(wish->count, record ? record->promised : 0);
    int high = record ? is_high(record) : wish->priority > 0;
    if (more && (must_queue(pages, record, wish) || lacks_room(pages, high, more, !record))) return refuse(pages);
    if (!record) record = enter(pages, wish->handle, wish->priority);
    int was_idle = step_out(pages, record);
    promise(pages, record, wish->count);
    step_in(pages, record, was_idle);
    if (!record->promised && !record->num_blocks) leave(pages, record);
    return 1;
}

/* Cuts the first `count` blocks off the chain of `from`, which has so many, for `heir`, which has none. */
static void split(Pages *pages, Record *from, Record *heir, uint32_t count) {
    uint32_t at = from->first, runs = 1;
    for (uint32_t i = 1; i < count; i++) {
        uint32_t before = at;
        at = pages->next[at];
        runs += at != before + 1;
    }
    heir->first = from->first;
    heir->last = at;
    heir->num_blocks = count;
    heir->num_runs = runs;
    from->num_blocks -= count;
    from->num_runs -= runs;
    if (!from->num_blocks) return;
    from->first = pages->next[at];
    if (from->first == at + 1) from->num_runs++, pages->stats.runs++; /* one run is two now */
}

static int64_t hand_over(Pages *pages, uint64_t handle, uint64_t to, uint32_t count) {
    Record *from = find(&pages->requests, handle);
    if (!from) return UNKNOWN;
    if (!count || count > from->num_blocks || find(&pages->requests, to)) return WRONG;
    if (pages->requests.count == pages->requests.max_requests) return refuse(pages);
    Record *heir = enter(pages, to, from->priority);
    int was_idle = step_out(pages, from);
    split(pages, from, heir, count);
    step_in(pages, from, was_idle);
    if (!from->num_blocks && !from->promised) leave(pages, from);
    return 1;
}
