/* The pool of blocks for very many requests.
 *
 * A request's blocks are a chain of block numbers, 4 bytes each; what nobody holds is a set of bits. Called through
 * ctypes. Every call takes the lock. `long` calls wait for it and are made without the interpreter's lock; `short` ones
 * are made with it, so they must not wait: they answer BUSY, and their caller makes the long one. No call needs the
 * interpreter while it holds the lock. twin.py does the same in Python.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "blocks.h"
#include "requests.h"
#include "latency.h"
#include "pool.h"
#include "check.h"

#define PUBLIC __attribute__((visibility("default")))
#define TURN 32         /* requests of a batch between which others get the lock */
#define LONG_CHAIN 4096 /* blocks that a short call gives back at most */

static int take_lock(Pages *pages, uint32_t flags) {
    return flags & WAITS_NOT ? pthread_mutex_trylock(&pages->lock) == 0 : pthread_mutex_lock(&pages->lock) == 0;
}

/* The first block, with SCATTERED unless the others are those behind it. */
PUBLIC int64_t pages_allocate(Pages *pages, const Wish *wish, Evicted *evicted) {
    uint64_t begun = now_ns();
    if (!take_lock(pages, wish->flags)) return BUSY;
    int64_t answer = fulfil(pages, wish, NULL, evicted);
    note_latency(pages->latencies, now_ns() - begun);
    pthread_mutex_unlock(&pages->lock);
    return answer;
}

static uint64_t joined(uint32_t low, uint32_t high) { return (uint64_t)high << 32 | low; }

/* As pages_allocate, without a Wish: ctypes is fastest with arguments of 32 bits, so a handle comes in two. */
PUBLIC int64_t pages_allocate_plain(Pages *pages, uint32_t low, uint32_t high, uint32_t count, uint32_t how) {
    Wish wish = {joined(low, high), count, how >> 8, 0, how & 0xFF};
    return pages_allocate(pages, &wish, NULL);
}

/* The sum of the counts; -1 when one is 0. */
PUBLIC int64_t pages_total(const uint32_t *counts, int64_t num) {
    uint64_t total = 0;
    int missing = 0;
    for (int64_t i = 0; i < num; i++) total += counts[i], missing |= !counts[i];
    return missing ? -1 : (int64_t)total;
}

/* Has memory bring what the next ones of a batch need: first their slots, then, with these, their records. */
static void foresee(const Pages *pages, const uint64_t *handles, int64_t done, int64_t num) {
    const Requests *all = &pages->requests;
    if (done + 8 < num) __builtin_prefetch(&all->slots[home_of(all, tag_of(all, handles[done + 8]))]);
    if (done + 4 >= num) return;
    Slot slot = all->slots[home_of(all, tag_of(all, handles[done + 4]))];
    if (slot.record) __builtin_prefetch(&all->records[slot.record - 1], 1);
}

/* For each of the handles as many blocks as its count says, one behind the other in `out`, until one cannot have them:
 * how many could. */
PUBLIC int64_t pages_allocate_all(Pages *pages, const uint64_t *handles, int64_t num, const uint32_t *counts,
                                  uint32_t priority, uint32_t room, uint32_t *out) {
    int64_t done = 0;
    for (int going = 1; going && done < num;) {
        uint64_t begun = now_ns();
        pthread_mutex_lock(&pages->lock);
        for (int64_t turn = (int64_t)least((uint64_t)(num - done), TURN); going && turn--;) {
            foresee(pages, handles, done, num);
            Wish wish = {handles[done], counts[done], priority, room, 0};
            if ((going = fulfil(pages, &wish, out, NULL) >= 0)) out += wish.count, done++;
            uint64_t ended = now_ns();
            note_latency(pages->latencies, ended - begun);
            begun = ended;
        }
        pthread_mutex_unlock(&pages->lock);
    }
    return done;
}

/* -- the end of requests */

/* How many blocks it held. What is long is done in a long call. */
PUBLIC int64_t pages_free(Pages *pages, uint32_t low, uint32_t high, uint32_t how) {
    uint64_t handle = joined(low, high);
    if (!take_lock(pages, how)) return BUSY;
    Record *record = how & WAITS_NOT ? find(&pages->requests, handle) : NULL;
    int64_t count = record && record->num_blocks > LONG_CHAIN ? BUSY : end_of(pages, handle);
    pthread_mutex_unlock(&pages->lock);
    return count;
}

/* How many blocks they held, in all; those that are not there count as none. */
PUBLIC int64_t pages_free_all(Pages *pages, const uint64_t *handles, int64_t num) {
    int64_t total = 0;
    for (int64_t done = 0; done < num;) {
        pthread_mutex_lock(&pages->lock);
        for (int64_t turn = (int64_t)least((uint64_t)(num - done), TURN); turn--; done++) {
            foresee(pages, handles, done, num);
            int64_t count = end_of(pages, handles[done]);
            total += count > 0 ? count : 0;
        }
        pthread_mutex_unlock(&pages->lock);
    }
    return total;
}

/* -- states of requests */

enum { REST, WAKE, PIN, UNPIN };

/* 1; 0 when it has too many pins or none; or UNKNOWN. */
PUBLIC int64_t pages_mark(Pages *pages, uint32_t low, uint32_t high, uint32_t what, uint32_t how) {
    if (!take_lock(pages, how)) return BUSY;
    Record *record = find(&pages->requests, joined(low, high));
    int64_t answer = record ? 1 : UNKNOWN;
    if (record && what == REST) rest(pages, record);
    if (record && what == WAKE) wake(pages, record);
    if (record && what >= PIN) {
        answer = record->pins != (what == PIN ? UINT16_MAX : 0);
        if (answer) record->pins = (uint16_t)(what == PIN ? record->pins + 1 : record->pins - 1);
        line_up(pages, record);
    }
    pthread_mutex_unlock(&pages->lock);
    return answer;
}

/* From now on `count` blocks are promised to the request, and nobody else gets them: 1 or FULL. */
PUBLIC int64_t pages_reserve(Pages *pages, const Wish *wish) {
    if (!take_lock(pages, wish->flags)) return BUSY;
    int64_t answer = set_promise(pages, wish);
    pthread_mutex_unlock(&pages->lock);
    return answer;
}

/* The first `count` blocks of a request are those of `to`, which is new: 1, or FULL, UNKNOWN or WRONG. */
PUBLIC int64_t pages_hand_over(Pages *pages, uint64_t handle, uint64_t to, uint32_t count) {
    pthread_mutex_lock(&pages->lock);
    int64_t answer = hand_over(pages, handle, to, count);
    pthread_mutex_unlock(&pages->lock);
    return answer;
}

/* -- size */

/* Takes retired blocks into service again, then new ones at the end: how many. */
PUBLIC int64_t pages_grow(Pages *pages, uint64_t count) {
    pthread_mutex_lock(&pages->lock);
    Space *space = &pages->space;
    uint64_t left = count, more;
    for (; left && space->retired.count; left--) {
        uint64_t block = (uint64_t)bits_from(&space->retired, 0);
        bits_remove(&space->retired, block);
        space_give(space, block, 1);
    }
    more = least(left, pages->setting.max_blocks - pages->stats.end);
    if (more) space_give(space, pages->stats.end, more);
    pages->stats.end += more;
    pthread_mutex_unlock(&pages->lock);
    return (int64_t)(count - left + more);
}

/* Takes `count` blocks out of service, the highest that are free, as far as they are neither held nor promised: which,
 * and how many. Those at the end are gone; the others are retired. */
PUBLIC int64_t pages_shrink(Pages *pages, uint64_t count, uint32_t *out) {
    pthread_mutex_lock(&pages->lock);
    Space *space = &pages->space;
    count = least(count, available(pages, 1, 0, 0));
    for (uint64_t i = 0; i < count; i++) {
        uint64_t block = (uint64_t)bits_last(&space->free);
        space_take(space, block, 1);
        bits_add(&space->retired, block);
        out[i] = (uint32_t)block;
    }
    while (pages->stats.end && bits_has(&space->retired, pages->stats.end - 1))
        bits_remove(&space->retired, --pages->stats.end);
    pthread_mutex_unlock(&pages->lock);
    return (int64_t)count;
}

/* -- what is there */

/* The blocks of a request in order, if `room` is enough; how many they are, or UNKNOWN. */
PUBLIC int64_t pages_table(Pages *pages, uint64_t handle, uint32_t *out, int64_t room) {
    pthread_mutex_lock(&pages->lock);
    const Record *record = find(&pages->requests, handle);
    int64_t count = record ? (int64_t)record->num_blocks : UNKNOWN;
    if (count <= room)
        for (int64_t i = 0, at = record ? record->first : 0; i < count; at = pages->next[at]) out[i++] = (uint32_t)at;
    pthread_mutex_unlock(&pages->lock);
    return count;
}

/* `count` blocks of a chain from `block` on. */
PUBLIC void pages_follow(Pages *pages, uint32_t block, int64_t count, uint32_t *out) {
    pthread_mutex_lock(&pages->lock);
    for (; count--; block = pages->next[block]) *out++ = block;
    pthread_mutex_unlock(&pages->lock);
}

/* Whoever ranks below it (priority · 2, and 1 for who holds something) must wait its turn; 0 = nobody waits. */
PUBLIC void pages_set_barrier(Pages *pages, int64_t barrier) {
    pthread_mutex_lock(&pages->lock);
    pages->barrier = barrier;
    pthread_mutex_unlock(&pages->lock);
}

/* How a request that asks stands among those who wait (`must_queue`). */
PUBLIC int64_t pages_rank(Pages *pages, uint64_t handle, uint32_t priority) {
    pthread_mutex_lock(&pages->lock);
    const Record *record = find(&pages->requests, handle);
    int64_t rank = record ? record->priority * 2 + 1 : (int64_t)priority * 2;
    pthread_mutex_unlock(&pages->lock);
    return rank;
}

PUBLIC void pages_stats(Pages *pages, Stats *out, uint64_t *latencies) {
    pthread_mutex_lock(&pages->lock);
    *out = pages->stats;
    out->retired = pages->space.retired.count;
    out->free = pages->space.free.count;
    out->requests = pages->requests.count;
    for (int high = 0; high < 2; high++) out->evictable[high] = pages->requests.num_evictable[high];
    out->metadata_bytes = pages->mapped_bytes;
    memcpy(latencies, pages->latencies, sizeof pages->latencies);
    pthread_mutex_unlock(&pages->lock);
}

/* 0, or the number of the rule that does not hold. */
PUBLIC int64_t pages_check(Pages *pages) {
    pthread_mutex_lock(&pages->lock);
    int64_t broken = check_pages(pages);
    pthread_mutex_unlock(&pages->lock);
    return broken;
}

/* -- from beginning to end */

static uint8_t *map_memory(uint64_t nbytes, int prefault) {
    uint8_t *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    madvise(memory, nbytes, MADV_HUGEPAGE); /* tables are read here and there: the TLB misses more than the cache */
    if (prefault)
        for (uint64_t at = 0; at < nbytes; at += 4096) ((volatile uint8_t *)memory)[at] = 0;
    return memory;
}

static uint64_t padded(uint64_t nbytes) { return (nbytes + 63) / 64 * 64; }

static uint8_t *make_requests(Requests *all, const Setting *setting, uint8_t *memory) {
    all->max_requests = (uint32_t)setting->max_requests;
    all->num_slots = num_slots_for(setting->max_requests);
    all->seed = setting->seed;
    all->unused = NONE;
    all->records = (Record *)memory;
    memory += padded(setting->max_requests * sizeof(Record));
    all->slots = (Slot *)memory;
    memory += padded(all->num_slots * sizeof(Slot));
    all->heap = (uint32_t *)memory;
    return memory + padded(setting->max_requests * sizeof(uint32_t));
}

/* NULL when there is no memory. Numbers are below 2^31 and have been checked. */
PUBLIC Pages *pages_create(const Setting *setting) {
    uint64_t blocks = setting->max_blocks, words = (blocks + WORD - 1) / WORD, requests = setting->max_requests;
    uint64_t bits = padded(2 * bits_bytes(blocks) + bits_bytes(words)), total = padded(sizeof(Pages)) + bits;
    total += padded(requests * sizeof(Record)) + padded(num_slots_for(requests) * sizeof(Slot));
    total += padded(requests * sizeof(uint32_t)) + padded(blocks * sizeof(uint32_t));
    uint8_t *memory = map_memory(total, setting->prefault != 0);
    if (!memory) return NULL;
    Pages *pages = (Pages *)memory;
    pthread_mutex_init(&pages->lock, NULL);
    pages->setting = *setting;
    pages->mapped_bytes = total;
    memory += padded(sizeof(Pages));
    uint8_t *end = bits_make(&pages->space.free, blocks, memory);
    bits_make(&pages->space.whole, words, bits_make(&pages->space.retired, blocks, end));
    memory = make_requests(&pages->requests, setting, memory + bits);
    pages->next = (uint32_t *)memory;
    if (setting->num_blocks) space_give(&pages->space, 0, setting->num_blocks);
    pages->stats.end = setting->num_blocks;
    return pages;
}

/* Nobody is in a call. */
PUBLIC void pages_destroy(Pages *pages) {
    pthread_mutex_destroy(&pages->lock);
    munmap(pages, pages->mapped_bytes);
}
