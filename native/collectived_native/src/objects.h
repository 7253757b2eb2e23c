/* objects.h: what the core's Python objects share. */
#ifndef COLLECTIVED_OBJECTS_H
#define COLLECTIVED_OBJECTS_H

#include "engine.h"
#include "stable_abi.h"

extern PyTypeObject *plan_type, *job_type, *engine_type, *watcher_type; /* made once per process */
extern PyType_Spec plan_spec, job_spec, engine_spec, watcher_spec;
extern PyMethodDef engine_functions[], watcher_functions[];

typedef struct {
    PyObject head;
    struct segment *segment;
    struct engine *engine;
    u64 epoch;
    struct job_object *in_flight; /* each with a reference of the engine's, until it is done */
    struct held *spare;           /* of the last blocking call */
} Engine;

typedef struct {
    PyObject head;
    struct plan *plan;
    u64 serial; /* of the segment */
} Plan;

static inline PyObject *none(void) {
    Py_IncRef(Py_None);
    return Py_None;
}

/* Frees an object after its own parts. */
static inline void free_object(PyObject *self) {
    PyTypeObject *type = self->ob_type;
    PyObject_Free(self);
    Py_DecRef((PyObject *)type);
}

/* 0, or -1 with an error set. */
int has_arguments(Py_ssize_t count, Py_ssize_t wanted, const char *what);
/* (instance, reason, culprit, missing) */
PyObject *describe_verdict(const struct segment *s);
PyObject *tuple_of_bits(const u64 bits[SEAT_WORDS], int seats);
PyObject *tuple_of(const u64 *numbers, Py_ssize_t count);
/* A tuple of new references, which it takes over; NULL where one of them is. */
PyObject *pack(PyObject **parts, Py_ssize_t count);
/* Raises where this process is a forked child of the one that mapped the segment, or it is unmapped. */
int check_usable(const struct segment *s, u64 epoch);
/* NULL with an error set where the engine cannot be used. */
Engine *usable_engine(PyObject *self);
PyObject *engine_plan(PyObject *self, PyObject *const *args, Py_ssize_t count);
/* NULL with an error set where the object is no plan of this engine's. */
Plan *plan_of(const Engine *e, PyObject *object);
/* An OSError of errno, or a ValueError where the geometry is out of range. */
PyObject *raise_segment_error(void);

#endif
