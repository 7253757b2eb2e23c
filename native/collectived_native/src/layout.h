/* layout.h: what lies in a segment, and where.
 *
 * A segment is one sealed memfd per generation. It begins with an area that all processes write: the words that
 * decide outcomes, and those that others need to wake a seat. Then comes one range per seat, which that seat alone writes.
 * Every place is computed from the geometry that came with the join. Nothing that is read from a segment is used as an
 * index, length or address before it has been checked: words of others are compared, or bounded. An address in another
 * process is only given to the kernel, which reads there (direct.c).
 *
 * All words are little-endian and atomic. No fences are used anywhere: what has to be seen in order is stored with
 * release (or, where a store must come before a load of another word, exchanged with seq_cst) and loaded with acquire
 * (or seq_cst), which holds on weakly ordered processors and is understood by ThreadSanitizer.
 */
#ifndef COLLECTIVED_LAYOUT_H
#define COLLECTIVED_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef int64_t i64;
typedef _Atomic u64 a64;
typedef _Atomic u32 a32;

enum {
    MAX_SEATS = 256,
    SEAT_WORDS = MAX_SEATS / 64,
    BLOCK_SEATS = 8, /* seats per counter of arrivals */
    MAX_BLOB = 96 << 10,
    PARTS = 3, /* ticks whose data lie in the segment at the same time: engine.c says why three are enough */
    TICK_BITS = 20,
    REASON_BITS = 4, /* of a word, lowest first */
    SEAT_BITS = 10,
    WAITING_BITS = 10,
    WORD_BITS = REASON_BITS + SEAT_BITS + WAITING_BITS, /* the rest is an instance */
    WORKER_SEAT = (1 << SEAT_BITS) - 1, /* where a word names a seat: the worker, which has none */
    MOST_WAITING = (1 << WAITING_BITS) - 1,
    LETTERS = 4096,      /* of one sender, on their way */
    LETTER_WORDS = LETTERS / 64,
    LETTER_SLOT = 4096,  /* bytes that each of them has at hand; longer ones get more */
    LETTER_BLOB = 1024,
    LETTER_RING = 256 << 10,
    TOTALS = 256,        /* of one seat */
    HISTORY = 512,       /* instances that a seat remembers */
    CACHE_LINE = 64,
    PAGE = 4096,
};

enum reason { /* why a generation is over; the lowest bits of `decided` and `limit` */
    COMPLETE = 0,
    LOST,
    LEFT,
    DEADLINE,
    ABORTED,
    INTERRUPTED,
    MISMATCH,
    NONSENSE,
    WORKER,
    STOPPED,
    FAILED,
    /* of one job alone, never in a word */
    CANCELLED = 16,
    EXPIRED,
    DETACHED,
    NO_ROOM,
    BY_DOORBELL, /* the worker has carried it out, and says by the doorbell what has come */
    PENDING = -1,
    KNOCK = -2,
    DESCRIBE = -3,
};

/* The numbers that the worker chooses once per generation. They come with the join; their digest is part of every record's
 * digest, so that ranks with different ones never compute together. */
struct geometry {
    u64 version;  /* of the schedules */
    u64 seats;
    u64 operated; /* 1: the last seat is the worker's, which carries collectives to other hosts */
    u64 start;    /* number of the first instance */
    u64 share;    /* bytes of a column: what one seat moves for one other in a tick */
    u64 small;    /* bytes of a seat's value up to which one tick carries it all */
    u64 streamed; /* bytes of a result from which it is written past the caches */
    u64 mail;     /* bytes in which a seat stages letters that no receive has asked for */
    u64 direct;   /* bytes of a value for another seat from which that reads it where it lies */
};
enum { SCHEDULE_VERSION = 6 };

struct record { /* a seat's description of its instance; two of them, in turn */
    _Alignas(CACHE_LINE) a64 instance; /* ~0 while it is written */
    a64 digest[2];                     /* of contract and geometry */
    a64 terms;                         /* digest of the terms for a rank that takes any value */
    a64 flags;
    a64 deadline;    /* nanoseconds of the worker's clock; 0: none */
    a64 asked;       /* nanoseconds that its caller gave it, for messages */
    a64 description; /* the worker's number for it */
    a64 began;       /* when it was submitted, by the worker's clock */
    a64 value; /* where it lies in this seat's process, with RECORD_DIRECT */
};
enum { /* flags of a record; bits 32-63: bytes of the blob */
    RECORD_OPEN = 1,    /* takes what comes */
    RECORD_MEETS = 2,   /* the first tick carries a blob, and may be the last */
    RECORD_WHOLE = 4,   /* all of this seat's value lies in the first tick */
    RECORD_DIRECT = 8,  /* others may read it from this seat's process, and this seat can read theirs */
    RECORD_BLOB_SHIFT = 32,
};

struct letter { /* one send; written by the sender alone. The receiver's answers lie in its `receipts` */
    _Alignas(CACHE_LINE) a64 serial; /* odd while the letter is valid; counts up */
    a64 address;                     /* receiver << 32 | tag */
    a64 number;                      /* among the sender's letters */
    a64 bytes;
    a64 blob_bytes;
    a64 filled;  /* bytes that can be read */
    a64 place;   /* within the seat's mail; ~0: in the letter's own slot, after the blob */
    a64 ring_end; /* bytes from LETTER_RING on up to there are written over what has been taken */
    a64 source;   /* where the value lies in the sender's process, as long as it may be read there; 0: it may not */
};

struct receipt { /* a receiver's answer to one letter: the serial that it has matched, and how far it has read */
    a64 serial;
    a64 taken; /* bytes, and one more once it has all; or READS_SOURCE */
};
static const u64 READS_SOURCE = (u64)1 << 63; /* the letter must stay as it is until it has all */

/* The completed calls of a seat for one description; it alone writes. The last ones, one for each operation, are for all
 * descriptions that found no place of their own. */
struct total {
    _Alignas(CACHE_LINE) a64 description; /* 1 + the number given to its plans; 0: not in use */
    a64 operation;
    a64 calls;       /* written last */
    a64 bytes;       /* of values, the root's where it alone has one */
    a64 nanoseconds; /* from submission to completion */
};

/* A seat's memory of an instance that it has completed, at `instance % HISTORY`; it alone writes. */
struct past {
    a64 instance; /* 1 + its number, written last; 0: none, or it is written */
    a64 description;
    a64 began, ended; /* by the worker's clock: from submission until this seat had its result */
};

struct seat { /* the start of a seat's own range */
    _Alignas(CACHE_LINE) a64 progress; /* instance << TICK_BITS | ticks published in it */
    a64 ticks;                         /* published since the segment was made */
    struct record record[2];
    _Alignas(CACHE_LINE) a64 live[LETTER_WORDS]; /* letters that are valid: a bit each */
    a64 posted;                    /* receives that are not matched */
    _Alignas(CACHE_LINE) a32 cpu; /* 1 + where it waited last */
    a64 slept, hops;
    a64 missing[SEAT_WORDS]; /* the seats that had not come when this seat let an instance expire */
    /* Its process, as that knows itself, and a number that lies there; 0: not said. See direct.c. */
    _Alignas(CACHE_LINE) a64 process, token_at, token;
};

struct meeting_place { /* of one seat, written by others */
    _Alignas(CACHE_LINE) a32 bell; /* the one futex on which this seat sleeps */
    a32 asleep;                    /* threads of this seat that sleep on it, or are about to */
    a32 is_operated;               /* by the worker, which sleeps elsewhere: it is woken by its eventfd */
    a64 mail;                      /* counts letters and receipts for this seat */
    _Alignas(CACHE_LINE) a64 waiters[SEAT_WORDS]; /* seats that sleep until this one publishes */
};

struct counter {
    _Alignas(CACHE_LINE) a64 count;
};

struct head {
    u64 magic, version, seats; /* for people who look at a dump */
    _Alignas(CACHE_LINE) a64 decided; /* how many are complete, waiting when the last was, culprit, reason */
    _Alignas(CACHE_LINE) a64 limit;   /* from this instance on none can complete: as `decided`; ~0: no limit */
    a64 waiting;                      /* how many wait to join the group */
    a64 missing[SEAT_WORDS];          /* the seats that had not come when the worker let an instance expire */
    a64 gone[SEAT_WORDS];             /* seats that send and receive no more */
    _Alignas(CACHE_LINE) a64 sleepers[SEAT_WORDS]; /* seats that sleep until `decided` changes */
    struct counter blocks[MAX_SEATS / BLOCK_SEATS], top;
    struct meeting_place places[];
};

/* A process's mapping of a segment; several engines of a process share one. */
struct segment {
    struct geometry geometry;
    u64 geometry_digest;
    u64 device, inode, serial; /* the serial distinguishes it from every other mapping that this process ever had */
    int users, knock; /* knock: a descriptor of the worker's eventfd, closed with the mapping; -1: none */
    u64 epoch; /* of the process: see `segment_is_ours` */
    char *base;
    u64 bytes, front, seat_bytes, part, results, letters, receipts, totals, history, slots, mail;
    struct segment *next;
};

static inline struct head *head_of(const struct segment *s) {
    return (struct head *)s->base;
}

static inline struct meeting_place *place_of(const struct segment *s, int seat) {
    return &head_of(s)->places[seat];
}

static inline struct seat *seat_of(const struct segment *s, int seat) {
    return (struct seat *)(s->base + s->front + (u64)seat * s->seat_bytes);
}

/* Where a seat puts what others read of its value in a tick. */
static inline char *input_of(const struct segment *s, int seat, u64 tick) {
    return (char *)seat_of(s, seat) + PAGE + tick % PARTS * s->part;
}

/* Where a seat puts what it has folded for others in a tick. */
static inline char *result_of(const struct segment *s, int seat, u64 tick) {
    return (char *)seat_of(s, seat) + s->results + tick % PARTS * s->geometry.share;
}

static inline struct letter *letters_of(const struct segment *s, int seat) {
    return (struct letter *)((char *)seat_of(s, seat) + s->letters);
}

/* The receipts of `seat` for the letters of `sender`. */
static inline struct receipt *receipts_of(const struct segment *s, int seat, int sender) {
    return (struct receipt *)((char *)seat_of(s, seat) + s->receipts) + (u64)sender * LETTERS;
}

static inline struct total *totals_of(const struct segment *s, int seat) {
    return (struct total *)((char *)seat_of(s, seat) + s->totals);
}

static inline struct past *past_of(const struct segment *s, int seat, u64 instance) {
    return (struct past *)((char *)seat_of(s, seat) + s->history) + instance % HISTORY;
}

static inline char *slot_of(const struct segment *s, int seat, int letter) {
    return (char *)seat_of(s, seat) + s->slots + (u64)letter * LETTER_SLOT;
}

static inline char *mail_of(const struct segment *s, int seat) {
    return (char *)seat_of(s, seat) + s->mail;
}

/* segment.c */

/* Computes all places. 0, or -1 with errno EINVAL where the geometry is out of range. */
int segment_lay_out(struct segment *s, const void *geometry, size_t bytes);
/* A new sealed memfd; -1: errno. */
int segment_create(const void *geometry, size_t bytes);
/* Maps it, or finds the mapping that is there; `seat` may then be written (-1: none, -2: all). NULL: errno. */
struct segment *segment_map(int descriptor, const void *geometry, size_t bytes, int seat);
void segment_unmap(struct segment *s);
/* Whether this process mapped it: not in a forked child, where the memory is not there and locks may be held. */
int segment_is_ours(u64 epoch);

#endif
