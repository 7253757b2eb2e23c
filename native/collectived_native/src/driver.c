/* driver.c: the queue of a seat, and the thread that drives its engine: one that waits, or one of the engine's own. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "letters.h"

enum { THREAD_STACK = 256 << 10, INLINE_BYTES = 64 << 10 };
static const u64 IDLE = 5000000000u; /* nanoseconds after which the thread ends */

/* ---- The queue ---- */

static struct job *head_job(struct engine *e) {
    pthread_mutex_lock(&e->lock);
    struct job *job = e->first;
    pthread_mutex_unlock(&e->lock);
    return job;
}

static void tell(struct engine *e) {
    atomic_fetch_add(&e->news, 1);
    wake_all(&e->news);
}

u64 engine_skip(struct engine *e) {
    pthread_mutex_lock(&e->lock);
    u64 n = e->next_instance++;
    pthread_mutex_unlock(&e->lock);
    return n;
}

void engine_submit(struct engine *e, struct job *job) {
    job->stage = QUEUED;
    atomic_store(&job->state, PENDING);
    job->began = engine_now(e);
    job->knock_at = job->began + KNOCK_AFTER;
    pthread_mutex_lock(&e->lock);
    job->next = NULL;
    if (atomic_load(&e->closing)) { /* the closing thread may have ended all jobs */
        job->stage = DONE;
        atomic_store(&job->state, DETACHED);
        pthread_mutex_unlock(&e->lock);
        return;
    }
    if (job->kind == COLLECTIVE) {
        job->instance = e->next_instance++;
        if (e->last) e->last->next = job;
        else e->first = job;
        e->last = job;
    } else {
        atomic_fetch_add(&e->posts, 1);
        struct job **end = &e->letters;
        if (job->kind == RECEIVE) {
            end = e->last_receive ? &e->last_receive->next : &e->receives;
            e->last_receive = job;
            e->timed += job->deadline != 0;
        }
        while (*end) end = &(*end)->next;
        *end = job;
    }
    atomic_fetch_add(&e->unfinished, 1);
    pthread_mutex_unlock(&e->lock);
}

/* Under the lock. */
static void unlink_job(struct engine *e, struct job *job) {
    int is_posted = job->kind == RECEIVE && job->stage == QUEUED;
    struct job **link = job->kind == COLLECTIVE ? &e->first : is_posted ? &e->receives : &e->letters, *before = NULL;
    while (*link && *link != job) before = *link, link = &(*link)->next;
    if (*link) *link = job->next;
    if (e->last == job) e->last = before;
    if (e->last_receive == job) e->last_receive = before;
    if (is_posted) e->timed -= job->deadline != 0;
}

void engine_move_matched(struct engine *e, struct job *job) {
    pthread_mutex_lock(&e->lock);
    unlink_job(e, job);
    job->stage = CHOOSING;
    struct job **end = &e->letters;
    while (*end) end = &(*end)->next;
    *end = job, job->next = NULL;
    pthread_mutex_unlock(&e->lock);
}

/* Those that sleep on the bell; an operator has called. */
static void wake_own_threads(struct engine *e) {
    if (!e->is_operated && atomic_load(&place_of(e->segment, e->seat)->asleep)) ring(e->segment, e->seat);
}

void engine_finish(struct engine *e, struct job *job, int state) {
    if (job->kind == SEND && state != COMPLETE) letters_withdraw(e, job);
    pthread_mutex_lock(&e->lock);
    if (state != DESCRIBE) {
        unlink_job(e, job);
        if (job->kind != COLLECTIVE) atomic_fetch_sub(&e->posts, 1);
        job->stage = DONE;
        atomic_fetch_sub(&e->unfinished, 1);
    }
    if (job->notify && !job->listed) {
        job->listed = 1;
        job->next_finished = NULL;
        *e->finished_end = job;
        e->finished_end = &job->next_finished;
    }
    atomic_store(&job->state, state); /* the last word: its owner may free it now */
    pthread_mutex_unlock(&e->lock);
    if (atomic_load(&e->followers)) tell(e);
    wake_own_threads(e);
}

struct job *engine_collect_finished(struct engine *e) {
    pthread_mutex_lock(&e->lock);
    struct job *job = e->finished;
    for (struct job *one = job; one; one = one->next_finished) {
        int state = atomic_load(&one->state);
        one->listed = 0;
        if (state != PENDING && state != DESCRIBE) one->notify = 0; /* else it comes here again: it must not be freed before */
    }
    e->finished = NULL;
    e->finished_end = &e->finished;
    pthread_mutex_unlock(&e->lock);
    return job;
}

void engine_resume(struct engine *e, struct job *job) {
    pthread_mutex_lock(&e->lock);
    int goes_on = atomic_load(&job->state) == DESCRIBE; /* else the engine was closed meanwhile, and may be unmapped */
    if (goes_on) {
        job->described = 1;
        atomic_store(&job->state, PENDING);
    }
    pthread_mutex_unlock(&e->lock);
    if (!goes_on) return;
    tell(e);
    wake_own_threads(e);
}

/* ---- Leading ---- */

static int lead(struct engine *e) {
    u32 nobody = 0;
    return atomic_compare_exchange_strong(&e->leader, &nobody, 1);
}

static void resign(struct engine *e) {
    atomic_store(&e->leader, 0);
    if (atomic_load(&e->followers)) tell(e);
}

static int advance(struct engine *e) {
    struct job *job = head_job(e);
    e->wait.seat = -1, e->wait.everybody = 0, e->wait.instance = NO_INSTANCE;
    int moved = job ? engine_step(e, job) : 0;
    return letters_advance(e) || moved;
}

int engine_advance(struct engine *e, u64 budget) {
    int moved = 0;
    atomic_fetch_add(&e->inside, 1);
    if (atomic_load(&e->closing) || !lead(e)) return atomic_fetch_sub(&e->inside, 1), 0;
    for (u64 done = 0; done < budget; done += 4 * e->segment->geometry.share) {
        if (advance(e)) moved = 1;
        else if (!e->is_operated || !(arm(e) || letters_came(e))) break; /* its operator sleeps until it is rung */
    }
    resign(e);
    atomic_fetch_sub(&e->inside, 1);
    return moved;
}

int engine_attend(struct engine *e, u64 n, int each) {
    struct segment *s = e->segment;
    int missing = 0;
    for (int i = 0; i < (int)s->geometry.seats; i++) {
        if (i == e->seat || has_come(s, i, n)) continue;
        atomic_fetch_or(&place_of(s, i)->waiters[e->seat / 64], (u64)1 << e->seat % 64);
        missing |= !has_come(s, i, n);
        if (missing && !each) return 0;
    }
    return !missing;
}

/* Looks after jobs that wait for others before them; until when it need not look again. One that lies beyond the limit
   ends now. One whose deadline has passed ends the open instance, and so itself: all ranks read that in the word. Where
   the worker decides with others it does not know of such a job, and has to get its deadline at once. */
static u64 look_at_queue(struct engine *e, u64 t) {
    struct segment *s = e->segment;
    u64 earliest = ~(u64)0, grace = s->geometry.operated ? 0 : GRACE;
    for (;;) {
        struct job *beyond = NULL;
        u64 limit = load(&head_of(s)->limit);
        pthread_mutex_lock(&e->lock);
        for (struct job *job = e->first; job && !beyond; job = job->next) {
            if (job->stage != QUEUED) continue;
            if (job->instance >= instance_of(limit)) beyond = job;
            else if (job->deadline && job->deadline + grace < earliest) earliest = job->deadline + grace;
        }
        pthread_mutex_unlock(&e->lock);
        if (!beyond) break;
        engine_finish(e, beyond, reason_of(limit));
    }
    if (earliest <= t) expire(s, instance_of(atomic_load(&head_of(s)->decided)), e->seat);
    return earliest;
}

/* The checks of a rank that is about to sleep, or has slept, besides its wait; until when it may sleep. */
static u64 look_around(struct engine *e, u64 t) {
    struct segment *s = e->segment;
    struct job *job = head_job(e);
    u64 until = t + SLEEP_MOST, queued = look_at_queue(e, t), posted = letters_expire(e, t);
    if (queued < until) until = queued;
    if (posted < until) until = posted;
    if (!job || job->stage == QUEUED || job->stage == DONE || atomic_load(&job->state) != PENDING) return until;
    u64 n = job->instance, deadline = earliest_deadline(s, n), own = job->deadline ? job->deadline + GRACE : 0;
    int disputed;
    if (apply_limit(s, n) != PENDING) return until;
    if (all_there(s, n) && decide(s, n) != PENDING) return until;
    if ((disputed = find_dispute(s, n)) >= 0) end_generation(s, n, MISMATCH, disputed);
    else if (deadline && t >= deadline + GRACE && expire(s, n, e->seat) != PENDING) return until;
    else if (own && t >= own) expire(s, instance_of(load(&head_of(s)->decided)), e->seat); /* `decided` is not at `n`: end what it is at */
    else if (worker_is_gone(e)) end_generation(s, n, WORKER, WORKER_SEAT);
    if (deadline && deadline + GRACE < until) until = deadline + GRACE;
    if (own && own < until) until = own;
    u64 knock_at = job->began + KNOCK_AFTER;
    if (t >= knock_at) knock_for(e, n);
    else if (knock_at < until) until = knock_at;
    return until;
}

static int state_of(const struct engine *e, struct job *job) {
    if (job) return atomic_load(&job->state);
    return atomic_load(&e->unfinished) && !atomic_load(&e->closing) ? PENDING : COMPLETE;
}

/* Sleeps as the leader, which leads no more while it sleeps; whether a signal has ended that. */
static int sleep_leading(struct engine *e, struct job *job, u64 until) {
    struct meeting_place *place = place_of(e->segment, e->seat);
    u32 rung = atomic_load(&place->bell);
    atomic_fetch_add(&place->asleep, 1);
    u64 t = engine_now(e), latest = look_around(e, t);
    if (until && until < latest) latest = until;
    int came = arm(e) || letters_came(e);
    resign(e);
    int signalled = !came && state_of(e, job) == PENDING && latest > t && sleep_on_bell(e, rung, latest - t);
    atomic_fetch_sub(&place->asleep, 1);
    return signalled;
}

static int follow(struct engine *e, struct job *job, u64 nanoseconds) {
    atomic_fetch_add(&e->followers, 1);
    u32 heard = atomic_load(&e->news);
    int signalled = state_of(e, job) == PENDING && atomic_load(&e->leader) && sleep_on(&e->news, heard, nanoseconds);
    atomic_fetch_sub(&e->followers, 1);
    return signalled;
}

static int is_decided(const struct engine *e, const struct job *job) {
    return job->kind == COLLECTIVE && outcome(load(&head_of(e->segment)->decided), job->instance) == COMPLETE;
}

/* When the caller is to look up. Of a collective it makes itself known once, and then there is little to see. */
static u64 find_knock(struct engine *e, const struct job *job, const struct waiting *how, u64 t) {
    if (!job || !how->began) return ~(u64)0;
    int is_known = job->kind == COLLECTIVE && job->knock_at > job->began + KNOCK_AFTER;
    if (is_known && atomic_load(&e->rung) && atomic_exchange(&e->rung, 0)) return t;
    if (is_known && !atomic_load(&e->is_roused)) return how->began + KNOCK_EVERY;
    u64 looked = how->began + SLEEP_MOST;
    return job->knock_at < looked ? job->knock_at : looked;
}

/* Lets the caller look at signals. A handler may close the engine, which waits for all threads inside. */
static int look_at_signals(struct engine *e, struct waiting *how) {
    atomic_fetch_sub(&e->inside, 1);
    how->raised = how->interrupted(how->argument) != 0;
    atomic_fetch_add(&e->inside, 1);
    return how->raised || atomic_load(&e->closing);
}

/* Until when the caller need not look up; 0: now it has to return `result`. */
static u64 next_duty(struct engine *e, struct job *job, struct waiting *how, int *result) {
    u64 t = engine_now(e), until = t + SLEEP_MOST;
    u64 knock_at = find_knock(e, job, how, t);
    int knocks = t >= knock_at, over = how->until && t >= how->until;
    *result = PENDING;
    if (how->interrupted && (knocks || over || t - how->looked >= SLEEP_MOST) && !(job && is_decided(e, job))) {
        how->looked = t;
        if (look_at_signals(e, how)) {
            if (atomic_load(&e->closing)) return *result = state_of(e, job), 0; /* the segment may be unmapped */
            if (job) end_now(e->segment, INTERRUPTED, e->seat);
            return *result = INTERRUPTED, 0;
        }
    }
    if (knocks) job->knock_at = t + SLEEP_MOST;
    if (knocks) *result = KNOCK;
    if (knocks || over) return 0;
    if (how->interrupted && how->looked + SLEEP_MOST < until) until = how->looked + SLEEP_MOST;
    if (how->until && how->until < until) until = how->until;
    if (knock_at < until) until = knock_at;
    return until;
}

int engine_wait(struct engine *e, struct job *job, struct waiting *how) {
    int result = PENDING, slept = 0; /* since anything moved: what has not come by then takes longer than spinning pays */
    atomic_fetch_add(&e->inside, 1);
    while ((result = state_of(e, job)) == PENDING) {
        u64 until = next_duty(e, job, how, &result);
        if (!until) break;
        if (!lead(e)) {
            u64 t = engine_now(e);
            if (until > t && follow(e, job, until - t)) how->looked = 0;
            continue;
        }
        int moved = 1;
        while (state_of(e, job) == PENDING && (moved = advance(e)) && engine_now(e) < until) {}
        if (moved) look_around(e, engine_now(e)); /* a rank that never sleeps must not miss a deadline either */
        slept = slept && !moved;
        if (moved || state_of(e, job) != PENDING || (!slept && spin(e))) {
            resign(e);
            continue;
        }
        if (sleep_leading(e, job, until)) how->looked = 0;
        slept = 1;
    }
    atomic_fetch_sub(&e->inside, 1);
    return result;
}

int engine_try(struct engine *e, struct job *job, u64 nanoseconds) {
    if (!lead(e)) return PENDING;
    do {
        while (atomic_load(&job->state) == PENDING && advance(e)) {}
    } while (atomic_load(&job->state) == PENDING && glance(e, nanoseconds));
    resign(e);
    return atomic_load(&job->state);
}

/* ---- The thread ---- */

static void *run(void *argument) {
    struct engine *e = argument;
    struct waiting how = {0};
    for (int idle = 0;;) {
        u32 heard = atomic_load(&e->news);
        pthread_mutex_lock(&e->lock);
        int busy = atomic_load(&e->unfinished) != 0, end = atomic_load(&e->closing) || (idle && !busy);
        if (end) e->has_thread = ENDED;
        pthread_mutex_unlock(&e->lock);
        if (end) return NULL;
        if (busy) {
            engine_wait(e, NULL, &how);
            idle = 0;
            continue;
        }
        u64 began = now();
        sleep_on(&e->news, heard, IDLE);
        idle = now() - began >= IDLE;
    }
}

static void start_thread(struct engine *e) { /* under the lock */
    pthread_attr_t attributes;
    sigset_t all, before;
    if (e->has_thread == RUNNING || atomic_load(&e->closing)) return;
    if (e->has_thread == ENDED) pthread_join(e->thread, NULL);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, THREAD_STACK);
    sigfillset(&all); /* signals are for the threads of Python */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    e->has_thread = pthread_create(&e->thread, &attributes, run, e) ? NO_THREAD : RUNNING; /* else waiting threads drive */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void engine_entrust(struct engine *e, struct job *job) {
    if ((job->kind == COLLECTIVE ? job->plan->bytes_moved : job->letter.bytes) <= INLINE_BYTES)
        engine_advance(e, INLINE_BYTES);
    if (!atomic_load(&e->unfinished) || atomic_load(&job->state) > PENDING) return;
    pthread_mutex_lock(&e->lock);
    start_thread(e);
    int is_next = e->first == job || job->kind != COLLECTIVE;
    pthread_mutex_unlock(&e->lock);
    tell(e);
    /* A thread that sleeps on the bell waits for something else. */
    if (is_next && atomic_load(&place_of(e->segment, e->seat)->asleep)) ring(e->segment, e->seat);
}

void engine_await_finished(struct engine *e, struct waiting *how) {
    int result;
    atomic_fetch_add(&e->inside, 1);
    while (!atomic_load(&e->closing)) {
        atomic_fetch_add(&e->followers, 1);
        u32 heard = atomic_load(&e->news);
        pthread_mutex_lock(&e->lock);
        int there = e->finished != NULL;
        pthread_mutex_unlock(&e->lock);
        u64 until = there ? 0 : next_duty(e, NULL, how, &result), t = engine_now(e);
        if (until > t && sleep_on(&e->news, heard, until - t)) how->looked = 0;
        atomic_fetch_sub(&e->followers, 1);
        if (!until) break;
    }
    atomic_fetch_sub(&e->inside, 1);
}

/* ---- Beginning and end ---- */

struct engine *engine_open(struct segment *segment, int seat) {
    struct engine *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    cpu_set_t all;
    int cores = sched_getaffinity(0, sizeof all, &all) ? 1 : CPU_COUNT(&all);
    e->segment = segment, e->seat = seat, e->epoch = segment->epoch;
    e->knock = e->doorbell = -1;
    e->crowd = ((int)segment->geometry.seats + cores - 1) / cores;
    e->finished_end = &e->finished;
    e->next_instance = load(&seat_of(segment, seat)->progress) >> TICK_BITS;
    e->ticks = load(&seat_of(segment, seat)->ticks);
    pthread_mutex_init(&e->lock, NULL);
    return e;
}

void engine_operate(struct engine *e, int is_operated) {
    struct meeting_place *place = place_of(e->segment, e->seat);
    if (e->is_operated == is_operated) return;
    e->is_operated = is_operated;
    atomic_store(&place->is_operated, (u32)is_operated);
    atomic_fetch_add(&place->asleep, is_operated ? 1 : (u32)-1); /* always asleep, as far as others know */
}

void engine_rouse(struct engine *e) {
    atomic_store(&e->is_roused, 1);
    tell(e);
    ring(e->segment, e->seat);
}

void engine_leave(struct engine *e) {
    atomic_fetch_or(&head_of(e->segment)->gone[e->seat / 64], (u64)1 << e->seat % 64);
    engine_limit(e, e->next_instance);
}

void engine_limit(struct engine *e, u64 n) {
    struct segment *s = e->segment;
    u64 first = first_lost(s, e->seat);
    if (n < first) n = first; /* instances that it has published wholly are in the segment */
    lower_limit(s, n, LEFT, e->seat);
    ring_all(s);
    u64 complete = instance_of(load(&head_of(s)->decided));
    if (complete >= n) apply_limit(s, complete);
}

void engine_close(struct engine *e) {
    atomic_store(&e->closing, 1);
    pthread_mutex_lock(&e->lock);
    int has_thread = e->has_thread;
    pthread_mutex_unlock(&e->lock);
    for (;;) { /* all others out: sleepers look up, leaders end what they are at */
        tell(e);
        ring(e->segment, e->seat);
        if (lead(e)) break;
        sched_yield();
    }
    hide_process(e); /* before callers have their arrays back: what is read of them from here on does not count */
    while (atomic_load(&e->unfinished)) {
        pthread_mutex_lock(&e->lock);
        struct job *job = e->first ? e->first : e->letters ? e->letters : e->receives;
        pthread_mutex_unlock(&e->lock);
        engine_finish(e, job, DETACHED);
    }
    atomic_store(&e->leader, 0);
    while (atomic_load(&e->inside)) {
        tell(e);
        ring(e->segment, e->seat);
        sched_yield();
    }
    if (has_thread != NO_THREAD) pthread_join(e->thread, NULL);
    letters_close(e);
}
