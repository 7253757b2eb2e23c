/* repeat_run.c: a remembered call is run again. */
#include <string.h>

#include "bundle.h"
#include "letters.h"

struct run {
    const Repeats *repeats;
    struct repeat *again;
    PyObject *value, *out; /* as arrays of NumPy's */
    Py_buffer *view;       /* of the value, if it is taken already */
    struct held *held;
    struct form *form;     /* NULL: not known yet */
    PyObject *into;        /* where the result goes */
};

enum outcome { FAILED_WITH_ERROR = -1, REFUSED, FINISHED, UNFINISHED };

/* ---- The arrays ---- */

/* 1, or 0: it is not one array as the call takes it. */
static int take_value(struct run *run) {
    struct held *h = run->held;
    Py_buffer *view = &h->views[h->taken];
    if (run->view->obj) *view = *run->view, run->view->obj = NULL;
    else if (PyObject_GetBuffer(run->value, view, PyBUF_ND)) return PyErr_Clear(), 0;
    u64 bytes = view_bytes(view, run->again->item);
    h->starts[h->taken] = view->buf, h->lengths[h->taken++] = bytes;
    return run->again->bytes == ~(u64)0 || bytes == run->again->bytes;
}

/* Whether a result could go to `out`, whatever it is. */
static int is_writable(const struct run *run) {
    Py_buffer view;
    if (run->out == Py_None) return 1;
    if ((PyObject *)run->out->ob_type != run->repeats->array_type) return 0;
    if (take_buffer(run->repeats->knows_arrays, run->out, &view, 1)) return PyErr_Clear(), 0;
    PyBuffer_Release(&view);
    return 1;
}

int has_dtype(const Repeats *r, PyObject *array, PyObject *dtype) {
    PyObject *own = dtype_of(r, array);
    return own && (own == dtype || PyObject_RichCompareBool(own, dtype, Py_EQ) == 1);
}

PyObject *make_result(const Repeats *r, PyObject *shape, PyObject *dtype, u64 bytes) {
    return PyObject_CallFunctionObjArgs(bytes < r->large_bytes ? r->make_array : r->make_large_array, shape, dtype, NULL);
}

/* Takes hold of `out`, or of a new array; 1, or 0: `out` does not take the result as it is, or -1 with an error set. */
static int take_result(struct run *run, const struct form *form) {
    struct held *h = run->held;
    Py_buffer *view = &h->views[h->taken];
    struct shape shape;
    if (run->out == Py_None) {
        run->into = make_result(run->repeats, form->shape_tuple, form->dtype, form->bytes);
        if (!run->into) return -1;
    } else {
        if ((PyObject *)run->out->ob_type != run->repeats->array_type || !has_dtype(run->repeats, run->out, form->dtype)) return PyErr_Clear(), 0;
        Py_IncRef(run->into = run->out);
    }
    if (take_buffer(run->repeats->knows_arrays, run->into, view, 1)) return PyErr_Clear(), 0;
    u64 bytes = view->len == UNKNOWN_LENGTH ? form->bytes : (u64)view->len; /* dtypes are equal, and shapes have to be */
    h->starts[h->taken] = view->buf, h->lengths[h->taken++] = bytes;
    return !read_shape(&shape, view) && same_shape(&shape, &form->shape) && bytes == form->bytes;
}

static void drop_result(struct run *run) {
    if (run->into) Py_DecRef(run->into);
    run->into = NULL;
}

/* ---- Beginning ---- */

/* Whether the segment is there. Another thread may have left it whenever Python ran: it makes arrays and sees tensors. */
static int is_attached(const Engine *e) {
    return e->segment != NULL;
}

/* 1, or 0: it cannot take the arrays, or -1 with an error set. */
static int prepare_collective(struct run *run, Engine *e) {
    const struct repeat *again = run->again;
    struct held *h = run->held;
    const struct plan *plan = ((Plan *)again->plan)->plan;
    int found = 1;
    if (again->bundle) found = take_bundle(run->repeats, again->bundle, h, run->value, run->out, &run->into);
    else if (plan->leaves_in && !take_value(run)) return 0;
    else if (again->is_open && !is_writable(run)) return 0;
    else if (run->form && run->form->dtype) found = take_result(run, run->form);
    if (found <= 0) return found;
    use_leaves(h, plan->leaves_in);
    if (!again->bundle && overlap_in_part(h, plan->leaves_in)) return 0;
    take_plan(e, h, again->plan, again->nanoseconds, again->nanoseconds);
    return take_blob(h, again->blob, MAX_BLOB) ? -1 : 1;
}

static int prepare_letter(struct run *run, Engine *e) {
    const struct repeat *again = run->again;
    struct held *h = run->held;
    int found = again->kind == SEND ? take_value(run) : take_result(run, run->form);
    if (found <= 0 || !is_attached(e)) return found < 0 ? found : 0;
    address_letter(h, again->kind, again->peer, again->tag, 1);
    if (take_blob(h, run->form->blob, LETTER_BLOB)) return -1;
    if (again->kind == SEND) return 1;
    if (again->nanoseconds) h->job.deadline = engine_now(e->engine) + again->nanoseconds;
    atomic_fetch_add(&seat_of(e->segment, e->engine->seat)->posted, 1);
    return 1;
}

/* ---- What comes, where that is not known beforehand ---- */

/* The description of its value by the root of a collective, or the sender of a letter. */
static const char *told(const Engine *e, const struct job *job, u64 *length) {
    const struct segment *s = e->segment;
    if (job->kind != COLLECTIVE) {
        *length = load(&letters_of(s, job->letter.peer)[job->letter.slot].blob_bytes);
        return slot_of(s, job->letter.peer, job->letter.slot);
    }
    *length = load(&seat_of(s, job->plan->root)->record[job->instance & 1].flags) >> RECORD_BLOB_SHIFT;
    return blob_of(s, job->plan->root, job->first_tick);
}

/* Finds what has come among what had come before, and puts it first: a receive expects that. */
static struct form *find_form(const struct run *run, const Engine *e) {
    u64 length;
    const char *text = told(e, &run->held->job, &length);
    for (struct form **link = &run->again->forms, *form; (form = *link); link = &form->next) {
        char *known;
        Py_ssize_t bytes;
        if (form->blob == Py_None || PyBytes_AsStringAndSize(form->blob, &known, &bytes)) continue;
        if ((u64)bytes != length || memcmp(known, text, length)) continue;
        *link = form->next;
        form->next = run->again->forms, run->again->forms = form;
        return form;
    }
    return NULL;
}

/* Goes on with what has come, if the like has come before: 1, or 0: its caller has to find out what it is, or -1 with an
   error set, such as that of a signal's handler. */
static int describe(struct run *run, Engine *e) {
    struct held *h = run->held;
    struct form *form = run->again->bundle ? NULL : find_form(run, e);
    if (!form) return 0;
    drop_result(run);
    while (h->taken) PyBuffer_Release(&h->views[--h->taken]);
    run->form = form;
    if (take_result(run, form) <= 0) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear(); /* the long way says why */
        return 0;
    }
    if (!is_attached(e)) return 0;
    if (h->job.kind == COLLECTIVE) {
        Py_IncRef(form->plan), Py_DecRef(h->plan);
        h->plan = form->plan, h->job.plan = ((Plan *)form->plan)->plan;
        use_leaves(h, 0);
    } else if (use_letter_leaves(h) != h->job.letter.bytes) return 0;
    engine_resume(e->engine, &h->job);
    return 1;
}

static u64 bytes_moved(const struct held *h) {
    return h->job.kind == COLLECTIVE ? h->job.plan->bytes_moved : h->job.letter.bytes;
}

/* ---- Running ---- */

/* (call, form or None, value, array of the result or None, job) */
static PyObject *pack_unfinished(const struct run *run, PyObject *job) {
    PyObject *value = run->value, *into = run->into ? run->into : Py_None, *parts = NULL;
    const struct bundle *bundle = run->again->bundle; /* the caller's lists may have changed meanwhile */
    if (!bundle || !list_held(bundle, ((Job *)job)->held, &value, &into)) {
        parts = PyTuple_Pack(5, run->again->call, run->form ? run->form->form : Py_None, value, into, job);
        if (bundle) Py_DecRef(value), Py_DecRef(into);
    }
    Py_DecRef(job);
    return parts;
}

static int end_well(const struct run *run, const Engine *e) {
    const struct repeat *again = run->again;
    PyObject *number = again->kind == COLLECTIVE ? PyLong_FromLong(atomic_load(&e->engine->waiting)) : PyIter_Next(run->repeats->numbers);
    int failed = !number || (again->kind == COLLECTIVE && PyObject_SetAttr(run->repeats->standing, names.waiting, number));
    if (number) Py_DecRef(number);
    return failed ? -1 : 0;
}

static PyObject *hand_out(struct run *run) {
    PyObject *into = run->into;
    int is_number = (run->again->is_open || run->again->kind == RECEIVE) && run->out == Py_None;
    run->into = NULL;
    if (!into) return none();
    if (!is_number || run->form->shape.axes) return into;
    PyObject *nothing = PyTuple_New(0), *number = nothing ? PyObject_GetItem(into, nothing) : NULL;
    if (nothing) Py_DecRef(nothing);
    Py_DecRef(into);
    return number;
}

/* Runs it; `result` is what the caller gets, or what is not finished. */
static enum outcome carry(struct run *run, PyObject **result) {
    Engine *e = run->again->engine;
    int raised, is_collective = run->again->kind == COLLECTIVE;
    if (e->in_flight) reap(e);
    if (!is_attached(e)) return REFUSED;
    if (!(run->held = take_room(e, run->again->bundle ? bundle_size(run->again->bundle) + 1 : 2))) return FAILED_WITH_ERROR;
    int found = is_collective ? prepare_collective(run, e) : prepare_letter(run, e);
    if (found <= 0 || !is_attached(e)) {
        give_back(e, run->held);
        return found < 0 ? FAILED_WITH_ERROR : REFUSED;
    }
    engine_submit(e->engine, &run->held->job);
    int described = 1;
    do found = see_through(e, run->held, bytes_moved(run->held), &raised);
    while (found == DESCRIBE && !raised && is_attached(e) && (described = describe(run, e)) > 0);
    raised |= described < 0;
    if (!is_attached(e)) found = atomic_load(&run->held->job.state);
    PyObject *job = settle(e, run->held, found, raised);
    if (!job) return FAILED_WITH_ERROR;
    if (job != Py_None) return (*result = pack_unfinished(run, job)) ? UNFINISHED : FAILED_WITH_ERROR;
    Py_DecRef(job);
    return !end_well(run, e) && (*result = hand_out(run)) ? FINISHED : FAILED_WITH_ERROR;
}

/* The same for arrays of another library, which Python sees as NumPy's. */
static enum outcome carry_seen(struct run *run, PyObject **result) {
    PyObject *out = run->out;
    PyObject *seen = PyObject_CallFunctionObjArgs(run->again->see, run->value, out, NULL);
    if (!seen) return FAILED_WITH_ERROR;
    enum outcome outcome = REFUSED;
    if (seen != Py_None) {
        run->value = PyTuple_GetItem(seen, 0), run->out = PyTuple_GetItem(seen, 1);
        outcome = run->value && run->out ? carry(run, result) : FAILED_WITH_ERROR;
    }
    if (outcome == FINISHED && *result != Py_None) {
        PyObject *array = *result;
        if (out == Py_None) *result = PyObject_CallFunctionObjArgs(run->again->restore, array, NULL);
        else Py_IncRef(*result = out);
        Py_DecRef(array);
        if (!*result) outcome = FAILED_WITH_ERROR;
    }
    Py_DecRef(seen);
    return outcome;
}

/* Whether the call is of the generation in which this rank is, and that goes on; -1 with an error set. */
static int is_current(const Repeats *r, const struct repeat *again) {
    if (!again->engine->segment || !segment_is_ours(again->engine->epoch)) return 0;
    PyObject *verdict = PyObject_GetAttr(r->standing, names.verdict), *generation = PyObject_GetAttr(r->standing, names.generation);
    int found = !verdict || !generation ? -1 : verdict == Py_None;
    if (found > 0 && generation != again->generation) found = PyObject_RichCompareBool(generation, again->generation, Py_EQ);
    if (verdict) Py_DecRef(verdict);
    if (generation) Py_DecRef(generation);
    return found;
}

PyObject *repeats_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Repeats *r = (Repeats *)self;
    struct key key;
    Py_buffer view;
    PyObject *result = NULL;
    enum outcome outcome = REFUSED;
    view.obj = NULL;
    if (has_arguments(count, 4, "(operation, value, out, frame)")) return NULL;
    int found = read_key(r, &key, args[0], args[1], args[3], &view);
    struct repeat *again = found > 0 ? find_repeat(r, &key) : NULL;
    if (again) found = is_current(r, again);
    if (again && found > 0) {
        struct run run = {.repeats = r, .again = again, .value = args[1], .out = args[2], .view = &view};
        if (!again->is_open) run.form = again->forms;
        again->users++;
        outcome = again->see ? carry_seen(&run, &result) : carry(&run, &result);
        if (run.into) Py_DecRef(run.into);
        release_repeat(again);
    }
    if (view.obj) PyBuffer_Release(&view);
    if (found < 0 || outcome == FAILED_WITH_ERROR) return NULL;
    if (outcome != REFUSED) return result;
    Py_IncRef(r->absent);
    return r->absent;
}
