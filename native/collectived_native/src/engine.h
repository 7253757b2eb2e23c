/* engine.h: the progress engine of one seat.
 *
 * An engine carries all jobs of its seat: collectives one after another, letters beside them. It never blocks by itself:
 * `engine_advance` does what can be done. A thread that waits for a job drives the engine (the leader); other threads that wait
 * follow, and take over when the leader has gone. A thread that sleeps does not lead. From the first asynchronous job on a
 * native thread of the engine's own drives it when no other thread does.
 */
#ifndef COLLECTIVED_ENGINE_H
#define COLLECTIVED_ENGINE_H

#include <pthread.h>

#include "schedule.h"
#include "word.h"

enum { MILLISECOND = 1000000 };
enum {
    SLEEP_MOST = 50 * MILLISECOND,  /* a sleeper then checks everything that could have woken it, and signals */
    KNOCK_AFTER = 20 * MILLISECOND, /* of waiting, the worker gets a knock */
    KNOCK_EVERY = 5 * SLEEP_MOST,   /* a caller looks up that waits for a collective, though nothing rings */
    GRACE = 150 * MILLISECOND,      /* after a deadline the worker decides; a rank by itself after so long */
};

static const u64 NO_INSTANCE = ~(u64)0 >> 17; /* later than any */

enum stage { QUEUED, MEETING, WHOLE, STEPS, CHOOSING, DIRECT, DONE };
enum kind { COLLECTIVE, SEND, RECEIVE };
enum { CANCEL = 1, ABANDON };

struct job {
    enum kind kind;
    enum stage stage;
    _Atomic int state; /* PENDING, DESCRIBE, or how it ended */
    const struct plan *plan;
    struct values values;
    u64 instance, deadline, asked, began, knock_at;
    u64 first_tick;   /* of the segment's count, in which step 0 is put */
    u64 base;         /* ticks before it */
    u64 tick;         /* the next, counted from step 0 */
    a64 steps_done;
    int waiting;      /* how many waited to join when it was decided: nothing later is, before this seat comes to it */
    int is_direct;    /* this seat is ready to have values read where they lie */
    u64 copied;       /* bytes of the result, if all are ready */
    const void *blob;
    u64 blob_bytes;
    struct { /* of sends and receives */
        int peer, slot; /* peer: -1: the seat that sends first; slot: -1: not matched, or not begun */
        u32 tag;
        u64 serial, bytes, moved;
        int leaves;
        const u64 *lengths;  /* of the leaves, in bytes */
        u64 wait_until;      /* a send lets its receiver match it, or others read what fills the mail, until then */
        u64 give_up;         /* when a send is refused that has found no room since, 0: it has */
        int expects;         /* a receive that knows blob and length beforehand */
        u64 source;          /* where a receive reads in the sender's process, or a send lets it; 0: it does not */
        _Atomic int cancels; /* CANCEL: it is to end unless it is matched; ABANDON: wherever it would wait */
    } letter;
    int notify, described;
    void *owner;      /* the binding's */
    struct job *next; /* in the queue */
    struct job *next_finished;
    int listed; /* among those to be collected: a job that is described may end before it was */
};

struct waiting { /* the arguments of the calling thread */
    u64 until;       /* by the engine's clock; 0: forever */
    u64 began;       /* by the same clock; 0: the caller looks up at nothing, and KNOCK is never returned */
    /* Looks at signals, with the GIL; not 0: an exception is set. NULL: this thread has none. */
    int (*interrupted)(void *);
    void *argument;
    u64 looked; /* when it did so last */
    int raised; /* whether it has set one */
};

struct engine {
    struct segment *segment;
    int seat;
    u64 epoch;
    i64 clock_offset;
    int knock, doorbell, is_operated;
    a32 rung;                         /* the doorbell has something to read, of which its reader must be notified */
    a32 is_roused;                    /* callers look up every SLEEP_MOST */
    u64 token;                        /* proves to others that they read this process; 0: they are not to */
    u64 tried[MAX_SEATS], could[SEAT_WORDS]; /* by seat: the token with which it was tried to read that; and whether it could be */
    /* The queue. `lock` is held for a few instructions only. */
    pthread_mutex_t lock;
    struct job *first, *last;         /* collectives that are not done */
    struct job *letters;              /* sends, and receives that are matched, that are not done */
    struct job *receives, *last_receive; /* receives that are not matched, as they were posted */
    u32 timed;                        /* of these, how many have a deadline */
    a32 posts;                        /* all of these */
    a32 withdrawals;                  /* how often one of them was cancelled or abandoned */
    struct mailbox *mailbox;          /* see letters.c; made when it is first used */
    u64 mail_seen;
    struct job *finished, **finished_end; /* to be collected */
    u64 next_instance;
    a32 waiting;                      /* as the last that completed says */
    a32 unfinished;
    a32 inside;                       /* threads that wait in this engine */
    /* Leading. */
    a32 leader;                       /* 1: a thread drives */
    a32 news;                         /* futex of this process: a job is done, or the leader has gone */
    a32 followers;
    /* The wait of the open instance: for the progress of a seat, or `decided` (seat -1). The leader's alone. */
    struct { int seat, everybody; u64 want, instance; } wait;
    u64 knocked;                      /* 1 + the last instance for which the worker got a knock */
    u64 ticks;                        /* published by this seat */
    /* Waiting. */
    u64 spin, budget, hopped;
    int yields, hops, rested, crowd;
    /* The thread. */
    pthread_t thread;
    enum { NO_THREAD, RUNNING, ENDED } has_thread; /* under `lock` */
    a32 closing;
};

/* Where a seat counts what it completes of a description. */
struct total *find_total(const struct engine *e, u64 description, int operation);
/* Counts a job that is complete there; when that was. */
u64 count(const struct engine *e, const struct job *job, struct total *total, u64 bytes);
/* Counts a send or receive that was complete so many nanoseconds after its submission, and was not carried out here. */
void count_message(const struct engine *e, int operation, u64 bytes, u64 nanoseconds);

struct engine *engine_open(struct segment *segment, int seat);
/* Ends the thread; jobs that are not done, or are submitted later, end with DETACHED. The segment stays mapped. */
void engine_close(struct engine *e);
u64 engine_now(const struct engine *e);
/* Says whether the worker operates this seat, which then sleeps on its eventfd. */
void engine_operate(struct engine *e, int is_operated);
/* Whether all others have come to instance `n`; else this seat is rung when the first of those has that have not, or when each has. */
int engine_attend(struct engine *e, u64 n, int each);
/* Has callers that wait look up, and often from here on. */
void engine_rouse(struct engine *e);
/* Takes part in nothing later. */
void engine_leave(struct engine *e);
/* Takes part in no instance from `n` on, but in those whose value it has published wholly. */
void engine_limit(struct engine *e, u64 n);

/* Leaves out a number, that of an instance which is not carried out here; returns it. */
u64 engine_skip(struct engine *e);
/* Puts a collective into the queue; it gets its number. */
void engine_submit(struct engine *e, struct job *job);
/* Does what can be done without waiting, until about `budget` bytes have moved; whether anything was done. */
int engine_advance(struct engine *e, u64 budget);
/* Waits for a job: its state, KNOCK, PENDING when the time is over, or INTERRUPTED with an exception set. */
int engine_wait(struct engine *e, struct job *job, struct waiting *how);
/* The same for a short while, without sleeping. */
int engine_try(struct engine *e, struct job *job, u64 nanoseconds);
/* Makes sure that a thread goes on with the jobs in the queue. */
void engine_entrust(struct engine *e, struct job *job);
/* Goes on with a job that was stopped with DESCRIBE. */
void engine_resume(struct engine *e, struct job *job);
/* Waits until there is a finished job to collect, or the time is over. */
void engine_await_finished(struct engine *e, struct waiting *how);
/* Takes out all finished jobs that are to be collected. */
struct job *engine_collect_finished(struct engine *e);
/* The worker's part in instance `n` of a group that spans hosts, for which all values lie in the first tick: takes the values or
   their partial sums, once all ranks have come that have any; NULL: they stay where they are. COMPLETE, PENDING, or why the
   generation is over. */
int engine_gather(struct engine *e, const struct plan *plan, const struct values *values, u64 n);
/* Where in the segment those of one pack lie as the worker needs them, all of one rank; NULL: they have to be taken. */
char *engine_find_partials(const struct engine *e, const struct plan *plan);
/* Where the results of one pack belong there, and room for so many bytes is; NULL: that is not so. */
char *engine_find_results(const struct engine *e, const struct plan *plan, u64 bytes);
/* Brings the results (NULL: they are there already), and the blob for ranks that take any value, which completes it. Returns its
   outcome. */
int engine_bring(struct engine *e, const struct plan *plan, const struct values *values, u64 n, const void *blob, u64 bytes);
/* engine.c: does what can be done for the collective at the head of the queue; else says in `wait` what it waits for. */
int engine_step(struct engine *e, struct job *job);
/* Takes a receive that is matched out of those that are not. */
void engine_move_matched(struct engine *e, struct job *job);
/* direct.c: whether the values of a job can be read where they lie, as far as this seat knows. */
int can_be_direct(struct engine *e, const struct job *job);
/* Copies more of the result: 1, or 0: nothing is left; or -1: something cannot be read, see find_culprit. */
int copy_directly(struct engine *e, struct job *job, int *culprit);
/* Whether the processes are still there from which it was copied: then what was read is what their callers had given. */
int sources_are_there(const struct engine *e, const struct job *job, int *culprit);
/* The culprit where bytes of a seat's process cannot be copied: that seat, whose value is not there; this one, which may
 * not read it, or cannot write the result; or -1: that process is over, or takes no part any more, which the worker reports. */
int find_culprit(const struct engine *e, int seat, u64 address, u64 bytes);
/* Copies what lies in a seat's process; 0, or -1: it cannot be read. */
int read_seat(const struct engine *e, int seat, u64 address, void *to, u64 bytes);
/* Whether the kernel lets others read this process's memory there: not, say, where a device's is mapped. */
int can_be_read(const char *memory, u64 bytes);
/* Whether a seat's process is the one that it was, and can be read. */
int is_readable(const struct engine *e, int seat);
/* Says where others find this seat's process; and that they do not any more. */
void show_process(struct engine *e);
void hide_process(struct engine *e);
/* Ends a job. */
void engine_finish(struct engine *e, struct job *job, int state);

/* wait.c */

/* Nanoseconds of the monotonic clock. */
u64 now(void);
/* Whether what the engine waits for has come. */
int look(const struct engine *e);
/* Looks for so long; whether it has come. */
int glance(struct engine *e, u64 nanoseconds);
/* Looks for as long as that has paid of late, where there are cores for it; whether it has come. */
int spin(struct engine *e);
/* Has the engine's seat woken when what it waits for comes; whether it has come already. */
int arm(struct engine *e);
/* Sleeps on the seat's bell unless it has rung since `rung`; whether a signal has ended that. */
int sleep_on_bell(struct engine *e, u32 rung, u64 nanoseconds);
/* Of this process alone. */
int sleep_on(a32 *word, u32 value, u64 nanoseconds);
void wake_all(a32 *word);
/* Whether the worker's end of the doorbell is closed; notes whether there is something to read. */
int worker_is_gone(struct engine *e);
void knock_for(struct engine *e, u64 instance);

#endif
