/* watcher_binding.c: the worker's side: it makes segments, watches them, and ends what cannot complete.
 *
 * A watcher takes no part in instances. Members wrote all that it reads: every loop is bounded, and progress that
 * cannot be is blamed on the seat that wrote it.
 */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "objects.h"

typedef struct {
    PyObject head;
    struct segment *segment;
    u64 epoch;
    u64 dead[SEAT_WORDS]; /* seats whose processes are gone */
    int reason_of[MAX_SEATS];
} Watcher;

PyTypeObject *watcher_type;

static Watcher *usable(PyObject *self) {
    Watcher *w = (Watcher *)self;
    return check_usable(w->segment, w->epoch) ? NULL : w;
}

static int parse_seat(const Watcher *w, PyObject *number) {
    long seat = PyLong_AsLong(number);
    if (PyErr_Occurred()) return -1;
    if (seat >= 0 && seat < (long)w->segment->geometry.seats) return (int)seat;
    PyErr_Format(PyExc_ValueError, "no such seat: %ld of %d", seat, (int)w->segment->geometry.seats);
    return -1;
}

static u64 limit_to(struct segment *s, u64 n, int reason, int culprit) {
    u64 complete = instance_of(load(&head_of(s)->decided));
    if (all_there(s, complete)) decide(s, complete); /* the last to come may have died before it could */
    lower_limit(s, n, reason, culprit);
    ring_all(s); /* it may have died between a change and waking those who sleep on it, too */
    complete = instance_of(load(&head_of(s)->decided));
    if (complete >= n) apply_limit(s, complete);
    return n;
}

static PyObject *gone(PyObject *self, PyObject *number, int reason) {
    Watcher *w = usable(self);
    int seat = w ? parse_seat(w, number) : -1;
    if (seat < 0) return NULL;
    struct segment *s = w->segment;
    PyThreadState *state = PyEval_SaveThread();
    u64 complete = instance_of(load(&head_of(s)->decided));
    if (all_there(s, complete)) decide(s, complete);
    atomic_fetch_or(&head_of(s)->gone[seat / 64], (u64)1 << seat % 64);
    u64 n = limit_to(s, first_lost(s, seat), reason, seat);
    PyEval_RestoreThread(state);
    w->dead[seat / 64] |= (u64)1 << seat % 64;
    w->reason_of[seat] = reason;
    return PyLong_FromUnsignedLongLong(n);
}

static PyObject *watcher_lost(PyObject *self, PyObject *number) {
    return gone(self, number, LOST);
}

static PyObject *watcher_left(PyObject *self, PyObject *number) {
    return gone(self, number, LEFT);
}

static PyObject *watcher_abort(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Watcher *w = usable(self);
    if (!w || has_arguments(count, 2, "(reason, culprit)")) return NULL;
    long reason = PyLong_AsLong(args[0]), culprit = PyLong_AsLong(args[1]);
    if (!PyErr_Occurred() && (reason < 1 || reason > 15 || culprit < 0 || culprit > WORKER_SEAT))
        PyErr_SetString(PyExc_ValueError, "no such reason or culprit");
    if (PyErr_Occurred()) return NULL;
    PyThreadState *state = PyEval_SaveThread();
    u64 decided = end_now(w->segment, (int)reason, (int)culprit);
    PyEval_RestoreThread(state);
    return PyLong_FromUnsignedLongLong(instance_of(decided));
}

static PyObject *watcher_limit(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Watcher *w = usable(self);
    if (!w || has_arguments(count, 3, "(instance, reason, culprit)")) return NULL;
    u64 n = PyLong_AsUnsignedLongLong(args[0]);
    long reason = PyLong_AsLong(args[1]), culprit = PyLong_AsLong(args[2]);
    if (!PyErr_Occurred() && (reason < 1 || reason > 15 || culprit < 0 || culprit > WORKER_SEAT))
        PyErr_SetString(PyExc_ValueError, "no such reason or culprit");
    if (PyErr_Occurred()) return NULL;
    if (n >> (64 - WORD_BITS - 1)) return none(); /* no instance comes that far: a member has made it up */
    PyThreadState *state = PyEval_SaveThread();
    limit_to(w->segment, n, (int)reason, (int)culprit);
    PyEval_RestoreThread(state);
    return none();
}

static PyObject *watcher_expire(PyObject *self, PyObject *number) {
    Watcher *w = usable(self);
    u64 n = w ? PyLong_AsUnsignedLongLong(number) : 0;
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(expire(w->segment, n, WORKER_SEAT) == DEADLINE);
}

static PyObject *watcher_complete(PyObject *self, PyObject *number) {
    Watcher *w = usable(self);
    u64 n = w ? PyLong_AsUnsignedLongLong(number) : 0;
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(complete_elsewhere(w->segment, n) == COMPLETE);
}

static PyObject *watcher_decided(PyObject *self, PyObject *unused) {
    Watcher *w = usable(self);
    (void)unused;
    if (!w) return NULL;
    u64 decided = load(&head_of(w->segment)->decided), numbers[] = {instance_of(decided), (u64)culprit_of(decided), (u64)reason_of(decided)};
    return tuple_of(numbers, 3);
}

static PyObject *watcher_verdict(PyObject *self, PyObject *unused) {
    Watcher *w = usable(self);
    (void)unused;
    return w ? describe_verdict(w->segment) : NULL;
}

/* (instance, ticks, published, then the record, and slept, hops, cpu); see segment.SeatState */
static PyObject *watcher_seat(PyObject *self, PyObject *number) {
    Watcher *w = usable(self);
    int index = w ? parse_seat(w, number) : -1;
    if (index < 0) return NULL;
    const struct segment *s = w->segment;
    const struct seat *seat = seat_of(s, index);
    u64 progress = load(&seat->progress), n = progress >> TICK_BITS;
    struct record_copy r = {.instance = ~(u64)0};
    for (int tries = 0; tries < 3; tries++) /* of the instance that it is at, else of the one before */
        if (read_record(s, index, n, &r) || (n && read_record(s, index, n - 1, &r))) break;
        else r.instance = ~(u64)0;
    u64 numbers[] = {n, progress & ((1 << TICK_BITS) - 1), load(&seat->ticks), r.instance,
                     r.digest[0] ^ s->geometry_digest, r.digest[1], r.terms == s->geometry_digest ? 0 : r.terms ^ s->geometry_digest, r.flags, r.deadline, r.asked, r.description,
                     r.began, load(&seat->slept), load(&seat->hops), atomic_load_explicit((a32 *)&seat->cpu, memory_order_relaxed)};
    return tuple_of(numbers, sizeof numbers / sizeof *numbers);
}

/* The completed calls of a seat, by description: (description, operation, calls, bytes, nanoseconds); see segment.Total.
 * Places are taken in order. In the last ones the description is -1: they hold all of an operation that found no place. */
static PyObject *watcher_totals(PyObject *self, PyObject *number) {
    Watcher *w = usable(self);
    int index = w ? parse_seat(w, number) : -1;
    if (index < 0) return NULL;
    const struct total *totals = totals_of(w->segment, index);
    PyObject *found[TOTALS];
    Py_ssize_t count = 0;
    for (int i = 0, own = TOTALS - COUNTED_OPERATIONS; i < TOTALS; i++) {
        u64 description = load(&totals[i].description), calls = load(&totals[i].calls);
        if (!description && i < own) i = own - 1;
        if (!description || !calls) continue;
        PyObject *parts[] = {i < own ? PyLong_FromUnsignedLongLong(description - 1) : PyLong_FromLong(-1),
                             PyLong_FromUnsignedLongLong(load(&totals[i].operation)), PyLong_FromUnsignedLongLong(calls),
                             PyLong_FromUnsignedLongLong(load(&totals[i].bytes)), PyLong_FromUnsignedLongLong(load(&totals[i].nanoseconds))};
        found[count++] = pack(parts, 5);
    }
    return pack(found, count);
}

/* A seat's memory of the instances from the first to before the last one: (instance, description, began, ended),
 * in order; see segment.Past. Entries that its process has overwritten, or is writing, are left out. */
static PyObject *watcher_history(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Watcher *w = usable(self);
    if (w && count != 3) return PyErr_Format(PyExc_TypeError, "history takes a seat, a first and a last instance, not %zd arguments", count);
    int index = w ? parse_seat(w, args[0]) : -1;
    if (index < 0) return NULL;
    u64 first = PyLong_AsUnsignedLongLong(args[1]), last = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (last > first + HISTORY) first = last - HISTORY;
    PyObject *found[HISTORY];
    Py_ssize_t known = 0;
    for (u64 n = first; n < last; n++) {
        const struct past *past = past_of(w->segment, index, n);
        if (load(&past->instance) != n + 1) continue;
        u64 numbers[] = {n, load(&past->description), load(&past->began), load(&past->ended)};
        if (load(&past->instance) == n + 1) found[known++] = tuple_of(numbers, 4);
    }
    return pack(found, known);
}

/* (instance, published, missing, disputed or -1, nanoseconds until the earliest deadline or -1) */
static PyObject *watcher_review(PyObject *self, PyObject *unused) {
    Watcher *w = usable(self);
    (void)unused;
    if (!w) return NULL;
    struct segment *s = w->segment;
    u64 decided = load(&head_of(s)->decided), n = instance_of(decided), come[SEAT_WORDS] = {0}, missing[SEAT_WORDS] = {0};
    int seats = (int)s->geometry.seats, disputed = -1;
    if (!reason_of(decided)) {
        for (int i = 0; i < seats; i++) {
            u64 progress = load(&seat_of(s, i)->progress) >> TICK_BITS;
            if (progress > n + 2) end_generation(s, n, NONSENSE, i); /* one more may have been decided since */
            if (w->dead[i / 64] >> i % 64 & 1) limit_to(s, first_lost(s, i), w->reason_of[i], i);
        }
        if (all_there(s, n)) decide(s, n);
        else if ((disputed = find_dispute(s, n)) >= 0) end_generation(s, n, MISMATCH, disputed);
        if (apply_limit(s, n) == COMPLETE) n = instance_of(load(&head_of(s)->decided));
    }
    for (int i = 0; i < seats; i++) *(has_come(s, i, n) ? &come[i / 64] : &missing[i / 64]) |= (u64)1 << i % 64;
    u64 deadline = earliest_deadline(s, n), t = now();
    PyObject *parts[] = {PyLong_FromUnsignedLongLong(n), tuple_of_bits(come, seats), tuple_of_bits(missing, seats),
                         PyLong_FromLong(disputed),
                         PyLong_FromLongLong(!deadline ? -1 : deadline > t ? (long long)(deadline - t) : 0)};
    return pack(parts, 5);
}

static PyObject *watcher_set_waiting(PyObject *self, PyObject *number) {
    Watcher *w = usable(self);
    u64 waiting = w ? PyLong_AsUnsignedLongLong(number) : 0;
    if (PyErr_Occurred()) return NULL;
    atomic_store(&head_of(w->segment)->waiting, waiting);
    return none();
}

static PyObject *watcher_close(PyObject *self, PyObject *unused) {
    Watcher *w = (Watcher *)self;
    (void)unused;
    if (w->segment) segment_unmap(w->segment);
    w->segment = NULL;
    return none();
}

static void watcher_dealloc(PyObject *self) {
    Py_DecRef(watcher_close(self, NULL));
    free_object(self);
}

static PyMethodDef methods[] = {
    {"lost", watcher_lost, METH_O, "A seat's process is gone; the first instance in which it cannot take part."},
    {"left", watcher_left, METH_O, "The same of one that has left in order."},
    FAST_METHOD("abort", watcher_abort, "End the open instance; its number."),
    FAST_METHOD("limit", watcher_limit, "From this instance on, none completes."),
    {"complete", watcher_complete, METH_O, "That instance is complete, which was carried out elsewhere; whether it is."},
    {"expire", watcher_expire, METH_O, "The deadline of this instance has passed; whether this ended it."},
    {"decided", watcher_decided, METH_NOARGS, "(complete, waiting or culprit, reason)"},
    {"verdict", watcher_verdict, METH_NOARGS, "(instance, reason, culprit, missing)"},
    {"seat", watcher_seat, METH_O, "The published state of a seat."},
    {"totals", watcher_totals, METH_O, "The completed calls of a seat, by description."},
    FAST_METHOD("history", watcher_history, "A seat's memory of some instances that it has completed."),
    {"review", watcher_review, METH_NOARGS, "Help to decide; the seats that have come, that are missing and that differ, and the time left."},
    {"set_waiting", watcher_set_waiting, METH_O, "How many processes wait to join the group."},
    {"close", watcher_close, METH_NOARGS, "Unmap the segment."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_dealloc, (void *)watcher_dealloc}, {Py_tp_methods, methods}, {Py_tp_doc, "The worker's side of a segment."}, {0, NULL},
};
PyType_Spec watcher_spec = {"collectived_native._core.Watcher", sizeof(Watcher), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

static PyObject *watch(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    char *geometry;
    Py_ssize_t length;
    (void)module;
    if (has_arguments(count, 2, "(descriptor, geometry)") || PyBytes_AsStringAndSize(args[1], &geometry, &length)) return NULL;
    long descriptor = PyLong_AsLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    struct segment *segment = segment_map((int)descriptor, geometry, (size_t)length, -2);
    if (!segment) return raise_segment_error();
    Watcher *w = (Watcher *)PyType_GenericAlloc(watcher_type, 0);
    if (!w) return segment_unmap(segment), NULL;
    w->segment = segment, w->epoch = segment->epoch;
    return (PyObject *)w;
}

static PyObject *create(PyObject *module, PyObject *geometry) {
    char *bytes;
    Py_ssize_t length;
    (void)module;
    if (PyBytes_AsStringAndSize(geometry, &bytes, &length)) return NULL;
    int descriptor = segment_create(bytes, (size_t)length);
    return descriptor < 0 ? raise_segment_error() : PyLong_FromLong(descriptor);
}

static PyObject *size(PyObject *module, PyObject *geometry) {
    char *bytes;
    Py_ssize_t length;
    struct segment s;
    (void)module;
    if (PyBytes_AsStringAndSize(geometry, &bytes, &length)) return NULL;
    return segment_lay_out(&s, bytes, (size_t)length) ? raise_segment_error() : PyLong_FromUnsignedLongLong(s.bytes);
}

PyMethodDef watcher_functions[] = {
    FAST_METHOD("watch", watch, "Map a segment, to watch it."),
    {"create_segment", create, METH_O, "Make a segment; its descriptor."},
    {"segment_bytes", size, METH_O, "How many bytes a segment of that geometry has."},
    {NULL, NULL, 0, NULL},
};

/* ---- What both sides share ---- */

int has_arguments(Py_ssize_t count, Py_ssize_t wanted, const char *what) {
    if (count == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "expected %s", what);
    return -1;
}

int check_usable(const struct segment *s, u64 epoch) {
    if (segment_is_ours(epoch) && s) return 0;
    PyErr_SetString(PyExc_RuntimeError, segment_is_ours(epoch) ? "it is detached" : "a segment of the parent process: attach in the child itself");
    return -1;
}

PyObject *raise_segment_error(void) {
    if (errno != EINVAL) return PyErr_SetFromErrno(PyExc_OSError);
    PyErr_SetString(PyExc_ValueError, "the geometry is out of range, or does not fit the seat or the segment");
    return NULL;
}

PyObject *tuple_of(const u64 *numbers, Py_ssize_t count) {
    PyObject *found = PyTuple_New(count);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
        if (number) PyTuple_SetItem(found, i, number);
        else Py_DecRef(found), found = NULL;
    }
    return found;
}

PyObject *tuple_of_bits(const u64 bits[SEAT_WORDS], int seats) {
    u64 numbers[MAX_SEATS];
    Py_ssize_t count = 0;
    for (int i = 0; i < seats; i++)
        if (bits[i / 64] >> i % 64 & 1) numbers[count++] = (u64)i;
    return tuple_of(numbers, count);
}

PyObject *pack(PyObject **parts, Py_ssize_t count) {
    PyObject *found = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (found && parts[i]) PyTuple_SetItem(found, i, parts[i]);
        else if (parts[i]) Py_DecRef(parts[i]);
        else if (found) Py_DecRef(found), found = NULL;
    }
    return found;
}

PyObject *describe_verdict(const struct segment *s) {
    u64 word = load(&head_of(s)->decided), limit = load(&head_of(s)->limit), missing[SEAT_WORDS] = {0};
    if (!reason_of(word) && limit != ~(u64)0) word = limit; /* it is over from there on, though earlier instances may run */
    if (reason_of(word) == DEADLINE) missing_seats(s, culprit_of(word), missing);
    int reason = reason_of(word);
    PyObject *parts[] = {PyLong_FromUnsignedLongLong(instance_of(word)), PyLong_FromLong(reason),
                         PyLong_FromLong(reason ? culprit_of(word) : -1), tuple_of_bits(missing, (int)s->geometry.seats)};
    return pack(parts, 4);
}
