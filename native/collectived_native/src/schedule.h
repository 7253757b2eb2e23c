/* schedule.h: what a seat does in each tick of an instance. A function of the contract and the geometry alone. */
#ifndef COLLECTIVED_SCHEDULE_H
#define COLLECTIVED_SCHEDULE_H

#include "layout.h"

static inline u64 least(u64 a, u64 b) {
    return a < b ? a : b;
}

enum { MEETS_NOT, MEETS_EQUAL, MEETS_KNOWN, MEETS_ANY }; /* see README */

enum operation {
    ALL_REDUCE = 1, REDUCE, BROADCAST, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER, ACROSS, OPERATIONS,
    SENDS = OPERATIONS, RECEIVES, COUNTED_OPERATIONS /* those of letters are counted, and not in plans */
};

/* A run of leaves of one type that moves as one vector; for operations that cut or join values, one leaf. */
struct phase {
    int dtype;
    u64 item, result_item;         /* bytes of an element */
    u64 count;                     /* elements, where all have the same */
    const u64 *counts;             /* else: per seat, or per pair of seats (sender first); of ACROSS per seat, or `count` where values
                                      are folded; those that the worker brings; and where this seat's result begins there */
    u64 column;                    /* elements that one seat moves for another in a tick */
    u64 column_bytes;              /* between columns */
    u64 steps, first_step;         /* of all steps of the plan */
    int leaves_in, leaves_out;     /* how many, and the number of the first among the plan's */
    int first_in, first_out;
    const u64 *starts_in, *starts_out; /* leaves + 1 elements: where each begins */
    const u64 *whole_at;           /* per seat: bytes into the first tick at which its value lies, where it is whole */
};

struct plan { /* of one seat */
    int seats, me, operation, reduce_op, root, phases, leaves_in, leaves_out;
    int depth;                     /* ticks after which what was put has been delivered */
    int whole;                     /* all values fit into one tick */
    int meets, open;
    u64 steps, digest[2], terms, description, bytes_moved;
    u64 bytes;                     /* of the value: this seat's, or the root's where it alone has one */
    struct total *total;           /* where completed instances are counted */
    u64 whole_bytes;               /* of this seat's value in the first tick */
    int streams;                   /* results pass the caches */
    u64 longest;                   /* bytes from one seat for one other, where they can be read where they lie; 0: they cannot */
    struct phase phase[];          /* then the numbers to which they point */
};

struct phase_terms { /* as the caller describes a phase */
    int dtype;
    u64 counts_given;
    int leaves_in, leaves_out;
};

/* A plan with room for its numbers; `numbers` are for each phase: counts, leaves in, leaves out (elements). NULL: errno is
 * EINVAL, and `why` says what is wrong; or ENOMEM. Free with free(). */
struct plan *plan_make(const struct segment *s, int seat, int operation, int reduce_op, int root, int phases,
                       const struct phase_terms *terms, const u64 *numbers, const char **why);

/* Values of one instance: the leaves of all phases. */
struct values {
    const char **in;
    char **out;
};

/* The first tick of an instance that is whole: puts all of the value at `part`. */
void put_whole(const struct plan *plan, const struct values *values, char *part);
/* Delivers the result of such an instance from what all have put in `tick`; `offset`: where values begin. */
void take_whole(const struct segment *s, const struct plan *plan, const struct values *values, u64 tick, u64 offset);

/* A step of a larger one; `tick`: in which it is put, or was. */
void put_step(const struct segment *s, const struct plan *plan, const struct values *values, u64 step, u64 tick);
/* Folds this seat's share of a step, for others to take in the next tick. */
void fold_step(const struct segment *s, const struct plan *plan, const struct values *values, u64 step, u64 tick);
/* Delivers this seat's own share of a step that it has folded in `tick`. */
void keep_step(const struct segment *s, const struct plan *plan, const struct values *values, u64 step, u64 tick);
/* Delivers what others have put (depth 1) or folded (depth 2) of a step. */
void take_step(const struct segment *s, const struct plan *plan, const struct values *values, u64 step, u64 tick);

/* Whether it pays that values are read where they lie, and this seat's may be while it writes its result. Only where each
 * seat has one array at most, so that one address says where it lies, and where nothing is folded: that is quicker by ticks. */
int is_for_direct(const struct segment *s, const struct plan *plan, const struct values *values);
/* A run of bytes of a seat's value that this seat copies; its own among them. */
struct piece {
    int from;
    u64 at, bytes;
    char *to;
};
/* The one that follows `done` bytes; 0: there is none. */
int next_piece(const struct plan *plan, const struct values *values, u64 done, struct piece *piece);
/* Copies one that is this seat's own. */
void copy_piece(const struct plan *plan, const struct values *values, const struct piece *piece);

/* Whether this is the worker's part in a collective of several hosts: it takes the partials, and brings the results. */
int is_bringer(const struct plan *plan);
/* Whether the worker needs that a seat has come, to take what there is to take. */
int takes_from(const struct plan *plan, int seat);

/* Phases whose last step is below `steps`. */
int phases_below(const struct plan *plan, u64 steps);

#endif
