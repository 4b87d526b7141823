/* The published index of keys: metadata of millions of blocks.
 *
 * Called through ctypes. Addresses are not checked: Python allocates all memory, zeroed, checks bounds once, and keeps
 * it alive. One thread changes an index; other threads and other processes may read it meanwhile (`look` below). Layout
 * and constants are repeated in index_layout.py.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "entries are laid out for little-endian processors"
#endif

#define PUBLIC __attribute__((visibility("default")))
#define GOLDEN 0x9E3779B97F4A7C15u /* 2**64 / golden ratio, made odd: an odd factor loses nothing modulo 2**64 */
#define KEY_BYTES 16
#define MOST_LOADED_PERCENT 70 /* of the index; finding that a key is absent takes 6 slots on average (Knuth, vol. 3, 6.4) */
#define AHEAD 8 /* keys prefetched before their lookup: several times faster if the index exceeds the caches */
#define PATIENCE 1000     /* retries; a change takes microseconds, and a stopped writer must not block readers */
#define YIELD_EVERY 16    /* retries; the writer may be waiting for this core */
#define TOGETHER 16       /* copies between two lookups: the longer they take, the more objects have moved */
#define COPY_STEP ((uint64_t)256 << 10) /* as in transfer/native/data_plane.c */
#define OFFSET_UNIT 256
#define NOWHERE UINT32_MAX /* offset of an object that is not in memory */

__extension__ typedef unsigned __int128 uint128_t;
typedef struct { uint64_t low, high; } Key;

static Key key_at(const uint8_t *at) {
    Key key;
    memcpy(&key, at, sizeof key);
    return key;
}

static uint64_t fold(uint64_t a, uint64_t b) {
    uint128_t product = (uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Clients choose keys but do not know the seed. It enters both factors, so that no client can make one of them zero. */
static uint64_t hash_of(Key key, uint64_t seed) {
    return fold(fold(key.low ^ seed, key.high ^ seed * GOLDEN) ^ seed, GOLDEN);
}

static uint64_t reduce(uint64_t hash, uint64_t count) { return (uint64_t)(((uint128_t)hash * count) >> 64); }

/* ---- the index -------------------------------------------------------------------------------------------------- */

enum { LOW, HIGH, CHECKSUM, GENERATION, PLACE, EXTENT, NUM_WORDS };
/* PLACE = record | offset << 32, EXTENT = length | tag << 32, tag = 24 bits of mix | turn << 24. The turn counts moves,
   so that readers notice that an object moved away and back. GENERATION 0 = empty slot. */

typedef struct { _Atomic uint64_t words[NUM_WORDS]; } Slot;
typedef struct { uint64_t words[NUM_WORDS]; } Entry; /* a copy */

typedef struct {
    uint64_t magic;
    uint32_t format;
    _Atomic uint32_t retired;
    _Atomic uint64_t version; /* odd while entries change */
    uint64_t num_slots, seed;
    _Atomic uint64_t count;
    uint64_t num_tail, reserved;
} Header;

typedef struct {
    Header *header;
    Slot *slots;
    uint64_t num_slots, num_all, seed; /* checked by Python; later values of the header are ignored */
} Table;

typedef struct {
    Table index;
    const char *data;
    uint64_t data_bytes;
} Mapping;

#define LOAD(from) atomic_load_explicit(from, memory_order_relaxed)
#define STORE(to, value) atomic_store_explicit(to, value, memory_order_relaxed)

static uint64_t mix_of(const Entry *entry) {
    uint64_t mix = 0;
    for (int i = 0; i < NUM_WORDS; i++) {
        uint64_t word = entry->words[i];
        if (i == EXTENT) word &= ~((uint64_t)0xFFFFFF << 32);
        mix = (mix + word) * GOLDEN; /* a change of any single word changes it */
    }
    mix ^= mix >> 29;
    return mix * GOLDEN >> 40;
}

static void seal(Entry *entry) {
    entry->words[EXTENT] &= ~((uint64_t)0xFFFFFF << 32);
    entry->words[EXTENT] |= mix_of(entry) << 32;
}

static int is_sealed(const Entry *entry) { return (entry->words[EXTENT] >> 32 & 0xFFFFFF) == mix_of(entry); }

static Slot *home_of(const Table *t, Key key) { return t->slots + reduce(hash_of(key, t->seed), t->num_slots); }

/* Always inline: gcc 12 considers a function that only prefetches to have no effect and drops calls of it. */
static inline __attribute__((always_inline)) void fetch_home(const Table *table, const uint8_t *keys, int64_t i,
                                                             int64_t count) {
    if (i < count) __builtin_prefetch(home_of(table, key_at(keys + i * KEY_BYTES)));
}

/* Returns the slot of `key`; if it is absent, the empty slot where its run ends, or the end of the table. Slots behind
   the last home keep runs from wrapping around. */
static Slot *search(const Table *table, Key key) {
    Slot *slot = home_of(table, key), *end = table->slots + table->num_all;
    while (slot < end && LOAD(&slot->words[GENERATION])
           && !(LOAD(&slot->words[LOW]) == key.low && LOAD(&slot->words[HIGH]) == key.high))
        slot++;
    return slot;
}

static Slot *found(const Table *table, Key key) {
    Slot *slot = search(table, key);
    return slot < table->slots + table->num_all && LOAD(&slot->words[GENERATION]) ? slot : NULL;
}

static Entry entry_in(const Slot *slot) {
    Entry entry;
    for (int i = 0; i < NUM_WORDS; i++) entry.words[i] = LOAD((_Atomic uint64_t *)&slot->words[i]);
    return entry;
}

static void put_entry(Slot *slot, const Entry *entry) {
    for (int i = 0; i < NUM_WORDS; i++) STORE(&slot->words[i], entry->words[i]);
}

static void begin_change(Header *header) {
    STORE(&header->version, LOAD(&header->version) + 1);
    atomic_thread_fence(memory_order_release);
}

/* The last fence orders the caller's next accesses to the object's bytes after the new version for readers too. */
static void end_change(Header *header) {
    atomic_store_explicit(&header->version, LOAD(&header->version) + 1, memory_order_release);
    atomic_thread_fence(memory_order_release);
}

PUBLIC int32_t index_find(const Table *table, const uint8_t *key, Entry *entry) {
    Slot *slot = found(table, key_at(key));
    if (slot) *entry = entry_in(slot);
    return slot != NULL;
}

PUBLIC void index_records(const Table *table, const uint8_t *keys, int64_t count, int64_t *records) {
    for (int64_t i = 0; i < count; i++) {
        fetch_home(table, keys, i + AHEAD, count);
        Slot *slot = found(table, key_at(keys + i * KEY_BYTES));
        records[i] = slot ? (int64_t)(uint32_t)LOAD(&slot->words[PLACE]) : -1;
    }
}

/* Returns 1; 0 if the table must grow first; -1 if the key is present already. */
PUBLIC int32_t index_insert(const Table *table, const uint8_t *at, uint64_t checksum, uint64_t generation,
                            uint32_t record, uint32_t place, uint32_t length) {
    Header *header = table->header;
    Key key = key_at(at);
    Slot *slot = search(table, key);
    if (slot < table->slots + table->num_all && LOAD(&slot->words[GENERATION])) return -1;
    uint64_t count = LOAD(&header->count) + 1;
    if (slot == table->slots + table->num_all || count * 100 > table->num_slots * MOST_LOADED_PERCENT) return 0;
    Entry entry = {{key.low, key.high, checksum, generation, record | (uint64_t)place << 32, length}};
    seal(&entry);
    begin_change(header);
    put_entry(slot, &entry);
    STORE(&header->count, count);
    end_change(header);
    return 1;
}

PUBLIC int32_t index_relocate(const Table *table, const uint8_t *key, uint32_t place) {
    Slot *slot = found(table, key_at(key));
    if (!slot) return 0;
    Entry entry = entry_in(slot);
    entry.words[PLACE] = (uint32_t)entry.words[PLACE] | (uint64_t)place << 32;
    entry.words[EXTENT] += (uint64_t)1 << 56; /* turn + 1 */
    seal(&entry);
    begin_change(table->header);
    put_entry(slot, &entry);
    end_change(table->header);
    return 1;
}

/* Moves entries behind the hole forward, so that no run is broken and no tombstone is needed. */
static void close_hole(const Table *table, Slot *hole) {
    Slot *end = table->slots + table->num_all;
    for (Slot *next = hole + 1; next < end && LOAD(&next->words[GENERATION]); next++) {
        Entry entry = entry_in(next);
        if (home_of(table, (Key){entry.words[LOW], entry.words[HIGH]}) > hole) continue;
        put_entry(hole, &entry);
        hole = next;
    }
    put_entry(hole, &(Entry){{0}});
}

PUBLIC int32_t index_remove(const Table *table, const uint8_t *key) {
    Slot *slot = found(table, key_at(key));
    if (!slot) return 0;
    begin_change(table->header);
    close_hole(table, slot);
    STORE(&table->header->count, LOAD(&table->header->count) - 1);
    end_change(table->header);
    return 1;
}

/* Fills an empty table without readers, front to back in both tables. Returns 0 if entries would exceed its end. */
PUBLIC int32_t index_move(const Table *to, const Table *from) {
    for (Slot *slot = from->slots; slot < from->slots + from->num_all; slot++) {
        Entry entry = entry_in(slot);
        if (!entry.words[GENERATION]) continue;
        Slot *place = search(to, (Key){entry.words[LOW], entry.words[HIGH]});
        if (place == to->slots + to->num_all) return 0;
        put_entry(place, &entry);
    }
    STORE(&to->header->count, LOAD(&from->header->count));
    atomic_thread_fence(memory_order_release);
    return 1;
}

PUBLIC void index_retire(const Table *table) {
    STORE(&table->header->retired, 1);
    atomic_thread_fence(memory_order_release); /* before any change that this memory does not show */
}

/* Returns the number of entries; -1 if an entry cannot be found in its slot or is not sealed correctly. */
PUBLIC int64_t index_check(const Table *table) {
    int64_t count = 0;
    for (Slot *slot = table->slots; slot < table->slots + table->num_all; slot++) {
        Entry entry = entry_in(slot);
        if (!entry.words[GENERATION]) continue;
        if (search(table, (Key){entry.words[LOW], entry.words[HIGH]}) != slot || !is_sealed(&entry)) return -1;
        count++;
    }
    return count;
}

/* ---- reading an index that another process changes -------------------------------------------------------------- */

enum { ABSENT, FOUND, UNKNOWN, RETIRED };
enum { NOT_THERE = -1, ON_DISK = -2, TOO_SMALL = -3, CHANGED = -4, NOT_KNOWN = -5 };

/* Looks `key` up once. An entry with a correct seal is consistent, whatever changes around it. The absence of an entry
   counts only if nothing changed during the search, because entries move. */
static int look_once(const Table *table, Key key, Entry *entry) {
    uint64_t version = atomic_load_explicit(&table->header->version, memory_order_acquire);
    Slot *slot = search(table, key);
    *entry = slot < table->slots + table->num_all ? entry_in(slot) : (Entry){{0}};
    int empty = !entry->words[GENERATION];
    int whole = !empty && entry->words[LOW] == key.low && entry->words[HIGH] == key.high && is_sealed(entry);
    atomic_thread_fence(memory_order_acquire);
    if (LOAD(&table->header->retired)) return RETIRED;
    if (whole) return FOUND;
    return empty && !(version & 1) && version == LOAD(&table->header->version) ? ABSENT : UNKNOWN;
}

static int look(const Table *table, Key key, Entry *entry, int64_t *patience) {
    int status;
    while ((status = look_once(table, key, entry)) == UNKNOWN && *patience > 0)
        if (--*patience % YIELD_EVERY == 0) sched_yield();
    return status;
}

PUBLIC int32_t reader_find(const Mapping *mapping, const uint8_t *key, Entry *entry) {
    int64_t patience = PATIENCE;
    return look(&mapping->index, key_at(key), entry, &patience);
}

/* Writes the status of each key. Returns 0 if the memory is retired. */
PUBLIC int32_t reader_exists(const Mapping *mapping, const uint8_t *keys, int64_t count, uint8_t *statuses) {
    int64_t patience = PATIENCE + count;
    for (int64_t i = 0; i < count; i++) {
        Entry entry;
        fetch_home(&mapping->index, keys, i + AHEAD, count);
        statuses[i] = (uint8_t)look(&mapping->index, key_at(keys + i * KEY_BYTES), &entry, &patience);
        if (statuses[i] == RETIRED) return 0;
    }
    return 1;
}

static void copy(char *to, const char *source, uint64_t length) {
    for (; length > COPY_STEP; length -= COPY_STEP, to += COPY_STEP, source += COPY_STEP) memcpy(to, source, COPY_STEP);
    memcpy(to, source, length);
}

/* Copies an object into `pieces` pieces of memory in order. Returns its length, or why it was not copied. */
static int64_t copy_entry(const Mapping *mapping, const Entry *entry, int64_t pieces, const uint64_t *addresses,
                          const uint64_t *capacities) {
    uint64_t offset = (entry->words[PLACE] >> 32) * OFFSET_UNIT, length = (uint32_t)entry->words[EXTENT], room = 0;
    if (entry->words[PLACE] >> 32 == NOWHERE) return ON_DISK;
    for (int64_t i = 0; i < pieces; i++) room += capacities[i];
    if (length > room) return TOO_SMALL;
    if (offset > mapping->data_bytes || length > mapping->data_bytes - offset) return NOT_KNOWN;
    const char *source = mapping->data + offset;
    for (uint64_t left = length, some; left; left -= some, source += some) {
        some = left < *capacities ? left : *capacities;
        copy((char *)(uintptr_t)*addresses++, source, some);
        capacities++;
    }
    atomic_thread_fence(memory_order_acquire); /* the second look comes after the copy */
    return (int64_t)length;
}

/* Returns `length` if the object did not change or move during the copy, else why the copy is invalid. */
static int64_t second_look(const Mapping *mapping, Key key, const Entry *entry, int64_t length, int64_t *patience,
                           int *status) {
    Entry after;
    *status = look(&mapping->index, key, &after, patience);
    if (*status == UNKNOWN) return NOT_KNOWN;
    return *status == FOUND && !memcmp(&after, entry, sizeof after) ? length : CHANGED;
}

typedef struct {
    int64_t pieces; /* of each object */
    const uint64_t *addresses, *capacities;
    int64_t *lengths;
    uint64_t *checksums, *generations;
} Copies;

/* Looks up all keys, then copies: the memory latency of lookups is paid once, not before each copy. 0 if retired. */
static int copy_some(const Mapping *mapping, const uint8_t *keys, int64_t count, Copies to, int64_t *patience) {
    Entry entries[TOGETHER];
    int status;
    for (int64_t i = 0; i < count; i++) fetch_home(&mapping->index, keys, i, count);
    for (int64_t i = 0; i < count; i++) {
        status = look(&mapping->index, key_at(keys + i * KEY_BYTES), &entries[i], patience);
        if (status == RETIRED) return 0;
        if (status != FOUND) entries[i] = (Entry){{0}};
        to.lengths[i] = status == FOUND ? 0 : (status == ABSENT ? NOT_THERE : NOT_KNOWN);
        to.checksums[i] = entries[i].words[CHECKSUM];
        to.generations[i] = entries[i].words[GENERATION];
    }
    for (int64_t i = 0; i < count; i++)
        if (!to.lengths[i])
            to.lengths[i] = copy_entry(mapping, &entries[i], to.pieces, to.addresses + i * to.pieces,
                                       to.capacities + i * to.pieces);
    for (int64_t i = 0; i < count; i++) {
        if (to.lengths[i] < 0) continue;
        to.lengths[i] = second_look(mapping, key_at(keys + i * KEY_BYTES), &entries[i], to.lengths[i], patience,
                                    &status);
        if (status == RETIRED) return 0;
    }
    return 1;
}

/* Copies the objects of `keys`. Returns 0 if the memory is retired: then all results are invalid. */
PUBLIC int32_t reader_copy(const Mapping *mapping, const uint8_t *keys, int64_t count, int64_t pieces,
                           const uint64_t *addresses, const uint64_t *capacities, int64_t *lengths,
                           uint64_t *checksums, uint64_t *generations) {
    int64_t patience = PATIENCE + count;
    for (int64_t at = 0; at < count; at += TOGETHER) {
        Copies to = {pieces,       addresses + at * pieces, capacities + at * pieces,
                     lengths + at, checksums + at,          generations + at};
        int64_t some = count - at < TOGETHER ? count - at : TOGETHER;
        if (!copy_some(mapping, keys + at * KEY_BYTES, some, to, &patience)) return 0;
    }
    return 1;
}

/* Row of `reader_locate`: offset, length | standing << 32, checksum, generation. */
enum { WHERE, HOW_MUCH, SEAL, WHICH, ROW_WORDS };
enum { MISSING, SENT, IN_MEMORY, ONLY_ON_DISK, NOT_TOLD }; /* standings */

static uint64_t standing_of(const Mapping *mapping, const Entry *entry, uint64_t room, uint64_t left) {
    uint64_t offset = (entry->words[PLACE] >> 32) * OFFSET_UNIT, length = (uint32_t)entry->words[EXTENT];
    if (entry->words[PLACE] >> 32 == NOWHERE) return ONLY_ON_DISK;
    if (offset > mapping->data_bytes || length > mapping->data_bytes - offset) return NOT_TOLD;
    return length <= room && length <= left ? SENT : IN_MEMORY;
}

/* Writes a row per object, and a piece of memory per non-empty object that fits its room and, in this order, into
   `budget` bytes. Returns the number of pieces; -1 if the memory is retired. */
PUBLIC int64_t reader_locate(const Mapping *mapping, const uint8_t *keys, const uint64_t *rooms, int64_t count,
                             uint64_t budget, uint64_t (*rows)[ROW_WORDS], uint64_t (*pieces)[2]) {
    int64_t patience = PATIENCE + count, num_pieces = 0;
    for (int64_t i = 0; i < count; i++) {
        Entry entry;
        fetch_home(&mapping->index, keys, i + AHEAD, count);
        int status = look(&mapping->index, key_at(keys + i * KEY_BYTES), &entry, &patience);
        if (status == RETIRED) return -1;
        if (status != FOUND) entry = (Entry){{0}};
        uint64_t standing = status == FOUND ? standing_of(mapping, &entry, rooms[i], budget)
                                            : (status == ABSENT ? MISSING : NOT_TOLD);
        uint64_t offset = (entry.words[PLACE] >> 32) * OFFSET_UNIT, length = (uint32_t)entry.words[EXTENT];
        uint64_t row[ROW_WORDS] = {offset, length | standing << 32, entry.words[CHECKSUM], entry.words[GENERATION]};
        memcpy(rows[i], row, sizeof row); /* rows may be unaligned in a frame */
        if (standing != SENT) continue;
        budget -= length;
        if (!length) continue;
        pieces[num_pieces][0] = (uint64_t)(uintptr_t)(mapping->data + offset);
        pieces[num_pieces++][1] = length;
    }
    return num_pieces;
}
