/* What fake_driver.c takes from POSIX, for Windows. It replaces the start of ziglang's C runtime too, which takes minutes
 * to compile: the entry point and the memory of each thread. */
#include <time.h>
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

typedef unsigned useconds_t;
typedef SRWLOCK pthread_mutex_t;
typedef CONDITION_VARIABLE pthread_cond_t;
#define PTHREAD_MUTEX_INITIALIZER SRWLOCK_INIT
#define PTHREAD_COND_INITIALIZER CONDITION_VARIABLE_INIT
#define pthread_mutex_lock AcquireSRWLockExclusive
#define pthread_mutex_unlock ReleaseSRWLockExclusive
#define pthread_cond_broadcast WakeAllConditionVariable
#define usleep(duration) Sleep((duration) / 1000)

/* The only wait is for 5 s. */
#define clock_gettime(clock, now) ((now)->tv_sec = 0)
#define pthread_cond_timedwait(condition, lock, until)                                                       \
    (!SleepConditionVariableSRW(condition, lock, (DWORD)(until)->tv_sec * 1000, 0))

enum { STANDARD_RESULT = 2 /* of __stdio_common_vsprintf: as C's vsnprintf */ };

int
vsnprintf(char *text, size_t size, const char *format, va_list arguments)
{
    return __stdio_common_vsprintf(STANDARD_RESULT, text, size, format, NULL, arguments);
}

int
snprintf(char *text, size_t size, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, size, format, arguments);
    va_end(arguments);
    return length;
}

int
sprintf(char *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, SIZE_MAX >> 1, format, arguments);
    va_end(arguments);
    return length;
}

#define THREAD_SECTION(name) __attribute__((section(name), used))
THREAD_SECTION(".tls") char _tls_start = 0;
THREAD_SECTION(".tls$ZZZ") char _tls_end = 0;
unsigned long _tls_index = 0;
THREAD_SECTION(".rdata$T")
const IMAGE_TLS_DIRECTORY64 _tls_used = {
    .StartAddressOfRawData = (ULONGLONG)&_tls_start,
    .EndAddressOfRawData = (ULONGLONG)&_tls_end,
    .AddressOfIndex = (ULONGLONG)&_tls_index,
};

BOOL WINAPI
_DllMainCRTStartup(HINSTANCE library, DWORD reason, LPVOID reserved)
{
    (void)library, (void)reason, (void)reserved;
    return TRUE;
}
