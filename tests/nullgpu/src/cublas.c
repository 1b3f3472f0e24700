// cuBLAS and cuBLASLt whose products compute nothing. The log has the shape of each: `gemm m n k batch type-of-A
// type-of-C`, types as numbers of cudaDataType (0: float32, 14: bfloat16, 28 and 29: float8).
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>

static int product(const char *from, long m, long n, long k, long batch, int a, int c, void *stream) {
    char line[160];
    snprintf(line, sizeof line, "gemm %ld %ld %ld %ld %d %d %s", m, n, k, batch, a, c, from);
    return nullgpu_kernel(line, stream), 0;
}

// A handle holds its stream and its math mode.
typedef struct { void *stream; int math; char rest[48]; } handle;
int cublasCreate_v2(handle **made) { return *made = calloc(1, sizeof **made), 0; }
int cublasSetStream_v2(handle *h, void *stream) { return h->stream = stream, 0; }
int cublasSetMathMode(handle *h, int mode) { return h->math = mode, 0; }
int cublasGetMathMode(handle *h, int *mode) { return *mode = h->math, 0; }
int cublasGetPointerMode_v2(handle *h, int *mode) { return *mode = 0, 0; }
NOTHING(cublasDestroy_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetPointerMode_v2) NOTHING(cublasSetSmCountTarget)

int cublasGemmEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *A, int at, int lda,
                 const void *B, int bt, int ldb, const void *beta, void *C, int ct, int ldc, int compute, int algorithm) {
    return product("GemmEx", m, n, k, 1, at, ct, h->stream);
}
int cublasGemmStridedBatchedEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *A, int at,
                               int lda, long long sa, const void *B, int bt, int ldb, long long sb, const void *beta,
                               void *C, int ct, int ldc, long long sc, int batch, int compute, int algorithm) {
    return product("GemmStridedBatchedEx", m, n, k, batch, at, ct, h->stream);
}
int cublasSgemm_v2(handle *h, int ta, int tb, int m, int n, int k) { return product("Sgemm", m, n, k, 1, 0, 0, h->stream); }
int cublasSgemmEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *A, int at, int lda,
                  const void *B, int bt, int ldb, const void *beta, void *C, int ct) {
    return product("SgemmEx", m, n, k, 1, at, ct, h->stream);
}
int cublasSgemmStridedBatched(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *A, int lda,
                              long long sa, const void *B, int ldb, long long sb, const void *beta, void *C, int ldc,
                              long long sc, int batch) {
    return product("SgemmStridedBatched", m, n, k, batch, 0, 0, h->stream);
}

#define OTHER(name) int name(handle *h) { return nullgpu_kernel("cublas:" #name, h->stream), 0; }
OTHER(cublasDgemm_v2) OTHER(cublasSgemv_v2) OTHER(cublasDgemv_v2) OTHER(cublasSdot_v2) OTHER(cublasDdot_v2)
OTHER(cublasDotEx) OTHER(cublasDgemmStridedBatched)

// cuBLASLt: layouts know rows, columns, type and batch; the description of a product knows whether A is transposed.
enum { DESC_TRANSA = 3, LAYOUT_BATCH = 5 };
typedef struct { int transposed; char rest[508]; } description;
typedef struct { long rows, columns; int type, batch; char rest[488]; } layout;

size_t cublasLtGetVersion(void) { return 130101; }
int cublasLtCreate(handle **made) { return cublasCreate_v2(made); }
int cublasLtMatmulPreferenceCreate(void **made) { return *made = calloc(1, 512), 0; }
int cublasLtMatmulDescCreate(description **made, int compute, int scale) { return *made = calloc(1, sizeof **made), 0; }
int cublasLtMatmulDescSetAttribute(description *d, int attribute, const int *value, size_t size) {
    if (attribute == DESC_TRANSA) d->transposed = *value != 0;
    return 0;
}
int cublasLtMatrixLayoutCreate(layout **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *made = calloc(1, sizeof **made);
    **made = (layout){rows, columns, type, 1};
    return 0;
}
int cublasLtMatrixLayoutSetAttribute(layout *l, int attribute, const int *value, size_t size) {
    if (attribute == LAYOUT_BATCH) l->batch = *value;
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *out, void *preference, int asked,
                                   void *result, int *count) {
    return memset(result, 0, 96), *count = 1, 0;  // one algorithm that needs no workspace
}
int cublasLtMatmul(void *h, description *d, const void *alpha, const void *A, layout *a, const void *B, layout *b,
                   const void *beta, const void *C, layout *c, void *D, layout *out, void *algorithm, void *workspace,
                   size_t size, void *stream) {
    long k = d->transposed ? a->rows : a->columns;
    return product("Lt", out->rows, out->columns, k, out->batch, a->type, out->type, stream);
}
NOTHING(cublasLtDestroy) NOTHING(cublasLtMatmulDescDestroy) NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cublasLtMatrixLayoutDestroy)
