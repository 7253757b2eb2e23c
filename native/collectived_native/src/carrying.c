/* carrying.c: how a Python call carries out a job: with the GIL for a moment, then without it. */
#include <stdlib.h>
#include <string.h>

#include "objects.h"

enum {
    TRY_NANOSECONDS = 3000,   /* a blocking call waits so long with the GIL: giving it up costs more */
    KEEP_GIL_BELOW = 64 << 10, /* bytes that are moved with the GIL */
    DRAIN = 1000 * MILLISECOND,
};

/* ---- Holding ---- */

struct held *take_room(Engine *e, int room) {
    struct held *h = e->spare && e->spare->room >= room ? e->spare : make_held(room < 4 ? 4 : room);
    if (!h) return NULL;
    if (h == e->spare) e->spare = NULL;
    memset(&h->job, 0, sizeof h->job);
    return h;
}

void give_back(Engine *e, struct held *h) {
    let_go(h);
    free(e->spare);
    e->spare = h;
}

void take_plan(Engine *e, struct held *h, PyObject *plan, u64 nanoseconds, u64 asked) {
    Py_IncRef(plan);
    h->plan = plan, h->job.plan = ((Plan *)plan)->plan;
    if (nanoseconds) h->job.deadline = engine_now(e->engine) + nanoseconds, h->job.asked = asked;
}

struct held *hold(Engine *e, PyObject *const *args, PyObject *asked) {
    Plan *plan = plan_of(e, args[0]);
    u64 nanoseconds = plan ? PyLong_AsUnsignedLongLong(args[3]) : 0, given = plan ? PyLong_AsUnsignedLongLong(asked) : 0;
    if (!plan || PyErr_Occurred()) return NULL;
    struct held *h = take_room(e, plan->plan->leaves_in + plan->plan->leaves_out);
    if (!h) return NULL;
    take_plan(e, h, args[0], nanoseconds, given);
    Py_ssize_t most = plan->plan->meets || plan->plan->operation == ACROSS ? MAX_BLOB : 0;
    if (!take_blob(h, args[4], most) && !take_leaves(h, plan->plan, args[1], args[2])) return h;
    free_held(h);
    return NULL;
}

/* ---- Jobs that go on ---- */

int is_over(const struct held *h) {
    int state = atomic_load(&h->job.state);
    return state != PENDING && state != DESCRIBE;
}

void reap(Engine *e) {
    Job *over = NULL;
    for (Job **link = &e->in_flight; *link;) {
        Job *job = *link;
        if (!is_over(job->held) || job->held->job.notify) {
            link = &job->next;
            continue;
        }
        *link = job->next, job->in_flight = 0;
        job->next = over, over = job;
    }
    while (over) { /* finalizers of arrays run Python here, and other threads may change the list of those in flight */
        Job *job = over;
        over = job->next;
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
    if (!e->segment && is_over(h)) return (PyObject *)job; /* no thread reaps it any more */
    job->next = e->in_flight, e->in_flight = job, job->in_flight = 1;
    Py_IncRef((PyObject *)job); /* the engine's own */
    return (PyObject *)job;
}

PyObject *start(Engine *e, struct held *h, int notify) {
    PyObject *job = wrap(e, h);
    if (!job) return NULL;
    h->job.notify = notify;
    engine_submit(e->engine, &h->job);
    return job;
}

/* ---- Waiting ---- */

int interrupted(void *argument) {
    PyThreadState **state = argument;
    PyEval_RestoreThread(*state);
    int raised = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return raised;
}

int wait_for(Engine *e, struct job *job, u64 until, int *raised) {
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

int see_through(Engine *e, struct held *h, u64 bytes, int *raised) {
    int found = PENDING;
    *raised = 0;
    if (bytes < KEEP_GIL_BELOW) found = engine_try(e->engine, &h->job, TRY_NANOSECONDS);
    return found == PENDING ? wait_for(e, &h->job, 0, raised) : found;
}

PyObject *settle(Engine *e, struct held *h, int found, int raised) {
    if (found == COMPLETE && !raised) {
        give_back(e, h);
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

PyObject *carry_out(Engine *e, struct held *h, u64 bytes) {
    int raised;
    engine_submit(e->engine, &h->job);
    int found = see_through(e, h, bytes, &raised);
    return settle(e, h, found, raised);
}
