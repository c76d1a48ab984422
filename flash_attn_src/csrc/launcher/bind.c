/* Binds the driver that torch has loaded: its functions are looked up by name. */
#include "library.h"

#include <stddef.h>
#include <string.h>

#define AS_OFFSET(field, result, arguments, hip, cuda) offsetof(struct functions, field),
static const size_t function_offsets[FUNCTION_COUNT] = {DRIVER_FUNCTIONS(AS_OFFSET)};

int
bind_driver(enum platform platform)
{
    static char path[PATH_BYTES];
    static const char *const platforms[] = {"hip", "cuda"};
    if (driver.bound) {
        if (driver.platform == platform)
            return 1;
        PyErr_Format(driver_error, "already bound to %s (%s): a process launches on one platform only",
                     platforms[driver.platform], driver.path);
        return 0;
    }
    void *library = platform == HIP ? open_hip(path) : open_cuda(path);
    for (int index = 0; library != NULL && index < FUNCTION_COUNT; index++) {
        const char *name = function_names[index][platform];
        void *address = name != NULL ? library_function(library, name) : NULL;
        if (name != NULL && address == NULL) {
            PyErr_Format(driver_error, "%s has no function %s: the driver is too old or not a driver", path, name);
            close_library(library);
            library = NULL;
        }
        memcpy((char *)&driver.call + function_offsets[index], &address, sizeof(address));
    }
    if (library != NULL) {
        driver.path = path;
        driver.platform = platform;
        __atomic_store_n(&driver.bound, 1, __ATOMIC_RELEASE);
    }
    return library != NULL;
}
