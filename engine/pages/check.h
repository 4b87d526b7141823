/* What always holds of a pool; the numbers of broken rules are explained in base.py. */

/* Whether the upper levels and the count of a set say what its lowest level does. */
static int bits_agree(const Bits *bits) {
    uint64_t count = 0;
    for (uint64_t i = 0; i < bits->num_words[0]; i++) count += (uint64_t)__builtin_popcountll(bits->words[0][i]);
    for (int32_t level = 1; level < bits->num_levels; level++)
        for (uint64_t i = 0; i < bits->num_words[level - 1]; i++)
            if ((bits->words[level][i / WORD] >> (i % WORD) & 1) != (bits->words[level - 1][i] != 0)) return 0;
    return count == bits->count;
}

static int space_agrees(const Space *space, uint64_t end) {
    if (!bits_agree(&space->free) || !bits_agree(&space->whole) || !bits_agree(&space->retired)) return 0;
    for (uint64_t i = 0; i < space->free.num_words[0]; i++) {
        if ((space->free.words[0][i] == FULL_WORD) != bits_has(&space->whole, i)) return 0;
        if (space->free.words[0][i] & space->retired.words[0][i]) return 0;
    }
    return bits_last(&space->free) < (int64_t)end && bits_last(&space->retired) < (int64_t)end;
}

/* Marks the blocks of a request in `seen`; 0 when one cannot be its own, or they are not as its record says. */
static int chain_agrees(const Pages *pages, const Record *record, uint64_t *seen) {
    uint32_t at = record->first, runs = 0, before = NONE;
    for (uint32_t i = 0; i < record->num_blocks; i++, before = at, at = pages->next[at]) {
        if (at >= pages->stats.end || bits_has(&pages->space.free, at) || bits_has(&pages->space.retired, at)) return 0;
        if (seen[at / WORD] >> (at % WORD) & 1) return 0;
        seen[at / WORD] |= 1ull << (at % WORD);
        runs += i == 0 || at != before + 1;
    }
    return runs == record->num_runs && (!record->num_blocks || record->last == before);
}

static int place_agrees(const Pages *pages, const Record *record) {
    const Requests *all = &pages->requests;
    int high = is_high(record);
    if (!record->place) return !record->idle || record->pins;
    if (!record->idle || record->pins || record->place > all->num_evictable[high]) return 0;
    uint32_t at = record->place - 1;
    if (*seat(all, high, at) != (uint32_t)(record - all->records)) return 0;
    return !at || rank_at(all, high, (at - 1) / ARITY) < record->rank;
}

typedef struct {
    uint64_t held[2], promised[2], evictable_blocks[2], evictable[2], runs, count;
} Sums;

static int64_t check_record(const Pages *pages, const Record *record, uint64_t *seen, Sums *sums) {
    int high = is_high(record);
    if (find(&pages->requests, record->handle) != record) return 2;
    if (!record->num_blocks && !record->promised) return 3;
    if (!chain_agrees(pages, record, seen)) return 4;
    if (!place_agrees(pages, record)) return 5;
    sums->held[high] += record->num_blocks;
    sums->promised[high] += record->promised;
    sums->evictable[high] += record->place != 0;
    sums->evictable_blocks[high] += record->place ? (uint64_t)record->num_blocks + record->promised : 0;
    sums->runs += record->num_runs;
    sums->count++;
    return 0;
}

static int64_t check_sums(const Pages *pages, const Sums *sums) {
    const Stats *stats = &pages->stats;
    const Space *space = &pages->space;
    const Requests *all = &pages->requests;
    if (memcmp(sums->held, stats->held, sizeof sums->held)) return 6;
    if (memcmp(sums->promised, stats->promised, sizeof sums->promised)) return 6;
    if (memcmp(sums->evictable_blocks, stats->evictable_blocks, sizeof sums->evictable_blocks)) return 6;
    if (sums->runs != stats->runs || sums->count != all->count) return 6;
    if (sums->evictable[0] != all->num_evictable[0] || sums->evictable[1] != all->num_evictable[1]) return 5;
    if (space->free.count + space->retired.count + sums->held[0] + sums->held[1] != stats->end) return 7;
    if (sums->promised[0] + sums->promised[1] > space->free.count) return 8;
    uint32_t unused = 0;
    for (uint32_t at = all->unused; at != NONE && unused <= all->num_used; at = all->records[at].first) unused++;
    return unused + all->count == all->num_used ? 0 : 9;
}

static int64_t check_pages(const Pages *pages) {
    Sums sums = {{0}, {0}, {0}, {0}, 0, 0};
    const Requests *all = &pages->requests;
    if (!space_agrees(&pages->space, pages->stats.end)) return 1;
    uint64_t *seen = calloc(pages->stats.end / WORD + 1, sizeof(uint64_t));
    int64_t broken = seen ? 0 : 10;
    for (uint64_t i = 0; !broken && i < all->num_slots; i++)
        if (all->slots[i].record) broken = check_record(pages, &all->records[all->slots[i].record - 1], seen, &sums);
    free(seen);
    return broken ? broken : check_sums(pages, &sums);
}
