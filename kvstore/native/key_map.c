/* Private maps of millions of keys: key -> number.
 *
 * As metadata.c: Python allocates all memory, zeroed, and keeps it alive; one thread uses it. twin.py does the same in
 * Python.
 */
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))
#define GOLDEN 0x9E3779B97F4A7C15u
#define KEY_BYTES 16
#define MAP_LOADED_PERCENT 75

__extension__ typedef unsigned __int128 uint128_t;

static uint64_t fold(uint64_t a, uint64_t b) {
    uint128_t product = (uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* As in metadata.c: clients choose keys and do not know the seed. */
static uint64_t hash_of(const uint8_t *at, uint64_t seed) {
    uint64_t low, high;
    memcpy(&low, at, sizeof low);
    memcpy(&high, at + sizeof low, sizeof high);
    return fold(fold(low ^ seed, high ^ seed * GOLDEN) ^ seed, GOLDEN);
}

typedef struct { uint8_t key[KEY_BYTES]; uint32_t value; } MapSlot; /* value + 1; 0 = empty */

typedef struct {
    MapSlot *slots;
    uint64_t num_slots, seed, count;
} Map;

static uint64_t map_home(const Map *map, const uint8_t *key) {
    return (uint64_t)(((uint128_t)hash_of(key, map->seed) * map->num_slots) >> 64);
}

static uint64_t map_next(const Map *map, uint64_t at) { return at + 1 < map->num_slots ? at + 1 : 0; }

/* Of `key`, or the empty one where it would go; there always is one. */
static MapSlot *map_slot(const Map *map, const uint8_t *key) {
    uint64_t at = map_home(map, key);
    while (map->slots[at].value && memcmp(map->slots[at].key, key, KEY_BYTES)) at = map_next(map, at);
    return &map->slots[at];
}

/* -1 when absent. */
PUBLIC int64_t map_get(const Map *map, const uint8_t *key) { return (int64_t)map_slot(map, key)->value - 1; }

/* 0 when the map must grow first. */
PUBLIC int32_t map_put(Map *map, const uint8_t *key, uint32_t value) {
    MapSlot *slot = map_slot(map, key);
    if (!slot->value) {
        if ((map->count + 1) * 100 > map->num_slots * MAP_LOADED_PERCENT) return 0;
        memcpy(slot->key, key, KEY_BYTES);
        map->count++;
    }
    slot->value = value + 1;
    return 1;
}

PUBLIC int64_t map_pop(Map *map, const uint8_t *key) {
    MapSlot *slot = map_slot(map, key);
    int64_t value = (int64_t)slot->value - 1;
    if (value < 0) return value;
    uint64_t hole = (uint64_t)(slot - map->slots);
    for (uint64_t next = map_next(map, hole); map->slots[next].value; next = map_next(map, next)) {
        uint64_t home = map_home(map, map->slots[next].key);
        if (hole < next ? hole < home && home <= next : hole < home || home <= next) continue;
        map->slots[hole] = map->slots[next];
        hole = next;
    }
    map->slots[hole].value = 0;
    map->count--;
    return value;
}

PUBLIC void map_move(Map *to, const Map *from) {
    for (uint64_t at = 0; at < from->num_slots; at++)
        if (from->slots[at].value) *map_slot(to, from->slots[at].key) = from->slots[at];
    to->count = from->count;
}
