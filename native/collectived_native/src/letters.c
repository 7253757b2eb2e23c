/* letters.c: sends and receives.
 *
 * A send writes a letter into the sender's own range and never waits for its receive: it is done when all bytes are copied
 * there. The receiver alone matches: it looks through the letters of a sender for its own number, of those with the tag that
 * it wants, and says in its own range which letter it has matched and how far it has read. So every word has one writer.
 *
 * The letters of one sender for one receiver and tag are numbered, and taken in that order. A longer letter is copied while
 * the receiver reads: it has memory for all of its bytes, but touches no more than a ring where the receiver has matched it
 * by the time that the ring is full. Where the mail is full, only a letter for a receive that is posted may begin.
 */
#define _GNU_SOURCE
#include "letters.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CHUNK = 128 << 10, GIVE_BACK_FROM = 1 << 20, PATIENCE = MILLISECOND };
enum { WAITS, MOVED, OVER }; /* what came of looking at a job; it is looked at no more once it has ended */
static const u64 NOWHERE = ~(u64)0;

struct sequence { /* of letters from or to a seat with a tag */
    int peer, sends;
    u32 tag;
    u64 next;
};

struct mailbox {
    struct {
        u64 serial, place, room, matched; /* place NOWHERE: in its slot; room 0: free */
        int receiver;
    } slot[LETTERS];
    struct sequence *sequences;
    int count, turn;
};

static struct mailbox *mailbox_of(struct engine *e) {
    if (!e->mailbox && (e->mailbox = calloc(1, sizeof *e->mailbox))) /* an operator before may have used the table */
        for (int i = 0; i < LETTERS; i++) e->mailbox->slot[i].serial = load(&letters_of(e->segment, e->seat)[i].serial);
    return e->mailbox;
}

static u64 *next_number(struct mailbox *box, int peer, u32 tag, int sends) {
    for (int i = 0; i < box->count; i++) {
        struct sequence *one = &box->sequences[i];
        if (one->peer == peer && one->tag == tag && one->sends == sends) return &one->next;
    }
    struct sequence *more = realloc(box->sequences, (size_t)(box->count + 1) * sizeof *more);
    if (!more) return NULL;
    box->sequences = more;
    more[box->count] = (struct sequence){.peer = peer, .sends = sends, .tag = tag};
    return &more[box->count++].next;
}

static int is_gone(const struct segment *s, int seat) {
    return load(&head_of(s)->gone[seat / 64]) >> seat % 64 & 1;
}

/* Why a seat is gone. */
static int reason_why_gone(const struct segment *s) {
    u64 limit = load(&head_of(s)->limit);
    return limit == ~(u64)0 ? LOST : reason_of(limit);
}

/* Tells another seat that there is something in its mail, or that it has read ours. */
static void notify(struct segment *s, int seat) {
    atomic_fetch_add(&place_of(s, seat)->mail, 1); /* seq_cst, before it is looked whether it sleeps */
    if (atomic_load(&place_of(s, seat)->asleep)) ring(s, seat);
}

/* Copies between the bytes at .. at + n of a job's leaves and memory. */
static void move(const struct job *job, u64 at, u64 n, char *memory) {
    for (int leaf = 0; n; leaf++) {
        u64 length = job->letter.lengths[leaf];
        if (at >= length) {
            at -= length;
            continue;
        }
        u64 m = length - at < n ? length - at : n;
        if (job->kind == SEND) memcpy(memory, job->values.in[leaf] + at, m);
        else memcpy(job->values.out[leaf] + at, memory, m);
        memory += m, n -= m, at = 0;
    }
}

static int end(struct engine *e, struct job *job, int state) {
    if (job->kind == RECEIVE && job->stage == QUEUED) atomic_fetch_sub(&seat_of(e->segment, e->seat)->posted, 1);
    engine_finish(e, job, state);
    return OVER;
}

/* ---- Sending ---- */

static struct receipt *receipt_of(const struct segment *s, int sender, int receiver, int slot) {
    return &receipts_of(s, receiver, sender)[slot];
}

static void free_letter(struct engine *e, struct mailbox *box, int slot) {
    struct letter *letter = &letters_of(e->segment, e->seat)[slot];
    struct seat *own = seat_of(e->segment, e->seat);
    atomic_store_explicit(&letter->serial, ++box->slot[slot].serial, memory_order_release);
    atomic_fetch_and(&own->live, ~((u64)1 << slot));
    u64 place = box->slot[slot].place, room = box->slot[slot].room;
    if (place != NOWHERE && room >= GIVE_BACK_FROM) /* the kernel takes the pages back */
        madvise(mail_of(e->segment, e->seat) + place, room, MADV_REMOVE);
    box->slot[slot].room = 0;
}

/* Frees the letters that have been read wholly, or that nobody will read. */
static void reclaim(struct engine *e, struct mailbox *box) {
    for (int i = 0; i < LETTERS; i++) {
        if (!(box->slot[i].serial & 1)) continue;
        const struct letter *letter = &letters_of(e->segment, e->seat)[i];
        const struct receipt *receipt = receipt_of(e->segment, e->seat, box->slot[i].receiver, i);
        u64 bytes = load(&letter->bytes);
        if (load(&letter->filled) < bytes) continue; /* still being written */
        int read = load(&receipt->serial) == box->slot[i].serial && load(&receipt->taken) == bytes + 1;
        if (read || is_gone(e->segment, box->slot[i].receiver)) free_letter(e, box, i);
    }
}

/* The first place in the mail for so many bytes; NOWHERE: there is none. */
static u64 find_place(const struct engine *e, const struct mailbox *box, u64 room) {
    u64 place = 0;
    for (int again = 1; again;) {
        again = 0;
        for (int i = 0; i < LETTERS; i++) {
            u64 from = box->slot[i].place, end = from + box->slot[i].room;
            if (!box->slot[i].room || from == NOWHERE || end <= place || from >= place + room) continue;
            place = end, again = 1;
        }
    }
    return place + room <= e->segment->geometry.mail ? place : NOWHERE;
}

static u64 after_blob(u64 blob_bytes) {
    return (blob_bytes + 7) / 8 * 8;
}

/* Begins a letter, or waits for room. */
static int begin_send(struct engine *e, struct mailbox *box, struct job *job) {
    struct segment *s = e->segment;
    if (is_gone(s, job->letter.peer)) return end(e, job, reason_why_gone(s));
    int slot = 0;
    reclaim(e, box);
    while (slot < LETTERS && box->slot[slot].serial & 1) slot++;
    if (slot == LETTERS) return WAITS;
    u64 bytes = job->letter.bytes, place = NOWHERE, room = (bytes + PAGE - 1) / PAGE * PAGE, is_ring = 0;
    if (after_blob(job->blob_bytes) + bytes > LETTER_SLOT) {
        place = find_place(e, box, room);
        if (place == NOWHERE && bytes > LETTER_RING && load(&seat_of(s, job->letter.peer)->posted)) {
            is_ring = 1, room = LETTER_RING; /* it is expected: no more is needed */
            place = find_place(e, box, room);
        }
        if (place == NOWHERE) return end(e, job, NO_ROOM);
    }
    u64 *number = next_number(box, job->letter.peer, job->letter.tag, 1);
    if (!number) return end(e, job, NO_ROOM);
    struct letter *letter = &letters_of(s, e->seat)[slot];
    char *own_slot = slot_of(s, e->seat, slot);
    if (job->blob_bytes) memcpy(own_slot, job->blob, job->blob_bytes);
    u64 filled = 0;
    if (place == NOWHERE) move(job, 0, filled = bytes, own_slot + after_blob(job->blob_bytes));
#define SAY(field, value) atomic_store_explicit(&letter->field, value, memory_order_relaxed)
    SAY(address, (u64)job->letter.peer << 32 | job->letter.tag);
    SAY(number, (*number)++);
    SAY(bytes, bytes);
    SAY(blob_bytes, job->blob_bytes);
    SAY(filled, filled);
    SAY(place, place);
    SAY(is_ring, is_ring);
#undef SAY
    job->letter.slot = slot, job->letter.moved = filled;
    box->slot[slot].place = place, box->slot[slot].room = place == NOWHERE ? 0 : room, box->slot[slot].receiver = job->letter.peer;
    atomic_store_explicit(&letter->serial, ++box->slot[slot].serial, memory_order_release);
    atomic_fetch_or(&seat_of(s, e->seat)->live, (u64)1 << slot);
    job->stage = STEPS;
    notify(s, job->letter.peer);
    return filled == bytes ? end(e, job, COMPLETE) : MOVED;
}

/* Copies more of a letter; whether there was room. */
static int go_on_sending(struct engine *e, struct mailbox *box, struct job *job) {
    struct segment *s = e->segment;
    int slot = job->letter.slot, peer = job->letter.peer;
    struct letter *letter = &letters_of(s, e->seat)[slot];
    const struct receipt *receipt = receipt_of(s, e->seat, peer, slot);
    u64 moved = job->letter.moved, bytes = job->letter.bytes, at = moved, most = bytes - moved;
    int is_matched = load(&receipt->serial) == box->slot[slot].serial;
    if (moved == LETTER_RING && is_matched) atomic_store_explicit(&letter->is_ring, 1, memory_order_release);
    if (moved == LETTER_RING && !is_matched && load(&seat_of(s, peer)->posted)) { /* it is about to */
        if (!job->letter.wait_until) job->letter.wait_until = engine_now(e) + PATIENCE;
        if (engine_now(e) < job->letter.wait_until) return WAITS;
    }
    if (moved >= LETTER_RING && atomic_load_explicit(&letter->is_ring, memory_order_relaxed)) {
        u64 taken = is_matched ? load(&receipt->taken) : 0;
        if (taken > moved) taken = moved; /* of a member that writes anything */
        if (is_gone(s, peer)) return end(e, job, reason_why_gone(s));
        at = moved % LETTER_RING;
        if (most > LETTER_RING - (moved - taken)) most = LETTER_RING - (moved - taken);
        if (most > LETTER_RING - at) most = LETTER_RING - at;
    } else if (moved < LETTER_RING && most > LETTER_RING - moved) most = LETTER_RING - moved;
    if (most > CHUNK) most = CHUNK;
    if (!most) return WAITS;
    move(job, moved, most, mail_of(s, e->seat) + box->slot[slot].place + at);
    job->letter.moved += most;
    atomic_store_explicit(&letter->filled, job->letter.moved, memory_order_release);
    notify(s, peer);
    return job->letter.moved == bytes ? end(e, job, COMPLETE) : MOVED;
}

/* ---- Receiving ---- */

static int fits_blob(const struct segment *s, const struct job *job, int peer, int slot, u64 blob_bytes, u64 bytes) {
    return job->letter.expects && bytes == job->letter.bytes && blob_bytes == job->blob_bytes &&
           !memcmp(slot_of(s, peer, slot), job->blob, blob_bytes);
}

/* Looks through the letters of one seat for the one that comes next; whether it was there. */
static int match_with(struct engine *e, struct mailbox *box, struct job *job, int peer) {
    struct segment *s = e->segment;
    u64 live = load(&seat_of(s, peer)->live);
    if (!live) return 0;
    u64 *number = next_number(box, peer, job->letter.tag, 0);
    for (int slot = 0; number && live; slot++, live >>= 1) {
        const struct letter *letter = &letters_of(s, peer)[slot];
        struct receipt *receipt = receipt_of(s, peer, e->seat, slot);
        u64 serial = load(&letter->serial);
        if (!(live & 1) || !(serial & 1) || load(&letter->address) != ((u64)e->seat << 32 | job->letter.tag) ||
            load(&letter->number) != *number || load(&receipt->serial) == serial)
            continue;
        u64 bytes = load(&letter->bytes), blob_bytes = load(&letter->blob_bytes), place = load(&letter->place);
        u64 room = bytes < LETTER_RING ? bytes : LETTER_RING, mail = s->geometry.mail;
        int in_slot = place == NOWHERE;
        if (blob_bytes > LETTER_BLOB || (in_slot && (bytes > LETTER_SLOT || after_blob(blob_bytes) + bytes > LETTER_SLOT)) ||
            (!in_slot && (place > mail || room > mail - place))) {
            end_now(s, NONSENSE, peer);
            return 0;
        }
        ++*number;
        job->letter.peer = peer, job->letter.slot = slot, job->letter.serial = serial, job->letter.moved = 0;
        atomic_store_explicit(&receipt->taken, 0, memory_order_relaxed);
        atomic_store_explicit(&receipt->serial, serial, memory_order_release);
        atomic_fetch_sub(&seat_of(s, e->seat)->posted, 1);
        job->described = fits_blob(s, job, peer, slot, blob_bytes, bytes);
        job->letter.bytes = bytes;
        job->stage = STEPS;
        if (bytes > LETTER_RING) notify(s, peer);
        if (!job->described) engine_finish(e, job, DESCRIBE); /* it goes on when it has memory */
        return 1;
    }
    return 0;
}

static int match(struct engine *e, struct mailbox *box, struct job *job) {
    struct segment *s = e->segment;
    int seats = (int)s->geometry.seats, any = job->letter.peer < 0, left = 0;
    if (atomic_load(&job->letter.cancels)) return end(e, job, CANCELLED);
    for (int i = 0; i < (any ? seats : 1); i++) {
        int peer = any ? (box->turn + i) % seats : job->letter.peer;
        int gone = is_gone(s, peer); /* looked at first: what it sent before it went counts */
        if (match_with(e, box, job, peer)) {
            if (any) box->turn = peer + 1;
            return MOVED;
        }
        left += !gone && !(any && peer == e->seat);
    }
    return left || (any && seats == 1) ? WAITS : end(e, job, reason_why_gone(s));
}

/* Reads more of a letter; whether there was something. */
static int go_on_receiving(struct engine *e, struct job *job) {
    struct segment *s = e->segment;
    int peer = job->letter.peer, slot = job->letter.slot, gone = is_gone(s, peer);
    const struct letter *letter = &letters_of(s, peer)[slot];
    struct receipt *receipt = receipt_of(s, peer, e->seat, slot);
    u64 filled = load(&letter->filled), moved = job->letter.moved, bytes = job->letter.bytes, place = load(&letter->place), at = moved;
    if (filled > bytes) filled = bytes; /* of a member that writes anything */
    u64 most = filled - moved;
    if (moved < bytes && filled <= moved) return gone ? end(e, job, reason_why_gone(s)) : WAITS;
    if (most > CHUNK) most = CHUNK;
    char *memory = slot_of(s, peer, slot) + after_blob(load(&letter->blob_bytes) % LETTER_SLOT);
    if (place != NOWHERE) {
        if (moved >= LETTER_RING && load(&letter->is_ring)) at = moved % LETTER_RING;
        if (at < LETTER_RING && most > LETTER_RING - at) most = LETTER_RING - at;
        if (place > s->geometry.mail || at + most > s->geometry.mail - place) return end_now(s, NONSENSE, peer), WAITS;
        memory = mail_of(s, peer) + place;
    } else if (memory + at + most > slot_of(s, peer, slot) + LETTER_SLOT) return end_now(s, NONSENSE, peer), WAITS;
    move(job, moved, most, memory + at);
    job->letter.moved += most;
    int done = job->letter.moved == bytes;
    atomic_store_explicit(&receipt->taken, job->letter.moved + (u64)done, memory_order_release); /* one more: all of it */
    if (bytes > LETTER_RING || (done && load(&seat_of(s, peer)->live) == ~(u64)0)) notify(s, peer); /* it may wait for room */
    return done ? end(e, job, COMPLETE) : MOVED;
}

/* ---- All of a seat's ---- */

static struct job *next_job(struct engine *e, struct job *job) {
    pthread_mutex_lock(&e->lock);
    struct job *next = job ? job->next : e->letters;
    pthread_mutex_unlock(&e->lock);
    return next;
}

static int advance_letter(struct engine *e, struct mailbox *box, struct job *job, int *blocked) {
    int reason = reason_of(load(&head_of(e->segment)->decided)), moved;
    if (atomic_load(&job->state) != PENDING) return 0;
    if (job->kind == RECEIVE) moved = job->stage == QUEUED ? match(e, box, job) : go_on_receiving(e, job);
    else if (reason || (*blocked && job->stage == QUEUED)) moved = WAITS; /* letters leave in order */
    else moved = job->stage == QUEUED ? begin_send(e, box, job) : go_on_sending(e, box, job);
    if (moved != WAITS) return 1;
    if (reason) return end(e, job, reason), 1; /* what had come until then was read */
    *blocked |= job->kind == SEND && job->stage == QUEUED;
    return 0;
}

int letters_advance(struct engine *e) {
    struct job *job = next_job(e, NULL);
    struct mailbox *box = job ? mailbox_of(e) : NULL;
    int moved = 0, blocked = 0;
    if (!job) return 0;
    e->mail_seen = atomic_load(&place_of(e->segment, e->seat)->mail);
    for (struct job *next; job; job = next) {
        next = next_job(e, job);
        if (!box) engine_finish(e, job, FAILED);
        moved |= !box || advance_letter(e, box, job, &blocked);
    }
    return moved;
}

int letters_came(const struct engine *e) {
    return atomic_load(&e->posts) && atomic_load(&place_of(e->segment, e->seat)->mail) != e->mail_seen;
}

u64 letters_expire(struct engine *e, u64 t) {
    u64 earliest = ~(u64)0;
    for (struct job *job = next_job(e, NULL), *next; job; job = next) {
        next = next_job(e, job);
        if (atomic_load(&job->state) != PENDING) continue;
        if (job->letter.wait_until > t && job->letter.wait_until < earliest) earliest = job->letter.wait_until;
        if (!job->deadline) continue;
        if (job->deadline > t) {
            if (job->deadline < earliest) earliest = job->deadline;
        } else if (job->stage == QUEUED) end(e, job, EXPIRED); /* it ends alone */
        else if (t > job->deadline + GRACE) { /* half of it is there: nobody could go on with the rest */
            struct seat *own = seat_of(e->segment, e->seat);
            for (int w = 0; w < SEAT_WORDS; w++) atomic_store(&own->missing[w], 0);
            atomic_store(&own->missing[job->letter.peer / 64], (u64)1 << job->letter.peer % 64);
            end_now(e->segment, DEADLINE, e->seat);
        } else if (job->deadline + GRACE + 1 < earliest) earliest = job->deadline + GRACE + 1;
    }
    return earliest;
}

void letters_close(struct engine *e) {
    if (e->mailbox) free(e->mailbox->sequences);
    free(e->mailbox);
    e->mailbox = NULL;
}
