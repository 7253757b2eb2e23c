/* wait.c: looking, sleeping, and moving to another core.
 *
 * Small collectives are won or lost here. A rank that waits looks for a while, for a wake-up costs ten times as much as the
 * whole instance. How long is adapted: twice as long where it was worth while, half where not. Once all ranks of a group
 * sleep, a short look never pays, because every rank is late by a wake-up; so now and then a rank looks for the whole time
 * again. Where cores are short no rank looks: the awaited rank may need the core.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { SHORTEST = 2000, WHOLE_EVERY = 64, HOP_EVERY = 5 * MILLISECOND, LOOKS = 32 };

u64 now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000u + (u64)t.tv_nsec;
}

u64 engine_now(const struct engine *e) {
    return now() + (u64)e->clock_offset;
}

static long futex(a32 *word, int operation, u32 value, const struct timespec *timeout) {
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

static struct timespec span(u64 nanoseconds) {
    return (struct timespec){(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
}

int sleep_on(a32 *word, u32 value, u64 nanoseconds) {
    struct timespec left = span(nanoseconds);
    return futex(word, FUTEX_WAIT_PRIVATE, value, &left) && errno == EINTR;
}

void wake_all(a32 *word) {
    futex(word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL);
}

int sleep_on_bell(struct engine *e, u32 rung, u64 nanoseconds) {
    struct timespec left = span(nanoseconds);
    atomic_fetch_add_explicit(&seat_of(e->segment, e->seat)->slept, 1, memory_order_relaxed);
    return futex(&place_of(e->segment, e->seat)->bell, FUTEX_WAIT, rung, &left) && errno == EINTR;
}

int look(const struct engine *e) {
    const struct segment *s = e->segment;
    u64 n = e->wait.instance;
    int found = outcome(atomic_load(&head_of(s)->decided), n);
    if (atomic_load(&e->posts) && atomic_load(&place_of(s, e->seat)->mail) != e->mail_seen) return 1;
    if (e->wait.seat >= 0) /* a step may begin though the instance is decided, never though it has failed */
        return found > 0 || atomic_load(&seat_of(s, e->wait.seat)->progress) >= e->wait.want;
    if (n == NO_INSTANCE && found == LEFT) return 0; /* letters go on */
    return found != PENDING || (e->wait.everybody && all_published(s, e->wait.want));
}

int arm(struct engine *e) {
    struct segment *s = e->segment;
    a64 *bits = e->wait.seat < 0 ? head_of(s)->sleepers : place_of(s, e->wait.seat)->waiters;
    atomic_fetch_or(&bits[e->seat / 64], (u64)1 << e->seat % 64); /* the publishing seat takes it out again */
    return look(e);
}

/* A thread that is woken tends to be put on the core of the thread that woke it, until all sit on one, where looking is in vain and
 * others idle. A rank that finds more seats on its core than need be moves to the one with the fewest, once in a while. Only
 * where the caller may run on every core: `hops` says so. */
static int hop(struct engine *e) {
    struct segment *s = e->segment;
    struct seat *own = seat_of(s, e->seat);
    int here = sched_getcpu(), same = 1, seats = (int)s->geometry.seats;
    if (here < 0) return 0;
    if (atomic_load_explicit(&own->cpu, memory_order_relaxed) != (u32)here + 1)
        atomic_store_explicit(&own->cpu, (u32)here + 1, memory_order_relaxed);
    if (!e->hops) return 0;
    for (int i = 0; i < seats; i++)
        same += i != e->seat && atomic_load_explicit(&seat_of(s, i)->cpu, memory_order_relaxed) == (u32)here + 1;
    u64 t = same <= e->crowd ? 0 : now();
    if (!t || t - e->hopped < HOP_EVERY) return 0;
    e->hopped = t;
    cpu_set_t all, one;
    unsigned char on[CPU_SETSIZE] = {0};
    int best = -1;
    if (sched_getaffinity(0, sizeof all, &all)) return 0;
    e->crowd = (seats + CPU_COUNT(&all) - 1) / CPU_COUNT(&all);
    if (same <= e->crowd) return 0;
    for (int i = 0; i < seats; i++) {
        u32 cpu = atomic_load_explicit(&seat_of(s, i)->cpu, memory_order_relaxed);
        if (i != e->seat && cpu && cpu <= CPU_SETSIZE) on[cpu - 1]++;
    }
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all) && (best < 0 || on[cpu] < on[best])) best = cpu;
    if (best < 0 || on[best] + 1 >= same) return 0;
    CPU_ZERO(&one);
    CPU_SET(best, &one);
    if (sched_setaffinity(0, sizeof one, &one)) return e->hops = 0;
    for (int tries = 0; sched_setaffinity(0, sizeof all, &all) && ++tries < 10;) e->hops = 0; /* never left pinned: try on */
    atomic_store_explicit(&own->cpu, (u32)best + 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&own->hops, 1, memory_order_relaxed);
    return 1;
}

/* Whether the seat that is waited for sits on this core, so that looking for it is in vain. */
static int shares_core(const struct engine *e) {
    u32 here = atomic_load_explicit(&seat_of(e->segment, e->seat)->cpu, memory_order_relaxed);
    return atomic_load_explicit(&seat_of(e->segment, e->wait.seat)->cpu, memory_order_relaxed) == here;
}

static int paid(struct engine *e, u64 budget) {
    if (budget < SHORTEST) budget = SHORTEST;
    e->budget = 2 * budget < e->spin ? 2 * budget : e->spin;
    return 1;
}

int glance(struct engine *e, u64 nanoseconds) {
    for (int i = 0; i < LOOKS; i++) {
        if (look(e)) return 1;
        RELAX();
    }
    if (!e->spin) return 0;
    for (u64 began = now(); now() - began < nanoseconds;)
        for (int i = 0; i < LOOKS; i++) {
            if (look(e)) return paid(e, e->budget);
            RELAX();
        }
    return 0;
}

int spin(struct engine *e) {
    if (hop(e)) e->budget = e->spin;
    u64 budget = e->budget;
    if (budget < SHORTEST) budget = e->spin && ++e->rested % WHOLE_EVERY == 0 ? e->spin : 0;
    if (e->wait.seat >= 0 && shares_core(e)) budget = 0;
    if (budget) {
        u64 began = now();
        do {
            for (int i = 0; i < LOOKS; i++) {
                if (look(e)) return paid(e, budget);
                RELAX();
            }
        } while (now() - began < budget);
        e->budget = budget / 2;
    }
    for (int i = 0; e->wait.seat < 0 && i < e->yields; i++) {
        sched_yield();
        if (look(e)) return 1;
    }
    return look(e);
}

int worker_is_gone(struct engine *e) {
    struct pollfd end = {.fd = e->doorbell, .events = POLLIN};
    if (e->doorbell < 0 || poll(&end, 1, 0) <= 0) return 0;
    if (end.revents & POLLIN) atomic_store(&e->rung, 1);
    return end.revents & (POLLHUP | POLLERR);
}

void knock_for(struct engine *e, u64 instance) {
    u64 one = 1;
    if (e->knocked > instance) return;
    e->knocked = instance + 1;
    if (e->knock >= 0 && write(e->knock, &one, sizeof one) < 0) e->knocked = 0; /* EAGAIN: it is full, so it rings anyhow */
}
