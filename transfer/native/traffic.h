/* Counters of slices and bytes (paths/traffic_stats.py, which repeats the structures).
 *
 * Python calls these functions with the GIL, which makes each call one step. `copy_inline` counts without it, so the
 * totals that both change are added to atomically. Included by data_plane.c.
 */

#define MEASURED_FROM ((int64_t)64 << 10) /* of path_selection.py */
#define MAX_PERIOD_S 1.0

static const int64_t BOUNDS_NS[] = {50000,    100000,    250000,     1000000,    2500000, /* BUCKETS_S */
                                    10000000, 50000000, 250000000, 1000000000, 5000000000};
#define NUM_BOUNDS ((int64_t)(sizeof BOUNDS_NS / sizeof *BOUNDS_NS))

enum { READ, WRITE, OPS };

/* Bandwidth to one peer. A period begins when bytes are in flight. */
typedef struct {
    int64_t in_flight, moved[OPS]; /* in this period */
    int64_t bytes[OPS], inline_ns[OPS]; /* totals */
    double began_at, seconds[OPS];
} Meter;

/* Totals of one path to the peer, and what is in flight. */
typedef struct {
    Meter *meter;
    int64_t num_in_flight, bytes_in_flight, bytes[OPS], sum_ns, counts[NUM_BOUNDS + 1];
} Path;

static void add(int64_t *total, int64_t amount) {
    __atomic_add_fetch(total, amount, __ATOMIC_RELAXED);
}

static void begin_period(Meter *meter, double now) {
    meter->began_at = now;
    meter->moved[READ] = meter->moved[WRITE] = 0;
}

/* A period counts if it moved enough bytes, in one direction. */
static void end_period(Meter *meter, double now) {
    int32_t op = meter->moved[READ] ? READ : WRITE;
    if (meter->moved[1 - op] || meter->moved[op] < MEASURED_FROM) return;
    add(&meter->bytes[op], meter->moved[op]);
    meter->seconds[op] += now - meter->began_at;
}

static void count_slice(Path *path, int32_t op, int64_t bytes, int64_t ns) {
    int64_t bucket = 0;
    while (bucket < NUM_BOUNDS && ns > BOUNDS_NS[bucket]) bucket++;
    add(&path->bytes[op], bytes);
    add(&path->sum_ns, ns);
    add(&path->counts[bucket], 1);
}

PUBLIC void path_submitted(Path *path, int64_t bytes, double now) {
    path->bytes_in_flight += bytes;
    if (!path->meter->in_flight) begin_period(path->meter, now);
    path->meter->in_flight += bytes;
}

PUBLIC void path_taken(Path *path, int64_t num_slices) {
    path->num_in_flight += num_slices;
}

/* Bytes that were never submitted report their own time. */
PUBLIC void path_arrived(Path *path, int32_t op, int64_t bytes, double seconds) {
    Meter *meter = path->meter;
    count_slice(path, op, bytes, (int64_t)(seconds * 1e9));
    if (meter->in_flight) {
        meter->moved[op] += bytes;
    } else if (bytes >= MEASURED_FROM) {
        add(&meter->bytes[op], bytes);
        meter->seconds[op] += seconds;
    }
}

PUBLIC void path_left(Path *path, int64_t bytes, double now) {
    Meter *meter = path->meter;
    path->bytes_in_flight -= bytes;
    meter->in_flight -= bytes;
    if (meter->in_flight && now - meter->began_at < MAX_PERIOD_S) return;
    end_period(meter, now);
    begin_period(meter, now);
}

/* Counts rows copied by `copy_inline`. They report their own time even if other bytes are in flight on another path. */
static void count_inline(Path *path, int32_t op, int64_t bytes, int64_t ns) {
    count_slice(path, op, bytes, ns);
    if (bytes < MEASURED_FROM) return;
    add(&path->meter->bytes[op], bytes);
    add(&path->meter->inline_ns[op], ns);
}
