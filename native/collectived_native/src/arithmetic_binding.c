/* arithmetic_binding.c: folds and copies over buffers of Python objects. Sizes are checked here; arithmetic.c trusts them. */
#include "arithmetic_binding.h"

#include <stdlib.h>

#include "arithmetic.h"
#include "copying.h"

enum { MOST_SPANS = 4096, RELEASE_GIL_FROM = 64 << 10 };

typedef void (*Fold)(int, int, void *, const void *const *, int, size_t, int, long, int);

struct spans {
    Py_buffer out, *buffers;
    const void **starts;
    int held; /* buffers that are to be released */
};

struct request {
    int dtype, op, is_final, stream;
    long divisor;
};

static void release(struct spans *s) {
    while (s->held) PyBuffer_Release(&s->buffers[--s->held]);
    PyBuffer_Release(&s->out);
    free(s->buffers);
    free(s->starts);
}

/* Takes hold of one source more; 0, or -1 with an error set. */
static int hold_one(struct spans *s, PyObject *sources, Py_ssize_t expected) {
    PyObject *source = PySequence_GetItem(sources, s->held);
    Py_buffer *buffer = &s->buffers[s->held];
    const int failed = !source || PyObject_GetBuffer(source, buffer, PyBUF_SIMPLE);
    if (source) Py_DecRef(source);
    if (failed) return -1;
    s->starts[s->held++] = buffer->buf;
    if (buffer->len == expected) return 0;
    PyErr_Format(PyExc_ValueError, "span %d has %zd bytes, expected %zd", s->held - 1, buffer->len, expected);
    return -1;
}

/* Takes hold of all; the number of elements, or -1 with an error set and nothing held. */
static Py_ssize_t hold(struct spans *s, PyObject *out, PyObject *sources, size_t in_size, size_t out_size) {
    const Py_ssize_t n = PySequence_Size(sources);
    if (n < 0 || PyObject_GetBuffer(out, &s->out, PyBUF_WRITABLE)) return -1;
    const Py_ssize_t elements = s->out.len / (Py_ssize_t)out_size;
    s->held = 0, s->buffers = NULL, s->starts = NULL;
    if (n < 1 || n > MOST_SPANS || s->out.len % (Py_ssize_t)out_size) {
        PyErr_Format(PyExc_ValueError, "expected 1 to %d spans and whole results of %zd bytes, got %zd and %zd bytes",
                     MOST_SPANS, (Py_ssize_t)out_size, n, s->out.len);
        release(s);
        return -1;
    }
    s->buffers = calloc((size_t)n, sizeof *s->buffers);
    s->starts = calloc((size_t)n, sizeof *s->starts);
    int failed = !s->buffers || !s->starts;
    if (failed) PyErr_NoMemory();
    while (!failed && s->held < n) failed = hold_one(s, sources, elements * (Py_ssize_t)in_size);
    if (!failed) return elements;
    release(s);
    return -1;
}

static PyObject *run(const struct request *r, PyObject *out, PyObject *sources, Fold fold, size_t in_size) {
    const size_t out_size = r->is_final ? result_size(r->dtype, r->op) : partial_size(r->dtype, r->op);
    struct spans s;
    const Py_ssize_t elements = hold(&s, out, sources, in_size, out_size);
    if (elements < 0) return NULL;
    PyThreadState *state = s.out.len >= RELEASE_GIL_FROM ? PyEval_SaveThread() : NULL;
    fold(r->dtype, r->op, s.out.buf, s.starts, s.held, (size_t)elements, r->is_final, r->divisor, r->stream);
    if (r->stream) finish_streaming();
    if (state) PyEval_RestoreThread(state);
    release(&s);
    Py_IncRef(Py_None);
    return Py_None;
}

/* (dtype, op, out, spans, is_final, divisor, stream) */
static int read_request(struct request *r, PyObject *const *args, Py_ssize_t count) {
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "expected (dtype, op, out, spans, is_final, divisor, stream)");
        return -1;
    }
    r->dtype = (int)PyLong_AsLong(args[0]);
    r->op = (int)PyLong_AsLong(args[1]);
    r->is_final = PyObject_IsTrue(args[4]);
    r->divisor = PyLong_AsLong(args[5]);
    r->stream = PyObject_IsTrue(args[6]);
    if (PyErr_Occurred()) return -1;
    if (!partial_size(r->dtype, r->op)) {
        PyErr_Format(PyExc_ValueError, "operation %d is not defined on type %d", r->op, r->dtype);
        return -1;
    }
    if (r->divisor < 1) {
        PyErr_Format(PyExc_ValueError, "the divisor must be at least 1, not %ld", r->divisor);
        return -1;
    }
    return 0;
}

static PyObject *py_fold_inputs(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    struct request r;
    (void)module;
    if (read_request(&r, args, count)) return NULL;
    return run(&r, args[2], args[3], fold_inputs, item_size(r.dtype));
}

static PyObject *py_fold_partials(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    struct request r;
    (void)module;
    if (read_request(&r, args, count)) return NULL;
    return run(&r, args[2], args[3], fold_partials, partial_size(r.dtype, r.op));
}

/* (out, source) */
static PyObject *copy(PyObject *const *args, Py_ssize_t count, int is_streamed) {
    Py_buffer out, source;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "expected (out, source)");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &source, PyBUF_SIMPLE)) return PyBuffer_Release(&out), NULL;
    const int fits = out.len == source.len;
    if (fits) {
        PyThreadState *state = out.len >= RELEASE_GIL_FROM ? PyEval_SaveThread() : NULL;
        if (is_streamed) copy_streamed(out.buf, source.buf, (size_t)out.len), finish_streaming();
        else copy_bytes(out.buf, source.buf, (size_t)out.len);
        if (state) PyEval_RestoreThread(state);
    } else
        PyErr_Format(PyExc_ValueError, "the source has %zd bytes, expected %zd", source.len, out.len);
    PyBuffer_Release(&source);
    PyBuffer_Release(&out);
    if (!fits) return NULL;
    Py_IncRef(Py_None);
    return Py_None;
}

static PyObject *py_copy(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    return copy(args, count, 0);
}

static PyObject *py_copy_streamed(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    return copy(args, count, 1);
}

/* (dtype, op): bytes of an element, a partial and a result */
static PyObject *py_arithmetic_sizes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "expected (dtype, op)");
        return NULL;
    }
    const int dtype = (int)PyLong_AsLong(args[0]), op = (int)PyLong_AsLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    const size_t sizes[] = {item_size(dtype), partial_size(dtype, op), result_size(dtype, op)};
    PyObject *found = PyTuple_New(3);
    for (int i = 0; found && i < 3; i++) {
        PyObject *size = PyLong_FromLong((long)sizes[i]);
        if (size) PyTuple_SetItem(found, i, size);
        else Py_DecRef(found), found = NULL;
    }
    return found;
}

static PyObject *py_arithmetic_variant(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyUnicode_FromString(arithmetic_variant());
}

static PyObject *py_choose_arithmetic(PyObject *module, PyObject *name) {
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    return text ? PyBool_FromLong(choose_arithmetic(text)) : NULL;
}

PyMethodDef arithmetic_methods[] = {
    FAST_METHOD("fold_inputs", py_fold_inputs, "Fold contributions left to right."),
    FAST_METHOD("fold_partials", py_fold_partials, "Fold partials left to right."),
    FAST_METHOD("copy", py_copy, "Copy bytes, equally fast wherever they lie."),
    FAST_METHOD("copy_streamed", py_copy_streamed, "Copy bytes past the caches."),
    FAST_METHOD("arithmetic_sizes", py_arithmetic_sizes, "Bytes of an element, a partial and a result."),
    {"arithmetic_variant", py_arithmetic_variant, METH_NOARGS, "Name the loops that this processor runs."},
    {"choose_arithmetic", py_choose_arithmetic, METH_O, "Run other loops, for tests; whether there are such."},
    {NULL, NULL, 0, NULL},
};
