/* A HIP runtime without a GPU: its memory is the host's, its kernels do nothing. tests/driver.rs tells it to fail.
 *
 * A module whose image is a line `stub NAME ARGUMENTS` is recorded: libflash_attn_rocm/tests/recorded.py reads what it
 * launches.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_FOUND = 500, LAUNCH_FAILURE = 719 };

/* What hipStreamSynchronize answers, the target of the last copy to the host, and how often modules came and went. */
int stub_wait_code = SUCCESS;
void *stub_last_target;
int stub_loads, stub_unloads;
/* What recorded modules have launched: a line each, with the name, the grid, and the arguments in hexadecimal. */
int stub_recording;
char stub_launches[1 << 20];
size_t stub_written;

const char *hipGetErrorName(int code) {
    switch (code) {
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case INVALID_DEVICE: return "hipErrorInvalidDevice";
    case LAUNCH_FAILURE: return "hipErrorLaunchFailure";
    default: return "hipErrorUnknown";
    }
}
const char *hipGetErrorString(int code) { return code == OUT_OF_MEMORY ? "out of memory" : "some error"; }
int hipInit(unsigned flags) { (void)flags; return SUCCESS; }
int hipGetDeviceCount(int *count) { *count = 2; return SUCCESS; }
int hipGetDevice(int *device) { *device = 0; return SUCCESS; }
int hipSetDevice(int device) { return device < 2 ? SUCCESS : INVALID_DEVICE; }
/* HIP 6.4 */
int hipRuntimeGetVersion(int *version) { *version = 60443482; return SUCCESS; }
int hipGetLastError(void) { return SUCCESS; }
/* hipDeviceProp_tR0600: 1472 bytes, the compute units at 388, the target's name at 1160. */
int hipGetDevicePropertiesR0600(char *properties, int device) {
    int units = 304;
    (void)device;
    memset(properties, 0, 1472);
    memcpy(properties + 388, &units, sizeof units);
    strcpy(properties + 1160, getenv("STUB_TARGET") ? getenv("STUB_TARGET") : "gfx942:sramecc+:xnack-");
    return SUCCESS;
}
int hipMalloc(uint64_t *address, size_t bytes) {
    if (bytes > (size_t)1 << 32) return OUT_OF_MEMORY;
    *address = (uint64_t)(uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
int hipFree(uint64_t address) { free((void *)(uintptr_t)address); return SUCCESS; }
int hipMemcpyHtoDAsync(uint64_t to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)(uintptr_t)to, from, bytes);
    return SUCCESS;
}
int hipMemcpyDtoHAsync(void *to, uint64_t from, size_t bytes, void *stream) {
    (void)stream;
    stub_last_target = to;
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return SUCCESS;
}
int hipMemsetD32Async(uint64_t to, unsigned value, size_t count, void *stream) {
    (void)stream;
    if (stub_recording) return SUCCESS; /* addresses are of no memory */
    for (size_t i = 0; i < count; i++) ((uint32_t *)(uintptr_t)to)[i] = value;
    return SUCCESS;
}
int hipStreamCreateWithFlags(void **stream, unsigned flags) { (void)flags; *stream = malloc(1); return SUCCESS; }
int hipStreamDestroy(void *stream) { free(stream); return SUCCESS; }
int hipStreamSynchronize(void *stream) { (void)stream; return stub_wait_code; }
int hipEventCreateWithFlags(void **event, unsigned flags) { (void)flags; *event = malloc(1); return SUCCESS; }
int hipEventDestroy(void *event) { free(event); return SUCCESS; }
int hipEventRecord(void *event, void *stream) { (void)event; (void)stream; return SUCCESS; }
int hipEventSynchronize(void *event) { (void)event; return SUCCESS; }
int hipEventElapsedTime(float *time, void *from, void *to) { (void)from; (void)to; *time = 0; return SUCCESS; }
/* It is never freed, so that a later use can be told. */
struct module {
    char is_loaded;
    int arguments;
    char name[128];
};
int hipModuleLoadData(void **module, const void *image) {
    struct module *loaded = calloc(1, sizeof *loaded);
    loaded->is_loaded = 1;
    if (!memcmp(image, "stub ", 5)) {
        sscanf(image, "stub %127s %d", loaded->name, &loaded->arguments);
        stub_recording = 1;
    }
    *module = loaded;
    stub_loads++;
    return SUCCESS;
}
int hipModuleUnload(void *module) {
    if (!*(char *)module) return NOT_FOUND;
    *(char *)module = 0;
    stub_unloads++;
    return SUCCESS;
}
int hipModuleGetFunction(void **function, void *module, const char *name) {
    (void)name;
    *function = module;
    return SUCCESS;
}
int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **arguments, void **extra) {
    const struct module *module = function;
    if (!module->is_loaded) return NOT_FOUND;
    (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    size_t room = sizeof stub_launches - stub_written;
    if (!module->name[0] || room < 1 << 12) return SUCCESS;
    char *end = stub_launches + stub_written;
    end += sprintf(end, "%s %u %u %u ", module->name, x, y, z);
    for (int i = 0; i < module->arguments; i++)
        end += sprintf(end, "%016llx", (unsigned long long)*(uint64_t *)arguments[i]);
    *end++ = '\n';
    stub_written = end - stub_launches;
    return SUCCESS;
}
int hipMemcpy(void *to, const void *from, size_t bytes, int kind) { (void)kind; memcpy(to, from, bytes); return SUCCESS; }
int hipDeviceSynchronize(void) { return SUCCESS; }
