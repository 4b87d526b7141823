/* Hash index of a table of keys: row numbers of 4 bytes each, by hash of the keys in the table.
 *
 * Python allocates all memory, zeroed, and checks all bounds, as for published_index.c; one thread uses it. The index
 * does not copy the keys: compared with a map that has its own keys, a lookup takes one more access, to the table, and
 * the index takes a fifth of the memory.
 */
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
#define GOLDEN 0x9E3779B97F4A7C15u
#define KEY_BYTES 16
#define AHEAD 8 /* keys prefetched before their lookup */

__extension__ typedef unsigned __int128 uint128_t;

typedef struct { uint64_t low, high; } Key;

typedef struct {
    uint32_t *places; /* row + 1; 0 = empty; at least one is always empty */
    uint64_t num_places, seed, count;
} Index;

static uint64_t fold(uint64_t a, uint64_t b) {
    uint128_t product = (uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* As in published_index.c: clients choose keys and do not know the seed. */
static uint64_t home(const Index *index, const uint8_t *at) {
    Key key;
    memcpy(&key, at, sizeof key);
    uint64_t hash = fold(fold(key.low ^ index->seed, key.high ^ index->seed * GOLDEN) ^ index->seed, GOLDEN);
    return (uint64_t)(((uint128_t)hash * index->num_places) >> 64);
}

static uint64_t next(const Index *index, uint64_t at) { return at + 1 < index->num_places ? at + 1 : 0; }

static const uint8_t *row(const uint8_t *rows, uint32_t place) { return rows + (uint64_t)(place - 1) * KEY_BYTES; }

/* Returns the row of `key`, or -1. */
static int64_t find(const Index *index, const uint8_t *rows, const uint8_t *key) {
    for (uint64_t at = home(index, key); index->places[at]; at = next(index, at))
        if (!memcmp(row(rows, index->places[at]), key, KEY_BYTES)) return (int64_t)index->places[at] - 1;
    return -1;
}

/* Prefetches places, then the rows in them. Always inline: gcc 12 drops calls of functions that only prefetch. */
static inline __attribute__((always_inline)) void fetch_ahead(const Index *index, const uint8_t *rows,
                                                              const uint8_t *keys, int64_t i, int64_t count) {
    if (i + 2 * AHEAD < count) __builtin_prefetch(&index->places[home(index, keys + (i + 2 * AHEAD) * KEY_BYTES)]);
    if (i + AHEAD >= count) return;
    uint32_t place = index->places[home(index, keys + (i + AHEAD) * KEY_BYTES)];
    if (place) __builtin_prefetch(row(rows, place));
}

/* Writes the row of each key. Returns `count`, or with `leading` the number of keys before the first absent one. */
PUBLIC int64_t slots_find(const Index *index, const uint8_t *rows, const uint8_t *keys, int64_t count,
                          int64_t *found, int32_t leading) {
    for (int64_t i = 0; i < count; i++) {
        fetch_ahead(index, rows, keys, i, count);
        found[i] = find(index, rows, keys + i * KEY_BYTES);
        if (leading && found[i] < 0) return i;
    }
    return count;
}

static void insert(Index *index, const uint8_t *rows, uint32_t place) {
    uint64_t at = home(index, row(rows, place));
    while (index->places[at]) at = next(index, at);
    index->places[at] = place;
}

/* Adds rows. Their keys must not be in the index, and the index must have room for them. */
PUBLIC void slots_insert(Index *index, const uint8_t *rows, const int64_t *slots, int64_t count) {
    for (int64_t i = 0; i < count; i++) insert(index, rows, (uint32_t)slots[i] + 1);
    index->count += (uint64_t)count;
}

/* Moves the entries behind a hole that a lookup would no longer find. */
static void close_hole(Index *index, const uint8_t *rows, uint64_t hole) {
    for (uint64_t at = next(index, hole); index->places[at]; at = next(index, at)) {
        uint64_t wanted = home(index, row(rows, index->places[at]));
        if (hole < at ? hole < wanted && wanted <= at : hole < wanted || wanted <= at) continue;
        index->places[hole] = index->places[at];
        hole = at;
    }
    index->places[hole] = 0;
}

/* Removes rows, whose keys must still be in the table. Ignores rows that are not in the index. */
PUBLIC void slots_remove(Index *index, const uint8_t *rows, const int64_t *slots, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t place = (uint32_t)slots[i] + 1;
        uint64_t at = home(index, row(rows, place));
        while (index->places[at] && index->places[at] != place) at = next(index, at);
        if (!index->places[at]) continue;
        close_hole(index, rows, at);
        index->count--;
    }
}

/* Copies the entries to an empty, larger index. Both are in hash order, so only accesses to rows are scattered. */
PUBLIC void slots_move(Index *to, const Index *from, const uint8_t *rows) {
    for (uint64_t at = 0; at < from->num_places; at++) {
        uint64_t ahead = at + 2 * AHEAD;
        if (ahead < from->num_places && from->places[ahead]) __builtin_prefetch(row(rows, from->places[ahead]));
        if (from->places[at]) insert(to, rows, from->places[at]);
    }
    to->count = from->count;
}

/* Finds the holders of a chain's leading blocks, 64 holders to a word, and each holder's run of blocks without a gap.
 *
 * Python allocates all memory and checks all bounds, as above.
 */
#define WORD_BITS 64

static void end_runs(uint64_t bits, int64_t length, int64_t *runs) {
    for (; bits; bits &= bits - 1) runs[__builtin_ctzll(bits)] = length;
}

/* Writes `held` [words][blocks], the holders of each block, and `runs` [words * 64], each holder's leading blocks. */
PUBLIC void holders_leading(const uint64_t *const *columns, int64_t num_words,
                            const int64_t *slots, int64_t num_blocks, uint64_t *held, int64_t *runs) {
    for (int64_t word = 0; word < num_words; word++) {
        const uint64_t *column = columns[word];
        uint64_t common = num_blocks ? ~(uint64_t)0 : 0;
        int64_t *own = runs + word * WORD_BITS;
        for (int64_t bit = 0; bit < WORD_BITS; bit++) own[bit] = 0;
        for (int64_t i = 0; i < num_blocks; i++) {
            uint64_t now = column[slots[i]];
            held[word * num_blocks + i] = now;
            if (common & ~now) {
                end_runs(common & ~now, i, own);
                common &= now;
            }
        }
        end_runs(common, num_blocks, own);
    }
}
