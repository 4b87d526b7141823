/* Predicts TTFT at prefill instances, and the waits in their queues by rank.
 *
 * Python allocates all memory and checks all bounds; one thread uses it. Sums are added in the same order as in Python,
 * so that both give the same numbers.
 */
#include <math.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

/* One row per instance, as in `Offers` of conductor/placement/policies/base.py. */
typedef struct {
    const int64_t *device_blocks, *prefix_blocks;
    const double *queue_s, *local_s, *remote_s, *c0, *c1, *c2;
} Offers;

enum { LOAD, TRANSFER, PREFILL, TTFT, NUM_TERMS };

static double least(double a, double b) { return a < b ? a : b; }
static double positive(double a) { return a > 0.0 ? a : 0.0; }

static void predict(const Offers *offers, int64_t row, double num_tokens, double block_size, int64_t reuse,
                    double *terms) {
    int64_t prefix = offers->prefix_blocks[row];
    double cached = (double)reuse * block_size;
    terms[LOAD] = (double)(prefix - offers->device_blocks[row]) * offers->local_s[row];
    terms[TRANSFER] = (double)(reuse - prefix) * offers->remote_s[row];
    terms[PREFILL] = offers->c0[row] + offers->c1[row] * (num_tokens - cached)
        + offers->c2[row] * (num_tokens * num_tokens - cached * cached);
    terms[TTFT] = terms[LOAD] + terms[TRANSFER] + offers->queue_s[row] + terms[PREFILL];
}

/* Predicts with the missing blocks of the best prefix computed or fetched, whichever is faster. Writes `reuse` and
 * `out` [NUM_TERMS + 1][count], whose last row is the time that computing the missing blocks takes. */
PUBLIC void prefills_faster(const Offers *offers, int64_t count, double num_tokens, double block_size,
                            int64_t best_blocks, int64_t *reuse, double *out) {
    for (int64_t row = 0; row < count; row++) {
        double computed[NUM_TERMS], fetched[NUM_TERMS];
        int64_t own = offers->prefix_blocks[row], best = own > best_blocks ? own : best_blocks;
        predict(offers, row, num_tokens, block_size, own, computed);
        predict(offers, row, num_tokens, block_size, best, fetched);
        int is_faster = fetched[TTFT] < computed[TTFT];
        const double *terms = is_faster ? fetched : computed;
        for (int k = 0; k < NUM_TERMS; k++) out[k * count + row] = terms[k];
        out[NUM_TERMS * count + row] = computed[PREFILL] - fetched[PREFILL];
        reuse[row] = is_faster ? best : own;
    }
}

/* Prompts that wait at one instance, in order, and the running one; see `QueueRecord` in c_bindings.py. */
typedef struct {
    const double *places; /* of the waiting prompts */
    const double *sums; /* prefill seconds before each of them, and of all */
    double count, is_running, running_place, running_s, began_at, step_s, surplus_s;
} Queue;

/* Terms of least_added_delay.py; `prices` is not 0 if there is a steepness. */
typedef struct {
    double patience, keeps_objective, prices, steepness, late, late_patience, counts_delayed, copy;
} Terms;

/* Quantiles of recent TTFTs in order of arrival, 99 %, and of prefill times, 99.3 %; moving average of the instances'
 * mean wait. Begins with 1, 1, 0, 0. */
typedef struct {
    double ttft_s, long_s, mean_queue_s, as_of;
} ArrivalOrder;

/* Bounds by the order of arrival: the instances' mean wait; TTFT of prompts in time whose prefill is short beside it, and
 * of late ones with a prefill up to `long_s`. */
typedef struct {
    double mean_s, ttft_s, long_s, late_s;
} Bounds;

/* Prompts in time yield for a share of the mean wait; those whose prefill is at most SHORT mean waits also at most until
 * the quantile of the TTFT. Longer ones are near it: if they yielded less than short ones, they would overtake them. */
static const double SHARE = 0.5, SHORT = 2.0;
static const double BURST_S = 1e-3; /* as in tenant_fairness.py: earlier prompts at the same instant come first */

static const double GROWTH_S = 60.0, MAX_GROWTH = 0.95; /* of queues: time constant, seconds per second */
static const double QUANTILE_STEP = 0.1; /* relative, upwards; downwards a small share of it */

static double moved(double quantile, double value, double share) {
    return quantile * exp(QUANTILE_STEP * (value > quantile ? share : share - 1.0));
}

/* Returns the bounds of a prompt, then learns from it. The backlog is about the same in any order, so the wait in order
 * of arrival is that behind all queued work. A late prompt may wait as long as new ones will by then: if queues grow by
 * g seconds per second, queue / (1 - g)^2. (The waits are equal after queue / (1 - g); the square is tuned.) */
static Bounds bound(ArrivalOrder *order, const double *prefill_s, const double *ttft_s, const double *queue_s,
                    int64_t count, double now) {
    double best_prefill_s = INFINITY, best_ttft_s = INFINITY, mean_s = 0.0;
    for (int64_t i = 0; i < count; i++) {
        best_prefill_s = least(best_prefill_s, prefill_s[i]);
        best_ttft_s = least(best_ttft_s, ttft_s[i]);
        mean_s += queue_s[i] / (double)count;
    }
    double passed_s = positive(now - order->as_of);
    order->mean_queue_s += (mean_s - order->mean_queue_s) * -expm1(-passed_s / GROWTH_S);
    order->as_of += passed_s;
    double growth = least(positive(mean_s - order->mean_queue_s) / GROWTH_S, MAX_GROWTH);
    double late_s = mean_s / ((1.0 - growth) * (1.0 - growth));
    Bounds found = {mean_s, order->ttft_s, order->long_s, late_s};
    order->ttft_s = moved(order->ttft_s, best_ttft_s, 0.99);
    order->long_s = moved(order->long_s, best_prefill_s, 0.993);
    return found;
}

static int64_t number_up_to(const Queue *queue, double place) {
    int64_t low = 0, high = (int64_t)queue->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (queue->places[middle] <= place) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Returns the seconds until a prompt that arrives now with `rank` begins. Writes how many prompts it overtakes. */
static double look(const Queue *queue, double now, double rank, double *num_delayed) {
    double place = now + rank, passed_s = now - queue->began_at;
    int64_t before = number_up_to(queue, place);
    double left_s = queue->running_s - (passed_s > 0.0 ? passed_s : 0.0);
    if (queue->is_running == 0.0 || left_s < 0.0) left_s = 0.0;
    *num_delayed = queue->count - (double)before;
    if (queue->is_running != 0.0 && place < queue->running_place && left_s > queue->step_s) {
        *num_delayed += 1.0;
        left_s = queue->step_s;
    }
    return left_s + queue->sums[before] + queue->surplus_s;
}

/* Returns for how long a prompt lets others pass (terms 1 to 4 of least_added_delay.py). `queue_s`: its wait if it goes
 * before all late prompts. */
static double yields_s(double prefill_s, double queue_s, double slo_s, const Terms *terms, const Bounds *bounds) {
    double patience_s = terms->patience * prefill_s;
    if (isinf(slo_s)) return patience_s;
    double left = slo_s > 0.0 ? positive(1.0 - queue_s / slo_s) : 0.0;
    if (terms->prices != 0.0 && prefill_s > slo_s * pow(left, terms->steepness)) {
        double late_s = terms->late * slo_s + terms->late_patience * prefill_s;
        return prefill_s > bounds->long_s ? 2.0 * late_s : least(late_s, positive(bounds->late_s - prefill_s));
    }
    patience_s = least(patience_s, SHARE * bounds->mean_s);
    if (prefill_s <= SHORT * bounds->mean_s) patience_s = least(patience_s, positive(bounds->ttft_s - queue_s - prefill_s));
    if (terms->keeps_objective == 0.0) return patience_s;
    return least(patience_s, positive(slo_s - queue_s - prefill_s));
}

/* Writes rank, wait and added wait of others at one instance. `queue_s`: seconds until all its prompts have run. Ranks
 * are capped at `limit` and then shifted by `shift_s`. */
static void look_at(const Queue *queue, const Terms *terms, const Bounds *bounds, double now, double slo_s,
                    double prefill_s, double queue_s, double limit, double shift_s, double *rank, double *wait_s,
                    double *added_s) {
    double num_delayed = 0.0;
    if (queue_s == 0.0) {
        *rank = yields_s(prefill_s, 0.0, slo_s, terms, bounds);
        *wait_s = *added_s = 0.0;
        return;
    }
    /* Late prompts have ranks beyond the objective until their time comes. */
    double before_late_s = queue_s;
    if (!isinf(slo_s)) before_late_s = look(queue, now, least(slo_s + BURST_S, limit) + shift_s, &num_delayed);
    *rank = yields_s(prefill_s, before_late_s, slo_s, terms, bounds);
    *wait_s = look(queue, now, least(*rank + BURST_S, limit) + shift_s, &num_delayed);
    *added_s = prefill_s * num_delayed;
}

enum { RANK, QUEUE, ADDED, NEW_TTFT, SCORE };

/* Scores the instances in `rows` by their queues; the others count as in order of arrival and are never chosen.
 * `found`: the output of prefills_faster. `limits`: one per instance. `order` bounds ranks. Both may be null. `out`:
 * [SCORE + 1][count]. */
PUBLIC void prefills_weigh(const double *found, const double *queue_s, int64_t count, const int64_t *rows,
                           const Queue *const *queues, int64_t num_rows, const Terms *terms, ArrivalOrder *order,
                           double now, double slo_s, const double *limits, double shift_s, double *out) {
    const double *prefill_s = found + PREFILL * count, *ttft_s = found + TTFT * count;
    const double *copied_s = found + NUM_TERMS * count;
    double *rank = out + RANK * count, *wait_s = out + QUEUE * count, *added_s = out + ADDED * count;
    double *new_ttft_s = out + NEW_TTFT * count, *score = out + SCORE * count;
    Bounds bounds = {INFINITY, INFINITY, INFINITY, INFINITY};
    if (order) bounds = bound(order, prefill_s, ttft_s, queue_s, count, now);
    for (int64_t i = 0; i < count; i++) {
        rank[i] = added_s[i] = 0.0;
        wait_s[i] = queue_s[i];
        score[i] = INFINITY;
    }
    for (int64_t k = 0; k < num_rows; k++) {
        int64_t i = rows[k];
        double limit = limits ? limits[i] : INFINITY;
        look_at(queues[k], terms, &bounds, now, slo_s, prefill_s[i], queue_s[i], limit, shift_s, &rank[i], &wait_s[i],
                &added_s[i]);
        double cost_s = ttft_s[i] - queue_s[i] + wait_s[i] + terms->copy * copied_s[i];
        score[i] = terms->counts_delayed != 0.0 ? cost_s + added_s[i] : cost_s;
    }
    for (int64_t i = 0; i < count; i++) {
        if (rank[i] > slo_s && wait_s[i] < slo_s) wait_s[i] = slo_s; /* it is known to be late, not how late */
        new_ttft_s[i] = ttft_s[i] - queue_s[i] + wait_s[i];
    }
}
