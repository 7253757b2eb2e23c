/* objects.h: what the core's Python objects share. */
#ifndef COLLECTIVED_OBJECTS_H
#define COLLECTIVED_OBJECTS_H

#include "engine.h"
#include "stable_abi.h"

extern PyTypeObject *plan_type, *job_type, *engine_type, *watcher_type, *repeats_type, *crossings_type, *carrier_type; /* made once per process */
extern PyType_Spec plan_spec, job_spec, engine_spec, watcher_spec, repeats_spec, crossings_spec, carrier_spec;
extern PyMethodDef engine_functions[], watcher_functions[], repeats_functions[], crossings_functions[], carrier_functions[];

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

struct held { /* a job with all that it keeps alive */
    struct job job;
    PyObject *plan, *blob;
    Py_buffer *views;
    int taken, room;   /* views that are to be released; for how many there is room */
    char **starts;     /* of them */
    u64 *lengths;
    struct held *more; /* whose views these are, once the job was described */
};

typedef struct job_object {
    PyObject head;
    Engine *engine;
    struct held *held;
    struct job_object *next;
    int in_flight;
} Job;

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
PyObject *engine_skip_instance(PyObject *self, PyObject *unused);
PyObject *engine_gather_sums(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *engine_bring_results(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *engine_attend_instance(PyObject *self, PyObject *const *args, Py_ssize_t count);
/* NULL with an error set where the object is no plan of this engine's. */
Plan *plan_of(const Engine *e, PyObject *object);
/* For so many leaves; NULL with an error set. */
struct held *make_held(int room);
/* Lets go of what it keeps alive. */
void let_go(struct held *h);
void free_held(struct held *h);
/* Takes hold of a leaf; 0, or -1 with an error set. `bytes` ~0: any length. */
int take_leaf(struct held *h, PyObject *leaf, u64 bytes, int writable, int index);
/* Bytes of a leaf of a phase that goes in, or comes out. */
static inline u64 bytes_of_leaf(const struct phase *p, int out, int leaf) {
    const u64 *starts = out ? p->starts_out : p->starts_in;
    return (starts[leaf + 1] - starts[leaf]) * (out ? p->result_item : p->item);
}

/* Takes hold of all leaves of a plan; 0, or -1 with an error set. */
int take_leaves(struct held *h, const struct plan *plan, PyObject *inputs, PyObject *outputs);
/* Says where the values of a collective lie: the first leaves that are held, then its outputs. */
void use_leaves(struct held *h, int leaves_in);
/* Whether a single output begins or ends amid a single input. */
int overlap_in_part(const struct held *h, int leaves_in);
/* A reference to the blob of a job, or None; 0, or -1 with an error set. */
int take_blob(struct held *h, PyObject *blob, Py_ssize_t most);
/* Says that a letter carries what is held, all of it; its bytes. */
u64 use_letter_leaves(struct held *h);
/* Makes a letter of what is held. */
void address_letter(struct held *h, enum kind kind, int peer, u32 tag, int expects);

/* carrying.c */

/* Room for so many leaves, with an empty job; NULL with an error set. Given back, it serves the next call. */
struct held *take_room(Engine *e, int room);
void give_back(Engine *e, struct held *h);
/* A collective, and its deadline, if it has one; `asked`: what the caller gave it. */
void take_plan(Engine *e, struct held *h, PyObject *plan, u64 nanoseconds, u64 asked);
/* A job of (plan, inputs, outputs, timeout_ns, blob), ready to be submitted; NULL with an error set. */
struct held *hold(Engine *e, PyObject *const *args, PyObject *asked);
int is_over(const struct held *h);
/* Lets go of what jobs that are over have kept alive; of those to be collected, not before. */
void reap(Engine *e);
/* Submits a job and returns. */
PyObject *start(Engine *e, struct held *h, int notify);
/* Looks at signals, for `struct waiting`. */
int interrupted(void *argument);
/* Waits without the GIL: a state; `raised`: an exception is set. */
int wait_for(Engine *e, struct job *job, u64 until, int *raised);
/* Waits for a job that is submitted, at first with the GIL. */
int see_through(Engine *e, struct held *h, u64 bytes, int *raised);
/* The result of a blocking call, and where it goes on: None, or a job that goes on, or has ended otherwise than well. */
PyObject *settle(Engine *e, struct held *h, int found, int raised);
/* Submits a job that waits for its end; the same. */
PyObject *carry_out(Engine *e, struct held *h, u64 bytes);
/* Goes on with a job that was stopped, with the leaves that `described` holds. */
void go_on(Job *job, struct held *described);
Job *usable_job(PyObject *self);
PyObject *engine_send(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *engine_receive(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *job_cancel(PyObject *self, PyObject *unused);
PyObject *job_abandon(PyObject *self, PyObject *unused);
PyObject *job_source(PyObject *self, PyObject *unused);
PyObject *letter_blob(Job *job);
PyObject *letter_describe(Job *job, PyObject *outputs);
/* An OSError of errno, or a ValueError where the geometry is out of range. */
PyObject *raise_segment_error(void);

#endif
