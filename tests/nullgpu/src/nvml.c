// libnvidia-ml.so.1: as many devices as the null GPU has, no links, no other processes.
#include "nullgpu.h"
#include <string.h>

int nvmlDeviceGetCount_v2(unsigned *count) { return *count = nullgpu_devices(), 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return *device = (void *)(long)(index + 1), 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return *device = (void *)1, 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *found) { return *count = 0, 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { return strcpy(text, "GPU-0"), 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = CUDA_VERSION_13, 0; }
NOTHING(nvmlInit) NOTHING(nvmlInit_v2) NOTHING(nvmlDeviceGetGpuFabricInfoV)
FAILS(nvmlDeviceGetNvLinkRemoteDeviceType, 3) FAILS(nvmlDeviceGetNvLinkRemotePciInfo_v2, 3)
