// libcuda.so.1: the driver's functions that torch and Triton call. Signatures are those of cuda.h as far as arguments are
// used. Its virtual memory serves the allocator's expandable segments.
#define _GNU_SOURCE
#include "nullgpu.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_SUPPORTED = 801, PAGE = 2 << 20 };

int cuDriverGetVersion(int *version) { return *version = CUDA_VERSION_13, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetCount(int *count) { return *count = nullgpu_devices(), 0; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {  // numbers of CUdevice_attribute
    case 1: *value = 1024; break;                  // threads per block
    case 8: *value = SHARED_BYTES; break;          // shared memory per block
    case 10: *value = 32; break;                   // warp
    case 12: case 82: *value = REGISTERS; break;   // per block, per multiprocessor
    case 13: *value = CLOCK_KHZ; break;
    case 16: *value = SMS; break;
    case 36: *value = MEMORY_KHZ; break;
    case 37: *value = BUS_BITS; break;
    case 39: *value = THREADS_SM; break;
    case 75: *value = 9; break;                    // compute capability 9.0
    case 81: *value = SHARED_SM_BYTES; break;
    case 95: *value = 1; break;                    // cooperative launch
    case 97: *value = SHARED_OPTIN_BYTES; break;
    case 102: case 103: *value = 1; break;         // virtual memory, handles as file descriptors
    default: *value = 0;
    }
    return 0;
}

int cuDeviceGetUuid_v2(void *uuid, int device) { return memset(uuid, device + 1, 16), 0; }
int cuDeviceGetUuid(void *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = nullgpu_touched(device), 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuCtxGetLimit(size_t *value, int limit) { return *value = 1 << 20, 0; }

// Triton's kernels: a module is nothing, a function its name.
int cuModuleLoadData(void **module, const void *image) { return *module = malloc(8), 0; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *o, void *v) { return *module = malloc(8), 0; }
int cuModuleLoad(void **module, const char *file) { return *module = malloc(8), 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = strdup(name), 0; }

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    return *value = attribute == 4 ? 32 : attribute == 0 ? 1024 : 0, 0;  // registers; threads per block
}

static int launch(void *function, void *stream) {
    char line[512];
    snprintf(line, sizeof line, "triton:%s", (const char *)function);
    return nullgpu_kernel(line, stream), 0;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    return launch(function, stream);
}
int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned shared, void *stream, void **arguments) {
    return launch(function, stream);
}
struct launch_config { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; };
int cuLaunchKernelEx(struct launch_config *config, void *function, void **arguments, void **extra) {
    return launch(function, config->stream);
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *f, int threads, size_t s) { return *count = 2, 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) { return *count = 1, 0; }

int cuGetErrorString(int error, const char **text) { return *text = "an error of the null GPU", 0; }
int cuGetErrorName(int error, const char **name) { return *name = "NULL_GPU", 0; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) { return *(uint64_t *)data = pointer, 0; }
int cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t pointer) {
    for (unsigned i = 0; i < count; i++) *(uint64_t *)data[i] = pointer;
    return 0;
}
int cuStreamGetCaptureInfo(void *stream, int *status) { return *status = 0, 0; }

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *function ? 0 : 1;
    return *function ? 0 : NOT_FOUND;
}

// Memory. A handle is a block that holds its size; mapping one needs nothing, since the address space is there.

int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) { return *pointer = (uint64_t)malloc(bytes), 0; }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t pointer) {
    *base = pointer;
    if (bytes) *bytes = 0;
    return 0;
}
int cuMemGetAddressRange(uint64_t *b, size_t *n, uint64_t pointer) { return cuMemGetAddressRange_v2(b, n, pointer); }
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { return *bytes = PAGE, 0; }

int cuMemAddressReserve(uint64_t *pointer, size_t bytes, size_t alignment, uint64_t at, unsigned long long flags) {
    uint64_t space = (uint64_t)nullgpu_reserve(bytes + PAGE);
    if (!space) return OUT_OF_MEMORY;
    *pointer = (space + PAGE - 1) / PAGE * PAGE;
    nullgpu_put((void *)*pointer, bytes, 0);
    return 0;
}
int cuMemAddressFree(uint64_t pointer, size_t bytes) { return nullgpu_drop((void *)pointer), 0; }

typedef struct { size_t bytes; int device; } handle;
// CUmemAllocationProp: kinds of memory and of handles, then the place: its kind and number.
struct properties { int kind, handles, place, device; };

int cuMemCreate(handle **made, size_t bytes, const struct properties *properties, unsigned long long flags) {
    if (nullgpu_take(bytes, properties->device)) return OUT_OF_MEMORY;
    *made = malloc(sizeof **made);
    **made = (handle){bytes, properties->device};
    return 0;
}
int cuMemRelease(handle *done) {
    nullgpu_take(-(long)done->bytes, done->device);
    free(done);
    return 0;
}
int cuMemUnmap(uint64_t pointer, size_t bytes) { return madvise((void *)pointer, bytes, MADV_DONTNEED), 0; }

NOTHING(cuMemMap) NOTHING(cuMemSetAccess) NOTHING(cuMemFree_v2) NOTHING(cuMemGetAllocationPropertiesFromHandle)
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxPopCurrent_v2)
NOTHING(cuCtxPushCurrent) NOTHING(cuCtxPopCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuModuleUnload)
NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuTensorMapEncodeTiled)
NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuLinkAddData_v2) NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2)
NOTHING(cuStreamSynchronize) NOTHING(cuCtxFromGreenCtx) NOTHING(cuDevResourceGenerateDesc)
NOTHING(cuDevSmResourceSplitByCount) NOTHING(cuDeviceGetDevResource) NOTHING(cuGreenCtxCreate)
NOTHING(cuGreenCtxDestroy) NOTHING(cuGreenCtxStreamCreate) NOTHING(cuMemsetD32Async) NOTHING(cuStreamWriteValue32)
// Memory of other processes' GPUs: symmetric memory finds none.
FAILS(cuMemExportToShareableHandle, NOT_SUPPORTED) FAILS(cuMemImportFromShareableHandle, NOT_SUPPORTED)
FAILS(cuMemRetainAllocationHandle, 1) FAILS(cuMulticastCreate, NOT_SUPPORTED) FAILS(cuMulticastAddDevice, NOT_SUPPORTED)
FAILS(cuMulticastBindMem, NOT_SUPPORTED) FAILS(cuMulticastUnbind, NOT_SUPPORTED)
