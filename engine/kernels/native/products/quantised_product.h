/* Products with weights of 4 or 8 bits, which stay codes in memory.
 *
 * Weights [out, in] have one scale, and maybe one zero point or minimum, per output and group of inputs: weight =
 * (code - zero) · scale, or code · scale - minimum; codes of MXFP4 stand for integers, twice its numbers. Each row of the input becomes integers of 16 bits with a scale per
 * group, the highest magnitude divided by 32,767: 2⁻¹⁶ of it is lost, where bfloat16 loses 2⁻⁹ of each value. So the sum
 * over a group is exact in 32 bits, in any order. It is multiplied by both scales and added to the output's running sum,
 * group by group: a row's result does not depend on the other rows, the threads or the width of the vectors.
 *
 * Panels have 32 outputs like matrix_product.h: for each word of inputs (8 of 4 bits, 4 of 8 bits, the first one in the
 * lowest bits), the words of these outputs. A shift brings one input from each half of a word into 16-bit lanes, so the
 * codes of a row are stored in this order of pairs.
 */
#pragma once

#include "../simd.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t ROWS_IN_REGISTERS = 8;
constexpr bool WIDENS_ONCE = false; /* widening again for each few rows is faster than reading widened codes again */
constexpr int64_t CHAINS = 2; /* sums of one output in a product of one row: they hide the latency of a fused product */
#else
constexpr int64_t ROWS_IN_REGISTERS = 3;
constexpr bool WIDENS_ONCE = true;
constexpr int64_t CHAINS = 1;
#endif
constexpr int64_t MOST_GROUP = 128;
constexpr int64_t ROWS_PER_PANEL = 64; /* rows that use a panel before the next one: their sums stay in the cache */
constexpr int64_t WORDS_AHEAD = 48;    /* words of the input: codes are prefetched this far ahead */

typedef uint16_t Sixteen __attribute__((vector_size(32)));
typedef int16_t Pairs __attribute__((vector_size(REGISTER)));
typedef int16_t LoosePairs __attribute__((vector_size(REGISTER), aligned(4), may_alias));
typedef uint16_t Unsigned __attribute__((vector_size(REGISTER)));
typedef int16_t Shorts __attribute__((vector_size(REGISTER / 2)));
typedef int16_t LooseShorts __attribute__((vector_size(REGISTER / 2), aligned(2), may_alias));

struct Quantised {
    const uint16_t *scales; /* [panels, groups, 32] float16, or bfloat16 if `is_float` */
    const int16_t *zeros;   /* like `scales`; null: 8 for codes of 4 bits, 0 for codes of 8 and beside `mins` */
    const uint16_t *mins;   /* like `scales`; null: no minima */
    int64_t bits;           /* 4: codes 0..15; 8: codes -128..127; 0: the matrix is not quantised */
    int64_t group;          /* inputs per scale, at most MOST_GROUP */
    int64_t inputs;         /* of a row; the panels are padded to whole groups with codes that are 0 */
    int64_t is_float;       /* 1: codes are those of MXFP4 */

    bool has_one_zero() const { return zeros == nullptr && mins == nullptr; }
};

/* Rows of the input as integers. */
struct Inputs {
    int16_t *codes; /* [rows, groups · group]; in the order of pairs */
    float *scales;  /* [rows, groups] */
    int32_t *sums;  /* [rows, groups]: of the codes, times -zero if it is the same for all weights */
    int64_t groups, group;

    /* `memory` has room for input_bytes(matrix, rows) bytes. */
    Inputs(const Quantised &matrix, int64_t rows, void *memory)
        : groups((matrix.inputs + matrix.group - 1) / matrix.group), group(matrix.group) {
        scales = (float *)memory;
        sums = (int32_t *)(scales + rows * groups);
        codes = (int16_t *)(sums + rows * groups);
    }
    static int64_t bytes(const Quantised &matrix, int64_t rows) {
        const int64_t groups = (matrix.inputs + matrix.group - 1) / matrix.group;
        return rows * groups * (2 * matrix.group + 8);
    }
};

/* Reorders the inputs of words with codes of `bits`: those that are in the same place of both halves become pairs. */
INLINE Sixteen in_pairs(Sixteen inputs, int64_t bits) {
    if (bits == 4) return __builtin_shufflevector(inputs, inputs, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return __builtin_shufflevector(inputs, inputs, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
}

/* Stores `count` values, at most a group, as codes with their scale. A value that is not finite makes the scale so. */
template <typename T>
INLINE void store_group(const T *from, int64_t count, int64_t bits, int16_t *codes, int64_t group, float *scale, int32_t *sum) {
    Words highest = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Words magnitude = (Words)load_some(from + i, count - i) & 0x7fffffffu;
        highest = magnitude > highest ? magnitude : highest;
    }
    uint32_t pattern = 0;
    for (int64_t lane = 0; lane < LANES; lane++) pattern = highest[lane] > pattern ? highest[lane] : pattern;
    float most;
    memcpy(&most, &pattern, sizeof most);
    *scale = most / 32767.0f;
    const float inverse = most > 1e-30f && pattern < 0x7f800000u ? 32767.0f / most : 0.0f;
    const Floats shift = splat(12582912.0f); /* 1.5 · 2²³: adding it rounds to an integer */
    Integers total = {};
    for (int64_t i = 0; i < group; i += 16) {
        Halves parts[16 / LANES];
        for (int64_t n = 0; n < 16 / LANES; n++) {
            const int64_t at = i + n * LANES;
            const Floats value = at < count ? load_some(from + at, count - at) : Floats{};
            const Integers code = (Integers)(value * inverse + shift) - (Integers)shift;
            total += code;
            parts[n] = __builtin_convertvector(code, Halves);
        }
        Sixteen sixteen;
        memcpy(&sixteen, parts, sizeof sixteen);
        sixteen = in_pairs(sixteen, bits);
        memcpy(codes + i, &sixteen, sizeof sixteen);
    }
    int32_t added = 0;
    for (int64_t lane = 0; lane < LANES; lane++) added += total[lane];
    *sum = added;
}

template <typename T> static void store_row(const Quantised &matrix, const T *from, const Inputs &inputs, int64_t row) {
    for (int64_t n = 0; n < inputs.groups; n++) {
        const int64_t at = n * inputs.group, to = row * inputs.groups + n;
        store_group(from + at, least(inputs.group, matrix.inputs - at), matrix.bits, inputs.codes + to * inputs.group, inputs.group,
                    inputs.scales + to, inputs.sums + to);
        if (matrix.has_one_zero()) inputs.sums[to] *= matrix.bits == 4 && !matrix.is_float ? -8 : 0;
    }
}

/* Adds the products of pairs of 16-bit integers. */
INLINE Integers add_pairs(Integers sums, Pairs weights, Pairs inputs) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVX512BW__)
    return sums + (Integers)_mm512_madd_epi16((__m512i)weights, (__m512i)inputs);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sums + (Integers)_mm256_madd_epi16((__m256i)weights, (__m256i)inputs);
#else
    const Integers even = ((Integers)weights << 16 >> 16) * ((Integers)inputs << 16 >> 16);
    return sums + even + ((Integers)weights >> 16) * ((Integers)inputs >> 16);
#endif
}

/* Returns a pair of inputs in every lane. */
INLINE Pairs pair_of(const int16_t *inputs) {
    int32_t pair;
    memcpy(&pair, inputs, sizeof pair);
    return (Pairs)(pair - Integers{});
}

/* Returns twice the numbers of MXFP4 that codes 0..15 stand for. */
INLINE Pairs floats_of(Pairs codes) {
#if defined(__AVX512BW__)
    const __m256i table = _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return (Pairs)_mm512_permutexvar_epi16((__m512i)codes, _mm512_castsi256_si512(table));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return (Pairs)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes) << 8 >> 8;
#else
    constexpr int16_t table[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (int lane = 0; lane < REGISTER / 2; lane++) codes[lane] = table[codes[lane]];
    return codes;
#endif
}

enum Codes { INT4, INT8, FLOAT4 };
template <Codes CODES> constexpr int64_t BITS = CODES == INT8 ? 8 : 4;
template <Codes CODES> constexpr int64_t PAIRS = 16 / BITS<CODES>; /* of a word */

/* Returns pair `n` of a vector of words; integers of 4 bits without sign. */
template <Codes CODES> INLINE Pairs widen(Pairs words, int n) {
    if constexpr (CODES != INT8) {
        const Unsigned moved = (Unsigned)words >> (uint16_t)(4 * n);
        const Pairs codes = (Pairs)(n == 3 ? moved : moved & 15);
        return CODES == FLOAT4 ? floats_of(codes) : codes;
    } else {
        return n == 0 ? words << 8 >> 8 : words >> 8;
    }
}

INLINE Floats widen_scales(const uint16_t *scales) {
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)scales));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
#else /* moved to float32's sign, exponent and mantissa; its bias is 112 higher */
    const Integers bits = __builtin_convertvector((Shorts) * (const LooseShorts *)scales, Integers);
    return (Floats)(bits << 13 & 0x0fffe000) * 0x1p112f * (1.0f - 2.0f * __builtin_convertvector((bits >> 31) & 1, Floats));
#endif
}

/* Scales and zero points or minima of one group of a panel. */
struct Group {
    Floats scales[VECTORS];
    const int16_t *zeros;
    const uint16_t *mins;

    Group(const Quantised &matrix, int64_t number)
        : zeros(matrix.zeros == nullptr ? nullptr : matrix.zeros + number * PANEL),
          mins(matrix.mins == nullptr ? nullptr : matrix.mins + number * PANEL) {
        const uint16_t *own = matrix.scales + number * PANEL;
        for (int64_t part = 0; part < VECTORS; part++, own += LANES)
            scales[part] = matrix.is_float ? load((const Bfloat16 *)own) : widen_scales(own);
    }

    /* Returns where the sums of products with an input begin. */
    inline __attribute__((always_inline)) Integers start(const int32_t &input_sum) const {
        static const int32_t nothing = 0;
        return Integers{} + *(zeros == nullptr && mins == nullptr ? &input_sum : &nothing);
    }

    /* Returns the total of part `part` of the panel, increased by a group's sums. */
    inline __attribute__((always_inline)) Floats add(Floats total, Integers sums, int64_t part, float scale, int32_t input_sum) const {
        if (mins != nullptr) total -= widen_scales(mins + part * LANES) * (scale * (float)input_sum);
        if (zeros != nullptr) sums -= __builtin_convertvector((Shorts) * (const LooseShorts *)(zeros + part * LANES), Integers) * input_sum;
        return total + (__builtin_convertvector(sums, Floats) * scale) * scales[part];
    }
};

/* Prefetches a word's codes. */
INLINE void prefetch_word(const uint32_t *words) {
    __builtin_prefetch(words);
    __builtin_prefetch(words + PANEL / 2);
}

/* Adds one group to the totals of one row, straight from the codes. */
template <Codes CODES>
INLINE void add_to_row(const Group &group, const uint32_t *words, int64_t num_words, const int16_t *inputs, float scale,
                       const int32_t &input_sum, Floats (&totals)[VECTORS]) {
    Integers sums[VECTORS][CHAINS] = {};
    for (int64_t part = 0; part < VECTORS; part++) sums[part][0] = group.start(input_sum);
    for (int64_t k = 0; k < num_words; k++, words += PANEL, inputs += 2 * PAIRS<CODES>) {
        prefetch_word(words + WORDS_AHEAD * PANEL);
        Pairs codes[VECTORS];
        for (int64_t part = 0; part < VECTORS; part++) codes[part] = *(const LoosePairs *)(words + part * LANES);
#pragma GCC unroll 4
        for (int n = 0; n < PAIRS<CODES>; n++) {
            const Pairs pair = pair_of(inputs + 2 * n);
#pragma GCC unroll 4
            for (int64_t part = 0; part < VECTORS; part++)
                sums[part][n % CHAINS] = add_pairs(sums[part][n % CHAINS], widen<CODES>(codes[part], n), pair);
        }
    }
#pragma GCC unroll 4
    for (int64_t part = 0; part < VECTORS; part++) {
        for (int64_t chain = 1; chain < CHAINS; chain++) sums[part][0] += sums[part][chain];
        totals[part] = group.add(totals[part], sums[part][0], part, scale, input_sum);
    }
}

/* Adds the products of pair `k` of a group with the rows to their sums. */
template <int ROWS>
INLINE void add_pair(Integers (&sums)[ROWS][VECTORS], const Pairs (&pair)[VECTORS], const int16_t *codes, int64_t stride, int64_t k) {
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; r++) {
        const Pairs own = pair_of(codes + r * stride + 2 * k);
#pragma GCC unroll 4
        for (int64_t part = 0; part < VECTORS; part++) sums[r][part] = add_pairs(sums[r][part], pair[part], own);
    }
}

/* Adds one group to the totals [rows, 32] of rows from `row` on: from `pairs`, its codes if they are widened already,
 * otherwise from its `num_words` words. */
template <Codes CODES, int ROWS, bool IS_WIDENED>
INLINE void add_to_rows(const Group &group, const uint32_t *words, int64_t num_words, const Pairs (*pairs)[VECTORS],
                        const Inputs &inputs, int64_t row, int64_t number, float *totals) {
    Integers sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t part = 0; part < VECTORS; part++)
            sums[r][part] = group.start(inputs.sums[(row + r) * inputs.groups + number]);
    const int64_t stride = inputs.groups * inputs.group;
    const int16_t *codes = inputs.codes + row * stride + number * inputs.group;
    if constexpr (IS_WIDENED) {
        for (int64_t k = 0; k < inputs.group / 2; k++) add_pair<ROWS>(sums, pairs[k], codes, stride, k);
    } else
        for (int64_t k = 0; k < num_words; k++, words += PANEL) {
            prefetch_word(words + WORDS_AHEAD * PANEL);
            Pairs own[VECTORS];
            for (int64_t part = 0; part < VECTORS; part++) own[part] = *(const LoosePairs *)(words + part * LANES);
#pragma GCC unroll 4
            for (int n = 0; n < PAIRS<CODES>; n++) {
                Pairs pair[VECTORS];
                for (int64_t part = 0; part < VECTORS; part++) pair[part] = widen<CODES>(own[part], n);
                add_pair<ROWS>(sums, pair, codes, stride, k * PAIRS<CODES> + n);
            }
        }
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int64_t part = 0; part < VECTORS; part++) {
            LooseFloats *total = (LooseFloats *)(totals + r * PANEL + part * LANES);
            const int64_t at = (row + r) * inputs.groups + number;
            *total = group.add(*total, sums[r][part], part, inputs.scales[at], inputs.sums[at]);
        }
}

/* Adds one group to the totals of `rows` rows, fewer than fit into the registers or as many. */
template <Codes CODES, bool IS_WIDENED>
INLINE void add_to_few_rows(const Group &group, const uint32_t *words, int64_t num_words, const Pairs (*pairs)[VECTORS],
                            const Inputs &inputs, int64_t row, int64_t rows, int64_t number, float *totals) {
    switch (rows) {
#define ROWS(COUNT) \
    case COUNT: add_to_rows<CODES, COUNT, IS_WIDENED>(group, words, num_words, pairs, inputs, row, number, totals); break;
        ROWS(1) ROWS(2) ROWS(3)
#if defined(__AVX512F__)
        ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#endif
#undef ROWS
    }
}

/* Writes the products of rows [first, first + rows) with one panel to `totals`. */
template <Codes CODES>
static void multiply_quantised(const Quantised &matrix, const uint32_t *words, int64_t panel, const Inputs &inputs,
                               int64_t first, int64_t rows, float (*totals)[PANEL]) {
    const int64_t num_words = matrix.group * BITS<CODES> / 32, before = panel * inputs.groups;
    words += before * num_words * PANEL;
    if (rows == 1) {
        Floats own[VECTORS] = {};
        for (int64_t n = 0; n < inputs.groups; n++, words += num_words * PANEL) {
            const int64_t at = first * inputs.groups + n;
            add_to_row<CODES>(Group(matrix, before + n), words, num_words, inputs.codes + at * inputs.group,
                             inputs.scales[at], inputs.sums[at], own);
        }
        memcpy(totals, own, sizeof own);
        return;
    }
    memset(totals, 0, rows * sizeof *totals);
    for (int64_t n = 0; n < inputs.groups; n++, words += num_words * PANEL) {
        const Group group(matrix, before + n);
        const auto add = [&]<bool IS_WIDENED>(const Pairs (*pairs)[VECTORS]) {
            for (int64_t row = 0; row < rows; row += ROWS_IN_REGISTERS)
                add_to_few_rows<CODES, IS_WIDENED>(group, words, num_words, pairs, inputs, first + row,
                                                   least(ROWS_IN_REGISTERS, rows - row), n, totals[row]);
        };
        if (!WIDENS_ONCE || rows <= ROWS_IN_REGISTERS) {
            add.template operator()<false>(nullptr);
            continue;
        }
        Pairs pairs[MOST_GROUP / 2][VECTORS];
        for (int64_t k = 0; k < num_words; k++) {
            prefetch_word(words + (num_words + k) * PANEL);
            for (int64_t part = 0; part < VECTORS; part++) {
                const Pairs codes = *(const LoosePairs *)(words + k * PANEL + part * LANES);
#pragma GCC unroll 4
                for (int p = 0; p < PAIRS<CODES>; p++) pairs[k * PAIRS<CODES> + p][part] = widen<CODES>(codes, p);
            }
        }
        add.template operator()<true>(pairs);
    }
}

/* Calls finish(row, panel, sums) for each of `rows` and panels [from, to). */
template <typename Finish>
static void quantised_product(const Quantised &matrix, const void *panels, const float *bias, const Inputs &inputs,
                              int64_t rows, int64_t from, int64_t to, const Finish &finish) {
    float totals[ROWS_PER_PANEL][PANEL];
    for (int64_t first = 0; first < rows; first += ROWS_PER_PANEL)
        for (int64_t panel = from; panel < to; panel++) {
            const int64_t count = least(ROWS_PER_PANEL, rows - first);
            const auto multiply = matrix.is_float    ? multiply_quantised<FLOAT4>
                                  : matrix.bits == 4 ? multiply_quantised<INT4>
                                                     : multiply_quantised<INT8>;
            multiply(matrix, (const uint32_t *)panels, panel, inputs, first, count, totals);
            for (int64_t row = 0; row < count; row++) {
                PanelSums sums;
                for (int64_t n = 0; n < VECTORS; n++) {
                    sums[n] = load(totals[row] + n * LANES);
                    if (bias != nullptr) sums[n] += load(bias + panel * PANEL + n * LANES);
                }
                finish(first + row, panel, sums);
            }
        }
}
