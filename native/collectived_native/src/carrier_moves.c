/* carrier_moves.c: how a carrier makes the moves of an order (carrier.h). */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "arithmetic.h"
#include "carrier.h"
#include "copying.h"

enum progress { BLOCKED, HELD, MOVED, FAILED_STEP };
enum { TURN = 1 << 20 /* bytes that are moved over one socket before the others have their turn */ };
static const u64 MOST_SCRATCH = (u64)1 << 40; /* bytes: an order that wants more is wrong */

struct step { /* a move that is being made */
    const struct told_move *told;
    struct link *link;
    int is_over;
    char *from, *to, *mine; /* `mine`: NULL where nothing is folded */
    u64 bytes, done;        /* `done` counts the header, too */
    u64 rest;               /* bytes of an element that has not come wholly; they are in `came` */
    char came[HEADER_BYTES];
};

struct run {
    const struct told_run *told;
    struct span memory[MEMORIES];
    struct step *step;
    u32 round, first, end; /* the steps of the round lie there, others between them */
};

static enum progress break_off(struct carrier *c, u32 peer, int error) {
    carrier_break(c, peer, error);
    return FAILED_STEP;
}

static enum progress send_step(struct carrier *c, struct step *step) {
    u64 head = least(step->done, HEADER_BYTES), at = step->done - head;
    struct iovec part[2] = {{(char *)step->told->header + head, HEADER_BYTES - head}, {step->from + at, least(step->bytes - at, TURN)}};
    struct msghdr message = {.msg_iov = part, .msg_iovlen = 2};
    ssize_t n = sendmsg(step->link->descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return BLOCKED;
    if (n < 0) return break_off(c, step->told->peer, errno);
    step->done += (u64)n;
    atomic_fetch_add_explicit(&c->sent, (u64)n, memory_order_relaxed);
    return MOVED;
}

static enum progress take(struct carrier *c, struct step *step, char *to, u64 most) {
    if (!most) return MOVED; /* nothing follows the header */
    struct link *link = step->link;
    u64 ahead = least(link->ahead_bytes - link->ahead_taken, most);
    if (ahead) memcpy(to, link->ahead + link->ahead_taken, ahead);
    link->ahead_taken += ahead;
    ssize_t n = ahead ? (ssize_t)ahead : recv(link->descriptor, to, most, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return BLOCKED;
    if (n <= 0) return break_off(c, step->told->peer, n ? errno : 0);
    step->done += (u64)n;
    atomic_fetch_add_explicit(&c->received, (u64)n, memory_order_relaxed);
    return MOVED;
}

static void fold(const struct told_run *told, char *out, const void *const *parts, int count, u64 bytes, int is_final) {
    fold_partials(told->dtype, told->reduce_op, out, parts, count, bytes / told->row, is_final, told->divisor, 0);
}

/* Folds the received bytes at once, while they are in the cache. The rest of an element waits in the step, so all moves
   share the bounce buffer. */
static enum progress take_and_fold(struct carrier *c, const struct run *r, struct step *step) {
    u64 before = step->done, folded = before - HEADER_BYTES - step->rest;
    memcpy(c->bounce, step->came, step->rest);
    enum progress found = take(c, step, c->bounce + step->rest, least(step->bytes + HEADER_BYTES - before, PIECE));
    if (found != MOVED) return found;
    u64 have = step->rest + (step->done - before), whole = have - have % r->told->row;
    const void *parts[2] = {step->mine + folded, c->bounce};
    if (step->told->left) parts[0] = c->bounce, parts[1] = step->mine + folded;
    if (whole) fold(r->told, step->to + folded, parts, 2, whole, 0);
    step->rest = have - whole;
    memcpy(step->came, c->bounce + whole, step->rest);
    return MOVED;
}

static enum progress receive_step(struct carrier *c, const struct run *r, struct step *step) {
    if (step->done < HEADER_BYTES) {
        enum progress found = take(c, step, step->came + step->done, HEADER_BYTES - step->done);
        if (found != MOVED || step->done < HEADER_BYTES) return found;
        if (memcmp(step->came, step->told->header, HEADER_BYTES)) {
            memcpy(c->odd_header, step->came, HEADER_BYTES); /* it is for the worker to judge */
            return break_off(c, step->told->peer, EPROTO);
        }
        if (step->told->memory == RESULT && step->bytes) c->busy->is_written = 1;
    }
    if (step->mine) return take_and_fold(c, r, step);
    u64 at = step->done - HEADER_BYTES;
    return take(c, step, step->to + at, least(step->bytes - at, TURN));
}

/* A finish or a copy, which is made in the order of the moves: later ones may send what it writes. */
static enum progress compute(struct carrier *c, const struct run *r, struct step *step) {
    int copies = step->told->kind == MOVE_COPY, is_there = step->from == step->to && (copies || r->told->reduce_op != OP_MEAN);
    if (!is_there && step->bytes && (!copies || step->told->memory == RESULT)) c->busy->is_written = 1;
    for (u64 at = 0, n; !is_there && at < step->bytes; at += n) {
        const void *from = step->from + at;
        n = least(step->bytes - at, PIECE);
        if (copies) copy_bytes(step->to + at, from, n);
        else fold(r->told, step->to + at, &from, 1, n, 1);
        if (carrier_attend(c)) return break_off(c, NOBODY, ECANCELED);
    }
    step->is_over = 1;
    return MOVED;
}

static int is_transfer(const struct step *step) {
    return step->told->kind == MOVE_SEND || step->told->kind == MOVE_RECEIVE;
}

static enum progress advance(struct carrier *c, const struct run *r, struct step *step) {
    if (!is_transfer(step)) return compute(c, r, step);
    int is_outgoing = step->told->kind == MOVE_SEND;
    enum progress found = is_outgoing ? send_step(c, step) : receive_step(c, r, step);
    step->is_over = step->done == HEADER_BYTES + step->bytes;
    if (!step->is_over) step->link->held[is_outgoing] = c->pass;
    return found;
}

static int is_held(const struct carrier *c, const struct step *step) {
    return is_transfer(step) && step->link->held[step->told->kind == MOVE_SEND] == c->pass;
}

/* 0, or -1: the carrier is broken. */
static int carry_round(struct carrier *c, struct run *r) {
    struct pollfd polls[OWN_POLLS + 2 * MOST_LINKS];
    for (;;) {
        int count = OWN_POLLS, moved = 0, open = 0;
        c->pass++;
        for (u32 i = r->first; i < r->end; i++) {
            struct step *step = &r->step[i];
            if (step->told->round != r->round || step->is_over) continue;
            enum progress found = is_held(c, step) ? HELD : advance(c, r, step);
            if (found == FAILED_STEP) return -1;
            open |= !step->is_over;
            if (found == MOVED) moved = 1;
            if (found == BLOCKED) polls[count++] = (struct pollfd){step->link->descriptor, step->told->kind == MOVE_SEND ? POLLOUT : POLLIN, 0};
        }
        if (carrier_attend(c)) return break_off(c, NOBODY, ECANCELED), -1;
        if (!open) return 0;
        if (!moved) carrier_sleep(c, polls, count, c->is_attentive ? POLLIN : 0);
    }
}

/* Finds the first round from that number on, and where its steps lie; 0: there is none. */
static int enter_round(struct run *r, u64 from) {
    int found = 0;
    for (u32 i = 0; i < r->told->moves; i++) {
        u32 round = r->step[i].told->round;
        if (round < from || (found && round > r->round)) continue;
        if (!found || round < r->round) r->round = round, r->first = i, found = 1;
        r->end = i + 1;
    }
    return found;
}

/* ---- What is checked before ---- */

/* Where those elements lie; NULL: they do not. */
static char *find_place(const struct run *r, unsigned memory, u64 at, u64 elements) {
    static char nowhere[1];
    if (memory >= MEMORIES) return NULL;
    const struct span *span = &r->memory[memory];
    u64 rows = span->bytes / r->told->row;
    if (at > rows || elements > rows - at) return NULL;
    return span->start ? span->start + at * r->told->row : nowhere; /* there: of no elements */
}

/* 0, or an errno that says why the move cannot be made. */
static int prepare_step(struct carrier *c, const struct run *r, struct step *step) {
    const struct told_move *told = step->told;
    int folds = r->told->reduce_op != 0, written = told->kind == MOVE_FINISH ? RESULT : told->memory;
    u64 place;
    memcpy(&place, told->header, sizeof place);
    step->from = step->to = find_place(r, told->memory, told->at, told->elements);
    if (told->kind == MOVE_RECEIVE && told->mine != NOTHING) {
        step->mine = find_place(r, told->mine, told->at, told->elements);
        if (!step->mine || !folds) return EINVAL;
    } else if (told->kind == MOVE_FINISH) {
        step->to = folds ? find_place(r, RESULT, place, told->elements) : NULL;
    } else if (told->kind == MOVE_COPY) {
        step->from = find_place(r, told->mine, place, told->elements);
    } else if (!is_transfer(step)) {
        return EINVAL;
    }
    if (!step->from || !step->to || (told->kind != MOVE_SEND && written == PARTIALS)) return EINVAL; /* values are never written */
    step->bytes = told->elements * r->told->row;
    if (!is_transfer(step)) {
        const char *from = step->from, *to = step->to;
        return from != to && from < to + step->bytes && to < from + step->bytes ? EINVAL : 0;
    }
    step->link = carrier_find_link(c, told->peer);
    return step->link ? 0 : ENOTCONN;
}

static int make_scratch(struct carrier *c, u64 bytes) {
    void *larger;
    if (bytes <= c->scratch.bytes) return 0;
    free(c->scratch.start);
    c->scratch = (struct span){NULL, 0};
    if (bytes > MOST_SCRATCH || posix_memalign(&larger, PAGE, bytes)) return ENOMEM;
    c->scratch = (struct span){larger, bytes};
    return 0;
}

/* 0, or an errno; then `peer` is the one without a link. */
static int prepare(struct carrier *c, struct run *r, const struct offer *offer, u32 *peer) {
    const struct told_run *told = r->told;
    int dtype = told->dtype, op = told->reduce_op;
    int fits = are_partials(dtype, op) && item_size(dtype) == told->row && result_size(dtype, op) == told->row && told->divisor > 0;
    if (!told->row || (op && !fits)) return EINVAL;
    if (make_scratch(c, told->scratch)) return ENOMEM;
    r->memory[PARTIALS] = offer->memory[PARTIALS], r->memory[RESULT] = offer->memory[RESULT];
    r->memory[SUMS] = (struct span){c->scratch.start, told->scratch};
    r->step = calloc((size_t)told->moves + 1, sizeof *r->step);
    if (!r->step) return ENOMEM;
    for (u32 i = 0; i < told->moves; i++) {
        r->step[i].told = (const struct told_move *)(told + 1) + i;
        int error = prepare_step(c, r, &r->step[i]);
        if (error == ENOTCONN) *peer = r->step[i].told->peer;
        if (error) return error;
    }
    return 0;
}

int carrier_run(struct carrier *c, const struct told_run *told, const struct offer *offer, u32 *peer) {
    struct run r = {.told = told};
    int refused = prepare(c, &r, offer, peer), failed = 0;
    for (u64 from = 0; !refused && !failed && enter_round(&r, from); from = (u64)r.round + 1) failed = carry_round(c, &r);
    free(r.step);
    return refused;
}
