/* carrier_binding.c: a carrier as an object of Python. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "carrier.h"
#include "objects.h"

typedef struct {
    PyObject head;
    struct carrier *carrier;
    int is_closing; /* guarded by the GIL */
} Carrier;

struct offering { /* an offer, with what keeps its memory alive */
    struct offer offer;
    Py_buffer view[3];
    int held;
};

PyTypeObject *carrier_type;

static int is_usable(const Carrier *self) { /* not in a forked child: it has no such thread */
    return !self->is_closing && self->carrier->owner == getpid();
}

static void release(struct offer *offer) {
    struct offering *o = (struct offering *)offer;
    while (o && o->held) PyBuffer_Release(&o->view[--o->held]);
    free(o);
}

/* carrier(orders) */
static PyObject *make_carrier(PyObject *module, PyObject *number) {
    long orders = PyLong_AsLong(number);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    Carrier *made = (Carrier *)PyType_GenericAlloc(carrier_type, 0);
    if (made && (made->carrier = carrier_open((int)orders))) return (PyObject *)made;
    if (made) PyErr_SetFromErrno(PyExc_OSError), Py_DecRef((PyObject *)made);
    close((int)orders);
    return NULL;
}

static int take(struct offering *o, struct span *span, PyObject *buffer, int flags) {
    Py_buffer *view = &o->view[o->held];
    if (buffer == Py_None) return 0;
    if (PyObject_GetBuffer(buffer, view, flags)) return -1;
    o->held++;
    span->start = view->buf, span->bytes = (u64)view->len;
    return 0;
}

static int overlap(const struct span *a, const struct span *b) {
    return a->start && b->start && a->start < b->start + b->bytes && b->start < a->start + a->bytes;
}

/* offer(instance, value, result, staging) */
static PyObject *offer(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Carrier *c = (Carrier *)self;
    if (has_arguments(count, 4, "(instance, value, result, staging)")) return NULL;
    u64 instance = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    struct offering *o = calloc(1, sizeof *o);
    if (!o) return PyErr_NoMemory();
    struct span *value = &o->offer.memory[PARTIALS], *result = &o->offer.memory[RESULT], *staging = &o->offer.staging;
    o->offer.instance = instance;
    if (take(o, value, args[1], PyBUF_SIMPLE) || take(o, result, args[2], PyBUF_WRITABLE) || take(o, staging, args[3], PyBUF_WRITABLE))
        return release(&o->offer), NULL;
    if (overlap(value, result) && value->start != result->start)
        PyErr_SetString(PyExc_ValueError, "the result begins amid the value, or the value amid the result: expected the same start, or other bytes");
    else if (args[3] != Py_None && (overlap(value, staging) || value->bytes != staging->bytes))
        PyErr_Format(PyExc_ValueError, "a staging of %llu bytes for a value of %llu: expected as many, and others",
                     (unsigned long long)staging->bytes, (unsigned long long)value->bytes);
    else if (!is_usable(c)) /* taking buffers may have run code of others: so this is looked at last */
        PyErr_SetString(PyExc_ValueError, "the carrier is closed, or of the process that forked this one");
    else if (carrier_offer(c->carrier, &o->offer))
        PyErr_Format(PyExc_ValueError, "instance %llu is offered already: withdraw it first", (unsigned long long)instance);
    if (!PyErr_Occurred()) return none();
    return release(&o->offer), NULL;
}

/* withdraw(instance) */
static PyObject *withdraw(PyObject *self, PyObject *number) {
    Carrier *c = (Carrier *)self;
    u64 instance = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    if (c->carrier->owner != getpid()) return PyBool_FromLong(1);
    PyThreadState *state = PyEval_SaveThread();
    struct offer *withdrawn = carrier_withdraw(c->carrier, instance);
    PyEval_RestoreThread(state);
    int may_be_written = !withdrawn || withdrawn->is_written;
    release(withdrawn);
    return PyBool_FromLong(may_be_written);
}

static PyObject *close_carrier(PyObject *self, PyObject *unused) {
    Carrier *c = (Carrier *)self;
    (void)unused;
    if (is_usable(c)) {
        c->is_closing = 1;
        PyThreadState *state = PyEval_SaveThread();
        carrier_stop(c->carrier);
        PyEval_RestoreThread(state);
        carrier_close_descriptors(c->carrier);
        while (c->carrier->offers) release(carrier_withdraw(c->carrier, c->carrier->offers->instance));
    } else if (c->carrier->owner != getpid()) {
        carrier_close_descriptors(c->carrier);
    }
    return none();
}

/* (bytes sent, bytes received) */
static PyObject *progress(PyObject *self, PyObject *unused) {
    const struct carrier *c = ((Carrier *)self)->carrier;
    (void)unused;
    u64 numbers[] = {atomic_load_explicit(&c->sent, memory_order_relaxed), atomic_load_explicit(&c->received, memory_order_relaxed)};
    return tuple_of(numbers, 2);
}

static void carrier_dealloc(PyObject *self) {
    struct carrier *c = ((Carrier *)self)->carrier;
    if (c) Py_DecRef(close_carrier(self, NULL));
    if (c && c->owner == getpid()) carrier_free(c);
    free_object(self);
}

static PyMethodDef carrier_methods[] = {
    FAST_METHOD("offer", offer, "Let orders of an instance use this memory."),
    {"withdraw", withdraw, METH_O, "Take the memory of an instance back, once the thread touches it no more; whether the result may have been written."},
    {"close", close_carrier, METH_NOARGS, "End the thread, close all sockets, let go of all memory."},
    {"progress", progress, METH_NOARGS, "Return the bytes sent and received so far."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot carrier_slots[] = {
    {Py_tp_dealloc, (void *)carrier_dealloc}, {Py_tp_methods, carrier_methods}, {Py_tp_doc, "A thread that moves values between arrays and other hosts."}, {0, NULL}};
PyType_Spec carrier_spec = {"collectived_native._core.Carrier", sizeof(Carrier), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, carrier_slots};
PyMethodDef carrier_functions[] = {
    {"carrier", make_carrier, METH_O, "Begin a thread that carries out the orders of a socket."},
    {NULL, NULL, 0, NULL},
};
