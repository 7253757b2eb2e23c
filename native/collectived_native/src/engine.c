/* engine.c: what a seat does next in an instance.
 *
 * Time is counted in ticks. In a tick a seat writes part `tick % 3` of its own memory and then publishes the tick; it begins
 * one when all have published the tick before. Others read its part of tick t before they publish t + 2, so the seat may
 * write it again in tick t + 3: three parts are enough, and there is no other flow control. No seat begins an instance
 * before the one before it is decided, so a seat is at most one instance ahead.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <string.h>

#include "arithmetic.h"
#include "copying.h"
#include "letters.h"
#include "mailbox.h"

/* ---- One instance ---- */

static void announce(struct engine *e, const struct job *job, int whole) {
    const struct plan *plan = job->plan;
    struct record *record = &seat_of(e->segment, e->seat)->record[job->instance & 1];
    u64 flags = (plan->open ? RECORD_OPEN : 0) | (plan->meets ? RECORD_MEETS : 0) | (whole ? RECORD_WHOLE : 0) |
                (job->is_direct ? RECORD_DIRECT : 0) | job->blob_bytes << RECORD_BLOB_SHIFT;
#define SAY(field, value) atomic_store_explicit(&record->field, value, memory_order_release)
    SAY(instance, ~(u64)0);
    SAY(digest[0], plan->digest[0] ^ e->segment->geometry_digest);
    SAY(digest[1], plan->digest[1]);
    SAY(terms, plan->terms ? plan->terms ^ e->segment->geometry_digest : e->segment->geometry_digest);
    SAY(flags, flags);
    SAY(deadline, job->deadline);
    SAY(asked, job->asked);
    SAY(description, plan->description);
    SAY(began, job->began);
    SAY(value, job->is_direct && plan->leaves_in ? (u64)(uintptr_t)job->values.in[0] : 0);
    SAY(instance, job->instance);
#undef SAY
}

static void publish(struct engine *e, u64 progress) {
    struct seat *own = seat_of(e->segment, e->seat);
    atomic_store_explicit(&own->ticks, ++e->ticks, memory_order_relaxed);
    atomic_exchange(&own->progress, progress); /* seq_cst: before the look at sleepers, and at seats that have come */
    wake(e->segment, place_of(e->segment, e->seat)->waiters);
}

/* Whether this seat has to look whether all have come: of many, only the last does, which counters find. */
static int may_be_last(struct engine *e) {
    struct head *head = head_of(e->segment);
    u64 seats = e->segment->geometry.seats, block = (u64)e->seat / BLOCK_SEATS;
    if (seats <= BLOCK_SEATS) return 1;
    u64 blocks = (seats + BLOCK_SEATS - 1) / BLOCK_SEATS;
    u64 in_block = block + 1 < blocks ? BLOCK_SEATS : seats - block * BLOCK_SEATS;
    if ((atomic_fetch_add(&head->blocks[block].count, 1) + 1) % in_block) return 0;
    return !((atomic_fetch_add(&head->top.count, 1) + 1) % blocks);
}

struct total *find_total(const struct engine *e, u64 description, int operation) {
    struct total *totals = totals_of(e->segment, e->seat), *found = totals;
    struct total *end = totals + TOTALS - COUNTED_OPERATIONS, *shared = end + operation;
    while (found < end && load(&found->description) && load(&found->description) != description + 1) found++;
    if (found == end || description == ~(u64)0) found = shared;
    atomic_store_explicit(&found->operation, (u64)operation, memory_order_relaxed);
    atomic_store_explicit(&found->description, description + 1 ? description + 1 : 1, memory_order_release);
    return found;
}

static void add(a64 *word, u64 amount) { /* to a word that no other thread writes */
    atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + amount, memory_order_release);
}

u64 count(const struct engine *e, const struct job *job, struct total *total, u64 bytes) {
    u64 ended = engine_now(e);
    add(&total->bytes, bytes);
    add(&total->nanoseconds, ended > job->began ? ended - job->began : 0);
    add(&total->calls, 1);
    return ended;
}

void count_message(const struct engine *e, int operation, u64 bytes, u64 nanoseconds) {
    struct total *total = find_total(e, ~(u64)0, operation);
    add(&total->bytes, bytes), add(&total->nanoseconds, nanoseconds), add(&total->calls, 1);
}

static void remember(const struct engine *e, const struct job *job, u64 ended) {
    struct past *past = past_of(e->segment, e->seat, job->instance);
    atomic_store_explicit(&past->instance, 0, memory_order_release);
    atomic_store_explicit(&past->description, job->plan->description, memory_order_release);
    atomic_store_explicit(&past->began, job->began, memory_order_release);
    atomic_store_explicit(&past->ended, ended, memory_order_release);
    atomic_store_explicit(&past->instance, job->instance + 1, memory_order_release);
}

static int finish(struct engine *e, struct job *job, int state) {
    if (state == COMPLETE && job->plan->streams) finish_streaming();
    if (state == COMPLETE) {
        remember(e, job, count(e, job, job->plan->total, job->plan->bytes));
        job->waiting = waiting_of(load(&head_of(e->segment)->decided));
        atomic_store(&e->waiting, (u32)job->waiting);
    }
    engine_finish(e, job, state);
    return 1;
}

static int wait_decided(struct engine *e, const struct job *job, int everybody, u64 want) {
    e->wait.seat = -1, e->wait.everybody = everybody, e->wait.want = want, e->wait.instance = job->instance;
    return 0;
}

static u64 values_at(const struct plan *plan) { /* where values that are whole lie in the first tick */
    return plan->meets ? MAX_BLOB : 0;
}

static int take(struct engine *e, struct job *job) {
    take_whole(e->segment, job->plan, &job->values, job->first_tick, values_at(job->plan));
    return finish(e, job, COMPLETE);
}

static int begin_steps(struct engine *e, struct job *job, u64 base) {
    job->stage = STEPS, job->base = base, job->tick = 0, job->first_tick = e->ticks;
    return 1;
}

/* Whether all have published that much of instance `n`; else it waits for one of them. */
static int all_are_at(struct engine *e, u64 n, u64 want) {
    int seats = (int)e->segment->geometry.seats;
    for (int i = 1; i < seats; i++) { /* beginning with the neighbour, so that not all look at the same line */
        int other = e->seat + i < seats ? e->seat + i : e->seat + i - seats;
        if (atomic_load(&seat_of(e->segment, other)->progress) >= want) continue;
        e->wait.seat = other, e->wait.want = want, e->wait.instance = n;
        return 0;
    }
    return 1;
}

/* ---- Values that are read where they lie ---- */

/* How many seats are ready for that, by what all have said in the first tick. */
static int count_direct(const struct segment *s, u64 n) {
    int count = 0;
    for (int i = 0; i < (int)s->geometry.seats; i++)
        count += (load(&seat_of(s, i)->record[n & 1].flags) & RECORD_DIRECT) != 0;
    return count;
}

/* All have said whether they are ready: values are read where they lie, or move by ticks. */
static int begin_moving(struct engine *e, struct job *job) {
    if (count_direct(e->segment, job->instance) < job->plan->seats) return begin_steps(e, job, 1);
    job->stage = DIRECT, job->copied = 0;
    return 1;
}

static int choosing(struct engine *e, struct job *job) {
    struct segment *s = e->segment;
    u64 n = job->instance, want = n << TICK_BITS | 1;
    int found = outcome(load(&head_of(s)->decided), n);
    if (found != PENDING) return finish(e, job, found == COMPLETE ? NONSENSE : found);
    if (!all_are_at(e, n, want)) return 0;
    int disputed = find_dispute(s, n);
    if (disputed >= 0) return finish(e, job, end_generation(s, n, MISMATCH, disputed));
    return begin_moving(e, job);
}

/* Something cannot be read. No seat is to blame (-1) where the worker has to find out what has become of a rank. */
static int end_unread(struct engine *e, struct job *job, int culprit) {
    if (culprit < 0) return wait_decided(e, job, 0, 0);
    return finish(e, job, end_generation(e->segment, job->instance, culprit == e->seat ? FAILED : NONSENSE, culprit));
}

static int direct(struct engine *e, struct job *job) {
    struct segment *s = e->segment;
    u64 n = job->instance;
    int culprit = 0, found = outcome(load(&head_of(s)->decided), n), moved;
    if (found > 0) return finish(e, job, found);
    if (load(&seat_of(s, e->seat)->progress) == full(n)) return found == COMPLETE ? finish(e, job, COMPLETE) : wait_decided(e, job, 0, 0);
    if ((moved = copy_directly(e, job, &culprit)) < 0) return end_unread(e, job, culprit);
    if (moved) return 1;
    if (!sources_are_there(e, job, &culprit)) return end_unread(e, job, culprit);
    publish(e, full(n)); /* once all have, no seat reads the value of another any more: then it is decided */
    if (may_be_last(e) && all_there(s, n)) decide(s, n);
    return 1;
}

/* ---- Values that may be whole in the first tick ---- */

static int begin(struct engine *e, struct job *job) {
    struct segment *s = e->segment;
    const struct plan *plan = job->plan;
    u64 n = job->instance;
    u64 decided = load(&head_of(s)->decided);
    int found = outcome(decided, n);
    if (found == PENDING && instance_of(decided) < n) { /* the one before is carried out elsewhere */
        e->wait.seat = -1, e->wait.everybody = 0, e->wait.instance = n - 1;
        return 0;
    }
    if (found == PENDING) found = apply_limit(s, n);
    if (found != PENDING) return finish(e, job, found == COMPLETE ? NONSENSE : found);
    int whole = plan->meets ? plan->whole_bytes <= s->geometry.small : plan->whole;
    if (plan->operation == ACROSS) e->ticks = load(&seat_of(s, plan->root)->ticks); /* of some instances it alone has none */
    job->first_tick = e->ticks;
    char *part = input_of(s, e->seat, e->ticks);
    if (job->blob_bytes) memcpy(blob_of(s, e->seat, e->ticks), job->blob, job->blob_bytes);
    if (whole) put_whole(plan, &job->values, part + values_at(plan));
    job->is_direct = can_be_direct(e, job);
    announce(e, job, whole);
    if (!plan->meets && !whole) {
        int first_is_last = plan->steps + (u64)plan->depth == 2; /* then step 0 waits until it is known how values move */
        if (!job->is_direct && !first_is_last) return begin_steps(e, job, 0);
        job->stage = CHOOSING;
        publish(e, n << TICK_BITS | 1);
        return 1;
    }
    job->stage = plan->meets ? MEETING : WHOLE;
    publish(e, plan->meets ? n << TICK_BITS | 1 : full(n));
    if (may_be_last(e) && all_there(s, n)) decide(s, n);
    return 1;
}

static int whole(struct engine *e, struct job *job) {
    int found = outcome(load(&head_of(e->segment)->decided), job->instance);
    const struct plan *plan = job->plan;
    if (found == PENDING) return wait_decided(e, job, 0, 0);
    if (found == COMPLETE && plan->operation == ACROSS) { /* else no seat may write that record anew before this one has come again */
        u64 told = load(&seat_of(e->segment, plan->root)->record[job->instance & 1].instance);
        if (told != job->instance) found = BY_DOORBELL;
        else if (plan->open && !job->described) return engine_finish(e, job, DESCRIBE), 0;
    }
    return found == COMPLETE ? take(e, job) : finish(e, job, found);
}

/* Whether the caller of this rank has to describe the instance from the blobs of the others. */
static int needs_description(const struct engine *e, const struct job *job) {
    if (job->described || job->plan->meets == MEETS_KNOWN) return 0;
    if (job->plan->meets == MEETS_ANY) return 1;
    for (int i = 0; i < job->plan->seats; i++) {
        u64 flags = load(&seat_of(e->segment, i)->record[job->instance & 1].flags);
        if (flags >> RECORD_BLOB_SHIFT != job->blob_bytes) return 1;
        if (memcmp(input_of(e->segment, i, job->first_tick), job->blob, job->blob_bytes)) return 1;
    }
    return 0;
}

static int meeting(struct engine *e, struct job *job) {
    struct segment *s = e->segment;
    u64 n = job->instance, want = n << TICK_BITS | 1;
    int found = outcome(load(&head_of(s)->decided), n);
    if (found > 0) return finish(e, job, found);
    if (found == PENDING) {
        if (!all_published(s, want)) return wait_decided(e, job, 1, want);
        if (all_whole(s, n)) {
            if ((found = decide(s, n)) != COMPLETE) return finish(e, job, found);
        } else {
            int disputed = find_dispute(s, n);
            if (disputed >= 0) return finish(e, job, end_generation(s, n, MISMATCH, disputed));
            wake(s, head_of(s)->sleepers); /* no seat will decide yet: all go on */
        }
    }
    if (needs_description(e, job)) {
        engine_finish(e, job, DESCRIBE);
        return 0;
    }
    return found == COMPLETE ? take(e, job) : begin_moving(e, job);
}

/* ---- By ticks ---- */

static int step(struct engine *e, struct job *job) {
    struct segment *s = e->segment;
    const struct plan *plan = job->plan;
    u64 n = job->instance, k = job->tick, depth = (u64)plan->depth, last = plan->steps + depth - 1;
    u64 tick = job->first_tick + k;
    if (k + job->base) {
        u64 want = k == last ? full(n) : n << TICK_BITS | (job->base + k);
        int found = outcome(load(&head_of(s)->decided), n);
        if (found > 0) return finish(e, job, found);
        if (found != COMPLETE && !all_are_at(e, n, want)) return 0; /* where it is complete, all have come */
        int disputed = k + job->base == 1 ? find_dispute(s, n) : -1;
        if (k == 1 && !job->base && disputed < 0 && count_direct(s, n)) return begin_steps(e, job, 1); /* they have put nothing */
        found = disputed >= 0 ? end_generation(s, n, MISMATCH, disputed)
                : k == last   ? decide(s, n)
                              : found;
        if (found > 0) return finish(e, job, found);
    }
    if (k < plan->steps) put_step(s, plan, &job->values, k, tick);
    if (depth == 2 && k && k <= plan->steps) fold_step(s, plan, &job->values, k - 1, tick);
    if (k < last) publish(e, k + 1 == last ? full(n) : n << TICK_BITS | (job->base + k + 1));
    if (depth == 2 && k && k <= plan->steps) keep_step(s, plan, &job->values, k - 1, tick); /* no seat waits for this */
    if (k >= depth) take_step(s, plan, &job->values, k - depth, tick - 1);
    job->tick++;
    if (k == last) return finish(e, job, COMPLETE);
    if (k >= depth) atomic_store(&job->steps_done, k - depth + 1);
    return 1;
}

int engine_step(struct engine *e, struct job *job) {
    if (atomic_load(&job->state) != PENDING) return 0;
    switch (job->stage) {
    case QUEUED: return begin(e, job);
    case MEETING: return meeting(e, job);
    case WHOLE: return whole(e, job);
    case STEPS: return step(e, job);
    case CHOOSING: return choosing(e, job);
    case DIRECT: return direct(e, job);
    default: return 0;
    }
}

/* ---- The worker's part in groups that span hosts ---- */

int engine_gather(struct engine *e, const struct plan *plan, const struct values *values, u64 n) {
    struct segment *s = e->segment;
    u64 decided = load(&head_of(s)->decided);
    if (outcome(decided, n) != PENDING) return outcome(decided, n) == COMPLETE ? NONSENSE : reason_of(decided);
    if (instance_of(decided) < n) return PENDING;
    for (int i = 0; i < plan->root; i++)
        if (takes_from(plan, i) && atomic_load(&seat_of(s, i)->progress) < full(n)) return PENDING;
    int disputed = find_dispute(s, n);
    if (disputed >= 0) return end_generation(s, n, MISMATCH, disputed);
    if (values) take_whole(s, plan, values, e->ticks, 0);
    return COMPLETE;
}

char *engine_find_partials(const struct engine *e, const struct plan *plan) {
    int only = -1;
    if (plan->phases != 1 || plan->leaves_out != 1 || (plan->reduce_op && !are_partials(plan->phase->dtype, plan->reduce_op))) return NULL;
    for (int i = 0; i < plan->root; i++) {
        if (!takes_from(plan, i)) continue;
        if (only >= 0) return NULL;
        only = i;
    }
    return only < 0 ? NULL : input_of(e->segment, only, e->ticks) + plan->phase->whole_at[only];
}

char *engine_find_results(const struct engine *e, const struct plan *plan, u64 bytes) {
    if (plan->phases != 1 || plan->leaves_in != 1 || bytes > e->segment->geometry.small) return NULL;
    return input_of(e->segment, e->seat, e->ticks);
}

int engine_bring(struct engine *e, const struct plan *plan, const struct values *values, u64 n, const void *blob, u64 bytes) {
    struct segment *s = e->segment;
    int found = outcome(load(&head_of(s)->decided), n);
    if (found != PENDING) return found == COMPLETE ? NONSENSE : found;
    if (values) put_whole(plan, values, input_of(s, e->seat, e->ticks));
    if (bytes) memcpy(blob_of(s, e->seat, e->ticks), blob, bytes);
    announce(e, &(struct job){.plan = plan, .instance = n, .blob_bytes = bytes}, 1);
    publish(e, full(n));
    may_be_last(e); /* it is: it comes when all others have */
    return decide(s, n);
}
