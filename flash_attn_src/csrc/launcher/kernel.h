/* One kernel of a code object, and how its arguments are packed. */
#ifndef FLASH_ATTN_KERNEL_H
#define FLASH_ATTN_KERNEL_H

#include "driver.h"

#include <stdint.h>

enum {
    MAX_PARAMS = 128,
    MAX_STRUCTURE = 4096, /* bytes of all arguments of a kernel, in both drivers */
    MAX_THREADS = 1024
};

struct kernel {
    PyObject_HEAD
    PyObject *image;  /* bytes: a HIP module reads it as long as it lives */
    PyObject *symbol; /* str, as are the next two; the pointers below point into these objects */
    PyObject *name;
    PyObject *params;
    const void *image_data;
    const char *symbol_text;
    const char *name_text;
    lock_type lock;   /* held while loading */
    void **functions; /* one a device, allocated by the first load; entries are published once */
    unsigned shared;
    unsigned threads;
    unsigned structure;   /* bytes of the one value of params such as "B216" or "K512", else 0 */
    unsigned char whole;  /* whether that value is all arguments of the kernel ("K512") */
    unsigned char total;  /* arguments of the kernel */
    unsigned char passed; /* those that the caller passes; the rest are null pointers */
    char letters[MAX_PARAMS];
};

/* Fills total, passed and letters from a string such as "PPif0"; 0 with an exception. */
int parse_params(struct kernel *self);

union slot {
    uint64_t address;
    int32_t i32;
    int64_t i64;
    float f32;
    double f64;
};

/* Argument `index` as the driver takes it; 0 with an exception. */
int pack_argument(const struct kernel *self, int index, PyObject *value, union slot *slot);

/* A whole number from 0 to `limit`; -1 with an exception. */
long long leading_argument(const struct kernel *self, const char *what, PyObject *value, long long limit);

extern PyType_Spec kernel_spec;
#define FUNCTION(function) (PyCFunction)(void (*)(void)) function
extern PyMethodDef kernel_methods[];

#endif
