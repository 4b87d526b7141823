/* Attention over a quantised pool: single tokens in float32, prompts in the dtype of the queries. Both represent codes
 * exactly. Scales are multiplied with scores and weights, not with each element.
 *
 * Queries in bfloat16 allow for faster products of single tokens with int8: pairs of 16-bit integers, with queries and
 * weights rounded to 15 bits of their highest. (fp8 codes as pairs of bfloat16 were not faster.)
 */
#pragma once

#include <type_traits>

#include "../quantise.h"
#include "softmax_simd.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* True if a pool of S has rows of codes with scales. */
template <typename S> constexpr bool QUANTISED = false;
template <> constexpr bool QUANTISED<Int8> = true;
template <> constexpr bool QUANTISED<Fp8> = true;

/* Returns the number of elements of S from one head to the next. */
template <typename S> INLINE int64_t head_size(int64_t head_dim) {
    return QUANTISED<S> ? head_dim + SCALE_BYTES : head_dim;
}

/* Bits of a register of 16-bit integers; 0: there are no instructions for them. */
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define PAIRS 512
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define PAIRS 256
#else
#define PAIRS 0
#endif

/* A code of Int8; they are read in pairs. */
struct PairedInt8 {
    int8_t bits;
};
template <> constexpr bool QUANTISED<PairedInt8> = true;
template <> constexpr int64_t PER_WORD<PairedInt8> = 2;
template <typename S> constexpr bool INTEGERS = std::is_same_v<S, PairedInt8>; /* products of 16-bit integers */

/* The type as which single tokens with queries of T read a pool of S. */
template <typename T, typename S> struct Read {
    using Type = S;
};
template <> struct Read<Bfloat16, Int8> {
    using Type = std::conditional_t<PAIRS != 0, PairedInt8, Int8>;
};

/* Returns 2 LANES codes from `from`, of which `count` exist, as 16-bit words; the others are 0. */
INLINE Words load_pairs([[maybe_unused]] const PairedInt8 *from, [[maybe_unused]] int64_t count) {
#if PAIRS == 512
    const __mmask32 there = count >= 32 ? ~0u : (1u << count) - 1;
    return (Words)_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(there, from));
#elif PAIRS == 256
    __m128i codes = {};
    if (count >= 16) codes = _mm_loadu_si128((const __m128i *)from);
    else memcpy(&codes, from, count);
    return (Words)_mm256_cvtepi8_epi16(codes);
#else
    return Words{};
#endif
}

/* Adds the products of pairs of 16-bit integers to 32-bit integers. */
INLINE Words add_products(Words sums, [[maybe_unused]] Words a, [[maybe_unused]] Words b) {
#if PAIRS == 512 && defined(__AVX512VNNI__)
    return (Words)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif PAIRS == 512
    return sums + (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif PAIRS == 256
    return sums + (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sums;
#endif
}

/* Pairs the 16-bit integers of two rows: `low` gets the first 4 of each 8, `high` the others. */
INLINE void pair_rows([[maybe_unused]] Words a, [[maybe_unused]] Words b, [[maybe_unused]] Words &low,
                      [[maybe_unused]] Words &high) {
#if PAIRS == 512
    low = (Words)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    high = (Words)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#elif PAIRS == 256
    low = (Words)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
    high = (Words)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
#endif
}

constexpr float HIGHEST_INTEGER = 32767.0f;

INLINE uint32_t integer_pair(float low, float high) {
    return ((uint32_t)(int32_t)__builtin_rintf(low) & 0xffffu) | (uint32_t)(int32_t)__builtin_rintf(high) << 16;
}

INLINE Floats accumulate(const PairedInt8 *, Floats sums, Words a, Words b) { return (Floats)add_products((Words)sums, a, b); }

/* A code becomes a word of one float32. */
template <> constexpr int64_t PER_WORD<Int8> = 1;
template <> constexpr int64_t PER_WORD<Fp8> = 1;

INLINE Floats accumulate(const Int8 *, Floats sums, Words a, Words b) { return sums + (Floats)a * (Floats)b; }
INLINE Floats accumulate(const Fp8 *, Floats sums, Words a, Words b) { return sums + (Floats)a * (Floats)b; }
INLINE void split(const Int8 *, Words words, Floats (&parts)[1]) { parts[0] = (Floats)words; }
INLINE void split(const Fp8 *, Words words, Floats (&parts)[1]) { parts[0] = (Floats)words; }

/* Converts a head's codes to elements of T, which represents them exactly. */
template <typename T, typename S> INLINE void unpack(T *to, const S *row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) store_some(to + i, load_some(row + i, dim - i), dim - i);
}
