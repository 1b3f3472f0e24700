// Declarations for all stand-ins. libnullgpu.so, which is preloaded, has it; libcuda.so.1 finds it there.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

// Calls that are counted, in the order of `NAMES` in counts.py.
enum call {
    MALLOC, FREE, HOSTALLOC, STREAMSYNC, DEVSYNC, EVENTSYNC, D2H, H2D, D2D, LAUNCH, EVENTREC, STREAMWAIT, EVENTQUERY,
    MEMSET, SYNCMEMCPY, BLOCKINGSTREAM, CALLS
};
extern long nullgpu_count[CALLS];

// A function that does nothing. Callers pass arguments, which the ABIs of Linux let it ignore.
#define NOTHING(name) int name(void) { return 0; }
#define FAILS(name, code) int name(void) { return code; }

// Write a line into the log, if NULLGPU_LOG names one.
void nullgpu_write(const char *format, ...);
// Whether lines are written.
int nullgpu_logs(void);
// Whether this is the training loop's thread, or autograd's, for which the loop waits.
int nullgpu_in_loop(void);
// Note that the current device has a context from now on. by: the call that made it.
void nullgpu_touch(const char *by);
// Count a kernel, and log its stream and name.
void nullgpu_kernel(const char *name, void *stream);
// Take `bytes` (negative: give back) of a device's memory. Nonzero: so many are not there.
int nullgpu_take(long bytes, int device);
// Note address space as memory of a device, and forget it.
void nullgpu_put(void *address, size_t bytes, int device);
void nullgpu_drop(void *address);
// Whether a CUDA context would exist on a device.
int nullgpu_touched(int device);
int nullgpu_devices(void);
void *nullgpu_reserve(size_t bytes);

// Attributes of an H100 that both APIs are asked for.
enum { SMS = 132, SHARED_BYTES = 49152, SHARED_OPTIN_BYTES = 232448, SHARED_SM_BYTES = 233472, THREADS_SM = 2048,
       REGISTERS = 65536, BUS_BITS = 5120, CLOCK_KHZ = 1980000, MEMORY_KHZ = 2619000, CUDA_VERSION_13 = 13000 };
