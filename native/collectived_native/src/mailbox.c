/* mailbox.c: memory for the letters of one sender. */
#define _GNU_SOURCE
#include "mailbox.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { KEPT = 32 << 20 };

struct mailbox *mailbox_of(struct engine *e) {
    if (e->mailbox || !(e->mailbox = calloc(1, sizeof *e->mailbox))) return e->mailbox;
    struct mailbox *box = e->mailbox;
    for (int i = 0; i < LETTERS; i++) { /* an operator before may have used the table */
        const struct letter *letter = &letters_of(e->segment, e->seat)[i];
        u64 number = load(&letter->number);
        box->slot[i].serial = load(&letter->serial);
        if (box->next <= number && box->slot[i].serial) box->next = number + 1;
    }
    box->sends = find_total(e, ~(u64)0, SENDS), box->receives = find_total(e, ~(u64)0, RECEIVES);
    return box;
}

/* The first bit from `from` on; LETTERS: there is none. */
static int next_bit(const u64 bits[LETTER_WORDS], int from) {
    for (int w = from / 64; w < LETTER_WORDS; w++) {
        u64 word = w == from / 64 ? bits[w] >> from % 64 << from % 64 : bits[w];
        if (word) return w * 64 + __builtin_ctzll(word);
    }
    return LETTERS;
}

int first_free(const struct mailbox *box) {
    for (int w = 0; w < LETTER_WORDS; w++)
        if (~box->live[w]) return w * 64 + __builtin_ctzll(~box->live[w]);
    return LETTERS;
}

static void free_letter(struct engine *e, struct mailbox *box, int slot) {
    struct letter *letter = &letters_of(e->segment, e->seat)[slot];
    struct seat *own = seat_of(e->segment, e->seat);
    atomic_store_explicit(&letter->serial, ++box->slot[slot].serial, memory_order_release);
    box->live[slot / 64] &= ~((u64)1 << slot % 64);
    atomic_store(&own->live[slot / 64], box->live[slot / 64]);
    box->count--, box->after = 0;
    u64 place = box->slot[slot].place, room = box->slot[slot].room;
    char *mail = mail_of(e->segment, e->seat);
    if (place != NOWHERE && room > KEPT) madvise(mail + place, room, MADV_REMOVE); /* the kernel takes the pages back */
    if (!box->count && box->top > KEPT) madvise(mail + KEPT, box->top - KEPT, MADV_REMOVE);
    if (!box->count) box->top = 0;
    box->slot[slot].room = 0;
}

int reclaim(struct engine *e, struct mailbox *box) {
    int before = box->count;
    for (int i = next_bit(box->live, 0); i < LETTERS; i = next_bit(box->live, i + 1)) {
        const struct letter *letter = &letters_of(e->segment, e->seat)[i];
        const struct receipt *receipt = receipt_of(e->segment, e->seat, box->slot[i].receiver, i);
        u64 bytes = load(&letter->bytes);
        if (load(&letter->filled) < bytes) continue; /* still being written */
        int read = load(&receipt->serial) == box->slot[i].serial && load(&receipt->taken) == bytes + 1;
        if (read || is_gone(e->segment, box->slot[i].receiver)) free_letter(e, box, i);
    }
    box->reclaim_at = box->count < FEW ? 0 : 2 * box->count;
    return box->count < before;
}

u64 find_place(const struct engine *e, struct mailbox *box, u64 room) {
    u64 place = box->after;
    for (int again = 1; again;) {
        again = 0;
        for (int i = next_bit(box->live, 0); i < LETTERS; i = next_bit(box->live, i + 1)) {
            u64 from = box->slot[i].place, end = from + box->slot[i].room;
            if (!box->slot[i].room || from == NOWHERE || end <= place || from >= place + room) continue;
            place = end, again = 1;
        }
    }
    if (place + room > e->segment->geometry.mail) {
        if (!box->after) return NOWHERE;
        box->after = 0;
        return find_place(e, box, room);
    }
    box->after = place + room;
    if (box->after > box->top) box->top = box->after;
    return place;
}
