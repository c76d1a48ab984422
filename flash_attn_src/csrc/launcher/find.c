/* Finds the driver that torch has loaded: nothing is linked, its functions are looked up by name. */
#include "driver.h"

#include <dlfcn.h>
#include <link.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define AS_OFFSET(field, result, arguments, hip, cuda) offsetof(struct functions, field),
static const size_t function_offsets[FUNCTION_COUNT] = {DRIVER_FUNCTIONS(AS_OFFSET)};

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

int
bind_driver(enum platform platform)
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
