/* crossing.h: the worker's part in small instances of groups that span hosts, once it has done the same before.
 *
 * A route says how the instances of one contract travel: the plan's moves with all that can be known beforehand. As long
 * as nothing else happens the worker's thread stays here: it is rung when its ranks have come, takes their partial sums,
 * sends, receives and folds as the route says, and brings the results. Anything out of the ordinary ends that: a frame
 * that is not the one expected, a contract without a route, an instance that does not move for `patience`, an event on a
 * descriptor of another owner. Then the general executor goes on. It begins the open instance anew. It gets the numbers of
 * bytes sent, and all bytes received: so nothing is lost, and nothing is sent twice.
 */
#ifndef COLLECTIVED_CROSSING_H
#define COLLECTIVED_CROSSING_H

#include <poll.h>

#include "chain.h"
#include "engine.h"

enum {
    HEADER_BYTES = 64,    /* of a frame: `transport/frame.py` */
    HEADER_KIND = 4,      /* its first bytes: magic and version; then its kind, and a byte that is 0 */
    KIND_DATA = 1,
    KIND_ANNOUNCEMENT = 3,
    HEADER_KEY = 12,      /* then key and generation, */
    HEADER_INSTANCE = 28,
    HEADER_CHAIN = 44,
    MOST_ROUTES = 256,
    MOST_WIRES = 64,
    RECENT = 4096,        /* arrivals that are remembered, of 1,024 instances at most */
    LATE = 2,             /* `is_odd` where nothing but time has passed */
    MOST_MARKED = 9,      /* transfers of an instance of which it is remembered when they were done */
};

/* INPUT, SCRATCH and OUTPUT of a plan; and bytes that are the same in all instances. */
enum memory { PARTIALS, SUMS, RESULT, MEMORIES, CONSTANTS = MEMORIES, ALL_MEMORIES };
enum move_kind { MOVE_SEND, MOVE_RECEIVE, MOVE_KEEP, MOVE_FOLD, MOVE_FINISH, MOVE_COPY, MOVE_KINDS };

struct move {
    enum move_kind kind;
    int round;
    int wire;       /* of sends and receives */
    int memory;     /* sent or finished from there, received or copied there; of constants those have to come that are there */
    int mine;       /* a receive is folded with what is there, a fold takes it as its own part, a copy is of it; -1: it is not folded */
    u64 left;       /* the received part stands left; of a copy: which elements are copied; of a finish: where in the result */
    u64 at, elements;
    int parts;      /* of a fold: the numbers of the moves that keep them, in order; -1: the own part */
    int part[MOST_WIRES];
    unsigned char header[HEADER_BYTES];
    /* Of the open instance. */
    u64 done;         /* bytes sent */
    u64 began, ended; /* of its round; 0: it is not done */
    const char *kept;
    u64 landed, end;  /* where in the wire's log that would lie which was received into `memory` at once */
};

struct route {
    const struct plan *gathers, *brings;
    unsigned char contract[MOST_CONTRACT];
    size_t contract_bytes;
    int dtype, reduce_op;
    long divisor;
    u64 elements[ALL_MEMORIES], row[ALL_MEMORIES]; /* how many there are, and their bytes */
    enum memory brought; /* from there */
    char *constants, *blob; /* of what is brought, for ranks that take what comes; NULL: those do not use this route */
    char *said; /* by each rank of its value, where lengths may differ */
    u64 blob_bytes, said_bytes;
    int moves, rounds, keeps_partials; /* whether nothing is written over the ranks' values */
    struct move *move;
    /* Since they were taken in. */
    u64 calls, nanoseconds, uneven; /* from the first arrival to the end; to the last arrival */
    u64 *waited;                    /* by seat: from its arrival to the end */
};

/* A link to another worker; `log` has what was received since the open instance began. A large frame that is moved as it is
   lands where it belongs, and its place in the log stays empty until other code has to read it. */
struct wire {
    int descriptor, is_full;
    char *log, *land;         /* `land`: of the first byte of the payload that lands; NULL: none does */
    u64 room, have, used;
    u64 wanted, land_at;      /* how much has to come; where the payload would begin in the log */
    u64 sent;                 /* of the open instance */
    u64 all_sent, all_received; /* of those that are complete */
};

struct recent {
    u64 instance, started, ended;
    int route, marked;
    u64 mark[2 * MOST_MARKED]; /* of each of the first transfers: when its round began, and when it was done */
};

struct crossings {
    struct engine *engine;
    int knock, ranks;
    u64 patience;                     /* nanoseconds in which an open instance moves, or all have come to it, as a rule */
    unsigned char header[HEADER_BYTES]; /* the common part of all headers */
    struct route *route[MOST_ROUTES];
    int routes, wires;
    struct wire wire[MOST_WIRES];
    char *memory[MEMORIES], *open_memory[MEMORIES]; /* of the open instance: some lie in the segment */
    u64 room;
    u64 next;                         /* instance */
    unsigned char chain[CHAIN_BYTES]; /* of those before it */
    unsigned char open_chain[CHAIN_BYTES];
    struct route *open;
    int round, is_rung, is_odd;
    int awaits;                       /* all ranks have come, and take what comes: what that is has not come */
    u64 rung_at, started, moved_at, round_began;
    u64 *began, *description;         /* of the open one, then of the recent ones: by seat */
    u64 completed, kept;
    struct recent *recent;            /* the latest that are complete */
};

/* For so many ranks, whose worker has the engine's seat and is rung by `knock`; NULL: no memory. */
struct crossings *crossings_open(struct engine *engine, int knock, u64 patience, const void *header);
void crossings_close(struct crossings *x);
/* Takes over a route, which `free_route` frees; 0, or -1: there is no memory, or no room for another. */
int crossings_add(struct crossings *x, struct route *route);
void free_route(struct route *route);
/* Begins at that instance, without wires. */
void crossings_begin(struct crossings *x, u64 next, const void *chain);
/* Adds a wire, with what has been received there; 0, or -1: there is no memory. */
int wire_begin(struct crossings *x, int wire, int descriptor, const void *received, u64 bytes);
/* Carries instances over until a descriptor of another owner has an event, the time is over (~0: never), or something
   is odd. How many of `polls` have events that are not dealt with. */
int crossings_wait(struct crossings *x, struct pollfd *polls, int count, u64 nanoseconds);

#endif
