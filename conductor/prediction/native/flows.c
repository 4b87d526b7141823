/* Flows on links: advances them in time, and predicts how long new flows would take next to them.
 *
 * Python allocates all memory and checks all bounds; one thread uses it.
 */
#include <math.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

/* A row of the table of flows; all integers are below 2**53. */
typedef struct {
    double out, into, left, alone;
} Flow;

typedef struct {
    const int64_t *hosts; /* by endpoint */
    const double *out_rates, *in_rates; /* by link: 2 * endpoint + (1 for the link within its host) */
} Links;

static double least(double a, double b) { return a < b ? a : b; }
static double most(double a, double b) { return a > b ? a : b; }

/* Writes the rate, in bytes per second, of each flow that has bytes left. */
static void share(const Flow *flows, int64_t count, const Links *links, double *num_out, double *num_in,
                  double *shares) {
    for (int64_t i = 0; i < count; i++) num_out[(int64_t)flows[i].out] = num_in[(int64_t)flows[i].into] = 0.0;
    for (int64_t i = 0; i < count; i++) {
        if (!(flows[i].left > 0.0)) continue;
        num_out[(int64_t)flows[i].out] += 1.0;
        num_in[(int64_t)flows[i].into] += 1.0;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t out = (int64_t)flows[i].out, into = (int64_t)flows[i].into;
        if (!(flows[i].left > 0.0)) continue;
        double sent = links->out_rates[out] / num_out[out], received = links->in_rates[into] / num_in[into];
        shares[i] = least(least(sent, received), flows[i].alone);
    }
}

/* Returns the seconds until the next flow ends, at most `most_s`. */
static double next_end(const Flow *flows, int64_t count, const double *shares, double most_s) {
    double step_s = most_s;
    for (int64_t i = 0; i < count; i++)
        if (flows[i].left > 0.0) step_s = least(step_s, flows[i].left / shares[i]);
    return step_s;
}

static void move(Flow *flow, double share, double step_s) {
    if (!(flow->left > 0.0)) return;
    double left = flow->left - share * step_s;
    /* Exactly 0 at its end: a rounding error left over could keep `flows_advance` from ending. */
    flow->left = flow->left / share <= step_s ? 0.0 : left > 0.0 ? left : 0.0;
}

/* Advances the flows by `seconds`. `scratch`: two rows of links and one of flows. */
PUBLIC void flows_advance(Flow *flows, int64_t count, const Links *links, int64_t num_links, double seconds,
                          double *scratch) {
    double *num_out = scratch, *num_in = scratch + num_links, *shares = num_in + num_links;
    while (count && seconds > 0.0) {
        share(flows, count, links, num_out, num_in, shares);
        double step_s = next_end(flows, count, shares, seconds);
        for (int64_t i = 0; i < count; i++) move(&flows[i], shares[i], step_s);
        seconds -= step_s;
    }
}

/* Writes to `received`, by link, the bytes of flows that arrive at each target at the same time as its new bytes. */
static void arriving(const Flow *flows, int64_t count, const int64_t *into, const double *nbytes, int64_t num_targets,
                     double *asked, double *received) {
    for (int64_t i = 0; i < count; i++) asked[(int64_t)flows[i].into] = received[(int64_t)flows[i].into] = 0.0;
    for (int64_t i = 0; i < num_targets; i++) {
        asked[into[i]] = nbytes[i];
        received[into[i]] = 0.0;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t link = (int64_t)flows[i].into;
        received[link] += least(flows[i].left, asked[link]);
    }
}

/* Predicts the duration of a new flow to each target. `measured`: rates from the source to every endpoint, NaN =
 * unknown; may be null. `scratch`: two rows of links and two of flows. Writes each target's link to `into`. */
PUBLIC void flows_seconds(const Flow *flows, int64_t count, const Links *links, int64_t num_links, int64_t source,
                          const int64_t *targets, const double *nbytes, int64_t num_targets, const double *measured,
                          double *scratch, int64_t *into, double *seconds) {
    double *asked = scratch, *received = scratch + num_links;
    double *leaving[2] = {received + num_links, received + num_links + count}; /* bytes left, by the source's link */
    int64_t num_leaving[2] = {0, 0};
    for (int64_t i = 0; i < num_targets; i++)
        into[i] = 2 * targets[i] + (links->hosts[targets[i]] == links->hosts[source]);
    arriving(flows, count, into, nbytes, num_targets, asked, received);
    for (int64_t i = 0; i < count; i++) {
        int64_t side = (int64_t)flows[i].out - 2 * source;
        if (side == 0 || side == 1) leaving[side][num_leaving[side]++] = flows[i].left;
    }
    for (int64_t i = 0; i < num_targets; i++) {
        int64_t side = into[i] & 1, out = 2 * source + side;
        double bytes = nbytes[i], sent = 0.0;
        for (int64_t j = 0; j < num_leaving[side]; j++) sent += least(leaving[side][j], bytes);
        double out_rate = links->out_rates[out], in_rate = links->in_rates[into[i]];
        double alone = measured ? measured[targets[i]] : NAN;
        if (isnan(alone)) alone = least(out_rate, in_rate); /* a pair is as fast as its slower link */
        double out_s = (bytes + sent) / most(out_rate, alone); /* no link is slower than one of its pairs */
        double in_s = (bytes + received[into[i]]) / most(in_rate, alone);
        double most_s = most(most(out_s, in_s), bytes / alone);
        seconds[i] = bytes > 0.0 && targets[i] != source ? most_s : 0.0;
    }
}
