/* A stand-in for librocblas.so.4: the names that libMIOpen.so.1 links to. miopenCreate makes a rocBLAS handle and
 * sets it up; no batch-norm call computes with it, so every computation answers "not implemented". */
#include <stdlib.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_HANDLE = 1, NOT_IMPLEMENTED = 2, INVALID_POINTER = 3, MEMORY_ERROR = 5 };

struct handle {
    void *stream;
    int atomics;
};

API int rocblas_create_handle(void **handle);
API int rocblas_destroy_handle(void *handle);
API int rocblas_set_stream(void *handle, void *stream);
API int rocblas_get_atomics_mode(void *handle, int *mode);
API int rocblas_set_atomics_mode(void *handle, int mode);

int rocblas_create_handle(void **handle) {
    struct handle *h;
    if (handle == NULL)
        return INVALID_POINTER;
    *handle = h = calloc(1, sizeof *h);
    if (h == NULL)
        return MEMORY_ERROR;
    h->atomics = 1; /* rocblas_atomics_allowed, the default */
    return SUCCESS;
}

int rocblas_destroy_handle(void *handle) {
    free(handle);
    return handle == NULL ? INVALID_HANDLE : SUCCESS;
}

int rocblas_set_stream(void *handle, void *stream) {
    if (handle == NULL)
        return INVALID_HANDLE;
    ((struct handle *)handle)->stream = stream;
    return SUCCESS;
}

int rocblas_get_atomics_mode(void *handle, int *mode) {
    if (handle == NULL)
        return INVALID_HANDLE;
    if (mode == NULL)
        return INVALID_POINTER;
    *mode = ((struct handle *)handle)->atomics;
    return SUCCESS;
}

int rocblas_set_atomics_mode(void *handle, int mode) {
    if (handle == NULL)
        return INVALID_HANDLE;
    ((struct handle *)handle)->atomics = mode;
    return SUCCESS;
}

#define REFUSED(name)    \
    API int name(void);  \
    int name(void) {     \
        return NOT_IMPLEMENTED; \
    }
REFUSED(rocblas_gemm_ex)
REFUSED(rocblas_gemm_ex3)
REFUSED(rocblas_gemm_strided_batched_ex)
REFUSED(rocblas_gemm_strided_batched_ex3)
REFUSED(rocblas_sgemv)
