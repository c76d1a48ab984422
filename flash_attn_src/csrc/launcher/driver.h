/* The GPU driver of this process: its functions by name, and what every call of them needs. */
#ifndef FLASH_ATTN_DRIVER_H
#define FLASH_ATTN_DRIVER_H

#include "system.h"

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

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
    X(stream_query, int, (void *), "hipStreamQuery", "cuStreamQuery")                                        \
    X(stream_capture, int, (void *, int *, unsigned long long *), "hipStreamGetCaptureInfo",                 \
      "cuStreamGetCaptureInfo")                                                                              \
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

#define AS_FIELD(field, result, arguments, hip, cuda) result(*field) arguments;
#define AS_INDEX(field, result, arguments, hip, cuda) INDEX_##field,

struct functions {
    DRIVER_FUNCTIONS(AS_FIELD)
};
enum function_index { DRIVER_FUNCTIONS(AS_INDEX) FUNCTION_COUNT };
extern const char *const function_names[FUNCTION_COUNT][2];

/* Process-wide, like the driver. Written under `lock`; `bound` and `devices` are published last and never
 * change afterwards. This lock and a kernel's are waited for without the GIL: their holder may want it. */
struct driver {
    lock_type lock;
    int bound;
    enum platform platform;
    const char *path;
    struct functions call;
    int devices;     /* -1 until the driver was asked */
    void **contexts; /* CUDA: the retained primary context of each device, or NULL */
};
extern struct driver driver;

extern PyObject *driver_error; /* DriverError */

/* What went wrong while the GIL was released: the first failure, told by raise_problem() afterwards. */
struct problem {
    enum { NONE, DRIVER_FAILED, NO_FUNCTION, NO_SUCH_DEVICE, NO_MEMORY } kind;
    enum function_index function;
    int code;
};

/* One call of the driver: whether it succeeded. */
int attempt(struct problem *problem, enum function_index function, int code);
#define ATTEMPT(problem, field, ...) attempt(problem, INDEX_##field, driver.call.field(__VA_ARGS__))

/* subject: whose call failed, such as "kernel attn_fwd on device 0". */
void raise_problem(const struct problem *problem, const char *subject);

/* Finds the driver of a platform and binds it; 0 with an exception. Under `driver.lock`. */
int bind_driver(enum platform platform);

/* Whether a driver is bound; 0 with an exception. */
int is_bound(void);

/* Asks for the number of devices once. Needs no GIL. */
int count_devices(struct problem *problem);

/* In both drivers, as all numbers of errors and modes here. */
enum { CAPTURE_MODE_RELAXED = 2, STREAM_NOT_READY = 600, STREAM_CAPTURE_IMPLICIT = 906 };

struct visit {
    int switched;
    int previous; /* HIP: the device to return to */
};

/* Makes `device`, known to exist, the thread's current one, until leave(). A CUDA thread without a context
 * keeps the one that it is given. */
int enter(struct problem *problem, int device, struct visit *visit);
void leave(struct problem *problem, const struct visit *visit);

/* The number of the graph into which a stream of a device is captured, 0 for none. Where `query` is set and there is no
 * capture, makes the driver submit what was launched on the stream: *submitted says whether. Needs no GIL. */
unsigned long long ask_stream(struct problem *problem, long long device, void *stream, int query, int *submitted);

#endif
