/* word.h: the word that decides all outcomes, `decided`, and the published states of seats.
 *
 * `decided` changes by compare-and-swap alone. A rank that sees that all have contributed to the open instance raises it; a
 * death, a deadline, an abort or a contract that differs sets a reason, and then it never changes again. All ranks
 * therefore read one outcome of every instance. Loops over words that others write are bounded.
 */
#ifndef COLLECTIVED_WORD_H
#define COLLECTIVED_WORD_H

#include "layout.h"

enum { TRIES = 64 };

static inline u64 load(const a64 *word) {
    return atomic_load_explicit((a64 *)word, memory_order_acquire);
}

static inline u64 instance_of(u64 word) {
    return word >> WORD_BITS;
}

static inline int reason_of(u64 word) {
    return (int)(word & ((1 << REASON_BITS) - 1));
}

static inline int culprit_of(u64 word) {
    return (int)(word >> REASON_BITS & WORKER_SEAT);
}

/* How many waited to join when the last complete instance was decided; a failure leaves it as it was. */
static inline int waiting_of(u64 word) {
    return (int)(word >> (REASON_BITS + SEAT_BITS) & MOST_WAITING);
}

static inline u64 make_word(u64 n, int waiting, int culprit, int reason) {
    return n << WORD_BITS | (u64)waiting << (REASON_BITS + SEAT_BITS) | (u64)culprit << REASON_BITS | (u64)reason;
}

/* PENDING while instance `n` is open. */
static inline int outcome(u64 decided, u64 n) {
    if (instance_of(decided) > n) return COMPLETE;
    return reason_of(decided) ? reason_of(decided) : PENDING;
}

/* The blob of a seat in a tick; in groups that span hosts it lies behind the value. */
static inline char *blob_of(const struct segment *s, int seat, u64 tick) {
    return input_of(s, seat, tick) + (s->geometry.operated ? s->geometry.small : 0);
}

static inline u64 full(u64 n) { /* the progress of a seat that has contributed all to instance `n` */
    return (n + 1) << TICK_BITS;
}

/* Whether all seats have published that much. */
int all_published(const struct segment *s, u64 want);
/* Whether instance `n` can be decided: all have contributed all of their values. */
int all_there(const struct segment *s, u64 n);
/* Whether all values of instance `n` lie wholly in the first tick; to be asked when all have published it. */
int all_whole(const struct segment *s, u64 n);
/* A seat whose contract differs from that of another that has published too; -1: none. */
int find_dispute(const struct segment *s, u64 n);

/* Completes instance `n`, to which all have contributed, or ends the generation because contracts differ. Returns the outcome. */
int decide(struct segment *s, u64 n);
/* Says that instance `n` is complete, which was carried out elsewhere, unless the generation is over. Returns the outcome.
   How many wait to join stays: a rank may yet have to read it of the instance before. */
int complete_elsewhere(struct segment *s, u64 n);
/* Ends the generation at instance `n`, unless it was decided before. Returns the outcome. */
int end_generation(struct segment *s, u64 n, int reason, int culprit);
/* Ends the generation at the instance that is open; returns `decided`. */
u64 end_now(struct segment *s, int reason, int culprit);
/* From instance `n` on, none completes. */
void lower_limit(struct segment *s, u64 n, int reason, int culprit);
/* Ends the generation where instance `n` cannot complete any more. Returns the outcome of `n`. */
int apply_limit(struct segment *s, u64 n);
/* Ends instance `n`, whose deadline has passed, unless all are there; `decider` names the missing seats. Returns the outcome. */
int expire(struct segment *s, u64 n, int decider);
/* The first instance in which a seat that is gone cannot take part; instances that it has published wholly may complete. */
u64 first_lost(const struct segment *s, int seat);
/* The seats that had not come when the generation ended with DEADLINE: a bit per seat, as `decider` saw them. */
void missing_seats(const struct segment *s, int decider, u64 missing[SEAT_WORDS]);
/* The earliest deadline that any seat has set for instance `n`; 0: none. */
u64 earliest_deadline(const struct segment *s, u64 n);
/* Whether a seat has published anything of instance `n`. */
int has_come(const struct segment *s, int seat, u64 n);

/* Wakes a seat: it looks at everything again. */
void ring(struct segment *s, int seat);
void ring_all(struct segment *s);
/* Wakes the seats in `bits`, which are taken out. */
void wake(struct segment *s, a64 bits[SEAT_WORDS]);

/* A copy of a seat's record of instance `n`; 0 where it has none, or is writing it. */
struct record_copy {
    u64 instance, digest[2], terms, flags, deadline, asked, description, began;
};
int read_record(const struct segment *s, int seat, u64 n, struct record_copy *copy);

#endif
