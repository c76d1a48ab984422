/* A driver without a device, for test_launcher.py: the calls that the launcher makes, written to a log that
 * fake_driver.py reads. Compiled as libamdhip64.so.6, and with -DFAKE_CUDA as libcuda.so.1; for Windows as amdhip64_7.dll.
 *
 * The image of a module is its kernel's own list of parameter letters ("PPif0", "B24", "K24"), so a launch
 * knows how many bytes each argument has. Each thread has a stream capture mode, 0 (global) at first.
 *
 * Launches are queued as HIP queues them on Windows (ROCm/clr of 2026: palvirtual.hpp, palvirtual.cpp, commandqueue.cpp,
 * hip_stream.cpp): a barrier and a dispatch each, and all that a stream has queued becomes one submission when more than
 * 256 are, when this stream is queried, or when something waits. Work runs after its submission, so the query that
 * submits answers "not ready". A query in a capture of a graph breaks the capture, and launches there are not queued.
 */
#define _GNU_SOURCE 1
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#include "fake_driver_windows.h"
#define API __declspec(dllexport)
#else
#include <pthread.h>
#include <time.h>
#include <unistd.h>
#define API __attribute__((visibility("default")))
#endif

enum {
    LOG_SIZE = 1 << 20,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_IMPLICIT = 906
};
enum { MAX_COMMANDS = 256, COMMANDS_OF_LAUNCH = 2, RELAXED = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char text[LOG_SIZE];
static size_t text_length;
static int quiet, device_count = 2, load_milliseconds, meeting, met;
static char failing[64];
static int failing_code;
static __thread int capture_mode;
static char submissions[LOG_SIZE];
static size_t submissions_length;
enum { STREAMS = 16 };
static struct queue {
    void *stream;
    int used, commands;
    char blocks[1 << 14];
    size_t length;
} queues[STREAMS];
static void *captured_stream;
static int capturing, capture_broken;
static unsigned long long graphs;

static void
note(const char *format, ...)
{
    va_list arguments;
    if (quiet)
        return;
    pthread_mutex_lock(&lock);
    va_start(arguments, format);
    text_length += (size_t)vsnprintf(text + text_length, LOG_SIZE - text_length, format, arguments);
    va_end(arguments);
    pthread_mutex_unlock(&lock);
}

/* The error that the test asked of this function, once; else 0. */
static int
told_to_fail(const char *function)
{
    if (failing_code == 0 || strcmp(failing, function) != 0)
        return 0;
    int code = failing_code;
    failing_code = 0;
    return code;
}

enum { NOTHING = -1 }; /* the code of a call that succeeds and gives nothing */

#define MAY_FAIL()                                                                                           \
    do {                                                                                                     \
        int code_ = told_to_fail(__func__);                                                                  \
        if (code_ != 0)                                                                                      \
            return code_ == NOTHING ? 0 : code_;                                                             \
    } while (0)

/* ---- what the test says and reads ---- */

API void fake_reset(void);
API const char *fake_log(void);
API void fake_fail(const char *function, int code);
API void fake_set_devices(int count);
API void fake_set_load_milliseconds(int duration);
API void fake_set_quiet(int value);
API void fake_set_meeting(int threads);
API void fake_set_capture_mode(int mode);
API int fake_capture_mode(void);
API const char *fake_submissions(void);
API void fake_begin_capture(void *stream);
API int fake_end_capture(void);

void
fake_reset(void)
{
    text_length = 0;
    text[0] = '\0';
    failing_code = 0;
    meeting = met = 0;
    load_milliseconds = 0;
    submissions_length = 0;
    submissions[0] = '\0';
    memset(queues, 0, sizeof(queues));
}

static struct queue *
queue_of(void *stream)
{
    struct queue *queue = queues;
    while (queue->used && queue->stream != stream && queue < queues + STREAMS - 1)
        queue++;
    queue->used = 1;
    queue->stream = stream;
    return queue;
}

/* Makes one submission of what a stream has queued: a line with the stream, and the number of blocks of each launch. */
static void
submit(struct queue *queue)
{
    if (queue->commands > 0)
        submissions_length +=
            (size_t)snprintf(submissions + submissions_length, LOG_SIZE - submissions_length, "%llu%s\n",
                             (unsigned long long)(uintptr_t)queue->stream, queue->blocks);
    queue->commands = 0;
    queue->length = 0;
}

static void
enqueue(void *stream, const unsigned *sizes)
{
    pthread_mutex_lock(&lock);
    if (!capturing || stream != captured_stream) {
        struct queue *queue = queue_of(stream);
        queue->length += (size_t)snprintf(queue->blocks + queue->length, sizeof(queue->blocks) - queue->length, " %u",
                                          sizes[0] * sizes[1] * sizes[2]);
        queue->commands += COMMANDS_OF_LAUNCH;
        if (queue->commands > MAX_COMMANDS)
            submit(queue);
    }
    pthread_mutex_unlock(&lock);
}

/* The submissions so far, one per line. Waits, which submits the rest. */
const char *
fake_submissions(void)
{
    pthread_mutex_lock(&lock);
    for (int index = 0; index < STREAMS; index++)
        submit(&queues[index]);
    pthread_mutex_unlock(&lock);
    return submissions;
}

void
fake_begin_capture(void *stream)
{
    captured_stream = stream;
    capturing = 1;
    capture_broken = 0;
    graphs++;
}

/* Whether the capture is still whole. */
int
fake_end_capture(void)
{
    capturing = 0;
    return !capture_broken;
}

const char *
fake_log(void)
{
    return text;
}

/* The next call of the function returns the code, 0 for NOTHING, and does nothing. */
void
fake_fail(const char *function, int code)
{
    snprintf(failing, sizeof(failing), "%s", function);
    failing_code = code;
}

void
fake_set_devices(int count)
{
    device_count = count;
}

void
fake_set_load_milliseconds(int duration)
{
    load_milliseconds = duration;
}

/* Quiet: nothing is logged. */
void
fake_set_quiet(int value)
{
    quiet = value;
}

/* Each launch waits until this many threads are in one; after 5 s without them it returns 999. */
void
fake_set_meeting(int threads)
{
    meeting = threads;
}

void
fake_set_capture_mode(int mode)
{
    capture_mode = mode;
}

int
fake_capture_mode(void)
{
    return capture_mode;
}

/* ---- modules and functions ---- */

/* What ends the description of a buffer that holds all arguments. */
#ifdef FAKE_CUDA
#define BUFFER_END NULL
#else
#define BUFFER_END ((void *)3)
#endif

struct function {
    const char *letters; /* the image itself: a driver that reads it later must find it alive */
    int dynamic_shared;
    int device;
};

static int
load(const char *name, int device, void **module, const void *image)
{
    struct function *function = calloc(1, sizeof(*function));
    function->letters = image;
    function->device = device;
    usleep((useconds_t)load_milliseconds * 1000);
    note("%s device=%d mode=%d image=%s\n", name, device, capture_mode, (const char *)image);
    *module = function;
    return 0;
}

static int
wait_for_others(void)
{
    struct timespec until;
    int late = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    pthread_mutex_lock(&lock);
    met++;
    pthread_cond_broadcast(&changed);
    while (met < meeting && !late)
        late = pthread_cond_timedwait(&changed, &lock, &until);
    pthread_mutex_unlock(&lock);
    return late ? 999 : 0;
}

static int
launch(const char *name, int device, const struct function *function, const unsigned *sizes, unsigned shared,
       void *stream, void **parameters, void **extra)
{
    char arguments[2 * 4096 + 2] = "";
    size_t length = 0, count = strlen(function->letters);
    const int whole = function->letters[0] == 'K';
    const size_t structure = whole || function->letters[0] == 'B' ? (size_t)atol(function->letters + 1) : 0;
    if (meeting > 0)
        return wait_for_others();
    enqueue(stream, sizes);
    if (quiet)
        return 0;
    if (structure != 0)
        count = 1;
    if (whole != (extra != NULL) || whole != (parameters == NULL))
        return 998;
    if (whole && (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != BUFFER_END ||
                  *(size_t *)extra[3] != structure))
        return 997;
    for (size_t index = 0; index < count; index++) {
        size_t size = function->letters[index] == 'i' || function->letters[index] == 'f' ? 4 : 8;
        size = structure != 0 ? structure : size;
        const unsigned char *bytes = whole ? extra[1] : parameters[index];
        for (size_t byte = 0; byte < size; byte++)
            length += (size_t)sprintf(arguments + length, "%02x", bytes[byte]);
        length += (size_t)sprintf(arguments + length, ",");
    }
    note("%s device=%d loaded=%d stream=%llu grid=%u,%u,%u block=%u,%u,%u shared=%u args=%s\n", name, device,
         function->device, (unsigned long long)(uintptr_t)stream, sizes[0], sizes[1], sizes[2], sizes[3],
         sizes[4], sizes[5], shared, arguments);
    return 0;
}

static int
exchange(const char *name, int *mode)
{
    int previous = capture_mode;
    note("%s %d\n", name, *mode);
    capture_mode = *mode;
    *mode = previous;
    return 0;
}

static int
query(void *stream)
{
    if (capturing && (stream == captured_stream || (stream != NULL && capture_mode != RELAXED))) {
        capture_broken = 1;
        return CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_lock(&lock);
    struct queue *queue = queue_of(stream);
    int busy = queue->commands > 0;
    submit(queue);
    pthread_mutex_unlock(&lock);
    return busy ? NOT_READY : 0;
}

static int
capture_info(void *stream, int *status, unsigned long long *graph)
{
    if (capturing && stream == NULL)
        return CAPTURE_IMPLICIT;
    *status = capturing && stream == captured_stream ? 1 + capture_broken : 0;
    if (*status == 1)
        *graph = graphs;
    return 0;
}

static int
attribute(int *value, int which, const struct function *function)
{
    static const int values[] = {256, 512, 0, 16, 64, 0, 0, 0};
    *value = which == 8 ? function->dynamic_shared : values[which & 7];
    return 0;
}

#ifndef FAKE_CUDA

static __thread int current_device;

API const char *hipGetErrorName(int code);
API const char *hipGetErrorString(int code);
API int hipGetLastError(void);
API int hipGetDeviceCount(int *count);
API int hipGetDevice(int *device);
API int hipSetDevice(int device);
API int hipModuleLoadData(void **module, const void *image);
API int hipModuleUnload(void *module);
API int hipModuleGetFunction(void **function, void *module, const char *symbol);
API int hipFuncGetAttribute(int *value, int which, void *function);
API int hipThreadExchangeStreamCaptureMode(int *mode);
API int hipStreamQuery(void *stream);
API int hipStreamGetCaptureInfo(void *stream, int *status, unsigned long long *graph);
API int hipModuleLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                              void *stream, void **parameters, void **extra);

const char *
hipGetErrorName(int code)
{
    return code == 209 ? "hipErrorNoBinaryForGpu" : "hipErrorOther";
}

const char *
hipGetErrorString(int code)
{
    return code == 209 ? "no kernel image is available" : "other";
}

int
hipGetLastError(void)
{
    note("%s\n", __func__);
    return 0;
}

int
hipGetDeviceCount(int *count)
{
    MAY_FAIL();
    *count = device_count;
    return device_count == 0 ? NO_DEVICE : 0;
}

int
hipGetDevice(int *device)
{
    *device = current_device;
    return 0;
}

int
hipSetDevice(int device)
{
    MAY_FAIL();
    note("%s %d\n", __func__, device);
    if (device < 0 || device >= device_count)
        return INVALID_DEVICE;
    current_device = device;
    return 0;
}

int
hipModuleLoadData(void **module, const void *image)
{
    MAY_FAIL();
    return load(__func__, current_device, module, image);
}

int
hipModuleUnload(void *module)
{
    note("%s\n", __func__);
    free(module);
    return 0;
}

int
hipModuleGetFunction(void **function, void *module, const char *symbol)
{
    MAY_FAIL();
    note("%s %s\n", __func__, symbol);
    *function = module;
    return 0;
}

int
hipFuncGetAttribute(int *value, int which, void *function)
{
    MAY_FAIL();
    return attribute(value, which, function);
}

int
hipThreadExchangeStreamCaptureMode(int *mode)
{
    MAY_FAIL();
    return exchange(__func__, mode);
}

int
hipStreamQuery(void *stream)
{
    MAY_FAIL();
    return query(stream);
}

int
hipStreamGetCaptureInfo(void *stream, int *status, unsigned long long *graph)
{
    MAY_FAIL();
    return capture_info(stream, status, graph);
}

#ifndef FAKE_OLD
int
hipModuleLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                      void **extra)
{
    const unsigned sizes[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
    MAY_FAIL();
    return launch(__func__, current_device, function, sizes, shared, stream, parameters, extra);
}
#endif

#else /* FAKE_CUDA */

static int initialized;
static __thread void *contexts[8];
static __thread int depth; /* contexts[depth] is the current one; the first may be NULL */

/* The primary context of a device is an address that tells its number. */
static void *
context_of(int device)
{
    return (void *)(uintptr_t)(0x1000 + device);
}

#define CURRENT        (contexts[depth])
#define CURRENT_DEVICE ((int)((uintptr_t)CURRENT - 0x1000))
#define NEED_CONTEXT()                                                                                       \
    do {                                                                                                     \
        MAY_FAIL();                                                                                          \
        if (!initialized)                                                                                    \
            return NOT_INITIALIZED;                                                                          \
        if (CURRENT == NULL)                                                                                 \
            return INVALID_CONTEXT;                                                                          \
    } while (0)

API int cuGetErrorName(int code, const char **name);
API int cuGetErrorString(int code, const char **string);
API int cuInit(unsigned flags);
API int cuDeviceGetCount(int *count);
API int cuDeviceGet(int *device, int ordinal);
API int cuDevicePrimaryCtxRetain(void **context, int device);
API int cuCtxGetCurrent(void **context);
API int cuCtxGetDevice(int *device);
API int cuCtxSetCurrent(void *context);
API int cuCtxPushCurrent_v2(void *context);
API int cuCtxPopCurrent_v2(void **context);
API int cuModuleLoadData(void **module, const void *image);
API int cuModuleUnload(void *module);
API int cuModuleGetFunction(void **function, void *module, const char *symbol);
API int cuFuncGetAttribute(int *value, int which, void *function);
API int cuFuncSetAttribute(void *function, int which, int value);
API int cuThreadExchangeStreamCaptureMode(int *mode);
API int cuStreamQuery(void *stream);
API int cuStreamGetCaptureInfo(void *stream, int *status, unsigned long long *graph);
API int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                       void **extra);

int
cuGetErrorName(int code, const char **name)
{
    *name = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_OTHER";
    return code == 12345 ? 1 : 0;
}

int
cuGetErrorString(int code, const char **string)
{
    *string = code == 209 ? "no kernel image is available" : "other";
    return code == 12345 ? 1 : 0;
}

int
cuInit(unsigned flags)
{
    (void)flags;
    MAY_FAIL();
    initialized = 1;
    return device_count == 0 ? NO_DEVICE : 0;
}

int
cuDeviceGetCount(int *count)
{
    *count = device_count;
    return initialized ? 0 : NOT_INITIALIZED;
}

int
cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return initialized ? 0 : NOT_INITIALIZED;
}

int
cuDevicePrimaryCtxRetain(void **context, int device)
{
    MAY_FAIL();
    note("%s %d\n", __func__, device);
    *context = context_of(device);
    return 0;
}

int
cuCtxGetCurrent(void **context)
{
    *context = CURRENT;
    return initialized ? 0 : NOT_INITIALIZED;
}

int
cuCtxGetDevice(int *device)
{
    NEED_CONTEXT();
    *device = CURRENT_DEVICE;
    return 0;
}

int
cuCtxSetCurrent(void *context)
{
    note("%s %d\n", __func__, (int)((uintptr_t)context - 0x1000));
    CURRENT = context;
    return 0;
}

int
cuCtxPushCurrent_v2(void *context)
{
    note("%s %d\n", __func__, (int)((uintptr_t)context - 0x1000));
    contexts[++depth] = context;
    return 0;
}

int
cuCtxPopCurrent_v2(void **context)
{
    NEED_CONTEXT();
    note("%s\n", __func__);
    *context = contexts[depth--];
    return 0;
}

int
cuModuleLoadData(void **module, const void *image)
{
    NEED_CONTEXT();
    return load(__func__, CURRENT_DEVICE, module, image);
}

int
cuModuleUnload(void *module)
{
    NEED_CONTEXT();
    note("%s\n", __func__);
    free(module);
    return 0;
}

int
cuModuleGetFunction(void **function, void *module, const char *symbol)
{
    NEED_CONTEXT();
    note("%s %s\n", __func__, symbol);
    *function = module;
    return 0;
}

int
cuFuncGetAttribute(int *value, int which, void *function)
{
    NEED_CONTEXT();
    return attribute(value, which, function);
}

int
cuFuncSetAttribute(void *function, int which, int value)
{
    NEED_CONTEXT();
    note("%s %d %d\n", __func__, which, value);
    if (which == 8)
        ((struct function *)function)->dynamic_shared = value;
    return 0;
}

int
cuThreadExchangeStreamCaptureMode(int *mode)
{
    MAY_FAIL();
    return exchange(__func__, mode);
}

int
cuStreamQuery(void *stream)
{
    NEED_CONTEXT();
    return query(stream);
}

int
cuStreamGetCaptureInfo(void *stream, int *status, unsigned long long *graph)
{
    NEED_CONTEXT();
    return capture_info(stream, status, graph);
}

int
cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
               unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
               void **extra)
{
    const unsigned sizes[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
    const struct function *called = function;
    NEED_CONTEXT();
    if (shared > 48 * 1024 && (int)shared > called->dynamic_shared)
        return 1;
    return launch(__func__, CURRENT_DEVICE, called, sizes, shared, stream, parameters, extra);
}

#endif
