/* Products of bfloat16 by the matrix unit of a processor (Intel AMX), with the panels of matrix_product.h.
 *
 * A tile has 16 rows of 64 bytes. The unit multiplies 16 rows of the input by 16 outputs over a step of 32 inputs; the
 * sums of 32 rows and a panel, and their inputs and weights, fill its eight registers. Of a step it sums the products of
 * even inputs and those of odd ones, each in one rounding, and adds both sums to the running sum; denormals are 0
 * (TDPBF16PS in Intel's manual). A single row is computed in the same way by other instructions, which read weights faster.
 * So a row's result does not depend on the other rows here either, but it differs from that of matrix_product.h.
 */
#pragma once

#include "matrix_product.h"

constexpr int64_t GROUP = 256; /* most rows of one product */
constexpr int64_t BLOCK = 2 * TILE_ROWS;
constexpr int64_t STEP = 16; /* words of a row */
constexpr int64_t STEP_BYTES = TILE_BYTES;
constexpr int64_t CHUNK = 8; /* steps; a panel's weights of a chunk stay in the L1 cache for all blocks of rows */
constexpr int64_t SPAN = 64; /* steps; the inputs of a span stay in the L2 cache */
constexpr int64_t PANELS_PER_SPAN = 8; /* that use them before the next span; their sums are on the stack, 256 KiB */

/* Rows of the input as tiles are loaded: chunk by chunk, block by block of rows, step by step. */
struct TileRows {
    char *memory;
    int64_t steps; /* the last one is filled up with zeros */
    int64_t rows;  /* with those that fill up the last tile, which have any contents */

    /* `room` has bytes(matrix, count) bytes. */
    TileRows(const Matrix &matrix, int64_t count, void *room)
        : memory((char *)room), steps(up_to_multiple(matrix.words, STEP) / STEP), rows(filled_up(count)) {}

    static int64_t bytes(const Matrix &matrix, int64_t count) {
        const int64_t of_row = up_to_multiple(matrix.words, STEP) * (int64_t)sizeof(uint32_t);
        return count == 1 ? 2 * of_row : filled_up(count) * of_row;
    }

    /* Returns the fewest panels per part of a product. */
    int64_t grain() const { return steps > SPAN && rows > BLOCK ? PANELS_PER_SPAN : 1; }
    int64_t rows_of_block(int64_t first) const { return least(BLOCK, rows - first); }

    /* Returns where steps [from, to), a chunk, of the block of rows from `first` on begin. */
    char *block(int64_t from, int64_t to, int64_t first) const {
        return memory + (from * rows + (to - from) * first) * STEP_BYTES;
    }

    /* Stores a row of the input; a single one as floats. */
    void store(int64_t row, const Bfloat16 *input, int64_t words) const {
        if (rows == 1) {
            for (int64_t i = 0; i < 2 * words; i += LANES) ::store((float *)memory + i, load_some(input + i, 2 * words - i));
            return;
        }
        const int64_t first = row / BLOCK * BLOCK, apart = rows_of_block(first) * STEP_BYTES;
        for (int64_t from = 0; from < steps; from += CHUNK) {
            const int64_t to = least(from + CHUNK, steps);
            char *place = block(from, to, first) + (row - first) * STEP_BYTES;
            for (int64_t step = from; step < to; step++, place += apart, input += 2 * STEP, words -= STEP) {
                if (words < STEP) memset(place, 0, STEP_BYTES);
                memcpy(place, input, words < STEP ? words * sizeof(uint32_t) : STEP_BYTES);
            }
        }
    }
};

#if TILES
/* Adds the products of a block of rows with some steps of a panel to its sums, and prefetches `lines` lines per step. */
template <bool TWO>
INLINE void add_steps(const char *rows, int64_t rows_bytes, const uint32_t *weights, int64_t steps, const char *ahead, int64_t lines) {
    for (int64_t step = 0; step < steps; step++, rows += rows_bytes, weights += STEP * PANEL) {
        for (int64_t line = 0; line < lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        _tile_loadd(6, weights, PANEL * sizeof *weights);
        _tile_loadd(4, rows, STEP_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + LANES, PANEL * sizeof *weights);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, rows + TILE_ROWS * STEP_BYTES, STEP_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* Expands or copies words [from, to) of a panel, which are followed by zeros up to a whole step. `outliers` is behind all
 * cells before them. */
template <bool IS_COMPACT>
INLINE void expand_words(const Matrix &matrix, const char *panel, int64_t from, int64_t to, Outliers &outliers, uint32_t *words) {
    if constexpr (IS_COMPACT) {
        const __m512i exponents = _mm512_loadu_si512(matrix.compact.exponents);
        for (int64_t cell = from / 2; cell < to / 2; cell++, words += 2 * PANEL) {
            Words own[4];
            expand(panel + cell * CELL_BYTES, exponents, own);
            if (__builtin_expect(cell == outliers.cell, 0)) put_back(outliers, own);
            memcpy(words, own, sizeof own);
        }
    } else {
        memcpy(words, (const uint32_t *)panel + from * PANEL, (to - from) * PANEL * sizeof *words);
        words += (to - from) * PANEL;
    }
    memset(words, 0, (up_to_multiple(to, STEP) - to) * PANEL * sizeof *words);
}

/* Calls finish(row, panel, sums) for rows [from, to). */
template <typename Finish>
INLINE void finish_rows(const Matrix &matrix, int64_t panel, int64_t from, int64_t to, const float (*sums)[PANEL], const Finish &finish) {
    for (int64_t row = from; row < to; row++) {
        PanelSums own;
        for (int64_t n = 0; n < VECTORS; n++) {
            own[n] = load(sums[row] + n * LANES);
            if (matrix.bias != nullptr) own[n] += load(matrix.bias + panel * PANEL + n * LANES);
        }
        finish(row, panel, own);
    }
}

/* Multiplies steps [begin, end) of the rows with a panel. The first steps begin its `sums`, others are added, and the last
 * ones finish the first `count` rows. */
template <bool IS_COMPACT, typename Finish>
static void multiply_span(const Matrix &matrix, int64_t panel, int64_t begin, int64_t end, const TileRows &input, int64_t count,
                          float (*sums)[PANEL], const Finish &finish) {
    constexpr int64_t WORD_BYTES = IS_COMPACT ? CELL_BYTES / 2 : PANEL * sizeof(uint32_t), LINES = STEP * WORD_BYTES / 64;
    const char *own = (const char *)matrix.panels + panel * matrix.words * WORD_BYTES;
    Outliers outliers = IS_COMPACT ? Outliers(matrix.compact, panel) : Outliers();
    outliers.skip(begin * STEP / 2);
    alignas(64) uint32_t expanded[CHUNK * STEP * PANEL];
    const bool is_one_block = input.rows <= BLOCK; /* its sums stay in registers */
    const int64_t blocks = up_to_multiple(input.rows, BLOCK) / BLOCK, chunk = IS_COMPACT && is_one_block ? 2 : CHUNK;
    const int64_t ahead = is_one_block ? AHEAD / STEP : CHUNK, lines = (LINES + blocks - 1) / blocks;
    for (int64_t from = begin; from < end; from += chunk) {
        const int64_t to = least(from + chunk, end), last_word = least(to * STEP, matrix.words);
        const uint32_t *weights = (const uint32_t *)own + from * STEP * PANEL;
        if (IS_COMPACT || last_word < to * STEP) {
            expand_words<IS_COMPACT>(matrix, own, from * STEP, last_word, outliers, expanded);
            weights = expanded;
        }
        ALL_MEMORY;
        const char *next = own + (from + ahead) * STEP * WORD_BYTES;
        for (int64_t first = 0; first < input.rows; first += BLOCK, next += lines * (to - from) * 64) {
            const char *rows = input.block(from, to, first);
            const bool begins = from == begin || !is_one_block, ends = to == end || !is_one_block;
            const auto add = [&]<bool TWO>() {
                if (from == 0) zero_sums<TWO>();
                else if (begins) load_sums<TWO>(sums + first, TILE_ROWS);
                add_steps<TWO>(rows, input.rows_of_block(first) * STEP_BYTES, weights, to - from, next, lines);
                if (ends) store_sums<TWO>(sums + first, TILE_ROWS);
            };
            if (input.rows - first > TILE_ROWS) add.template operator()<true>();
            else add.template operator()<false>();
            ALL_MEMORY;
            if (to == input.steps) finish_rows(matrix, panel, first, least(first + BLOCK, count), sums, finish);
        }
    }
}

/* Adds the products of one word of a row, two floats, with a panel's weights to sums of even and of odd inputs. */
INLINE void add_word(const float *input, const Words *weights, __m512 (&sums)[2 * VECTORS]) {
#pragma GCC unroll 2
    for (int64_t n = 0; n < VECTORS; n++) {
        sums[2 * n] = _mm512_fmadd_ps((__m512)(weights[n] << 16), _mm512_set1_ps(input[0]), sums[2 * n]);
        sums[2 * n + 1] = _mm512_fmadd_ps((__m512)(weights[n] & 0xffff0000u), _mm512_set1_ps(input[1]), sums[2 * n + 1]);
    }
}

/* Multiplies a single row with a panel. The caller sets the treatment of denormals, so nothing may move out of here. */
template <bool IS_COMPACT>
static __attribute__((noinline)) void multiply_row(const Matrix &matrix, int64_t panel, const float *input, float *sums) {
    Floats totals[VECTORS] = {};
    Outliers outliers = IS_COMPACT ? Outliers(matrix.compact, panel) : Outliers();
    const __m512i exponents = IS_COMPACT ? _mm512_loadu_si512(matrix.compact.exponents) : __m512i{};
    const char *cell = (const char *)matrix.panels + panel * matrix.words / 2 * CELL_BYTES;
    const uint32_t *weights = (const uint32_t *)matrix.panels + panel * matrix.words * PANEL;
    for (int64_t from = 0; from < matrix.words; from += STEP) {
        const int64_t to = least(from + STEP, matrix.words);
        __m512 step[2 * VECTORS] = {};
        if constexpr (IS_COMPACT)
            for (int64_t k = from; k < to; k += 2, cell += CELL_BYTES, input += 4) {
                Words own[2 * VECTORS];
                expand(cell, exponents, own);
                if (__builtin_expect(k / 2 == outliers.cell, 0)) put_back(outliers, own);
                for (int64_t line = 0; line < CELL_BYTES; line += 64) __builtin_prefetch(cell + AHEAD / 2 * CELL_BYTES + line);
                add_word(input, own, step);
                add_word(input + 2, own + VECTORS, step);
            }
        else
            for (int64_t k = from; k < to; k++, weights += PANEL, input += 2) {
                const Words own[VECTORS] = {*(const LooseWords *)weights, *(const LooseWords *)(weights + LANES)};
                for (int64_t line = 0; line < PANEL; line += 16) __builtin_prefetch(weights + AHEAD * PANEL + line);
                add_word(input, own, step);
            }
        for (int64_t n = 0; n < VECTORS; n++) totals[n] += (Floats)(step[2 * n] + step[2 * n + 1]);
    }
    memcpy(sums, totals, sizeof totals);
}

/* Calls finish(0, panel, sums) for panels [from, to) and a single row. */
template <typename Finish>
static void row_product(const Matrix &matrix, const TileRows &input, int64_t from, int64_t to, const Finish &finish) {
    const auto multiply = matrix.compact.exponents != nullptr ? multiply_row<true> : multiply_row<false>;
    for (int64_t panel = from; panel < to; panel++) {
        alignas(64) float sums[1][PANEL];
        const uint32_t modes = _mm_getcsr();
        _mm_setcsr(modes | _MM_FLUSH_ZERO_ON | 0x40); /* 0x40: operands too */
        ALL_MEMORY;
        multiply(matrix, panel, (const float *)input.memory, sums[0]);
        ALL_MEMORY;
        _mm_setcsr(modes);
        finish_rows(matrix, panel, 0, 1, sums, finish);
    }
}

/* Calls finish(row, panel, sums) for each of `count` rows, at most GROUP, and panels [from, to). */
template <typename Finish>
static void tile_product(const Matrix &matrix, const TileRows &input, int64_t count, int64_t from, int64_t to, const Finish &finish) {
    if (count == 1) return row_product(matrix, input, from, to, finish);
    alignas(64) float sums[PANELS_PER_SPAN][GROUP][PANEL];
    shape_tiles(input.rows, STEP_BYTES);
    const auto multiply = matrix.compact.exponents != nullptr ? multiply_span<true, Finish> : multiply_span<false, Finish>;
    const int64_t together = input.steps > SPAN ? PANELS_PER_SPAN : 1;
    for (int64_t first = from; first < to; first += together) {
        const int64_t last = least(first + together, to);
        for (int64_t begin = 0; begin < input.steps; begin += SPAN)
            for (int64_t panel = first; panel < last; panel++)
                multiply(matrix, panel, begin, least(begin + SPAN, input.steps), input, count, sums[panel - first], finish);
    }
    _tile_release(); /* so that the system need not save registers of an idle thread */
}
#endif
