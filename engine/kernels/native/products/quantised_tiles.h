/* Products with weights of 4 or 8 bits by the matrix unit, with the bits of those by vectors (quantised_product.h).
 *
 * The unit multiplies bytes: codes with high bytes of the inputs and with low ones. 256 times the sum of the former and the
 * sum of the latter are the sum over a group, exact in 32 bits. A panel's words of 8 bits are tiles as they are; those of 4
 * bits become two rows of bytes, even inputs and odd ones.
 */
#pragma once

#include "quantised_weights.h"

#if TILES
/* The sums of a block's rows with the high bytes of their inputs, followed by those with the low bytes. */
typedef int32_t TileSums[2 * TILE_ROWS][PANEL];

/* Writes codes of 4 bits as bytes, less `zero`. */
template <Codes CODES> INLINE void spread_codes(const uint32_t *words, int64_t num_words, int64_t zero, uint32_t *bytes) {
    const __m512i nibble = _mm512_set1_epi8(15), zeros = _mm512_set1_epi8((char)zero);
    const __m512i floats = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    for (int64_t k = 0; k < num_words; k++, words += PANEL, bytes += 2 * PANEL)
        for (int64_t part = 0; part < PANEL; part += LANES) {
            const __m512i own = _mm512_loadu_si512(words + part);
            __m512i even = _mm512_and_si512(own, nibble), odd = _mm512_and_si512(_mm512_srli_epi16(own, 4), nibble);
            even = CODES == FLOAT4 ? _mm512_shuffle_epi8(floats, even) : _mm512_sub_epi8(even, zeros);
            odd = CODES == FLOAT4 ? _mm512_shuffle_epi8(floats, odd) : _mm512_sub_epi8(odd, zeros);
            _mm512_storeu_si512(bytes + part, even);
            _mm512_storeu_si512(bytes + PANEL + part, odd);
        }
}

/* Multiplies a block of rows, from `row` on, with a group of a panel. High and low bytes of few rows fit into one tile. */
template <bool TWO>
INLINE void multiply_tiles(const Inputs &inputs, int64_t row, int64_t number, const uint32_t *bytes, TileSums &sums) {
    const int64_t step = inputs.step(), rows = inputs.rows_of_block(row);
    zero_sums<TWO>();
    for (int64_t from = 0; from < inputs.group; from += step, bytes += step / 4 * PANEL) {
        const char *own = inputs.tile(row, number, from);
        _tile_loadd(4, own, step);
        _tile_loadd(6, bytes, PANEL * sizeof *bytes);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, bytes + LANES, PANEL * sizeof *bytes);
        _tile_dpbssd(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, own + rows * step, step);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    store_sums<TWO>(sums, rows);
}

/* Adds the sums of a group to the totals of a block's `rows` rows, from `row` on. */
template <bool HAS_ONE_ZERO>
INLINE void add_sums(const Group &group, const Inputs &inputs, int64_t row, int64_t rows, int64_t number, const TileSums &sums,
                     float (*totals)[PANEL]) {
    const int32_t(*low)[PANEL] = sums + inputs.rows_of_block(row);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = inputs.place(row + r, number);
        const float scale = inputs.scales[at];
#pragma GCC unroll 2
        for (int64_t part = 0; part < VECTORS; part++) {
            const int64_t lane = part * LANES;
            const Integers sum = (*(const Integers *)(sums[r] + lane) << 8) + *(const Integers *)(low[r] + lane);
            LooseFloats *total = (LooseFloats *)(totals[r] + lane);
            if constexpr (HAS_ONE_ZERO) *total += (__builtin_convertvector(sum, Floats) * scale) * group.scales[part];
            else *total = group.add(*total, sum, part, scale, inputs.sums[at]);
        }
    }
}

/* Writes the products of rows [first, first + rows) with one panel to `totals`. The caller has set the shapes of tiles. */
template <Codes CODES, bool HAS_ONE_ZERO>
static void multiply_by_tiles(const Quantised &matrix, const uint32_t *words, int64_t panel, const Inputs &inputs,
                              int64_t first, int64_t rows, float (*totals)[PANEL]) {
    const int64_t num_words = matrix.group * BITS<CODES> / 32, before = panel * inputs.groups;
    constexpr int64_t ZERO = HAS_ONE_ZERO && CODES == INT4 ? 8 : 0;
    words += before * num_words * PANEL;
    memset(totals, 0, rows * sizeof *totals);
    alignas(64) uint32_t spread[MOST_GROUP / 4 * PANEL];
    alignas(64) TileSums sums;
    for (int64_t n = 0; n < inputs.groups; n++, words += num_words * PANEL) {
        const Group group(matrix, before + n);
        for (int64_t k = 0; k < num_words; k++) prefetch_word(words + (k + WORDS_AHEAD) * PANEL);
        if constexpr (CODES != INT8) spread_codes<CODES>(words, num_words, ZERO, spread);
        const uint32_t *bytes = CODES == INT8 ? words : spread;
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            ALL_MEMORY;
            if (inputs.is_one_tile()) multiply_tiles<false>(inputs, first + row, n, bytes, sums);
            else multiply_tiles<true>(inputs, first + row, n, bytes, sums);
            ALL_MEMORY;
            add_sums<HAS_ONE_ZERO>(group, inputs, first + row, least(TILE_ROWS, rows - row), n, sums, totals + row);
        }
    }
}
#endif
