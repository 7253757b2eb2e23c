/* stable_abi.h: the part of CPython's stable ABI (3.11) that the core uses, declared here.
 *
 * Many systems with Python have no Python.h (Debian without python3-dev, most images), and the stable ABI promises
 * that these names, values and structures never change for CPython 3.x with a GIL. So the core declares what it needs
 * and is built wherever a C compiler is. tests/native/test_stable_abi.py compares this file with Python.h where there
 * is one; `make wheels` runs abi3audit over the result. Free-threaded builds have another PyObject and are refused
 * before the core is loaded (collectived_native/__init__.py).
 */
#ifndef COLLECTIVED_STABLE_ABI_H
#define COLLECTIVED_STABLE_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "the core of collectived needs a 64-bit little-endian processor"
#endif

typedef ssize_t Py_ssize_t;

/* Only what stands at the start of heap types and of a module definition may look inside an object. */
typedef struct _object {
    Py_ssize_t ob_refcnt;
    struct _typeobject *ob_type;
} PyObject;
typedef struct _typeobject PyTypeObject;

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef PyObject *(*PyCFunctionFast)(PyObject *, PyObject *const *, Py_ssize_t);
typedef void (*PyCapsule_Destructor)(PyObject *);
typedef struct _ts PyThreadState;
typedef struct _frame PyFrameObject;
typedef struct PyCodeObject PyCodeObject;
typedef int PyGILState_STATE;

typedef struct {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;
enum { METH_VARARGS = 0x1, METH_NOARGS = 0x4, METH_O = 0x8, METH_FASTCALL = 0x80 };
/* A row of a method table for a METH_FASTCALL function. */
#define FAST_METHOD(name, function, doc) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, doc}

typedef struct {
    int slot;
    void *value;
} PyModuleDef_Slot;
enum { Py_mod_create = 1, Py_mod_exec = 2 };

typedef struct {
    PyObject m_base_object;
    PyObject *(*m_init)(void);
    Py_ssize_t m_index;
    PyObject *m_copy;
} PyModuleDef_Base;
#define PyModuleDef_HEAD_INIT {{1, NULL}, NULL, 0, NULL}

typedef struct PyModuleDef {
    PyModuleDef_Base m_base;
    const char *m_name;
    const char *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    PyModuleDef_Slot *m_slots;
    int (*m_traverse)(PyObject *, int (*)(PyObject *, void *), void *);
    int (*m_clear)(PyObject *);
    void (*m_free)(void *);
} PyModuleDef;

typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len;
    Py_ssize_t itemsize;
    int readonly;
    int ndim;
    char *format;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    Py_ssize_t *suboffsets;
    void *internal;
} Py_buffer;
enum { PyBUF_SIMPLE = 0, PyBUF_WRITABLE = 0x1, PyBUF_ND = 0x8, PyBUF_READ = 0x100, PyBUF_WRITE = 0x200 };

typedef struct {
    int slot;
    void *pfunc;
} PyType_Slot;
typedef struct {
    const char *name;
    int basicsize;
    int itemsize;
    unsigned int flags;
    PyType_Slot *slots;
} PyType_Spec;
enum { Py_tp_dealloc = 52, Py_tp_doc = 56, Py_tp_methods = 64 };
enum { Py_TPFLAGS_DEFAULT = 0, Py_TPFLAGS_DISALLOW_INSTANTIATION = 1 << 7 };

#define STABLE extern __attribute__((visibility("default")))
#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *

/* Modules and objects */
STABLE PyObject *PyModuleDef_Init(PyModuleDef *);
STABLE int PyModule_AddObjectRef(PyObject *, const char *, PyObject *);
STABLE int PyModule_AddIntConstant(PyObject *, const char *, long);
STABLE int PyModule_AddStringConstant(PyObject *, const char *, const char *);
STABLE void Py_IncRef(PyObject *);
STABLE void Py_DecRef(PyObject *);
STABLE int PyObject_IsTrue(PyObject *);
STABLE PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
STABLE PyObject *PyObject_GetAttr(PyObject *, PyObject *);
STABLE int PyObject_SetAttr(PyObject *, PyObject *, PyObject *);
STABLE PyObject *PyObject_GetItem(PyObject *, PyObject *);
enum { Py_EQ = 2 };
STABLE int PyObject_RichCompareBool(PyObject *, PyObject *, int);
STABLE PyObject *PyIter_Next(PyObject *);
STABLE PyCodeObject *PyFrame_GetCode(PyFrameObject *);
STABLE PyObject _Py_NoneStruct;
#define Py_None (&_Py_NoneStruct)

STABLE PyObject *PyType_FromSpec(PyType_Spec *);
STABLE PyObject *PyType_GenericAlloc(PyTypeObject *, Py_ssize_t);
STABLE void *PyType_GetSlot(PyTypeObject *, int);
STABLE void PyObject_Free(void *);

/* Numbers, text, bytes, sequences */
STABLE long PyLong_AsLong(PyObject *);
STABLE long long PyLong_AsLongLong(PyObject *);
STABLE unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
STABLE PyObject *PyLong_FromLong(long);
STABLE PyObject *PyLong_FromLongLong(long long);
STABLE PyObject *PyLong_FromUnsignedLongLong(unsigned long long);
STABLE PyObject *PyBool_FromLong(long);
STABLE double PyFloat_AsDouble(PyObject *);
STABLE PyObject *PyFloat_FromDouble(double);
STABLE PyObject *PyUnicode_FromString(const char *);
STABLE PyObject *PyUnicode_InternFromString(const char *);
STABLE PyObject *PyUnicode_FromStringAndSize(const char *, Py_ssize_t);
STABLE const char *PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *);
STABLE PyObject *PyBytes_FromStringAndSize(const char *, Py_ssize_t);
STABLE int PyBytes_AsStringAndSize(PyObject *, char **, Py_ssize_t *);
STABLE PyObject *PyTuple_New(Py_ssize_t);
STABLE PyObject *PyTuple_Pack(Py_ssize_t, ...);
STABLE int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
STABLE PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
STABLE Py_ssize_t PyTuple_Size(PyObject *);
STABLE PyTypeObject PyList_Type;
STABLE PyObject *PyList_New(Py_ssize_t);
STABLE Py_ssize_t PyList_Size(PyObject *);
STABLE PyObject *PyList_GetItem(PyObject *, Py_ssize_t);
STABLE int PyList_SetItem(PyObject *, Py_ssize_t, PyObject *);
STABLE int PyList_Append(PyObject *, PyObject *);
STABLE PyObject *PySequence_GetItem(PyObject *, Py_ssize_t);
STABLE Py_ssize_t PySequence_Size(PyObject *);

/* Memory of other libraries, and memory of this one that they hold */
STABLE int PyObject_GetBuffer(PyObject *, Py_buffer *, int);
STABLE void PyBuffer_Release(Py_buffer *);
STABLE PyObject *PyMemoryView_FromMemory(char *, Py_ssize_t, int);
STABLE PyObject *PyCapsule_New(void *, const char *, PyCapsule_Destructor);
STABLE void *PyCapsule_GetPointer(PyObject *, const char *);
STABLE int PyCapsule_IsValid(PyObject *, const char *);

/* Errors and signals */
STABLE PyObject *PyExc_BufferError, *PyExc_Exception, *PyExc_IndexError, *PyExc_MemoryError, *PyExc_OSError, *PyExc_OverflowError, *PyExc_RuntimeError,
    *PyExc_TypeError, *PyExc_ValueError;
STABLE void PyErr_SetString(PyObject *, const char *);
STABLE PyObject *PyErr_Format(PyObject *, const char *, ...);
STABLE PyObject *PyErr_SetFromErrno(PyObject *);
STABLE PyObject *PyErr_NoMemory(void);
STABLE PyObject *PyErr_Occurred(void);
STABLE void PyErr_Clear(void);
STABLE int PyErr_ExceptionMatches(PyObject *);
STABLE void PyErr_WriteUnraisable(PyObject *);
STABLE int PyErr_CheckSignals(void);

/* The GIL */
STABLE PyThreadState *PyEval_SaveThread(void);
STABLE void PyEval_RestoreThread(PyThreadState *);
STABLE PyGILState_STATE PyGILState_Ensure(void);
STABLE void PyGILState_Release(PyGILState_STATE);

#endif
