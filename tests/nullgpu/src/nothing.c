// Functions of the CUDA runtime that do nothing: apart from runtime.c, whose header declares their arguments.
#include "nullgpu.h"

NOTHING(cudaSetDeviceFlags)
NOTHING(cudaInitDevice)
NOTHING(cudaDeviceEnablePeerAccess)
NOTHING(cudaProfilerStart)
NOTHING(cudaProfilerStop)
NOTHING(cudaMemcpyToSymbol)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamQuery)
NOTHING(cudaThreadExchangeStreamCaptureMode)
NOTHING(__cudaRegisterFatBinaryEnd)
NOTHING(__cudaUnregisterFatBinary)
NOTHING(__cudaRegisterVar)
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaKernelSetAttributeForDevice)
NOTHING(cudaLibraryUnload)
