/* What the launcher needs of Linux. */
#ifndef FLASH_ATTN_SYSTEM_H
#define FLASH_ATTN_SYSTEM_H

#define _GNU_SOURCE 1

#include <limits.h>
#include <pthread.h>

enum { PATH_BYTES = PATH_MAX };

/* How a Python int becomes a 64-bit value: long has 64 bits, and Python converts to it faster than to long long. */
#define INT64_OF_PYTHON PyLong_AsLong
#define UINT64_OF_PYTHON PyLong_AsUnsignedLong

typedef pthread_mutex_t lock_type;
#define LOCK_INITIALIZER PTHREAD_MUTEX_INITIALIZER

static inline void
lock_create(lock_type *lock)
{
    pthread_mutex_init(lock, NULL);
}

static inline void
lock_destroy(lock_type *lock)
{
    pthread_mutex_destroy(lock);
}

static inline void
lock_acquire(lock_type *lock)
{
    pthread_mutex_lock(lock);
}

static inline void
lock_release(lock_type *lock)
{
    pthread_mutex_unlock(lock);
}

#endif
