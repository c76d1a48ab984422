/* The type Kernel. */
#include "kernel.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* The UTF-8 text of a str, which owns it; NULL with an exception, also for one that C would cut short. */
static const char *
text_of(const char *what, PyObject *string)
{
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(string, &length);
    if (text != NULL && (length == 0 || (size_t)length != strlen(text))) {
        PyErr_Format(PyExc_ValueError, "%s %R is empty or has a null character", what, string);
        return NULL;
    }
    return text;
}

static PyObject *
kernel_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"image", "symbol", "params", "shared", "threads", "name", NULL};
    PyObject *image, *symbol, *params, *name;
    int shared, threads;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "SUUiiU:Kernel", names, &image, &symbol, &params,
                                     &shared, &threads, &name))
        return NULL;
    const char *name_text = text_of("name", name);
    const char *symbol_text = name_text == NULL ? NULL : text_of("symbol", symbol);
    if (symbol_text == NULL)
        return NULL;
    if (PyBytes_Size(image) == 0)
        return PyErr_Format(PyExc_ValueError, "kernel %s: the image is empty", name_text);
    if (threads < 1 || threads > MAX_THREADS)
        return PyErr_Format(PyExc_ValueError, "kernel %s: threads is %d, wanted 1 to %d", name_text, threads,
                            MAX_THREADS);
    if (shared < 0)
        return PyErr_Format(PyExc_ValueError, "kernel %s: shared is %d, wanted a number of bytes", name_text,
                            shared);

    struct kernel *self = (struct kernel *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_IncRef(self->image = image);
    Py_IncRef(self->symbol = symbol);
    Py_IncRef(self->params = params);
    Py_IncRef(self->name = name);
    self->image_data = PyBytes_AsString(image);
    self->symbol_text = symbol_text;
    self->name_text = name_text;
    self->shared = (unsigned)shared;
    self->threads = (unsigned)threads;
    lock_create(&self->lock);
    if (!parse_params(self)) {
        Py_DecRef((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
kernel_dealloc(PyObject *object)
{
    struct kernel *self = (struct kernel *)object;
    PyObject *type = (PyObject *)Py_TYPE(object);
    /* A loaded module stays, and with it the image that it reads. */
    if (self->functions == NULL)
        Py_DecRef(self->image);
    free(self->functions);
    Py_DecRef(self->symbol);
    Py_DecRef(self->params);
    Py_DecRef(self->name);
    lock_destroy(&self->lock);
    ((freefunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_free))(object);
    Py_DecRef(type);
}

static PyObject *
kernel_repr(PyObject *object)
{
    const struct kernel *self = (struct kernel *)object;
    return PyUnicode_FromFormat("Kernel(%R, params=%R, shared=%u, threads=%u)", self->name, self->params,
                                self->shared, self->threads);
}

static PyObject *
kernel_get_object(PyObject *object, void *offset)
{
    PyObject *value = *(PyObject **)((char *)object + (size_t)offset);
    Py_IncRef(value);
    return value;
}

static PyObject *
kernel_get_unsigned(PyObject *object, void *offset)
{
    return PyLong_FromUnsignedLong(*(unsigned *)((char *)object + (size_t)offset));
}

#define OFFSET(field) (void *)offsetof(struct kernel, field)

static PyGetSetDef kernel_getset[] = {
    {"name", kernel_get_object, NULL, "What errors call the kernel.", OFFSET(name)},
    {"symbol", kernel_get_object, NULL, "Its name in the image.", OFFSET(symbol)},
    {"params", kernel_get_object, NULL, "One letter an argument, or B or K and a number of bytes.", OFFSET(params)},
    {"shared", kernel_get_unsigned, NULL, "Dynamic shared memory, bytes a block.", OFFSET(shared)},
    {"threads", kernel_get_unsigned, NULL, "Threads a block.", OFFSET(threads)},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    kernel_doc,
    "Kernel(image, symbol, params, shared, threads, name)\n--\n\n"
    "One kernel of a code object. params has a letter an argument: P address or None, i int32, I int64,\n"
    "f float32, d float64; trailing 0: a null pointer that launch() adds by itself. At most 64. Or it is\n"
    "B and a number: the one argument is a structure of so many bytes, which launch() takes as bytes.\n"
    "Or K and a number: the bytes of all arguments, as the kernel reads them.\n"
    "shared: bytes of dynamic shared memory, threads: 1 to 1024 a block. Raises ValueError.");

static PyType_Slot kernel_slots[] = {
    {Py_tp_doc, (void *)kernel_doc},
    {Py_tp_new, kernel_new},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_repr, kernel_repr},
    {Py_tp_methods, kernel_methods},
    {Py_tp_getset, kernel_getset},
    {0, NULL},
};

PyType_Spec kernel_spec = {
    .name = "flash_attn._launcher.Kernel",
    .basicsize = sizeof(struct kernel),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = kernel_slots,
};
