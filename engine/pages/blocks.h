/* Sets of block numbers, and the free space of a pool: which blocks can be handed out, and where a run of them lies.
 *
 * A set is one bit per block and, above it, one bit per word that is not empty, and so on: the lowest member from a
 * place on is found in as many steps as there are levels. twin_blocks.py does the same in Python.
 */
#define LEVELS 6   /* 64^6 is above 2^32 */
#define PROBES 8   /* words looked at for a run: a bound, so that allocation stays O(1) per block */
#define WORD 64u
#define FULL_WORD (~0ull)

typedef struct {
    uint64_t *words[LEVELS]; /* by level; the highest is one word */
    uint64_t num_words[LEVELS];
    uint64_t count;
    int32_t num_levels;
} Bits;

static uint64_t bits_bytes(uint64_t size) {
    uint64_t total = 0;
    do total += (size = (size + WORD - 1) / WORD); while (size > 1);
    return total * sizeof(uint64_t);
}

/* An empty set of numbers below `size` (at least 1) in zeroed memory; gives what lies behind it. */
static uint8_t *bits_make(Bits *bits, uint64_t size, uint8_t *memory) {
    bits->num_levels = 0;
    bits->count = 0;
    do {
        size = (size + WORD - 1) / WORD;
        bits->words[bits->num_levels] = (uint64_t *)memory;
        bits->num_words[bits->num_levels++] = size;
        memory += size * sizeof(uint64_t);
    } while (size > 1);
    return memory;
}

static int bits_has(const Bits *bits, uint64_t at) { return bits->words[0][at / WORD] >> (at % WORD) & 1; }

/* The word `at` of the lowest level is no longer empty. */
static void bits_raise(Bits *bits, uint64_t at) {
    for (int32_t level = 1; level < bits->num_levels; level++, at /= WORD) {
        uint64_t *word = &bits->words[level][at / WORD], before = *word;
        *word = before | 1ull << (at % WORD);
        if (before) return;
    }
}

/* The word `at` of the lowest level is empty now. */
static void bits_lower(Bits *bits, uint64_t at) {
    for (int32_t level = 1; level < bits->num_levels; level++, at /= WORD) {
        uint64_t *word = &bits->words[level][at / WORD];
        *word &= ~(1ull << (at % WORD));
        if (*word) return;
    }
}

static void bits_add(Bits *bits, uint64_t at) {
    uint64_t *word = &bits->words[0][at / WORD], before = *word;
    *word = before | 1ull << (at % WORD);
    bits->count++;
    if (!before) bits_raise(bits, at / WORD);
}

static void bits_remove(Bits *bits, uint64_t at) {
    uint64_t *word = &bits->words[0][at / WORD];
    *word &= ~(1ull << (at % WORD));
    bits->count--;
    if (!*word) bits_lower(bits, at / WORD);
}

/* The lowest member from `at` on, or -1. */
static int64_t bits_from(const Bits *bits, uint64_t at) {
    for (int32_t level = 0; level < bits->num_levels; level++) {
        if (at / WORD >= bits->num_words[level]) return -1;
        uint64_t word = bits->words[level][at / WORD] & (FULL_WORD << (at % WORD));
        if (word) {
            at = at / WORD * WORD + (uint64_t)__builtin_ctzll(word);
            while (level--) at = at * WORD + (uint64_t)__builtin_ctzll(bits->words[level][at]);
            return (int64_t)at;
        }
        at = at / WORD + 1;
    }
    return -1;
}

/* The highest member, or -1. */
static int64_t bits_last(const Bits *bits) {
    if (!bits->count) return -1;
    uint64_t at = 0;
    for (int32_t level = bits->num_levels; level--;)
        at = at * WORD + (WORD - 1 - (uint64_t)__builtin_clzll(bits->words[level][at]));
    return (int64_t)at;
}

/* Members from `at` on without a gap, `most` at most. */
static uint64_t bits_run(const Bits *bits, uint64_t at, uint64_t most) {
    uint64_t length = 0;
    while (length < most && (at + length) / WORD < bits->num_words[0]) {
        uint64_t offset = (at + length) % WORD, gaps = ~(bits->words[0][(at + length) / WORD] >> offset);
        uint64_t here = gaps ? (uint64_t)__builtin_ctzll(gaps) : WORD;
        length += here < WORD - offset ? here : WORD - offset;
        if (here < WORD - offset) break;
    }
    return length < most ? length : most;
}

typedef struct {
    Bits free;
    Bits whole;   /* words of `free` that have all their bits: room for long runs */
    Bits retired; /* taken out of service, below the end */
    uint64_t hints[7]; /* by level: the word from which on a chunk is looked for */
} Space;

static uint64_t mask_of(uint64_t offset, uint64_t count) {
    return (count == WORD ? FULL_WORD : (1ull << count) - 1) << offset;
}

static void space_take(Space *space, uint64_t first, uint64_t count) {
    space->free.count -= count;
    while (count) {
        uint64_t at = first / WORD, offset = first % WORD, here = count < WORD - offset ? count : WORD - offset;
        uint64_t *word = &space->free.words[0][at];
        if (*word == FULL_WORD) bits_remove(&space->whole, at);
        *word &= ~mask_of(offset, here);
        if (!*word) bits_lower(&space->free, at);
        first += here;
        count -= here;
    }
}

static void space_give(Space *space, uint64_t first, uint64_t count) {
    space->free.count += count;
    while (count) {
        uint64_t at = first / WORD, offset = first % WORD, here = count < WORD - offset ? count : WORD - offset;
        uint64_t *word = &space->free.words[0][at], before = *word;
        *word = before | mask_of(offset, here);
        if (!before) bits_raise(&space->free, at);
        if (*word == FULL_WORD) bits_add(&space->whole, at);
        first += here;
        count -= here;
    }
}

static const uint64_t ALIGNED[] = {FULL_WORD, 0x5555555555555555, 0x1111111111111111, 0x0101010101010101,
                                   0x0001000100010001, 0x0000000100000001, 1};

/* The largest aligned chunk of 2^level blocks in a word (not 0), `most` at most: its level; `at` is where it begins.
 * Chunks are aligned as a buddy allocator's are: what a request leaves of its own is there for it to grow into. */
static int32_t largest_chunk(uint64_t word, int32_t most, uint64_t *at) {
    int32_t level = 0;
    while (level < most) {
        uint64_t larger = word & word >> (1u << level) & ALIGNED[level + 1];
        if (!larger) break;
        word = larger;
        level++;
    }
    *at = (uint64_t)__builtin_ctzll(word);
    return level;
}

/* Where whole words begin that hold `want` blocks, or as many as are found; -1 = there is no whole word. */
static int64_t whole_words(const Space *space, uint64_t want) {
    uint64_t needed = (want + WORD - 1) / WORD, longest = 0;
    int64_t best = -1, at = bits_from(&space->whole, 0);
    for (int32_t probe = 0; probe < PROBES && at >= 0; probe++) {
        uint64_t length = bits_run(&space->whole, (uint64_t)at, needed);
        if (length > longest) longest = length, best = at;
        if (longest == needed) break;
        at = bits_from(&space->whole, (uint64_t)at + length);
    }
    return best < 0 ? -1 : best * (int64_t)WORD;
}

/* The words with free blocks are gone through in a circle: what is left in those behind is for others to grow into. */
static int32_t next_chunk(Space *space, int32_t most, uint64_t *place) {
    int64_t at = bits_from(&space->free, space->hints[most] * WORD);
    int32_t best = -1;
    for (int32_t probe = 0; probe < PROBES && best < most; probe++) {
        if (at < 0) at = bits_from(&space->free, 0);
        uint64_t word = (uint64_t)at / WORD, offset;
        int32_t level = largest_chunk(space->free.words[0][word], most, &offset);
        if (level > best) best = level, *place = word * WORD + offset;
        at = bits_from(&space->free, (word + 1) * WORD);
        space->hints[most] = level == most ? word : at < 0 ? 0 : (uint64_t)at / WORD;
    }
    return best;
}

/* Where `want` blocks lie side by side, or as many as a bounded search finds. Something is free. */
static uint64_t space_find(Space *space, uint64_t want) {
    if (want <= 1) return (uint64_t)bits_from(&space->free, 0);
    int64_t whole = want > WORD ? whole_words(space, want) : -1;
    if (whole >= 0) return (uint64_t)whole;
    int32_t most = want >= WORD ? 6 : 32 - __builtin_clz((uint32_t)want - 1);
    uint64_t place = 0;
    if (next_chunk(space, most, &place) < most && (whole = bits_from(&space->whole, 0)) >= 0) {
        space->hints[most] = (uint64_t)whole;
        return (uint64_t)whole * WORD;
    }
    return place;
}
