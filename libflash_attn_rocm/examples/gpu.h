/* What the examples need of HIP, found in libamdhip64.so at run time: a program of yours includes HIP's headers instead. */
#ifndef EXAMPLES_GPU_H
#define EXAMPLES_GPU_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flash_attn_rocm.h"

static struct {
    int (*malloc_)(void **address, size_t bytes);
    int (*memcpy_)(void *to, const void *from, size_t bytes, int kind);
    int (*synchronize)(void);
} hip;

/* Ends the program with a message where a call failed. */
static void check(int code, const char *what) {
    if (code == 0) return;
    fprintf(stderr, "%s: error %d: %s\n", what, code, flash_attn_rocm_error());
    exit(1);
}

static void gpu_open(void) {
    const char *named = getenv("CANDLE_FLASH_ROCM_HIP");
    const char *names[] = {named, "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
    void *library = NULL;
    for (size_t i = named == NULL; i < 4 && library == NULL; i++) library = dlopen(names[i], RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "no HIP runtime: %s; install ROCm, or set CANDLE_FLASH_ROCM_HIP to its libamdhip64.so\n", dlerror());
        exit(1);
    }
    *(void **)&hip.malloc_ = dlsym(library, "hipMalloc");
    *(void **)&hip.memcpy_ = dlsym(library, "hipMemcpy");
    *(void **)&hip.synchronize = dlsym(library, "hipDeviceSynchronize");
    check(!hip.malloc_ || !hip.memcpy_ || !hip.synchronize, "functions of HIP");
}

/* Memory of the GPU, with a copy of `content` if there is one. */
static void *gpu_memory(size_t bytes, const void *content) {
    void *address = NULL;
    check(hip.malloc_(&address, bytes ? bytes : 1), "hipMalloc");
    if (content) check(hip.memcpy_(address, content, bytes, 1), "hipMemcpy to the GPU");
    return address;
}

/* Copies from the GPU when everything on it has finished. */
static void gpu_read(void *to, const void *from, size_t bytes) {
    check(hip.synchronize(), "hipDeviceSynchronize");
    check(hip.memcpy_(to, from, bytes, 2), "hipMemcpy from the GPU");
}

/* bfloat16 is the upper half of a float. */
static inline float to_float(uint16_t number) {
    uint32_t bits = (uint32_t)number << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Numbers between -1 and 1, the same in each run. */
static inline uint16_t *random_numbers(size_t count) {
    static uint32_t state = 1;
    uint16_t *numbers = malloc(count * sizeof *numbers);
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        numbers[i] = to_bf16((float)(state >> 8) / (1 << 23) - 1.0f);
    }
    return numbers;
}

#endif
