/* arrays.h: arrays of NumPy's, read where they lie.
 *
 * Through the buffer protocol each array takes 0.15 µs, for NumPy writes down its format every time. Code that is compiled
 * against NumPy reads the fields themselves (PyArray_DATA and others are macros), so their places are part of NumPy's
 * binary interface, the same in versions 1 and 2. Nothing of NumPy is needed to build the core; whether the fields are
 * where `arrays.c` says is found out with an array of the NumPy that runs. If they are not, the buffer protocol is used.
 */
#ifndef COLLECTIVED_ARRAYS_H
#define COLLECTIVED_ARRAYS_H

#include "stable_abi.h"

enum { UNKNOWN_LENGTH = -1 }; /* of a view: its shape is known, and not the size of an element */

/* Whether arrays of this type are laid out as `arrays.c` says. No error is set. */
int knows_layout(PyObject *array_type);
/* A view of a contiguous array; 0, or -1 with an error set. `is_known`: `knows_layout` of its type. */
int take_buffer(int is_known, PyObject *array, Py_buffer *view, int writable);
/* A hash of dtype and shape of an array of which the layout is known. */
unsigned long long hash_array(PyObject *array);
/* The dtype, borrowed, of an array of which the layout is known. */
PyObject *read_dtype(PyObject *array);

#endif
