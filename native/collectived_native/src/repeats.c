/* repeats.c: what is remembered of blocking calls. */
#include "bundle.h"

#include <stdlib.h>
#include <string.h>

PyTypeObject *repeats_type;
union names names;

/* ---- Keys ---- */

static u64 mix(u64 hash, u64 word) {
    return (hash ^ word) * 0x9e3779b97f4a7c15u ^ (hash >> 29);
}

static void hash_key(struct key *key) {
    u64 hash = mix((u64)key->operation, (u64)key->kind);
    hash = mix(mix(mix(hash, (u64)key->dtype), (u64)key->code), (u64)key->at);
    for (int i = 0; i < key->shape.axes; i++) hash = mix(hash, (u64)key->shape.at[i]);
    key->hash = hash ^ hash >> 32;
}

int same_shape(const struct shape *a, const struct shape *b) {
    return a->axes == b->axes && !memcmp(a->at, b->at, (size_t)a->axes * sizeof *a->at);
}

int read_shape(struct shape *shape, const Py_buffer *view) {
    if (view->ndim > MOST_AXES) return -1;
    shape->axes = view->ndim;
    if (view->ndim) memcpy(shape->at, view->shape, (size_t)view->ndim * sizeof *shape->at);
    return 0;
}

int read_tuple(struct shape *shape, PyObject *tuple) {
    Py_ssize_t axes = PyTuple_Size(tuple);
    if (axes < 0 || axes > MOST_AXES) return -1;
    shape->axes = (int)axes;
    for (int i = 0; i < shape->axes; i++) shape->at[i] = (Py_ssize_t)PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *dtype_of(const Repeats *r, PyObject *array) {
    if (r->knows_arrays && (PyObject *)array->ob_type == r->array_type) return read_dtype(array);
    PyObject *dtype = PyObject_GetAttr(array, names.dtype);
    if (dtype) Py_DecRef(dtype);
    return dtype;
}

u64 view_bytes(const Py_buffer *view, u64 item) {
    if (view->len != UNKNOWN_LENGTH) return (u64)view->len;
    for (int i = 0; i < view->ndim; i++) item *= (u64)view->shape[i];
    return item;
}

/* Of a list: its length, and a hash of the dtypes and shapes of its arrays. 0, or -1: not all of it are arrays. */
static int read_list(const Repeats *r, struct shape *shape, PyObject *list) {
    Py_ssize_t length = PyList_Size(list);
    u64 hash = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *array = PyList_GetItem(list, i);
        if (!array || (PyObject *)array->ob_type != r->array_type) return -1;
        if (r->knows_arrays) hash = mix(hash, hash_array(array)); /* else those of other shapes take one another's place */
    }
    shape->axes = 2, shape->at[0] = length, shape->at[1] = (Py_ssize_t)hash;
    return 0;
}

/* 0, or -1: it has no such shape and dtype; an error may be set. */
static int read_value(const Repeats *r, struct key *key, PyObject *value, Py_buffer *view) {
    key->dtype = NULL, key->shape.axes = 0;
    key->kind = value == Py_None || value == r->any_value ? value : (PyObject *)value->ob_type;
    if (key->kind == value) return 0;
    if (key->kind == (PyObject *)&PyList_Type) return read_list(r, &key->shape, value);
    if (key->kind == r->array_type) {
        if (take_buffer(r->knows_arrays, value, view, 0) || read_shape(&key->shape, view)) return -1;
    } else {
        PyObject *shape = PyObject_GetAttr(value, names.shape);
        int failed = !shape || read_tuple(&key->shape, shape);
        if (shape) Py_DecRef(shape);
        if (failed) return -1;
    }
    return (key->dtype = dtype_of(r, value)) ? 0 : -1;
}

/* The place of a function of this library, or where it would be. */
static int place_of_code(const Repeats *r, const PyCodeObject *code) {
    u64 at = mix(0, (u64)code) >> 32;
    while (r->own_codes[at % OWN_CODES] && r->own_codes[at % OWN_CODES] != code) at++;
    return (int)(at % OWN_CODES);
}

static int is_own(const Repeats *r, const PyCodeObject *code) {
    return r->own_codes_known && r->own_codes[place_of_code(r, code)];
}

/* The caller's line: 1, or 0: no frame is the caller's, or -1 with an error set. */
static int read_frame(const Repeats *r, struct key *key, PyObject *frame) {
    PyObject *held = NULL; /* a frame further out */
    int found = frame != Py_None;
    for (; found > 0; frame = held) {
        key->code = PyFrame_GetCode((PyFrameObject *)frame);
        Py_DecRef((PyObject *)key->code); /* the frame has it */
        if (!is_own(r, key->code)) break;
        PyObject *back = PyObject_GetAttr(frame, names.back);
        if (held) Py_DecRef(held);
        held = back;
        found = !back ? -1 : back != Py_None;
    }
    if (found > 0) {
        PyObject *at = PyObject_GetAttr(frame, names.lasti);
        key->at = at ? PyLong_AsLong(at) : -1;
        if (at) Py_DecRef(at);
        if (PyErr_Occurred()) found = -1;
    }
    if (held) Py_DecRef(held);
    return found;
}

static int knows_kind(const Repeats *r, const PyObject *kind) {
    for (int i = 0; i < r->kinds_known; i++)
        if (r->kinds[i] == kind) return 1;
    return 0;
}

int read_key(Repeats *r, struct key *key, PyObject *operation, PyObject *value, PyObject *frame, Py_buffer *view) {
    key->operation = operation;
    if (value != Py_None && value != r->any_value && !knows_kind(r, (PyObject *)value->ob_type)) return 0;
    int found = read_frame(r, key, frame);
    if (found <= 0) return found;
    if (read_value(r, key, value, view)) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear(); /* it is not contiguous, say */
        return 0;
    }
    hash_key(key);
    return 1;
}

/* ---- The table ---- */

struct repeat *find_repeat(const Repeats *r, const struct key *key) {
    struct repeat *again = r->buckets[key->hash % BUCKETS];
    while (again && !(again->key.hash == key->hash && again->key.operation == key->operation && again->key.code == key->code &&
                      again->key.at == key->at && again->key.kind == key->kind && again->key.dtype == key->dtype &&
                      same_shape(&again->key.shape, &key->shape)))
        again = again->next;
    return again;
}

static void drop(PyObject *object) {
    if (object) Py_DecRef(object);
}

static PyObject *keep(PyObject *object) {
    if (object) Py_IncRef(object);
    return object;
}

static void free_form(struct form *form) {
    drop(form->form), drop(form->plan), drop(form->blob), drop(form->dtype), drop(form->shape_tuple);
    free(form);
}

void release_repeat(struct repeat *again) {
    if (--again->users) return;
    while (again->forms) {
        struct form *form = again->forms;
        again->forms = form->next;
        free_form(form);
    }
    drop(again->key.operation), drop(again->key.kind), drop(again->key.dtype), drop((PyObject *)again->key.code);
    drop(again->call), drop(again->see), drop(again->restore), drop((PyObject *)again->engine), drop(again->generation);
    drop(again->plan), drop(again->blob);
    free_bundle(again->bundle);
    free(again);
}

static void forget(Repeats *r, struct repeat *again) {
    struct repeat **link = &r->buckets[again->key.hash % BUCKETS];
    while (*link && *link != again) link = &(*link)->next;
    if (!*link) return;
    *link = again->next;
    r->count--;
    release_repeat(again);
}

static void forget_all(Repeats *r) {
    for (int i = 0; i < BUCKETS; i++)
        while (r->buckets[i]) forget(r, r->buckets[i]);
}

/* ---- Remembering ---- */

/* Bytes of the one leaf of a plan that goes in, or comes out; 0: there is none; ~0: there are several. */
static u64 leaf_bytes(const struct plan *plan, int out) {
    u64 bytes = 0;
    if ((out ? plan->leaves_out : plan->leaves_in) > 1) return ~(u64)0;
    for (int i = 0; i < plan->phases; i++) {
        const struct phase *p = &plan->phase[i];
        if (out ? p->leaves_out : p->leaves_in) bytes = bytes_of_leaf(p, out, 0);
    }
    return bytes;
}

/* (form, plan or None, blob or None, dtype or None, shape, bytes); NULL with an error set */
static struct form *make_form(const Engine *e, PyObject *terms, int is_bundle) {
    PyObject *given[6];
    for (int i = 0; i < 6; i++)
        if (!(given[i] = PyTuple_GetItem(terms, i))) return NULL;
    struct form *form = calloc(1, sizeof *form);
    if (!form) return (struct form *)PyErr_NoMemory();
    u64 bytes = PyLong_AsUnsignedLongLong(given[5]);
    int failed = PyErr_Occurred() || read_tuple(&form->shape, given[4]), has_result = given[3] != Py_None;
    if (!failed && given[1] != Py_None) failed = !plan_of(e, given[1]);
    if (!failed && given[1] != Py_None && !is_bundle) failed = leaf_bytes(((Plan *)given[1])->plan, 1) != (has_result ? bytes : 0);
    if (failed) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the form does not fit its plan, or has too many axes");
        return free(form), NULL;
    }
    form->form = keep(given[0]), form->plan = keep(given[1]), form->blob = keep(given[2]), form->bytes = bytes;
    if (has_result) form->dtype = keep(given[3]), form->shape_tuple = keep(given[4]);
    return form;
}

enum { CALL, SEE, RESTORE, ENGINE, GENERATION, KIND, PEER, TAG, PLAN, IS_OPEN, BLOB, NANOSECONDS, TERMS };

/* (call, see, restore, engine, generation, kind, peer, tag, plan, is_open, blob, timeout_ns); `parts`: of a list, or None. NULL with an
   error set */
static struct repeat *make_repeat(PyObject *terms, const struct key *key, PyObject *parts) {
    PyObject *given[TERMS];
    for (int i = 0; i < TERMS; i++)
        if (!(given[i] = PyTuple_GetItem(terms, i))) return NULL;
    Engine *e = given[ENGINE]->ob_type == engine_type ? usable_engine(given[ENGINE]) : NULL;
    long numbers[] = {PyLong_AsLong(given[KIND]), PyLong_AsLong(given[PEER])};
    u64 tag = PyLong_AsUnsignedLongLong(given[TAG]);
    if (!e || PyErr_Occurred()) return NULL;
    int is_collective = numbers[0] == COLLECTIVE, least = numbers[0] == RECEIVE ? -1 : 0;
    if (numbers[0] < COLLECTIVE || numbers[0] > RECEIVE || numbers[1] < least || numbers[1] >= (long)e->segment->geometry.seats || tag >> 32) {
        PyErr_SetString(PyExc_ValueError, "no such kind, seat or tag");
        return NULL;
    }
    if (is_collective && !plan_of(e, given[PLAN])) return NULL;
    struct repeat *again = calloc(1, sizeof *again);
    if (!again) return (struct repeat *)PyErr_NoMemory();
    again->users = 1, again->key = *key;
    keep(key->operation), keep(key->kind), keep(key->dtype), keep((PyObject *)key->code);
    again->call = keep(given[CALL]), again->engine = (Engine *)keep(given[ENGINE]);
    if (given[SEE] != Py_None) again->see = keep(given[SEE]), again->restore = keep(given[RESTORE]);
    again->plan = keep(given[PLAN]), again->blob = keep(given[BLOB]);
    again->generation = keep(given[GENERATION]), again->nanoseconds = PyLong_AsUnsignedLongLong(given[NANOSECONDS]);
    again->kind = (enum kind)numbers[0], again->peer = (int)numbers[1], again->tag = (u32)tag;
    again->is_open = PyObject_IsTrue(given[IS_OPEN]);
    again->bytes = is_collective ? leaf_bytes(((Plan *)again->plan)->plan, 0) : ~(u64)0;
    if (!PyErr_Occurred() && is_collective && parts != Py_None) again->bundle = make_bundle(((Plan *)again->plan)->plan, parts);
    else if (!PyErr_Occurred() && is_collective && again->bytes == ~(u64)0) PyErr_SetString(PyExc_ValueError, "the plan has more than one leaf");
    if (!PyErr_Occurred()) return again;
    release_repeat(again);
    return NULL;
}

static int knows_form(const struct repeat *again, const struct form *form) {
    for (const struct form *known = again->forms; known; known = known->next)
        if (known->form == form->form) return 1;
    return 0;
}

/* Whether the older one may get one more form: calls that run it may be looking at those that it has. */
static int takes_form(const struct repeat *old, const struct repeat *made) {
    return old->engine == made->engine && old->plan == made->plan && old->count < MOST_FORMS; /* an engine has one generation */
}

/* Puts it where it is found, in place of what was remembered of the same call, or adds its form to that. */
static void put(Repeats *r, struct repeat *made, struct form *form) {
    struct repeat *old = find_repeat(r, &made->key);
    if (old && takes_form(old, made)) {
        release_repeat(made);
        made = old;
        if (knows_form(old, form)) return free_form(form);
    } else {
        if (old) forget(r, old);
        if (r->count >= MOST_REPEATS) forget_all(r);
        struct repeat **bucket = &r->buckets[made->key.hash % BUCKETS];
        made->next = *bucket, *bucket = made, r->count++;
    }
    form->next = made->forms;
    made->forms = form, made->count++;
}

static int add_kind(Repeats *r, PyObject *kind) {
    if (knows_kind(r, kind)) return 1;
    if (r->kinds_known == MOST_KINDS) return 0;
    r->kinds[r->kinds_known++] = keep(kind);
    return 1;
}

static int add_own_codes(Repeats *r, PyObject *codes) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(codes); i++) {
        PyCodeObject *code = (PyCodeObject *)PyTuple_GetItem(codes, i);
        if (is_own(r, code)) continue;
        if (r->own_codes_known == MOST_OWN_CODES) return 0;
        r->own_codes[place_of_code(r, code)] = (PyCodeObject *)keep((PyObject *)code);
        r->own_codes_known++;
    }
    return PyErr_Occurred() ? -1 : 1;
}

/* Bytes of an element of an array of NumPy's; 0: it is none, or an error is set. */
static u64 item_bytes(const Repeats *r, PyObject *value) {
    Py_buffer view;
    if ((PyObject *)value->ob_type != r->array_type || PyObject_GetBuffer(value, &view, PyBUF_ND)) return 0;
    u64 bytes = (u64)view.itemsize;
    PyBuffer_Release(&view);
    return bytes;
}

/* add(operation, value, frame, own_codes, terms, form, parts) */
static PyObject *repeats_add(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Repeats *r = (Repeats *)self;
    struct key key;
    Py_buffer view = {0};
    if (has_arguments(count, 7, "(operation, value, frame, own_codes, terms, form, parts)")) return NULL;
    PyObject *engine = PyTuple_GetItem(args[4], ENGINE), *result_shape = engine ? PyTuple_GetItem(args[5], 4) : NULL;
    if (!result_shape) return NULL;
    if (PyTuple_Size(result_shape) > MOST_AXES) return none();
    if (engine->ob_type == engine_type && !((Engine *)engine)->segment) return none(); /* the group has been left meanwhile */
    int is_array = args[1] != Py_None && args[1] != r->any_value;
    if (is_array && !add_kind(r, (PyObject *)args[1]->ob_type)) return none();
    int found = add_own_codes(r, args[3]);
    if (found > 0) found = read_key(r, &key, args[0], args[1], args[2], &view);
    if (view.obj) PyBuffer_Release(&view);
    if (found <= 0) return found < 0 ? NULL : none();
    struct repeat *made = make_repeat(args[4], &key, args[6]);
    if (made) made->item = item_bytes(r, args[1]);
    struct form *form = made && !PyErr_Occurred() ? make_form(made->engine, args[5], made->bundle != NULL) : NULL;
    if (form) put(r, made, form);
    else if (made) release_repeat(made);
    return form ? none() : NULL;
}

static PyObject *repeats_clear(PyObject *self, PyObject *unused) {
    (void)unused;
    forget_all((Repeats *)self);
    return none();
}

static void repeats_dealloc(PyObject *self) {
    Repeats *r = (Repeats *)self;
    forget_all(r);
    for (int i = 0; i < r->kinds_known; i++) Py_DecRef(r->kinds[i]);
    for (int i = 0; i < OWN_CODES; i++) drop((PyObject *)r->own_codes[i]);
    drop(r->array_type), drop(r->make_array), drop(r->make_large_array), drop(r->any_value), drop(r->absent), drop(r->standing), drop(r->numbers);
    free_object(self);
}

/* repeats(array_type, make_array, make_large_array, large_bytes, any_value, absent, standing, numbers) */
static PyObject *make_repeats(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (has_arguments(count, 8, "(array_type, make_array, make_large_array, large_bytes, any_value, absent, standing, numbers)")) return NULL;
    u64 large = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    static const char *const texts[] = {"dtype", "shape", "f_lasti", "f_back", "generation", "verdict", "waiting"};
    for (int i = 0; i < NAMES; i++)
        if (!names.all[i] && !(names.all[i] = PyUnicode_InternFromString(texts[i]))) return NULL; /* kept forever */
    Repeats *r = (Repeats *)PyType_GenericAlloc(repeats_type, 0);
    if (!r) return NULL;
    r->array_type = keep(args[0]), r->make_array = keep(args[1]), r->make_large_array = keep(args[2]), r->large_bytes = large;
    r->knows_arrays = knows_layout(args[0]);
    r->any_value = keep(args[4]), r->absent = keep(args[5]), r->standing = keep(args[6]), r->numbers = keep(args[7]);
    return (PyObject *)r;
}

static PyMethodDef methods[] = {
    FAST_METHOD("run", repeats_run, "Run a call again, or return the given value for absence where it has to go the long way."),
    FAST_METHOD("add", repeats_add, "Remember a call that has ended well."),
    {"clear", repeats_clear, METH_NOARGS, "Forget all."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot type_slots[] = {
    {Py_tp_dealloc, (void *)repeats_dealloc}, {Py_tp_methods, methods}, {Py_tp_doc, "Calls that may be run again."}, {0, NULL}};
PyType_Spec repeats_spec = {"collectived_native._core.Repeats", sizeof(Repeats), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, type_slots};

static PyObject *is_layout_known(PyObject *module, PyObject *array_type) {
    (void)module;
    return PyBool_FromLong(knows_layout(array_type));
}

PyMethodDef repeats_functions[] = {
    FAST_METHOD("repeats", make_repeats, "The remembered calls of one rank."),
    {"knows_layout", is_layout_known, METH_O, "Whether arrays of this type are read without the buffer protocol."},
    {NULL, NULL, 0, NULL},
};
