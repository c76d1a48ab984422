/* flash_attn._launcher: loads code objects and launches their kernels through the GPU driver that is already
 * in the process. Limited API of Python 3.10, so one binary serves every later Python. Nothing is linked:
 * the few driver functions are looked up by name, and a HIP code object and a CUDA cubin go the same way.
 */
#define _GNU_SOURCE 1
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(long) == 8 && sizeof(void *) == 8, "arguments are packed for a 64-bit Linux");

enum {
    MAX_PARAMS = 64,
    MAX_STRUCTURE = 4096, /* bytes of all arguments of a kernel, in both drivers */
    MAX_THREADS = 1024,
    LEADING = 5,              /* device, stream, grid_x, grid_y, grid_z */
    CAPTURE_MODE_RELAXED = 2, /* the same number in both drivers, as are all of these */
    ERROR_NO_DEVICE = 100,
    ATTRIBUTE_MAX_DYNAMIC_SHARED = 8,
    CUDA_DEFAULT_SHARED = 48 * 1024 /* bytes a CUDA kernel may use before it has to ask for more */
};

/* ---- the driver ---- */

enum platform { HIP, CUDA };

/* X(field, result, arguments, name in HIP, name in CUDA); NULL where a platform needs no such function. */
#define DRIVER_FUNCTIONS(X)                                                                                  \
    X(module_load, int, (void **, const void *), "hipModuleLoadData", "cuModuleLoadData")                    \
    X(module_unload, int, (void *), "hipModuleUnload", "cuModuleUnload")                                     \
    X(module_function, int, (void **, void *, const char *), "hipModuleGetFunction", "cuModuleGetFunction")  \
    X(launch, int,                                                                                           \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,        \
       void **),                                                                                             \
      "hipModuleLaunchKernel", "cuLaunchKernel")                                                             \
    X(function_attribute, int, (int *, int, void *), "hipFuncGetAttribute", "cuFuncGetAttribute")            \
    X(exchange_capture_mode, int, (int *), "hipThreadExchangeStreamCaptureMode",                             \
      "cuThreadExchangeStreamCaptureMode")                                                                   \
    X(device_count, int, (int *), "hipGetDeviceCount", "cuDeviceGetCount")                                   \
    X(get_device, int, (int *), "hipGetDevice", "cuCtxGetDevice")                                            \
    X(set_device, int, (int), "hipSetDevice", NULL)                                                          \
    X(last_error, int, (void), "hipGetLastError", NULL)                                                      \
    X(hip_error_name, const char *, (int), "hipGetErrorName", NULL)                                          \
    X(hip_error_string, const char *, (int), "hipGetErrorString", NULL)                                      \
    X(cuda_error_name, int, (int, const char **), NULL, "cuGetErrorName")                                    \
    X(cuda_error_string, int, (int, const char **), NULL, "cuGetErrorString")                                \
    X(init, int, (unsigned), NULL, "cuInit")                                                                 \
    X(device_handle, int, (int *, int), NULL, "cuDeviceGet")                                                 \
    X(retain_context, int, (void **, int), NULL, "cuDevicePrimaryCtxRetain")                                 \
    X(get_context, int, (void **), NULL, "cuCtxGetCurrent")                                                  \
    X(set_context, int, (void *), NULL, "cuCtxSetCurrent")                                                   \
    X(push_context, int, (void *), NULL, "cuCtxPushCurrent_v2")                                              \
    X(pop_context, int, (void **), NULL, "cuCtxPopCurrent_v2")                                               \
    X(set_function_attribute, int, (void *, int, int), NULL, "cuFuncSetAttribute")

#define AS_FIELD(field, result, arguments, hip, cuda)  result(*field) arguments;
#define AS_INDEX(field, result, arguments, hip, cuda)  INDEX_##field,
#define AS_NAMES(field, result, arguments, hip, cuda)  {hip, cuda},
#define AS_OFFSET(field, result, arguments, hip, cuda) offsetof(struct functions, field),

struct functions {
    DRIVER_FUNCTIONS(AS_FIELD)
};
enum function_index { DRIVER_FUNCTIONS(AS_INDEX) FUNCTION_COUNT };
static const char *const function_names[FUNCTION_COUNT][2] = {DRIVER_FUNCTIONS(AS_NAMES)};
static const size_t function_offsets[FUNCTION_COUNT] = {DRIVER_FUNCTIONS(AS_OFFSET)};

/* Process-wide, like the driver. Written under `lock`; `bound` and `devices` are published last and never
 * change afterwards. This lock and a kernel's are waited for without the GIL: their holder may want it. */
static struct {
    pthread_mutex_t lock;
    int bound;
    enum platform platform;
    char path[PATH_MAX];
    struct functions call;
    int devices;     /* -1 until the driver was asked */
    void **contexts; /* CUDA: the retained primary context of each device, or NULL */
} driver = {.lock = PTHREAD_MUTEX_INITIALIZER, .devices = -1};

static PyObject *driver_error;
static PyObject *kernel_type;

/* What went wrong while the GIL was released: the first failure, told by raise_problem() afterwards. */
struct problem {
    enum { NONE, DRIVER_FAILED, NO_SUCH_DEVICE, NO_MEMORY } kind;
    enum function_index function;
    int code;
};

static int
attempt(struct problem *problem, enum function_index function, int code)
{
    if (code == 0)
        return 1;
    if (problem->kind == NONE)
        *problem = (struct problem){DRIVER_FAILED, function, code};
    /* HIP remembers the failure for this thread, and torch's next launch check would report it as its own. */
    if (driver.platform == HIP)
        driver.call.last_error();
    return 0;
}

#define ATTEMPT(problem, field, ...) attempt(problem, INDEX_##field, driver.call.field(__VA_ARGS__))

static int
is_bound(void)
{
    if (__atomic_load_n(&driver.bound, __ATOMIC_ACQUIRE))
        return 1;
    PyErr_SetString(driver_error, "no driver is bound: call bind('hip') or bind('cuda') first");
    return 0;
}

/* Raises DriverError(message) with the attributes function, error and code. Steals message. */
static void
raise_driver_error(PyObject *message, const char *function, const char *error, int code)
{
    if (message == NULL)
        return;
    PyObject *exception = PyObject_CallFunctionObjArgs(driver_error, message, NULL);
    PyObject *details = exception == NULL ? NULL : Py_BuildValue("(ssi)", function, error, code);
    if (details != NULL && PyObject_SetAttrString(exception, "function", PyTuple_GetItem(details, 0)) == 0 &&
        PyObject_SetAttrString(exception, "error", PyTuple_GetItem(details, 1)) == 0 &&
        PyObject_SetAttrString(exception, "code", PyTuple_GetItem(details, 2)) == 0)
        PyErr_SetObject(driver_error, exception);
    Py_DecRef(details);
    Py_DecRef(exception);
    Py_DecRef(message);
}

/* subject: whose call failed, such as "kernel attn_fwd on device 0". */
static void
raise_problem(const struct problem *problem, const char *subject)
{
    if (problem->kind == NO_MEMORY) {
        PyErr_NoMemory();
        return;
    }
    if (problem->kind == NO_SUCH_DEVICE) {
        if (driver.devices == 0)
            PyErr_Format(driver_error, "%s: no device: %s reports none", subject, driver.path);
        else
            PyErr_Format(driver_error, "%s: no such device, there are %d, numbered from 0", subject,
                         driver.devices);
        return;
    }
    const char *name = NULL, *text = NULL;
    if (driver.platform == HIP) {
        name = driver.call.hip_error_name(problem->code);
        text = driver.call.hip_error_string(problem->code);
    } else {
        if (driver.call.cuda_error_name(problem->code, &name) != 0)
            name = NULL;
        if (driver.call.cuda_error_string(problem->code, &text) != 0)
            text = NULL;
    }
    const char *function = function_names[problem->function][driver.platform];
    name = name != NULL ? name : "unknown error";
    PyObject *message =
        PyUnicode_FromFormat("%s: %s failed: %s (%d)%s%s", subject, function, name, problem->code,
                             text != NULL ? ": " : "", text != NULL ? text : "");
    raise_driver_error(message, function, name, problem->code);
}

/* Asks for the number of devices once. Needs no GIL. */
static int
count_devices(struct problem *problem)
{
    int count = __atomic_load_n(&driver.devices, __ATOMIC_ACQUIRE);
    if (count >= 0)
        return count;
    pthread_mutex_lock(&driver.lock);
    count = driver.devices;
    if (count < 0) {
        int code = driver.platform == CUDA ? driver.call.init(0) : 0;
        enum function_index function = code != 0 ? INDEX_init : INDEX_device_count;
        int found = 0;
        if (code == 0)
            code = driver.call.device_count(&found);
        if (code == ERROR_NO_DEVICE) {
            attempt(&(struct problem){NONE, 0, 0}, function, code);
            code = 0;
            found = 0;
        }
        void **contexts = calloc(found > 0 ? (size_t)found : 1, sizeof(void *));
        if (contexts == NULL)
            *problem = (struct problem){.kind = NO_MEMORY};
        else if (attempt(problem, function, code)) {
            driver.contexts = contexts;
            __atomic_store_n(&driver.devices, found, __ATOMIC_RELEASE);
            count = found;
        } else
            free(contexts);
    }
    pthread_mutex_unlock(&driver.lock);
    return count;
}

/* The primary context of a CUDA device, retained once and for the life of the process, as torch does. */
static void *
primary_context(struct problem *problem, int device)
{
    void *context = __atomic_load_n(&driver.contexts[device], __ATOMIC_ACQUIRE);
    if (context != NULL)
        return context;
    pthread_mutex_lock(&driver.lock);
    context = driver.contexts[device];
    int handle = 0;
    if (context == NULL && ATTEMPT(problem, device_handle, &handle, device) &&
        ATTEMPT(problem, retain_context, &context, handle))
        __atomic_store_n(&driver.contexts[device], context, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&driver.lock);
    return problem->kind == NONE ? context : NULL;
}

struct visit {
    int switched;
    int previous; /* HIP: the device to return to */
};

/* Makes `device`, known to exist, the thread's current one. A CUDA thread without a context keeps the one
 * that it is given. */
static int
enter(struct problem *problem, int device, struct visit *visit)
{
    visit->switched = 0;
    if (driver.platform == HIP) {
        if (!ATTEMPT(problem, get_device, &visit->previous))
            return 0;
        if (visit->previous == device)
            return 1;
        return visit->switched = ATTEMPT(problem, set_device, device);
    }
    void *wanted = primary_context(problem, device), *current = NULL;
    if (wanted == NULL || !ATTEMPT(problem, get_context, &current))
        return 0;
    if (current == wanted)
        return 1;
    if (current == NULL)
        return ATTEMPT(problem, set_context, wanted);
    return visit->switched = ATTEMPT(problem, push_context, wanted);
}

static void
leave(struct problem *problem, const struct visit *visit)
{
    void *popped;
    if (!visit->switched)
        return;
    if (driver.platform == HIP)
        (void)ATTEMPT(problem, set_device, visit->previous);
    else
        (void)ATTEMPT(problem, pop_context, &popped);
}

/* ---- finding the driver ---- */

struct search {
    int found; /* different files */
    char loaded_as[PATH_MAX];
    char real[2][PATH_MAX];
};

static int
visit_library(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    struct search *search = data;
    const char *name = info->dlpi_name != NULL ? info->dlpi_name : "";
    const char *slash = strrchr(name, '/');
    if (strncmp(slash != NULL ? slash + 1 : name, "libamdhip64", strlen("libamdhip64")) != 0)
        return 0;
    char real[PATH_MAX];
    if (realpath(name, real) == NULL)
        snprintf(real, sizeof(real), "%s", name); /* the file was replaced since it was loaded */
    if (search->found > 0 && strcmp(real, search->real[0]) == 0)
        return 0;
    if (search->found == 0)
        snprintf(search->loaded_as, sizeof(search->loaded_as), "%s", name);
    memcpy(search->real[search->found++], real, sizeof(real));
    return search->found == 2;
}

static void *
find_hip(struct search *search)
{
    dl_iterate_phdr(visit_library, search);
    if (search->found == 1) {
        void *library = dlopen(search->loaded_as, RTLD_LAZY | RTLD_NOLOAD);
        if (library == NULL)
            PyErr_Format(driver_error, "%s is loaded but cannot be opened: %s", search->loaded_as, dlerror());
        return library;
    }
    if (search->found == 0)
        PyErr_SetString(driver_error,
                        "no HIP runtime is loaded in this process: import a ROCm build of torch first");
    else
        PyErr_Format(
            driver_error,
            "two HIP runtimes are loaded in this process, and memory of one is unknown to the other: "
            "%s and %s; keep only the one that torch brings",
            search->real[0], search->real[1]);
    return NULL;
}

static void *
find_cuda(struct search *search)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL) {
        PyErr_Format(driver_error, "no CUDA driver: %s; install the NVIDIA driver", dlerror());
        return NULL;
    }
    struct link_map *map = NULL;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || realpath(map->l_name, search->real[0]) == NULL)
        snprintf(search->real[0], PATH_MAX, "libcuda.so.1");
    return library;
}

static int
bind_locked(enum platform platform)
{
    static const char *const platforms[] = {"hip", "cuda"};
    if (driver.bound) {
        if (driver.platform == platform)
            return 1;
        PyErr_Format(driver_error, "already bound to %s (%s): a process launches on one platform only",
                     platforms[driver.platform], driver.path);
        return 0;
    }
    struct search *search = calloc(1, sizeof(*search));
    if (search == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    void *library = platform == HIP ? find_hip(search) : find_cuda(search);
    for (int index = 0; library != NULL && index < FUNCTION_COUNT; index++) {
        const char *name = function_names[index][platform];
        void *address = name != NULL ? dlsym(library, name) : NULL;
        if (name != NULL && address == NULL) {
            PyErr_Format(driver_error, "%s has no function %s: the driver is too old or not a driver",
                         search->real[0], name);
            dlclose(library);
            library = NULL;
        }
        memcpy((char *)&driver.call + function_offsets[index], &address, sizeof(address));
    }
    if (library != NULL) {
        memcpy(driver.path, search->real[0], sizeof(driver.path));
        driver.platform = platform;
        __atomic_store_n(&driver.bound, 1, __ATOMIC_RELEASE);
    }
    free(search);
    return library != NULL;
}

PyDoc_STRVAR(bind_doc,
             "bind(platform, /)\n--\n\n"
             "Find the driver of platform 'hip' or 'cuda' and return its real path. The HIP runtime must be\n"
             "loaded already, exactly one; libcuda.so.1 is loaded if it is not. Again: the same answer.\n"
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
    pthread_mutex_lock(&driver.lock);
    Py_END_ALLOW_THREADS
    int done = bind_locked(name[0] == 'h' ? HIP : CUDA);
    pthread_mutex_unlock(&driver.lock);
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

/* ---- Kernel ---- */

struct kernel {
    PyObject_HEAD
    PyObject *image;  /* bytes: a HIP module reads it as long as it lives */
    PyObject *symbol; /* str, as are the next two; the pointers below point into these objects */
    PyObject *name;
    PyObject *params;
    const void *image_data;
    const char *symbol_text;
    const char *name_text;
    pthread_mutex_t lock; /* held while loading */
    void **functions;     /* one a device, allocated by the first load; entries are published once */
    unsigned shared;
    unsigned threads;
    unsigned structure;   /* bytes of the one argument of params such as "B216", else 0 */
    unsigned char total;  /* arguments of the kernel */
    unsigned char passed; /* those that the caller passes; the rest are null pointers */
    char letters[MAX_PARAMS];
};

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
    pthread_mutex_lock(&self->lock);
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
    pthread_mutex_unlock(&self->lock);
    return problem->kind == NONE ? function : NULL;
}

static void
raise_kernel_problem(const struct kernel *self, const struct problem *problem, int device)
{
    char subject[256];
    snprintf(subject, sizeof(subject), "kernel %.200s on device %d", self->name_text, device);
    raise_problem(problem, subject);
}

/* Says which argument could not be converted, in place of Python's own error. */
static void
explain_argument(const struct kernel *self, Py_ssize_t index, PyObject *value)
{
    const char *wanted;
    switch (self->letters[index]) {
    case 'P': wanted = "an address from 0 to 2**64-1, or None"; break;
    case 'i': wanted = "an int of 32 bits"; break;
    case 'I': wanted = "an int of 64 bits"; break;
    case 'f': wanted = "a float of 32 bits"; break;
    default: wanted = "a float of 64 bits"; break;
    }
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_OverflowError, "kernel %s: argument %zd is %R, wanted %s", self->name_text, index,
                     value, wanted);
    } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyObject *type = PyObject_Type(value);
        PyErr_Format(PyExc_TypeError, "kernel %s: argument %zd is of %R, wanted %s", self->name_text, index,
                     type, wanted);
        Py_DecRef(type);
    }
}

union slot {
    uint64_t address;
    int32_t i32;
    int64_t i64;
    float f32;
    double f64;
};

static int
pack_argument(char letter, PyObject *value, union slot *slot)
{
    switch (letter) {
    case 'P':
        if (value == Py_None) {
            slot->address = 0;
            return 1;
        }
        slot->address = PyLong_AsUnsignedLong(value);
        return slot->address != UINT64_MAX || !PyErr_Occurred();
    case 'i': {
        long number = PyLong_AsLong(value);
        if (number == -1 && PyErr_Occurred())
            return 0;
        slot->i32 = (int32_t)number;
        if (slot->i32 == number)
            return 1;
        PyErr_SetNone(PyExc_OverflowError);
        return 0;
    }
    case 'I': slot->i64 = PyLong_AsLong(value); return slot->i64 != -1 || !PyErr_Occurred();
    default: {
        double number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred())
            return 0;
        if (letter == 'd') {
            slot->f64 = number;
            return 1;
        }
        slot->f32 = (float)number;
        if (!isinf(slot->f32) || isinf(number))
            return 1;
        PyErr_SetNone(PyExc_OverflowError);
        return 0;
    }
    }
}

/* A whole number from 0 to `limit`; -1 with an exception. */
static long
leading_argument(const struct kernel *self, const char *what, PyObject *value, long limit)
{
    long number = PyLong_AsLong(value);
    if (number >= 0 && number <= limit)
        return number;
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_OverflowError, "kernel %s: %s is %R, wanted 0 to %ld", self->name_text, what,
                     value, limit);
    }
    return -1;
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

    long device = leading_argument(self, "device", arguments[0], INT_MAX);
    if (device < 0)
        return NULL;
    void *stream = (void *)PyLong_AsUnsignedLong(arguments[1]);
    if (stream == (void *)UINTPTR_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return PyErr_Format(PyExc_TypeError, "kernel %s: stream is %R, wanted its address, or 0",
                            self->name_text, arguments[1]);
    }
    long grid_x = leading_argument(self, "grid_x", arguments[2], UINT_MAX);
    long grid_y = grid_x < 0 ? -1 : leading_argument(self, "grid_y", arguments[3], UINT_MAX);
    long grid_z = grid_y < 0 ? -1 : leading_argument(self, "grid_z", arguments[4], UINT_MAX);
    if (grid_z < 0)
        return NULL;

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
        if (!pack_argument(self->letters[index], arguments[LEADING + index], &slots[index])) {
            explain_argument(self, index, arguments[LEADING + index]);
            return NULL;
        }
    }
    for (; index < self->total; index++) {
        slots[index].address = 0;
        addresses[index] = &slots[index];
    }

    if (grid_x != 0 && grid_y != 0 && grid_z != 0) {
        struct problem problem = {NONE, 0, 0};
        Py_BEGIN_ALLOW_THREADS
        void *function = require_function(self, (int)device, &problem);
        struct visit visit;
        if (function != NULL && enter(&problem, (int)device, &visit)) {
            (void)ATTEMPT(&problem, launch, function, (unsigned)grid_x, (unsigned)grid_y, (unsigned)grid_z,
                          self->threads, 1, 1, self->shared, stream, addresses, NULL);
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
    long number = leading_argument(self, "device", argument, INT_MAX);
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

/* Fills total, passed and letters from a string such as "PPif0"; 0 with an exception. */
static int
parse_params(struct kernel *self)
{
    Py_ssize_t length;
    const char *params = PyUnicode_AsUTF8AndSize(self->params, &length);
    if (params == NULL)
        return 0;
    if (params[0] == 'B') {
        char *end;
        unsigned long size = strtoul(params + 1, &end, 10);
        if (params[1] < '1' || params[1] > '9' || end != params + length || size > MAX_STRUCTURE) {
            PyErr_Format(PyExc_ValueError, "kernel %s: params %R, B wants a number of bytes from 1 to %d",
                         self->name_text, self->params, MAX_STRUCTURE);
            return 0;
        }
        self->structure = (unsigned)size;
        self->total = self->passed = 1;
        return 1;
    }
    if (length > MAX_PARAMS) {
        PyErr_Format(PyExc_ValueError, "kernel %s: %zd params, at most %d", self->name_text, length,
                     MAX_PARAMS);
        return 0;
    }
    for (Py_ssize_t index = 0; index < length; index++) {
        if (params[index] == '\0' || strchr("PiIfd0", params[index]) == NULL) {
            PyErr_Format(PyExc_ValueError, "kernel %s: params %R, letter %zd is none of P i I f d 0",
                         self->name_text, self->params, index);
            return 0;
        }
        if (params[index] != '0' && self->passed != index) {
            PyErr_Format(PyExc_ValueError, "kernel %s: params %R, a 0 before letter %zd: they come last",
                         self->name_text, self->params, index);
            return 0;
        }
        self->letters[index] = params[index];
        self->total++;
        if (params[index] != '0')
            self->passed++;
    }
    return 1;
}

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
    pthread_mutex_init(&self->lock, NULL);
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
    pthread_mutex_destroy(&self->lock);
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
    {"params", kernel_get_object, NULL, "One letter an argument, or B and a number of bytes.", OFFSET(params)},
    {"shared", kernel_get_unsigned, NULL, "Dynamic shared memory, bytes a block.", OFFSET(shared)},
    {"threads", kernel_get_unsigned, NULL, "Threads a block.", OFFSET(threads)},
    {NULL, NULL, NULL, NULL, NULL},
};

#define FUNCTION(function) (PyCFunction)(void (*)(void)) function

static PyMethodDef kernel_methods[] = {
    {"launch", FUNCTION(kernel_launch), METH_FASTCALL, launch_doc},
    {"load", kernel_load, METH_O, load_doc},
    {"attributes", kernel_attributes, METH_O, attributes_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    kernel_doc,
    "Kernel(image, symbol, params, shared, threads, name)\n--\n\n"
    "One kernel of a code object. params has a letter an argument: P address or None, i int32, I int64,\n"
    "f float32, d float64; trailing 0: a null pointer that launch() adds by itself. At most 64. Or it is\n"
    "B and a number: the one argument is a structure of so many bytes, which launch() takes as bytes.\n"
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

static PyType_Spec kernel_spec = {
    .name = "flash_attn._launcher.Kernel",
    .basicsize = sizeof(struct kernel),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = kernel_slots,
};

/* ---- the module ---- */

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
