/* What the launcher needs of Windows. */
#ifndef FLASH_ATTN_SYSTEM_H
#define FLASH_ATTN_SYSTEM_H

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <limits.h>

enum {
    PATH_UNITS = 32768,         /* of the longest path in UTF-16, with the null character */
    PATH_BYTES = 3 * PATH_UNITS /* of the same path in UTF-8 */
};

/* How a Python int becomes a 64-bit value: long has 32 bits. */
#define INT64_OF_PYTHON PyLong_AsLongLong
#define UINT64_OF_PYTHON PyLong_AsUnsignedLongLong

typedef SRWLOCK lock_type;
#define LOCK_INITIALIZER SRWLOCK_INIT

static inline void
lock_create(lock_type *lock)
{
    InitializeSRWLock(lock);
}

static inline void
lock_destroy(lock_type *lock)
{
    (void)lock; /* it owns nothing */
}

static inline void
lock_acquire(lock_type *lock)
{
    AcquireSRWLockExclusive(lock);
}

static inline void
lock_release(lock_type *lock)
{
    ReleaseSRWLockExclusive(lock);
}

#endif
