/* Who holds the leading blocks of a chain, 64 holders to a word, and how far each of them goes without a gap.
 *
 * As slot_index.c: Python allocates all memory and checks all bounds.
 */
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))
#define WORD_BITS 64

static void end_runs(uint64_t bits, int64_t length, int64_t *runs) {
    for (; bits; bits &= bits - 1) runs[__builtin_ctzll(bits)] = length;
}

/* `held`: [words][blocks], written; `runs`: [words * 64], written. */
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
