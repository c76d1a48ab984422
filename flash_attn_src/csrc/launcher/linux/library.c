/* The HIP runtime or CUDA driver of a Linux process: nothing is linked, the loaded files are searched. */
#include "library.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct search {
    int found; /* different files */
    char loaded_as[PATH_BYTES];
    char real[2][PATH_BYTES];
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
    char real[PATH_BYTES];
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
open_found(const struct search *search)
{
    if (search->found == 1) {
        void *library = dlopen(search->loaded_as, RTLD_LAZY | RTLD_NOLOAD);
        if (library == NULL)
            PyErr_Format(driver_error, "%s is loaded but cannot be opened: %s", search->loaded_as, dlerror());
        return library;
    }
    if (search->found == 0)
        PyErr_SetString(driver_error,
                        "no HIP runtime is loaded in this process: torch is not imported, or is not a build for ROCm");
    else
        PyErr_Format(
            driver_error,
            "two HIP runtimes are loaded in this process, and memory of one is unknown to the other: "
            "%s and %s; keep only the one that torch brings",
            search->real[0], search->real[1]);
    return NULL;
}

void *
open_hip(char path[PATH_BYTES])
{
    struct search *search = calloc(1, sizeof(*search));
    if (search == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    dl_iterate_phdr(visit_library, search);
    void *library = open_found(search);
    memcpy(path, search->real[0], sizeof(search->real[0]));
    free(search);
    return library;
}

void *
open_cuda(char path[PATH_BYTES])
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL) {
        PyErr_Format(driver_error, "no CUDA driver: %s; install the NVIDIA driver", dlerror());
        return NULL;
    }
    struct link_map *map = NULL;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || realpath(map->l_name, path) == NULL)
        snprintf(path, PATH_BYTES, "libcuda.so.1");
    return library;
}

void *
library_function(void *library, const char *name)
{
    return dlsym(library, name);
}

void
close_library(void *library)
{
    dlclose(library);
}
