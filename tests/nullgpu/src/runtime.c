// A CUDA runtime of which allocations, streams, events and copies are real on the host, and kernels compute nothing.
// Preloaded before torch's CUDA build. Here: the log, devices, memory and copies; streams.c has what runs on them.
#define _GNU_SOURCE
#include "nullgpu.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MOST_DEVICES = 64, SMALL_COPY = 1 << 20, LARGEST_UPLOAD = 64 << 20 };
// Memory of a context before the first allocation: kernels of torch, stacks, printf's buffer.
static const size_t CONTEXT_BYTES = 600ul << 20;

long nullgpu_count[CALLS];
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER, log_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_t main_thread;
static __thread int current;
static __thread cudaError_t last_error = cudaSuccess;
static size_t used[MOST_DEVICES];
static int touched[MOST_DEVICES];
static int logging = 1;

__attribute__((constructor)) static void start(void) { main_thread = pthread_self(); }

int nullgpu_in_loop(void) {
    static __thread int found = -1;
    char name[16] = "";
    if (found < 0) {
        pthread_getname_np(pthread_self(), name, sizeof name);
        found = pthread_equal(pthread_self(), main_thread) || !strncmp(name, "pt_autograd", 11);
    }
    return found;
}

int nullgpu_devices(void) {
    const char *text = getenv("NULLGPU_COUNT");
    return text ? atoi(text) : 1;
}

static size_t capacity(void) {
    const char *text = getenv("NULLGPU_GIB");
    return (size_t)((text ? atof(text) : 79.11) * (1ul << 30));
}

static cudaError_t fail(cudaError_t error) { return last_error = error; }

// Log

static FILE *log_file(void) {
    static FILE *file;
    static int asked;
    if (!asked) {
        asked = 1;
        const char *path = getenv("NULLGPU_LOG");
        if (path && *path && (file = fopen(path, "a"))) setvbuf(file, NULL, _IOFBF, 1 << 16);
    }
    return file;
}

int nullgpu_logs(void) { return logging && log_file(); }

void nullgpu_write(const char *format, ...) {
    FILE *file = log_file();
    if (!nullgpu_logs()) return;
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&log_lock);
    vfprintf(file, format, arguments);
    pthread_mutex_unlock(&log_lock);
    va_end(arguments);
}

// Switch the log off or on, with all lines so far in the file.
void nullgpu_log(int on) {
    logging = on;
    if (log_file()) fflush(log_file());
}

// A line of the caller's own.
void nullgpu_mark(const char *text) {
    nullgpu_write("MARK %s\n", text);
    if (log_file()) fflush(log_file());
}

// Devices

void nullgpu_touch(const char *by) {
    if (touched[current]) return;
    touched[current] = 1;
    nullgpu_write("CONTEXT dev %d by %s loop %d\n", current, by, nullgpu_in_loop());
}

int nullgpu_touched(int device) { return touched[device]; }

cudaError_t cudaGetDeviceCount(int *count) {
    *count = nullgpu_devices();
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= nullgpu_devices()) return fail(cudaErrorInvalidDevice);
    current = device;
    nullgpu_touch("cudaSetDevice");  // makes a context since CUDA 12
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_13;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    const char *name = getenv("NULLGPU_NAME");
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", name ? name : "NVIDIA H100 80GB HBM3");
    found->totalGlobalMem = capacity();
    found->major = 9;
    found->multiProcessorCount = SMS;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = THREADS_SM;
    found->maxBlocksPerMultiProcessor = 32;
    found->regsPerBlock = found->regsPerMultiprocessor = REGISTERS;
    found->sharedMemPerBlock = SHARED_BYTES;
    found->sharedMemPerBlockOptin = SHARED_OPTIN_BYTES;
    found->sharedMemPerMultiprocessor = SHARED_SM_BYTES;
    found->reservedSharedMemPerBlock = 1024;
    found->l2CacheSize = 50 << 20;
    found->memoryBusWidth = BUS_BITS;
    found->asyncEngineCount = 3;
    found->textureAlignment = 512;
    found->concurrentKernels = found->unifiedAddressing = found->canMapHostMemory = found->managedMemory = 1;
    found->concurrentManagedAccess = found->cooperativeLaunch = 1;
    found->pciBusID = device + 1;
    found->uuid.bytes[0] = (char)(device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = SMS; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_BYTES; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_OPTIN_BYTES; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED_SM_BYTES; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS_SM; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = REGISTERS; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) {
    *can = one != other;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    nullgpu_count[DEVSYNC]++;
    nullgpu_write("DEVSYNC\n");
    return cudaSuccess;
}

// Memory

typedef struct { char *address; size_t bytes; int device; enum { DEVICE = 1, PINNED } kind; } block;
static block *blocks;
static size_t block_count, block_room;

static void add_block(void *address, size_t bytes, int device, int kind) {
    pthread_mutex_lock(&memory_lock);
    if (block_count == block_room) blocks = realloc(blocks, (block_room = 2 * block_room + 1024) * sizeof *blocks);
    blocks[block_count++] = (block){address, bytes, device, kind};
    pthread_mutex_unlock(&memory_lock);
}

// Find the block with an address; removed: the one that begins there, which is forgotten.
static int find_block(const void *address, block *found, int removed) {
    const char *at = address;
    int there = 0;
    pthread_mutex_lock(&memory_lock);
    for (size_t i = 0; i < block_count && !there; i++) {
        there = removed ? at == blocks[i].address
                        : at >= blocks[i].address && at < blocks[i].address + blocks[i].bytes;
        if (there) *found = blocks[i];
        if (there && removed) blocks[i] = blocks[--block_count];
    }
    pthread_mutex_unlock(&memory_lock);
    return there;
}

static int is_kind(const void *address, int kind) {
    block found;
    return find_block(address, &found, 0) && found.kind == kind;
}

// Address space without memory: the host gives pages to written addresses only, those of small copies.
void *nullgpu_reserve(size_t bytes) {
    void *space = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return space == MAP_FAILED ? NULL : space;
}

void nullgpu_put(void *address, size_t bytes, int device) { add_block(address, bytes, device, DEVICE); }

void nullgpu_drop(void *address) {
    block found;
    find_block(address, &found, 1);
}

int nullgpu_take(long bytes, int device) {
    if (bytes > 0 && used[device] + bytes > capacity() - CONTEXT_BYTES) {
        nullgpu_write("OOM %ld used %zu\n", bytes, used[device]);
        return 1;
    }
    used[device] += bytes;
    nullgpu_count[bytes > 0 ? MALLOC : FREE]++;
    nullgpu_write("%s %ld dev %d\n", bytes > 0 ? "MALLOC" : "FREE", bytes > 0 ? bytes : -bytes, device);
    return 0;
}

static size_t rounded(size_t bytes, size_t to) { return bytes ? (bytes + to - 1) / to * to : to; }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    nullgpu_touch("cudaMemGetInfo");
    *total = capacity();
    *free_bytes = capacity() - CONTEXT_BYTES - used[current];
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    nullgpu_touch("cudaMalloc");
    bytes = rounded(bytes, 512);
    if (nullgpu_take(bytes, current)) return fail(cudaErrorMemoryAllocation);
    if (!(*address = nullgpu_reserve(bytes))) return fail(cudaErrorMemoryAllocation);
    nullgpu_put(*address, bytes, current);
    return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
    block found;
    if (!address || !find_block(address, &found, 1)) return cudaSuccess;
    nullgpu_take(-(long)found.bytes, found.device);
    munmap(found.address, found.bytes);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    nullgpu_touch("cudaHostAlloc");
    nullgpu_count[HOSTALLOC]++;
    nullgpu_write("HOSTALLOC %zu dev %d\n", bytes, current);
    bytes = rounded(bytes, 4096);
    *address = nullgpu_reserve(bytes);
    add_block(*address, bytes, current, PINNED);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    block found;
    if (address && find_block(address, &found, 1)) munmap(found.address, found.bytes);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    nullgpu_write("HOSTREGISTER %zu dev %d\n", bytes, current);
    add_block(address, bytes, current, PINNED);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    nullgpu_drop(address);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    block found;
    memset(out, 0, sizeof *out);
    out->hostPointer = (void *)address;
    out->device = -2;
    if (!find_block(address, &found, 0)) return cudaSuccess;  // type 0: unregistered
    out->type = found.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    out->device = found.device;
    out->devicePointer = (void *)address;
    if (found.kind == DEVICE) out->hostPointer = NULL;
    return cudaSuccess;
}

// NULLGPU_ZERO=1: the host reads zeros from a device, not what happens to be there. To the guard they are a fine step.
static int zeros;
__attribute__((constructor)) static void read_zeros(void) { zeros = getenv("NULLGPU_ZERO") != NULL; }

// Small copies are made, since code reads back the pointers and sizes that it has sent; large ones take time for nothing.
static cudaError_t copy(void *to, const void *from, size_t bytes, void *stream) {
    int to_device = is_kind(to, DEVICE), from_device = is_kind(from, DEVICE);
    nullgpu_touch("cudaMemcpy");
    if (to_device && from_device) {
        nullgpu_count[D2D]++;
        nullgpu_write("D2D %zu stream %p\n", bytes, stream);
        if (bytes <= SMALL_COPY) memmove(to, from, bytes);
        return cudaSuccess;
    }
    if (to_device || from_device) {
        int pinned = is_kind(to_device ? from : to, PINNED);
        nullgpu_count[to_device ? H2D : D2H]++;
        nullgpu_write("%s %zu %s stream %p loop %d\n", to_device ? "H2D" : "D2H", bytes, pinned ? "pinned" : "pageable",
                      stream, nullgpu_in_loop());
    }
    if (from_device && zeros) memset(to, 0, bytes);
    else if (!to_device || bytes <= LARGEST_UPLOAD) memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    nullgpu_count[SYNCMEMCPY]++;
    nullgpu_write("SYNCMEMCPY\n");
    return copy(to, from, bytes, NULL);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes, stream);
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char space[1 << 16];
    *address = space;
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
    nullgpu_count[MEMSET]++;
    nullgpu_write("MEMSET %zu stream %p\n", bytes, (void *)stream);
    if (bytes <= SMALL_COPY) memset(address, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *address, int value, size_t bytes) { return cudaMemsetAsync(address, value, bytes, NULL); }
