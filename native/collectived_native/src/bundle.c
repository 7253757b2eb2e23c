/* bundle.c: see bundle.h. */
#include "bundle.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_OTHERS = 1 << 16 };

struct part { /* one array, as a leaf of the plan */
    Py_ssize_t at; /* in the list */
    PyObject *dtype, *shape_tuple;
    struct shape shape;
    u64 bytes;
};

struct bundle {
    int inputs, outputs, others;
    struct part part[]; /* in this order */
};

int bundle_size(const struct bundle *bundle) {
    return bundle->inputs + bundle->outputs;
}

void free_bundle(struct bundle *bundle) {
    for (int i = 0; bundle && i < bundle_size(bundle) + bundle->others && bundle->part[i].dtype; i++)
        Py_DecRef(bundle->part[i].dtype), Py_DecRef(bundle->part[i].shape_tuple);
    free(bundle);
}

/* Bytes of the leaves of a plan, those that go in and then those that come out. */
static void list_leaf_bytes(const struct plan *plan, u64 *bytes) {
    for (int out = 0; out < 2; out++)
        for (int i = 0; i < plan->phases; i++) {
            const struct phase *p = &plan->phase[i];
            for (int leaf = 0; leaf < (out ? p->leaves_out : p->leaves_in); leaf++) *bytes++ = bytes_of_leaf(p, out, leaf);
        }
}

static int read_part(struct part *part, PyObject *told) {
    PyObject *given[4];
    for (int i = 0; i < 4; i++)
        if (!(given[i] = PyTuple_GetItem(told, i))) return -1;
    part->at = (Py_ssize_t)PyLong_AsLongLong(given[0]), part->bytes = PyLong_AsUnsignedLongLong(given[3]);
    if (PyErr_Occurred() || read_tuple(&part->shape, given[2])) return -1;
    Py_IncRef(part->dtype = given[1]);
    Py_IncRef(part->shape_tuple = given[2]);
    return 0;
}

struct bundle *make_bundle(const struct plan *plan, PyObject *parts) {
    PyObject *list[3];
    Py_ssize_t sizes[3];
    for (int i = 0; i < 3; i++)
        if (!(list[i] = PyTuple_GetItem(parts, i)) || (sizes[i] = PyTuple_Size(list[i])) < 0) return NULL;
    if (sizes[0] != plan->leaves_in || sizes[1] != plan->leaves_out || sizes[2] > MOST_OTHERS) {
        PyErr_SetString(PyExc_ValueError, "the plan has other leaves");
        return NULL;
    }
    int leaves = plan->leaves_in + plan->leaves_out, all = leaves + (int)sizes[2];
    struct bundle *bundle = calloc(1, sizeof *bundle + (size_t)all * sizeof *bundle->part + (size_t)leaves * sizeof(u64));
    if (!bundle) return (struct bundle *)PyErr_NoMemory();
    u64 *bytes = (u64 *)&bundle->part[all];
    bundle->inputs = plan->leaves_in, bundle->outputs = plan->leaves_out, bundle->others = (int)sizes[2];
    list_leaf_bytes(plan, bytes);
    int failed = 0;
    struct part *part = bundle->part;
    for (int i = 0; i < 3; i++)
        for (Py_ssize_t k = 0; k < sizes[i] && !failed; k++, part++) {
            failed = read_part(part, PyTuple_GetItem(list[i], k));
            if (!failed && part - bundle->part < leaves) failed = part->bytes != bytes[part - bundle->part];
        }
    if (!failed) return bundle;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a part has other bytes than its leaf of the plan");
    free_bundle(bundle);
    return NULL;
}

/* ---- Whether results are written over what is still read ---- */

struct interval {
    const char *from, *to;
    int is_out;
};

static int by_start(const void *a, const void *b) {
    const struct interval *one = a, *other = b;
    return (one->from > other->from) - (one->from < other->from);
}

/* Whether the result of the same array lies in the very place of input number `in`. Plans have both in one order. */
static int is_in_place(const struct bundle *bundle, const struct held *h, int in) {
    int out = bundle->inputs + in;
    if (in >= bundle->outputs || bundle->part[in].at != bundle->part[out].at) return 0;
    return h->lengths[in] == h->lengths[out] && h->starts[in] == h->starts[out];
}

/* Whether a result overlaps another one, or an input but that whose very place it takes. 1, 0, or -1 with an error set. */
static int overlap(const struct bundle *bundle, const struct held *h) {
    struct interval few[128], *all = few;
    int size = bundle_size(bundle), count = 0, found = 0;
    if (size > 128 && !(all = malloc((size_t)size * sizeof *all))) return PyErr_NoMemory(), -1;
    for (int i = 0; i < size; i++) {
        int is_out = i >= bundle->inputs;
        if (!h->lengths[i] || (!is_out && is_in_place(bundle, h, i))) continue;
        all[count++] = (struct interval){h->starts[i], h->starts[i] + h->lengths[i], is_out};
    }
    qsort(all, (size_t)count, sizeof *all, by_start);
    const char *any_end = NULL, *out_end = NULL; /* of those before */
    for (int i = 0; i < count && !found; i++) {
        found = all[i].from < (all[i].is_out ? any_end : out_end);
        if (all[i].to > any_end) any_end = all[i].to;
        if (all[i].is_out && all[i].to > out_end) out_end = all[i].to;
    }
    if (all != few) free(all);
    return found;
}

/* ---- Taking hold ---- */

/* 1, or 0: it is not the array that was remembered at its place. */
static int take_part(const Repeats *r, const struct part *part, struct held *h, PyObject *list, int writable) {
    Py_buffer *view = &h->views[h->taken];
    PyObject *array = PyList_GetItem(list, part->at);
    struct shape shape;
    if (!array || (PyObject *)array->ob_type != r->array_type) return 0;
    Py_IncRef(array); /* Python may run here, and change the list */
    int failed = !has_dtype(r, array, part->dtype) || take_buffer(r->knows_arrays, array, view, writable);
    Py_DecRef(array);
    if (failed) return 0;
    h->starts[h->taken] = view->buf, h->lengths[h->taken++] = part->bytes;
    if (view->len != UNKNOWN_LENGTH && (u64)view->len != part->bytes) return 0;
    return !read_shape(&shape, view) && same_shape(&shape, &part->shape);
}

/* A list of new arrays; NULL with an error set. */
static PyObject *make_list(const Repeats *r, const struct bundle *bundle) {
    PyObject *list = PyList_New(bundle->outputs);
    for (int i = 0; list && i < bundle->outputs; i++) {
        const struct part *part = &bundle->part[bundle->inputs + i];
        PyObject *array = make_result(r, part->shape_tuple, part->dtype, part->bytes);
        if (!array || PyList_SetItem(list, part->at, array)) return Py_DecRef(list), NULL;
    }
    return list;
}

int take_bundle(const Repeats *r, const struct bundle *bundle, struct held *h, PyObject *value, PyObject *out, PyObject **into) {
    int fits = 1;
    for (int i = 0; i < bundle->inputs && fits; i++) fits = take_part(r, &bundle->part[i], h, value, 0);
    for (int i = 0; i < bundle->others && fits; i++) {
        fits = take_part(r, &bundle->part[bundle_size(bundle) + i], h, value, 0);
        if (fits) PyBuffer_Release(&h->views[--h->taken]);
    }
    if (fits && bundle->outputs) {
        if (out == Py_None) *into = make_list(r, bundle);
        else if (out->ob_type == &PyList_Type && PyList_Size(out) == bundle->outputs) Py_IncRef(*into = out);
        else fits = 0;
        if (fits && !*into) return -1;
    }
    for (int i = bundle->inputs; i < bundle_size(bundle) && fits; i++) fits = take_part(r, &bundle->part[i], h, *into, 1);
    PyErr_Clear(); /* the long way says why */
    int over = fits ? overlap(bundle, h) : 0;
    return over < 0 ? -1 : fits && !over;
}

/* Held arrays number `first` and following, each at its place in a new list; None where there are none. NULL with an error set. */
static PyObject *list_some(const struct bundle *bundle, const struct held *h, int first, int count) {
    if (!count) return none();
    PyObject *list = PyList_New(count);
    for (int i = first; list && i < first + count; i++) {
        Py_IncRef(h->views[i].obj);
        if (PyList_SetItem(list, bundle->part[i].at, h->views[i].obj)) return Py_DecRef(list), NULL;
    }
    return list;
}

int list_held(const struct bundle *bundle, const struct held *h, PyObject **value, PyObject **result) {
    *value = list_some(bundle, h, 0, bundle->inputs);
    *result = *value ? list_some(bundle, h, bundle->inputs, bundle->outputs) : NULL;
    if (*value && !*result) Py_DecRef(*value);
    return *result ? 0 : -1;
}
