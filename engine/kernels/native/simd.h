/* Vectors of floats that fill a register, and the two element types, float32 and bfloat16, on any processor.
 *
 * The vector extensions of GCC and clang become AVX-512, AVX2, SSE or NEON as the flags allow; GCC keeps vectors that are
 * wider than a register in memory, at a quarter of the speed. Intrinsics are used only
 * where the extensions lack an operation: pairs of bfloat16 in one instruction. bfloat16: to nearest, ties to even.
 */
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
/* Without AVX-512, 64-byte vectors have no fixed calling convention. It does not matter: all functions are inlined. */
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
constexpr int64_t REGISTER = LANES * sizeof(float); /* bytes */

typedef float Floats __attribute__((vector_size(REGISTER)));
typedef float LooseFloats __attribute__((vector_size(REGISTER), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(REGISTER)));
typedef uint32_t LooseWords __attribute__((vector_size(REGISTER), aligned(2), may_alias));
typedef int32_t Integers __attribute__((vector_size(REGISTER)));
typedef uint16_t Halves __attribute__((vector_size(REGISTER / 2)));
typedef uint16_t LooseHalves __attribute__((vector_size(REGISTER / 2), aligned(2), may_alias));

constexpr int64_t PANEL = 32; /* outputs whose weights lie together */
constexpr int64_t VECTORS = PANEL / LANES;
typedef Floats PanelSums[VECTORS]; /* of one row with a panel */

struct Bfloat16 {
    uint16_t bits;
};

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE Floats splat(float value) { return value - Floats{}; }
INLINE Words splat_word(uint32_t value) { return value + Words{}; }

/* Makes the compiler compute with the whole vector from here on. It would shift one word and copy the result to all lanes,
 * which takes longer than a shift of all lanes. */
INLINE void in_register([[maybe_unused]] Words &words) {
#if defined(__x86_64__)
    __asm__("" : "+x"(words));
#elif defined(__aarch64__)
    __asm__("" : "+w"(words));
#endif
}

INLINE Floats select(Integers mask, Floats yes, Floats no) { return mask ? yes : no; }

/* Computes eˣ as 2ⁿ·p by the usual range reduction (Cephes expf): within 2 units of the last place between ±87. */
INLINE Floats exponential(Floats x) {
    x = select(x > splat(87.0f), splat(87.0f), x);
    x = select(x < splat(-87.0f), splat(-87.0f), x);
    const Floats shift = splat(12582912.0f); /* 1.5 · 2²³: adding it rounds to an integer */
    const Floats n = (x * 1.44269504088896341f + shift) - shift;
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)((__builtin_convertvector(n, Integers) + 127) << 23);
}

INLINE Floats silu(Floats x) {
    const Floats bounded = select(x < splat(-87.0f), splat(-87.0f), x); /* like `exponential` */
    return bounded / (1.0f + exponential(-x));
}

INLINE float sum(Floats x) {
    float total[LANES];
    memcpy(total, &x, sizeof total);
    for (int64_t step = LANES / 2; step > 0; step /= 2)
        for (int64_t lane = 0; lane < step; lane++) total[lane] += total[lane + step];
    return total[0];
}

/* -- float32: a word is one element */

INLINE Floats load(const float *from) { return (Floats) * (const LooseFloats *)from; }
INLINE void store(float *to, Floats value) { *(LooseFloats *)to = value; }
INLINE Floats rounded(const float *, Floats value) { return value; }

/* Returns sums + weights · input for a vector of outputs and one word of the input. */
INLINE Floats accumulate(const float *, Floats sums, Words weights, uint32_t input) {
    return sums + (Floats)weights * (Floats)splat_word(input);
}

/* -- bfloat16: a word is two elements, the first one in the low half */

INLINE Words round_bits(Floats value) { /* the upper half of each word becomes the nearest bfloat16 */
    const Words bits = (Words)value;
    const Words nearest = bits + 0x7fff + ((bits >> 16) & 1);
    return (Words)select(value != value, (Floats)(bits | 0x400000), (Floats)nearest);
}

INLINE Floats load(const Bfloat16 *from) {
    return (Floats)(__builtin_convertvector((Halves) * (const LooseHalves *)from, Words) << 16);
}
INLINE void store(Bfloat16 *to, Floats value) {
    *(LooseHalves *)to = __builtin_convertvector(round_bits(value) >> 16, Halves);
}
INLINE Floats rounded(const Bfloat16 *, Floats value) { return (Floats)(round_bits(value) & 0xffff0000u); }

INLINE Floats accumulate(const Bfloat16 *, Floats sums, Words weights, uint32_t input) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)splat_word(input));
#else
    Words inputs = splat_word(input);
    in_register(inputs);
    sums = sums + (Floats)(weights << 16) * (Floats)(inputs << 16);
    return sums + (Floats)(weights & 0xffff0000u) * (Floats)(inputs & 0xffff0000u);
#endif
}

/* -- both, also if fewer elements are left than a vector has */

template <typename T> INLINE Floats load_some(const T *from, int64_t count) {
    if (count >= LANES) return load(from);
    T some[LANES] = {};
    memcpy(some, from, count * sizeof(T));
    return load(some);
}

template <typename T> INLINE void store_some(T *to, Floats value, int64_t count) {
    if (count >= LANES) return store(to, value);
    T some[LANES];
    store(some, value);
    memcpy(to, some, count * sizeof(T));
}
