/* The kernel driver of GPUs that are not there, for AMD's runtime to run over: preloaded, it answers what the runtime
 * asks of /dev/kfd, of the render nodes and of libdrm, and tells of each kernel that arrives in a queue.
 *
 * Sources: linux/kfd_ioctl.h; HSA Platform System Architecture, "Architected Queuing Language packet format"; LLVM,
 * "User Guide for AMDGPU Backend" (amd_signal_t is described with ROCr, its offsets are those that ROCr writes).
 *
 * All memory is this process's: that of a GPU too, which a file in memory backs. What is freed stays. Queues other than
 * for kernels take nothing up (HSA_ENABLE_SDMA=0), and nothing ever goes wrong with a GPU.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kfd_ioctl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { FIRST_GPU = 4096, QUEUES = 64, PACKET = 64, EVENT_PAGES = 1 << 16, DOORBELL_PAGES = 8192, PATH_LENGTH = 4096 };
enum packet_type { VENDOR = 0, INVALID = 1, KERNEL = 2, BARRIER_AND = 3, BARRIER_OR = 5 };
static const uint64_t MEMORY = 1ull << 45, NOT_RUNG = UINT64_MAX;

typedef void (*on_kernel)(uint32_t gpu, const void *packet);

struct queue {
    int used, stop;
    uint32_t gpu, packets, doorbell;
    char *ring;
    uint64_t *read;
    pthread_t thread;
};

struct event {
    int set, auto_reset;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int memory = -1, doorbell_file = -1;
static uint64_t memory_used = 4096 /* 0 is no handle */, *doorbells;
static pthread_cond_t some_event = PTHREAD_COND_INITIALIZER;
static uint32_t last_event;
static int32_t xnack;
static struct event events[KFD_SIGNAL_EVENT_LIMIT];
static struct queue queues[QUEUES];
static on_kernel tell;

void
kfd_on_kernel(on_kernel function)
{
    tell = function;
}

/* What these functions hide. */
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static uint64_t
nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void
nap(void)
{
    nanosleep(&(struct timespec){0, 200000}, NULL);
}

/* A descriptor of the memory that a device's mappings come from. */
static int
opened(int *file)
{
    pthread_mutex_lock(&lock);
    if (memory < 0) {
        memory = memfd_create("gpu memory", MFD_CLOEXEC);
        doorbell_file = memfd_create("doorbells", MFD_CLOEXEC);
        if (ftruncate(memory, (off_t)MEMORY) != 0 || ftruncate(doorbell_file, DOORBELL_PAGES + EVENT_PAGES) != 0)
            abort();
        doorbells = mmap(NULL, DOORBELL_PAGES, PROT_READ | PROT_WRITE, MAP_SHARED, doorbell_file, 0);
        if (doorbells == MAP_FAILED)
            abort();
    }
    pthread_mutex_unlock(&lock);
    return dup(*file);
}

/* Files of the kernel are those below KFD_ROOT. */
static const char *
moved(const char *path, char *place)
{
    static const char *const folders[] = {"/sys/devices/virtual/kfd/", "/sys/module/amdgpu"};
    for (size_t index = 0; index < sizeof(folders) / sizeof(*folders); index++)
        if (strncmp(path, folders[index], strlen(folders[index])) == 0) {
            snprintf(place, PATH_LENGTH, "%s%s", getenv("KFD_ROOT"), path);
            return place;
        }
    return path;
}

int
open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (strcmp(path, "/dev/kfd") == 0)
        return opened(&doorbell_file);
    if (strncmp(path, "/dev/dri/renderD", strlen("/dev/dri/renderD")) == 0)
        return opened(&memory);
    char place[PATH_LENGTH];
    return REAL(open)(moved(path, place), flags, mode);
}

FILE *
fopen(const char *restrict path, const char *restrict mode)
{
    char place[PATH_LENGTH];
    return REAL(fopen)(moved(path, place), mode);
}

DIR *
opendir(const char *path)
{
    char place[PATH_LENGTH];
    return REAL(opendir)(moved(path, place));
}

/* libdrm's. */
int
drmOpenRender(int minor)
{
    (void)minor;
    return opened(&memory);
}

int
drmClose(int file)
{
    return close(file);
}

int
amdgpu_device_initialize(int file, uint32_t *major, uint32_t *minor, void **device)
{
    (void)file;
    *major = 3;
    *minor = 60;
    *device = &memory;
    return 0;
}

int
amdgpu_device_deinitialize(void *device)
{
    (void)device;
    return 0;
}

int
amdgpu_device_get_fd(void *device)
{
    return *(int *)device;
}

const char *
amdgpu_get_marketing_name(void *device)
{
    (void)device;
    return "a pretended GPU";
}

/* The family and revision of a chip, by which ROCr lays out images: KFD_CHIP, "family:revision". */
int
amdgpu_query_gpu_info(void *device, uint32_t *information)
{
    (void)device;
    memset(information, 0, 16 * sizeof(*information));
    return sscanf(getenv("KFD_CHIP"), "%u:%u", &information[3], &information[2]) == 2 ? 0 : -EINVAL;
}

static void
set_event(uint32_t event, int set)
{
    pthread_mutex_lock(&lock);
    events[event].set = set;
    pthread_cond_broadcast(&some_event);
    pthread_mutex_unlock(&lock);
}

/* amd_signal_t, the part that a packet processor writes or needs. */
struct signal {
    int64_t kind, value;
    uint64_t *mailbox;
    uint32_t event, reserved;
    uint64_t start, end;
};

static void
complete(struct signal *signal)
{
    if (signal == NULL)
        return;
    signal->start = signal->end = nanoseconds();
    __atomic_fetch_sub(&signal->value, 1, __ATOMIC_SEQ_CST);
    if (signal->mailbox != NULL) {
        *signal->mailbox = signal->event;
        set_event(signal->event, 1);
    }
}

/* Waits for all signals of a barrier packet, or for one. */
static void
wait_for(const struct queue *queue, struct signal *const *signals, int all)
{
    for (;;) {
        int named = 0, done = 0;
        for (int index = 0; index < 5; index++)
            if (signals[index] != NULL) {
                named++;
                done += __atomic_load_n(&signals[index]->value, __ATOMIC_SEQ_CST) <= 0;
            }
        if (named == 0 || done >= (all ? named : 1) || __atomic_load_n(&queue->stop, __ATOMIC_RELAXED))
            return;
        nap();
    }
}

/* The packet processor of a queue: one packet after the other, as if each had the barrier bit. */
static void *
serve(void *argument)
{
    struct queue *queue = argument;
    while (!__atomic_load_n(&queue->stop, __ATOMIC_RELAXED)) {
        uint64_t next = __atomic_load_n(queue->read, __ATOMIC_RELAXED);
        uint64_t rung = __atomic_load_n(&doorbells[queue->doorbell], __ATOMIC_ACQUIRE);
        char *packet = queue->ring + next % queue->packets * PACKET;
        enum packet_type type = __atomic_load_n((uint16_t *)packet, __ATOMIC_ACQUIRE) & 0xff;
        if (rung == NOT_RUNG || rung < next || type == INVALID) {
            nap();
            continue;
        }
        if (type == KERNEL && tell != NULL)
            tell(queue->gpu, packet);
        if (type == BARRIER_AND || type == BARRIER_OR)
            wait_for(queue, (struct signal **)packet + 1, type == BARRIER_AND);
        complete(((struct signal **)packet)[7]);
        __atomic_store_n((uint16_t *)packet, INVALID, __ATOMIC_RELEASE);
        __atomic_store_n(queue->read, next + 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

static int
create_queue(struct kfd_ioctl_create_queue_args *asked)
{
    for (uint32_t index = 0; index < QUEUES; index++) {
        struct queue *queue = &queues[index];
        if (__atomic_exchange_n(&queue->used, 1, __ATOMIC_ACQ_REL))
            continue;
        *queue = (struct queue){
            .used = 1,
            .gpu = asked->gpu_id - FIRST_GPU,
            .packets = asked->ring_size / PACKET,
            .doorbell = index,
            .ring = (char *)asked->ring_base_address,
            .read = (uint64_t *)asked->read_pointer_address,
        };
        doorbells[index] = NOT_RUNG;
        asked->queue_id = index;
        asked->doorbell_offset = index * sizeof(*doorbells);
        if (asked->queue_type == KFD_IOC_QUEUE_TYPE_COMPUTE_AQL)
            return pthread_create(&queue->thread, NULL, serve, queue);
        return 0;
    }
    return ENOMEM;
}

static int
destroy_queue(const struct kfd_ioctl_destroy_queue_args *asked)
{
    struct queue *queue = &queues[asked->queue_id];
    __atomic_store_n(&queue->stop, 1, __ATOMIC_RELAXED);
    if (queue->thread != 0)
        pthread_join(queue->thread, NULL);
    __atomic_store_n(&queue->used, 0, __ATOMIC_RELEASE);
    return 0;
}

static int
allocate(struct kfd_ioctl_alloc_memory_of_gpu_args *asked)
{
    if (asked->flags & KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP)
        return EINVAL;
    if (asked->flags & (KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL | KFD_IOC_ALLOC_MEM_FLAGS_USERPTR)) {
        asked->handle = asked->va_addr;
        if (asked->flags & KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL)
            asked->mmap_offset = 0;
        return 0;
    }
    uint64_t pages = (asked->size + 0xfff) & ~0xfffull;
    asked->mmap_offset = asked->handle = __atomic_fetch_add(&memory_used, pages, __ATOMIC_RELAXED);
    if (asked->handle + pages > MEMORY)
        return ENOMEM;
    void *place = (void *)asked->va_addr;
    if (place == NULL)
        return 0;
    /* What the runtime never maps for itself is read here as well. */
    place = mmap(place, pages, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, (off_t)asked->handle);
    return place == MAP_FAILED ? errno : 0;
}

static int
apertures(struct kfd_ioctl_get_process_apertures_new_args *asked)
{
    struct kfd_process_device_apertures *found = (void *)asked->kfd_process_device_apertures_ptr;
    uint32_t gpus = (uint32_t)atoi(getenv("KFD_GPUS"));
    if (gpus < asked->num_of_nodes)
        asked->num_of_nodes = gpus;
    for (uint32_t index = 0; index < asked->num_of_nodes; index++)
        found[index] = (struct kfd_process_device_apertures){
            .gpu_id = FIRST_GPU + index,
            .lds_base = 0x1000000000000,
            .lds_limit = 0x10000ffffffff,
            .scratch_base = 0x2000000000000,
            .scratch_limit = 0x20000ffffffff,
            .gpuvm_base = 0x10000,
            .gpuvm_limit = 0x7fffffffffff,
        };
    return 0;
}

static int
wait_for_events(struct kfd_ioctl_wait_events_args *asked)
{
    const struct kfd_event_data *list = (void *)asked->events_ptr;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += asked->timeout / 1000;
    end.tv_nsec += asked->timeout % 1000 * 1000000;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    pthread_mutex_lock(&lock);
    for (int late = 0;; late = pthread_cond_timedwait(&some_event, &lock, &end)) {
        uint32_t set = 0;
        for (uint32_t index = 0; index < asked->num_events; index++)
            set += events[list[index].event_id].set != 0;
        int enough = set >= (asked->wait_for_all ? asked->num_events : 1);
        asked->wait_result = enough ? KFD_IOC_WAIT_RESULT_COMPLETE : KFD_IOC_WAIT_RESULT_TIMEOUT;
        for (uint32_t index = 0; enough && index < asked->num_events; index++)
            if (events[list[index].event_id].auto_reset)
                events[list[index].event_id].set = 0;
        if (enough || late)
            break;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int
create_event(struct kfd_ioctl_create_event_args *asked)
{
    uint32_t event = __atomic_add_fetch(&last_event, 1, __ATOMIC_RELAXED);
    if (event >= KFD_SIGNAL_EVENT_LIMIT)
        return ENOSPC;
    events[event].auto_reset = (int)asked->auto_reset;
    asked->event_id = asked->event_trigger_data = asked->event_slot_index = event;
    asked->event_page_offset = DOORBELL_PAGES;
    return 0;
}

/* The requests by number, as an error number or 0: the structures of some are longer in later kernels. */
static int
answer(unsigned request, void *argument)
{
    switch (request) {
    case _IOC_NR(AMDKFD_IOC_GET_VERSION): /* the last one whose events have no age */
        *(struct kfd_ioctl_get_version_args *)argument = (struct kfd_ioctl_get_version_args){1, 13};
        return 0;
    case _IOC_NR(AMDKFD_IOC_CREATE_QUEUE):
        return create_queue(argument);
    case _IOC_NR(AMDKFD_IOC_DESTROY_QUEUE):
        return destroy_queue(argument);
    case _IOC_NR(AMDKFD_IOC_GET_CLOCK_COUNTERS): {
        struct kfd_ioctl_get_clock_counters_args *clock = argument;
        clock->gpu_clock_counter = clock->cpu_clock_counter = clock->system_clock_counter = nanoseconds();
        clock->system_clock_freq = 1000000000;
        return 0;
    }
    case _IOC_NR(AMDKFD_IOC_CREATE_EVENT):
        return create_event(argument);
    case _IOC_NR(AMDKFD_IOC_SET_EVENT):
    case _IOC_NR(AMDKFD_IOC_RESET_EVENT):
        set_event(((struct kfd_ioctl_set_event_args *)argument)->event_id,
                  request == _IOC_NR(AMDKFD_IOC_SET_EVENT));
        return 0;
    case _IOC_NR(AMDKFD_IOC_WAIT_EVENTS):
        return wait_for_events(argument);
    case _IOC_NR(AMDKFD_IOC_GET_PROCESS_APERTURES_NEW):
        return apertures(argument);
    case _IOC_NR(AMDKFD_IOC_ALLOC_MEMORY_OF_GPU):
        return allocate(argument);
    case _IOC_NR(AMDKFD_IOC_MAP_MEMORY_TO_GPU):
    case _IOC_NR(AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU):
        ((struct kfd_ioctl_map_memory_to_gpu_args *)argument)->n_success =
            ((struct kfd_ioctl_map_memory_to_gpu_args *)argument)->n_devices;
        return 0;
    case _IOC_NR(AMDKFD_IOC_AVAILABLE_MEMORY):
        ((struct kfd_ioctl_get_available_memory_args *)argument)->available = MEMORY - memory_used;
        return 0;
    case _IOC_NR(AMDKFD_IOC_SET_XNACK_MODE): { /* a negative mode asks */
        struct kfd_ioctl_set_xnack_mode_args *mode = argument;
        if (mode->xnack_enabled >= 0)
            xnack = mode->xnack_enabled;
        mode->xnack_enabled = xnack;
        return 0;
    }
    case _IOC_NR(AMDKFD_IOC_GET_TILE_CONFIG): {
        struct kfd_ioctl_get_tile_config_args *tiles = argument;
        tiles->num_tile_configs = tiles->num_macro_tile_configs = 0;
        return 0;
    }
    case _IOC_NR(AMDKFD_IOC_SET_MEMORY_POLICY):
    case _IOC_NR(AMDKFD_IOC_UPDATE_QUEUE):
    case _IOC_NR(AMDKFD_IOC_DESTROY_EVENT):
    case _IOC_NR(AMDKFD_IOC_SET_SCRATCH_BACKING_VA):
    case _IOC_NR(AMDKFD_IOC_SET_TRAP_HANDLER):
    case _IOC_NR(AMDKFD_IOC_ACQUIRE_VM):
    case _IOC_NR(AMDKFD_IOC_FREE_MEMORY_OF_GPU):
    case _IOC_NR(AMDKFD_IOC_SET_CU_MASK):
    case _IOC_NR(AMDKFD_IOC_RUNTIME_ENABLE):
        return 0;
    default: /* as an older kernel */
        return EINVAL;
    }
}

int
ioctl(int file, unsigned long request, ...)
{
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (memory < 0 || _IOC_TYPE(request) != AMDKFD_IOCTL_BASE)
        return ((int (*)(int, unsigned long, void *))dlsym(RTLD_NEXT, "ioctl"))(file, request, argument);
    int problem = answer(_IOC_NR(request), argument);
    if (problem != 0)
        errno = problem;
    return problem == 0 ? 0 : -1;
}
