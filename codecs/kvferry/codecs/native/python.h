// What the library uses of the running Python: functions of its stable ABI (3.10 and newer), declared here so that no
// headers of any Python are needed to build, and one build serves them all. They are weak: the library also loads
// without a Python, and then nothing here may be called.
#ifndef KVC_PYTHON_H
#define KVC_PYTHON_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PY_WEAK __attribute__((weak))

typedef struct py_object PyObject; // never looked into
typedef struct py_thread PyThreadState;
typedef PyObject *(*py_call)(PyObject *self, PyObject *const *args, ssize_t count);

typedef struct {
    const char *name;
    py_call call;
    int flags;
    const char *doc;
} PyMethodDef;

typedef struct {
    void *buf;
    PyObject *obj;
    ssize_t len, itemsize;
    int readonly, ndim;
    char *format;
    ssize_t *shape, *strides, *suboffsets;
    void *internal;
} Py_buffer;

enum { PY_FASTCALL = 0x80, PY_WRITABLE = 1 };

extern PY_WEAK PyObject _Py_NoneStruct; // None
extern PY_WEAK PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *self, PyObject *module);
extern PY_WEAK PyObject *PyCapsule_New(void *, const char *name, void (*destroy)(PyObject *));
extern PY_WEAK void *PyCapsule_GetPointer(PyObject *, const char *name);
extern PY_WEAK void Py_IncRef(PyObject *);
extern PY_WEAK void Py_DecRef(PyObject *);
extern PY_WEAK PyObject *PyObject_Type(PyObject *);
extern PY_WEAK PyObject *PyObject_GetAttr(PyObject *, PyObject *name);
extern PY_WEAK PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
extern PY_WEAK PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *name, ...);
extern PY_WEAK int PyObject_IsTrue(PyObject *);
extern PY_WEAK int PyObject_GetBuffer(PyObject *, Py_buffer *, int flags);
extern PY_WEAK void PyBuffer_Release(Py_buffer *);
extern PY_WEAK PyObject *PyUnicode_InternFromString(const char *);
extern PY_WEAK ssize_t PySequence_Size(PyObject *);
extern PY_WEAK PyObject *PySequence_GetItem(PyObject *, ssize_t);
extern PY_WEAK ssize_t PyList_Size(PyObject *);
extern PY_WEAK int PyList_Append(PyObject *, PyObject *);
extern PY_WEAK int PyList_SetSlice(PyObject *, ssize_t first, ssize_t end, PyObject *);
extern PY_WEAK PyObject *PyTuple_New(ssize_t);
extern PY_WEAK int PyTuple_SetItem(PyObject *, ssize_t, PyObject *);
extern PY_WEAK PyObject *PyTuple_GetItem(PyObject *, ssize_t);
extern PY_WEAK PyObject *PyDict_GetItemWithError(PyObject *, PyObject *key);
extern PY_WEAK int PySet_Contains(PyObject *, PyObject *);
extern PY_WEAK PyObject *PyBytes_FromStringAndSize(const char *, ssize_t);
extern PY_WEAK int PyBytes_AsStringAndSize(PyObject *, char **, ssize_t *);
extern PY_WEAK PyObject *PyLong_FromLong(long);
extern PY_WEAK long PyLong_AsLong(PyObject *);
extern PY_WEAK PyObject *PyLong_FromUnsignedLongLong(unsigned long long);
extern PY_WEAK unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
extern PY_WEAK double PyFloat_AsDouble(PyObject *);
extern PY_WEAK PyThreadState *PyEval_SaveThread(void);
extern PY_WEAK void PyEval_RestoreThread(PyThreadState *);
extern PY_WEAK PyObject *PyErr_Occurred(void);
extern PY_WEAK void PyErr_Clear(void);
extern PY_WEAK int PyErr_CheckSignals(void);

#endif
