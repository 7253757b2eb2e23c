/* arrays.c: arrays of NumPy's, read where they lie. */
#include "arrays.h"

enum { BF_RELEASEBUFFER = 2 };

/* Flags of NumPy's; a write to an array with the last one is warned of. */
enum { CONTIGUOUS = 0x1, WRITEABLE = 0x400, WARNS = (int)(1u << 31) };

struct ndarray {
    PyObject head;
    char *data;
    int axes;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
};

static const struct ndarray *fields_of(PyObject *array) {
    return (const struct ndarray *)array;
}

int take_buffer(int is_known, PyObject *array, Py_buffer *view, int writable) {
    const struct ndarray *fields = fields_of(array);
    int wanted = CONTIGUOUS | (writable ? WRITEABLE : 0);
    if (!is_known || (fields->flags & (wanted | WARNS)) != wanted)
        return PyObject_GetBuffer(array, view, PyBUF_ND | (writable ? PyBUF_WRITABLE : 0));
    Py_IncRef(array);
    *view = (Py_buffer){.buf = fields->data, .obj = array, .len = UNKNOWN_LENGTH, .ndim = fields->axes, .shape = fields->shape};
    return 0;
}

PyObject *read_dtype(PyObject *array) {
    return fields_of(array)->dtype;
}

unsigned long long hash_array(PyObject *array) {
    const struct ndarray *fields = fields_of(array);
    unsigned long long hash = (unsigned long long)fields->dtype;
    for (int i = 0; i < fields->axes; i++) hash = (hash ^ (unsigned long long)fields->shape[i]) * 0x9e3779b97f4a7c15u;
    return hash;
}

/* ---- Whether arrays are laid out like that ---- */

static PyObject *attribute(PyObject *object, const char *name) {
    PyObject *text = PyUnicode_InternFromString(name), *found = text ? PyObject_GetAttr(object, text) : NULL;
    if (text) Py_DecRef(text);
    return found;
}

static int set_false(PyObject *object, const char *name) {
    PyObject *text = PyUnicode_InternFromString(name), *no = PyBool_FromLong(0);
    int failed = !text || !no || PyObject_SetAttr(object, text, no);
    if (text) Py_DecRef(text);
    if (no) Py_DecRef(no);
    return failed;
}

/* Whether the fields of an array of shape (3, 5) are what NumPy says of it. */
static int says_the_same(PyObject *array) {
    const struct ndarray *fields = fields_of(array);
    Py_buffer view;
    PyObject *dtype = attribute(array, "dtype");
    if (!dtype || PyObject_GetBuffer(array, &view, PyBUF_ND)) {
        if (dtype) Py_DecRef(dtype);
        return 0;
    }
    int same = fields->data == view.buf && fields->axes == 2 && fields->shape[0] == 3 && fields->shape[1] == 5 && view.ndim == 2 &&
               fields->dtype == dtype && (fields->flags & (CONTIGUOUS | WRITEABLE | WARNS)) == (CONTIGUOUS | WRITEABLE);
    PyBuffer_Release(&view);
    Py_DecRef(dtype);
    return same;
}

/* Whether flags say that its transpose does not lie row by row, and that it cannot be written once NumPy says so. */
static int flags_change(PyObject *array) {
    PyObject *turned = attribute(array, "T"), *flags = attribute(array, "flags");
    int same = turned && flags && !(fields_of(turned)->flags & CONTIGUOUS) && !set_false(flags, "writeable") &&
               (fields_of(array)->flags & (CONTIGUOUS | WRITEABLE)) == CONTIGUOUS;
    if (turned) Py_DecRef(turned);
    if (flags) Py_DecRef(flags);
    return same;
}

int knows_layout(PyObject *array_type) {
    if (PyType_GetSlot((PyTypeObject *)array_type, BF_RELEASEBUFFER)) return 0; /* it counts views of its arrays */
    PyObject *rows = PyLong_FromLong(3), *columns = PyLong_FromLong(5), *shape = rows && columns ? PyTuple_Pack(2, rows, columns) : NULL;
    PyObject *array = shape ? PyObject_CallFunctionObjArgs(array_type, shape, NULL) : NULL;
    int known = array && (PyObject *)array->ob_type == array_type && says_the_same(array) && flags_change(array);
    PyObject *parts[] = {rows, columns, shape, array};
    for (int i = 0; i < 4; i++)
        if (parts[i]) Py_DecRef(parts[i]);
    PyErr_Clear();
    return known;
}
