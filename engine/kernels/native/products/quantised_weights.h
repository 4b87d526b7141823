/* Weights of 4 or 8 bits, which stay codes in memory, and the integers that their products take as inputs.
 *
 * Weights [out, in] have one scale, and maybe one zero point or minimum, per output and group of inputs: weight =
 * (code - zero) · scale, or code · scale - minimum; codes of MXFP4 stand for integers, twice its numbers. Each row of the
 * input becomes integers of 16 bits with a scale per group, the highest magnitude divided by 32,639: 2⁻¹⁶ of it is lost,
 * where bfloat16 loses 2⁻⁹ of each value. So the sum over a group is exact in 32 bits, in any order. It is multiplied by
 * both scales and added to the output's running sum, group by group: a row's result does not depend on the other rows, the
 * threads, the width of the vectors or the matrix unit.
 *
 * Panels have 32 outputs like matrix_product.h: for each word of inputs (8 of 4 bits, 4 of 8 bits, the first one in the
 * lowest bits), the words of these outputs.
 */
#pragma once

#include "../tiles.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int64_t MOST_GROUP = 128;
constexpr int64_t FEWEST_IN_TILES = 160; /* inputs of a group, in all rows; vectors are faster with fewer */
constexpr float HIGHEST = 32639.0f; /* code of an input: 127 · 256 + 127, so that both bytes have a sign */
constexpr int64_t WORDS_AHEAD = 48;    /* words of the input: codes are prefetched this far ahead */

typedef uint16_t Sixteen __attribute__((vector_size(32)));
typedef uint8_t SixteenBytes __attribute__((vector_size(16)));
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

/* Rows of the input as integers, in one of two layouts. For vectors: int16 [rows, groups · group], each word's in the order
 * of pairs. For tiles: by blocks of 16 rows, groups, and steps of as many inputs as a row of a tile has; a step has the
 * rows' high bytes and then their low ones, both with sign, each word's even inputs before the odd ones if weights have 4
 * bits. */
struct Inputs {
    char *codes;
    float *scales; /* [groups, rows] */
    int32_t *sums; /* [groups, rows]: of the codes, times -zero if it is the same for all weights */
    int64_t groups, group, rows;
    int64_t tile_rows; /* with those that fill up the last tile, which have any contents; 0: the layout is for vectors */

    /* `memory` has room for bytes(matrix, count) bytes. */
    Inputs(const Quantised &matrix, int64_t count, void *memory)
        : codes((char *)memory), groups((matrix.inputs + matrix.group - 1) / matrix.group), group(matrix.group), rows(count),
          tile_rows(rows * matrix.group >= FEWEST_IN_TILES && has_tiles() ? filled_up(rows) : 0) {
        scales = (float *)(codes + filled_up(rows) * groups * group * 2);
        sums = (int32_t *)(scales + rows * groups);
    }
    static int64_t bytes(const Quantised &matrix, int64_t rows) {
        const int64_t groups = (matrix.inputs + matrix.group - 1) / matrix.group;
        return filled_up(rows) * groups * (2 * matrix.group + 8);
    }

    int64_t place(int64_t row, int64_t number) const { return number * rows + row; }
    const int16_t *pairs(int64_t row, int64_t number) const {
        return (const int16_t *)codes + (row * groups + number) * group;
    }
    int64_t step() const { return least(group, TILE_BYTES); }
    bool is_one_tile() const { return 2 * tile_rows <= TILE_ROWS; } /* high and low bytes of a step */
    int64_t rows_of_block(int64_t row) const { return least(TILE_ROWS, tile_rows - row / TILE_ROWS * TILE_ROWS); }

    /* Returns a row's high bytes of the step that begins at input `from` of group `number`. */
    char *tile(int64_t row, int64_t number, int64_t from) const {
        const int64_t own = row % TILE_ROWS;
        return codes + 2 * ((row - own) * groups * group + rows_of_block(row) * (number * group + from)) + own * step();
    }

    /* Stores 16 codes from input `from` of a group on. */
    void store(int64_t row, int64_t number, int64_t from, Sixteen values, int64_t bits) const {
        if (tile_rows == 0) {
            values = bits == 4 ? __builtin_shufflevector(values, values, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                               : __builtin_shufflevector(values, values, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
            memcpy(codes + 2 * ((row * groups + number) * group + from), &values, sizeof values);
            return;
        }
        if (bits == 4) values = __builtin_shufflevector(values, values, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        const SixteenBytes high = __builtin_convertvector((values + 128) >> 8, SixteenBytes);
        const SixteenBytes low = __builtin_convertvector(values, SixteenBytes);
        char *to = tile(row, number, from / step() * step()) + from % step();
        memcpy(to, &high, sizeof high);
        memcpy(to + rows_of_block(row) * step(), &low, sizeof low);
    }
};

/* Stores `count` values, at most a group, as group `number` of a row. A value that is not finite makes the scale so. */
template <typename T>
INLINE void store_group(const Quantised &matrix, const T *from, int64_t count, const Inputs &inputs, int64_t row, int64_t number) {
    Words highest = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Words magnitude = (Words)load_some(from + i, count - i) & 0x7fffffffu;
        highest = magnitude > highest ? magnitude : highest;
    }
    uint32_t pattern = 0;
    for (int64_t lane = 0; lane < LANES; lane++) pattern = highest[lane] > pattern ? highest[lane] : pattern;
    float most;
    memcpy(&most, &pattern, sizeof most);
    const int64_t place = inputs.place(row, number);
    inputs.scales[place] = most / HIGHEST;
    const float inverse = most > 1e-30f && pattern < 0x7f800000u ? HIGHEST / most : 0.0f;
    const Floats shift = splat(12582912.0f); /* 1.5 · 2²³: adding it rounds to an integer */
    Integers total = {};
    for (int64_t i = 0; i < inputs.group; i += 16) {
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
        inputs.store(row, number, i, sixteen, matrix.bits);
    }
    int32_t added = 0;
    for (int64_t lane = 0; lane < LANES; lane++) added += total[lane];
    if (matrix.has_one_zero()) added *= matrix.bits == 4 && !matrix.is_float ? -8 : 0;
    inputs.sums[place] = added;
}

template <typename T> static void store_row(const Quantised &matrix, const T *from, const Inputs &inputs, int64_t row) {
    for (int64_t n = 0, at = 0; n < inputs.groups; n++, at += inputs.group)
        store_group(matrix, from + at, least(inputs.group, matrix.inputs - at), inputs, row, n);
}

enum Codes { INT4, INT8, FLOAT4 };
template <Codes CODES> constexpr int64_t BITS = CODES == INT8 ? 8 : 4;
template <Codes CODES> constexpr int64_t PAIRS = 16 / BITS<CODES>; /* of a word */

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
