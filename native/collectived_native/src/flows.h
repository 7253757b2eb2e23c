/* flows.h: how much of a phase moves from seat to seat, and where it lies in values and results. */
#ifndef COLLECTIVED_FLOWS_H
#define COLLECTIVED_FLOWS_H

#include "schedule.h"

enum way { SHARES, PIECES, COMMON, PERSONAL };

static const struct { enum way way; int rooted, folds; } OPERATION[OPERATIONS] = {
    [ALL_REDUCE] = {SHARES, 0, 1},     [REDUCE] = {SHARES, 1, 1}, [BROADCAST] = {COMMON, 1, 0},
    [ALL_GATHER] = {COMMON, 0, 0},     [GATHER] = {COMMON, 1, 0}, [SCATTER] = {PERSONAL, 1, 0},
    [REDUCE_SCATTER] = {PIECES, 0, 1}, [ALL_TO_ALL] = {PERSONAL, 0, 0}, [BARRIER] = {COMMON, 0, 0},
    [ACROSS] = {SHARES, 1, 1}, /* the root is the worker, which has no value of its own */
};

/* Seats that fold: the first so many. */
static inline int folders(const struct plan *plan) {
    return plan->seats - (plan->operation == ACROSS);
}

static inline int folds(const struct plan *plan) {
    return OPERATION[plan->operation].folds && (plan->operation != ACROSS || plan->reduce_op);
}

/* Elements that `from` has for `to`; in phases that fold, and in common ones, for all. */
static inline u64 flow(const struct plan *plan, const struct phase *p, int from, int to) {
    switch (plan->operation) {
    case ALL_REDUCE:
    case REDUCE: return p->count;
    case ACROSS: return from == plan->root ? 0 : folds(plan) ? p->count : p->counts[from];
    case BROADCAST: return from == plan->root ? p->count : 0;
    case ALL_GATHER:
    case GATHER: return p->counts[from];
    case SCATTER: return from == plan->root ? p->counts[to] : 0;
    case REDUCE_SCATTER: return p->counts[to];
    case ALL_TO_ALL: return p->counts[(u64)from * (u64)plan->seats + (u64)to];
    default: return 0;
    }
}

/* Elements of the value of a seat. */
static inline u64 value_of(const struct plan *plan, const struct phase *p, int seat) {
    enum way way = OPERATION[plan->operation].way;
    if (way == SHARES || way == COMMON) return flow(plan, p, seat, 0);
    u64 sum = 0;
    for (int to = 0; to < plan->seats; to++) sum += flow(plan, p, seat, to);
    return sum;
}

static inline int receives(const struct plan *plan) {
    return plan->operation == BROADCAST || plan->operation == SCATTER || !OPERATION[plan->operation].rooted ||
           plan->me == plan->root;
}

/* Elements of the result of this seat. */
static inline u64 result_of_seat(const struct plan *plan, const struct phase *p) {
    if (plan->operation == ACROSS) return p->starts_out[p->leaves_out]; /* a rank that is no root has none */
    if (!receives(plan)) return 0;
    u64 sum = 0;
    switch (OPERATION[plan->operation].way) {
    case SHARES: return p->count;
    case PIECES: return p->counts[plan->me];
    case COMMON:
    case PERSONAL:
        for (int from = 0; from < plan->seats; from++) sum += flow(plan, p, from, plan->me);
    }
    return sum;
}

/* Where in this seat's value that begins which it has for `to`. */
static inline u64 offset_in(const struct plan *plan, const struct phase *p, int from, int to) {
    enum way way = OPERATION[plan->operation].way;
    u64 at = 0;
    if (way == PIECES || way == PERSONAL)
        for (int i = 0; i < to; i++) at += flow(plan, p, from, i);
    return at;
}

/* Where in this seat's result that begins which it has from `from`. */
static inline u64 offset_out(const struct plan *plan, const struct phase *p, int from) {
    u64 at = 0;
    for (int i = 0; i < from; i++) at += flow(plan, p, i, plan->me);
    return at;
}

#endif
