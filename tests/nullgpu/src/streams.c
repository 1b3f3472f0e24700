// The part of the CUDA runtime with streams, events and kernels. Everything is done when a call returns, so no order of
// streams can go wrong here: the log has the order that a GPU would be asked for.
#define _GNU_SOURCE
#include "nullgpu.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Streams and events

static cudaError_t make_stream(cudaStream_t *stream, unsigned flags) {
    static long number = 0x10000;
    nullgpu_touch("cudaStreamCreate");
    *stream = (cudaStream_t)__sync_add_and_fetch(&number, 16);
    if (flags & cudaStreamNonBlocking) return cudaSuccess;
    // Work of such a stream and of the default one wait for each other.
    nullgpu_count[BLOCKINGSTREAM]++;
    nullgpu_write("BLOCKINGSTREAM %p\n", (void *)*stream);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return make_stream(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return make_stream(stream, flags); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int p) { return make_stream(stream, flags); }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    nullgpu_touch("cudaStreamSynchronize");
    nullgpu_count[STREAMSYNC]++;
    int device;
    cudaGetDevice(&device);
    nullgpu_write("STREAMSYNC %p dev %d loop %d\n", (void *)stream, device, nullgpu_in_loop());
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    nullgpu_count[STREAMWAIT]++;
    nullgpu_write("WAITEVENT stream %p event %p\n", (void *)stream, (void *)event);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    if (status) *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

// An event is the time at which it was recorded.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    nullgpu_touch("cudaEventCreate");
    *event = (cudaEvent_t)calloc(1, sizeof(struct timespec));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    nullgpu_touch("cudaEventRecord");
    nullgpu_count[EVENTREC]++;
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    nullgpu_write("RECORD event %p stream %p\n", (void *)event, (void *)stream);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    nullgpu_count[EVENTQUERY]++;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    nullgpu_count[EVENTSYNC]++;
    nullgpu_write("EVENTSYNC %p loop %d\n", (void *)event, nullgpu_in_loop());
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    struct timespec *a = (void *)begin, *b = (void *)end;
    *ms = (b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6;
    return cudaSuccess;
}

// Kernels of torch: nvcc's code registers each with the address of a host function, and launches that address.

typedef struct { const void *function; const char *name; } kernel;
static kernel *kernels;
static size_t kernel_count, kernel_room;
static int kernels_sorted;
static pthread_mutex_t kernel_lock = PTHREAD_MUTEX_INITIALIZER;

static int by_address(const void *one, const void *other) {
    const kernel *a = one, *b = other;
    return a->function < b->function ? -1 : a->function > b->function;
}

void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int threads,
                            void *tid, void *bid, void *bdim, void *gdim, int *warp) {
    pthread_mutex_lock(&kernel_lock);
    if (kernel_count == kernel_room) kernels = realloc(kernels, (kernel_room = 2 * kernel_room + 65536) * sizeof *kernels);
    kernels[kernel_count++] = (kernel){function, name};
    kernels_sorted = 0;
    pthread_mutex_unlock(&kernel_lock);
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

static const char *kernel_name(const void *function) {
    pthread_mutex_lock(&kernel_lock);
    if (!kernels_sorted) qsort(kernels, kernel_count, sizeof *kernels, by_address);
    kernels_sorted = 1;
    kernel key = {function, NULL}, *found = bsearch(&key, kernels, kernel_count, sizeof *kernels, by_address);
    pthread_mutex_unlock(&kernel_lock);
    return found ? found->name : "unknown";
}

void nullgpu_kernel(const char *name, void *stream) {
    nullgpu_count[LAUNCH]++;
    nullgpu_write("KERNEL stream %p %s\n", stream, name);
}

static cudaError_t launch(const void *function, cudaStream_t stream) {
    nullgpu_touch("a launch");
    nullgpu_kernel(nullgpu_logs() ? kernel_name(function) : "", stream);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 g, dim3 b, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(function, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 g, dim3 b, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch(function, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(function, config->stream);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 g, dim3 b, void **arguments, size_t shared, cudaStream_t stream) {
    return launch((const void *)kernel, stream);
}

// Arguments between <<< and >>> wait here until the kernel's host function asks for it.
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pending[16];
static __thread int depth;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pending[depth].grid = grid, pending[depth].block = block;
    pending[depth].shared = shared, pending[depth].stream = stream;
    depth++;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    depth--;
    *grid = pending[depth].grid, *block = pending[depth].block;
    *shared = pending[depth].shared, *(void **)stream = pending[depth].stream;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->maxDynamicSharedSizeBytes = SHARED_OPTIN_BYTES;
    found->binaryVersion = found->ptxVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
    *count = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int threads, size_t shared) {
    *count = 2;
    return cudaSuccess;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned jit_count, enum cudaLibraryOption *options, void **values, unsigned count) {
    *library = (cudaLibrary_t)1;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = (cudaKernel_t)name;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : NULL;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
