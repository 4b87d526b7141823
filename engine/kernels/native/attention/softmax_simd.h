/* Vector operations of attention, on the types and element types of `simd.h`. A *word* is 32 bits of a row: one
 * float32, or two bfloat16 of which the first is the low half. Every use of intrinsics has a portable alternative.
 */
#pragma once

#include "../simd.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

template <typename T> constexpr int64_t PER_WORD = 4 / sizeof(T);

/* Loads a vector of words of which only `bytes` bytes exist (an even number above 0); the rest is 0. */
INLINE Words load_words(const void *from, int64_t bytes) {
#if defined(__AVX512BW__)
    const __mmask32 there = bytes >= 64 ? ~0u : (1u << bytes / 2) - 1;
    return (Words)_mm512_maskz_loadu_epi16(there, from);
#else
    if (bytes >= 64) return (Words) * (const LooseWords *)from;
    Words words = {};
    memcpy(&words, from, bytes);
    return words;
#endif
}

INLINE Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}

INLINE float highest_lane(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int64_t step = LANES / 2; step > 0; step /= 2)
        for (int64_t lane = 0; lane < step; lane++)
            lanes[lane] = lanes[lane] > lanes[lane + step] ? lanes[lane] : lanes[lane + step];
    return lanes[0];
#endif
}

/* Returns the vector whose lane i is the sum of row i's lanes. */
INLINE Floats sum_rows(const Floats (&rows)[LANES]) {
#if defined(__AVX512F__)
    __m512 fours[4]; /* in each quarter: partial sums of rows 4q … 4q + 3 */
    for (int q = 0; q < 4; q++) {
        const __m512 *row = (const __m512 *)rows + 4 * q;
        const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(row[0], row[1]), _mm512_unpackhi_ps(row[0], row[1]));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(row[2], row[3]), _mm512_unpackhi_ps(row[2], row[3]));
        const __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
        fours[q] = _mm512_add_ps((__m512)low, (__m512)high);
    }
    __m512 halves[2];
    for (int h = 0; h < 2; h++)
        halves[h] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * h], fours[2 * h + 1], 0x88),
                                  _mm512_shuffle_f32x4(fours[2 * h], fours[2 * h + 1], 0xdd));
    return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                                 _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#else
    float sums[LANES];
    for (int64_t row = 0; row < LANES; row++) sums[row] = sum(rows[row]);
    Floats result;
    memcpy(&result, sums, sizeof result);
    return result;
#endif
}

/* Returns 2ˣ for x ≤ 0 (or a rounding error above), exactly 0 far below and exactly 1 at 0. The polynomial of degree 5
 * is the one with the least relative error on [-½, ½], 1.1e-7. */
INLINE Floats power_of_two(Floats x) {
    x = maximum(x, splat(-127.0f));
#if defined(__AVX512F__)
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Integers whole = __builtin_convertvector(x - 0.5f, Integers); /* truncation rounds to nearest for x ≤ 0 */
    const Floats n = __builtin_convertvector(whole, Floats);
#endif
    const Floats r = x - n;
    Floats p = splat(0.001326472731307149f);
    p = p * r + 0.009671512991189957f;
    p = p * r + 0.05550733581185341f;
    p = p * r + 0.24022242426872253f;
    p = p * r + 0.6931470036506653f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    const Floats scaled = (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
    return select(x > splat(-127.0f), scaled, Floats{});
#else
    return p * (Floats)((whole + 127) << 23);
#endif
}

/* sums + a · b, element by element of each word */
INLINE Floats accumulate(const float *, Floats sums, Words a, Words b) { return sums + (Floats)a * (Floats)b; }

INLINE Floats accumulate(const Bfloat16 *, Floats sums, Words a, Words b) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    sums = sums + (Floats)(a << 16) * (Floats)(b << 16);
    return sums + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
}

/* Splits a vector of words into PER_WORD vectors of elements. */
INLINE void split(const float *, Words words, Floats (&parts)[1]) { parts[0] = (Floats)words; }

INLINE void split(const Bfloat16 *, Words words, Floats (&parts)[2]) {
    parts[0] = (Floats)(words << 16);
    parts[1] = (Floats)(words & 0xffff0000u);
}

INLINE void narrow(float *to, float value) { *to = value; }

INLINE void narrow(Bfloat16 *to, float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    to->bits = is_nan ? (uint16_t)(word >> 16 | 0x40) : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

/* Joins two elements per lane, rounded to bfloat16, into a word. For probabilities: finite and not negative. */
INLINE Words join(Floats low, Floats high) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); /* all of low, then all of high */
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Words)_mm512_permutexvar_epi16(order, both);
#else
    const Words a = (Words)low, b = (Words)high;
    return (a + 0x7fff + ((a >> 16) & 1)) >> 16 | ((b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000u);
#endif
}
