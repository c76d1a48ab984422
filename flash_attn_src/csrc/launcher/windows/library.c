/* The HIP runtime or CUDA driver of a Windows process: nothing is linked, the loaded files are searched.
 *
 * A process may hold two HIP runtimes: AMD's driver has a copy in System32, and torch's packages bring another. Each has
 * its own memory and streams. Kernels must use the runtime that torch is linked to. */
#include "library.h"

#include <psapi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

/* The entry point of the library, by the linker's name. Nothing is linked statically, so there is nothing to start. */
BOOL WINAPI
_DllMainCRTStartup(HINSTANCE library, DWORD reason, LPVOID reserved)
{
    (void)library, (void)reason, (void)reserved;
    return TRUE;
}

static const wchar_t torch_library[] = L"c10_hip.dll";

/* amdhip64_6.dll, amdhip64_7.dll: the number is HIP's major version. */
static int
is_hip(const wchar_t *path)
{
    const wchar_t *slash = wcsrchr(path, L'\\');
    return _wcsnicmp(slash != NULL ? slash + 1 : path, L"amdhip64", wcslen(L"amdhip64")) == 0;
}

/* The HIP runtime that a library's import table is bound to, or NULL if the library imports none. */
static HMODULE
imported_hip(HMODULE user)
{
    const char *base = (const char *)user;
    const IMAGE_NT_HEADERS *headers =
        (const IMAGE_NT_HEADERS *)(base + ((const IMAGE_DOS_HEADER *)base)->e_lfanew);
    DWORD imports = headers->OptionalHeader.DataDirectory[IMAGE_DIRECTORY_ENTRY_IMPORT].VirtualAddress;
    if (imports == 0)
        return NULL;
    for (const IMAGE_IMPORT_DESCRIPTOR *entry = (const IMAGE_IMPORT_DESCRIPTOR *)(base + imports); entry->Name != 0;
         entry++) {
        HMODULE library = NULL;
        void *const *addresses = (void *const *)(base + entry->FirstThunk);
        if (_strnicmp(base + entry->Name, "amdhip64", strlen("amdhip64")) == 0 && addresses[0] != NULL &&
            GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS |
                                   GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                               (const wchar_t *)addresses[0], &library))
            return library;
    }
    return NULL;
}

/* Writes the first two HIP runtimes of this process. Returns their number, or -1 with an exception. */
static int
loaded_hips(HMODULE found[2], wchar_t path[PATH_UNITS])
{
    HMODULE *modules = NULL;
    DWORD size = 0, needed = 0;
    for (;;) {
        if (!K32EnumProcessModules(GetCurrentProcess(), modules, size, &needed)) {
            PyErr_Format(driver_error, "the libraries of this process cannot be listed: Windows error %lu",
                         GetLastError());
            free(modules);
            return -1;
        }
        if (needed <= size)
            break;
        free(modules);
        modules = malloc(size = needed);
        if (modules == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    int count = 0;
    for (DWORD index = 0; index < needed / sizeof(*modules) && count < 2; index++)
        if (GetModuleFileNameW(modules[index], path, PATH_UNITS) != 0 && is_hip(path))
            found[count++] = modules[index];
    free(modules);
    return count;
}

static void
write_path(HMODULE library, wchar_t wide[PATH_UNITS], char path[PATH_BYTES])
{
    path[0] = '\0';
    if (GetModuleFileNameW(library, wide, PATH_UNITS) != 0)
        WideCharToMultiByte(CP_UTF8, 0, wide, -1, path, PATH_BYTES, NULL, NULL);
}

/* The runtime that torch uses, or NULL with an exception. `path` is written where an error needs it. */
static HMODULE
chosen_hip(wchar_t wide[PATH_UNITS], char path[PATH_BYTES])
{
    HMODULE torch = GetModuleHandleW(torch_library);
    HMODULE chosen = torch != NULL ? imported_hip(torch) : NULL;
    if (chosen != NULL)
        return chosen;
    HMODULE found[2];
    int count = loaded_hips(found, wide);
    if (count == 1)
        return found[0];
    if (count == 0)
        PyErr_SetString(driver_error,
                        "no HIP runtime is loaded in this process: torch is not imported, or is not a build for ROCm");
    if (count == 2) {
        write_path(found[0], wide, path);
        PyObject *first = PyUnicode_FromString(path);
        write_path(found[1], wide, path);
        if (first != NULL)
            PyErr_Format(driver_error,
                         "two HIP runtimes are loaded in this process, and memory of one is unknown to the other: "
                         "%U and %s; torch's c10_hip.dll, which names torch's own, is not loaded: torch is not imported, "
                         "or is not a build for ROCm",
                         first, path);
        Py_DecRef(first);
    }
    return NULL;
}

void *
open_hip(char path[PATH_BYTES])
{
    wchar_t *wide = malloc(PATH_UNITS * sizeof(*wide));
    if (wide == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    HMODULE library = NULL, chosen = chosen_hip(wide, path);
    if (chosen != NULL) {
        write_path(chosen, wide, path);
        /* Counts a use, so that the library stays. */
        if (!GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, (const wchar_t *)(uintptr_t)chosen, &library))
            PyErr_Format(driver_error, "%s is loaded but cannot be opened: Windows error %lu", path, GetLastError());
    }
    free(wide);
    return library;
}

void *
open_cuda(char path[PATH_BYTES])
{
    HMODULE library = LoadLibraryExW(L"nvcuda.dll", NULL, LOAD_LIBRARY_SEARCH_SYSTEM32);
    if (library == NULL) {
        PyErr_Format(driver_error, "no CUDA driver: nvcuda.dll does not load (Windows error %lu); install the NVIDIA driver",
                     GetLastError());
        return NULL;
    }
    wchar_t *wide = malloc(PATH_UNITS * sizeof(*wide));
    if (wide == NULL) {
        FreeLibrary(library);
        PyErr_NoMemory();
        return NULL;
    }
    write_path(library, wide, path);
    free(wide);
    return library;
}

void *
library_function(void *library, const char *name)
{
    FARPROC function = GetProcAddress(library, name);
    void *address;
    memcpy(&address, &function, sizeof(address));
    return address;
}

void
close_library(void *library)
{
    FreeLibrary(library);
}
