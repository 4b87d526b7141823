/* WRITEs that the initiator stores itself, in the caller's thread, into a window of the target's memory that it maps.
 *
 * The right to do so is a lease: a page that both processes map. The target sets and clears the leased window, the
 * initiator says while it stores. Its rule: after `lease_end` returns, no store of the lease reaches the window, even if
 * the initiator is stopped or killed between its look at the lease and its stores. For that, look and stores together
 * are a restartable sequence (rseq(2)): a thread that was off its processor in the middle never continues there but
 * looks again. So the target waits for a thread that stores only as long as that thread may be on a processor.
 * Included by data_plane.c; memory/write_windows.py has the target's side.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>

#define MAX_LEASE_RANGES 250 /* a lease is a page */
#define LEASE_STEP ((size_t)64 << 10) /* stored at once; begins again when the thread leaves its processor */
#define MAX_RESTARTS 1000
#define LEASE_POLL_NS 100000
#define LEASE_PATIENCE 1000 /* polls before the target looks whether the thread runs: 0.1 s, many times a slice */

typedef struct {
    int64_t window; /* 0: none. The target's, as are the ranges; set last */
    int64_t num_ranges, starts[MAX_LEASE_RANGES], ends[MAX_LEASE_RANGES];
    int64_t storing, thread; /* the initiator's: the window into which this thread of it may be storing */
} Lease;

enum { STORED, ENDED, RESTART };

#if defined __x86_64__ && defined __GLIBC__ && __GLIBC_PREREQ(2, 35)
#include <sys/rseq.h>
#pragma weak __rseq_offset /* so that the library also loads with an older C library */
#pragma weak __rseq_size

static struct rseq *thread_rseq(void) {
    return (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);
}

/* Returns 1 if the C library registered this thread with the kernel. */
static int can_restart(void) {
    return &__rseq_size && __rseq_size && (int32_t)thread_rseq()->cpu_id >= 0;
}

/* Copies if the lease is of this window. RESTART: the thread left its processor, and a part was copied. */
static int store_once(char *to, const char *from, size_t length, const int64_t *leased, int64_t window) {
    __asm__ goto(".pushsection __rseq_cs, \"aw\"\n"
                 ".balign 32\n"
                 "3: .long 0, 0\n" /* version, flags */
                 ".quad 1f, 2f - 1f, 4f\n"
                 ".popsection\n"
                 "leaq 3b(%%rip), %%rax\n"
                 "movq %%rax, %[sequence]\n"
                 "movq %[to], %%rdi\n"
                 "movq %[from], %%rsi\n"
                 "movq %[length], %%rcx\n"
                 "1: cmpq %[window], %[leased]\n"
                 "jne %l[ended]\n"
                 "rep movsb\n"
                 "2:\n"
                 ".pushsection __rseq_failure, \"ax\"\n"
                 ".byte 0x0f, 0xb9, 0x3d\n" /* an undefined instruction around the signature that the kernel requires */
                 ".long %c[signature]\n"
                 "4: jmp %l[restart]\n"
                 ".popsection\n"
                 :
                 : [sequence] "m"(thread_rseq()->rseq_cs), [leased] "m"(*leased), [window] "r"(window), [to] "r"(to),
                   [from] "r"(from), [length] "r"(length), [signature] "i"(RSEQ_SIG)
                 : "memory", "cc", "rax", "rdi", "rsi", "rcx"
                 : ended, restart);
    return STORED;
ended:
    return ENDED;
restart:
    return RESTART;
}
#else
static int can_restart(void) {
    return 0;
}

static int store_once(char *to, const char *from, size_t length, const int64_t *leased, int64_t window) {
    return ENDED;
}
#endif

/* Returns 0 if the lease ended, or if the thread leaves its processor all the time. */
static int store_step(char *to, const char *from, size_t length, const int64_t *leased, int64_t window) {
    for (int i = 0; i < MAX_RESTARTS; i++) {
        int outcome = store_once(to, from, length, leased, window);
        if (outcome != RESTART) return outcome == STORED;
    }
    return 0;
}

/* Returns 1 if all rows are stored, 0 if not, -1 if one differs from its source. */
static int32_t store_rows(char *to, const char *from, Row *rows, int64_t count, int64_t verified, const int64_t *leased,
                          int64_t window) {
    for (int64_t i = 0; i < count; i++) {
        char *into = to + rows[i][0];
        const char *source = from + rows[i][1];
        if (i + 1 < count) prefetch_row(to, from, rows + i + 1, 0);
        for (size_t left = (size_t)rows[i][LENGTH], step; left; left -= step, into += step, source += step) {
            step = left < LEASE_STEP ? left : LEASE_STEP;
            if (!store_step(into, source, step, leased, window)) return 0;
            if (verified && memcmp(into, source, step)) return -1;
        }
    }
    return 1;
}

/* Stores rows, whose bounds within both memories were checked. Returns what `store_rows` does, 0 also without a lease. */
static int32_t write_leased(Lease *lease, int64_t window, char *to, const char *from, Row *rows, int64_t count,
                            int64_t verified) {
    if (!lease || __atomic_load_n(&lease->window, __ATOMIC_ACQUIRE) != window || !can_restart()) return 0;
    for (int64_t i = 0; i < count; i++)
        if (!is_in_ranges(lease->starts, lease->ends, lease->num_ranges, rows[i][0], rows[i][LENGTH])) return 0;
    lease->thread = syscall(SYS_gettid); /* not kept: it would be wrong in a fork */
    __atomic_store_n(&lease->storing, window, __ATOMIC_SEQ_CST); /* before the look at the lease */
    int32_t outcome = store_rows(to, from, rows, count, verified, &lease->window, window);
    if (outcome < 0 && __atomic_load_n(&lease->window, __ATOMIC_ACQUIRE) != window) outcome = 0; /* in new use */
    __atomic_store_n(&lease->storing, 0, __ATOMIC_RELEASE);
    return outcome;
}

/* Lets the initiator store into the window. The lease is of no window, and its initiator stores nothing before the answer. */
PUBLIC int32_t lease_begin(Lease *lease, int64_t window, const int64_t *starts, const int64_t *ends, int64_t count) {
    if (count > MAX_LEASE_RANGES) return 0;
    memcpy(lease->starts, starts, (size_t)count * sizeof *starts);
    memcpy(lease->ends, ends, (size_t)count * sizeof *ends);
    lease->num_ranges = count;
    __atomic_store_n(&lease->window, window, __ATOMIC_SEQ_CST);
    return 1;
}

/* Ends the lease without waiting. Returns 1 if nothing is being stored. */
PUBLIC int32_t lease_end_if_idle(Lease *lease, int64_t window) {
    __atomic_compare_exchange_n(&lease->window, &(int64_t){window}, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&lease->storing, __ATOMIC_SEQ_CST) != window;
}

/* Returns 1 if the thread is on no processor and in no queue for one: it sleeps, is stopped or has ended. */
static int is_off_processor(int64_t process, int64_t thread) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%lld/task/%lld/stat", (long long)process, (long long)thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return length < 0 && errno == ESRCH;
    text[length] = 0;
    const char *state = strrchr(text, ')'); /* behind the thread's name, which may contain anything */
    return state && state[1] == ' ' && state[2] && state[2] != 'R';
}

/* Ends the lease. On return nothing is stored any more. `process` is the initiator. */
PUBLIC void lease_end(Lease *lease, int64_t window, int64_t process) {
    struct timespec pause = {.tv_nsec = LEASE_POLL_NS};
    int64_t polls = 0, off = 0;
    while (!lease_end_if_idle(lease, window)) {
        if (polls++ >= LEASE_PATIENCE) off = is_off_processor(process, lease->thread) ? off + 1 : 0;
        if (off >= 2) return; /* twice: a thread is marked as sleeping a moment before it leaves its processor */
        nanosleep(&pause, NULL);
    }
}
