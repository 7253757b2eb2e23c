/* engine_binding.c: the rank's side: plans, jobs and the engine of a seat. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "letters.h"
#include "objects.h"

enum {
    TRY_NANOSECONDS = 3000,   /* a blocking call waits so long with the GIL: giving it up costs more */
    KEEP_GIL_BELOW = 64 << 10, /* bytes that are moved with the GIL */
    MOST_LEAVES = 1 << 20,
    DRAIN = 1000 * MILLISECOND,
};

PyTypeObject *job_type, *engine_type;

Engine *usable_engine(PyObject *self) {
    Engine *e = (Engine *)self;
    return check_usable(e->segment, e->epoch) ? NULL : e;
}

/* ---- Carrying out ---- */

/* A job of (plan, inputs, outputs, timeout_ns, blob), ready to be submitted; NULL with an error set. */
static struct held *hold(Engine *e, PyObject *const *args, PyObject *asked) {
    Plan *plan = plan_of(e, args[0]);
    u64 nanoseconds = plan ? PyLong_AsUnsignedLongLong(args[3]) : 0, given = plan ? PyLong_AsUnsignedLongLong(asked) : 0;
    if (!plan || PyErr_Occurred()) return NULL;
    int room = plan->plan->leaves_in + plan->plan->leaves_out;
    struct held *h = e->spare && e->spare->room >= room ? e->spare : make_held(room < 4 ? 4 : room);
    if (!h) return NULL;
    if (h == e->spare) e->spare = NULL;
    memset(&h->job, 0, sizeof h->job);
    Py_IncRef(args[0]);
    h->plan = args[0], h->job.plan = plan->plan;
    if (nanoseconds) h->job.deadline = engine_now(e->engine) + nanoseconds, h->job.asked = given;
    if (!take_blob(h, args[4], plan->plan->meets ? MAX_BLOB : 0) && !take_leaves(h, plan->plan, args[1], args[2])) {
        if (!find_common(e, h)) return h;
    }
    free_held(h);
    return NULL;
}

/* ---- Jobs ---- */

static int is_over(const struct held *h) {
    int state = atomic_load(&h->job.state);
    return state != PENDING && state != DESCRIBE;
}

/* Lets go of what jobs that are over have kept alive; of those to be collected, not before. */
static void reap(Engine *e) {
    for (Job **link = &e->in_flight; *link;) {
        Job *job = *link;
        if (!is_over(job->held) || job->held->job.notify) {
            link = &job->next;
            continue;
        }
        *link = job->next, job->in_flight = 0;
        let_go(job->held);
        Py_DecRef((PyObject *)job);
    }
}

/* Wraps a job that goes on, or that has ended otherwise than well. */
static PyObject *wrap(Engine *e, struct held *h) {
    Job *job = (Job *)PyType_GenericAlloc(job_type, 0);
    if (!job) return NULL; /* the job goes on, and what it holds is never freed */
    Py_IncRef((PyObject *)e);
    job->engine = e, job->held = h, h->job.owner = job;
    job->next = e->in_flight, e->in_flight = job, job->in_flight = 1;
    Py_IncRef((PyObject *)job); /* the engine's own */
    return (PyObject *)job;
}

static int interrupted(void *argument) {
    PyThreadState **state = argument;
    PyEval_RestoreThread(*state);
    int raised = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return raised;
}

/* Waits without the GIL: a state; `raised`: an exception is set. */
static int wait_for(Engine *e, struct job *job, u64 until, int *raised) {
    PyThreadState *state = PyEval_SaveThread();
    struct waiting how = {.until = until, .interrupted = interrupted, .argument = &state, .looked = engine_now(e->engine)};
    how.began = how.looked;
    int found = engine_wait(e->engine, job, &how);
    *raised = how.raised;
    if (how.raised) { /* the generation has ended with it: until the job has, others may read its memory */
        struct waiting rest = {.until = engine_now(e->engine) + DRAIN};
        engine_wait(e->engine, job, &rest);
    }
    PyEval_RestoreThread(state);
    return found;
}

PyObject *carry_out(Engine *e, struct held *h, u64 bytes) {
    int raised = 0, found = PENDING;
    engine_submit(e->engine, &h->job);
    if (bytes < KEEP_GIL_BELOW) found = engine_try(e->engine, &h->job, TRY_NANOSECONDS);
    if (found == PENDING) found = wait_for(e, &h->job, 0, &raised);
    if (found == COMPLETE && !raised && !h->more && h->job.slot < 0) {
        let_go(h);
        if (e->spare) free(e->spare);
        e->spare = h;
        return none();
    }
    if (!raised || !is_over(h)) {
        PyObject *job = wrap(e, h);
        if (!raised) return job;
        if (job) Py_DecRef(job); /* the engine has one */
        return NULL;
    }
    free_held(h);
    return NULL;
}

PyObject *start(Engine *e, struct held *h, int notify) {
    PyObject *job = wrap(e, h);
    if (!job) return NULL;
    h->job.notify = notify;
    engine_submit(e->engine, &h->job);
    return job;
}

/* run(plan, inputs, outputs, timeout_ns, blob[, asked_ns]) */
static PyObject *engine_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || (count != 6 && has_arguments(count, 5, "(plan, inputs, outputs, timeout_ns, blob)"))) return NULL;
    if (e->in_flight) reap(e);
    struct held *h = hold(e, args, args[count == 6 ? 5 : 3]);
    return h ? carry_out(e, h, h->job.plan->bytes_moved) : NULL;
}

/* repeat(plan, inputs, outputs, timeout_ns, blob): as `run`; False, and nothing is done, where it cannot take the arrays */
static PyObject *engine_repeat(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || has_arguments(count, 5, "(plan, inputs, outputs, timeout_ns, blob)")) return NULL;
    if (e->in_flight) reap(e);
    struct held *h = hold(e, args, args[3]);
    if (h) return carry_out(e, h, h->job.plan->bytes_moved);
    if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_BufferError)) return NULL;
    PyErr_Clear();
    return PyBool_FromLong(0);
}

/* submit(plan, inputs, outputs, timeout_ns, blob, notify[, asked_ns]) */
static PyObject *engine_submit_job(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || (count != 7 && has_arguments(count, 6, "(plan, inputs, outputs, timeout_ns, blob, notify)"))) return NULL;
    int notify = PyObject_IsTrue(args[5]);
    reap(e);
    struct held *h = notify < 0 ? NULL : hold(e, args, args[count == 7 ? 6 : 3]);
    PyObject *job = h ? start(e, h, notify) : NULL;
    if (job) engine_entrust(e->engine, &((Job *)job)->held->job);
    return job;
}

/* enqueue(plan, inputs, outputs, timeout_ns, blob) */
static PyObject *engine_enqueue(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || has_arguments(count, 5, "(plan, inputs, outputs, timeout_ns, blob)")) return NULL;
    reap(e);
    struct held *h = hold(e, args, args[3]);
    return h ? start(e, h, 0) : NULL;
}

Job *usable_job(PyObject *self) {
    Job *job = (Job *)self;
    return usable_engine((PyObject *)job->engine) ? job : NULL;
}

static PyObject *job_wait(PyObject *self, PyObject *timeout) {
    Job *job = (Job *)self;
    long long nanoseconds = PyLong_AsLongLong(timeout);
    int found = atomic_load(&job->held->job.state), raised = 0;
    if (PyErr_Occurred() || (found == PENDING && !usable_job(self))) return NULL;
    if (found == PENDING) {
        u64 until = nanoseconds < 0 ? 0 : engine_now(job->engine->engine) + (u64)nanoseconds;
        Py_IncRef(self);
        found = wait_for(job->engine, &job->held->job, until, &raised);
        Py_DecRef(self);
    }
    if (is_over(job->held)) reap(job->engine);
    return raised ? NULL : PyLong_FromLong(found);
}

static PyObject *job_state(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(atomic_load(&((Job *)self)->held->job.state));
}

static PyObject *job_instance(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(((Job *)self)->held->job.instance);
}

static PyObject *job_waiting(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(((Job *)self)->held->job.waiting);
}

static PyObject *job_phases_done(PyObject *self, PyObject *unused) {
    const struct job *job = &((Job *)self)->held->job;
    (void)unused;
    if (atomic_load(&job->state) == COMPLETE && job->stage == DONE) return PyLong_FromLong(-1);
    return PyLong_FromLong(job->kind == COLLECTIVE && job->stage == STEPS ? phases_below(job->plan, load(&job->steps_done)) : 0);
}

/* blobs(): what all seats have said in the first tick, copied */
static PyObject *job_blobs(PyObject *self, PyObject *unused) {
    Job *job = usable_job(self);
    (void)unused;
    if (!job) return NULL;
    if (job->held->job.kind != COLLECTIVE) return letter_blob(job);
    const struct segment *s = job->engine->segment;
    int seats = (int)s->geometry.seats;
    PyObject *found = PyTuple_New(seats);
    for (int i = 0; found && i < seats; i++) {
        u64 length = load(&seat_of(s, i)->record[job->held->job.instance & 1].flags) >> RECORD_BLOB_SHIFT;
        PyObject *blob = PyBytes_FromStringAndSize(input_of(s, i, job->held->job.first_tick), (Py_ssize_t)(length <= MAX_BLOB ? length : 0));
        if (blob) PyTuple_SetItem(found, i, blob);
        else Py_DecRef(found), found = NULL;
    }
    return found;
}

void go_on(Job *job, struct held *described) {
    struct held *h = job->held; /* it stays where the engine knows it, and borrows what the other holds */
    PyObject *blob = h->blob;
    h->blob = NULL;
    let_go(h);
    h->blob = blob, h->plan = described->plan;
    h->job.values = described->job.values;
    h->views = described->views, h->taken = described->taken, h->room = described->room;
    h->starts = described->starts, h->lengths = described->lengths;
    h->more = described;
    engine_resume(job->engine->engine, &h->job);
}

/* describe(plan, inputs, outputs) */
static PyObject *job_describe(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Job *job = usable_job(self);
    if (!job || has_arguments(count, 3, "(plan, inputs, outputs)")) return NULL;
    if (atomic_load(&job->held->job.state) != DESCRIBE) {
        PyErr_SetString(PyExc_RuntimeError, "the job does not wait for a description");
        return NULL;
    }
    if (job->held->job.kind != COLLECTIVE) return letter_describe(job, args[2]);
    Plan *plan = plan_of(job->engine, args[0]);
    struct held *described = plan ? make_held(plan->plan->leaves_in + plan->plan->leaves_out) : NULL;
    if (!described || take_leaves(described, plan->plan, args[1], args[2])) return free_held(described), NULL;
    Py_IncRef(args[0]);
    described->plan = args[0], job->held->job.plan = plan->plan;
    go_on(job, described);
    return none();
}

static void job_dealloc(PyObject *self) {
    Job *job = (Job *)self;
    free_held(job->held);
    Py_DecRef((PyObject *)job->engine);
    free_object(self);
}

/* ---- The engine ---- */

static PyObject *engine_collect(PyObject *self, PyObject *timeout) {
    Engine *e = usable_engine(self);
    long long nanoseconds = e ? PyLong_AsLongLong(timeout) : 0;
    if (!e || PyErr_Occurred()) return NULL;
    if (nanoseconds) {
        PyThreadState *state = PyEval_SaveThread();
        struct waiting how = {.until = nanoseconds < 0 ? 0 : engine_now(e->engine) + (u64)nanoseconds, .interrupted = interrupted, .argument = &state};
        engine_await_finished(e->engine, &how);
        PyEval_RestoreThread(state);
        if (how.raised) return NULL;
    }
    PyObject *found = PyList_New(0);
    for (struct job *job = found ? engine_collect_finished(e->engine) : NULL; job;) {
        struct job *next = job->next_finished;
        if (PyList_Append(found, job->owner)) PyErr_Clear(); /* it can still be waited for */
        if (is_over(((Job *)job->owner)->held)) job->notify = 0; /* another thread may have described it meanwhile */
        job = next;
    }
    reap(e);
    return found;
}

static PyObject *engine_advance_seat(PyObject *self, PyObject *budget) {
    Engine *e = usable_engine(self);
    u64 bytes = e ? PyLong_AsUnsignedLongLong(budget) : 0;
    if (PyErr_Occurred()) return NULL;
    PyThreadState *state = PyEval_SaveThread();
    int moved = engine_advance(e->engine, bytes);
    PyEval_RestoreThread(state);
    reap(e);
    return PyBool_FromLong(moved);
}

static PyObject *engine_verdict(PyObject *self, PyObject *unused) {
    Engine *e = usable_engine(self);
    (void)unused;
    return e ? describe_verdict(e->segment) : NULL;
}

static PyObject *engine_waiting(PyObject *self, PyObject *unused) {
    Engine *e = usable_engine(self);
    (void)unused;
    return e ? PyLong_FromLong(atomic_load(&e->engine->waiting)) : NULL;
}

static PyObject *engine_next_instance(PyObject *self, PyObject *unused) {
    Engine *e = usable_engine(self);
    (void)unused;
    return e ? PyLong_FromUnsignedLongLong(e->engine->next_instance) : NULL;
}

static PyObject *engine_abort(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || has_arguments(count, 2, "(reason, culprit)")) return NULL;
    long reason = PyLong_AsLong(args[0]), culprit = PyLong_AsLong(args[1]);
    if (!PyErr_Occurred() && (reason < 1 || reason > 15 || culprit < 0 || culprit > WORKER_SEAT))
        PyErr_SetString(PyExc_ValueError, "no such reason or culprit");
    if (PyErr_Occurred()) return NULL;
    PyThreadState *state = PyEval_SaveThread();
    u64 decided = end_now(e->segment, (int)reason, (int)culprit);
    PyEval_RestoreThread(state);
    return PyLong_FromUnsignedLongLong(instance_of(decided));
}

static PyObject *engine_leave_group(PyObject *self, PyObject *unused) {
    Engine *e = usable_engine(self);
    (void)unused;
    if (!e) return NULL;
    PyThreadState *state = PyEval_SaveThread();
    engine_leave(e->engine);
    PyEval_RestoreThread(state);
    return none();
}

static PyObject *engine_rouse_callers(PyObject *self, PyObject *unused) {
    Engine *e = (Engine *)self;
    (void)unused;
    if (e->segment && segment_is_ours(e->epoch)) engine_rouse(e->engine);
    return none();
}

static PyObject *engine_detach(PyObject *self, PyObject *unused) {
    Engine *e = (Engine *)self;
    (void)unused;
    if (!e->segment) return none();
    if (segment_is_ours(e->epoch)) {
        PyThreadState *state = PyEval_SaveThread();
        engine_close(e->engine);
        engine_operate(e->engine, 0);
        PyEval_RestoreThread(state);
        engine_collect_finished(e->engine);
        for (Job *job = e->in_flight; job; job = job->next) job->held->job.notify = 0;
        reap(e);
    }
    struct segment *segment = e->segment;
    e->segment = NULL;
    release_common(e);
    segment_unmap(segment);
    return none();
}

static void engine_dealloc(PyObject *self) {
    Engine *e = (Engine *)self;
    Py_DecRef(engine_detach(self, NULL));
    free(e->spare);
    free(e->engine);
    free_object(self);
}

/* attach(descriptor, geometry, seat, spin_ns, yields, hops, knock, doorbell, clock_offset_ns, is_operated) */
static PyObject *attach(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    char *geometry;
    Py_ssize_t length;
    (void)module;
    if (has_arguments(count, 10, "(descriptor, geometry, seat, spin_ns, yields, hops, knock, doorbell, clock_offset_ns, is_operated)") ||
        PyBytes_AsStringAndSize(args[1], &geometry, &length))
        return NULL;
    long long n[10];
    for (int i = 0; i < 10; i++) n[i] = i == 1 ? 0 : PyLong_AsLongLong(args[i]);
    if (PyErr_Occurred()) return NULL;
    if (n[2] < 0 || n[2] >= MAX_SEATS) return PyErr_Format(PyExc_ValueError, "no such seat: %lld", n[2]);
    struct segment *segment = segment_map((int)n[0], geometry, (size_t)length, (int)n[2]);
    if (!segment) return raise_segment_error();
    /* The mapping keeps a descriptor of its own: the caller's may be closed, and its number be given to something else. */
    if (n[6] >= 0 && segment->knock < 0 && (segment->knock = fcntl((int)n[6], F_DUPFD_CLOEXEC, 0)) < 0) {
        raise_segment_error();
        return segment_unmap(segment), NULL;
    }
    struct engine *engine = engine_open(segment, (int)n[2]);
    Engine *e = engine ? (Engine *)PyType_GenericAlloc(engine_type, 0) : (Engine *)PyErr_NoMemory();
    if (!e) return free(engine), segment_unmap(segment), NULL;
    engine->spin = engine->budget = (u64)n[3], engine->yields = (int)n[4], engine->hops = n[5] != 0;
    engine->knock = n[6] < 0 ? -1 : segment->knock, engine->doorbell = (int)n[7], engine->clock_offset = n[8];
    engine_operate(engine, n[9] != 0);
    e->segment = segment, e->engine = engine, e->epoch = segment->epoch;
    return (PyObject *)e;
}

static PyMethodDef engine_methods[] = {
    FAST_METHOD("plan", engine_plan, "Prepare a collective."),
    FAST_METHOD("repeat", engine_repeat, "The same of arrays as they are; False, and nothing is done, where it cannot take them."),
    FAST_METHOD("run", engine_run, "Carry out a collective; None, or a job to be waited for."),
    FAST_METHOD("submit", engine_submit_job, "Start a collective; its job."),
    FAST_METHOD("enqueue", engine_enqueue, "The same, but only `advance` carries it on."),
    FAST_METHOD("use_common", engine_use_common, "Memory that all ranks map, in which values and results may lie."),
    FAST_METHOD("add_own", engine_add_own, "Another mapping of a part of it."),
    FAST_METHOD("send", engine_send, "Send to a seat; None, or a job to be waited for."),
    FAST_METHOD("receive", engine_receive, "Receive from a seat, or from any; None, or a job to be waited for."),
    {"collect", engine_collect, METH_O, "Notified jobs that are done, or need to be described."},
    {"advance", engine_advance_seat, METH_O, "Do what can be done without waiting; whether anything was."},
    {"verdict", engine_verdict, METH_NOARGS, "(instance, reason, culprit, missing)"},
    {"waiting", engine_waiting, METH_NOARGS, "How many processes waited to join when this rank's last instance was decided."},
    FAST_METHOD("gather", engine_gather_sums, "Take the partial sums of an instance that goes to other hosts."),
    FAST_METHOD("bring", engine_bring_results, "Bring the results of one, which completes it."),
    {"attend", engine_attend_instance, METH_O, "Whether all others have come to an instance; else have this seat rung."},
    {"skip", engine_skip_instance, METH_NOARGS, "Leave out a number: its collective is not carried out here."},
    {"next_instance", engine_next_instance, METH_NOARGS, "The number of the next collective."},
    FAST_METHOD("abort", engine_abort, "End the open instance; its number."),
    {"rouse", engine_rouse_callers, METH_NOARGS, "Have whoever waits look up, and often from here on."},
    {"leave", engine_leave_group, METH_NOARGS, "Take part in nothing later."},
    {"detach", engine_detach, METH_NOARGS, "End the thread and unmap the segment."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef job_methods[] = {
    {"wait", job_wait, METH_O, "Wait so many nanoseconds (-1: for ever); the state."},
    {"state", job_state, METH_NOARGS, "The state, without waiting."},
    {"instance", job_instance, METH_NOARGS, "Its number."},
    {"waiting", job_waiting, METH_NOARGS, "Of a collective that is complete: how many processes waited to join then."},
    {"slot", job_slot, METH_NOARGS, "Where the result lies in common memory; -1: in the outputs."},
    {"phases_done", job_phases_done, METH_NOARGS, "Phases that are delivered, -1: all."},
    {"blobs", job_blobs, METH_NOARGS, "What each seat has said in the first tick."},
    {"source", job_source, METH_NOARGS, "Of a receive: who has sent what it takes; -1: it is not matched."},
    {"cancel", job_cancel, METH_NOARGS, "Withdraw a receive that is not matched; wait for what comes of it."},
    {"abandon", job_abandon, METH_NOARGS, "End a send or receive wherever it would wait, for the generation is over."},
    FAST_METHOD("describe", job_describe, "Say what to do with what others have told."),
    {NULL, NULL, 0, NULL},
};
static PyType_Slot engine_slots[] = {
    {Py_tp_dealloc, (void *)engine_dealloc}, {Py_tp_methods, engine_methods}, {Py_tp_doc, "The engine of one seat."}, {0, NULL}};
static PyType_Slot job_slots[] = {
    {Py_tp_dealloc, (void *)job_dealloc}, {Py_tp_methods, job_methods}, {Py_tp_doc, "One running collective, send or receive."}, {0, NULL}};
enum { FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION };
PyType_Spec engine_spec = {"collectived_native._core.Engine", sizeof(Engine), 0, FLAGS, engine_slots};
PyType_Spec job_spec = {"collectived_native._core.Job", sizeof(Job), 0, FLAGS, job_slots};

PyMethodDef engine_functions[] = {FAST_METHOD("attach", attach, "Take a seat in a segment."), {NULL, NULL, 0, NULL}};
