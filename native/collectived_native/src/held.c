/* held.c: what a job keeps alive: the caller's arrays, its plan and its blob. */
#include <stdlib.h>

#include "objects.h"

void let_go(struct held *h) {
    while (h->taken) PyBuffer_Release(&h->views[--h->taken]);
    if (h->plan) Py_DecRef(h->plan);
    if (h->blob) Py_DecRef(h->blob);
    h->plan = h->blob = NULL;
}

void free_held(struct held *h) {
    if (!h) return;
    let_go(h);
    free(h->more);
    free(h);
}

struct held *make_held(int room) {
    struct held *h = calloc(1, sizeof *h + (size_t)room * (sizeof *h->views + sizeof *h->starts + sizeof *h->lengths));
    if (!h) return (struct held *)PyErr_NoMemory();
    h->views = (Py_buffer *)(h + 1);
    h->starts = (char **)(h->views + room);
    h->lengths = (u64 *)(h->starts + room);
    h->room = room;
    return h;
}

int take_leaf(struct held *h, PyObject *leaf, u64 bytes, int writable, int index) {
    Py_buffer *view = &h->views[h->taken];
    if (PyObject_GetBuffer(leaf, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return -1;
    h->starts[h->taken] = view->buf, h->lengths[h->taken++] = (u64)view->len;
    if ((u64)view->len == bytes || bytes == ~(u64)0) return 0;
    PyErr_Format(PyExc_ValueError, "%s %d has %zd bytes, expected %llu", writable ? "output" : "input", index, view->len,
                 (unsigned long long)bytes);
    return -1;
}

int take_blob(struct held *h, PyObject *blob, Py_ssize_t most) {
    char *bytes = NULL;
    Py_ssize_t length = 0;
    if (blob == Py_None) return 0;
    if (PyBytes_AsStringAndSize(blob, &bytes, &length)) return -1;
    if (length > most) {
        PyErr_Format(PyExc_ValueError, "a blob of %zd bytes: at most %zd", length, most);
        return -1;
    }
    Py_IncRef(blob);
    h->blob = blob, h->job.blob = bytes, h->job.blob_bytes = (u64)length;
    return 0;
}

void use_leaves(struct held *h, int leaves_in) {
    h->job.values.in = (const char **)h->starts;
    h->job.values.out = h->starts + leaves_in;
}

int overlap_in_part(const struct held *h, int leaves_in) {
    if (h->taken != 2 || leaves_in != 1) return 0;
    const char *in = h->starts[0], *out = h->starts[1];
    u64 in_bytes = h->lengths[0], out_bytes = h->lengths[1];
    return in_bytes && out_bytes && in < out + out_bytes && out < in + in_bytes && !(in == out && in_bytes == out_bytes);
}

int take_leaves(struct held *h, const struct plan *plan, PyObject *inputs, PyObject *outputs) {
    if (PyTuple_Size(inputs) != plan->leaves_in || PyTuple_Size(outputs) != plan->leaves_out) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "the plan has %d leaves in and %d out", plan->leaves_in, plan->leaves_out);
        return -1;
    }
    for (int out = 0, index = 0; out < 2; out++, index = 0)
        for (int i = 0; i < plan->phases; i++) {
            const struct phase *p = &plan->phase[i];
            for (int leaf = 0; leaf < (out ? p->leaves_out : p->leaves_in); leaf++, index++)
                if (take_leaf(h, PyTuple_GetItem(out ? outputs : inputs, index), bytes_of_leaf(p, out, leaf), out, index)) return -1;
        }
    use_leaves(h, plan->leaves_in);
    if (overlap_in_part(h, plan->leaves_in)) {
        PyErr_SetString(PyExc_ValueError, "the output begins or ends amid the input: expected the same bytes, or others");
        return -1;
    }
    return 0;
}
