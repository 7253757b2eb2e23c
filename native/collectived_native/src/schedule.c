/* schedule.c: the eleven collectives as columns of bytes that seats put, fold and take.
 *
 * Values move in four ways:
 *   shares    all_reduce, reduce: a step is cut into a share per seat, which that seat folds and hands round;
 *   pieces    reduce_scatter: each seat folds the piece that it keeps;
 *   common    broadcast, all_gather, gather: what a seat puts is read by all, or by the root;
 *   personal  scatter, all_to_all: a seat puts a column for each other.
 * Small values go across hosts too (ACROSS): the worker, whose seat is the last, folds the ranks' columns, or takes them as
 * they are (without a reduce operation); when it has the results, it puts them, for the ranks to read each its own.
 * A step of a phase has one column per seat (common: one in all). The part that a seat keeps of its own value never passes the
 * segment, but where the value is small: then all of it does, so that results may be written over inputs.
 */
#include "schedule.h"
#include "flows.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"
#include "copying.h"

enum { SHORTEST_COLUMN = 16 << 10, OVERLAPPING_STEPS = 4 };

static u64 round_line(u64 bytes) {
    return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

int is_bringer(const struct plan *plan) {
    return plan->operation == ACROSS && plan->me == plan->root;
}

int takes_from(const struct plan *plan, int seat) {
    int takes = folds(plan) || !plan->phases;
    for (int i = 0; i < plan->phases; i++) takes |= plan->phase[i].counts[seat] > 0;
    return takes;
}

/* Elements that the worker brings to all ranks; where those for this rank begin. */
static u64 brought(const struct plan *plan, const struct phase *p) {
    return p->counts[folds(plan) ? 1 : plan->root];
}

static u64 begin_of_result(const struct plan *plan, const struct phase *p) {
    return p->counts[folds(plan) ? 2 : plan->seats];
}

/* ---- Plans ---- */

static u64 longest_flow(const struct plan *plan, const struct phase *p) {
    enum way way = OPERATION[plan->operation].way;
    int senders = way == PIECES || way == SHARES ? 1 : plan->seats, receivers = way == PIECES || way == PERSONAL ? plan->seats : 1;
    u64 longest = 0;
    for (int from = 0; from < senders; from++)
        for (int to = 0; to < receivers; to++) {
            u64 elements = flow(plan, p, from, to);
            if (elements > longest) longest = elements;
        }
    return longest;
}

/* Cuts a phase into steps. Columns are as long as memory allows, but short enough for some steps to overlap. */
static void cut(const struct segment *s, const struct plan *plan, struct phase *p) {
    enum way way = OPERATION[plan->operation].way;
    u64 widest = p->item > p->result_item ? p->item : p->result_item;
    u64 columns = way == SHARES ? (u64)folders(plan) : 1;
    u64 elements = longest_flow(plan, p), most = s->geometry.share;
    if (way == COMMON && s->geometry.seats > 1) most = 2 * s->geometry.share;
    u64 bytes = least(most, round_line(elements * widest / (OVERLAPPING_STEPS * columns) + 1));
    if (bytes < SHORTEST_COLUMN) bytes = least(SHORTEST_COLUMN, most);
    p->column = bytes / widest / CACHE_LINE * CACHE_LINE;
    if (!p->column) p->column = bytes / widest;
    p->column_bytes = s->geometry.share;
    p->steps = (elements + p->column * columns - 1) / (p->column * columns);
}

static const char *check_phase(const struct plan *plan, const struct phase *p, u64 counts_given) {
    u64 wanted = plan->operation == ALL_TO_ALL ? (u64)plan->seats * (u64)plan->seats
                 : plan->operation == ACROSS ? (folds(plan) ? 3 : (u64)plan->seats + 1)
                 : OPERATION[plan->operation].way == SHARES || plan->operation == BROADCAST
                     ? 1
                     : (u64)plan->seats;
    if (!p->item) return "no such dtype";
    if (folds(plan) && !partial_size(p->dtype, plan->reduce_op))
        return "the reduce operation is not defined on the dtype";
    if (counts_given != wanted) return "the number of counts does not fit the operation";
    for (u64 i = 0; i < counts_given; i++)
        if (p->counts[i] >> 40) return "a count is too large";
    u64 in = p->starts_in[p->leaves_in], out = p->starts_out[p->leaves_out];
    if (is_bringer(plan) && in == brought(plan, p)) in = 0; /* it has no value: these are results */
    if (plan->operation == ACROSS && out) {
        u64 all = 0, begin = begin_of_result(plan, p);
        for (int seat = 0; seat < plan->root && !folds(plan); seat++) all += p->counts[seat];
        int fits = is_bringer(plan) ? out == (folds(plan) ? p->count : all)
                                    : begin <= brought(plan, p) && out <= brought(plan, p) - begin;
        if (!fits) return "leaves out do not add up to the counts";
    }
    if (in != value_of(plan, p, plan->me) && !(plan->operation == BROADCAST && plan->me != plan->root))
        return "leaves in do not add up to the counts";
    if (out != result_of_seat(plan, p) && !(plan->operation == BROADCAST && plan->me == plan->root && !out))
        return "leaves out do not add up to the counts";
    return NULL;
}

/* Where the values of all seats lie in the first tick, should they be whole. */
static void place_whole(struct plan *plan, u64 *table, u64 small) {
    u64 at[MAX_SEATS] = {0};
    for (int i = 0; i < plan->phases; i++, table += plan->seats) {
        plan->phase[i].whole_at = table;
        for (int seat = 0; seat < plan->seats; seat++) {
            table[seat] = at[seat];
            const struct phase *p = &plan->phase[i];
            int brings = plan->operation == ACROSS && seat == plan->root;
            u64 item = brings && folds(plan) ? result_size(p->dtype, plan->reduce_op) : item_size(p->dtype);
            at[seat] += round_line((brings ? brought(plan, p) : value_of(plan, p, seat)) * item);
        }
    }
    plan->whole = 1;
    for (int seat = 0; seat < plan->seats; seat++) plan->whole &= at[seat] <= small;
    plan->whole_bytes = at[plan->me];
}

struct plan *plan_make(const struct segment *s, int seat, int operation, int reduce_op, int root, int phases,
                       const struct phase_terms *terms, const u64 *numbers, const char **why) {
    int seats = (int)s->geometry.seats;
    *why = NULL;
    if (operation < ALL_REDUCE || operation >= OPERATIONS) *why = "no such operation";
    else if (OPERATION[operation].rooted && (root < 0 || root >= seats)) *why = "no such root";
    else if (operation == ACROSS && (root != seats - 1 || seats < 2)) *why = "the worker must have the last seat";
    else if (operation == BARRIER && phases) *why = "a barrier has no values";
    if (*why) return errno = EINVAL, NULL;
    size_t given = 0, tables = 0;
    for (int i = 0; i < phases; i++) {
        given += terms[i].counts_given;
        tables += (size_t)terms[i].leaves_in + (size_t)terms[i].leaves_out + 2 + (size_t)seats;
    }
    struct plan *plan = calloc(1, sizeof *plan + (size_t)phases * sizeof *plan->phase + (given + tables) * sizeof(u64));
    if (!plan) return NULL;
    plan->seats = seats, plan->me = seat, plan->operation = operation, plan->reduce_op = reduce_op;
    plan->root = root, plan->phases = phases, plan->depth = OPERATION[operation].way == SHARES ? 2 : 1;
    u64 *at = (u64 *)&plan->phase[phases];
    for (int i = 0; i < phases && !*why; i++) {
        struct phase *p = &plan->phase[i];
        p->dtype = terms[i].dtype, p->item = item_size(p->dtype);
        p->result_item = !folds(plan) ? p->item
                         : is_bringer(plan)          ? partial_size(p->dtype, reduce_op)
                                                     : result_size(p->dtype, reduce_op);
        if (is_bringer(plan) && folds(plan) && terms[i].leaves_in) p->item = result_size(p->dtype, reduce_op);
        memcpy(at, numbers, terms[i].counts_given * sizeof *at);
        p->counts = at, p->count = terms[i].counts_given ? at[0] : 0;
        at += terms[i].counts_given, numbers += terms[i].counts_given;
        p->leaves_in = terms[i].leaves_in, p->first_in = plan->leaves_in, p->starts_in = at;
        for (int leaf = 0; leaf < p->leaves_in; leaf++) at[leaf + 1] = at[leaf] + *numbers++;
        at += p->leaves_in + 1;
        p->leaves_out = terms[i].leaves_out, p->first_out = plan->leaves_out, p->starts_out = at;
        for (int leaf = 0; leaf < p->leaves_out; leaf++) at[leaf + 1] = at[leaf] + *numbers++;
        at += p->leaves_out + 1;
        plan->leaves_in += p->leaves_in, plan->leaves_out += p->leaves_out;
        *why = check_phase(plan, p, terms[i].counts_given);
        if (*why) break;
        cut(s, plan, p);
        p->first_step = plan->steps, plan->steps += p->steps;
        int whose = operation == BROADCAST || operation == SCATTER ? root : seat;
        plan->bytes += value_of(plan, p, whose) * p->item;
        plan->bytes_moved += value_of(plan, p, seat) * p->item + result_of_seat(plan, p) * p->result_item;
        plan->streams |= result_of_seat(plan, p) * p->result_item >= s->geometry.streamed;
    }
    if (!*why && plan->steps + 4 >= (u64)1 << TICK_BITS) *why = "the value needs too many ticks: use larger shares, or cut it";
    if (*why) return free(plan), errno = EINVAL, NULL;
    place_whole(plan, at, s->geometry.small);
    if (operation == ACROSS && !plan->whole) {
        *why = "values across hosts have to fit into one tick";
        return free(plan), errno = EINVAL, NULL;
    }
    int moves = operation == BROADCAST || operation == ALL_GATHER || operation == SCATTER || operation == ALL_TO_ALL;
    if (moves && phases == 1 && plan->leaves_in <= 1 && plan->leaves_out <= 1)
        plan->longest = longest_flow(plan, plan->phase) * plan->phase->item;
    return plan;
}

int phases_below(const struct plan *plan, u64 steps) {
    int done = 0;
    while (done < plan->phases && plan->phase[done].first_step + plan->phase[done].steps <= steps) done++;
    return done;
}

/* ---- Leaves: a vector that lies in several arrays ---- */

static int leaf_at(const u64 *starts, int leaves, u64 at) {
    int low = 0, high = leaves - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (starts[middle] <= at) low = middle;
        else high = middle - 1;
    }
    return low;
}

static void copy(const struct plan *plan, char *to, const char *from, u64 bytes) {
    if (plan->streams) copy_streamed(to, from, bytes);
    else copy_bytes(to, from, bytes);
}

/* Where elements at .. at + m of this seat's value lie; NULL: in more than one array. */
static const char *find_in(const struct phase *p, const struct values *v, u64 at, u64 m) {
    int leaf = leaf_at(p->starts_in, p->leaves_in, at);
    if (at + m > p->starts_in[leaf + 1]) return NULL;
    return v->in[p->first_in + leaf] + (at - p->starts_in[leaf]) * p->item;
}

static void copy_in(const struct phase *p, const struct values *v, u64 at, u64 m, char *to) {
    for (int leaf = leaf_at(p->starts_in, p->leaves_in, at); m; leaf++) {
        u64 n = least(m, p->starts_in[leaf + 1] - at);
        if (!n) continue;
        copy_bytes(to, v->in[p->first_in + leaf] + (at - p->starts_in[leaf]) * p->item, n * p->item);
        to += n * p->item, at += n, m -= n;
    }
}

static void copy_out(const struct plan *plan, const struct phase *p, const struct values *v, u64 at, u64 m, const char *from) {
    for (int leaf = leaf_at(p->starts_out, p->leaves_out, at); m; leaf++) {
        u64 n = least(m, p->starts_out[leaf + 1] - at);
        if (!n) continue;
        copy(plan, v->out[p->first_out + leaf] + (at - p->starts_out[leaf]) * p->result_item, from, n * p->result_item);
        from += n * p->result_item, at += n, m -= n;
    }
}

/* From this seat's value into its result, leaf by leaf. */
static void copy_own(const struct plan *plan, const struct phase *p, const struct values *v, u64 from, u64 to, u64 m) {
    for (int leaf = leaf_at(p->starts_in, p->leaves_in, from); m; leaf++) {
        u64 n = least(m, p->starts_in[leaf + 1] - from);
        if (!n) continue;
        const char *at = v->in[p->first_in + leaf] + (from - p->starts_in[leaf]) * p->item;
        int leaf_out = leaf_at(p->starts_out, p->leaves_out, to);
        int stays = at == v->out[p->first_out + leaf_out] + (to - p->starts_out[leaf_out]) * p->item;
        if (!stays) copy_out(plan, p, v, to, n, at);
        from += n, to += n, m -= n;
    }
}

/* Folds vectors of all seats into this seat's result. */
static void fold_out(const struct plan *plan, const struct phase *p, const struct values *v, u64 at, u64 m,
                     const char *const *sources) {
    const void *from[MAX_SEATS];
    u64 done = 0;
    for (int leaf = leaf_at(p->starts_out, p->leaves_out, at); done < m; leaf++) {
        u64 n = least(m - done, p->starts_out[leaf + 1] - at);
        if (!n) continue;
        for (int i = 0; i < folders(plan); i++) from[i] = sources[i] + done * p->item;
        fold_inputs(p->dtype, plan->reduce_op, v->out[p->first_out + leaf] + (at - p->starts_out[leaf]) * p->result_item,
                    from, folders(plan), n, plan->operation != ACROSS, plan->seats, plan->streams);
        at += n, done += n;
    }
}

/* ---- Values that are whole in one tick ---- */

void put_whole(const struct plan *plan, const struct values *v, char *part) {
    for (int i = 0; i < plan->phases; i++) {
        const struct phase *p = &plan->phase[i];
        u64 m = is_bringer(plan) ? brought(plan, p) : value_of(plan, p, plan->me);
        if (m && p->starts_in[p->leaves_in]) copy_in(p, v, 0, m, part + p->whole_at[plan->me]);
    }
}

void take_whole(const struct segment *s, const struct plan *plan, const struct values *v, u64 tick, u64 offset) {
    const char *parts[MAX_SEATS], *sources[MAX_SEATS];
    for (int i = 0; i < plan->seats; i++) parts[i] = input_of(s, i, tick) + offset;
    for (int i = 0; i < plan->phases; i++) {
        const struct phase *p = &plan->phase[i];
        u64 m = result_of_seat(plan, p), at = 0;
        if (!m || !p->starts_out[p->leaves_out]) continue;
        if (plan->operation == ACROSS && !is_bringer(plan)) {
            u64 begin = begin_of_result(plan, p) * p->result_item;
            copy_out(plan, p, v, 0, m, parts[plan->root] + p->whole_at[plan->root] + begin);
            continue;
        }
        if (folds(plan)) {
            u64 skip = offset_in(plan, p, plan->me, plan->me) * p->item * (OPERATION[plan->operation].way == PIECES);
            for (int from = 0; from < plan->seats; from++) sources[from] = parts[from] + p->whole_at[from] + skip;
            fold_out(plan, p, v, 0, m, sources);
            continue;
        }
        for (int from = 0; from < plan->seats; from++) {
            u64 n = flow(plan, p, from, plan->me);
            if (n) copy_out(plan, p, v, at, n, parts[from] + p->whole_at[from] + offset_in(plan, p, from, plan->me) * p->item);
            at += n;
        }
    }
}

/* ---- Values that are read where they lie ---- */

/* Whether others can read this seat's value while it writes its result. */
static int may_deliver_early(const struct plan *plan, const struct values *v) {
    const struct phase *p = plan->phase;
    if (!plan->leaves_in || !plan->leaves_out || plan->operation == BROADCAST) return 1; /* its root writes nothing else */
    return v->in[0] + p->starts_in[1] * p->item <= v->out[0] || v->out[0] + p->starts_out[1] * p->item <= v->in[0];
}

int is_for_direct(const struct segment *s, const struct plan *plan, const struct values *v) {
    return plan->longest && plan->longest >= s->geometry.direct && may_deliver_early(plan, v);
}

int next_piece(const struct plan *plan, const struct values *v, u64 done, struct piece *piece) {
    const struct phase *p = plan->phase;
    if (!plan->leaves_out) return 0;
    for (int i = 1; i <= plan->seats; i++) { /* beginning with the neighbour, so that not all read the same memory */
        int from = (plan->me + i) % plan->seats;
        u64 bytes = flow(plan, p, from, plan->me) * p->item;
        if (done < bytes) {
            *piece = (struct piece){from, offset_in(plan, p, from, plan->me) * p->item + done, bytes - done,
                                    v->out[0] + offset_out(plan, p, from) * p->item + done};
            return 1;
        }
        done -= bytes;
    }
    return 0;
}

void copy_piece(const struct plan *plan, const struct values *v, const struct piece *piece) {
    const char *own = v->in[0] + piece->at;
    if (own != piece->to) copy(plan, piece->to, own, piece->bytes);
}

/* ---- Larger values, step by step ---- */

static const struct phase *phase_of(const struct plan *plan, u64 step) {
    const struct phase *p = plan->phase;
    while (step >= p->first_step + p->steps) p++;
    return p;
}

struct span {
    u64 at, m; /* elements */
};

/* The elements in column `column` of a step, of `elements` that flow there. */
static struct span span_of(const struct plan *plan, const struct phase *p, u64 step, int column, u64 elements) {
    u64 number = step - p->first_step;
    if (OPERATION[plan->operation].way == SHARES) {
        if (column >= folders(plan)) return (struct span){0, 0};
        number = number * (u64)folders(plan) + (u64)column;
    }
    u64 at = number * p->column;
    return (struct span){at, at >= elements ? 0 : least(p->column, elements - at)};
}

void put_step(const struct segment *s, const struct plan *plan, const struct values *v, u64 step, u64 tick) {
    const struct phase *p = phase_of(plan, step);
    enum way way = OPERATION[plan->operation].way;
    char *part = input_of(s, plan->me, tick);
    if (way == COMMON) {
        struct span mine = span_of(plan, p, step, 0, flow(plan, p, plan->me, 0));
        if (!mine.m) return;
        int kept = receives(plan) && p->starts_out[p->leaves_out];
        if (plan->operation != GATHER || plan->me != plan->root) copy_in(p, v, mine.at, mine.m, part);
        if (kept) copy_own(plan, p, v, mine.at, offset_out(plan, p, plan->me) + mine.at, mine.m);
        return;
    }
    for (int to = 0; to < plan->seats; to++) {
        struct span span = span_of(plan, p, step, to, flow(plan, p, plan->me, to));
        if (!span.m) continue;
        u64 from = offset_in(plan, p, plan->me, to) + span.at;
        if (to != plan->me) copy_in(p, v, from, span.m, part + (u64)to * p->column_bytes);
        else if (way == PERSONAL) copy_own(plan, p, v, from, offset_out(plan, p, plan->me) + span.at, span.m);
        else if (!find_in(p, v, from, span.m)) copy_in(p, v, from, span.m, part + (u64)to * p->column_bytes);
    }
}

/* The columns of all seats for this one; its own from its value, where that lies in one piece. */
static void gather_sources(const struct segment *s, const struct plan *plan, const struct phase *p,
                           const struct values *v, struct span span, u64 tick, const char *sources[MAX_SEATS]) {
    for (int from = 0; from < plan->seats; from++)
        sources[from] = input_of(s, from, tick) + (u64)plan->me * p->column_bytes;
    const char *own = find_in(p, v, offset_in(plan, p, plan->me, plan->me) + span.at, span.m);
    if (own) sources[plan->me] = own;
}

void fold_step(const struct segment *s, const struct plan *plan, const struct values *v, u64 step, u64 tick) {
    const struct phase *p = phase_of(plan, step);
    const char *sources[MAX_SEATS];
    struct span span = span_of(plan, p, step, plan->me, flow(plan, p, plan->me, plan->me));
    if (!span.m) return;
    gather_sources(s, plan, p, v, span, tick - 1, sources);
    fold_inputs(p->dtype, plan->reduce_op, result_of(s, plan->me, tick), (const void *const *)sources, folders(plan), span.m,
                1, plan->seats, 0);
}

void keep_step(const struct segment *s, const struct plan *plan, const struct values *v, u64 step, u64 tick) {
    const struct phase *p = phase_of(plan, step);
    struct span span = span_of(plan, p, step, plan->me, p->count);
    if (span.m && receives(plan)) copy_out(plan, p, v, span.at, span.m, result_of(s, plan->me, tick));
}

void take_step(const struct segment *s, const struct plan *plan, const struct values *v, u64 step, u64 tick) {
    const struct phase *p = phase_of(plan, step);
    enum way way = OPERATION[plan->operation].way;
    const char *sources[MAX_SEATS];
    if (!receives(plan) || !p->starts_out[p->leaves_out]) return;
    if (way == PIECES) {
        struct span span = span_of(plan, p, step, plan->me, p->counts[plan->me]);
        if (!span.m) return;
        gather_sources(s, plan, p, v, span, tick, sources);
        fold_out(plan, p, v, span.at, span.m, sources);
        return;
    }
    for (int i = 1; i < plan->seats; i++) { /* beginning with the neighbour, so that not all read the same memory */
        int from = (plan->me + i) % plan->seats;
        struct span span = span_of(plan, p, step, way == SHARES ? from : plan->me, way == SHARES ? p->count : flow(plan, p, from, plan->me));
        if (!span.m) continue;
        if (way == SHARES) copy_out(plan, p, v, span.at, span.m, result_of(s, from, tick));
        else
            copy_out(plan, p, v, offset_out(plan, p, from) + span.at, span.m,
                     input_of(s, from, tick) + (way == PERSONAL ? (u64)plan->me * p->column_bytes : 0));
    }
}
