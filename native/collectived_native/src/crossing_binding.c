/* crossing_binding.c: crossings as Python objects. */
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"
#include "crossing.h"
#include "objects.h"

typedef struct {
    PyObject head;
    Engine *engine;
    struct crossings *crossings;
    PyObject *plans; /* of all routes */
} Crossings;

PyTypeObject *crossings_type;

static struct crossings *usable(PyObject *self) {
    Crossings *c = (Crossings *)self;
    return usable_engine((PyObject *)c->engine) ? c->crossings : NULL;
}

/* crossings(engine, knock, patience_ns, header) */
static PyObject *make_crossings(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    char *header;
    Py_ssize_t length;
    (void)module;
    if (has_arguments(count, 4, "(engine, knock, patience_ns, header)")) return NULL;
    if (args[0]->ob_type != engine_type) return PyErr_SetString(PyExc_TypeError, "expected an engine"), NULL;
    Engine *e = usable_engine(args[0]);
    int knock = e ? (int)PyLong_AsLong(args[1]) : -1;
    u64 patience = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[3], &header, &length)) return NULL;
    if (length != HEADER_BYTES || !e->engine->is_operated)
        return PyErr_Format(PyExc_ValueError, "expected a worker's engine, and a header of %d bytes, not %zd", HEADER_BYTES, length);
    Crossings *c = (Crossings *)PyType_GenericAlloc(crossings_type, 0);
    if (!c) return NULL;
    c->crossings = crossings_open(e->engine, knock, patience, header), c->plans = PyList_New(0);
    Py_IncRef(args[0]);
    c->engine = e;
    if (c->crossings && c->plans) return (PyObject *)c;
    Py_DecRef((PyObject *)c);
    return PyErr_NoMemory();
}

static void crossings_dealloc(PyObject *self) {
    Crossings *c = (Crossings *)self;
    crossings_close(c->crossings);
    if (c->plans) Py_DecRef(c->plans);
    Py_DecRef((PyObject *)c->engine);
    free_object(self);
}

/* ---- Routes ---- */

static int parse_numbers(PyObject *tuple, Py_ssize_t from, long long *numbers, int count) {
    for (int i = 0; i < count; i++) {
        PyObject *number = PyTuple_GetItem(tuple, from + i);
        if (!number) return -1;
        numbers[i] = PyLong_AsLongLong(number);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

static int lies_in(long long number, long long least, long long most) {
    return least <= number && number <= most;
}

static int reaches(const struct route *route, long long memory, long long at, long long elements) {
    long long most = (long long)route->elements[memory];
    return lies_in(at, 0, most) && lies_in(elements, 0, most - at);
}

/* `kind, round, wire, memory, mine, left, at, elements, header, parts`; of a copy `left` is where it begins in `mine`, of a
   finish where it belongs in the result */
static int parse_move(struct move *move, PyObject *told, const struct route *route) {
    long long n[8];
    char *header;
    Py_ssize_t length;
    if (parse_numbers(told, 0, n, 8) || PyBytes_AsStringAndSize(PyTuple_GetItem(told, 8), &header, &length)) return -1;
    PyObject *parts = PyTuple_GetItem(told, 9);
    Py_ssize_t count = parts ? PyTuple_Size(parts) : -1;
    if (count < 0) return -1;
    int fits = lies_in(n[0], 0, MOVE_KINDS - 1) && lies_in(n[1], 0, 1 << 16) && lies_in(n[2], 0, MOST_WIRES - 1) &&
               lies_in(n[3], 0, ALL_MEMORIES - 1) && lies_in(n[4], -1, MEMORIES - 1) && length == HEADER_BYTES && count <= MOST_WIRES;
    int folds = n[0] == MOVE_FOLD || n[0] == MOVE_KEEP || (n[0] == MOVE_RECEIVE && n[4] >= 0);
    int computes = folds || n[0] == MOVE_FINISH;
    if (computes) fits &= route->reduce_op && n[3] != CONSTANTS;
    if (fits) fits = reaches(route, n[3], n[6], n[7]) && (n[4] < 0 || reaches(route, n[4], n[0] == MOVE_COPY ? n[5] : n[6], n[7]));
    if (n[0] == MOVE_FINISH) fits = fits && reaches(route, RESULT, n[5], n[7]);
    if (n[0] == MOVE_COPY) fits = fits && n[4] >= 0 && n[3] != CONSTANTS && route->row[n[3]] == route->row[n[4]];
    if (!fits || (n[0] == MOVE_FOLD && (n[4] < 0 || !count)) || (folds && (n[3] == RESULT || n[4] == RESULT)))
        return PyErr_SetString(PyExc_ValueError, "a move does not fit its route"), -1;
    move->kind = (enum move_kind)n[0], move->round = (int)n[1], move->wire = (int)n[2], move->memory = (int)n[3];
    move->mine = (int)n[4], move->left = (u64)n[5], move->at = (u64)n[6], move->elements = (u64)n[7];
    memcpy(move->header, header, HEADER_BYTES);
    move->parts = (int)count;
    for (int i = 0; i < move->parts; i++) {
        long long part;
        if (parse_numbers(parts, i, &part, 1)) return -1;
        int kept = part >= 0 && part < move - route->move && route->move[part].kind == MOVE_KEEP &&
                   route->move[part].elements == move->elements && route->move[part].round == move->round;
        if (part != -1 && !kept) return PyErr_SetString(PyExc_ValueError, "a fold of what no move keeps"), -1;
        move->part[i] = (int)part;
    }
    return 0;
}

/* Takes the numbers of a route: dtype, reduce op (0: values are moved as they are), divisor, elements of the three memories, and
   which of them is brought. */
static int parse_terms(struct route *route, PyObject *terms) {
    long long n[7];
    if (parse_numbers(terms, 0, n, 7)) return -1;
    int folds = n[1] != 0;
    u64 partial = folds ? partial_size((int)n[0], (int)n[1]) : item_size((int)n[0]);
    u64 result = folds ? result_size((int)n[0], (int)n[1]) : partial;
    int fits = partial && result && lies_in(n[2], 1, 1 << 30) && lies_in(n[6], 0, MEMORIES - 1);
    for (int i = 0; i < MEMORIES; i++) fits &= lies_in(n[3 + i], 0, 1 << 24);
    if (!fits) return PyErr_SetString(PyExc_ValueError, "no such arithmetic"), -1;
    route->dtype = (int)n[0], route->reduce_op = (int)n[1], route->divisor = (long)n[2], route->brought = (enum memory)n[6];
    route->row[PARTIALS] = route->row[SUMS] = partial, route->row[RESULT] = result, route->row[CONSTANTS] = 1;
    for (int i = 0; i < MEMORIES; i++) route->elements[i] = (u64)n[3 + i];
    return 0;
}

/* Whether plans are of one small pack or none, and of as many elements as a route has of them. */
static int fit_route(const struct route *route) {
    const struct plan *g = route->gathers, *b = route->brings;
    if (!is_bringer(g) || !is_bringer(b) || g->leaves_in || b->leaves_out || g->leaves_out > 1 || b->leaves_in > 1) return 0;
    if (g->leaves_out && (g->phase[0].starts_out[1] != route->elements[PARTIALS] || g->phase[0].result_item != route->row[PARTIALS])) return 0;
    return !b->leaves_in || (b->phase[0].starts_in[1] <= route->elements[route->brought] && b->phase[0].item == route->row[route->brought]);
}

/* add(gathers, brings, contract, terms, moves, constants, blob, said) */
static PyObject *add_route(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    struct crossings *x = usable(self);
    Crossings *c = (Crossings *)self;
    if (!x || has_arguments(count, 8, "(gathers, brings, contract, terms, moves, constants, blob, said)")) return NULL;
    Plan *gathers = plan_of(c->engine, args[0]), *brings = gathers ? plan_of(c->engine, args[1]) : NULL;
    char *contract, *constants, *blob, *said;
    Py_ssize_t length, moves, bytes, told, says;
    if (!brings || PyBytes_AsStringAndSize(args[2], &contract, &length) || (moves = PyTuple_Size(args[4])) < 0 ||
        PyBytes_AsStringAndSize(args[5], &constants, &bytes) || PyBytes_AsStringAndSize(args[6], &blob, &told) ||
        PyBytes_AsStringAndSize(args[7], &said, &says))
        return NULL;
    struct route *route = calloc(1, sizeof *route);
    if (!route || !(route->move = calloc((size_t)moves + 1, sizeof *route->move)) || !(route->constants = malloc((size_t)bytes + 1)) ||
        !(route->said = malloc((size_t)says + 1)) || (told && !(route->blob = malloc((size_t)told))))
        return free_route(route), PyErr_NoMemory();
    route->gathers = gathers->plan, route->brings = brings->plan;
    memcpy(route->constants, constants, (size_t)bytes), route->elements[CONSTANTS] = (u64)bytes;
    memcpy(route->said, said, (size_t)says), route->said_bytes = (u64)says;
    if (told) memcpy(route->blob, blob, (size_t)told), route->blob_bytes = (u64)told;
    if (parse_terms(route, args[3])) return free_route(route), NULL;
    if (!fit_route(route) || length > MOST_CONTRACT || moves > 1 << 12 || told > MAX_BLOB || says > MAX_BLOB) {
        free_route(route);
        return PyErr_SetString(PyExc_ValueError, "the plans are not of one small pack, or do not fit the terms"), NULL;
    }
    route->contract_bytes = (size_t)length;
    memcpy(route->contract, contract, (size_t)length);
    for (Py_ssize_t i = 0; i < moves; i++, route->moves++)
        if (parse_move(&route->move[i], PyTuple_GetItem(args[4], i), route)) return free_route(route), NULL;
    if (PyList_Append(c->plans, args[0]) || PyList_Append(c->plans, args[1])) return free_route(route), NULL;
    int number = x->routes;
    if (crossings_add(x, route)) {
        free_route(route);
        PyErr_SetString(PyExc_MemoryError, "no room for another route");
        return NULL;
    }
    return PyLong_FromLong(number);
}

/* ---- Running ---- */

static PyObject *list_events(const struct pollfd *polls, int count) {
    PyObject *found = PyList_New(0);
    for (int i = 0; found && i < count; i++) {
        if (!polls[i].revents) continue;
        PyObject *parts[] = {PyLong_FromLong(polls[i].fd), PyLong_FromLong(polls[i].revents)}, *one = pack(parts, 2);
        int failed = !one || PyList_Append(found, one);
        if (one) Py_DecRef(one);
        if (failed) return Py_DecRef(found), NULL;
    }
    return found;
}

/* By wire: (bytes sent of the open instance, what has been received and not been taken, bytes sent and received of the others) */
static PyObject *tell_wires(const struct crossings *x) {
    PyObject *found = PyTuple_New(x->wires);
    for (int i = 0; found && i < x->wires; i++) {
        const struct wire *w = &x->wire[i];
        u64 have = w->descriptor < 0 ? 0 : w->have, sent = w->descriptor < 0 ? 0 : w->sent;
        PyObject *parts[] = {PyLong_FromUnsignedLongLong(sent), PyBytes_FromStringAndSize(w->log, (Py_ssize_t)have),
                             PyLong_FromUnsignedLongLong(w->all_sent), PyLong_FromUnsignedLongLong(w->all_received)};
        PyObject *one = pack(parts, 4);
        if (!one || PyTuple_SetItem(found, i, one)) return Py_DecRef(found), NULL;
    }
    return found;
}

/* (route, calls, nanoseconds, uneven, waited) */
static PyObject *tell_totals(const struct crossings *x) {
    PyObject *found = PyList_New(0);
    for (int i = 0; found && i < x->routes; i++) {
        const struct route *r = x->route[i];
        if (!r->calls) continue;
        PyObject *parts[] = {PyLong_FromLong(i), PyLong_FromUnsignedLongLong(r->calls), PyLong_FromUnsignedLongLong(r->nanoseconds),
                             PyLong_FromUnsignedLongLong(r->uneven), tuple_of(r->waited, x->ranks)}, *one = pack(parts, 5);
        int failed = !one || PyList_Append(found, one);
        if (one) Py_DecRef(one);
        if (failed) return Py_DecRef(found), NULL;
    }
    return found;
}

/* (instance, route, started, ended, when each rank came, its description, transfers), oldest first */
static PyObject *tell_recent(const struct crossings *x) {
    PyObject *found = PyList_New(0);
    for (u64 i = x->completed > x->kept ? x->completed - x->kept : 0; found && i < x->completed; i++) {
        const struct recent *one = &x->recent[i % x->kept];
        size_t at = (size_t)x->ranks * (1 + i % x->kept);
        PyObject *parts[] = {PyLong_FromUnsignedLongLong(one->instance), PyLong_FromLong(one->route),
                             PyLong_FromUnsignedLongLong(one->started), PyLong_FromUnsignedLongLong(one->ended),
                             tuple_of(x->began + at, x->ranks), tuple_of(x->description + at, x->ranks),
                             tuple_of(one->mark, 2 * one->marked)}, *told = pack(parts, 7);
        int failed = !told || PyList_Append(found, told);
        if (told) Py_DecRef(told);
        if (failed) return Py_DecRef(found), NULL;
    }
    return found;
}

static int begin_wires(struct crossings *x, PyObject *wires) {
    Py_ssize_t count = PyTuple_Size(wires);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PyTuple_GetItem(wires, i);
        long long descriptor;
        char *received;
        Py_ssize_t length;
        if (parse_numbers(one, 0, &descriptor, 1) || PyBytes_AsStringAndSize(PyTuple_GetItem(one, 1), &received, &length)) return -1;
        if (i == MOST_WIRES) return PyErr_SetString(PyExc_ValueError, "too many wires"), -1;
        if (descriptor >= 0 && wire_begin(x, (int)i, (int)descriptor, received, (u64)length)) return PyErr_NoMemory(), -1;
    }
    return count < 0 ? -1 : 0;
}

/* run(instance, chain, wires, polls, timeout_ns) */
static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    struct crossings *x = usable(self);
    if (!x || has_arguments(count, 5, "(instance, chain, wires, polls, timeout_ns)")) return NULL;
    u64 next = PyLong_AsUnsignedLongLong(args[0]);
    char *chain;
    Py_ssize_t length;
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[1], &chain, &length)) return NULL;
    long long nanoseconds = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (length != CHAIN_BYTES) return PyErr_Format(PyExc_ValueError, "a chain has %d bytes, not %zd", CHAIN_BYTES, length);
    crossings_begin(x, next, chain);
    Py_buffer polls;
    if (begin_wires(x, args[2]) || PyObject_GetBuffer(args[3], &polls, PyBUF_WRITABLE)) return NULL;
    int watched = (int)(polls.len / (Py_ssize_t)sizeof(struct pollfd));
    PyThreadState *state = PyEval_SaveThread();
    crossings_wait(x, polls.buf, watched, nanoseconds < 0 ? ~(u64)0 : (u64)nanoseconds);
    PyEval_RestoreThread(state);
    PyObject *parts[] = {list_events(polls.buf, watched), PyLong_FromUnsignedLongLong(x->next),
                         PyBytes_FromStringAndSize((char *)x->chain, CHAIN_BYTES), PyLong_FromLong(x->is_odd), PyBool_FromLong(x->open != NULL),
                         tell_wires(x), tell_totals(x), tell_recent(x)};
    PyBuffer_Release(&polls);
    return pack(parts, 8);
}

/* next_chain(chain, contract): for tests */
static PyObject *chain_after(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    unsigned char chain[CHAIN_BYTES];
    char *before, *contract;
    Py_ssize_t length, bytes;
    (void)module;
    if (has_arguments(count, 2, "(chain, contract)") || PyBytes_AsStringAndSize(args[0], &before, &length) ||
        PyBytes_AsStringAndSize(args[1], &contract, &bytes))
        return NULL;
    if (length != CHAIN_BYTES || bytes > MOST_CONTRACT)
        return PyErr_Format(PyExc_ValueError, "a chain has %d bytes, a contract %d at most", CHAIN_BYTES, MOST_CONTRACT);
    memcpy(chain, before, CHAIN_BYTES);
    next_chain(chain, contract, (size_t)bytes);
    return PyBytes_FromStringAndSize((char *)chain, CHAIN_BYTES);
}

static PyMethodDef crossings_methods[] = {
    FAST_METHOD("add", add_route, "Add a route; its number."),
    FAST_METHOD("run", run, "Carry instances over until something else happens; return the outcome."),
    {NULL, NULL, 0, NULL},
};
static PyType_Slot crossings_slots[] = {{Py_tp_dealloc, (void *)crossings_dealloc}, {Py_tp_methods, crossings_methods}, {Py_tp_doc, "Instances that cross hosts as others before them."}, {0, NULL}};
PyType_Spec crossings_spec = {"collectived_native._core.Crossings", sizeof(Crossings), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, crossings_slots};
PyMethodDef crossings_functions[] = {
    FAST_METHOD("crossings", make_crossings, "Instances that a worker carries over again as before."),
    FAST_METHOD("next_chain", chain_after, "The digest of all contracts up to and with one more collective."),
    {NULL, NULL, 0, NULL},
};
