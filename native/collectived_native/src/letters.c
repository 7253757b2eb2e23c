/* letters.c: sends and receives.
 *
 * A send writes a letter into the sender's own range and never waits for its receive: it is done when all bytes are copied
 * there. The receiver alone matches: it looks through the letters of a sender for its own number, of those with the tag that
 * it wants, and says in its own range which letter it has matched and how far it has read. So every word has one writer.
 *
 * The letters of one sender are numbered, and of those for one receiver and tag the first is taken first. A longer letter
 * is copied while the receiver reads: it has memory for all of its bytes, but touches no more than a ring as long as the
 * receiver, which has matched it by the time that the ring is full, goes on reading. Where the mail is full, a letter for a receive that is posted may begin
 * all the same; any other waits a while for others to be read, and is refused if none is.
 *
 * A long letter that is matched before it is there is read in the sender's process instead (direct.c), and the send is done
 * when it has been. The receiver says so before it looks whether all is there, and the sender says that all is there before
 * it looks whether the receiver reads: so one of them knows, and a value is never read after its send is done. A send that
 * ends otherwise takes its offer back first, and a receive counts only if it is still there when all has been read.
 */
#define _GNU_SOURCE
#include "letters.h"
#include "mailbox.h"

#include <stdlib.h>
#include <string.h>

#include "copying.h"

enum { CHUNK = 64 << 10, STRETCH = 1 << 20, WAKE_EVERY = 1 << 20, PATIENCE = 100000, ROOM_LOOK = MILLISECOND };
enum { WAITS, MOVED, OVER }; /* the results of a step of a job; it is not stepped any more once it has ended */
static const u64 REFUSE_AFTER = 1000000000u; /* nanoseconds in which no seat reads anything */

/* Why a seat is gone. */
static int reason_why_gone(const struct segment *s) {
    u64 limit = load(&head_of(s)->limit);
    return limit == ~(u64)0 ? LOST : reason_of(limit);
}

/* Notifies another seat that there is something in its mail, or that this one has read its letters. */
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
        if (job->kind == SEND) copy_bytes(memory, job->values.in[leaf] + at, m);
        else copy_bytes(job->values.out[leaf] + at, memory, m);
        memory += m, n -= m, at = 0;
    }
}

static int end(struct engine *e, struct job *job, int state) {
    if (job->kind == RECEIVE && job->stage == QUEUED) atomic_fetch_sub(&seat_of(e->segment, e->seat)->posted, 1);
    if (state == COMPLETE && job->kind == SEND) count(e, job, e->mailbox->sends, job->letter.bytes);
    if (state == COMPLETE && job->kind == RECEIVE) count(e, job, e->mailbox->receives, job->letter.bytes);
    engine_finish(e, job, state);
    return OVER;
}

/* ---- Sending ---- */

static u64 after_blob(u64 blob_bytes) {
    return (blob_bytes + 7) / 8 * 8;
}

/* There is no room: it waits for others to be read, unless none has been for long. */
static int wait_for_room(struct engine *e, struct job *job, int freed) {
    u64 t = engine_now(e);
    if (freed || !job->letter.give_up) job->letter.give_up = t + REFUSE_AFTER;
    if (t >= job->letter.give_up) return end(e, job, NO_ROOM);
    job->letter.wait_until = t + ROOM_LOOK;
    return WAITS;
}

/* Begins a letter, or waits for room. */
static int begin_send(struct engine *e, struct mailbox *box, struct job *job) {
    struct segment *s = e->segment;
    if (is_gone(s, job->letter.peer)) return end(e, job, reason_why_gone(s));
    int freed = box->count >= box->reclaim_at && reclaim(e, box), slot = first_free(box);
    u64 bytes = job->letter.bytes, place = NOWHERE, room = (bytes + PAGE - 1) / PAGE * PAGE, ring_end = 0;
    int needs_place = after_blob(job->blob_bytes) + bytes > LETTER_SLOT;
    if (slot < LETTERS && needs_place) {
        place = find_place(e, box, room);
        if (place == NOWHERE && bytes > LETTER_RING && load(&seat_of(s, job->letter.peer)->posted)) {
            ring_end = bytes, room = LETTER_RING; /* it is expected: no more is needed */
            place = find_place(e, box, room);
        }
    }
    if (slot == LETTERS || (needs_place && place == NOWHERE)) return box->reclaim_at = 0, wait_for_room(e, job, freed);
    struct letter *letter = &letters_of(s, e->seat)[slot];
    char *own_slot = slot_of(s, e->seat, slot);
    int is_direct = e->token && needs_place && bytes >= s->geometry.direct && job->letter.leaves == 1 && can_be_read(job->values.in[0], bytes);
    job->letter.source = is_direct ? (u64)(uintptr_t)job->values.in[0] : 0;
    if (job->blob_bytes) memcpy(own_slot, job->blob, job->blob_bytes);
    u64 filled = 0;
    if (place == NOWHERE) move(job, 0, filled = bytes, own_slot + after_blob(job->blob_bytes));
/* Release: a reader that sees one of them sees that the letter before, which lay here, is valid no more. */
#define SAY(field, value) atomic_store_explicit(&letter->field, value, memory_order_release)
    SAY(address, (u64)job->letter.peer << 32 | job->letter.tag);
    SAY(number, box->next++);
    SAY(bytes, bytes);
    SAY(blob_bytes, job->blob_bytes);
    SAY(filled, filled);
    SAY(place, place);
    SAY(ring_end, ring_end);
    SAY(source, job->letter.source);
#undef SAY
    job->letter.slot = slot, job->letter.moved = filled;
    box->slot[slot].place = place, box->slot[slot].room = place == NOWHERE ? 0 : room, box->slot[slot].receiver = job->letter.peer;
    atomic_store_explicit(&letter->serial, ++box->slot[slot].serial, memory_order_release);
    box->live[slot / 64] |= (u64)1 << slot % 64, box->count++;
    atomic_store(&seat_of(s, e->seat)->live[slot / 64], box->live[slot / 64]);
    job->stage = STEPS, job->letter.wait_until = 0;
    notify(s, job->letter.peer);
    return filled == bytes ? end(e, job, COMPLETE) : MOVED;
}

/* Whether a send has waited for its receiver for so long that it need not any more. */
static int is_patient(struct engine *e, struct job *job) {
    u64 t = engine_now(e);
    if (!job->letter.wait_until) job->letter.wait_until = t + PATIENCE;
    return t < job->letter.wait_until;
}

static int end_send(struct engine *e, struct mailbox *box, struct job *job) {
    if (load(&letters_of(e->segment, e->seat)[job->letter.slot].ring_end) == job->letter.bytes)
        box->slot[job->letter.slot].room = LETTER_RING; /* it has used no more */
    return end(e, job, COMPLETE);
}

void letters_withdraw(struct engine *e, const struct job *job) {
    if (job->letter.source) atomic_exchange(&letters_of(e->segment, e->seat)[job->letter.slot].source, 0);
}

/* Copies more of a letter; whether there was room. */
static int go_on_sending(struct engine *e, struct mailbox *box, struct job *job) {
    struct segment *s = e->segment;
    int slot = job->letter.slot, peer = job->letter.peer;
    struct letter *letter = &letters_of(s, e->seat)[slot];
    const struct receipt *receipt = receipt_of(s, e->seat, peer, slot);
    u64 moved = job->letter.moved, bytes = job->letter.bytes, at = moved, most = bytes - moved, ring_end = load(&letter->ring_end);
    int is_matched = atomic_load(&receipt->serial) == box->slot[slot].serial, has_place = box->slot[slot].room >= bytes;
    u64 taken = is_matched ? atomic_load(&receipt->taken) : 0; /* once: what is written over has to fit what is looked at */
    if (taken == READS_SOURCE && job->letter.source) {
        job->letter.wait_until = 0;
        return is_gone(s, peer) ? end(e, job, reason_why_gone(s)) : WAITS;
    }
    if (job->letter.source && (taken == bytes + 1 || moved == bytes)) {
        atomic_store_explicit(&letter->filled, bytes, memory_order_release);
        return end_send(e, box, job);
    }
    int is_awaited = !is_matched && load(&seat_of(s, peer)->posted);
    if (!moved && job->letter.source && is_awaited && is_patient(e, job)) return WAITS; /* it is about to read it where it lies */
    if (moved == LETTER_RING && !ring_end && is_awaited && is_patient(e, job)) return WAITS; /* it is about to */
    if (moved == LETTER_RING && !ring_end && is_matched) ring_end = bytes;
    if (moved < LETTER_RING && most > LETTER_RING - moved) most = LETTER_RING - moved;
    if (moved >= LETTER_RING && moved < ring_end) {
        if (taken > moved) taken = moved; /* of a member that writes anything */
        if (is_gone(s, peer)) return end(e, job, reason_why_gone(s));
        at = moved % LETTER_RING;
        if (most > LETTER_RING - (moved - taken)) most = LETTER_RING - (moved - taken);
        if (most > LETTER_RING - at) most = LETTER_RING - at;
        if (!most && has_place && !is_patient(e, job)) ring_end = at = moved, most = bytes - moved; /* it sleeps: leave the rest to it */
    }
    if (most > CHUNK) most = CHUNK;
    if (!most) return WAITS;
    atomic_store_explicit(&letter->ring_end, ring_end, memory_order_release);
    move(job, moved, most, mail_of(s, e->seat) + box->slot[slot].place + at);
    job->letter.moved += most, job->letter.wait_until = 0;
    atomic_store(&letter->filled, job->letter.moved); /* seq_cst: before it is looked whether the receiver reads the source */
    /* To wake a receiver that sleeps costs both of them more than to copy a chunk; but it must not sleep where it is waited for. */
    int hurries = moved < ring_end || job->letter.moved == LETTER_RING || job->letter.moved % WAKE_EVERY < most;
    if (hurries || job->letter.moved == bytes) notify(s, peer);
    else atomic_fetch_add(&place_of(s, peer)->mail, 1);
    return job->letter.moved < bytes || job->letter.source ? MOVED : end_send(e, box, job);
}

/* ---- Receiving ---- */

static int fits_blob(const struct segment *s, const struct job *job, int peer, int slot, u64 blob_bytes, u64 bytes) {
    return job->letter.expects && bytes == job->letter.bytes && blob_bytes == job->blob_bytes &&
           !memcmp(slot_of(s, peer, slot), job->blob, blob_bytes);
}

/* The first letter of a seat for this one with that tag which is not matched, of those that are seen; LETTERS: there is none. */
static int find_first(const struct engine *e, int peer, u32 tag) {
    const struct segment *s = e->segment;
    u64 first = ~(u64)0;
    int found = LETTERS;
    for (int w = 0; w < LETTER_WORDS; w++)
        for (u64 live = load(&seat_of(s, peer)->live[w]); live; live &= live - 1) {
            int slot = w * 64 + __builtin_ctzll(live);
            const struct letter *letter = &letters_of(s, peer)[slot];
            u64 serial = load(&letter->serial), number = load(&letter->number);
            int is_ours = serial & 1 && load(&letter->address) == ((u64)e->seat << 32 | tag) && load(&letter->serial) == serial &&
                          load(&receipts_of(s, e->seat, peer)[slot].serial) != serial;
            if (is_ours && number < first) first = number, found = slot;
        }
    return found;
}

/* Whether a receive that was posted before would take a letter of that seat, too: it came after that one had been looked at. */
static int is_for_another(struct engine *e, const struct job *job, int peer) {
    pthread_mutex_lock(&e->lock);
    const struct job *one = e->receives;
    while (one != job && !(one->letter.tag == job->letter.tag &&
                           (one->letter.peer < 0 || one->letter.peer == peer)))
        one = one->next;
    pthread_mutex_unlock(&e->lock);
    return one != job;
}

/* Looks through the letters of one seat for the one that comes next; whether it was there. */
static int match_with(struct engine *e, struct job *job, int peer) {
    struct segment *s = e->segment;
    /* While it looks, one may come into a slot that it has passed, and another behind it into one that it has not. All that
     * came before the one it has found it sees when it looks again. */
    if (find_first(e, peer, job->letter.tag) == LETTERS) return 0;
    int slot = find_first(e, peer, job->letter.tag);
    if (slot == LETTERS || is_for_another(e, job, peer)) return 0; /* not there: of a member that writes anything */
    const struct letter *letter = &letters_of(s, peer)[slot];
    struct receipt *receipt = receipt_of(s, peer, e->seat, slot);
    u64 serial = load(&letter->serial);
    if (!(serial & 1)) return 0; /* the same */
    u64 bytes = load(&letter->bytes), blob_bytes = load(&letter->blob_bytes), place = load(&letter->place);
    u64 room = bytes < LETTER_RING ? bytes : LETTER_RING, mail = s->geometry.mail;
    int in_slot = place == NOWHERE;
    if (blob_bytes > LETTER_BLOB || (in_slot && (bytes > LETTER_SLOT || after_blob(blob_bytes) + bytes > LETTER_SLOT)) ||
        (!in_slot && (place > mail || room > mail - place))) {
        end_now(s, NONSENSE, peer);
        return 0;
    }
    job->letter.peer = peer, job->letter.slot = slot, job->letter.serial = serial, job->letter.moved = 0;
    atomic_store_explicit(&receipt->taken, 0, memory_order_relaxed);
    atomic_store(&receipt->serial, serial); /* seq_cst, as is what both say of the source: one of them sees the other */
    atomic_fetch_sub(&seat_of(s, e->seat)->posted, 1);
    job->described = fits_blob(s, job, peer, slot, blob_bytes, bytes);
    job->letter.bytes = bytes;
    engine_move_matched(e, job);
    if (bytes > LETTER_RING) notify(s, peer);
    if (!job->described) engine_finish(e, job, DESCRIBE); /* it goes on when it has memory */
    return 1;
}

static int match(struct engine *e, struct mailbox *box, struct job *job) {
    struct segment *s = e->segment;
    int seats = (int)s->geometry.seats, any = job->letter.peer < 0, left = 0;
    if (atomic_load(&job->letter.cancels)) return end(e, job, CANCELLED);
    for (int i = 0; i < (any ? seats : 1); i++) {
        int peer = any ? (box->turn + i) % seats : job->letter.peer;
        int gone = is_gone(s, peer); /* looked at first: what it sent before it went counts */
        if (match_with(e, job, peer)) {
            if (any) box->turn = peer + 1;
            return MOVED;
        }
        left += !gone && !(any && peer == e->seat);
    }
    return left || (any && seats == 1) ? WAITS : end(e, job, reason_why_gone(s));
}

/* Whether all of a letter is to be read where it lies in its sender's process: it is not all here yet. */
static int reads_source(struct engine *e, const struct job *job, const struct letter *letter, struct receipt *receipt) {
    int can = e->token && job->letter.leaves == 1 && load(&letter->filled) < job->letter.bytes && is_readable(e, job->letter.peer);
    if (!can) return 0;
    atomic_exchange(&receipt->taken, READS_SOURCE);
    if (atomic_load(&letter->filled) < job->letter.bytes) return 1;
    atomic_store(&receipt->taken, 0); /* the send may be done: its sender may write over the value */
    notify(e->segment, job->letter.peer);
    return 0;
}

/* Reads more of a letter in its sender's process. */
static int read_source(struct engine *e, struct job *job, const struct letter *letter, struct receipt *receipt) {
    struct segment *s = e->segment;
    int peer = job->letter.peer;
    u64 moved = job->letter.moved, bytes = job->letter.bytes, most = bytes - moved < STRETCH ? bytes - moved : STRETCH;
    int failed = most && read_seat(e, peer, job->letter.source + moved, job->values.out[0] + moved, most);
    if (is_gone(s, peer)) return end(e, job, reason_why_gone(s));
    int reason = reason_of(atomic_load(&head_of(s)->decided));
    if (atomic_load(&letter->source) != job->letter.source || (reason && reason != LEFT)) return WAITS; /* its send has failed */
    int culprit = failed ? find_culprit(e, peer, job->letter.source + moved, most) : -1;
    if (culprit >= 0) end_now(s, culprit == e->seat ? FAILED : NONSENSE, culprit);
    if (failed || (most && moved + most == bytes && !is_readable(e, peer))) return WAITS; /* the worker says why */
    job->letter.moved += most;
    if (job->letter.moved < bytes) return MOVED;
    atomic_store(&receipt->taken, bytes + 1);
    notify(s, peer);
    return end(e, job, COMPLETE);
}

/* Reads more of a letter; whether there was something. */
static int go_on_receiving(struct engine *e, struct job *job) {
    struct segment *s = e->segment;
    int peer = job->letter.peer, slot = job->letter.slot, gone = is_gone(s, peer);
    const struct letter *letter = &letters_of(s, peer)[slot];
    struct receipt *receipt = receipt_of(s, peer, e->seat, slot);
    if (job->stage == CHOOSING) { /* it has just been matched, and has memory */
        u64 source = load(&letter->source);
        job->letter.source = source && reads_source(e, job, letter, receipt) ? source : 0;
        job->stage = STEPS;
    }
    if (job->letter.source) return read_source(e, job, letter, receipt);
    u64 filled = load(&letter->filled), moved = job->letter.moved, bytes = job->letter.bytes, place = load(&letter->place), at = moved;
    if (filled > bytes) filled = bytes; /* of a member that writes anything */
    u64 most = filled - moved;
    if (moved < bytes && filled <= moved) return gone ? end(e, job, reason_why_gone(s)) : WAITS;
    if (most > CHUNK) most = CHUNK;
    char *memory = slot_of(s, peer, slot) + after_blob(load(&letter->blob_bytes) % LETTER_SLOT);
    if (place != NOWHERE) {
        u64 ring_end = load(&letter->ring_end); /* loaded after `filled`: it says where all of that lies */
        if (moved >= LETTER_RING && moved < ring_end) {
            at = moved % LETTER_RING;
            if (most > ring_end - moved) most = ring_end - moved;
        }
        if (at < LETTER_RING && most > LETTER_RING - at) most = LETTER_RING - at;
        if (place > s->geometry.mail || at + most > s->geometry.mail - place) return end_now(s, NONSENSE, peer), WAITS;
        memory = mail_of(s, peer) + place;
    } else if (memory + at + most > slot_of(s, peer, slot) + LETTER_SLOT) return end_now(s, NONSENSE, peer), WAITS;
    move(job, moved, most, memory + at);
    job->letter.moved += most;
    int done = job->letter.moved == bytes;
    atomic_store_explicit(&receipt->taken, job->letter.moved + (u64)done, memory_order_release); /* one more: all of it */
    if (filled < bytes) notify(s, peer); /* it may wait for room in the ring; a seat that waits for a place looks by itself */
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
    if (reason == LEFT) reason = COMPLETE; /* that ends only letters to and from the seat that has left */
    if (job->kind == RECEIVE) moved = job->stage == QUEUED ? match(e, box, job) : go_on_receiving(e, job);
    else if (reason || (*blocked && job->stage == QUEUED)) moved = WAITS; /* letters leave in order */
    else moved = job->stage == QUEUED ? begin_send(e, box, job) : go_on_sending(e, box, job);
    if (moved != WAITS) return 1;
    if (reason) return end(e, job, reason), 1; /* all letters until then have been read */
    if (atomic_load(&job->letter.cancels) == ABANDON) return end(e, job, CANCELLED), 1;
    *blocked |= job->kind == SEND && job->stage == QUEUED;
    return 0;
}

/* ---- Which receives are to be looked at: there may be thousands, and a letter for one of them ---- */

struct sought { /* letters for this seat that are not matched, by sender and tag: a bit for each, some share one */
    u64 bits[16];
    int count, all; /* all: every receive is to be looked at */
};

static unsigned bit_of(int peer, u32 tag) {
    return (unsigned)((((u64)(u32)peer << 32 | tag) * 0x9e3779b97f4a7c15u) >> 54);
}

static void mark(struct sought *sought, int peer, u32 tag) {
    unsigned bit = bit_of(peer, tag);
    sought->bits[bit / 64] |= (u64)1 << bit % 64;
}

static void find_sought(const struct engine *e, struct sought *sought) {
    const struct segment *s = e->segment;
    for (int peer = 0; peer < (int)s->geometry.seats; peer++) {
        sought->all |= is_gone(s, peer);
        for (int w = 0; w < LETTER_WORDS; w++)
            for (u64 live = load(&seat_of(s, peer)->live[w]); live; live &= live - 1) {
                int slot = w * 64 + __builtin_ctzll(live);
                u64 address = load(&letters_of(s, peer)[slot].address);
                if (address >> 32 != (u64)e->seat) continue;
                if (load(&receipts_of(s, e->seat, peer)[slot].serial) == load(&letters_of(s, peer)[slot].serial)) continue;
                mark(sought, peer, (u32)address), mark(sought, -1, (u32)address), sought->count++;
            }
    }
}

/* The first of these receives that is to be looked at, and the one behind it. */
static struct job *next_sought(struct engine *e, struct job *job, const struct sought *sought, struct job **behind) {
    pthread_mutex_lock(&e->lock);
    for (; job && !sought->all; job = job->next) {
        unsigned bit = bit_of(job->letter.peer, job->letter.tag);
        if (sought->bits[bit / 64] >> bit % 64 & 1) break;
    }
    *behind = job ? job->next : NULL;
    pthread_mutex_unlock(&e->lock);
    return job;
}

static int match_posted(struct engine *e, struct mailbox *box) {
    struct sought sought = {0};
    u32 withdrawals = atomic_load(&e->withdrawals);
    pthread_mutex_lock(&e->lock);
    struct job *behind = e->receives;
    pthread_mutex_unlock(&e->lock);
    if (!behind) return 0;
    find_sought(e, &sought);
    sought.all |= withdrawals != box->withdrawn || reason_of(load(&head_of(e->segment)->decided));
    box->withdrawn = withdrawals;
    int moved = 0, blocked = 0;
    while (behind && (sought.all || moved < sought.count)) {
        struct job *job = next_sought(e, behind, &sought, &behind);
        if (job) moved += advance_letter(e, box, job, &blocked);
    }
    return moved;
}

int letters_advance(struct engine *e) {
    struct mailbox *box = atomic_load(&e->posts) ? mailbox_of(e) : NULL;
    if (!atomic_load(&e->posts)) return 0;
    e->mail_seen = atomic_load(&place_of(e->segment, e->seat)->mail);
    int moved = box && match_posted(e, box), blocked = 0;
    for (struct job *job = box ? next_job(e, NULL) : NULL, *next; job; job = next) {
        next = next_job(e, job);
        moved |= advance_letter(e, box, job, &blocked);
    }
    return moved; /* where there is no memory for a mailbox it is tried again, until the deadline */
}

int letters_came(const struct engine *e) {
    return atomic_load(&e->posts) && atomic_load(&place_of(e->segment, e->seat)->mail) != e->mail_seen;
}

static u64 expire_those(struct engine *e, struct job *first, u64 t) {
    u64 earliest = ~(u64)0;
    for (struct job *job = first, *next; job; job = next) {
        next = next_job(e, job);
        if (atomic_load(&job->state) != PENDING) continue;
        if (job->letter.wait_until && job->letter.wait_until < earliest) earliest = job->letter.wait_until;
        if (!job->deadline) continue;
        if (job->deadline > t) {
            if (job->deadline < earliest) earliest = job->deadline;
        } else if (job->stage == QUEUED) end(e, job, EXPIRED); /* it ends alone */
        else if (t > job->deadline + GRACE) { /* half of it is there: no receive could go on with the rest */
            struct seat *own = seat_of(e->segment, e->seat);
            for (int w = 0; w < SEAT_WORDS; w++) atomic_store(&own->missing[w], 0);
            atomic_store(&own->missing[job->letter.peer / 64], (u64)1 << job->letter.peer % 64);
            end_now(e->segment, DEADLINE, e->seat);
        } else if (job->deadline + GRACE + 1 < earliest) earliest = job->deadline + GRACE + 1;
    }
    return earliest;
}

u64 letters_expire(struct engine *e, u64 t) {
    pthread_mutex_lock(&e->lock);
    struct job *timed = e->timed ? e->receives : NULL;
    pthread_mutex_unlock(&e->lock);
    u64 earliest = expire_those(e, next_job(e, NULL), t), of_receives = expire_those(e, timed, t);
    return earliest < of_receives ? earliest : of_receives;
}

void letters_close(struct engine *e) {
    free(e->mailbox);
    e->mailbox = NULL;
}
