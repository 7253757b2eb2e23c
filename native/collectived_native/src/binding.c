/* binding.c: the module `collectived_native._core`. */
#include <stdlib.h>

#include "arithmetic_binding.h"
#include "carrier.h"
#include "compression.h"
#include "compression_binding.h"
#include "letters.h"
#include "objects.h"
#include "repeats.h"

#ifndef SOURCE_DIGEST
#error "built by native/compile_core.py, which says of which sources this is"
#endif

#define NUMBER(name) {#name, name}
static const struct {
    const char *name;
    int value;
} NUMBERS[] = {
    NUMBER(COMPLETE), NUMBER(LOST), NUMBER(LEFT), NUMBER(DEADLINE), NUMBER(ABORTED), NUMBER(INTERRUPTED), NUMBER(MISMATCH),
    NUMBER(NONSENSE), NUMBER(WORKER), NUMBER(STOPPED), NUMBER(FAILED), NUMBER(CANCELLED), NUMBER(EXPIRED), NUMBER(DETACHED),
    NUMBER(NO_ROOM), NUMBER(BY_DOORBELL), NUMBER(PENDING), NUMBER(KNOCK), NUMBER(DESCRIBE), NUMBER(WORKER_SEAT), NUMBER(MAX_BLOB),
    NUMBER(ALL_REDUCE), NUMBER(REDUCE), NUMBER(BROADCAST), NUMBER(ALL_GATHER), NUMBER(GATHER), NUMBER(SCATTER),
    NUMBER(REDUCE_SCATTER), NUMBER(ALL_TO_ALL), NUMBER(BARRIER), NUMBER(ACROSS), NUMBER(MEETS_NOT), NUMBER(MEETS_EQUAL),
    NUMBER(MEETS_KNOWN), NUMBER(MEETS_ANY), NUMBER(SENDS), NUMBER(RECEIVES), NUMBER(SCHEDULE_VERSION), NUMBER(MAX_SEATS),
    {"MAX_AXES", MOST_AXES}, {"MAX_LETTER_BLOB", LETTER_BLOB}, {"MAX_LETTERS", LETTERS}, {"BLOCKING", 0}, {"QUIET", 1}, {"NOTIFYING", 2},
    NUMBER(COLLECTIVE), NUMBER(SEND), NUMBER(RECEIVE), NUMBER(BLOCK_VALUES), NUMBER(MOVE_SEND), NUMBER(MOVE_RECEIVE),
    NUMBER(MOVE_KEEP), NUMBER(MOVE_FOLD), NUMBER(MOVE_FINISH), NUMBER(MOVE_COPY), NUMBER(LATE), NUMBER(MOST_ROUTES), NUMBER(MOST_WIRES),
    NUMBER(ORDER_RUN), NUMBER(ORDER_STAGE), NUMBER(ORDER_PING), NUMBER(ORDER_LINK), NUMBER(ANSWER_DONE), NUMBER(ANSWER_STAGED), NUMBER(ANSWER_PONG),
    NUMBER(ANSWER_BROKEN), NUMBER(ANSWER_REFUSED), NUMBER(MOST_LINKS),
};

static int add_type(PyTypeObject **type, PyType_Spec *spec) {
    if (!*type) *type = (PyTypeObject *)PyType_FromSpec(spec); /* kept forever: one module per process */
    return *type ? 0 : -1;
}

static int fill(PyObject *module) {
    for (size_t i = 0; i < sizeof NUMBERS / sizeof *NUMBERS; i++)
        if (PyModule_AddIntConstant(module, NUMBERS[i].name, NUMBERS[i].value)) return -1;
    if (add_type(&plan_type, &plan_spec) || add_type(&job_type, &job_spec) || add_type(&engine_type, &engine_spec) ||
        add_type(&watcher_type, &watcher_spec) || add_type(&repeats_type, &repeats_spec) || add_type(&crossings_type, &crossings_spec) ||
        add_type(&carrier_type, &carrier_spec))
        return -1;
    return PyModule_AddStringConstant(module, "source_digest", SOURCE_DIGEST);
}

enum { MOST_FUNCTIONS = 32 };
static PyMethodDef functions[MOST_FUNCTIONS];
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};
static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_core",
    .m_doc = "The native core of collectived.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) {
    PyMethodDef *const tables[] = {arithmetic_methods, compression_functions, engine_functions, watcher_functions,
                                   repeats_functions, crossings_functions, carrier_functions};
    PyMethodDef *end = functions;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const PyMethodDef *one = tables[i]; one->ml_name && end < functions + MOST_FUNCTIONS - 1; one++) *end++ = *one;
    return PyModuleDef_Init(&definition);
}
