/* Calls of the driver: what went wrong, how many devices there are, and which one is current. */
#include "driver.h"

#include <stdlib.h>

enum { ERROR_NO_DEVICE = 100 /* in both drivers */ };

#define AS_NAMES(field, result, arguments, hip, cuda) {hip, cuda},
const char *const function_names[FUNCTION_COUNT][2] = {DRIVER_FUNCTIONS(AS_NAMES)};

struct driver driver = {.lock = LOCK_INITIALIZER, .devices = -1};

PyObject *driver_error;

int
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

int
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

void
raise_problem(const struct problem *problem, const char *subject)
{
    if (problem->kind == NO_MEMORY) {
        PyErr_NoMemory();
        return;
    }
    if (problem->kind == NO_FUNCTION) {
        const char *name = function_names[INDEX_module_function][driver.platform];
        PyErr_Format(driver_error, "%s: %s reports success and gives no function: nothing can be launched", subject,
                     name);
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

int
count_devices(struct problem *problem)
{
    int count = __atomic_load_n(&driver.devices, __ATOMIC_ACQUIRE);
    if (count >= 0)
        return count;
    lock_acquire(&driver.lock);
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
    lock_release(&driver.lock);
    return count;
}

/* The primary context of a CUDA device, retained once and for the life of the process, as torch does. */
static void *
primary_context(struct problem *problem, int device)
{
    void *context = __atomic_load_n(&driver.contexts[device], __ATOMIC_ACQUIRE);
    if (context != NULL)
        return context;
    lock_acquire(&driver.lock);
    context = driver.contexts[device];
    int handle = 0;
    if (context == NULL && ATTEMPT(problem, device_handle, &handle, device) &&
        ATTEMPT(problem, retain_context, &context, handle))
        __atomic_store_n(&driver.contexts[device], context, __ATOMIC_RELEASE);
    lock_release(&driver.lock);
    return problem->kind == NONE ? context : NULL;
}

int
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

void
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

/* A failure that is an answer: HIP must not keep it as this thread's last error. */
static void
forget(enum function_index function, int code)
{
    (void)attempt(&(struct problem){NONE, 0, 0}, function, code);
}

/* On Windows, HIP collects 256 commands before the system sees one. A query of a stream ends the collection (ROCm/clr,
 * hip_stream.cpp, palvirtual.cpp). It would break a capture of this stream, and in a capture mode other than relaxed
 * also captures of other streams. */
static int
query_stream(struct problem *problem, void *stream)
{
    int mode = CAPTURE_MODE_RELAXED;
    if (!ATTEMPT(problem, exchange_capture_mode, &mode))
        return 0;
    int code = driver.call.stream_query(stream);
    if (code == STREAM_NOT_READY)
        forget(INDEX_stream_query, code);
    else
        (void)attempt(problem, INDEX_stream_query, code);
    (void)ATTEMPT(problem, exchange_capture_mode, &mode);
    return problem->kind == NONE;
}

unsigned long long
ask_stream(struct problem *problem, long long device, void *stream, int query, int *submitted)
{
    int count = count_devices(problem), status = 0;
    unsigned long long graph = 0;
    struct visit visit;
    *submitted = 0;
    if (problem->kind == NONE && (device < 0 || device >= count))
        problem->kind = NO_SUCH_DEVICE;
    if (problem->kind != NONE || !enter(problem, (int)device, &visit))
        return 0;
    int code = driver.call.stream_capture(stream, &status, &graph);
    if (code == STREAM_CAPTURE_IMPLICIT) /* the default stream waits for a stream that is captured */
        forget(INDEX_stream_capture, code);
    else if (attempt(problem, INDEX_stream_capture, code) && status == 0 && query)
        *submitted = query_stream(problem, stream);
    leave(problem, &visit);
    return status == 0 ? 0 : graph;
}
