/* The shared libraries of this process. linux/ and windows/ implement it. */
#ifndef FLASH_ATTN_LIBRARY_H
#define FLASH_ATTN_LIBRARY_H

#include "driver.h"

/* Opens the HIP runtime that torch uses and writes its real path, in UTF-8 on Windows. NULL with an exception if none
 * is loaded, or if several are and nothing says which of them torch uses. */
void *open_hip(char path[PATH_BYTES]);

/* Opens the CUDA driver, loads it if need be, and writes its real path. NULL with an exception. */
void *open_cuda(char path[PATH_BYTES]);

/* A function by its name, or NULL. */
void *library_function(void *library, const char *name);

void close_library(void *library);

#endif
