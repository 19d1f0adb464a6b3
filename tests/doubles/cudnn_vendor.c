/* A libcudnn whose types, numbers and prototypes are NVIDIA's own: compiled against their cudnn.h, it takes nothing from
 * the adapter. It computes nothing and writes down what reached it, a line each in double_log.
 *
 * DOUBLE_VERSION: cudnnGetVersion()'s number. Below 90000 it is a cuDNN 8: where the header is that of cuDNN 9, statuses
 * have the numbers of cudnn8.h, there is no cudnnGetLastErrorString, and descriptors have three axes and more. */
#include <cudnn.h>

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if DOUBLE_VERSION < 90000
#include "cudnn8.h"
#define NAMED(name, number) {#name, number},
static const struct { const char *name; int number; } statuses[] = {CUDNN8_STATUSES(NAMED)};
enum { not_supported = 9 };
#else
#define NAMED(name) {#name, name}
static const struct { const char *name; int number; } statuses[] = {
    NAMED(CUDNN_STATUS_SUCCESS), NAMED(CUDNN_STATUS_BAD_PARAM), NAMED(CUDNN_STATUS_NOT_SUPPORTED),
    NAMED(CUDNN_STATUS_INTERNAL_ERROR), NAMED(CUDNN_STATUS_EXECUTION_FAILED)};
enum { not_supported = CUDNN_STATUS_NOT_SUPPORTED };
#endif

struct cudnnContext { cudaStream_t stream; };
struct cudnnTensorStruct { cudnnDataType_t dtype; int rank, dims[8], strides[8]; };
struct cudnnActivationStruct { cudnnActivationMode_t mode; cudnnNanPropagation_t nan; double bound; };

char double_log[1 << 16];
int double_status;       /* what a call answers that is ... */
char double_failing[64]; /* ... this one; any if empty */
int double_live;         /* handles and descriptors made and not destroyed */

static void note(const char *format, ...) {
    const size_t used = strlen(double_log);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(double_log + used, sizeof double_log - used, format, arguments);
    va_end(arguments);
}

static cudnnStatus_t answer(const char *name) {
    return double_failing[0] == 0 || strcmp(double_failing, name) == 0 ? (cudnnStatus_t)double_status : 0;
}
#define DONE() return note("\n"), answer(__func__)

static const char *dtype_name(cudnnDataType_t dtype) {
    return dtype == CUDNN_DATA_FLOAT      ? "float"
           : dtype == CUDNN_DATA_DOUBLE   ? "double"
           : dtype == CUDNN_DATA_HALF     ? "half"
           : dtype == CUDNN_DATA_BFLOAT16 ? "bfloat16"
                                          : "?";
}

static const char *mode_name(cudnnBatchNormMode_t mode) {
    return mode == CUDNN_BATCHNORM_PER_ACTIVATION       ? "per_activation"
           : mode == CUDNN_BATCHNORM_SPATIAL            ? "spatial"
           : mode == CUDNN_BATCHNORM_SPATIAL_PERSISTENT ? "persistent"
                                                        : "?";
}

static void data(const char *name, cudnnTensorDescriptor_t t, const void *address) {
    note(" %s=%s", name, dtype_name(t->dtype));
    for (int i = 0; i < t->rank; i++)
        note("%c%d", i ? ',' : ':', t->dims[i]);
    for (int i = 0; i < t->rank; i++)
        note("%c%d", i ? ',' : '/', t->strides[i]);
    note("@%#zx", (size_t)(uintptr_t)address);
}

static void pointers(const char *names, ...) { /* "scale bias": as many addresses follow */
    va_list arguments;
    va_start(arguments, names);
    while (*names != 0) {
        const int length = (int)strcspn(names, " ");
        note(" %.*s=%#zx", length, names, (size_t)(uintptr_t)va_arg(arguments, const void *));
        names += length + (names[length] == ' ');
    }
    va_end(arguments);
}

static void factor(const char *name, cudnnTensorDescriptor_t x, const void *value) {
    note(" %s=%g", name, x->dtype == CUDNN_DATA_DOUBLE ? *(const double *)value : (double)*(const float *)value);
}

size_t cudnnGetVersion(void) { return DOUBLE_VERSION; }

const char *cudnnGetErrorString(cudnnStatus_t status) {
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++)
        if (statuses[i].number == (int)status)
            return statuses[i].name;
    return "CUDNN_UNKNOWN_STATUS";
}

#if DOUBLE_VERSION >= 90000
void cudnnGetLastErrorString(char *message, size_t size) {
    snprintf(message, size, "%s", double_status ? "said the double" : "");
}
#endif

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    const cudnnStatus_t status = answer(__func__);
    if (status == 0) {
        double_live++;
        *handle = calloc(1, sizeof **handle);
    }
    return status;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    double_live--;
    free(handle);
    note("cudnnDestroy");
    DONE();
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return answer(__func__);
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    *stream = handle->stream;
    return answer(__func__);
}
cudnnStatus_t cudnnQueryRuntimeError(cudnnHandle_t handle, cudnnStatus_t *recorded, cudnnErrQueryMode_t mode,
                                     cudnnRuntimeTag_t *tag) {
    note("cudnnQueryRuntimeError %s tag=%p", mode == CUDNN_ERRQUERY_RAWCODE       ? "raw"
                                             : mode == CUDNN_ERRQUERY_NONBLOCKING ? "nonblocking"
                                             : mode == CUDNN_ERRQUERY_BLOCKING    ? "blocking"
                                                                                  : "?", (void *)tag);
    *recorded = CUDNN_STATUS_SUCCESS;
    DONE();
}

/* For the tests: a descriptor that somebody else made. */
void *double_descriptor(const char *dtype, int rank, const int *dims, const int *strides) {
    static struct cudnnTensorStruct made[16];
    static int count;
    struct cudnnTensorStruct *t = &made[count++ % 16];
    t->dtype = strcmp(dtype, "half") == 0 ? CUDNN_DATA_HALF : strcmp(dtype, "int8") == 0 ? CUDNN_DATA_INT8
               : strcmp(dtype, "double") == 0 ? CUDNN_DATA_DOUBLE : strcmp(dtype, "bfloat16") == 0 ? CUDNN_DATA_BFLOAT16
               : CUDNN_DATA_FLOAT;
    t->rank = rank;
    memcpy(t->dims, dims, (size_t)rank * sizeof *dims);
    memcpy(t->strides, strides, (size_t)rank * sizeof *strides);
    return t;
}

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t *desc) {
    double_live++;
    *desc = calloc(1, sizeof **desc);
    return answer(__func__);
}
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t desc) {
    double_live--;
    free(desc);
    return answer(__func__);
}
cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t desc, cudnnDataType_t dtype, int rank,
                                         const int dims[], const int strides[]) {
    if (rank > CUDNN_DIM_MAX || rank < (DOUBLE_VERSION < 90000 ? 3 : 2))
        return (cudnnStatus_t)not_supported;
    desc->dtype = dtype, desc->rank = rank;
    memcpy(desc->dims, dims, (size_t)rank * sizeof *dims);
    memcpy(desc->strides, strides, (size_t)rank * sizeof *strides);
    return answer(__func__);
}
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t desc, int requested, cudnnDataType_t *dtype,
                                         int *rank, int dims[], int strides[]) {
    const int count = requested < desc->rank ? requested : desc->rank;
    *dtype = desc->dtype, *rank = desc->rank;
    memcpy(dims, desc->dims, (size_t)count * sizeof *dims);
    memcpy(strides, desc->strides, (size_t)count * sizeof *strides);
    return answer(__func__);
}
cudnnStatus_t cudnnGetTensorSizeInBytes(const cudnnTensorDescriptor_t desc, size_t *size) {
    size_t last = 0;
    for (int i = 0; i < desc->rank; i++)
        last += (size_t)(desc->dims[i] - 1) * (size_t)desc->strides[i];
    *size = (last + 1) * (desc->dtype == CUDNN_DATA_DOUBLE ? 8 : desc->dtype == CUDNN_DATA_FLOAT ? 4 : 2);
    return answer(__func__);
}
cudnnStatus_t cudnnDeriveBNTensorDescriptor(cudnnTensorDescriptor_t derived, const cudnnTensorDescriptor_t x,
                                            cudnnBatchNormMode_t mode) {
    int step = 1;
    derived->dtype = x->dtype == CUDNN_DATA_DOUBLE ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
    derived->rank = x->rank;
    for (int i = x->rank - 1; i >= 0; i--) {
        derived->dims[i] = i == 1 || (i > 1 && mode == CUDNN_BATCHNORM_PER_ACTIVATION) ? x->dims[i] : 1;
        derived->strides[i] = step;
        step *= derived->dims[i];
    }
    return answer(__func__);
}

cudnnStatus_t cudnnBatchNormalizationForwardTraining(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, const void *alpha, const void *beta,
    const cudnnTensorDescriptor_t x_desc, const void *x, const cudnnTensorDescriptor_t y_desc, void *y,
    const cudnnTensorDescriptor_t param_desc, const void *scale, const void *bias, double average_factor,
    void *running_mean, void *running_variance, double epsilon, void *saved_mean, void *saved_inverse) {
    note("%s %s", __func__, mode_name(mode));
    factor("alpha", x_desc, alpha), factor("beta", x_desc, beta);
    data("x", x_desc, x), data("y", y_desc, y), data("scale", param_desc, scale);
    pointers("bias running_mean running_variance saved_mean saved_inv_variance", bias, running_mean, running_variance,
             saved_mean, saved_inverse);
    note(" factor=%g epsilon=%g", average_factor, epsilon);
    DONE();
}
cudnnStatus_t cudnnBatchNormalizationForwardInference(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, const void *alpha, const void *beta,
    const cudnnTensorDescriptor_t x_desc, const void *x, const cudnnTensorDescriptor_t y_desc, void *y,
    const cudnnTensorDescriptor_t param_desc, const void *scale, const void *bias, const void *mean,
    const void *variance, double epsilon) {
    note("%s %s", __func__, mode_name(mode));
    factor("alpha", x_desc, alpha), factor("beta", x_desc, beta);
    data("x", x_desc, x), data("y", y_desc, y), data("scale", param_desc, scale);
    pointers("bias running_mean running_variance", bias, mean, variance);
    note(" epsilon=%g", epsilon);
    DONE();
}
cudnnStatus_t cudnnBatchNormalizationBackward(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, const void *alpha, const void *beta, const void *alpha_param,
    const void *beta_param, const cudnnTensorDescriptor_t x_desc, const void *x, const cudnnTensorDescriptor_t dy_desc,
    const void *dy, const cudnnTensorDescriptor_t dx_desc, void *dx, const cudnnTensorDescriptor_t param_desc,
    const void *scale, void *dscale, void *dbias, double epsilon, const void *saved_mean, const void *saved_inverse) {
    note("%s %s", __func__, mode_name(mode));
    factor("alpha", x_desc, alpha), factor("beta", x_desc, beta);
    factor("alpha_param", x_desc, alpha_param), factor("beta_param", x_desc, beta_param);
    data("x", x_desc, x), data("dy", dy_desc, dy), data("dx", dx_desc, dx), data("scale", param_desc, scale);
    pointers("dscale dbias saved_mean saved_inv_variance", dscale, dbias, saved_mean, saved_inverse);
    note(" epsilon=%g", epsilon);
    DONE();
}

cudnnStatus_t cudnnTransformTensor(cudnnHandle_t handle, const void *alpha, const cudnnTensorDescriptor_t x_desc,
                                   const void *x, const void *beta, const cudnnTensorDescriptor_t y_desc, void *y) {
    note("%s", __func__);
    factor("alpha", x_desc, alpha), factor("beta", x_desc, beta), data("x", x_desc, x), data("y", y_desc, y);
    DONE();
}
cudnnStatus_t cudnnSetTensor(cudnnHandle_t handle, const cudnnTensorDescriptor_t y_desc, void *y, const void *value) {
    note("%s", __func__);
    factor("value", y_desc, value), data("y", y_desc, y);
    DONE();
}

cudnnStatus_t cudnnCreateActivationDescriptor(cudnnActivationDescriptor_t *desc) {
    const cudnnStatus_t status = answer(__func__);
    if (status == 0) {
        double_live++;
        *desc = calloc(1, sizeof **desc);
    }
    return status;
}
cudnnStatus_t cudnnSetActivationDescriptor(cudnnActivationDescriptor_t desc, cudnnActivationMode_t mode,
                                           cudnnNanPropagation_t nan, double bound) {
    *desc = (struct cudnnActivationStruct){mode, nan, bound};
    return answer(__func__);
}
cudnnStatus_t cudnnDestroyActivationDescriptor(cudnnActivationDescriptor_t desc) {
    double_live--;
    free(desc);
    return 0;
}
static void activation(cudnnActivationDescriptor_t a) {
    note(" %s %s %g", a->mode == CUDNN_ACTIVATION_RELU ? "relu" : "?", a->nan == CUDNN_PROPAGATE_NAN ? "nan" : "no nan",
         a->bound);
}
cudnnStatus_t cudnnActivationForward(cudnnHandle_t handle, cudnnActivationDescriptor_t desc, const void *alpha,
                                     const cudnnTensorDescriptor_t x_desc, const void *x, const void *beta,
                                     const cudnnTensorDescriptor_t y_desc, void *y) {
    note("%s", __func__);
    activation(desc);
    factor("alpha", x_desc, alpha), factor("beta", x_desc, beta), data("x", x_desc, x), data("y", y_desc, y);
    DONE();
}
cudnnStatus_t cudnnActivationBackward(cudnnHandle_t handle, cudnnActivationDescriptor_t desc, const void *alpha,
                                      const cudnnTensorDescriptor_t y_desc, const void *y,
                                      const cudnnTensorDescriptor_t dy_desc, const void *dy,
                                      const cudnnTensorDescriptor_t x_desc, const void *x, const void *beta,
                                      const cudnnTensorDescriptor_t dx_desc, void *dx) {
    note("%s", __func__);
    activation(desc);
    factor("alpha", x_desc, alpha), factor("beta", x_desc, beta);
    data("y", y_desc, y), data("dy", dy_desc, dy), data("x", x_desc, x), data("dx", dx_desc, dx);
    DONE();
}
