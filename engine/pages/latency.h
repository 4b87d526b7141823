/* A histogram of durations: eight buckets per power of two, so a bucket's bounds are at most an eighth apart.
 * latency.py reads it, and makes one like it.
 */
#define NUM_BUCKETS 320 /* up to 2^42 ns, more than an hour */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void note_latency(uint64_t *buckets, uint64_t ns) {
    int32_t shift = ns < 16 ? 0 : 60 - __builtin_clzll(ns);
    uint64_t bucket = ((uint64_t)shift << 3) + (ns >> shift);
    buckets[bucket < NUM_BUCKETS ? bucket : NUM_BUCKETS - 1]++;
}
