/* binding.c: the module `collectived_native._core`. */
#include "arithmetic_binding.h"
#include "stable_abi.h"

#ifndef SOURCE_DIGEST
#error "built by native/compile_core.py, which says of which sources this is"
#endif

static int fill(PyObject *module) {
    return PyModule_AddStringConstant(module, "source_digest", SOURCE_DIGEST);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0, NULL}};
static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_core",
    .m_doc = "The native core of collectived.",
    .m_methods = arithmetic_methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) {
    return PyModuleDef_Init(&definition);
}
