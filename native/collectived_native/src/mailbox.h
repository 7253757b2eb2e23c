/* mailbox.h: the letters of one sender that are on their way, and where they lie. */
#ifndef COLLECTIVED_MAILBOX_H
#define COLLECTIVED_MAILBOX_H

#include "engine.h"

enum { FEW = 16 };
static const u64 NOWHERE = ~(u64)0;

struct mailbox {
    struct {
        u64 serial, place, room; /* place NOWHERE: in its slot; room 0: free */
        int receiver;
    } slot[LETTERS];
    u64 live[LETTER_WORDS]; /* slots that are in use: a bit each */
    u64 next;               /* number of the next letter */
    u64 after, top;         /* end of the last place that was given away, and the highest since all were free */
    int count, reclaim_at;  /* letters in use, and so many of them are to be looked through */
    int turn;
    u32 withdrawn; /* withdrawals that have been looked at */
    struct total *sends, *receives;
};

/* The engine's; NULL: there is no memory for it. */
struct mailbox *mailbox_of(struct engine *e);
/* A slot for one more; LETTERS: all are in use. */
int first_free(const struct mailbox *box);
/* The first place in the mail for so many bytes, behind the last one if nothing has been freed since; NOWHERE: there is none. */
u64 find_place(const struct engine *e, struct mailbox *box, u64 room);
/* Frees the letters that have been read wholly, or that will never be read; whether there were any. */
int reclaim(struct engine *e, struct mailbox *box);

/* The receipt of a receiver for a letter of `sender`. */
static inline struct receipt *receipt_of(const struct segment *s, int sender, int receiver, int slot) {
    return &receipts_of(s, receiver, sender)[slot];
}

static inline int is_gone(const struct segment *s, int seat) {
    return load(&head_of(s)->gone[seat / 64]) >> seat % 64 & 1;
}

#endif
