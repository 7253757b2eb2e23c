/* word.c: deciding, failing, and waking sleepers. */
#define _GNU_SOURCE
#include "word.h"

#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int seats_of(const struct segment *s) {
    return (int)s->geometry.seats;
}

void ring(struct segment *s, int seat) {
    struct meeting_place *place = place_of(s, seat);
    atomic_fetch_add(&place->bell, 1);
    u64 one = 1;
    if (!atomic_load(&place->is_operated)) syscall(SYS_futex, &place->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    else if (s->knock >= 0 && write(s->knock, &one, sizeof one) < 0) return; /* it is full: it rings */
}

void ring_all(struct segment *s) {
    for (int i = 0; i < seats_of(s); i++) ring(s, i);
}

void wake(struct segment *s, a64 bits[SEAT_WORDS]) {
    for (int w = 0; w * 64 < seats_of(s); w++) {
        if (!atomic_load(&bits[w])) continue;
        u64 waiting = atomic_exchange(&bits[w], 0);
        for (int i = w * 64; waiting && i < seats_of(s); i++, waiting >>= 1)
            if (waiting & 1) ring(s, i);
    }
}

int all_published(const struct segment *s, u64 want) {
    for (int i = 0; i < seats_of(s); i++)
        if (atomic_load(&seat_of(s, i)->progress) < want) return 0;
    return 1;
}

int has_come(const struct segment *s, int seat, u64 n) {
    return atomic_load(&seat_of(s, seat)->progress) > n << TICK_BITS; /* two seats that publish together must not miss each other */
}

int read_record(const struct segment *s, int seat, u64 n, struct record_copy *copy) {
    const struct record *record = &seat_of(s, seat)->record[n & 1];
    copy->instance = load(&record->instance);
    copy->digest[0] = load(&record->digest[0]), copy->digest[1] = load(&record->digest[1]);
    copy->terms = load(&record->terms), copy->flags = load(&record->flags);
    copy->deadline = load(&record->deadline), copy->asked = load(&record->asked), copy->description = load(&record->description);
    copy->began = load(&record->began);
    return copy->instance == n && load(&record->instance) == n;
}

int all_whole(const struct segment *s, u64 n) {
    for (int i = 0; i < seats_of(s); i++)
        if (!(load(&seat_of(s, i)->record[n & 1].flags) & RECORD_WHOLE)) return 0;
    return 1;
}

int all_there(const struct segment *s, u64 n) {
    int whole = 0;
    for (int i = 0; i < seats_of(s); i++) {
        u64 progress = atomic_load(&seat_of(s, i)->progress);
        if (progress >= full(n)) continue;
        if (progress <= n << TICK_BITS || !(load(&seat_of(s, i)->record[n & 1].flags) & RECORD_WHOLE)) return 0;
        whole = 1;
    }
    return !whole || all_whole(s, n);
}

int find_dispute(const struct segment *s, u64 n) {
    u64 digest[2] = {0}, terms = 0;
    int first = 1, closed = 0;
    for (int i = 0; i < seats_of(s); i++) {
        const struct record *record = &seat_of(s, i)->record[n & 1];
        if (!has_come(s, i, n) || load(&record->instance) != n) continue;
        u64 flags = load(&record->flags);
        if (first) terms = load(&record->terms), first = 0;
        else if (load(&record->terms) != terms) return i;
        if (flags & RECORD_OPEN) continue;
        if (!closed) digest[0] = load(&record->digest[0]), digest[1] = load(&record->digest[1]), closed = 1;
        else if (load(&record->digest[0]) != digest[0] || load(&record->digest[1]) != digest[1]) return i;
    }
    return -1;
}

/* Whether the values of an open instance are read where they lie. */
static int moves_directly(const struct segment *s, u64 n) {
    for (int i = 0; i < (int)s->geometry.seats; i++) {
        const struct record *record = &seat_of(s, i)->record[n & 1];
        if (load(&record->instance) != n || !(load(&record->flags) & RECORD_DIRECT)) return 0;
    }
    return 1;
}

u64 first_lost(const struct segment *s, int seat) {
    u64 n = load(&seat_of(s, seat)->progress) >> TICK_BITS, complete = instance_of(load(&head_of(s)->decided));
    if (n < complete || n > complete + 1) return complete; /* a value that was whole in its first tick; nonsense */
    if (n == complete + 1 && moves_directly(s, complete)) return complete; /* others may still have to read it in that process */
    if (n != complete || !has_come(s, seat, n)) return n;
    for (int i = 0; i < (int)s->geometry.seats; i++) /* all of its value lies in the first tick: that is enough, if it is for all */
        if ((i == seat || has_come(s, i, n)) && !(load(&seat_of(s, i)->record[n & 1].flags) & RECORD_WHOLE)) return n;
    return n + 1;
}

int end_generation(struct segment *s, u64 n, int reason, int culprit) {
    a64 *word = &head_of(s)->decided;
    for (int i = 0; i < TRIES; i++) {
        u64 was = atomic_load(word);
        if (outcome(was, n) != PENDING || instance_of(was) < n) return outcome(was, n);
        if (!atomic_compare_exchange_strong(word, &was, make_word(n, waiting_of(was), culprit, reason))) continue;
        ring_all(s);
        return reason;
    }
    return NONSENSE; /* a member writes it to and fro */
}

u64 end_now(struct segment *s, int reason, int culprit) {
    for (int i = 0; i < TRIES; i++) {
        u64 decided = atomic_load(&head_of(s)->decided);
        if (reason_of(decided)) return decided;
        end_generation(s, instance_of(decided), reason, culprit);
    }
    return atomic_load(&head_of(s)->decided);
}

/* `waiting`: how many wait to join; -1: as many as before. */
static int complete(struct segment *s, u64 n, int waiting) {
    a64 *word = &head_of(s)->decided;
    for (int i = 0; i < TRIES; i++) {
        u64 was = atomic_load(word);
        if (outcome(was, n) != PENDING || instance_of(was) < n) return outcome(was, n);
        u64 next = make_word(n + 1, waiting < 0 ? waiting_of(was) : waiting, 0, 0);
        if (!atomic_compare_exchange_strong(word, &was, next)) continue;
        wake(s, head_of(s)->sleepers);
        return COMPLETE;
    }
    return NONSENSE;
}

int complete_elsewhere(struct segment *s, u64 n) {
    return complete(s, n, -1);
}

int decide(struct segment *s, u64 n) {
    int disputed = find_dispute(s, n);
    if (disputed >= 0) return end_generation(s, n, MISMATCH, disputed);
    u64 waiting = load(&head_of(s)->waiting);
    return complete(s, n, waiting > MOST_WAITING ? MOST_WAITING : (int)waiting);
}

void lower_limit(struct segment *s, u64 n, int reason, int culprit) {
    u64 was = atomic_load(&head_of(s)->limit);
    for (int i = 0; i < TRIES && n < instance_of(was); i++) {
        int doomed = was != ~(u64)0 && reason == LEFT; /* those who leave because of it are not to blame */
        u64 limit = make_word(n, 0, doomed ? culprit_of(was) : culprit, doomed ? reason_of(was) : reason);
        if (atomic_compare_exchange_weak(&head_of(s)->limit, &was, limit)) break;
    }
}

int apply_limit(struct segment *s, u64 n) {
    u64 limit = load(&head_of(s)->limit);
    if (n >= instance_of(limit)) return end_generation(s, n, reason_of(limit), culprit_of(limit));
    return outcome(load(&head_of(s)->decided), n);
}

int expire(struct segment *s, u64 n, int decider) {
    if (all_there(s, n)) return decide(s, n);
    u64 least = ~(u64)0, missing[SEAT_WORDS] = {0};
    for (int i = 0; i < seats_of(s); i++) { /* the seat that is furthest behind */
        u64 progress = load(&seat_of(s, i)->progress);
        if (progress < n << TICK_BITS) progress = n << TICK_BITS;
        if (progress < least) memset(missing, 0, sizeof missing), least = progress;
        if (progress == least) missing[i / 64] |= (u64)1 << i % 64;
    }
    a64 *told = decider == WORKER_SEAT ? head_of(s)->missing : seat_of(s, decider)->missing;
    for (int w = 0; w < SEAT_WORDS; w++) atomic_store(&told[w], missing[w]);
    return end_generation(s, n, DEADLINE, decider);
}

void missing_seats(const struct segment *s, int decider, u64 missing[SEAT_WORDS]) {
    memset(missing, 0, SEAT_WORDS * sizeof *missing);
    if (decider != WORKER_SEAT && decider >= seats_of(s)) return;
    const a64 *told = decider == WORKER_SEAT ? head_of(s)->missing : seat_of(s, decider)->missing;
    for (int w = 0; w < SEAT_WORDS; w++) missing[w] = load(&told[w]);
}

u64 earliest_deadline(const struct segment *s, u64 n) {
    u64 earliest = 0;
    for (int i = 0; i < seats_of(s); i++) {
        if (!has_come(s, i, n)) continue;
        const struct record *record = &seat_of(s, i)->record[n & 1];
        u64 deadline = load(&record->deadline);
        if (load(&record->instance) == n && deadline && (!earliest || deadline < earliest)) earliest = deadline;
    }
    return earliest;
}
