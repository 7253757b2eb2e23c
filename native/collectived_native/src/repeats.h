/* repeats.h: blocking calls of one array, of a list of arrays, or of none, that are remembered, so that they can be run again.
 *
 * A call is known by what it is to the contract and to the caller: the operation, the value's type, dtype and shape (of a list,
 * its length, and a hash of its arrays' dtypes and shapes), and the caller's line. Operations, types, dtypes and code objects are
 * compared as objects: a caller with equal ones that are others goes the long way, and is remembered apart.
 */
#ifndef COLLECTIVED_REPEATS_H
#define COLLECTIVED_REPEATS_H

#include "arrays.h"
#include "objects.h"

enum { NAMES = 7 };
extern union names { /* of attributes */
    struct { PyObject *dtype, *shape, *lasti, *back, *generation, *verdict, *waiting; };
    PyObject *all[NAMES];
} names;

enum { BUCKETS = 1024, MOST_REPEATS = 2048, MOST_FORMS = 16, MOST_KINDS = 8, OWN_CODES = 512, MOST_OWN_CODES = 256, MOST_AXES = 16 };

struct shape {
    int axes;
    Py_ssize_t at[MOST_AXES];
};

/* References are borrowed while a call is looked up, and kept by what is remembered. */
struct key {
    PyObject *operation, *kind, *dtype; /* kind: the value's type; None or the mark itself where there is no array */
    PyCodeObject *code;
    long at; /* the instruction */
    u64 hash;
    struct shape shape;
};

struct form { /* of what comes, where that is not known beforehand; else the only one */
    struct form *next;
    PyObject *form, *plan, *blob; /* as Python has it; the plan, or None; its sender's description, or None */
    PyObject *dtype, *shape_tuple; /* of the result; NULL: there is none */
    struct shape shape;
    u64 bytes;
};

struct repeat {
    struct repeat *next;
    int users; /* the table is one */
    struct key key;
    PyObject *call, *see, *restore; /* Python's; the latter two are NULL for NumPy's arrays */
    Engine *engine;
    PyObject *generation;
    u64 nanoseconds, bytes, item; /* bytes: of the value; item: of an element of it, where it is an array of NumPy's */
    enum kind kind;
    int peer, is_open, count; /* count: of forms */
    u32 tag;
    PyObject *plan, *blob; /* with which it begins; of a collective */
    struct form *forms;    /* the latest first */
    struct bundle *bundle; /* of a list of arrays; NULL: it is none */
};

typedef struct {
    PyObject head;
    PyObject *array_type, *make_array, *make_large_array, *any_value, *absent, *standing, *numbers;
    u64 large_bytes;                         /* results of so many bytes or more come from make_large_array */
    PyObject *kinds[MOST_KINDS];             /* of values: no attribute of others is looked up */
    PyCodeObject *own_codes[OWN_CODES];      /* functions of this library between a collective and its caller, by address */
    int kinds_known, own_codes_known, count;
    int knows_arrays; /* whether the layout of arrays is known */
    struct repeat *buckets[BUCKETS];
} Repeats;

/* Fills in the key of a call; 1, or 0: nothing like it is remembered, or -1 with an error set. `view`: taken of an array. */
int read_key(Repeats *r, struct key *key, PyObject *operation, PyObject *value, PyObject *frame, Py_buffer *view);
/* The remembered call; NULL: there is none. */
struct repeat *find_repeat(const Repeats *r, const struct key *key);
void release_repeat(struct repeat *again);
int same_shape(const struct shape *a, const struct shape *b);
/* The shape of a buffer; 0, or -1: it has too many axes. */
int read_shape(struct shape *shape, const Py_buffer *view);
/* The attribute `dtype`, borrowed: the object keeps it alive. NULL with an error set. */
PyObject *dtype_of(const Repeats *r, PyObject *array);
/* Whether an array has a dtype that is equal. */
int has_dtype(const Repeats *r, PyObject *array, PyObject *dtype);
/* The shape that a tuple says; 0, or -1: it has too many axes; an error may be set. */
int read_tuple(struct shape *shape, PyObject *tuple);
/* Makes an array for a result; NULL with an error set. */
PyObject *make_result(const Repeats *r, PyObject *shape, PyObject *dtype, u64 bytes);
/* Bytes of a view, whose elements have `item` bytes each. */
u64 view_bytes(const Py_buffer *view, u64 item);

/* repeat_run.c: (operation, value, out, frame) */
PyObject *repeats_run(PyObject *self, PyObject *const *args, Py_ssize_t count);

#endif
