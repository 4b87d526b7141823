/* Products with weights of 4 or 8 bits by vectors, or by the matrix unit (quantised_tiles.h).
 *
 * A shift brings one code from each half of a word into 16-bit lanes, so the codes of a row are stored in the order of pairs.
 */
#pragma once

#include "quantised_tiles.h"

#if defined(__AVX512F__)
constexpr int64_t ROWS_IN_REGISTERS = 8;
constexpr bool WIDENS_ONCE = false; /* widening again for each few rows is faster than reading widened codes again */
constexpr int64_t CHAINS = 2; /* sums of one output in a product of one row: they hide the latency of a fused product */
#else
constexpr int64_t ROWS_IN_REGISTERS = 3;
constexpr bool WIDENS_ONCE = true;
constexpr int64_t CHAINS = 1;
#endif
constexpr int64_t ROWS_PER_PANEL = 64; /* rows that use a panel before the next one: their sums stay in the cache */

typedef int16_t Pairs __attribute__((vector_size(REGISTER)));
typedef int16_t LoosePairs __attribute__((vector_size(REGISTER), aligned(4), may_alias));
typedef uint16_t Unsigned __attribute__((vector_size(REGISTER)));

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
            sums[r][part] = group.start(inputs.sums[inputs.place(row + r, number)]);
    const int64_t stride = inputs.groups * inputs.group;
    const int16_t *codes = inputs.pairs(row, number);
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
            const int64_t at = inputs.place(row + r, number);
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
            const int64_t at = inputs.place(first, n);
            add_to_row<CODES>(Group(matrix, before + n), words, num_words, inputs.pairs(first, n),
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

/* Returns the function that multiplies rows with a panel. */
template <Codes CODES> static auto multiplication([[maybe_unused]] const Quantised &matrix, [[maybe_unused]] const Inputs &inputs) {
#if TILES
    if (inputs.tile_rows > 0) return matrix.has_one_zero() ? multiply_by_tiles<CODES, true> : multiply_by_tiles<CODES, false>;
#endif
    return multiply_quantised<CODES>;
}

/* Calls finish(row, panel, sums) for each of `rows` and panels [from, to). */
template <typename Finish>
static void quantised_product(const Quantised &matrix, const void *panels, const float *bias, const Inputs &inputs,
                              int64_t rows, int64_t from, int64_t to, const Finish &finish) {
    alignas(64) float totals[ROWS_PER_PANEL][PANEL];
    const auto multiply = matrix.is_float    ? multiplication<FLOAT4>(matrix, inputs)
                          : matrix.bits == 4 ? multiplication<INT4>(matrix, inputs)
                                             : multiplication<INT8>(matrix, inputs);
#if TILES
    if (inputs.tile_rows > 0) shape_tiles(inputs.is_one_tile() ? 2 * inputs.tile_rows : inputs.tile_rows, inputs.step());
#endif
    for (int64_t first = 0; first < rows; first += ROWS_PER_PANEL)
        for (int64_t panel = from; panel < to; panel++) {
            const int64_t count = least(ROWS_PER_PANEL, rows - first);
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
#if TILES
    if (inputs.tile_rows > 0) _tile_release(); /* so that the system need not save registers of an idle thread */
#endif
}
