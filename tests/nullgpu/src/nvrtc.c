// NVRTC, with which torch builds some kernels when they first run (exp2, for example): any program compiles, to nothing.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef char **Program;

int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
const char *nvrtcGetErrorString(int result) { return "no error"; }
int nvrtcCreateProgram(Program *p, const char *source, const char *name, int n, const void *h, const void *i) {
    return *p = calloc(1, sizeof(char *)), 0;
}
int nvrtcDestroyProgram(Program *p) { return 0; }
int nvrtcAddNameExpression(Program p, const char *name) { return *p = strdup(name), 0; }
int nvrtcCompileProgram(Program p, int n, const char *const *options) { return 0; }
int nvrtcGetLoweredName(Program p, const char *name, const char **lowered) { return *lowered = strdup(name), 0; }
#define SIZE(name) int name(Program p, size_t *size) { return *size = 1, 0; }
#define TEXT(name) int name(Program p, char *text) { return *text = 0, 0; }
SIZE(nvrtcGetPTXSize) SIZE(nvrtcGetCUBINSize) SIZE(nvrtcGetProgramLogSize)
TEXT(nvrtcGetPTX) TEXT(nvrtcGetCUBIN) TEXT(nvrtcGetProgramLog)
