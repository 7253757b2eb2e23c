/* carrier.h: a rank's process moves the values of a large collective itself, between its arrays and other hosts.
 *
 * A native thread does it, without the GIL. The worker says what is to be moved, by orders over a socket of datagrams:
 * the moves of its plan, with the headers of their frames. The thread sends from and receives into the caller's arrays,
 * over links of the worker, which are lent with the orders. Between orders the worker uses them. The thread touches the
 * memory of an instance only while it carries out an order of that instance, and `carrier_withdraw` waits until it does not.
 *
 * An order is checked wholly before anything moves. A later failure (a peer is gone, another header comes, the instance is
 * withdrawn) breaks the carrier: streams that were left amid a frame are of no more use.
 */
#ifndef COLLECTIVED_CARRIER_H
#define COLLECTIVED_CARRIER_H

#include <pthread.h>

#include "crossing.h"

enum {
    MOST_LINKS = 256,
    NOTHING = 255,     /* as `mine` of a move */
    PIECE = 256 << 10, /* bytes computed between two looks at the world; a power of two, so that they are whole elements */
    WIDEST = 16,       /* bytes of an element that is folded */
    WAKE = 0, ORDERS = 1, OWN_POLLS = 2,
};
static const u32 NOBODY = ~(u32)0; /* as the peer of an answer */

enum order { ORDER_RUN = 1, ORDER_STAGE, ORDER_PING, ORDER_LINK };
enum answer { ANSWER_DONE = 1, ANSWER_STAGED, ANSWER_PONG, ANSWER_BROKEN, ANSWER_REFUSED };

/* Orders and answers go over the socket as `struct` of Python packs them. */
struct told_order { /* <BxxxxxxxQ */
    unsigned char kind, unused[7];
    u64 number; /* instance */
};
struct told_run { /* <BxxxIQiiqQQ, then the moves */
    unsigned char kind, unused[3];
    u32 moves;
    u64 instance;
    int32_t dtype, reduce_op; /* reduce_op 0: nothing is folded */
    i64 divisor;
    u64 scratch, row; /* bytes, and those of an element */
};
struct told_move { /* <BBBBIIxxxxQQ64s */
    unsigned char kind, memory, mine, left;
    u32 round, peer, unused;
    u64 at, elements;
    unsigned char header[HEADER_BYTES]; /* of a finish and a copy: the element where that goes, or comes from */
};
struct told_link { /* <BxxxIQ, then the bytes; the descriptor rides along where the link is new */
    unsigned char kind, unused[3];
    u32 peer;
    u64 bytes; /* that the worker has received there already */
};
struct told_answer { /* <BxxxIixxxxQ64s */
    unsigned char kind, unused[3];
    u32 peer;
    int32_t error; /* an errno */
    u32 unused_too;
    u64 number;
    unsigned char header[HEADER_BYTES]; /* with EPROTO: that which has come */
};

struct span {
    char *start;
    u64 bytes;
};

struct offer { /* memory of an instance, which its owner keeps until it has withdrawn it */
    struct offer *next;
    u64 instance;
    struct span memory[MEMORIES], staging; /* PARTIALS: the value; SUMS are the carrier's own */
    int is_written;                        /* whether anything may be in the result */
};

struct link {
    u32 peer;
    int descriptor;
    char *ahead; /* bytes that come before those of the socket */
    u64 ahead_bytes, ahead_taken;
    u64 held[2]; /* incoming, outgoing: the last pass in which an earlier move of this direction was not over */
};

struct carrier {
    int orders, wake; /* `wake`: an eventfd */
    pid_t owner;      /* a forked child has no such thread, and the lock may be held there forever */
    pthread_t thread;
    _Atomic int closing, cancelled; /* `cancelled`: of the instance that is busy */
    a64 sent, received;
    pthread_mutex_t lock;
    pthread_cond_t idle;
    struct offer *offers, *busy; /* guarded by the lock */
    /* The thread's. */
    int links;
    struct link link[MOST_LINKS];
    int is_attentive; /* whether orders are looked at amid an order: not, once one waits there that is no ping */
    int is_alone;     /* whether the worker is gone */
    int is_broken, broken_errno;
    u32 broken_peer;
    unsigned char odd_header[HEADER_BYTES]; /* that has come in place of another */
    u64 pass;
    struct span scratch;
    char *bounce, *order;
};

/* Begins the thread; NULL: errno says why not. The descriptor is the caller's until then. */
struct carrier *carrier_open(int orders);
/* 0, or -1: the instance is offered already. */
int carrier_offer(struct carrier *c, struct offer *offer);
/* Waits until the thread touches none of its memory; the offer, or NULL: there is none, or another call withdraws it. */
struct offer *carrier_withdraw(struct carrier *c, u64 instance);
/* Ends the thread, which is done once. */
void carrier_stop(struct carrier *c);
void carrier_close_descriptors(struct carrier *c);
/* Of one that is stopped, and whose offers are withdrawn. */
void carrier_free(struct carrier *c);

/* The thread's, of carrier.c: */

/* Sleeps until one of `polls` has an event, of which the first two are the carrier's own. */
void carrier_sleep(struct carrier *c, struct pollfd *polls, int count, short of_orders);
/* Answers pings; whether the order that is carried out has to be broken off. */
int carrier_attend(struct carrier *c);
void carrier_break(struct carrier *c, u32 peer, int error);
struct link *carrier_find_link(struct carrier *c, u32 peer);

/* Makes the moves of an order, or breaks the carrier; 0, or the errno of a refusal, and the peer to which it has no link. */
int carrier_run(struct carrier *c, const struct told_run *told, const struct offer *offer, u32 *peer);

#endif
