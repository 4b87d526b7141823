/* Finds the holders of a chain's leading blocks, 64 holders to a word, and each holder's run of blocks without a gap.
 *
 * Python allocates all memory and checks all bounds, as for slot_index.c.
 */
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))
#define WORD_BITS 64

static void end_runs(uint64_t bits, int64_t length, int64_t *runs) {
    for (; bits; bits &= bits - 1) runs[__builtin_ctzll(bits)] = length;
}

/* Writes `held` [words][blocks], the holders of each block, and `runs` [words * 64], each holder's leading blocks. */
PUBLIC void holders_leading(const uint64_t *const *columns, int64_t num_words,
                            const int64_t *slots, int64_t num_blocks, uint64_t *held, int64_t *runs) {
    for (int64_t word = 0; word < num_words; word++) {
        const uint64_t *column = columns[word];
        uint64_t common = num_blocks ? ~(uint64_t)0 : 0;
        int64_t *own = runs + word * WORD_BITS;
        for (int64_t bit = 0; bit < WORD_BITS; bit++) own[bit] = 0;
        for (int64_t i = 0; i < num_blocks; i++) {
            uint64_t now = column[slots[i]];
            held[word * num_blocks + i] = now;
            if (common & ~now) {
                end_runs(common & ~now, i, own);
                common &= now;
            }
        }
        end_runs(common, num_blocks, own);
    }
}
