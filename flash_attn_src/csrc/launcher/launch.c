/* A kernel on a device: loading, launching, asking. */
#include "kernel.h"

#include <stdlib.h>

enum {
    LEADING = 5, /* device, stream, grid_x, grid_y, grid_z */
    ATTRIBUTE_MAX_DYNAMIC_SHARED = 8, /* the same number in both drivers */
    CUDA_DEFAULT_SHARED = 48 * 1024 /* bytes a CUDA kernel may use before it has to ask for more */
};

/* What names the parts of a launch whose arguments are one buffer; the end is named differently by each driver. */
#define BUFFER_POINTER ((void *)1)
#define BUFFER_SIZE ((void *)2)
#define BUFFER_END (driver.platform == HIP ? (void *)3 : NULL)

static void *
loaded_function(struct kernel *self, int device)
{
    void **functions = __atomic_load_n(&self->functions, __ATOMIC_ACQUIRE);
    if (functions == NULL || device < 0 || device >= driver.devices)
        return NULL;
    return __atomic_load_n(&functions[device], __ATOMIC_ACQUIRE);
}

/* Loads the image on the current device. A module of which no function came is unloaded again; others stay as
 * long as the process, since a launch in flight or a captured graph may still need them. */
static void *
load_function(struct kernel *self, struct problem *problem)
{
    void *module = NULL, *function = NULL;
    int mode = CAPTURE_MODE_RELAXED;
    /* Loading allocates, which a stream capture of this or another thread would otherwise forbid. */
    if (!ATTEMPT(problem, exchange_capture_mode, &mode))
        return NULL;
    if (ATTEMPT(problem, module_load, &module, self->image_data)) {
        int ready = ATTEMPT(problem, module_function, &function, module, self->symbol_text);
        if (ready && function == NULL) {
            problem->kind = NO_FUNCTION; /* a launch of it would be left out in silence */
            ready = 0;
        }
        if (ready && driver.platform == CUDA && self->shared > CUDA_DEFAULT_SHARED)
            ready = ATTEMPT(problem, set_function_attribute, function, ATTRIBUTE_MAX_DYNAMIC_SHARED,
                            (int)self->shared);
        if (!ready)
            (void)ATTEMPT(problem, module_unload, module);
    }
    (void)ATTEMPT(problem, exchange_capture_mode, &mode);
    return problem->kind == NONE ? function : NULL;
}

/* The kernel's function on a device, loaded there if it was not yet; NULL with the problem. Needs no GIL. */
static void *
require_function(struct kernel *self, int device, struct problem *problem)
{
    void *function = loaded_function(self, device);
    if (function != NULL)
        return function;
    int count = count_devices(problem);
    if (problem->kind != NONE)
        return NULL;
    if (device < 0 || device >= count) {
        problem->kind = NO_SUCH_DEVICE;
        return NULL;
    }
    lock_acquire(&self->lock);
    if (self->functions == NULL) {
        void **functions = calloc((size_t)count, sizeof(void *));
        if (functions == NULL)
            problem->kind = NO_MEMORY;
        __atomic_store_n(&self->functions, functions, __ATOMIC_RELEASE);
    }
    struct visit visit;
    function = loaded_function(self, device);
    if (problem->kind == NONE && function == NULL && enter(problem, device, &visit)) {
        function = load_function(self, problem);
        leave(problem, &visit);
        if (function != NULL)
            __atomic_store_n(&self->functions[device], function, __ATOMIC_RELEASE);
    }
    lock_release(&self->lock);
    return problem->kind == NONE ? function : NULL;
}

static void
raise_kernel_problem(const struct kernel *self, const struct problem *problem, int device)
{
    char subject[256];
    PyOS_snprintf(subject, sizeof(subject), "kernel %.200s on device %d", self->name_text, device);
    raise_problem(problem, subject);
}

PyDoc_STRVAR(launch_doc,
             "launch($self, device, stream, grid_x, grid_y, grid_z, /, *args)\n--\n\n"
             "Launch on a stream of a device, loading the kernel there the first time; the thread's current\n"
             "device is kept. A grid with a zero launches nothing. Asynchronous: the memory behind the\n"
             "addresses must live until the stream has run. Raises TypeError for a wrong argument count or\n"
             "type, OverflowError for a number that does not fit, DriverError.");

static PyObject *
kernel_launch(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    struct kernel *self = (struct kernel *)object;
    if (count != LEADING + self->passed)
        return PyErr_Format(PyExc_TypeError,
                            "kernel %s wants %d arguments after device, stream and grid, got %zd in all "
                            "(wanted %d)",
                            self->name_text, self->passed, count, LEADING + self->passed);
    if (!is_bound())
        return NULL;

    long long device = leading_argument(self, "device", arguments[0], INT_MAX);
    if (device < 0)
        return NULL;
    void *stream = (void *)(uintptr_t)UINT64_OF_PYTHON(arguments[1]);
    if (stream == (void *)UINTPTR_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return PyErr_Format(PyExc_TypeError, "kernel %s: stream is %R, wanted its address, or 0",
                            self->name_text, arguments[1]);
    }
    long long grid_x = leading_argument(self, "grid_x", arguments[2], UINT_MAX);
    long long grid_y = grid_x < 0 ? -1 : leading_argument(self, "grid_y", arguments[3], UINT_MAX);
    long long grid_z = grid_y < 0 ? -1 : leading_argument(self, "grid_z", arguments[4], UINT_MAX);
    if (grid_z < 0)
        return NULL;
    /* HIP counts them in 32 bits: some releases refuse what is beyond, others launch a part of it in silence. */
    if (driver.platform == HIP && (unsigned long long)grid_x * self->threads > UINT_MAX)
        return PyErr_Format(PyExc_OverflowError,
                            "kernel %s: %lld blocks of %u threads are more than the 2**32 - 1 threads that a launch "
                            "on an AMD GPU may have: pass fewer rows or sequences at once",
                            self->name_text, grid_x, self->threads);

    union slot slots[MAX_PARAMS];
    void *addresses[MAX_PARAMS];
    int index = 0;
    if (self->structure != 0) {
        char *bytes;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(arguments[LEADING], &bytes, &size) < 0)
            return NULL;
        if (size != (Py_ssize_t)self->structure)
            return PyErr_Format(PyExc_ValueError, "kernel %s: argument 0 has %zd bytes, wanted %u",
                                self->name_text, size, self->structure);
        addresses[index++] = bytes;
    }
    for (; index < self->passed; index++) {
        addresses[index] = &slots[index];
        if (!pack_argument(self, index, arguments[LEADING + index], &slots[index]))
            return NULL;
    }
    for (; index < self->total; index++) {
        slots[index].address = 0;
        addresses[index] = &slots[index];
    }

    if (grid_x != 0 && grid_y != 0 && grid_z != 0) {
        struct problem problem = {NONE, 0, 0};
        size_t size = self->structure;
        void *buffer[] = {BUFFER_POINTER, size != 0 ? addresses[0] : NULL, BUFFER_SIZE, &size, BUFFER_END};
        Py_BEGIN_ALLOW_THREADS
        void *function = require_function(self, (int)device, &problem);
        struct visit visit;
        if (function != NULL && enter(&problem, (int)device, &visit)) {
            (void)ATTEMPT(&problem, launch, function, (unsigned)grid_x, (unsigned)grid_y, (unsigned)grid_z,
                          self->threads, 1, 1, self->shared, stream, self->whole ? NULL : addresses,
                          self->whole ? buffer : NULL);
            leave(&problem, &visit);
        }
        Py_END_ALLOW_THREADS
        if (problem.kind != NONE) {
            raise_kernel_problem(self, &problem, (int)device);
            return NULL;
        }
    }
    Py_IncRef(Py_None);
    return Py_None;
}

/* Loads on the device given as a Python int; NULL with an exception. */
static void *
load_on(struct kernel *self, PyObject *argument, int *device)
{
    if (!is_bound())
        return NULL;
    long long number = leading_argument(self, "device", argument, INT_MAX);
    if (number < 0)
        return NULL;
    *device = (int)number;
    struct problem problem = {NONE, 0, 0};
    void *function;
    Py_BEGIN_ALLOW_THREADS
    function = require_function(self, *device, &problem);
    Py_END_ALLOW_THREADS
    if (function == NULL)
        raise_kernel_problem(self, &problem, *device);
    return function;
}

PyDoc_STRVAR(load_doc, "load($self, device, /)\n--\n\nLoad on a device, if it is not loaded there yet.");

static PyObject *
kernel_load(PyObject *object, PyObject *argument)
{
    int device;
    if (load_on((struct kernel *)object, argument, &device) == NULL)
        return NULL;
    Py_IncRef(Py_None);
    return Py_None;
}

PyDoc_STRVAR(
    attributes_doc,
    "attributes($self, device, /)\n--\n\n"
    "What the driver says of the kernel on a device, loading it there if need be: a dict of registers\n"
    "(a thread), local_bytes (a thread), static_shared_bytes (a block) and max_threads (a block).");

static PyObject *
kernel_attributes(PyObject *object, PyObject *argument)
{
    static const struct {
        const char *key;
        int attribute;
    } wanted[] = {{"registers", 4}, {"local_bytes", 3}, {"static_shared_bytes", 1}, {"max_threads", 0}};
    struct kernel *self = (struct kernel *)object;
    int device;
    void *function = load_on(self, argument, &device);
    if (function == NULL)
        return NULL;

    int values[4] = {0};
    struct problem problem = {NONE, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    struct visit visit;
    if (enter(&problem, device, &visit)) {
        for (int index = 0; index < 4 && problem.kind == NONE; index++)
            (void)ATTEMPT(&problem, function_attribute, &values[index], wanted[index].attribute, function);
        leave(&problem, &visit);
    }
    Py_END_ALLOW_THREADS
    if (problem.kind != NONE) {
        raise_kernel_problem(self, &problem, device);
        return NULL;
    }
    return Py_BuildValue("{sisisisi}", wanted[0].key, values[0], wanted[1].key, values[1], wanted[2].key,
                         values[2], wanted[3].key, values[3]);
}

PyMethodDef kernel_methods[] = {
    {"launch", FUNCTION(kernel_launch), METH_FASTCALL, launch_doc},
    {"load", kernel_load, METH_O, load_doc},
    {"attributes", kernel_attributes, METH_O, attributes_doc},
    {NULL, NULL, 0, NULL},
};
