/* crossing.c: see crossing.h. */
#define _GNU_SOURCE
#include "crossing.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "arithmetic.h"
#include "copying.h"

enum progress { BLOCKED, MOVED, ODD };
enum {
    AT_ONCE = 16,       /* instances between two looks at the world: of a reduce a worker may only send */
    READ = 64 << 10,    /* bytes that are read before it is known where they belong */
};

/* ---- Beginning and end ---- */

struct crossings *crossings_open(struct engine *engine, int knock, u64 patience, const void *header) {
    struct crossings *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    x->engine = engine, x->knock = knock, x->patience = patience, x->ranks = (int)engine->segment->geometry.seats - 1;
    memcpy(x->header, header, HEADER_BYTES);
    for (int i = 0; i < MOST_WIRES; i++) x->wire[i].descriptor = -1;
    x->kept = least(1024, RECENT / (u64)x->ranks);
    x->began = calloc((size_t)x->ranks * (x->kept + 1), sizeof *x->began);
    x->description = calloc((size_t)x->ranks * (x->kept + 1), sizeof *x->description);
    x->recent = calloc(x->kept, sizeof *x->recent);
    if (x->began && x->description && x->recent) return x;
    crossings_close(x);
    return NULL;
}

void free_route(struct route *route) {
    if (route) free(route->move), free(route->waited), free(route->constants), free(route->blob), free(route->said);
    free(route);
}

void crossings_close(struct crossings *x) {
    if (!x) return;
    for (int i = 0; i < x->routes; i++) free_route(x->route[i]);
    for (int i = 0; i < MOST_WIRES; i++) free(x->wire[i].log);
    for (int i = 0; i < MEMORIES; i++) free(x->memory[i]);
    free(x->began), free(x->description), free(x->recent);
    free(x);
}

static u64 bytes_of(const struct route *route, const struct move *move) {
    return move->elements * route->row[move->memory];
}

/* It begins with a page, as the buffers of sockets mostly do: the kernel copies slowly to just behind (copying.c). */
static int make_room(char **memory, u64 *room, u64 wanted) {
    void *larger;
    if (wanted <= *room) return 0;
    if (posix_memalign(&larger, PAGE, wanted)) return -1;
    if (*room) memcpy(larger, *memory, *room);
    free(*memory);
    *memory = larger, *room = wanted;
    return 0;
}

int crossings_add(struct crossings *x, struct route *route) {
    u64 received[MOST_WIRES] = {0}, wanted = PAGE;
    if (x->routes == MOST_ROUTES || !(route->waited = calloc((size_t)x->ranks, sizeof *route->waited))) return -1;
    for (int i = 0; i < MEMORIES; i++)
        if (route->elements[i] * route->row[i] > wanted) wanted = route->elements[i] * route->row[i];
    if (wanted > x->room) {
        for (int i = 0; i < MEMORIES; i++) {
            u64 room = x->room;
            if (make_room(&x->memory[i], &room, wanted)) return -1;
        }
        x->room = wanted;
    }
    route->keeps_partials = 1;
    for (int i = 0; i < route->moves; i++) {
        const struct move *move = &route->move[i];
        if ((move->kind == MOVE_RECEIVE || move->kind == MOVE_COPY) && move->memory == PARTIALS) route->keeps_partials = 0;
        if (move->kind == MOVE_RECEIVE || move->kind == MOVE_KEEP) received[move->wire] += HEADER_BYTES + bytes_of(route, move);
        if (move->round >= route->rounds) route->rounds = move->round + 1;
    }
    for (int i = 0; i < MOST_WIRES; i++) /* of two instances: others may be one ahead */
        if (received[i] && make_room(&x->wire[i].log, &x->wire[i].room, 2 * received[i] + PAGE)) return -1;
    x->route[x->routes++] = route;
    return 0;
}

void crossings_begin(struct crossings *x, u64 next, const void *chain) {
    for (int i = 0; i < x->routes; i++) {
        struct route *route = x->route[i];
        route->calls = 0, route->nanoseconds = 0, route->uneven = 0;
        memset(route->waited, 0, (size_t)x->ranks * sizeof *route->waited);
    }
    x->wires = 0;
    x->next = next, x->open = NULL, x->is_odd = 0, x->awaits = 0, x->rung_at = 0, x->completed = 0;
    x->is_rung = 1; /* they may have come since the last look */
    memcpy(x->chain, chain, CHAIN_BYTES);
    for (int i = 0; i < MOST_WIRES; i++) x->wire[i].descriptor = -1;
}

int wire_begin(struct crossings *x, int wire, int descriptor, const void *received, u64 bytes) {
    struct wire *w = &x->wire[wire];
    if (make_room(&w->log, &w->room, bytes + PAGE)) return -1;
    memcpy(w->log, received, bytes);
    if (wire >= x->wires) x->wires = wire + 1;
    w->descriptor = descriptor, w->have = bytes, w->used = 0, w->sent = 0, w->is_full = 0, w->wanted = 0, w->land = NULL;
    w->all_sent = w->all_received = 0;
    return 0;
}

static char *place_of_element(const struct crossings *x, int memory, u64 at) {
    return (memory == CONSTANTS ? x->open->constants : x->open_memory[memory]) + at * x->open->row[memory];
}

static char *place(const struct crossings *x, int memory, const struct move *move) {
    return place_of_element(x, memory, move->at);
}

/* ---- The sockets ---- */

/* Takes what is there, up to the end of what lands; ODD: the end, or an error, which its owner gets when it reads. */
static enum progress receive(struct wire *w) {
    u64 end = w->land ? w->wanted : least(w->room, (w->wanted > w->have ? w->wanted : w->have) + READ);
    enum progress found = BLOCKED;
    while (w->have < end) {
        char *to = w->land ? w->land + (w->have - w->land_at) : w->log + w->have;
        ssize_t n = recv(w->descriptor, to, end - w->have, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return found;
        if (n <= 0) return ODD;
        w->have += (u64)n, found = MOVED;
        if (w->have < end) return found; /* most likely that was all: poll reports more */
    }
    return found;
}

static enum progress send_move(struct crossings *x, struct move *move) {
    struct wire *w = &x->wire[move->wire];
    u64 bytes = bytes_of(x->open, move), whole = HEADER_BYTES + bytes;
    if (w->descriptor < 0) return ODD;
    while (move->done < whole) {
        u64 at = move->done > HEADER_BYTES ? move->done - HEADER_BYTES : 0, head = least(move->done, HEADER_BYTES);
        char *from = place(x, move->memory, move) + at;
        struct iovec part[2] = {{move->header + head, HEADER_BYTES - head}, {from, bytes - at}};
        struct msghdr message = {.msg_iov = part, .msg_iovlen = 2};
        ssize_t n = sendmsg(w->descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        w->is_full = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
        if (n < 0) return w->is_full ? BLOCKED : ODD;
        move->done += (u64)n, w->sent += (u64)n;
    }
    return MOVED;
}

/* ---- The moves of a route ---- */

static void combine(const struct crossings *x, void *out, const void *const *parts, int count, u64 elements, int is_final) {
    const struct route *r = x->open;
    fold_partials(r->dtype, r->reduce_op, out, parts, count, elements, is_final, r->divisor, 0);
}

/* Has the rest of a payload land where it belongs, which saves a copy of it. */
static enum progress land(struct crossings *x, struct wire *w, struct move *move) {
    w->land = place(x, move->memory, move), w->land_at = w->used + HEADER_BYTES;
    copy_bytes(w->land, w->log + w->land_at, w->have - w->land_at);
    move->landed = w->have, move->end = w->wanted;
    return receive(w);
}

/* Writes the bytes that have landed into the logs, for other code that has to read them. */
static void fill_logs(const struct crossings *x) {
    for (int i = 0; x->open && i < x->open->moves; i++) {
        const struct move *move = &x->open->move[i];
        const struct wire *w = &x->wire[move->wire];
        if (!move->end) continue;
        u64 begin = move->end - bytes_of(x->open, move), end = least(move->end, w->have);
        memcpy(w->log + move->landed, place(x, move->memory, move) + (move->landed - begin), end - move->landed);
    }
}

/* Takes the payload of a frame, if it is there wholly and is the one expected. */
static enum progress receive_move(struct crossings *x, struct move *move) {
    struct wire *w = &x->wire[move->wire];
    u64 bytes = bytes_of(x->open, move);
    if (w->descriptor < 0) return ODD;
    w->wanted = w->used + HEADER_BYTES;
    if (w->have < w->wanted) return BLOCKED;
    if (memcmp(w->log + w->used, move->header, HEADER_BYTES)) return ODD;
    w->wanted += bytes;
    int lands = move->kind == MOVE_RECEIVE && move->memory == RESULT && move->mine < 0;
    if (lands && w->have < w->wanted && !w->land && land(x, w, move) == ODD) return ODD;
    if (w->have < w->wanted) return BLOCKED;
    const char *payload = w->log + w->used + HEADER_BYTES;
    if (w->land) {
        w->land = NULL;
    } else if (move->kind == MOVE_KEEP) {
        move->kept = payload;
    } else if (move->memory == CONSTANTS) {
        if (memcmp(place(x, CONSTANTS, move), payload, bytes)) return ODD;
    } else if (move->mine < 0) {
        copy_bytes(place(x, move->memory, move), payload, bytes);
    } else {
        const void *mine = place(x, move->mine, move), *both[2] = {mine, payload};
        if (move->left) both[0] = payload, both[1] = mine;
        combine(x, place(x, move->memory, move), both, 2, move->elements, 0);
    }
    w->used = w->wanted;
    return MOVED;
}

static void fold_kept(struct crossings *x, const struct move *move) {
    const void *parts[MOST_WIRES];
    for (int i = 0; i < move->parts; i++)
        parts[i] = move->part[i] < 0 ? place(x, move->mine, move) : x->open->move[move->part[i]].kept;
    combine(x, place(x, SUMS, move), parts, move->parts, move->elements, 0);
}

static int is_transfer(const struct move *move) {
    return move->kind <= MOVE_KEEP;
}

static enum progress carry_round(struct crossings *x) {
    struct route *route = x->open;
    enum progress found = MOVED;
    u64 waits = 0; /* wires on which an earlier frame has not come */
    for (int i = 0; i < route->moves; i++) {
        struct move *move = &route->move[i];
        enum progress one = MOVED;
        if (move->round != x->round || move->ended) continue;
        if (move->kind == MOVE_SEND) {
            one = send_move(x, move);
        } else if (is_transfer(move)) {
            one = waits >> move->wire & 1 ? BLOCKED : receive_move(x, move);
            if (one == BLOCKED) waits |= (u64)1 << move->wire;
        } else if (move->kind == MOVE_FINISH) {
            const void *from = place(x, move->memory, move);
            combine(x, place_of_element(x, RESULT, move->left), &from, 1, move->elements, 1);
        } else if (move->kind == MOVE_COPY) {
            copy_bytes(place(x, move->memory, move), place_of_element(x, move->mine, move->left), bytes_of(route, move));
        } else {
            continue; /* when all is there */
        }
        if (one == ODD) return ODD;
        if (one == BLOCKED) found = BLOCKED;
        else move->began = x->round_began, move->ended = engine_now(x->engine);
    }
    if (found == BLOCKED) return BLOCKED;
    for (int i = 0; i < route->moves; i++)
        if (route->move[i].round == x->round && route->move[i].kind == MOVE_FOLD) fold_kept(x, &route->move[i]);
    x->round++, x->round_began = engine_now(x->engine);
    return MOVED;
}

/* ---- Instances ---- */

static int is_of_contract(const struct crossings *x, const struct route *route, int seat, const struct record_copy *one) {
    const struct segment *s = x->engine->segment;
    const struct plan *plan = route->gathers;
    u64 geometry = s->geometry_digest;
    if (one->flags & RECORD_OPEN) return route->blob && (plan->terms ^ geometry) == one->terms;
    if ((plan->digest[0] ^ geometry) != one->digest[0] || plan->digest[1] != one->digest[1]) return 0;
    return one->flags >> RECORD_BLOB_SHIFT == route->said_bytes &&
           !memcmp(blob_of(s, seat, x->engine->ticks), route->said, route->said_bytes);
}

/* Has the headers of a route say that they are of the next instance. */
static void stamp(struct crossings *x, struct route *route) {
    memcpy(x->open_chain, x->chain, CHAIN_BYTES);
    next_chain(x->open_chain, route->contract, route->contract_bytes);
    for (int i = 0; i < route->moves; i++) {
        struct move *move = &route->move[i];
        for (int k = 0; k < 8; k++) move->header[HEADER_INSTANCE + k] = (unsigned char)(x->next >> 8 * k);
        memcpy(move->header + HEADER_CHAIN, x->open_chain, CHAIN_BYTES);
    }
}

/* Whether the announcement that has come is that of a route. BLOCKED: it has not come wholly; ODD: it is another. */
static enum progress find_announced(struct crossings *x, struct route *route) {
    const struct move *move = route->move, *end = move + route->moves;
    while (move < end && !(move->kind == MOVE_RECEIVE && move->memory == CONSTANTS)) move++;
    if (move == end) return MOVED;
    const struct wire *w = &x->wire[move->wire];
    if (w->descriptor < 0) return ODD;
    if (w->have < HEADER_BYTES) return BLOCKED;
    stamp(x, route);
    if (memcmp(w->log, move->header, HEADER_BYTES)) return ODD;
    if (w->have < HEADER_BYTES + bytes_of(route, move)) return BLOCKED;
    return memcmp(w->log + HEADER_BYTES, route->constants + move->at, bytes_of(route, move)) ? ODD : MOVED;
}

/* The route of the instance to which all ranks have come, if they agree; notes when each came. BLOCKED: all take any value, and
   its description has not come yet. ODD: there is none. */
static enum progress agree(struct crossings *x, struct route **agreed) {
    const struct segment *s = x->engine->segment;
    struct record_copy come[MAX_SEATS];
    enum progress found = ODD;
    int closed = 0;
    for (int i = 0; i < x->ranks; i++) {
        if (!read_record(s, i, x->next, &come[i])) return ODD;
        if ((come[i].flags & (RECORD_MEETS | RECORD_WHOLE)) != RECORD_WHOLE) return ODD;
        if (come[closed].flags & RECORD_OPEN) closed = i;
        x->began[i] = come[i].began, x->description[i] = come[i].description;
    }
    for (int number = 0; number < x->routes; number++) {
        struct route *route = x->route[number];
        enum progress one = is_of_contract(x, route, closed, &come[closed]) ? MOVED : ODD;
        for (int i = 0; one == MOVED && i < x->ranks; i++)
            if (!is_of_contract(x, route, i, &come[i])) one = ODD;
        if (one == MOVED && come[closed].flags & RECORD_OPEN) one = find_announced(x, route);
        if (one == MOVED) return *agreed = route, MOVED;
        if (one == BLOCKED) found = BLOCKED;
    }
    return found;
}

static enum progress begin(struct crossings *x) {
    struct route *route;
    enum progress found = agree(x, &route);
    if (found != MOVED) return found;
    for (int i = 0; i < MEMORIES; i++) x->open_memory[i] = x->memory[i];
    char *partials = route->keeps_partials ? engine_find_partials(x->engine, route->gathers) : NULL, *results = NULL;
    u64 bytes = route->elements[RESULT] * route->row[RESULT];
    if (route->brought == RESULT) results = engine_find_results(x->engine, route->brings, bytes);
    if (partials) x->open_memory[PARTIALS] = partials;
    if (results) x->open_memory[RESULT] = results;
    struct values values = {.out = &x->memory[PARTIALS]};
    if (engine_gather(x->engine, route->gathers, partials ? NULL : &values, x->next) != COMPLETE) return ODD;
    stamp(x, route);
    for (int i = 0; i < route->moves; i++) {
        struct move *move = &route->move[i];
        move->done = 0, move->ended = 0, move->kept = NULL, move->end = 0;
    }
    x->open = route, x->round = 0, x->started = x->round_began = x->moved_at = engine_now(x->engine);
    return MOVED;
}

static void remember(struct crossings *x) {
    struct route *route = x->open;
    u64 ended = engine_now(x->engine), first = ended, last = 0;
    size_t ranks = (size_t)x->ranks, slot = x->completed % x->kept, at = ranks * (1 + slot);
    for (size_t i = 0; i < ranks; i++) { /* ranks wrote these */
        u64 began = least(x->began[i], x->started);
        route->waited[i] += ended - began;
        if (began < first) first = began;
        if (began > last) last = began;
        x->began[at + i] = began, x->description[at + i] = x->description[i];
    }
    route->calls++, route->nanoseconds += ended - first, route->uneven += last - first;
    int number = 0;
    while (x->route[number] != route) number++;
    struct recent *recent = &x->recent[slot];
    *recent = (struct recent){.instance = x->next, .started = x->started, .ended = ended, .route = number};
    for (int i = 0; i < route->moves && recent->marked < MOST_MARKED; i++) {
        if (!is_transfer(&route->move[i]) || route->move[i].memory == CONSTANTS) continue;
        recent->mark[2 * recent->marked] = route->move[i].began, recent->mark[2 * recent->marked + 1] = route->move[i].ended;
        recent->marked++;
    }
    x->completed++;
}

static enum progress end(struct crossings *x) {
    const char *result = x->open_memory[x->open->brought];
    struct values values = {.in = &result};
    int lies_there = result != x->memory[x->open->brought];
    if (engine_bring(x->engine, x->open->brings, lies_there ? NULL : &values, x->next, x->open->blob, x->open->blob_bytes) != COMPLETE) return ODD;
    remember(x);
    memcpy(x->chain, x->open_chain, CHAIN_BYTES);
    for (int i = 0; i < x->wires; i++) {
        struct wire *w = &x->wire[i];
        if (w->descriptor < 0) continue;
        memmove(w->log, w->log + w->used, w->have - w->used);
        w->all_sent += w->sent, w->all_received += w->used;
        w->have -= w->used, w->used = 0, w->sent = 0, w->wanted = 0;
    }
    x->open = NULL, x->next++, x->is_rung = 1;
    return MOVED;
}

/* Whether what has come before the instance it is for belongs to that. */
static int is_early(const struct crossings *x, const struct wire *w) {
    unsigned char number[8];
    if (w->have < HEADER_BYTES) return 1;
    for (int k = 0; k < 8; k++) number[k] = (unsigned char)(x->next >> 8 * k);
    unsigned char kind = (unsigned char)w->log[HEADER_KIND];
    return !memcmp(w->log, x->header, HEADER_KIND) && (kind == KIND_DATA || kind == KIND_ANNOUNCEMENT) && !memcmp(w->log + HEADER_KEY, x->header + HEADER_KEY, HEADER_INSTANCE - HEADER_KEY) &&
           !memcmp(w->log + HEADER_INSTANCE, number, sizeof number);
}

/* Does what can be done. MOVED: there may be more, but others have waited for long enough. */
static enum progress advance(struct crossings *x) {
    for (int ended = 0; ended < AT_ONCE; ended++) {
        if (!x->open) {
            if (x->is_rung && reason_of(load(&head_of(x->engine->segment)->decided))) return ODD;
            if (x->is_rung && engine_attend(x->engine, x->next, 0)) {
                enum progress begun = begin(x);
                if (begun == ODD) return ODD;
                x->awaits = begun == BLOCKED;
                if (!x->awaits) x->rung_at = 0;
                else if (!x->rung_at) x->rung_at = engine_now(x->engine);
            }
            x->is_rung = x->awaits;
        }
        if (!x->open) {
            for (int i = 0; i < x->wires; i++)
                if (x->wire[i].descriptor >= 0 && !is_early(x, &x->wire[i])) return ODD;
            return BLOCKED;
        }
        while (x->round < x->open->rounds) {
            enum progress found = carry_round(x);
            if (found != MOVED) return found;
        }
        if (end(x) == ODD) return ODD;
    }
    return MOVED;
}

/* ---- Waiting ---- */

static struct wire *wire_of(struct crossings *x, int descriptor) {
    for (int i = 0; i < x->wires; i++)
        if (x->wire[i].descriptor == descriptor) return &x->wire[i];
    return NULL;
}

/* The events that poll has to report: not input, where a frame waits for its instance or there is no room. */
static short events_of(const struct crossings *x, const struct wire *w) {
    int reads = w->have < w->room && (x->open || x->awaits || w->have < HEADER_BYTES);
    return (short)((reads ? POLLIN : 0) | (w->is_full ? POLLOUT : 0));
}

/* Until when nothing odd is about an instance that is open and does not move, or to which only some have come; ~0: there is none. */
static u64 patience_end(const struct crossings *x) {
    u64 deadline = x->open ? earliest_deadline(x->engine->segment, x->next) : 0, since = x->open ? x->moved_at : x->rung_at;
    if (!since) return ~(u64)0;
    return deadline ? least(deadline, since + x->patience) : since + x->patience;
}

/* Deals with the events of own wires; how many others are left. */
static int take_events(struct crossings *x, struct pollfd *polls, int count) {
    int others = 0;
    for (int i = 0; i < count; i++) {
        struct wire *w = polls[i].revents ? wire_of(x, polls[i].fd) : NULL;
        if (!polls[i].revents) continue;
        u64 rings;
        if (polls[i].fd == x->knock && polls[i].revents == POLLIN) {
            if (read(x->knock, &rings, sizeof rings) == sizeof rings) x->is_rung = 1;
            if (!x->rung_at) x->rung_at = engine_now(x->engine);
        } else if (!w || polls[i].revents & ~(POLLIN | POLLOUT) || (polls[i].revents & POLLIN && receive(w) == ODD)) {
            others++;
            continue;
        }
        polls[i].revents = 0;
    }
    return others;
}

static int carry(struct crossings *x, struct pollfd *polls, int count, u64 nanoseconds) {
    int others = 0;
    u64 until = nanoseconds == ~(u64)0 ? nanoseconds : engine_now(x->engine) + nanoseconds;
    for (;;) {
        enum progress found = advance(x);
        if (found == ODD) x->is_odd = 1;
        if (x->is_odd || others) return others;
        u64 t = engine_now(x->engine), limit = patience_end(x);
        if (t >= limit) x->is_odd = LATE;
        if (t >= limit || t >= until) return 0;
        u64 left = found == MOVED ? t : least(limit, until);
        struct timespec timeout = {(time_t)((left - t) / 1000000000u), (long)((left - t) % 1000000000u)};
        for (int i = 0; i < count; i++) {
            const struct wire *w = wire_of(x, polls[i].fd);
            if (w) polls[i].events = events_of(x, w);
            polls[i].revents = 0;
        }
        int events = ppoll(polls, (nfds_t)count, left == ~(u64)0 ? NULL : &timeout, NULL);
        if (events > 0 && x->open) x->moved_at = engine_now(x->engine);
        if (events > 0) others = take_events(x, polls, count);
        else if (events < 0) for (int i = 0; i < count; i++) polls[i].revents = 0;
    }
}

int crossings_wait(struct crossings *x, struct pollfd *polls, int count, u64 nanoseconds) {
    int others = carry(x, polls, count, nanoseconds);
    fill_logs(x);
    return others;
}
