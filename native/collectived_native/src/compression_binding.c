/* compression_binding.c: compression over buffers of Python objects. Sizes are checked here; compression.c trusts them. */
#include "compression_binding.h"

#include "compression.h"

enum { RELEASE_GIL_FROM = 64 << 10, VALUE_BYTES = BLOCK_VALUES * sizeof(float), MOST_BUFFERS = 3 };

struct request {
    int format, held;
    Py_buffer buffers[MOST_BUFFERS];
    size_t blocks;
};

static void release(struct request *r) {
    while (r->held) PyBuffer_Release(&r->buffers[--r->held]);
}

/* Takes hold of (format, out, ...), the first of them writable; `compressed` says which of them are. 0, or -1 with an
 * error set and nothing held. */
static int hold(struct request *r, PyObject *const *args, Py_ssize_t count, const int *compressed, int buffers) {
    if (count != buffers + 1) {
        PyErr_Format(PyExc_TypeError, "expected a format and %d buffers", buffers);
        return -1;
    }
    r->held = 0;
    r->format = (int)PyLong_AsLong(args[0]);
    if (PyErr_Occurred()) return -1;
    if (!block_bytes(r->format)) {
        PyErr_Format(PyExc_ValueError, "%d is no format of compressed blocks", r->format);
        return -1;
    }
    for (int i = 0; i < buffers; i++) {
        const Py_ssize_t size = compressed[i] ? (Py_ssize_t)block_bytes(r->format) : VALUE_BYTES;
        Py_buffer *buffer = &r->buffers[i];
        if (PyObject_GetBuffer(args[i + 1], buffer, i ? PyBUF_SIMPLE : PyBUF_WRITABLE)) return release(r), -1;
        r->held++;
        if (!i && buffer->len % size == 0) r->blocks = (size_t)(buffer->len / size);
        else if (!i || buffer->len != (Py_ssize_t)r->blocks * size) {
            PyErr_Format(PyExc_ValueError, "buffer %d has %zd bytes, expected whole blocks of %zd, as many as the others",
                         i, buffer->len, size);
            return release(r), -1;
        }
    }
    return 0;
}

static PyThreadState *begin(const struct request *r) {
    return r->blocks * VALUE_BYTES >= RELEASE_GIL_FROM ? PyEval_SaveThread() : NULL;
}

static PyObject *end(struct request *r, PyThreadState *state) {
    if (state) PyEval_RestoreThread(state);
    release(r);
    Py_IncRef(Py_None);
    return Py_None;
}

/* (format, out, values) */
static PyObject *py_compress(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    struct request r;
    (void)module;
    if (hold(&r, args, count, (const int[]){1, 0}, 2)) return NULL;
    PyThreadState *state = begin(&r);
    compress_blocks(r.format, r.buffers[0].buf, r.buffers[1].buf, r.blocks);
    return end(&r, state);
}

/* (format, out, compressed) */
static PyObject *py_expand(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    struct request r;
    (void)module;
    if (hold(&r, args, count, (const int[]){0, 1}, 2)) return NULL;
    PyThreadState *state = begin(&r);
    expand_blocks(r.format, r.buffers[0].buf, r.buffers[1].buf, r.blocks);
    return end(&r, state);
}

/* `format, out, mine, compressed` */
static PyObject *py_add_expanded(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    struct request r;
    (void)module;
    if (hold(&r, args, count, (const int[]){0, 0, 1}, 3)) return NULL;
    PyThreadState *state = begin(&r);
    add_expanded_blocks(r.format, r.buffers[0].buf, r.buffers[1].buf, r.buffers[2].buf, r.blocks);
    return end(&r, state);
}

static PyObject *py_block_bytes(PyObject *module, PyObject *format) {
    (void)module;
    const long number = PyLong_AsLong(format);
    return PyErr_Occurred() ? NULL : PyLong_FromLong((long)block_bytes((int)number));
}

PyMethodDef compression_functions[] = {
    FAST_METHOD("compress", py_compress, "Compress blocks of float32."),
    FAST_METHOD("expand", py_expand, "Expand compressed blocks to float32."),
    FAST_METHOD("add_expanded", py_add_expanded, "Add compressed blocks to float32."),
    {"block_bytes", py_block_bytes, METH_O, "How many bytes a compressed block has; 0: no such format."},
    {NULL, NULL, 0, NULL},
};
