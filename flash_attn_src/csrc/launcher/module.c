/* flash_attn._launcher: loads code objects and launches their kernels through the GPU driver that is already
 * in the process. Limited API of Python 3.10, so one binary serves every later Python. Nothing is linked:
 * the few driver functions are looked up by name, and a HIP code object and a CUDA cubin go the same way.
 */
#include "kernel.h"

#include <string.h>

static PyObject *kernel_type;

PyDoc_STRVAR(bind_doc,
             "bind(platform, /)\n--\n\n"
             "Find the driver of platform 'hip' or 'cuda' and return its real path. The HIP runtime must be\n"
             "loaded already. On Linux only one may be loaded; on Windows torch's c10_hip.dll decides\n"
             "between several. The CUDA driver is loaded if it is not. A second call returns the same path.\n"
             "Raises DriverError, ValueError for another platform.");

static PyObject *
launcher_bind(PyObject *module, PyObject *argument)
{
    (void)module;
    const char *name = PyUnicode_AsUTF8AndSize(argument, NULL);
    if (name == NULL)
        return NULL;
    if (strcmp(name, "hip") != 0 && strcmp(name, "cuda") != 0)
        return PyErr_Format(PyExc_ValueError, "platform %R is neither 'hip' nor 'cuda'", argument);
    Py_BEGIN_ALLOW_THREADS
    lock_acquire(&driver.lock);
    Py_END_ALLOW_THREADS
    int done = bind_driver(name[0] == 'h' ? HIP : CUDA);
    lock_release(&driver.lock);
    return done ? PyUnicode_DecodeFSDefault(driver.path) : NULL;
}

PyDoc_STRVAR(devices_doc, "devices()\n--\n\nThe number of devices that the bound driver has; 0 is no error.");

static PyObject *
launcher_devices(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    if (!is_bound())
        return NULL;
    struct problem problem = {NONE, 0, 0};
    int count;
    Py_BEGIN_ALLOW_THREADS
    count = count_devices(&problem);
    Py_END_ALLOW_THREADS
    if (problem.kind != NONE) {
        raise_problem(&problem, "devices()");
        return NULL;
    }
    return PyLong_FromLong(count);
}

PyDoc_STRVAR(current_device_doc,
             "current_device()\n--\n\nThe calling thread's device; 0 for a CUDA thread without a context.");

static PyObject *
launcher_current_device(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    if (!is_bound())
        return NULL;
    struct problem problem = {NONE, 0, 0};
    int device = 0;
    Py_BEGIN_ALLOW_THREADS
    void *context = NULL;
    if (driver.platform == HIP)
        (void)ATTEMPT(&problem, get_device, &device);
    else if (count_devices(&problem) > 0 && ATTEMPT(&problem, get_context, &context) && context != NULL)
        (void)ATTEMPT(&problem, get_device, &device);
    Py_END_ALLOW_THREADS
    if (problem.kind != NONE) {
        raise_problem(&problem, "current_device()");
        return NULL;
    }
    return PyLong_FromLong(device);
}

/* What ask_stream() says of the stream in `arguments`: the graph, or whether it submitted. */
static PyObject *
ask(PyObject *const *arguments, Py_ssize_t count, const char *name, int query)
{
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "%s() wants a device and a stream", name);
    long long device = INT64_OF_PYTHON(arguments[0]);
    unsigned long long stream = PyErr_Occurred() ? 0 : UINT64_OF_PYTHON(arguments[1]), graph;
    if (PyErr_Occurred() || !is_bound())
        return NULL;
    struct problem problem = {NONE, 0, 0};
    int submitted;
    Py_BEGIN_ALLOW_THREADS
    graph = ask_stream(&problem, device, (void *)(uintptr_t)stream, query, &submitted);
    Py_END_ALLOW_THREADS
    if (problem.kind == NONE)
        return query ? PyBool_FromLong(submitted) : Py_BuildValue("K", graph);
    char subject[64];
    PyOS_snprintf(subject, sizeof(subject), "%s() on device %lld", name, device);
    raise_problem(&problem, subject);
    return NULL;
}

PyDoc_STRVAR(submit_doc,
             "submit(device, stream, /)\n--\n\n"
             "Make the driver submit what was launched on a stream, without waiting for it. False, and nothing\n"
             "is submitted, while the stream is captured into a graph. Raises DriverError.");

static PyObject *
launcher_submit(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    return ask(arguments, count, "submit", 1);
}

PyDoc_STRVAR(capture_doc,
             "capture(device, stream, /)\n--\n\n"
             "The number of the graph into which a stream is captured, 0 for none. Raises DriverError.");

static PyObject *
launcher_capture(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    return ask(arguments, count, "capture", 0);
}

static int
create_types(void)
{
    if (driver_error == NULL) {
        PyObject *defaults =
            Py_BuildValue("{sOsOsO}", "function", Py_None, "error", Py_None, "code", Py_None);
        driver_error = PyErr_NewExceptionWithDoc(
            "flash_attn._launcher.DriverError",
            "The driver is missing or refused. function, error and code name its call, or are None.",
            PyExc_RuntimeError, defaults);
        Py_DecRef(defaults);
    }
    if (kernel_type == NULL && driver_error != NULL)
        kernel_type = PyType_FromSpec(&kernel_spec);
    return kernel_type != NULL;
}

/* The types are kept in static variables, as the driver is one a process: only the main interpreter may have
 * them. Importing again there gives the same types. */
static int
module_exec(PyObject *module)
{
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError, "flash_attn._launcher works in the main interpreter only");
        return -1;
    }
    if (!create_types() || PyModule_AddObjectRef(module, "DriverError", driver_error) < 0 ||
        PyModule_AddObjectRef(module, "Kernel", kernel_type) < 0 ||
        PyModule_AddIntConstant(module, "MAX_PARAMS", MAX_PARAMS) < 0)
        return -1;
    return 0;
}

static PyMethodDef module_methods[] = {
    {"bind", launcher_bind, METH_O, bind_doc},
    {"devices", launcher_devices, METH_NOARGS, devices_doc},
    {"current_device", launcher_current_device, METH_NOARGS, current_device_doc},
    {"submit", FUNCTION(launcher_submit), METH_FASTCALL, submit_doc},
    {"capture", FUNCTION(launcher_capture), METH_FASTCALL, capture_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_launcher",
    .m_doc = "Loads code objects and launches their kernels through the GPU driver of this process.",
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__launcher(void)
{
    return PyModuleDef_Init(&module_definition);
}
