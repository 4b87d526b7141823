/* The matrix unit of a processor (Intel AMX): eight registers, each a tile of 16 rows of 64 bytes. */
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define TILES 0
#endif

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_BYTES = 64; /* of a row */

constexpr int64_t up_to_multiple(int64_t value, int64_t of) { return (value + of - 1) / of * of; }

/* Returns `rows` with those that fill up the last tile of several. */
constexpr int64_t filled_up(int64_t rows) { return rows < TILE_ROWS ? rows : up_to_multiple(rows, TILE_ROWS); }

#if TILES
#define ALL_MEMORY __asm__ volatile("" ::: "memory") /* the compiler does not know what tiles read and write */

/* True if the system lets this process use the matrix unit, which takes 8 KiB more when it switches threads. */
[[maybe_unused]] static bool has_tiles() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    static const bool is_allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return is_allowed;
}

/* Sets the shapes of registers: 0 to 3 are sums, 4 and 5 rows of the input, 6 and 7 weights, four bytes of a row's input
 * after the other. */
[[maybe_unused]] static void shape_tiles(int64_t rows, int64_t input_bytes) {
    struct alignas(64) {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {};
    shapes.palette = 1;
    for (int each = 0; each < 8; each++) {
        shapes.row_bytes[each] = (uint16_t)(each == 4 || each == 5 ? input_bytes : TILE_BYTES);
        shapes.rows[each] = (uint8_t)(each < 6 ? least(rows, TILE_ROWS) : input_bytes / 4);
    }
    _tile_loadconfig(&shapes);
}

/* Begins, reads or writes the sums of a panel with a block of one tile or two; the second one's begin `rows` further. */
template <bool TWO> INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
}
template <bool TWO> INLINE void load_sums(const float (*sums)[PANEL], int64_t rows) {
    _tile_loadd(0, sums[0], sizeof *sums);
    _tile_loadd(1, sums[0] + LANES, sizeof *sums);
    if constexpr (TWO) {
        _tile_loadd(2, sums[rows], sizeof *sums);
        _tile_loadd(3, sums[rows] + LANES, sizeof *sums);
    }
}
template <bool TWO, typename Sum> INLINE void store_sums(Sum (*sums)[PANEL], int64_t rows) {
    _tile_stored(0, sums[0], sizeof *sums);
    _tile_stored(1, sums[0] + LANES, sizeof *sums);
    if constexpr (TWO) {
        _tile_stored(2, sums[rows], sizeof *sums);
        _tile_stored(3, sums[rows] + LANES, sizeof *sums);
    }
}
#else
[[maybe_unused]] static bool has_tiles() { return false; }
#endif
