/* XXH3-64 (seed 0) of values of more than 240 bytes that arrive in parts, and of values of 17 to 240 bytes, which have
 * other rules.
 *
 * After github.com/Cyan4973/xxHash, doc/xxhash_spec.md: eight lanes take in stripes of 64 bytes, are scrambled after
 * every 16 stripes, and last take in the value's last 64 bytes again. Assumes a little-endian processor. Without AVX2, or
 * with PORTABLE defined, it takes three times as long.
 */
#include <stdint.h>
#include <string.h>
#if defined __x86_64__ && !defined PORTABLE
#define USE_AVX2 1
#include <immintrin.h>
#endif

enum { STRIPE = 64, LANES = 8, STRIPES_PER_BLOCK = 16, SHORT_VALUE = 240 };

static const uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
enum { SCRAMBLE_AT = 128, LAST_STRIPE_AT = 121, MERGE_AT = 11 }; /* bytes within the secret */

#define PRIME32_1 0x9E3779B1u
#define PRIME64_1 0x9E3779B185EBCA87u

typedef struct {
    uint64_t lanes[LANES];
    uint64_t position;    /* bytes of the value so far */
    uint8_t last[STRIPE]; /* the latest bytes of the value */
} Xxh3;

static uint64_t word(const void *memory) {
    uint64_t value;
    memcpy(&value, memory, sizeof value);
    return value;
}

static const uint8_t *secret_at(uint64_t offset) {
    return (const uint8_t *)SECRET + offset;
}

static void take_in(uint64_t *lanes, const uint8_t *stripe, const uint8_t *secret) {
    for (int i = 0; i < LANES; i++) {
        uint64_t value = word(stripe + 8 * i), keyed = value ^ word(secret + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (keyed & 0xffffffff) * (keyed >> 32);
    }
}

static void scramble(uint64_t *lanes) {
    for (int i = 0; i < LANES; i++)
        lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ word(secret_at(SCRAMBLE_AT) + 8 * i)) * PRIME32_1;
}

#if USE_AVX2
#define PREFETCH 384 /* bytes ahead; a quarter faster (LOG.md) */
#define VECTOR(memory) _mm256_loadu_si256((const void *)(memory))
#define AVX2 static inline __attribute__((target("avx2"), always_inline))

AVX2 __m256i products(const uint8_t *bytes, const uint8_t *secret) {
    __m256i keyed = _mm256_xor_si256(VECTOR(bytes), VECTOR(secret));
    return _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
}

AVX2 __m256i scrambled(__m256i sum, const uint8_t *secret) {
    __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    sum = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), VECTOR(secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
}

/* The stripes' words are added to the neighbouring lanes once per block, so that only their sum is shuffled. */
__attribute__((target("avx2"))) static void take_in_stripes_avx2(uint64_t *lanes, const uint8_t *stripe, uint64_t first,
                                                                 uint64_t count) {
    __m256i low = VECTOR(lanes), high = VECTOR(lanes + 4);
    while (count) {
        uint64_t in_block = first % STRIPES_PER_BLOCK, some = STRIPES_PER_BLOCK - in_block;
        if (some > count) some = count;
        const uint8_t *secret = secret_at(8 * in_block);
        __m256i low_words = _mm256_setzero_si256(), high_words = low_words;
#pragma GCC unroll 2
        for (uint64_t i = 0; i < some; i++, stripe += STRIPE, secret += 8) {
            _mm_prefetch((const char *)stripe + PREFETCH, _MM_HINT_T0);
            low = _mm256_add_epi64(low, products(stripe, secret));
            high = _mm256_add_epi64(high, products(stripe + 32, secret + 32));
            low_words = _mm256_add_epi64(low_words, VECTOR(stripe));
            high_words = _mm256_add_epi64(high_words, VECTOR(stripe + 32));
        }
        low = _mm256_add_epi64(low, _mm256_shuffle_epi32(low_words, 0x4e)); /* swaps neighbouring lanes */
        high = _mm256_add_epi64(high, _mm256_shuffle_epi32(high_words, 0x4e));
        if (in_block + some == STRIPES_PER_BLOCK) {
            low = scrambled(low, secret_at(SCRAMBLE_AT));
            high = scrambled(high, secret_at(SCRAMBLE_AT + 32));
        }
        first += some, count -= some;
    }
    _mm256_storeu_si256((void *)lanes, low);
    _mm256_storeu_si256((void *)(lanes + 4), high);
}
#endif

/* Takes in `count` whole stripes; `first` is the index of the first one within the value. */
static void take_in_stripes(uint64_t *lanes, const uint8_t *stripe, uint64_t first, uint64_t count) {
#if USE_AVX2
    if (__builtin_cpu_supports("avx2")) {
        take_in_stripes_avx2(lanes, stripe, first, count);
        return;
    }
#endif
    for (; count; first++, count--, stripe += STRIPE) {
        take_in(lanes, stripe, secret_at(8 * (first % STRIPES_PER_BLOCK)));
        if (first % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) scramble(lanes);
    }
}

static uint64_t mixed(const uint8_t *bytes, const uint8_t *secret) {
    __uint128_t product = (__uint128_t)(word(bytes) ^ word(secret)) * (word(bytes + 8) ^ word(secret + 8));
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9;
    return hash ^ hash >> 32;
}

/* Returns the hash of a value of 17 to 240 bytes. */
static inline uint64_t xxh3_short(const uint8_t *bytes, uint64_t length) {
    enum { MIDDLE = 128, LATER_AT = 3, LAST_AT = 119 }; /* bytes of the value; within the secret */
    uint64_t hash = length * PRIME64_1;
    if (length <= MIDDLE) { /* pairs from both ends towards the middle */
        for (uint64_t i = (length - 1) / 32 + 1; i--;) {
            hash += mixed(bytes + 16 * i, secret_at(32 * i));
            hash += mixed(bytes + length - 16 * (i + 1), secret_at(32 * i + 16));
        }
        return avalanche(hash);
    }
    for (uint64_t i = 0; i < MIDDLE / 16; i++) hash += mixed(bytes + 16 * i, secret_at(16 * i));
    hash = avalanche(hash);
    for (uint64_t i = MIDDLE / 16; i < length / 16; i++)
        hash += mixed(bytes + 16 * i, secret_at(16 * i - MIDDLE + LATER_AT));
    return avalanche(hash + mixed(bytes + length - 16, secret_at(LAST_AT)));
}

/* Adds the next bytes of a value of `length` bytes in all, which they must not exceed. */
static void xxh3_add(Xxh3 *hash, const uint8_t *bytes, uint64_t count, uint64_t length) {
    static const uint64_t START[LANES] = {0xC2B2AE3D,         PRIME64_1,  0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                          0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, PRIME32_1};
    uint64_t num_stripes = (length - 1) / STRIPE; /* the rest, up to a whole stripe, is in the last 64 bytes */
    if (!hash->position) memcpy(hash->lanes, START, sizeof START);
    while (count) {
        uint64_t stripe = hash->position / STRIPE, begun = hash->position % STRIPE, some = STRIPE - begun;
        if (!begun && count >= STRIPE && stripe < num_stripes) {
            uint64_t whole = count / STRIPE < num_stripes - stripe ? count / STRIPE : num_stripes - stripe;
            take_in_stripes(hash->lanes, bytes, stripe, whole);
            some = STRIPE * whole;
            memcpy(hash->last, bytes + some - STRIPE, STRIPE);
        } else {
            if (some > count) some = count;
            memmove(hash->last, hash->last + some, STRIPE - some);
            memcpy(hash->last + STRIPE - some, bytes, some);
            if (begun + some == STRIPE && stripe < num_stripes) take_in_stripes(hash->lanes, hash->last, stripe, 1);
        }
        hash->position += some, bytes += some, count -= some;
    }
}

/* Returns the hash of the value, all of whose bytes were added, and begins the next value. */
static uint64_t xxh3_end(Xxh3 *hash) {
    uint64_t merged = hash->position * PRIME64_1;
    take_in(hash->lanes, hash->last, secret_at(LAST_STRIPE_AT));
    for (int i = 0; i < LANES; i += 2)
        merged += mixed((const uint8_t *)(hash->lanes + i), secret_at(MERGE_AT + 8 * (uint64_t)i));
    hash->position = 0;
    return avalanche(merged);
}

/* Returns the hash of a value of more than 16 bytes. */
static uint64_t xxh3(const uint8_t *bytes, uint64_t length) {
    Xxh3 hash = {.position = 0};
    if (length <= SHORT_VALUE) return xxh3_short(bytes, length);
    xxh3_add(&hash, bytes, length, length);
    return xxh3_end(&hash);
}
