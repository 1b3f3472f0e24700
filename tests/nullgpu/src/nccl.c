// NCCL of one rank whose peers are nobody: every collective is there at once and moves nothing.
// The log has `nccl:KIND comm<number> n<ranks> count<elements> dt<type>`.
#include "nullgpu.h"
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int size, rank, number; } comm;
typedef struct { char bytes[128]; } unique_id;

int ncclGetVersion(int *version) { return *version = 22907, 0; }
int ncclGetUniqueId(unique_id *id) { return memset(id, 1, sizeof *id), 0; }
const char *ncclGetErrorString(int error) { return "an error of the null GPU"; }
const char *ncclGetLastError(comm *c) { return ""; }

static int make(comm **made, int size, int rank) {
    static int number;
    *made = malloc(sizeof **made);
    **made = (comm){size, rank, __sync_add_and_fetch(&number, 1)};
    nullgpu_write("NCCLINIT comm%d n%d r%d\n", (*made)->number, size, rank);
    return 0;
}
int ncclCommInitRank(comm **made, int size, unique_id id, int rank) { return make(made, size, rank); }
int ncclCommInitRankConfig(comm **made, int size, unique_id id, int rank, void *c) { return make(made, size, rank); }
int ncclCommInitRankScalable(comm **made, int size, int rank, int n, unique_id *ids, void *c) {
    return make(made, size, rank);
}
int ncclCommSplit(comm *c, int color, int key, comm **made, void *config) {
    return color == -1 ? *made = NULL, 0 : make(made, c->size, c->rank);
}
int ncclCommShrink(comm *c, int *left_out, int count, comm **made, void *config, int flags) {
    return make(made, c->size - count, c->rank);
}
int ncclCommCount(comm *c, int *size) { return *size = c->size, 0; }
int ncclCommUserRank(comm *c, int *rank) { return *rank = c->rank, 0; }
int ncclCommGetAsyncError(comm *c, int *error) { return *error = 0, 0; }
int ncclCommRegister(comm *c, void *buffer, size_t size, void **h) { return *h = (void *)1, 0; }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, comm *c) { return *op = 100, 0; }
int ncclMemAlloc(void **address, size_t bytes) { return cudaMalloc(address, bytes); }
NOTHING(ncclCommAbort) NOTHING(ncclCommDestroy) NOTHING(ncclCommFinalize) NOTHING(ncclCommDeregister)
NOTHING(ncclGroupStart) NOTHING(ncclGroupEnd) NOTHING(ncclRedOpDestroy) NOTHING(ncclMemFree) NOTHING(ncclCommMemStats)

static int collective(const char *kind, comm *c, size_t count, int type, void *stream) {
    char line[160];
    snprintf(line, sizeof line, "nccl:%s comm%d n%d count%zu dt%d", kind, c->number, c->size, count, type);
    return nullgpu_kernel(line, stream), 0;
}

// Outside of the buffer that it is in, a sum of this rank alone is a copy: code reads small sums back.
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, comm *c, void *stream) {
    static const int bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    if (from != to) cudaMemcpyAsync(to, from, count * bytes[type], cudaMemcpyDeviceToDevice, stream);
    return collective("AllReduce", c, count, type, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, comm *c, void *stream) {
    return collective("ReduceScatter", c, count, type, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, comm *c, void *stream) {
    return collective("AllGather", c, count, type, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, comm *c, void *stream) {
    return collective("Broadcast", c, count, type, stream);
}
int ncclBcast(void *buffer, size_t count, int type, int root, comm *c, void *stream) {
    return collective("Broadcast", c, count, type, stream);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, comm *c, void *stream) {
    return collective("Reduce", c, count, type, stream);
}
int ncclSend(const void *from, size_t count, int type, int peer, comm *c, void *stream) {
    return collective("Send", c, count, type, stream);
}
int ncclRecv(void *to, size_t count, int type, int peer, comm *c, void *stream) {
    return collective("Recv", c, count, type, stream);
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, comm *c, void *stream) {
    return collective("AllToAll", c, count, type, stream);
}
