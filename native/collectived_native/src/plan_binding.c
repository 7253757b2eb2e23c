/* plan_binding.c: plans as Python objects. */
#include <stdlib.h>
#include <string.h>

#include "objects.h"

PyTypeObject *plan_type;

struct numbers {
    u64 *at, *end;
};

/* Appends all of a tuple; how many, or -1 with an error set. */
static int append(struct numbers *numbers, PyObject *tuple) {
    Py_ssize_t count = PyTuple_Size(tuple);
    if (count < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        u64 number = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred()) return -1;
        *numbers->at++ = number;
    }
    return (int)count;
}

static Py_ssize_t count_numbers(PyObject *phases, Py_ssize_t count) {
    Py_ssize_t sum = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *phase = PyTuple_GetItem(phases, i);
        if (PyTuple_Size(phase) != 4) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a phase is (dtype, counts, leaves in, leaves out)");
            return -1;
        }
        for (int k = 1; k < 4; k++) {
            Py_ssize_t length = PyTuple_Size(PyTuple_GetItem(phase, k));
            if (length < 0) return -1;
            sum += length;
        }
    }
    return sum;
}

static struct plan *make_plan(const Engine *e, int operation, int reduce_op, int root, PyObject *phases) {
    Py_ssize_t count = PyTuple_Size(phases), sum = count < 0 ? -1 : count_numbers(phases, count);
    if (sum < 0) return NULL;
    struct phase_terms *terms = calloc((size_t)count + 1, sizeof *terms);
    u64 *numbers = calloc((size_t)sum + 1, sizeof *numbers);
    struct plan *plan = NULL;
    struct numbers all = {numbers, numbers + sum};
    int failed = !terms || !numbers;
    if (failed) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        PyObject *phase = PyTuple_GetItem(phases, i);
        int given[3];
        terms[i].dtype = (int)PyLong_AsLong(PyTuple_GetItem(phase, 0));
        failed = PyErr_Occurred() != NULL;
        for (int k = 0; k < 3 && !failed; k++) failed = (given[k] = append(&all, PyTuple_GetItem(phase, k + 1))) < 0;
        if (!failed) terms[i].counts_given = (u64)given[0], terms[i].leaves_in = given[1], terms[i].leaves_out = given[2];
    }
    if (!failed) {
        const char *why;
        plan = plan_make(e->segment, e->engine->seat, operation, reduce_op, root, (int)count, terms, numbers, &why);
        if (!plan && why) PyErr_SetString(PyExc_ValueError, why);
        else if (!plan) PyErr_NoMemory();
    }
    free(terms), free(numbers);
    return plan;
}

/* plan(operation, reduce_op, root, phases, digest, terms, is_open, meets, description) */
PyObject *engine_plan(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || has_arguments(count, 9, "(operation, reduce_op, root, phases, digest, terms, is_open, meets, description)")) return NULL;
    char *digest;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(args[4], &digest, &length)) return NULL;
    long numbers[] = {PyLong_AsLong(args[0]), PyLong_AsLong(args[1]), PyLong_AsLong(args[2]), PyLong_AsLong(args[7])};
    u64 terms = PyLong_AsUnsignedLongLong(args[5]), description = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[8]);
    int is_open = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[6]);
    if (PyErr_Occurred()) return NULL;
    if (length != 16) return PyErr_Format(PyExc_ValueError, "a digest has 16 bytes, not %zd", length);
    if (numbers[3] < MEETS_NOT || numbers[3] > MEETS_ANY) return PyErr_Format(PyExc_ValueError, "no such way to meet: %ld", numbers[3]);
    struct plan *plan = make_plan(e, (int)numbers[0], (int)numbers[1], (int)numbers[2], args[3]);
    if (!plan) return NULL;
    memcpy(plan->digest, digest, 16);
    plan->terms = terms, plan->open = is_open, plan->meets = (int)numbers[3], plan->description = description;
    plan->total = find_total(e->engine, description, (int)numbers[0]);
    Plan *made = (Plan *)PyType_GenericAlloc(plan_type, 0);
    if (!made) return free(plan), NULL;
    made->plan = plan, made->serial = e->segment->serial;
    return (PyObject *)made;
}

PyObject *engine_skip_instance(PyObject *self, PyObject *unused) {
    Engine *e = usable_engine(self);
    (void)unused;
    return e ? PyLong_FromUnsignedLongLong(engine_skip(e->engine)) : NULL;
}

PyObject *engine_attend_instance(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Engine *e = usable_engine(self);
    if (!e || has_arguments(count, 2, "(instance, each)")) return NULL;
    u64 n = PyLong_AsUnsignedLongLong(args[0]);
    int each = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[1]);
    return each < 0 ? NULL : PyBool_FromLong(engine_attend(e->engine, n, each));
}

/* The worker's part in a collective: (plan, instance, buffers), and a blob that is brought */
static PyObject *take_part(PyObject *self, PyObject *const *args, Py_ssize_t count, int brings) {
    Engine *e = usable_engine(self);
    char *blob = NULL;
    Py_ssize_t bytes = 0;
    if (!e || (brings ? has_arguments(count, 4, "(plan, instance, buffers, blob)") : has_arguments(count, 3, "(plan, instance, buffers)")))
        return NULL;
    if (brings && PyBytes_AsStringAndSize(args[3], &blob, &bytes)) return NULL;
    if (bytes > MAX_BLOB) return PyErr_Format(PyExc_ValueError, "a blob of %zd bytes", bytes);
    u64 n = PyLong_AsUnsignedLongLong(args[1]);
    Plan *plan = PyErr_Occurred() ? NULL : plan_of(e, args[0]);
    if (!plan) return NULL;
    if (!is_bringer(plan->plan) || (brings ? plan->plan->leaves_out : plan->plan->leaves_in))
        return PyErr_Format(PyExc_ValueError, "the plan is not for that"), NULL;
    PyObject *none_given = PyTuple_New(0);
    struct held *h = none_given ? make_held(plan->plan->leaves_in + plan->plan->leaves_out) : NULL;
    PyObject *found = NULL;
    if (h && !take_leaves(h, plan->plan, brings ? args[2] : none_given, brings ? none_given : args[2]))
        found = PyLong_FromLong(brings ? engine_bring(e->engine, plan->plan, &h->job.values, n, blob, (u64)bytes)
                                       : engine_gather(e->engine, plan->plan, &h->job.values, n));
    free_held(h);
    if (none_given) Py_DecRef(none_given);
    return found;
}

PyObject *engine_gather_sums(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return take_part(self, args, count, 0);
}

PyObject *engine_bring_results(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return take_part(self, args, count, 1);
}

static void plan_dealloc(PyObject *self) {
    free(((Plan *)self)->plan);
    free_object(self);
}

Plan *plan_of(const Engine *e, PyObject *object) {
    Plan *plan = (Plan *)object;
    if (object->ob_type == plan_type && plan->serial == e->segment->serial && plan->plan->me == e->engine->seat) return plan;
    PyErr_SetString(PyExc_TypeError, "expected a plan of this engine's");
    return NULL;
}

static PyMethodDef plan_methods[] = {
    {NULL, NULL, 0, NULL},
};
static PyType_Slot plan_slots[] = {{Py_tp_dealloc, (void *)plan_dealloc}, {Py_tp_methods, plan_methods}, {Py_tp_doc, "A prepared collective of one seat."}, {0, NULL}};
PyType_Spec plan_spec = {"collectived_native._core.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, plan_slots};
