/* READ and WRITE over a stream: one call each at the initiator, any number in one call at the target.
 *
 * tcp/frames.py has the format, tcp/exchange.py the structures' fields and everything unusual: a request that cannot be
 * served here is left to it, as far as it was received. The target's rule is that of memory/write_windows.py: bytes are
 * stored only inside an open window, in short steps. Included by data_plane.c.
 */
#define MAGIC 0x544d /* "MT" */
#define MAX_ROWS 4096
#define MAX_REQUEST_BYTES ((uint64_t)1 << 40)
#define STORE_NS 1000000      /* longest time that a close of a window waits for a step */
#define STALL_NS 60000000000 /* a peer that stops for this long in the middle of a request is given up */
#define PLACES 8

enum { READ_FRAME = 1, WRITE_FRAME = 2, REPLY_FRAME = 16 };
enum { OTHER = FAILED + 1, CORRUPT, STALE, DEREGISTERED }; /* ends of an exchange, beside those of `pump` */

typedef struct {
    uint16_t magic;
    uint8_t kind, code;
    uint32_t entries;
    uint64_t segment, window, source, bytes, checksum;
} Header;

typedef struct {
    Flow *flow;
    int64_t fd, sealed, spin_ns;
    int64_t received; /* bytes behind the header of request or reply; -1: that is awaited */
    uint64_t bytes, sum, seal; /* of the payload */
    Header header;             /* of the request, directly followed by its rows and their seal */
    uint8_t rows[MAX_ROWS * sizeof(Row) + SEAL_BYTES];
    Header reply;
    struct iovec piece, pieces[MAX_ROWS + 3];
} Exchange;

/* Memory that the target serves here: a readable segment, or a window (else 0) of a segment. */
typedef struct {
    uint64_t segment;
    char *base;
    int64_t bytes; /* of the segment */
    uint64_t window;
    int64_t *state; /* the segment's users, or the window's stores in flight */
    const int64_t *starts, *ends;
    int64_t num_ranges;
} Served;

static Row *rows_of(const Exchange *at) {
    return (Row *)at->rows;
}

static uint64_t seal_of(const Exchange *at) { /* of header and rows; big-endian */
    return __builtin_bswap64(xxh3((const uint8_t *)&at->header, sizeof at->header + at->header.entries * sizeof(Row)));
}

static void send_pieces(Exchange *at, struct iovec *pieces, int64_t count) {
    Queue *out = &at->flow->out;
    *out = (Queue){.vectors = pieces, .count = count, .moved = out->moved};
}

static void expect(Exchange *at, struct iovec *pieces, int64_t count, uint64_t bytes) {
    Queue *into = &at->flow->into;
    *into = (Queue){.vectors = pieces, .count = count, .moved = into->moved};
    at->flow->wanted = into->moved + (int64_t)bytes;
}

static void expect_piece(Exchange *at, void *memory, size_t bytes) {
    at->piece = (struct iovec){memory, bytes};
    expect(at, &at->piece, 1, bytes);
}

/* Adds the rows' bytes on one side, and their seal, to the pieces. Returns the number of pieces. */
static int64_t add_payload(Exchange *at, int64_t filled, char *base, int32_t column, size_t seal_bytes) {
    filled += fill_iovecs(at->pieces + filled, base, rows_of(at), at->header.entries, column);
    if (at->sealed) at->pieces[filled++] = (struct iovec){&at->seal, seal_bytes};
    return filled;
}

static void send_payload(Exchange *at, int64_t filled, char *base, int32_t column) {
    at->seal = at->bytes;
    at->flow->num_unsealed += at->sealed;
    send_pieces(at, at->pieces, add_payload(at, filled, base, column, UNSEALED));
}

static void expect_payload(Exchange *at, char *base, int32_t column) {
    if (at->sealed) at->flow->hashing = (Hashing){.lengths = &at->bytes, .sums = &at->sum, .count = 1};
    expect(at, at->pieces, add_payload(at, 0, base, column, SEAL_BYTES), at->bytes + (at->sealed ? SEAL_BYTES : 0));
}

static int is_ok(const Header *reply) {
    return reply->magic == MAGIC && reply->kind == REPLY_FRAME && !reply->code && !reply->entries;
}

/* Continues after TIMEOUT. Ends with IN_DONE, CORRUPT, or OTHER if the reply is one to be handled elsewhere. */
PUBLIC int32_t exchange_more(Exchange *at, char *base, int64_t timeout_ns) {
    int32_t end = pump((int32_t)at->fd, at->flow, timeout_ns, at->spin_ns);
    if (end != IN_DONE) return end;
    if (at->received < 0) {
        if (!is_ok(&at->reply)) return OTHER;
        if (at->flow->out.index < at->flow->out.count) {
            at->flow->error = EPROTO; /* a reply to half a request */
            return FAILED;
        }
        if (at->header.kind == WRITE_FRAME) return IN_DONE;
        if (at->reply.bytes != at->bytes) return OTHER;
        at->received = 0;
        expect_payload(at, base, 1);
        if ((end = pump((int32_t)at->fd, at->flow, timeout_ns, at->spin_ns)) != IN_DONE) return end;
    }
    return at->sealed && at->sum != at->seal ? CORRUPT : IN_DONE;
}

/* Sends a READ, or a WRITE unless the window is 0, of rows within the local segment at `base`, whose length is `bytes`;
   receives its answer. Nothing else is in flight. */
PUBLIC int32_t exchange(Exchange *at, char *base, Row *rows, int64_t count, uint64_t segment, uint64_t window,
                        uint64_t bytes, int64_t timeout_ns) {
    size_t length = (size_t)count * sizeof *rows;
    at->header = (Header){.magic = MAGIC, .kind = window ? WRITE_FRAME : READ_FRAME, .entries = (uint32_t)count,
                          .segment = segment, .window = window, .bytes = window ? bytes : 0};
    memcpy(at->rows, rows, length);
    if (at->sealed) {
        uint64_t seal = seal_of(at);
        memcpy(at->rows + length, &seal, sizeof seal);
        length += sizeof seal;
    }
    at->bytes = bytes;
    at->received = -1;
    at->pieces[0] = (struct iovec){&at->header, sizeof at->header + length};
    if (window)
        send_payload(at, 1, base, 1);
    else
        send_pieces(at, at->pieces, 1);
    expect_piece(at, &at->reply, sizeof at->reply);
    return exchange_more(at, base, timeout_ns);
}

static int32_t stalled(Exchange *at) {
    at->flow->error = ETIMEDOUT;
    return FAILED;
}

/* Sends what is queued, or receives what is expected. */
static int32_t finish(Exchange *at) {
    int32_t end = pump((int32_t)at->fd, at->flow, STALL_NS, at->spin_ns);
    return end == TIMEOUT ? stalled(at) : end;
}

static const Served *find_served(const Exchange *at, const Served *places) {
    const Header *header = &at->header;
    int writes = header->kind == WRITE_FRAME;
    if (header->magic != MAGIC || header->code || !header->entries || header->entries > MAX_ROWS) return NULL;
    if (header->kind != READ_FRAME && !writes) return NULL;
    const Served *place = writes ? places + PLACES + header->window % PLACES : places + header->segment % PLACES;
    if (!place->base || place->segment != header->segment || (writes && place->window != header->window)) return NULL;
    return place;
}

/* Returns 1 if the rows are within what is served, and some but not too many bytes. Adds them up. */
static int check_rows(Exchange *at, const Served *served) {
    Row *rows = rows_of(at);
    at->bytes = 0;
    for (uint32_t i = 0; i < at->header.entries; i++) {
        int64_t start = rows[i][0], length = rows[i][LENGTH];
        if (start < 0 || length < 0 || length > served->bytes - start) return 0;
        if (served->window && !is_in_ranges(served->starts, served->ends, served->num_ranges, start, length)) return 0;
        if ((at->bytes += (uint64_t)length) > MAX_REQUEST_BYTES) return 0;
    }
    if (served->window && at->bytes != at->header.bytes) return 0;
    uint64_t seal;
    if (!at->sealed) return at->bytes > 0;
    memcpy(&seal, at->rows + at->received - SEAL_BYTES, sizeof seal);
    return seal == seal_of(at) && at->bytes > SHORT_VALUE; /* shorter payloads are not hashed here */
}

static int32_t serve_read(Exchange *at, const Served *served) {
    at->reply = (Header){.magic = MAGIC, .kind = REPLY_FRAME, .bytes = at->bytes};
    at->pieces[0] = (struct iovec){&at->reply, sizeof at->reply};
    send_payload(at, 1, served->base, 0);
    int32_t end = finish(at);
    if (end != OUT_DONE) return end;
    return __atomic_load_n(served->state, __ATOMIC_SEQ_CST) < CLOSED ? IN_DONE : DEREGISTERED;
}

static int32_t serve_write(Exchange *at, const Served *served) {
    int64_t until_ns = now_ns() + STALL_NS, moved;
    int32_t end;
    expect_payload(at, served->base, 0);
    for (;;) {
        if (!window_enter(served->state)) return STALE;
        moved = at->flow->into.moved;
        end = pump((int32_t)at->fd, at->flow, STORE_NS, at->spin_ns);
        window_leave(served->state);
        if (end != TIMEOUT) break;
        int64_t left_ns = until_ns - now_ns();
        if (left_ns <= 0) return stalled(at);
        if (moved == at->flow->into.moved) wait_ready((int32_t)at->fd, POLLIN, left_ns);
    }
    if (end != IN_DONE) return end;
    if (at->sealed && at->sum != at->seal) return CORRUPT;
    at->reply = (Header){.magic = MAGIC, .kind = REPLY_FRAME};
    at->piece = (struct iovec){&at->reply, sizeof at->reply};
    send_pieces(at, &at->piece, 1);
    end = finish(at);
    return end == OUT_DONE ? IN_DONE : end;
}

/* Serves READs and WRITEs of these places. Ends with TIMEOUT between two requests, or OTHER at one that it does not
   serve (yet: the next call looks for it again). STALE: the rest of the payload is expected. */
PUBLIC int32_t serve(Exchange *at, const Served *places, int64_t timeout_ns) {
    int64_t until_ns = now_ns() + timeout_ns, left_ns = timeout_ns;
    for (int32_t end; left_ns > 0; left_ns = until_ns - now_ns()) {
        if (at->received < 0) {
            if (!wants_input(at->flow)) expect_piece(at, &at->header, sizeof at->header);
            if ((end = pump((int32_t)at->fd, at->flow, left_ns, at->spin_ns)) != IN_DONE) return end;
            at->received = 0;
        }
        const Served *served = find_served(at, places);
        if (!served || __atomic_load_n(served->state, __ATOMIC_SEQ_CST) >= CLOSED) return OTHER;
        int64_t bytes = (int64_t)(at->header.entries * sizeof(Row)) + (at->sealed ? SEAL_BYTES : 0);
        expect_piece(at, at->rows, (size_t)bytes);
        if ((end = finish(at)) != IN_DONE) return end;
        at->received = bytes;
        if (!check_rows(at, served)) return OTHER;
        end = served->window ? serve_write(at, served) : serve_read(at, served);
        if (end != IN_DONE) return end;
        at->received = -1;
    }
    return TIMEOUT;
}
