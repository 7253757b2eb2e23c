/* common_binding.c: values and results in memory that all ranks of a group map. */
#include "objects.h"

enum { WHOLE_MEMORY, WRITABLE_MEMORY, FIRST_OWN };

void release_common(Engine *e) {
    for (int i = 0; i < e->parts; i++)
        if (e->memory[i].obj) PyBuffer_Release(&e->memory[i]);
    e->parts = 0;
}

/* use_common(memory, writable or None) */
PyObject *engine_use_common(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || has_arguments(count, 2, "(memory, writable or None)")) return NULL;
    if (e->parts) {
        PyErr_SetString(PyExc_RuntimeError, "the engine knows its common memory already");
        return NULL;
    }
    Py_buffer *whole = &e->memory[WHOLE_MEMORY], *writable = &e->memory[WRITABLE_MEMORY];
    writable->obj = NULL, writable->buf = NULL;
    if (PyObject_GetBuffer(args[0], whole, PyBUF_SIMPLE)) return NULL;
    if (args[1] != Py_None && PyObject_GetBuffer(args[1], writable, PyBUF_WRITABLE)) return PyBuffer_Release(whole), NULL;
    e->parts = FIRST_OWN;
    if (writable->buf && writable->len != whole->len) {
        release_common(e);
        PyErr_SetString(PyExc_ValueError, "both must be the same memory");
        return NULL;
    }
    e->offset[WHOLE_MEMORY] = e->offset[WRITABLE_MEMORY] = 0;
    e->engine->common = (struct common){whole->buf, writable->buf, (u64)whole->len};
    return none();
}

/* add_own(buffer, offset): the same memory as that of use_common from this offset on, at another address */
PyObject *engine_add_own(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || has_arguments(count, 2, "(buffer, offset)")) return NULL;
    u64 offset = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (!e->parts || e->parts == MOST_OWN) {
        PyErr_SetString(PyExc_RuntimeError, "there is no common memory yet, or it has too many parts");
        return NULL;
    }
    Py_buffer *part = &e->memory[e->parts];
    if (PyObject_GetBuffer(args[0], part, PyBUF_SIMPLE)) return NULL;
    if (offset > e->engine->common.bytes || (u64)part->len > e->engine->common.bytes - offset) {
        PyBuffer_Release(part);
        return PyErr_Format(PyExc_ValueError, "it does not lie within the common memory of %zd bytes", (Py_ssize_t)e->engine->common.bytes);
    }
    e->offset[e->parts++] = offset;
    return none();
}

static u64 find_source(const Engine *e, const struct held *h) {
    const struct plan *plan = h->job.plan;
    if (!e->parts) return ~(u64)0;
    u64 bytes = plan->leaves_in ? h->lengths[0] : 0;
    if (!plan->leaves_in || (plan->leaves_in == 1 && !bytes)) return 0; /* there is nothing to be read of this rank */
    if (!plan->shareable) return ~(u64)0;
    for (int i = 0; i < e->parts; i++) {
        const char *start = e->memory[i].buf;
        if (!start || h->starts[0] < start || h->starts[0] + bytes > start + e->memory[i].len) continue;
        return e->offset[i] + (u64)(h->starts[0] - start);
    }
    return ~(u64)0;
}

int find_common(const Engine *e, struct held *h) {
    const struct plan *plan = h->job.plan;
    const struct common *common = &e->engine->common;
    u64 at = plan->slots.at, room = plan->slots.bytes * plan->slots.count;
    h->job.source = find_source(e, h), h->job.held = plan->slots.held, h->job.slot = -1;
    if (!room || (common->writable && at <= common->bytes && room <= common->bytes - at)) return 0;
    PyErr_SetString(PyExc_ValueError, "the slots do not lie in common memory that this engine may write");
    return -1;
}

PyObject *job_slot(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(((Job *)self)->held->job.slot);
}

/* use_slots(at, bytes, count, held) */
PyObject *plan_use_slots(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    struct plan *plan = ((Plan *)self)->plan;
    u64 numbers[4];
    if (has_arguments(count, 4, "(at, bytes, count, held)")) return NULL;
    for (int i = 0; i < 4; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (PyErr_Occurred()) return NULL;
    }
    const struct phase *p = &plan->phase[0];
    if (!plan->shareable || !plan->phases || numbers[2] > 64 || numbers[1] >> 40 || (numbers[2] && numbers[1] < p->starts_out[p->leaves_out] * p->result_item)) {
        PyErr_SetString(PyExc_ValueError, "at most 64 slots, each large enough for the one leaf of the result");
        return NULL;
    }
    plan->slots.at = numbers[0], plan->slots.bytes = numbers[1], plan->slots.count = numbers[2], plan->slots.held = numbers[3];
    return none();
}
