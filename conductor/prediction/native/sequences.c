/* Sequences at decode instances: sums of their loads at a few instants, and decode step times with a newcomer.
 *
 * Python allocates all memory and checks all bounds; one thread uses it.
 */
#include <math.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

enum { RUNNING, CONTEXT, HELD, NUM_SUMS };
enum { NOW, LANDING, LATER, NUM_LOOKS };

/* Indexed by slot, except `sums`, which is by instance, and `instants`. */
typedef struct {
    const int64_t *owner;
    const double *tokens, *most, *begins_at, *as_of, *generated, *step_s, *end_rate;
    double *shapes; /* [slots][NUM_SUMS][num_instants] */
    double *sums; /* [instances][NUM_SUMS][num_instants] */
    const double *instants;
} Sequences;

/* Indexed by row of the table of decode instances. */
typedef struct {
    const int64_t *number; /* of the instance in `sums` */
    const double *most_seqs, *c0, *c1, *c2, *other_seqs, *other_tokens;
    const int64_t *free_blocks;
} Decodes;

/* In the order of `_WEIGH_ARGUMENTS` in c_bindings.py. `after`: an integer, the index of the instant at or after the look. */
typedef struct {
    double after[NUM_LOOKS], weight[NUM_LOOKS], own_tokens[NUM_LOOKS];
    double num_overtaking, expected_output, needed_blocks, block_size;
} Question;

/* Results for each instance with the newcomer, [instances] each. */
enum { SEQS, TOKENS, LANDING_SEQS, LANDING_TOKENS, SPARE, TBT, LANDING_TBT, LATER_TBT };

static double most(double a, double b) { return a > b ? a : b; }
static double least(double a, double b) { return a < b ? a : b; }

/* A sequence that begins after an instant and ends before the next one would count at neither. Here it counts at both,
 * weighted by the share of the time between them that it runs. */
static void draw_short(const Sequences *all, int64_t slot, int64_t count, double mean_s, double *shape) {
    double as_of = all->as_of[slot], first = all->tokens[slot] + all->generated[slot];
    for (int64_t i = 1; i < count; i++) {
        double before = all->instants[i - 1], after = all->instants[i];
        if (!(before < as_of && as_of < after)) continue;
        double share = mean_s / (after - before);
        if (share >= 1.0) return;
        double held = share * (first + mean_s / all->step_s[slot] / 2.0);
        for (int64_t k = i - 1; k < count; k++) {
            shape[RUNNING * count + k] = k <= i ? share : 0.0;
            shape[CONTEXT * count + k] = k <= i ? held : 0.0;
            if (k >= i) shape[HELD * count + k] = k == i ? held : 0.0;
        }
        return;
    }
}

static void draw(const Sequences *all, int64_t slot, int64_t count, double *shape) {
    double as_of = all->as_of[slot], step_s = all->step_s[slot], rate = -all->end_rate[slot];
    double left_s = (all->most[slot] - all->generated[slot]) * step_s;
    double first = all->tokens[slot] + all->generated[slot];
    for (int64_t i = 0; i < count; i++) {
        double instant = all->instants[i], passed_s = most(instant - as_of, 0.0);
        /* The sequence exists now, whatever `as_of` is: it can end only in the time after now. */
        double at_risk_s = least(passed_s, instant - all->instants[0]);
        double likely = passed_s < left_s ? exp(at_risk_s * rate) : 0.0;
        double held = (passed_s / step_s + first) * likely;
        int runs = instant >= all->begins_at[slot] && likely > 0.0;
        shape[RUNNING * count + i] = runs ? likely : 0.0;
        shape[CONTEXT * count + i] = runs ? held : 0.0;
        shape[HELD * count + i] = held;
    }
    draw_short(all, slot, count, 1.0 / (1.0 / most(left_s, step_s) - rate), shape);
}

/* Recomputes the shapes of the slots and adds the differences to the sums, or with `afresh` the whole shapes. */
PUBLIC void sequences_draw(const Sequences *all, const int64_t *slots, int64_t num_slots, int64_t count,
                           int32_t afresh) {
    int64_t size = NUM_SUMS * count;
    for (int64_t i = 0; i < num_slots; i++) {
        double *shape = all->shapes + slots[i] * size, *sum = all->sums + all->owner[slots[i]] * size;
        if (!afresh)
            for (int64_t k = 0; k < size; k++) sum[k] -= shape[k];
        draw(all, slots[i], count, shape);
        for (int64_t k = 0; k < size; k++) sum[k] += shape[k];
    }
}

PUBLIC void sequences_add(const Sequences *all, int64_t slot, int64_t count) {
    sequences_draw(all, &slot, 1, count, 1);
}

static double between(const double *sums, int64_t after, double weight) {
    return most(sums[after - 1] * (1.0 - weight) + sums[after] * weight, 0.0);
}

PUBLIC void sequences_weigh(const Sequences *all, int64_t count, const Decodes *decodes, int64_t num_rows,
                            const Question *asked, double *out, uint8_t *has_slot) {
    for (int64_t row = 0; row < num_rows; row++) {
        const double *sums = all->sums + decodes->number[row] * NUM_SUMS * count;
        double slots = decodes->most_seqs[row], seqs[NUM_LOOKS], tokens[NUM_LOOKS], held[NUM_LOOKS], step_s[NUM_LOOKS];
        for (int look = NOW; look < NUM_LOOKS; look++) {
            int64_t after = (int64_t)asked->after[look];
            double weight = asked->weight[look];
            double num = most(between(sums + RUNNING * count, after, weight) + decodes->other_seqs[row], 0.0) + 1.0;
            double context = most(between(sums + CONTEXT * count, after, weight) + decodes->other_tokens[row], 0.0);
            double more = look == NOW ? 0.0 : asked->num_overtaking; /* each as long as the mean of the present ones */
            tokens[look] = (context + asked->own_tokens[look]) * (1.0 + more / num);
            seqs[look] = num + more;
            held[look] = between(sums + HELD * count, after, weight);
            double running = least(seqs[look], slots);
            step_s[look] = decodes->c0[row] + decodes->c1[row] * running
                + decodes->c2[row] * (tokens[look] * running / seqs[look]);
        }
        /* Blocks left for others at the worst of these instants, with the newcomer's whole output. */
        double grown = most(held[LANDING], held[LATER]) - held[NOW] + asked->expected_output;
        double spare = (double)decodes->free_blocks[row] - asked->needed_blocks - grown / asked->block_size;
        double results[] = {seqs[NOW], tokens[NOW], seqs[LANDING], tokens[LANDING],
                            spare, step_s[NOW], step_s[LANDING], step_s[LATER]};
        for (int k = SEQS; k <= LATER_TBT; k++) out[k * num_rows + row] = results[k];
        has_slot[row] = seqs[LANDING] <= slots;
    }
}
