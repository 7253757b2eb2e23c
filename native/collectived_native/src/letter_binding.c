/* letter_binding.c: sends and receives as Python calls. */
#include <string.h>

#include "letters.h"
#include "objects.h"

enum { BLOCKING, QUIET, NOTIFYING }; /* how a caller learns of the end */

struct request {
    long peer, tag, mode;
    u64 deadline;
};

/* 0, or -1 with an error set. */
static int read_request(const Engine *e, struct request *r, PyObject *peer, PyObject *tag, PyObject *timeout, PyObject *mode, int least) {
    r->peer = PyLong_AsLong(peer), r->tag = PyLong_AsLong(tag), r->mode = PyLong_AsLong(mode);
    u64 nanoseconds = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(timeout);
    if (PyErr_Occurred()) return -1;
    if (r->peer < least || r->peer >= (long)e->segment->geometry.seats || r->tag < 0 || r->tag > 0xffffffff || r->mode < BLOCKING ||
        r->mode > NOTIFYING) {
        PyErr_Format(PyExc_ValueError, "no such seat, tag or mode: %ld, %ld, %ld", r->peer, r->tag, r->mode);
        return -1;
    }
    r->deadline = nanoseconds ? engine_now(e->engine) + nanoseconds : 0;
    return 0;
}

u64 use_letter_leaves(struct held *h) {
    u64 bytes = 0;
    for (int i = 0; i < h->taken; i++) bytes += h->lengths[i];
    h->job.values.in = (const char **)h->starts, h->job.values.out = h->starts;
    h->job.letter.lengths = h->lengths, h->job.letter.leaves = h->taken;
    return bytes;
}

/* Takes hold of all leaves of a tuple; 0, or -1 with an error set. */
static int take_all(struct held *h, PyObject *leaves, int writable) {
    Py_ssize_t count = PyTuple_Size(leaves);
    for (int i = 0; i < count; i++)
        if (take_leaf(h, PyTuple_GetItem(leaves, i), ~(u64)0, writable, i)) return -1;
    return count < 0 ? -1 : 0;
}

void address_letter(struct held *h, enum kind kind, int peer, u32 tag, int expects) {
    h->job.kind = kind;
    h->job.letter.peer = peer, h->job.letter.tag = tag, h->job.letter.slot = -1;
    h->job.letter.bytes = use_letter_leaves(h), h->job.letter.expects = expects;
}

static struct held *hold_letter(Engine *e, enum kind kind, PyObject *leaves, const struct request *r, PyObject *blob) {
    Py_ssize_t count = leaves == Py_None ? 0 : PyTuple_Size(leaves);
    struct held *h = count < 0 ? NULL : take_room(e, (int)count);
    if (!h) return NULL;
    if (take_blob(h, blob, LETTER_BLOB) || (count && take_all(h, leaves, kind == RECEIVE))) return free_held(h), NULL;
    address_letter(h, kind, (int)r->peer, (u32)r->tag, leaves != Py_None);
    h->job.deadline = r->deadline;
    return h;
}

static PyObject *submit(Engine *e, struct held *h, long mode, u64 bytes) {
    if (mode == BLOCKING) return carry_out(e, h, bytes);
    PyObject *job = start(e, h, mode == NOTIFYING);
    if (job) engine_entrust(e->engine, &h->job);
    return job;
}

/* send(to, tag, inputs, timeout_ns, blob, mode) */
PyObject *engine_send(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    struct request r;
    if (!e || has_arguments(count, 6, "(to, tag, inputs, timeout_ns, blob, mode)") || read_request(e, &r, args[0], args[1], args[3], args[5], 0))
        return NULL;
    struct held *h = hold_letter(e, SEND, args[2], &r, args[4]);
    return h ? submit(e, h, r.mode, h->job.letter.bytes) : NULL;
}

/* receive(source, tag, outputs, timeout_ns, blob, mode): outputs None: not known before */
PyObject *engine_receive(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    struct request r;
    if (!e || has_arguments(count, 6, "(source, tag, outputs, timeout_ns, blob, mode)") || read_request(e, &r, args[0], args[1], args[3], args[5], -1))
        return NULL;
    struct held *h = hold_letter(e, RECEIVE, args[2], &r, args[4]);
    if (!h) return NULL;
    atomic_fetch_add(&seat_of(e->segment, e->engine->seat)->posted, 1);
    return submit(e, h, r.mode, h->job.letter.bytes);
}

PyObject *job_source(PyObject *self, PyObject *unused) {
    Job *job = (Job *)self;
    const struct job *j = &job->held->job;
    struct engine *e = job->engine->engine;
    (void)unused;
    pthread_mutex_lock(&e->lock); /* under which it is said to be matched, after all else */
    int peer = j->stage != QUEUED && j->letter.slot >= 0 ? j->letter.peer : -1;
    pthread_mutex_unlock(&e->lock);
    return PyLong_FromLong(peer);
}

static PyObject *withdraw(PyObject *self, int how) {
    Job *job = usable_job(self);
    if (!job) return NULL;
    struct engine *e = job->engine->engine;
    if (job->held->job.kind != COLLECTIVE) {
        atomic_store(&job->held->job.letter.cancels, how);
        atomic_fetch_add(&e->withdrawals, 1);
        atomic_fetch_add(&place_of(e->segment, e->seat)->mail, 1); /* the driving thread looks at it */
        if (!engine_advance(e, 1)) ring(e->segment, e->seat);
    }
    return none();
}

PyObject *job_cancel(PyObject *self, PyObject *unused) {
    (void)unused;
    return ((Job *)self)->held->job.kind == RECEIVE ? withdraw(self, CANCEL) : none();
}

PyObject *job_abandon(PyObject *self, PyObject *unused) {
    (void)unused;
    return withdraw(self, ABANDON);
}

/* The sender's description of a letter that is matched, copied. */
PyObject *letter_blob(Job *job) {
    const struct job *j = &job->held->job;
    const struct segment *s = job->engine->segment;
    if (j->kind != RECEIVE || j->letter.slot < 0 || atomic_load(&j->state) != DESCRIBE) {
        PyErr_SetString(PyExc_RuntimeError, "the job does not wait for a description");
        return NULL;
    }
    u64 length = load(&letters_of(s, j->letter.peer)[j->letter.slot].blob_bytes);
    PyObject *blob = PyBytes_FromStringAndSize(slot_of(s, j->letter.peer, j->letter.slot), (Py_ssize_t)(length <= LETTER_BLOB ? length : 0));
    return pack(&blob, 1);
}

PyObject *letter_describe(Job *job, PyObject *outputs) {
    Py_ssize_t count = PyTuple_Size(outputs);
    struct held *described = count < 0 ? NULL : make_held((int)count);
    if (!described) return NULL;
    u64 bytes = take_all(described, outputs, 1) ? 0 : use_letter_leaves(described);
    if (!PyErr_Occurred() && bytes != job->held->job.letter.bytes)
        PyErr_Format(PyExc_ValueError, "the outputs have %llu bytes, the letter %llu", (unsigned long long)bytes,
                     (unsigned long long)job->held->job.letter.bytes);
    if (PyErr_Occurred()) return free_held(described), NULL;
    job->held->job.letter.lengths = described->lengths, job->held->job.letter.leaves = described->taken;
    go_on(job, described);
    return none();
}
