/* engine_binding.c: the rank's side: plans, jobs and the engine of a seat. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "letters.h"
#include "objects.h"

PyTypeObject *job_type, *engine_type;

Engine *usable_engine(PyObject *self) {
    Engine *e = (Engine *)self;
    return check_usable(e->segment, e->epoch) ? NULL : e;
}

/* ---- Carrying out ---- */

/* run(plan, inputs, outputs, timeout_ns, blob[, asked_ns]) */
static PyObject *engine_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || (count != 6 && has_arguments(count, 5, "(plan, inputs, outputs, timeout_ns, blob)"))) return NULL;
    if (e->in_flight) reap(e);
    struct held *h = hold(e, args, args[count == 6 ? 5 : 3]);
    return h ? carry_out(e, h, h->job.plan->bytes_moved) : NULL;
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
        PyObject *blob = PyBytes_FromStringAndSize(blob_of(s, i, job->held->job.first_tick), (Py_ssize_t)(length <= MAX_BLOB ? length : 0));
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

/* count_message(operation, bytes, nanoseconds) */
static PyObject *engine_count_message(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || has_arguments(count, 3, "(operation, bytes, nanoseconds)")) return NULL;
    long operation = PyLong_AsLong(args[0]);
    u64 bytes = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[1]), nanoseconds = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    if (!PyErr_Occurred() && operation != SENDS && operation != RECEIVES)
        PyErr_Format(PyExc_ValueError, "no send or receive: %ld", operation);
    if (PyErr_Occurred()) return NULL;
    count_message(e->engine, (int)operation, bytes, nanoseconds);
    return none();
}

static PyObject *engine_verdict(PyObject *self, PyObject *unused) {
    Engine *e = usable_engine(self);
    (void)unused;
    return e ? describe_verdict(e->segment) : NULL;
}

/* The engine, also where it is detached, for facts that it still knows; of its own process alone. */
static Engine *own_engine(PyObject *self) {
    Engine *e = (Engine *)self;
    return e->segment || !segment_is_ours(e->epoch) ? usable_engine(self) : e;
}

static PyObject *engine_waiting(PyObject *self, PyObject *unused) {
    Engine *e = own_engine(self);
    (void)unused;
    return e ? PyLong_FromLong(atomic_load(&e->engine->waiting)) : NULL;
}

static PyObject *engine_next_instance(PyObject *self, PyObject *unused) {
    Engine *e = own_engine(self);
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

static PyObject *engine_limit_instances(PyObject *self, PyObject *number) {
    Engine *e = usable_engine(self);
    u64 n = e ? PyLong_AsUnsignedLongLong(number) : 0;
    if (!e || PyErr_Occurred()) return NULL;
    PyThreadState *state = PyEval_SaveThread();
    engine_limit(e->engine, n);
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

/* attach(descriptor, geometry, seat, spin_ns, yields, hops, knock, doorbell, clock_offset_ns, is_operated, shows_memory) */
static PyObject *attach(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    char *geometry;
    Py_ssize_t length;
    (void)module;
    if (has_arguments(count, 11, "(descriptor, geometry, seat, spin_ns, yields, hops, knock, doorbell, clock_offset_ns, is_operated, shows_memory)") ||
        PyBytes_AsStringAndSize(args[1], &geometry, &length))
        return NULL;
    long long n[11];
    for (int i = 0; i < 11; i++) n[i] = i == 1 ? 0 : PyLong_AsLongLong(args[i]);
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
    if (n[10]) show_process(engine);
    e->segment = segment, e->engine = engine, e->epoch = segment->epoch;
    return (PyObject *)e;
}

static PyMethodDef engine_methods[] = {
    FAST_METHOD("plan", engine_plan, "Prepare a collective."),
    FAST_METHOD("run", engine_run, "Carry out a collective; None, or a job to be waited for."),
    FAST_METHOD("submit", engine_submit_job, "Start a collective; its job."),
    FAST_METHOD("enqueue", engine_enqueue, "The same, but only `advance` carries it on."),
    FAST_METHOD("send", engine_send, "Send to a seat; None, or a job to be waited for."),
    FAST_METHOD("receive", engine_receive, "Receive from a seat, or from any; None, or a job to be waited for."),
    {"collect", engine_collect, METH_O, "Notified jobs that are done, or need to be described."},
    {"advance", engine_advance_seat, METH_O, "Do what can be done without waiting; whether anything was."},
    {"verdict", engine_verdict, METH_NOARGS, "(instance, reason, culprit, missing)"},
    FAST_METHOD("count_message", engine_count_message, "Count a send or receive that was not carried out here."),
    {"waiting", engine_waiting, METH_NOARGS, "How many processes waited to join when this rank's last instance was decided."},
    FAST_METHOD("gather", engine_gather_sums, "Take the partial sums of an instance that goes to other hosts."),
    FAST_METHOD("bring", engine_bring_results, "Bring the results of one, which completes it."),
    FAST_METHOD("attend", engine_attend_instance, "Whether all others have come to an instance; else have this seat rung."),
    {"skip", engine_skip_instance, METH_NOARGS, "Leave out a number: its collective is not carried out here."},
    {"next_instance", engine_next_instance, METH_NOARGS, "The number of the next collective."},
    FAST_METHOD("abort", engine_abort, "End the open instance; its number."),
    {"rouse", engine_rouse_callers, METH_NOARGS, "Wake waiting threads, which look often from here on."},
    {"leave", engine_leave_group, METH_NOARGS, "Take part in nothing later."},
    {"limit", engine_limit_instances, METH_O, "Take part in no instance from this one on."},
    {"detach", engine_detach, METH_NOARGS, "End the thread and unmap the segment."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef job_methods[] = {
    {"wait", job_wait, METH_O, "Wait so many nanoseconds (-1: forever); the state."},
    {"state", job_state, METH_NOARGS, "The state, without waiting."},
    {"instance", job_instance, METH_NOARGS, "Its number."},
    {"waiting", job_waiting, METH_NOARGS, "Of a collective that is complete: how many processes waited to join then."},
    {"phases_done", job_phases_done, METH_NOARGS, "Phases that are delivered, -1: all."},
    {"blobs", job_blobs, METH_NOARGS, "The blobs of all seats from the first tick."},
    {"source", job_source, METH_NOARGS, "The sender of the letter of a receive; -1: it is not matched."},
    {"cancel", job_cancel, METH_NOARGS, "Withdraw a receive that is not matched; wait for what comes of it."},
    {"abandon", job_abandon, METH_NOARGS, "End a send or receive wherever it would wait, for the generation is over."},
    FAST_METHOD("describe", job_describe, "Describe the instance from the blobs of others."),
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
