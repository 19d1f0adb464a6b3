/* cuDNN 8 and 9, the imperative ("legacy") API: everything that is cuDNN's.
 *
 * First the vendor's facts, usable by themselves (C or C++) under PBN_PROTOTYPES_ONLY: the ABI
 * check holds them against the real header, test doubles are compiled from them. Then the adapter.
 */
#if !defined(PBN_PROTOTYPES_ONLY) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>

/* C(name, value): the same in cuDNN 8 and 9. */
#define PBN_CUDNN_CONSTANTS(C)                 \
    C(CUDNN_DATA_FLOAT, 0)                     \
    C(CUDNN_DATA_DOUBLE, 1)                    \
    C(CUDNN_DATA_HALF, 2)                      \
    C(CUDNN_DATA_BFLOAT16, 9)                  \
    C(CUDNN_BATCHNORM_PER_ACTIVATION, 0)       \
    C(CUDNN_BATCHNORM_SPATIAL, 1)              \
    C(CUDNN_BATCHNORM_SPATIAL_PERSISTENT, 2)   \
    C(CUDNN_ACTIVATION_RELU, 1)                \
    C(CUDNN_PROPAGATE_NAN, 1)                  \
    C(CUDNN_STATUS_SUCCESS, 0)                 \
    C(CUDNN_BATCHNORM_OPS_BN, 0)               \
    C(CUDNN_BATCHNORM_OPS_BN_ACTIVATION, 1)    \
    C(CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION, 2) \
    C(CUDNN_ERRQUERY_RAWCODE, 0)               \
    C(CUDNN_ERRQUERY_NONBLOCKING, 1)           \
    C(CUDNN_ERRQUERY_BLOCKING, 2)              \
    C(CUDNN_TYPE_HANDLE, 0)                    \
    C(CUDNN_TYPE_DATA_TYPE, 1)                 \
    C(CUDNN_TYPE_BOOLEAN, 2)                   \
    C(CUDNN_TYPE_INT64, 3)                     \
    C(CUDNN_TYPE_VOID_PTR, 6)                  \
    C(CUDNN_TYPE_HEUR_MODE, 8)                 \
    C(CUDNN_TYPE_POINTWISE_MODE, 14)           \
    C(CUDNN_TYPE_BACKEND_DESCRIPTOR, 15)       \
    C(CUDNN_TYPE_NORM_MODE, 27)                \
    C(CUDNN_TYPE_NORM_FWD_PHASE, 28)           \
    C(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, 0)   \
    C(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, 3)   \
    C(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, 4)  \
    C(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, 5)         \
    C(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, 13)   \
    C(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, 15)        \
    C(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, 16)          \
    C(CUDNN_BACKEND_TENSOR_DESCRIPTOR, 17)                \
    C(CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR, 29)  \
    C(CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR, 30) \
    C(CUDNN_ATTR_POINTWISE_MODE, 0)                       \
    C(CUDNN_ATTR_POINTWISE_MATH_PREC, 1)                  \
    C(CUDNN_ATTR_ENGINEHEUR_MODE, 200)                    \
    C(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, 201)         \
    C(CUDNN_ATTR_ENGINEHEUR_RESULTS, 202)                 \
    C(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, 400)              \
    C(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, 401)       \
    C(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, 402)      \
    C(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, 750)  \
    C(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, 751)          \
    C(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, 752)          \
    C(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, 753)          \
    C(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, 800)              \
    C(CUDNN_ATTR_OPERATIONGRAPH_OPS, 801)                 \
    C(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 900)              \
    C(CUDNN_ATTR_TENSOR_DATA_TYPE, 901)                   \
    C(CUDNN_ATTR_TENSOR_DIMENSIONS, 902)                  \
    C(CUDNN_ATTR_TENSOR_STRIDES, 903)                     \
    C(CUDNN_ATTR_TENSOR_UNIQUE_ID, 906)                   \
    C(CUDNN_ATTR_TENSOR_IS_VIRTUAL, 907)                  \
    C(CUDNN_ATTR_TENSOR_IS_BY_VALUE, 908)                 \
    C(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, 1000)           \
    C(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, 1001)        \
    C(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, 1003)            \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_MODE, 2000)           \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, 2001)          \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, 2002)          \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC, 2003)      \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC, 2004)      \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, 2005)     \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, 2006)      \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC, 2007)   \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC, 2008)    \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC, 2009)  \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC, 2010)   \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC, 2011) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC, 2012)  \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, 2013)          \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_MODE, 2100)           \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_XDESC, 2101)          \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC, 2102)      \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC, 2103)      \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC, 2104)         \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC, 2105)     \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC, 2107)    \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC, 2108)     \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC, 2109)         \
    C(CUDNN_HEUR_MODE_FALLBACK, 2)                        \
    C(CUDNN_HEUR_MODE_A, 3)                               \
    C(CUDNN_BATCH_NORM, 2)                                \
    C(CUDNN_NORM_FWD_TRAINING, 1)                         \
    C(CUDNN_POINTWISE_ADD, 0)                             \
    C(CUDNN_POINTWISE_MUL, 1)                             \
    C(CUDNN_POINTWISE_SUB, 9)                             \
    C(CUDNN_POINTWISE_RSQRT, 17)                          \
    C(CUDNN_POINTWISE_IDENTITY, 21)                       \
    C(CUDNN_POINTWISE_RELU_FWD, 100)                      \
    C(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, 2)            \
    C(CUDNN_TYPE_NAN_PROPOGATION, 10)                     \
    C(CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 18)             \
    C(CUDNN_BACKEND_REDUCTION_DESCRIPTOR, 21)             \
    C(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, 22)   \
    C(CUDNN_ATTR_REDUCTION_OPERATOR, 1600)                \
    C(CUDNN_ATTR_REDUCTION_COMP_TYPE, 1601)               \
    C(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, 1610)         \
    C(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, 1611)         \
    C(CUDNN_ATTR_OPERATION_REDUCTION_DESC, 1612)          \
    C(CUDNN_REDUCE_TENSOR_ADD, 0)

/* cuDNN 9 statuses whose family their thousands do not tell (1008 exists since 9.2). */
#define PBN_CUDNN9_STATUSES(C)                                      \
    C(CUDNN_STATUS_NOT_INITIALIZED, 1001)                           \
    C(CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH, 1002)               \
    C(CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH, 1003)            \
    C(CUDNN_STATUS_DEPRECATED, 1004)                                \
    C(CUDNN_STATUS_LICENSE_ERROR, 1005)                             \
    C(CUDNN_STATUS_RUNTIME_IN_PROGRESS, 1006)                       \
    C(CUDNN_STATUS_RUNTIME_FP_OVERFLOW, 1007)                       \
    C(CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED, 1008)                 \
    C(CUDNN_STATUS_BAD_PARAM, 2000)                                 \
    C(CUDNN_STATUS_NOT_SUPPORTED, 3000)                             \
    C(CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER, 3005)    \
    C(CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDART, 3006)         \
    C(CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING, 3008) \
    C(CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE, 3009)      \
    C(CUDNN_STATUS_INTERNAL_ERROR, 4000)                            \
    C(CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, 4003)     \
    C(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, 4004)   \
    C(CUDNN_STATUS_EXECUTION_FAILED, 5000)

/* All of cuDNN 8's statuses but success; some names are those of cuDNN 9 with another number. */
#define PBN_CUDNN8_STATUSES(C)                      \
    C(CUDNN_STATUS_NOT_INITIALIZED, 1)              \
    C(CUDNN_STATUS_ALLOC_FAILED, 2)                 \
    C(CUDNN_STATUS_BAD_PARAM, 3)                    \
    C(CUDNN_STATUS_INTERNAL_ERROR, 4)               \
    C(CUDNN_STATUS_INVALID_VALUE, 5)                \
    C(CUDNN_STATUS_ARCH_MISMATCH, 6)                \
    C(CUDNN_STATUS_MAPPING_ERROR, 7)                \
    C(CUDNN_STATUS_EXECUTION_FAILED, 8)             \
    C(CUDNN_STATUS_NOT_SUPPORTED, 9)                \
    C(CUDNN_STATUS_LICENSE_ERROR, 10)               \
    C(CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING, 11) \
    C(CUDNN_STATUS_RUNTIME_IN_PROGRESS, 12)         \
    C(CUDNN_STATUS_RUNTIME_FP_OVERFLOW, 13)         \
    C(CUDNN_STATUS_VERSION_MISMATCH, 14)

/* The driver's results after which, as cuda.h says of them, all further work of the process fails in the same way. Not
 * CONTEXT_IS_DESTROYED: it is also what is said of a context for which there was no memory. */
#define PBN_CUDA_LOST(C)                     \
    C(CUDA_ERROR_ECC_UNCORRECTABLE, 214)     \
    C(CUDA_ERROR_NVLINK_UNCORRECTABLE, 220)  \
    C(CUDA_ERROR_ILLEGAL_ADDRESS, 700)       \
    C(CUDA_ERROR_LAUNCH_TIMEOUT, 702)        \
    C(CUDA_ERROR_ASSERT, 710)                \
    C(CUDA_ERROR_HARDWARE_STACK_ERROR, 714)  \
    C(CUDA_ERROR_ILLEGAL_INSTRUCTION, 715)   \
    C(CUDA_ERROR_MISALIGNED_ADDRESS, 716)    \
    C(CUDA_ERROR_INVALID_ADDRESS_SPACE, 717) \
    C(CUDA_ERROR_INVALID_PC, 718)            \
    C(CUDA_ERROR_LAUNCH_FAILED, 719)

#define PBN_CUDA_CONSTANTS(C)                   \
    C(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)      \
    C(CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)       \
    C(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)   \
    C(CU_MEMORYTYPE_DEVICE, 2)

#define PBN_CONSTANT(name, value) PBN_##name = value,
#define PBN_CONSTANT8(name, value) PBN_V8_##name = value,
enum { PBN_CUDNN_CONSTANTS(PBN_CONSTANT) PBN_CUDNN9_STATUSES(PBN_CONSTANT) PBN_CUDA_LOST(PBN_CONSTANT)
       PBN_CUDA_CONSTANTS(PBN_CONSTANT) };
enum { PBN_CUDNN8_STATUSES(PBN_CONSTANT8) };
#undef PBN_CONSTANT
#undef PBN_CONSTANT8

/* X(result, name, (parameters)); statuses, modes and dtypes are int-sized enums, handles, descriptors
 * and streams pointers to opaque structs. */
#define PBN_CUDNN_SYMBOLS(REQUIRED, OPTIONAL)                                                                        \
    REQUIRED(size_t, cudnnGetVersion, (void))                                                                        \
    REQUIRED(const char *, cudnnGetErrorString, (int status))                                                        \
    REQUIRED(int, cudnnCreate, (void **handle))                                                                      \
    REQUIRED(int, cudnnDestroy, (void *handle))                                                                      \
    REQUIRED(int, cudnnSetStream, (void *handle, void *stream))                                                      \
    REQUIRED(int, cudnnGetStream, (void *handle, void **stream))                                                     \
    REQUIRED(int, cudnnCreateTensorDescriptor, (void **desc))                                                        \
    REQUIRED(int, cudnnDestroyTensorDescriptor, (void *desc))                                                        \
    REQUIRED(int, cudnnSetTensorNdDescriptor,                                                                        \
             (void *desc, int dtype, int rank, const int *dims, const int *strides))                                 \
    REQUIRED(int, cudnnGetTensorNdDescriptor,                                                                        \
             (const void *desc, int rank_requested, int *dtype, int *rank, int *dims, int *strides))                 \
    REQUIRED(int, cudnnGetTensorSizeInBytes, (const void *desc, size_t *bytes))                                      \
    REQUIRED(int, cudnnDeriveBNTensorDescriptor, (void *derived, const void *x_desc, int mode))                      \
    REQUIRED(int, cudnnBatchNormalizationForwardTraining,                                                            \
             (void *handle, int mode, const void *alpha, const void *beta, const void *x_desc, const void *x,        \
              const void *y_desc, void *y, const void *param_desc, const void *scale, const void *bias,              \
              double factor, void *running_mean, void *running_variance, double epsilon, void *saved_mean,           \
              void *saved_inv_variance))                                                                             \
    REQUIRED(int, cudnnBatchNormalizationForwardInference,                                                           \
             (void *handle, int mode, const void *alpha, const void *beta, const void *x_desc, const void *x,        \
              const void *y_desc, void *y, const void *param_desc, const void *scale, const void *bias,              \
              const void *running_mean, const void *running_variance, double epsilon))                               \
    REQUIRED(int, cudnnBatchNormalizationBackward,                                                                   \
             (void *handle, int mode, const void *alpha, const void *beta, const void *alpha_param,                  \
              const void *beta_param, const void *x_desc, const void *x, const void *dy_desc, const void *dy,        \
              const void *dx_desc, void *dx, const void *param_desc, const void *scale, void *dscale, void *dbias,   \
              double epsilon, const void *saved_mean, const void *saved_inv_variance))                               \
    OPTIONAL(void, cudnnGetLastErrorString, (char *text, size_t size)) /* cuDNN 9 */                                 \
    OPTIONAL(int, cudnnTransformTensor,                                                                              \
             (void *handle, const void *alpha, const void *x_desc, const void *x, const void *beta,                  \
              const void *y_desc, void *y))                                                                          \
    OPTIONAL(int, cudnnAddTensor,                                                                                    \
             (void *handle, const void *alpha, const void *x_desc, const void *x, const void *beta,                  \
              const void *y_desc, void *y))                                                                          \
    OPTIONAL(int, cudnnSetTensor, (void *handle, const void *y_desc, void *y, const void *value))                    \
    OPTIONAL(int, cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize,                                          \
             (void *handle, int mode, int ops, const void *x_desc, const void *z_desc, const void *y_desc,           \
              const void *param_desc, const void *activation, size_t *bytes))                                        \
    OPTIONAL(int, cudnnBatchNormalizationForwardTrainingEx,                                                          \
             (void *handle, int mode, int ops, const void *alpha, const void *beta, const void *x_desc,              \
              const void *x, const void *z_desc, const void *z, const void *y_desc, void *y,                         \
              const void *param_desc, const void *scale, const void *bias, double average_factor,                    \
              void *running_mean, void *running_variance, double epsilon, void *saved_mean,                          \
              void *saved_inv_variance, void *activation, void *workspace, size_t workspace_size, void *reserve,     \
              size_t reserve_size))                                                                                  \
    OPTIONAL(int, cudnnGetBatchNormalizationBackwardExWorkspaceSize,                                                 \
             (void *handle, int mode, int ops, const void *x_desc, const void *y_desc, const void *dy_desc,          \
              const void *dz_desc, const void *dx_desc, const void *param_desc, const void *activation,              \
              size_t *bytes))                                                                                        \
    OPTIONAL(int, cudnnBatchNormalizationBackwardEx,                                                                 \
             (void *handle, int mode, int ops, const void *alpha, const void *beta, const void *alpha_param,         \
              const void *beta_param, const void *x_desc, const void *x, const void *y_desc, const void *y,          \
              const void *dy_desc, const void *dy, const void *dz_desc, void *dz, const void *dx_desc, void *dx,     \
              const void *param_desc, const void *scale, const void *bias, void *dscale, void *dbias,                \
              double epsilon, const void *saved_mean, const void *saved_inv_variance, void *activation,              \
              void *workspace, size_t workspace_size, void *reserve, size_t reserve_size))                           \
    OPTIONAL(int, cudnnGetBatchNormalizationTrainingExReserveSpaceSize,                                              \
             (void *handle, int mode, int ops, const void *activation, const void *x_desc, size_t *bytes))           \
    OPTIONAL(int, cudnnQueryRuntimeError, (void *handle, int *recorded, int mode, void *tag))                        \
    OPTIONAL(int, cudnnBackendCreateDescriptor, (int type, void **desc))                                             \
    OPTIONAL(int, cudnnBackendDestroyDescriptor, (void *desc))                                                       \
    OPTIONAL(int, cudnnBackendSetAttribute,                                                                          \
             (void *desc, int attribute, int type, int64_t count, const void *values))                               \
    OPTIONAL(int, cudnnBackendGetAttribute,                                                                          \
             (const void *desc, int attribute, int type, int64_t requested, int64_t *count, void *values))           \
    OPTIONAL(int, cudnnBackendFinalize, (void *desc))                                                                \
    OPTIONAL(int, cudnnBackendExecute, (void *handle, void *plan, void *variant_pack))                               \
    OPTIONAL(int, cudnnCreateActivationDescriptor, (void **desc))                                                    \
    OPTIONAL(int, cudnnSetActivationDescriptor, (void *desc, int mode, int nan, double coefficient))                 \
    OPTIONAL(int, cudnnDestroyActivationDescriptor, (void *desc))                                                    \
    OPTIONAL(int, cudnnActivationForward,                                                                            \
             (void *handle, void *activation, const void *alpha, const void *x_desc, const void *x,                  \
              const void *beta, const void *y_desc, void *y))                                                        \
    OPTIONAL(int, cudnnActivationBackward,                                                                           \
             (void *handle, void *activation, const void *alpha, const void *y_desc, const void *y,                  \
              const void *dy_desc, const void *dy, const void *x_desc, const void *x, const void *beta,              \
              const void *dx_desc, void *dx))

/* From the driver, libcuda.so.1. */
#define PBN_CUDA_DRIVER_SYMBOLS(X)                                                                    \
    X(int, cuCtxGetCurrent, (void **context))                                                         \
    X(int, cuCtxPushCurrent_v2, (void *context))                                                      \
    X(int, cuCtxPopCurrent_v2, (void **context))                                                      \
    X(int, cuCtxGetDevice, (int *device))                                                             \
    X(int, cuStreamGetCtx, (void *stream, void **context))                                            \
    X(int, cuDeviceGetCount, (int *count))                                                            \
    X(int, cuPointerGetAttributes,                                                                    \
      (unsigned count, int *attributes, void **values, unsigned long long address))                   \
    X(int, cuMemGetInfo_v2, (size_t *unused, size_t *total))                                          \
    X(int, cuStreamQuery, (void *stream))                                                             \
    X(int, cuGetErrorName, (int error, const char **name))

#define PBN_PROTOTYPE(result, name, parameters) typedef result(*pbn_##name##_fn) parameters;
PBN_CUDNN_SYMBOLS(PBN_PROTOTYPE, PBN_PROTOTYPE)
PBN_CUDA_DRIVER_SYMBOLS(PBN_PROTOTYPE)
#undef PBN_PROTOTYPE

#ifndef PBN_PROTOTYPES_ONLY

#include <float.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "pybnorm/adapter.h"
#include "pybnorm/dl.h"

struct pbn_handle {
    void *vendor;
    int owned;
    void *context; /* CUDA's, of the device that the vendor's handle was made for; NULL where it is not known */
    int device;
};

typedef struct cudnn_api {
    int major; /* 0: nothing loaded */
#define PBN_MEMBER(result, name, parameters) pbn_##name##_fn name;
    PBN_CUDNN_SYMBOLS(PBN_MEMBER, PBN_MEMBER)
#undef PBN_MEMBER
} cudnn_api;

static cudnn_api api;
static char loaded_path[PBN_PATH_MAX]; /* of the library behind `api` */

static const char no_handle[] = "the handle is missing";
static const char no_tensor[] = "a tensor descriptor is missing or was never set";
static const char no_pointer[] = "a required pointer is missing";
static const char not_loaded[] = "the cuDNN library has not been loaded";
static const char bad_mode[] = "the mode is none of PER_ACTIVATION, SPATIAL, SPATIAL_PERSISTENT";
static const char bad_dtype[] = "the dtype is none of float32, float64, float16, bfloat16";
static const char bad_rank[] = "the rank is outside 2 to 8";
static const char rank2_in_8[] = "cuDNN 8 has no tensor descriptor of rank 2; describe the tensor as (N, C, 1, 1)";
static const char not_mergeable[] =
    "cuDNN computes on rank 4 and 5 only, and the spatial axes of this rank 6 to 8 tensor are not mutually contiguous, "
    "so they cannot be merged into one";

/* cuDNN 9's text stays until someone reads it, whoever's failure it was: another user of the library
 * on this thread may have left one. Reading it takes some 36 ns, a call 3 microseconds and more. */
static inline void forget_vendor_text(void) {
    char text[1];
    if (api.cudnnGetLastErrorString != NULL)
        api.cudnnGetLastErrorString(text, sizeof text);
}

/* ---- loading ---------------------------------------------------------------------------------- */

/* libcudnn.so is a dispatcher: it opens its parts at first use, and when one is missing it prints and
 * abort()s the process (9.27, 8.9.7). So the parts that this file's calls reach are opened first.
 * The order is the one in which the dispatcher will find them: in the process, beside itself, elsewhere. */
static int open_part(pbn_library *lib, const char *soname) {
    pbn_library part;
    char path[PBN_PATH_MAX];
    const char *slash = strrchr(lib->path, '/');
    if (pbn_dl_open(&part, soname, 1) == PBN_OK)
        return PBN_OK;
    if (slash != NULL) {
        int length = snprintf(path, sizeof path, "%.*s/%s", (int)(slash - lib->path), lib->path, soname);
        if (length > 0 && (size_t)length < sizeof path && pbn_dl_open(&part, path, 0) == PBN_OK)
            return PBN_OK;
    }
    if (pbn_dl_open(&part, soname, 0) == PBN_OK)
        return PBN_OK;
    snprintf(lib->message, sizeof lib->message,
             "its part %s cannot be opened, and calling cuDNN without it would abort the process: %.*s", soname,
             (int)sizeof lib->message / 2, part.message);
    return PBN_E_LIBRARY;
}

static int open_parts(pbn_library *lib) {
    /* The version cannot be asked before the parts are there; these exports tell it apart. */
    static const struct {
        const char *export_name, *parts[2];
    } dispatchers[] = {
        {"cudnnGraphVersionCheck", {"libcudnn_graph.so.9", "libcudnn_ops.so.9"}},
        {"cudnnOpsTrainVersionCheck", {"libcudnn_ops_infer.so.8", "libcudnn_ops_train.so.8"}},
    };
    for (size_t i = 0; i < sizeof dispatchers / sizeof dispatchers[0]; i++) {
        if (pbn_dl_symbol(lib->handle, dispatchers[i].export_name) == NULL)
            continue;
        for (int part = 0; part < 2; part++) {
            int status = open_part(lib, dispatchers[i].parts[part]);
            if (status != PBN_OK)
                return status;
        }
    }
    return PBN_OK;
}

static int resolve(pbn_library *lib, cudnn_api *table) {
    void *symbol;
    int status;
#define PBN_REQUIRE(result, name, parameters)           \
    status = pbn_dl_require(lib, #name, &symbol);       \
    if (status != PBN_OK)                               \
        return status;                                  \
    memcpy(&table->name, &symbol, sizeof table->name);
#define PBN_PROBE(result, name, parameters)             \
    symbol = pbn_dl_symbol(lib->handle, #name);         \
    memcpy(&table->name, &symbol, sizeof table->name);
    PBN_CUDNN_SYMBOLS(PBN_REQUIRE, PBN_PROBE)
#undef PBN_REQUIRE
#undef PBN_PROBE
    return PBN_OK;
}

static int ask_version(pbn_library *lib, cudnn_api *table) {
    size_t number = table->cudnnGetVersion(); /* 9.27.0 is 92700, 8.9.7 is 8907 */
    size_t unit = number >= 10000 ? 10000 : 1000;
    if (number < 1000000) {
        lib->version[0] = (int32_t)(number / unit);
        lib->version[1] = (int32_t)(number % unit / 100);
        lib->version[2] = (int32_t)(number % 100);
    }
    if (lib->version[0] != 8 && lib->version[0] != 9) {
        snprintf(lib->message, sizeof lib->message,
                 "cudnnGetVersion() returned %zu; cuDNN 8 and cuDNN 9 are the versions this backend speaks", number);
        return PBN_E_VERSION;
    }
    table->major = lib->version[0];
    return PBN_OK;
}

static int cudnn_load(const char *file, int no_load, pbn_library *out) {
    cudnn_api fresh = {0}; /* an earlier load stays in force unless this one succeeds */
    if (out == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "no record for the library");
    int status = pbn_dl_open(out, file, no_load);
    if (status != PBN_OK)
        return pbn_refuse(status, "the cuDNN library cannot be opened");
    status = resolve(out, &fresh);
    if (status == PBN_OK)
        status = open_parts(out);
    if (status == PBN_OK)
        status = ask_version(out, &fresh);
    if (status != PBN_OK) {
        pbn_dl_discard(out);
        return pbn_refuse(status, "the cuDNN library cannot be used");
    }
    api = fresh;
    memcpy(loaded_path, out->path, sizeof loaded_path);
    return PBN_OK;
}

static int cudnn_has_symbol(const char *name) {
    if (name == NULL)
        return -1;
#define PBN_PRESENT(result, symbol, parameters) \
    if (strcmp(name, #symbol) == 0)             \
        return api.symbol != NULL;
    PBN_CUDNN_SYMBOLS(PBN_PRESENT, PBN_PRESENT)
#undef PBN_PRESENT
    return -1;
}

/* ---- statuses --------------------------------------------------------------------------------- */

static const char *cudnn_status_name(int status) {
    const char *name;
    if (status < 0)
        return "not a cuDNN status";
    if (api.major == 0)
        return "cuDNN is not loaded";
    name = api.cudnnGetErrorString(status);
    return name != NULL ? name : "CUDNN_UNKNOWN_STATUS";
}

static int status_class_8(int status) {
    switch (status) {
    case PBN_V8_CUDNN_STATUS_NOT_INITIALIZED:
    case PBN_V8_CUDNN_STATUS_LICENSE_ERROR:
    case PBN_V8_CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING:
        return PBN_CLASS_NOT_INITIALIZED;
    case PBN_V8_CUDNN_STATUS_ALLOC_FAILED:
        return PBN_CLASS_ALLOCATION;
    case PBN_V8_CUDNN_STATUS_BAD_PARAM:
    case PBN_V8_CUDNN_STATUS_INVALID_VALUE:
        return PBN_CLASS_BAD_PARAMETER;
    case PBN_V8_CUDNN_STATUS_ARCH_MISMATCH:
    case PBN_V8_CUDNN_STATUS_NOT_SUPPORTED:
        return PBN_CLASS_NOT_SUPPORTED;
    case PBN_V8_CUDNN_STATUS_EXECUTION_FAILED:
    case PBN_V8_CUDNN_STATUS_RUNTIME_IN_PROGRESS:
    case PBN_V8_CUDNN_STATUS_RUNTIME_FP_OVERFLOW:
        return PBN_CLASS_EXECUTION;
    case PBN_V8_CUDNN_STATUS_VERSION_MISMATCH:
        return PBN_CLASS_VERSION;
    case PBN_V8_CUDNN_STATUS_INTERNAL_ERROR:
    case PBN_V8_CUDNN_STATUS_MAPPING_ERROR:
    default:
        return PBN_CLASS_INTERNAL;
    }
}

static int status_class_9(int status) {
    switch (status) {
    case PBN_CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH:
    case PBN_CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH:
        return PBN_CLASS_VERSION;
    case PBN_CUDNN_STATUS_NOT_INITIALIZED:
    case PBN_CUDNN_STATUS_LICENSE_ERROR:
    case PBN_CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED:
    /* Numbered as "not supported", but it is the installation that is broken, not the request. */
    case PBN_CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER:
    case PBN_CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDART:
    case PBN_CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING:
    case PBN_CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE:
        return PBN_CLASS_NOT_INITIALIZED;
    case PBN_CUDNN_STATUS_DEPRECATED:
        return PBN_CLASS_NOT_SUPPORTED;
    case PBN_CUDNN_STATUS_RUNTIME_IN_PROGRESS:
    case PBN_CUDNN_STATUS_RUNTIME_FP_OVERFLOW:
        return PBN_CLASS_EXECUTION;
    case PBN_CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED:
    case PBN_CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED:
        return PBN_CLASS_ALLOCATION;
    default:
        break;
    }
    switch (status / 1000 * 1000) { /* the vendor's own rule for the family of a status */
    case PBN_CUDNN_STATUS_BAD_PARAM:
        return PBN_CLASS_BAD_PARAMETER;
    case PBN_CUDNN_STATUS_NOT_SUPPORTED:
        return PBN_CLASS_NOT_SUPPORTED;
    case PBN_CUDNN_STATUS_EXECUTION_FAILED:
        return PBN_CLASS_EXECUTION;
    case PBN_CUDNN_STATUS_INTERNAL_ERROR:
    default:
        return PBN_CLASS_INTERNAL;
    }
}

static int cudnn_status_class(int status) {
    if (status == PBN_CUDNN_STATUS_SUCCESS)
        return PBN_CLASS_SUCCESS;
    if (status < 0)
        return PBN_CLASS_INTERNAL;
    return api.major == 8 ? status_class_8(status) : status_class_9(status);
}

static void cudnn_last_error(int status, char *text, size_t size) {
    if (text == NULL || size == 0)
        return;
    text[0] = '\0';
    if (status < 0)
        pbn_copy_text(text, size, pbn_reason);
    else if (status > 0 && api.cudnnGetLastErrorString != NULL)
        api.cudnnGetLastErrorString(text, size);
    text[size - 1] = '\0';
}

/* ---- device, handle, stream --------------------------------------------------------------------- */

static struct {
    int found;
#define PBN_MEMBER(result, name, parameters) pbn_##name##_fn name;
    PBN_CUDA_DRIVER_SYMBOLS(PBN_MEMBER)
#undef PBN_MEMBER
} driver; /* written once, by find_driver; read behind a call of it, so also by all who have a handle */

/* The driver, if it is in the process: cuDNN, or whoever has a context, has loaded it. It may come later. */
static int find_driver(void) {
    static atomic_flag taken = ATOMIC_FLAG_INIT;
    pbn_library library;
    int found;
    while (atomic_flag_test_and_set(&taken))
        ; /* another thread is looking for it */
    if (!driver.found && pbn_dl_open(&library, "libcuda.so.1", 1) == PBN_OK) {
        void *symbol;
#define PBN_PROBE(result, name, parameters)           \
        symbol = pbn_dl_symbol(library.handle, #name); \
        memcpy(&driver.name, &symbol, sizeof driver.name);
        PBN_CUDA_DRIVER_SYMBOLS(PBN_PROBE)
#undef PBN_PROBE
        driver.found = 1;
    }
    found = driver.found;
    atomic_flag_clear(&taken);
    return found;
}

/* The context of the last call that the vendor refused, on this thread. */
static _Thread_local void *failed_in;

/* Asking for the current context takes some 10 ns. A context pushed on the thread's stack is the runtime's, too. */
static int go_to(void *context, int *before) {
    void *current = NULL;
    *before = 0;
    if (context == NULL || (driver.cuCtxGetCurrent(&current) == 0 && current == context))
        return PBN_OK;
    if (driver.cuCtxPushCurrent_v2(context) != 0)
        return pbn_refuse(PBN_E_DEVICE, pbn_no_place);
    *before = 1;
    return PBN_OK;
}

static void come_back(int before) {
    void *context;
    if (before)
        driver.cuCtxPopCurrent_v2(&context);
}

static int enter(const pbn_handle *handle, int *before) {
    return go_to(handle != NULL ? handle->context : NULL, before);
}

static void leave(const pbn_handle *handle, int before, int status) {
    if (status > 0)
        failed_in = handle->context;
    come_back(before);
}

static int is_lost(int result) {
#define PBN_LOST(name, value) || result == PBN_##name
    return 0 PBN_CUDA_LOST(PBN_LOST);
#undef PBN_LOST
}

/* A kernel that fails for good takes its context with it; cuDNN then answers every call with EXECUTION_FAILED or
 * INTERNAL_ERROR, and its text does not say which error that was. These driver calls neither wait nor launch anything;
 * the second asks the thread's own default stream, which does not touch a capture of another one. */
static int cudnn_context_lost(int status, char *text, size_t size) {
    void *const per_thread_stream = (void *)(uintptr_t)2; /* CU_STREAM_PER_THREAD */
    const char *name = NULL;
    size_t unused, total;
    int before, result = 0;
    if (text == NULL || size == 0 || status <= 0)
        return 0;
    text[0] = '\0';
    switch (cudnn_status_class(status)) {
    case PBN_CLASS_EXECUTION:
    case PBN_CLASS_INTERNAL:
    case PBN_CLASS_ALLOCATION:
    case PBN_CLASS_NOT_INITIALIZED:
        break;
    default:
        return 0;
    }
    if (!find_driver() || go_to(failed_in, &before) != PBN_OK)
        return 0;
    if (driver.cuMemGetInfo_v2 != NULL)
        result = driver.cuMemGetInfo_v2(&unused, &total);
    if (!is_lost(result) && driver.cuStreamQuery != NULL)
        result = driver.cuStreamQuery(per_thread_stream);
    come_back(before);
    if (!is_lost(result))
        return 0;
    if (driver.cuGetErrorName == NULL || driver.cuGetErrorName(result, &name) != 0 || name == NULL)
        name = "an error of the driver";
    snprintf(text, size,
             "the CUDA context is lost (%s, %d): a kernel of this call or of an earlier one, of whatever library, "
             "failed for good, and nothing more can run on this device in this process",
             name, result);
    return 1;
}

static int cudnn_handle_device(const pbn_handle *handle) {
    return handle != NULL ? handle->device : -1;
}

static int cudnn_device_count(void) {
    int count = 0;
    return find_driver() && driver.cuDeviceGetCount != NULL && driver.cuDeviceGetCount(&count) == 0 ? count : 0;
}

/* Managed and pinned memory is every device's. The driver answers for what it does not know, too: with zeros. */
static int cudnn_memory_device(const void *address) {
    int attributes[] = {PBN_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, PBN_CU_POINTER_ATTRIBUTE_IS_MANAGED,
                        PBN_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    unsigned type = 0, managed = 0;
    int ordinal = -1;
    void *values[] = {&type, &managed, &ordinal};
    if (!driver.found || driver.cuPointerGetAttributes == NULL ||
        driver.cuPointerGetAttributes(3, attributes, values, (uintptr_t)address) != 0 ||
        type != PBN_CU_MEMORYTYPE_DEVICE || managed)
        return -1;
    return ordinal;
}

/* Where a handle is: of one made by somebody else its stream says it, unless that is the default one. */
static void place(pbn_handle *handle) {
    void *stream = NULL;
    int before;
    handle->context = NULL;
    handle->device = -1;
    if (!find_driver() || driver.cuCtxGetDevice == NULL)
        return;
    if (driver.cuCtxGetCurrent != NULL && driver.cuCtxPushCurrent_v2 != NULL && driver.cuCtxPopCurrent_v2 != NULL) {
        if (!handle->owned && driver.cuStreamGetCtx != NULL && api.cudnnGetStream(handle->vendor, &stream) == 0 &&
            stream != NULL && driver.cuStreamGetCtx(stream, &handle->context) != 0)
            handle->context = NULL;
        if (handle->context == NULL && driver.cuCtxGetCurrent(&handle->context) != 0)
            handle->context = NULL;
    }
    if (go_to(handle->context, &before) != PBN_OK)
        return;
    if (driver.cuCtxGetDevice(&handle->device) != 0)
        handle->device = -1;
    come_back(before);
}

static int make_handle(void *vendor, int owned, pbn_handle **handle) {
    *handle = malloc(sizeof **handle);
    if (*handle == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a handle");
    (*handle)->vendor = vendor;
    (*handle)->owned = owned;
    place(*handle);
    return PBN_OK;
}

static int cudnn_handle_create(pbn_handle **handle) {
    void *vendor = NULL;
    int status;
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    *handle = NULL;
    if (api.major == 0)
        return pbn_refuse(PBN_E_NOT_LOADED, not_loaded);
    failed_in = NULL;
    forget_vendor_text();
    status = api.cudnnCreate(&vendor);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    status = make_handle(vendor, 1, handle);
    if (status != PBN_OK)
        api.cudnnDestroy(vendor);
    return status;
}

static int cudnn_handle_borrow(void *vendor, pbn_handle **handle) {
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    *handle = NULL;
    if (api.major == 0)
        return pbn_refuse(PBN_E_NOT_LOADED, not_loaded);
    if (vendor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    return make_handle(vendor, 0, handle);
}

static int cudnn_handle_destroy(pbn_handle *handle) {
    int before, status = PBN_OK;
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (handle->owned) {
        enter(handle, &before); /* whether or not its context is still there */
        forget_vendor_text();
        status = api.cudnnDestroy(handle->vendor);
        leave(handle, before, status);
    }
    free(handle); /* whatever cuDNN says: after a lost context it can only refuse */
    return status;
}

static void *cudnn_handle_pointer(const pbn_handle *handle) {
    return handle != NULL ? handle->vendor : NULL;
}

static int cudnn_stream_set(pbn_handle *handle, void *stream) {
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    forget_vendor_text();
    return api.cudnnSetStream(handle->vendor, stream);
}

static int cudnn_stream_get(pbn_handle *handle, void **stream) {
    if (handle == NULL || stream == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    forget_vendor_text();
    return api.cudnnGetStream(handle->vendor, stream);
}

/* What kernels of the handle's calls have recorded on the device: of batch norm those of the persistent mode record an
 * overflow of their fixed-point sums. cuDNN holds one such record per handle and clears it with the query. */
static int cudnn_runtime_error(pbn_handle *handle, int query, int *recorded) {
    int mode;
    if (handle == NULL || recorded == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    *recorded = PBN_CUDNN_STATUS_SUCCESS;
    switch (query) {
    case PBN_QUERY_RAW:
        mode = PBN_CUDNN_ERRQUERY_RAWCODE;
        break;
    case PBN_QUERY_NONBLOCKING:
        mode = PBN_CUDNN_ERRQUERY_NONBLOCKING;
        break;
    case PBN_QUERY_BLOCKING:
        mode = PBN_CUDNN_ERRQUERY_BLOCKING;
        break;
    default:
        return pbn_refuse(PBN_E_ARGUMENT, "the query is none of raw, nonblocking, blocking");
    }
    if (api.cudnnQueryRuntimeError == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, "this cuDNN library lacks the symbol cudnnQueryRuntimeError");
    forget_vendor_text();
    return api.cudnnQueryRuntimeError(handle->vendor, recorded, mode, NULL);
}

/* ---- tensors ------------------------------------------------------------------------------------ */

static int to_vendor_dtype(int dtype, int *vendor) {
    switch (dtype) {
    case PBN_FLOAT32:
        *vendor = PBN_CUDNN_DATA_FLOAT;
        return PBN_OK;
    case PBN_FLOAT64:
        *vendor = PBN_CUDNN_DATA_DOUBLE;
        return PBN_OK;
    case PBN_FLOAT16:
        *vendor = PBN_CUDNN_DATA_HALF;
        return PBN_OK;
    case PBN_BFLOAT16:
        *vendor = PBN_CUDNN_DATA_BFLOAT16;
        return PBN_OK;
    default:
        return pbn_refuse(PBN_E_ARGUMENT, bad_dtype);
    }
}

static int from_vendor_dtype(int vendor, int *dtype) {
    switch (vendor) {
    case PBN_CUDNN_DATA_FLOAT:
        *dtype = PBN_FLOAT32;
        return PBN_OK;
    case PBN_CUDNN_DATA_DOUBLE:
        *dtype = PBN_FLOAT64;
        return PBN_OK;
    case PBN_CUDNN_DATA_HALF:
        *dtype = PBN_FLOAT16;
        return PBN_OK;
    case PBN_CUDNN_DATA_BFLOAT16:
        *dtype = PBN_BFLOAT16;
        return PBN_OK;
    default:
        return pbn_refuse(PBN_E_UNSUPPORTED, bad_dtype);
    }
}

/* What may reach cudnnSetTensorNdDescriptor. It answers an offset of 2^31 - 1 with NOT_SUPPORTED but leaves
 * the descriptor set, and calls with such a one read and write out of bounds; negative strides it accepts. */
static int check_extent(int rank, const int64_t *dims, const int64_t *strides) {
    int64_t last = 0;
    if (rank < 2 || rank > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_ARGUMENT, bad_rank);
    if (rank == 2 && api.major == 8)
        return pbn_refuse(PBN_E_UNSUPPORTED, rank2_in_8);
    for (int i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a dim is outside 1 to 2^31 - 1, the range of cuDNN's int");
        if (strides[i] < (dims[i] == 1 ? 0 : 1) || strides[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a stride is outside 1 to 2^31 - 1, the range of cuDNN's int "
                                              "(0 is allowed where the dim is 1)");
    }
    for (int i = 0; i < rank; i++) { /* each product is below 2^62 and the sum so far below 2^31 */
        last += (dims[i] - 1) * strides[i];
        if (last >= INT_MAX)
            return pbn_refuse(PBN_E_UNSUPPORTED, "the last element lies 2^31 - 1 elements or more behind the first; "
                                                 "cuDNN addresses elements with 32 bits");
    }
    return PBN_OK;
}

static int set_vendor(void *vendor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    int narrow_dims[PBN_MAX_RANK], narrow_strides[PBN_MAX_RANK], vendor_dtype = 0;
    int status = check_extent(rank, dims, strides);
    if (status == PBN_OK)
        status = to_vendor_dtype(dtype, &vendor_dtype);
    if (status != PBN_OK)
        return status;
    for (int i = 0; i < rank; i++) {
        narrow_dims[i] = (int)dims[i];
        narrow_strides[i] = (int)strides[i];
    }
    return api.cudnnSetTensorNdDescriptor(vendor, vendor_dtype, rank, narrow_dims, narrow_strides);
}

static int get_vendor(const void *vendor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    int narrow_dims[PBN_MAX_RANK], narrow_strides[PBN_MAX_RANK], vendor_dtype = -1, vendor_rank = -1;
    int status = api.cudnnGetTensorNdDescriptor(vendor, PBN_MAX_RANK, &vendor_dtype, &vendor_rank, narrow_dims,
                                                narrow_strides);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    if (vendor_rank < 0 || vendor_rank > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_INTERNAL, "cuDNN reports a tensor descriptor of a rank above its own maximum of 8");
    for (int i = 0; i < vendor_rank; i++) {
        dims[i] = narrow_dims[i];
        strides[i] = narrow_strides[i];
    }
    *rank = vendor_rank;
    return from_vendor_dtype(vendor_dtype, dtype);
}

/* The descriptor for the compute calls of `t` (its vendor descriptor need not be set yet): its own, one of the
 * folded rank, or NULL where the memory does not fold; the descriptor calls work there all the same. */
static int make_compute(const pbn_tensor *t, void **compute) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int rank, status;
    *compute = t->vendor;
    if (t->rank == 4 || t->rank == 5)
        return PBN_OK;
    *compute = NULL;
    status = pbn_fold(t, 4, 5, &rank, dims, strides);
    if (status != PBN_OK)
        return status == PBN_E_UNSUPPORTED ? PBN_OK : status;
    status = api.cudnnCreateTensorDescriptor(compute);
    if (status != PBN_CUDNN_STATUS_SUCCESS) {
        *compute = NULL;
        return status;
    }
    status = set_vendor(*compute, t->dtype, rank, dims, strides);
    if (status != PBN_OK) {
        api.cudnnDestroyTensorDescriptor(*compute);
        *compute = NULL;
    }
    return status;
}

static void drop_compute(pbn_tensor *t) {
    if (t->compute != NULL && t->compute != t->vendor)
        api.cudnnDestroyTensorDescriptor(t->compute);
    t->compute = NULL;
}

static void unset(pbn_tensor *t) {
    drop_compute(t);
    t->dtype = t->rank = t->layout = 0;
    memset(t->dims, 0, sizeof t->dims);
    memset(t->strides, 0, sizeof t->strides);
}

/* A record of these values beside t's vendor descriptor, with a compute descriptor of its own. */
static int describe(const pbn_tensor *t, int dtype, int rank, const int64_t *dims, const int64_t *strides,
                    pbn_tensor *next) {
    memset(next, 0, sizeof *next);
    next->vendor = t->vendor;
    next->owned = t->owned;
    next->dtype = dtype;
    next->rank = rank;
    memcpy(next->dims, dims, (size_t)rank * sizeof *dims);
    memcpy(next->strides, strides, (size_t)rank * sizeof *strides);
    next->layout = pbn_layout_of(rank, dims, strides);
    return make_compute(next, &next->compute);
}

static void replace(pbn_tensor *t, const pbn_tensor *next) {
    drop_compute(t);
    *t = *next;
}

/* Takes over what t's vendor descriptor holds; t is unset where that is nothing this backend can use. */
static int adopt(pbn_tensor *t) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    pbn_tensor next;
    int dtype = 0, rank = 0;
    int status = get_vendor(t->vendor, &dtype, &rank, dims, strides);
    if (status == PBN_OK && rank != 0) {
        status = check_extent(rank, dims, strides);
        if (status == PBN_E_ARGUMENT) /* not the caller's argument here, but a foreign descriptor's content */
            status = PBN_E_UNSUPPORTED;
        if (status == PBN_OK)
            status = describe(t, dtype, rank, dims, strides, &next);
    }
    if (status != PBN_OK || rank == 0)
        unset(t);
    else
        replace(t, &next);
    return status;
}

/* After a refusal by cuDNN: the record stays if the vendor descriptor is still what it says. */
static void unset_if_changed(pbn_tensor *t) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int dtype, rank;
    if (get_vendor(t->vendor, &dtype, &rank, dims, strides) != PBN_OK || dtype != t->dtype || rank != t->rank ||
        memcmp(dims, t->dims, (size_t)rank * sizeof *dims) != 0 ||
        memcmp(strides, t->strides, (size_t)rank * sizeof *strides) != 0)
        unset(t);
}

static int check_created(const pbn_tensor *t) {
    if (api.major == 0)
        return pbn_refuse(PBN_E_NOT_LOADED, not_loaded);
    if (t == NULL || t->vendor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    return PBN_OK;
}

static int cudnn_tensor_create(pbn_tensor *tensor) {
    int status;
    if (tensor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    memset(tensor, 0, sizeof *tensor);
    if (api.major == 0)
        return pbn_refuse(PBN_E_NOT_LOADED, not_loaded);
    forget_vendor_text();
    status = api.cudnnCreateTensorDescriptor(&tensor->vendor);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        tensor->vendor = NULL;
    else
        tensor->owned = 1;
    return status;
}

static int cudnn_tensor_borrow(void *vendor, pbn_tensor *tensor) {
    int status;
    if (tensor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    memset(tensor, 0, sizeof *tensor);
    tensor->vendor = vendor;
    status = check_created(tensor);
    if (status == PBN_OK) {
        forget_vendor_text();
        status = adopt(tensor);
    }
    if (status != PBN_OK)
        memset(tensor, 0, sizeof *tensor);
    return status;
}

static int cudnn_tensor_set(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    pbn_tensor next;
    int vendor_dtype, status = check_created(tensor);
    if (status != PBN_OK)
        return status;
    if (dims == NULL || strides == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    status = check_extent(rank, dims, strides);
    if (status == PBN_OK)
        status = to_vendor_dtype(dtype, &vendor_dtype);
    if (status != PBN_OK)
        return status;
    forget_vendor_text();
    /* The compute descriptor first, on the side, so that a failure leaves both as they were. */
    status = describe(tensor, dtype, rank, dims, strides, &next);
    if (status != PBN_OK)
        return status;
    status = set_vendor(tensor->vendor, dtype, rank, dims, strides);
    if (status != PBN_OK) {
        drop_compute(&next);
        unset_if_changed(tensor);
        return status;
    }
    replace(tensor, &next);
    return PBN_OK;
}

static int cudnn_tensor_get(const pbn_tensor *tensor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    int status = check_created(tensor);
    if (status != PBN_OK)
        return status;
    if (dtype == NULL || rank == NULL || dims == NULL || strides == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    forget_vendor_text();
    return get_vendor(tensor->vendor, dtype, rank, dims, strides);
}

static int cudnn_tensor_size(const pbn_tensor *tensor, size_t *bytes) {
    int status = check_created(tensor);
    if (status != PBN_OK)
        return status;
    if (bytes == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    forget_vendor_text();
    return api.cudnnGetTensorSizeInBytes(tensor->vendor, bytes);
}

static int cudnn_tensor_destroy(pbn_tensor *tensor) {
    int status = PBN_OK;
    if (tensor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (tensor->vendor != NULL) {
        forget_vendor_text();
        drop_compute(tensor);
        if (tensor->owned)
            status = api.cudnnDestroyTensorDescriptor(tensor->vendor);
    }
    memset(tensor, 0, sizeof *tensor);
    return status;
}

static int to_vendor_mode(int mode, int *vendor) {
    switch (mode) {
    case PBN_PER_ACTIVATION:
        *vendor = PBN_CUDNN_BATCHNORM_PER_ACTIVATION;
        return PBN_OK;
    case PBN_SPATIAL:
        *vendor = PBN_CUDNN_BATCHNORM_SPATIAL;
        return PBN_OK;
    case PBN_SPATIAL_PERSISTENT:
        *vendor = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT;
        return PBN_OK;
    default:
        return pbn_refuse(PBN_E_ARGUMENT, bad_mode);
    }
}

static int cudnn_derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    int vendor_mode, status = check_created(derived);
    if (status == PBN_OK)
        status = check_created(x);
    if (status == PBN_OK)
        status = to_vendor_mode(mode, &vendor_mode);
    if (status != PBN_OK)
        return status;
    if (x->rank == 0)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    forget_vendor_text();
    status = api.cudnnDeriveBNTensorDescriptor(derived->vendor, x->vendor, vendor_mode);
    if (status != PBN_CUDNN_STATUS_SUCCESS) {
        unset_if_changed(derived);
        return status;
    }
    return adopt(derived);
}

/* ---- what runs ---------------------------------------------------------------------------------- */

/* y = a*x + b*y for tensors of the same dims with strides of their own. cudnnTransformTensor is the call that
 * documents exactly this, layouts differing included; x and y must not overlap there. cudnnAddTensor has the same
 * arguments and documents C = alpha*A + beta*C with A broadcast, so equal dims are a special case of it, but no
 * differing layouts. cudnnOpTensor would need a descriptor of its own. That every dtype runs and that beta = 0
 * leaves y unread (the vendor's general rule for blending) is documented, not measured: if a device shows
 * otherwise, this table is what changes. */
typedef enum axpby_call { AXPBY_TRANSFORM, AXPBY_ADD } axpby_call;

static const axpby_call axpby_by_dtype[] = {
    [PBN_FLOAT32] = AXPBY_TRANSFORM,
    [PBN_FLOAT64] = AXPBY_TRANSFORM,
    [PBN_FLOAT16] = AXPBY_TRANSFORM,
    [PBN_BFLOAT16] = AXPBY_TRANSFORM,
};

static pbn_cudnnTransformTensor_fn axpby_function(int dtype) {
    switch (axpby_by_dtype[dtype]) {
    case AXPBY_TRANSFORM:
        return api.cudnnTransformTensor;
    case AXPBY_ADD:
        return api.cudnnAddTensor;
    default:
        return NULL;
    }
}

static const char no_relu[] = "this cuDNN library lacks the symbols of cudnnActivationForward and -Backward";
static const char no_fill[] = "this cuDNN library lacks the symbol cudnnSetTensor";
static const char no_fused[] = "cuDNN's plain batch-norm calls have no fused activation and no residual; its plans have";
static const char no_axpby[] = "this cuDNN library lacks the symbol that y = a*x + b*y goes through";

static int has_activation(void) {
    return api.cudnnCreateActivationDescriptor != NULL && api.cudnnSetActivationDescriptor != NULL &&
           api.cudnnDestroyActivationDescriptor != NULL && api.cudnnActivationForward != NULL &&
           api.cudnnActivationBackward != NULL;
}

static uint32_t cudnn_capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    const char *ignored;
    int number;
    if (why == NULL)
        why = &ignored;
    *why = NULL;
    if (rank < 2 || rank > PBN_MAX_RANK) {
        *why = bad_rank;
    } else if (rank == 2 && api.major == 8) {
        *why = rank2_in_8;
    } else if (to_vendor_dtype(dtype, &number) != PBN_OK) {
        *why = bad_dtype;
    } else if (layout != PBN_CHANNELS_FIRST && layout != PBN_CHANNELS_LAST && layout != PBN_STRIDED) {
        *why = "the layout is none of CHANNELS_FIRST, CHANNELS_LAST, STRIDED";
    } else if (operation != PBN_OP_AXPBY && operation != PBN_OP_FILL && operation != PBN_OP_RELU &&
               operation != PBN_OP_RELU_BACKWARD && to_vendor_mode(mode, &number) != PBN_OK) {
        *why = bad_mode;
    } else {
        switch (operation) {
        case PBN_OP_DERIVE:
            return PBN_CAP_RUNS;
        case PBN_OP_AXPBY:
            if (api.major != 0 && axpby_function(dtype) == NULL) {
                *why = no_axpby;
                return 0;
            }
            break;
        case PBN_OP_FILL:
            if (api.major != 0 && api.cudnnSetTensor == NULL) {
                *why = no_fill;
                return 0;
            }
            return PBN_CAP_RUNS | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
        case PBN_OP_RELU:
        case PBN_OP_RELU_BACKWARD:
            if (api.major != 0 && !has_activation()) {
                *why = no_relu;
                return 0;
            }
            return PBN_CAP_RUNS | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
        case PBN_OP_FORWARD_TRAINING:
        case PBN_OP_FORWARD_INFERENCE:
        case PBN_OP_BACKWARD:
            break;
        default:
            *why = "the operation is unknown";
            return 0;
        }
        return PBN_CAP_RUNS | PBN_CAP_BLEND_NATIVE | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
    }
    return 0;
}

static int fuses(const pbn_call *call) {
    return call->activation != PBN_ACTIVATION_NONE || pbn_has_residual(call);
}

static int cudnn_workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    if (handle == NULL || call == NULL || bytes == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    *bytes = 0; /* cuDNN blends by itself, and the plain entry points take no workspace */
    return PBN_OK;
}

/* ---- calls -------------------------------------------------------------------------------------- */

/* cuDNN reads a double behind alpha and beta when x is float64 and a float otherwise, without a way to tell. */
typedef union scalar {
    float narrow;
    double wide;
} scalar;

static int to_scalar(double value, int dtype, scalar *out) {
    if (dtype == PBN_FLOAT64) {
        out->wide = value;
        return PBN_OK;
    }
    if (!(value >= -FLT_MAX && value <= FLT_MAX))
        return pbn_refuse(PBN_E_ARGUMENT, "a blending factor is outside the range of the float32 that cuDNN reads");
    out->narrow = (float)value;
    return PBN_OK;
}

static int to_compute(const pbn_tensor *t, void **desc) {
    if (t == NULL || t->rank == 0)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (t->compute == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, not_mergeable);
    *desc = t->compute;
    return PBN_OK;
}

static inline uintptr_t bits(const void *pointer) {
    return (uintptr_t)pointer;
}

/* A misaligned access is no status in cuDNN: it is reported by the next synchronisation and the CUDA context
 * is lost. The 16-bit batch-norm kernels load pairs of elements, except where every tensor is channels-last;
 * cudnnTransformTensor, cudnnSetTensor and the activation calls take any element address (240 cases of odd offsets,
 * H200, cuDNN 9.19).
 * `data` and `params` are the call's addresses or-ed together. */
static int check_alignment(int dtype, int any_element, uintptr_t data, uintptr_t params) {
    uintptr_t element = dtype == PBN_FLOAT64 ? 8 : dtype == PBN_FLOAT32 ? 4 : 2;
    uintptr_t param = dtype == PBN_FLOAT64 ? 8 : 4;
    if ((data & (element - 1)) != 0 || (params & (param - 1)) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, "a pointer is not aligned to its element size");
    if (element == 2 && !any_element && (data & 3) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, "float16 and bfloat16 tensors that are not channels-last must be 4-byte "
                                             "aligned: cuDNN's kernels would lose the CUDA context");
    return PBN_OK;
}

static int is_channels_last(const pbn_tensor *t) {
    return t->layout == PBN_CHANNELS_LAST;
}

static int check_pair(const void *first, const void *second) {
    if ((first == NULL) != (second == NULL))
        return pbn_refuse(PBN_E_ARGUMENT, "of a pair of statistics one pointer is given and the other is missing");
    return PBN_OK;
}

static int cudnn_forward_training(pbn_handle *handle, const pbn_call *call) {
    scalar alpha, beta;
    void *x_desc, *y_desc, *param_desc;
    int mode, status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->y == NULL || call->scale == NULL || call->bias == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    if ((status = to_vendor_mode(call->mode, &mode)) != PBN_OK ||
        (status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = to_compute(call->param_desc, &param_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha, call->x_desc->dtype, &alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, call->x_desc->dtype, &beta)) != PBN_OK ||
        (status = check_pair(call->running_mean, call->running_variance)) != PBN_OK ||
        (status = check_pair(call->saved_mean, call->saved_inv_variance)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype, is_channels_last(call->x_desc) && is_channels_last(call->y_desc),
                                  bits(call->x) | bits(call->y),
                                  bits(call->scale) | bits(call->bias) | bits(call->running_mean) |
                                      bits(call->running_variance) | bits(call->saved_mean) |
                                      bits(call->saved_inv_variance))) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationForwardTraining(
        handle->vendor, mode, &alpha, &beta, x_desc, call->x, y_desc, call->y, param_desc, call->scale, call->bias,
        call->factor, call->running_mean, call->running_variance, call->epsilon, call->saved_mean,
        call->saved_inv_variance);
}

static int cudnn_forward_inference(pbn_handle *handle, const pbn_call *call) {
    scalar alpha, beta;
    void *x_desc, *y_desc, *param_desc;
    int mode, status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->y == NULL || call->scale == NULL || call->bias == NULL ||
        call->running_mean == NULL || call->running_variance == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    if ((status = to_vendor_mode(call->mode, &mode)) != PBN_OK ||
        (status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = to_compute(call->param_desc, &param_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha, call->x_desc->dtype, &alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, call->x_desc->dtype, &beta)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype, is_channels_last(call->x_desc) && is_channels_last(call->y_desc),
                                  bits(call->x) | bits(call->y),
                                  bits(call->scale) | bits(call->bias) | bits(call->running_mean) |
                                      bits(call->running_variance))) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationForwardInference(handle->vendor, mode, &alpha, &beta, x_desc, call->x, y_desc,
                                                       call->y, param_desc, call->scale, call->bias,
                                                       call->running_mean, call->running_variance, call->epsilon);
}

static int cudnn_backward(pbn_handle *handle, const pbn_call *call) {
    scalar alpha, beta, alpha_param, beta_param;
    void *x_desc, *dy_desc, *dx_desc, *param_desc;
    int mode, status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->dy == NULL || call->dx == NULL || call->scale == NULL || call->dscale == NULL ||
        call->dbias == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    if ((status = to_vendor_mode(call->mode, &mode)) != PBN_OK ||
        (status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->dy_desc, &dy_desc)) != PBN_OK ||
        (status = to_compute(call->dx_desc, &dx_desc)) != PBN_OK ||
        (status = to_compute(call->param_desc, &param_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha, call->x_desc->dtype, &alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, call->x_desc->dtype, &beta)) != PBN_OK ||
        (status = to_scalar(call->alpha_param, call->x_desc->dtype, &alpha_param)) != PBN_OK ||
        (status = to_scalar(call->beta_param, call->x_desc->dtype, &beta_param)) != PBN_OK ||
        (status = check_pair(call->saved_mean, call->saved_inv_variance)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype,
                                  is_channels_last(call->x_desc) && is_channels_last(call->dy_desc) &&
                                      is_channels_last(call->dx_desc),
                                  bits(call->x) | bits(call->dy) | bits(call->dx),
                                  bits(call->scale) | bits(call->dscale) | bits(call->dbias) |
                                      bits(call->saved_mean) | bits(call->saved_inv_variance))) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationBackward(handle->vendor, mode, &alpha, &beta, &alpha_param, &beta_param, x_desc,
                                               call->x, dy_desc, call->dy, dx_desc, call->dx, param_desc, call->scale,
                                               call->dscale, call->dbias, call->epsilon, call->saved_mean,
                                               call->saved_inv_variance);
}

static int cudnn_axpby(pbn_handle *handle, const pbn_call *call) {
    pbn_cudnnTransformTensor_fn function;
    scalar alpha, beta;
    void *x_desc, *y_desc;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha, call->x_desc->dtype, &alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, call->x_desc->dtype, &beta)) != PBN_OK ||
        /* which of these kernels load pairs is unknown, so all of them are held to it */
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->y), 0)) != PBN_OK)
        return status;
    function = axpby_function(call->x_desc->dtype);
    if (function == NULL)
        return pbn_refuse(PBN_E_SYMBOL, no_axpby);
    forget_vendor_text();
    return function(handle->vendor, &alpha, x_desc, call->x, &beta, y_desc, call->y);
}

/* cudnnSetTensor reads a float for 16-bit tensors, not the tensor's own type as documented: seen on an H200 with
 * cuDNN 9.19, where the bits of a half gave zeros. Rounded here, so that the vendor's own conversion is exact. */
static int cudnn_fill(pbn_handle *handle, const pbn_call *call) {
    void *y_desc;
    double wide;
    float narrow;
    int status, is_double;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = check_alignment(call->y_desc->dtype, 1, bits(call->y), 0)) != PBN_OK)
        return status;
    if (api.cudnnSetTensor == NULL)
        return pbn_refuse(PBN_E_SYMBOL, no_fill);
    is_double = call->y_desc->dtype == PBN_FLOAT64;
    wide = call->alpha;
    narrow = (float)(call->y_desc->dtype == PBN_FLOAT32 || is_double ? wide : pbn_round(wide, call->y_desc->dtype));
    forget_vendor_text();
    return api.cudnnSetTensor(handle->vendor, y_desc, call->y, is_double ? (void *)&wide : (void *)&narrow);
}

/* The descriptor is host memory that a call reads before it returns. */
static int new_relu(void **activation) {
    int status;
    if (!has_activation())
        return pbn_refuse(PBN_E_SYMBOL, no_relu);
    status = api.cudnnCreateActivationDescriptor(activation);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    status = api.cudnnSetActivationDescriptor(*activation, PBN_CUDNN_ACTIVATION_RELU, PBN_CUDNN_PROPAGATE_NAN, 0.0);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        api.cudnnDestroyActivationDescriptor(*activation);
    return status;
}

static int cudnn_relu(pbn_handle *handle, const pbn_call *call) {
    scalar one, zero;
    void *x_desc, *y_desc, *activation;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = to_scalar(1, call->x_desc->dtype, &one)) != PBN_OK ||
        (status = to_scalar(0, call->x_desc->dtype, &zero)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->y), 0)) != PBN_OK)
        return status;
    forget_vendor_text();
    status = new_relu(&activation);
    if (status != PBN_OK)
        return status;
    status = api.cudnnActivationForward(handle->vendor, activation, &one, x_desc, call->x, &zero, y_desc, call->y);
    api.cudnnDestroyActivationDescriptor(activation);
    return status;
}

/* Axes of length 1 have no place in memory, but cuDNN compares their strides too. */
static int same_strides(const pbn_tensor *a, const pbn_tensor *b) {
    if (a->rank != b->rank)
        return 0;
    for (int i = 0; i < a->rank; i++)
        if (a->dims[i] != b->dims[i] || (a->dims[i] > 1 && a->strides[i] != b->strides[i]))
            return 0;
    return 1;
}

/* cudnnActivationBackward wants the activation's output too; its sign is that of x, so x stands for it. It takes
 * y and dy of the same strides and x and dx of the same strides only (9.19), which makes that one for all. */
static int cudnn_relu_backward(pbn_handle *handle, const pbn_call *call) {
    scalar one, zero;
    void *desc, *activation;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->dy == NULL || call->dx == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (call->x_desc == NULL || call->dy_desc == NULL || call->dx_desc == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (!same_strides(call->x_desc, call->dy_desc) || !same_strides(call->x_desc, call->dx_desc))
        return pbn_refuse(PBN_E_UNSUPPORTED, "cudnnActivationBackward takes x, dy and dx of the same strides only");
    if ((status = to_compute(call->x_desc, &desc)) != PBN_OK ||
        (status = to_scalar(1, call->x_desc->dtype, &one)) != PBN_OK ||
        (status = to_scalar(0, call->x_desc->dtype, &zero)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->dy) | bits(call->dx), 0)) !=
            PBN_OK)
        return status;
    forget_vendor_text();
    status = new_relu(&activation);
    if (status != PBN_OK)
        return status;
    status = api.cudnnActivationBackward(handle->vendor, activation, &one, desc, call->x, desc, call->dy, desc, call->x,
                                         &zero, desc, call->dx);
    api.cudnnDestroyActivationDescriptor(activation);
    return status;
}

/* ---- graphs: operations compiled by cuDNN 9's backend API ---------------------------------------- */

static const char no_graph[] = "this cuDNN library lacks the backend (graph) API, or it is not cuDNN 9";
static const char no_graph_part[] =
    "a part of cuDNN that its graph API needs cannot be opened, and calling it without would abort the process";
static const char less_aligned[] = "a tensor's address is less aligned than those the plan was made for";
static const char no_graph_plan[] = "cuDNN has no engine for this graph on this device";

/* What a graph's tensor is bound to when it runs: a pointer of the call, a scalar on the host, or workspace. */
enum slot {
    SLOT_VIRTUAL,
    SLOT_X,
    SLOT_Y,
    SLOT_DY,
    SLOT_DX,
    SLOT_Z,
    SLOT_SCALE,
    SLOT_BIAS,
    SLOT_RUNNING_MEAN,
    SLOT_RUNNING_VARIANCE,
    SLOT_SAVED_MEAN,
    SLOT_SAVED_INV_VARIANCE,
    SLOT_DSCALE,
    SLOT_DBIAS,
    SLOT_VALUE, /* and the ones behind it: numbers on the host */
    SLOT_SCRATCH = SLOT_VALUE + 6, /* and the ones behind it: vectors in the plan's part of the workspace */
    SLOT_COUNT = SLOT_SCRATCH + 14
};

enum { GRAPH_KEPT = 96, GRAPH_OPS = 16, GRAPH_TENSORS = 32, GRAPH_CONFIGS = 16 };

typedef struct graph {
    int status; /* the first failure; builders do nothing after it */
    int kept_count, op_count, tensor_count;
    void *kept[GRAPH_KEPT]; /* every descriptor made, to be destroyed in reverse order */
    void *ops[GRAPH_OPS];
    int64_t uids[GRAPH_TENSORS];
    int slots[GRAPH_TENSORS];
    void *plan;
    int64_t workspace;
    void *pack;                       /* the variant pack of the last run, good for the same pointers */
    void *bound[GRAPH_TENSORS + 1];   /* those pointers and the workspace */
} graph;

/* A finalized variant pack takes no new pointers (9.19), so each set of them needs one of its own. */
static void graph_drop_pack(graph *g) {
    if (g->pack != NULL)
        api.cudnnBackendDestroyDescriptor(g->pack);
    g->pack = NULL;
}

static void graph_drop(graph *g) {
    graph_drop_pack(g);
    while (g->kept_count > 0)
        api.cudnnBackendDestroyDescriptor(g->kept[--g->kept_count]);
    g->plan = NULL;
}

static void *graph_create(graph *g, int type) {
    void *desc = NULL;
    if (g->status == PBN_OK && g->kept_count == GRAPH_KEPT)
        g->status = pbn_refuse(PBN_E_INTERNAL, "a graph of more descriptors than this file makes room for");
    if (g->status != PBN_OK)
        return NULL;
    g->status = api.cudnnBackendCreateDescriptor(type, &desc);
    if (g->status != PBN_CUDNN_STATUS_SUCCESS)
        return NULL;
    g->kept[g->kept_count++] = desc;
    return desc;
}

static void graph_set(graph *g, void *desc, int attribute, int type, int64_t count, const void *values) {
    if (g->status == PBN_OK)
        g->status = api.cudnnBackendSetAttribute(desc, attribute, type, count, values);
}

static void graph_set_int(graph *g, void *desc, int attribute, int type, int value) {
    graph_set(g, desc, attribute, type, 1, &value);
}

static void graph_set_desc(graph *g, void *desc, int attribute, void *value) {
    graph_set(g, desc, attribute, PBN_CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void graph_finish(graph *g, void *desc) {
    if (g->status == PBN_OK)
        g->status = api.cudnnBackendFinalize(desc);
}

static void *graph_tensor(graph *g, int slot, int dtype, int rank, const int64_t *dims, const int64_t *strides,
                          int64_t alignment) {
    int vendor_dtype = 0;
    const bool yes = true;
    int64_t uid = g->tensor_count + 1;
    void *desc = graph_create(g, PBN_CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    if (g->status == PBN_OK && g->tensor_count == GRAPH_TENSORS)
        g->status = pbn_refuse(PBN_E_INTERNAL, "a graph of more tensors than this file makes room for");
    if (g->status == PBN_OK)
        g->status = to_vendor_dtype(dtype, &vendor_dtype);
    if (g->status != PBN_OK)
        return NULL;
    graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_UNIQUE_ID, PBN_CUDNN_TYPE_INT64, 1, &uid);
    graph_set_int(g, desc, PBN_CUDNN_ATTR_TENSOR_DATA_TYPE, PBN_CUDNN_TYPE_DATA_TYPE, vendor_dtype);
    graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_DIMENSIONS, PBN_CUDNN_TYPE_INT64, rank, dims);
    graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_STRIDES, PBN_CUDNN_TYPE_INT64, rank, strides);
    graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, PBN_CUDNN_TYPE_INT64, 1, &alignment);
    if (slot == SLOT_VIRTUAL)
        graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_IS_VIRTUAL, PBN_CUDNN_TYPE_BOOLEAN, 1, &yes);
    else if (slot >= SLOT_VALUE && slot < SLOT_SCRATCH)
        graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_IS_BY_VALUE, PBN_CUDNN_TYPE_BOOLEAN, 1, &yes);
    graph_finish(g, desc);
    g->uids[g->tensor_count] = uid;
    g->slots[g->tensor_count++] = slot;
    return desc;
}

static void graph_add(graph *g, void *op) {
    graph_finish(g, op);
    if (g->status == PBN_OK && g->op_count == GRAPH_OPS)
        g->status = pbn_refuse(PBN_E_INTERNAL, "a graph of more operations than this file makes room for");
    if (g->status == PBN_OK)
        g->ops[g->op_count++] = op;
}

/* out = a (mode) b, computed in float32. */
static void graph_pointwise(graph *g, int mode, void *a, void *b, void *out) {
    void *how = graph_create(g, PBN_CUDNN_BACKEND_POINTWISE_DESCRIPTOR), *op;
    graph_set_int(g, how, PBN_CUDNN_ATTR_POINTWISE_MODE, PBN_CUDNN_TYPE_POINTWISE_MODE, mode);
    graph_set_int(g, how, PBN_CUDNN_ATTR_POINTWISE_MATH_PREC, PBN_CUDNN_TYPE_DATA_TYPE, PBN_CUDNN_DATA_FLOAT);
    if (mode == PBN_CUDNN_POINTWISE_RELU_FWD)
        graph_set_int(g, how, PBN_CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, PBN_CUDNN_TYPE_NAN_PROPOGATION,
                      PBN_CUDNN_PROPAGATE_NAN);
    graph_finish(g, how);
    op = graph_create(g, PBN_CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a);
    if (b != NULL)
        graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out);
    graph_add(g, op);
}

/* out = the sum of x over the axes of which out has length 1, in float32. */
static void graph_sum(graph *g, void *x, void *out) {
    void *how = graph_create(g, PBN_CUDNN_BACKEND_REDUCTION_DESCRIPTOR), *op;
    graph_set_int(g, how, PBN_CUDNN_ATTR_REDUCTION_OPERATOR, PBN_CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
                  PBN_CUDNN_REDUCE_TENSOR_ADD);
    graph_set_int(g, how, PBN_CUDNN_ATTR_REDUCTION_COMP_TYPE, PBN_CUDNN_TYPE_DATA_TYPE, PBN_CUDNN_DATA_FLOAT);
    graph_finish(g, how);
    op = graph_create(g, PBN_CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_REDUCTION_YDESC, out);
    graph_add(g, op);
}

/* Tries the engine configurations of one heuristic mode in its order; the `skip`-th that compiles is taken. */
static int graph_try_plans(graph *g, void *vendor_handle, void *operations, int heuristic, int *skip) {
    void *heuristics, *configs[GRAPH_CONFIGS];
    int64_t count = 0, ignored;
    int first = g->kept_count, taken = 0;
    heuristics = graph_create(g, PBN_CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    graph_set_desc(g, heuristics, PBN_CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations);
    graph_set_int(g, heuristics, PBN_CUDNN_ATTR_ENGINEHEUR_MODE, PBN_CUDNN_TYPE_HEUR_MODE, heuristic);
    graph_finish(g, heuristics);
    if (g->status != PBN_OK)
        return 0;
    for (int i = 0; i < GRAPH_CONFIGS; i++)
        configs[i] = graph_create(g, PBN_CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->status == PBN_OK)
        g->status = api.cudnnBackendGetAttribute(heuristics, PBN_CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                 PBN_CUDNN_TYPE_BACKEND_DESCRIPTOR, GRAPH_CONFIGS, &count, configs);
    /* The count is the vendor's; only so many descriptors were there to be filled. */
    for (int i = 0; g->status == PBN_OK && i < GRAPH_CONFIGS && i < count && !taken; i++) {
        void *plan = graph_create(g, PBN_CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        graph_set(g, plan, PBN_CUDNN_ATTR_EXECUTION_PLAN_HANDLE, PBN_CUDNN_TYPE_HANDLE, 1, &vendor_handle);
        graph_set_desc(g, plan, PBN_CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
        if (g->status != PBN_OK)
            break;
        if (api.cudnnBackendFinalize(plan) != PBN_CUDNN_STATUS_SUCCESS || (*skip)-- > 0) {
            api.cudnnBackendDestroyDescriptor(g->kept[--g->kept_count]);
            continue;
        }
        g->status = api.cudnnBackendGetAttribute(plan, PBN_CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                                 PBN_CUDNN_TYPE_INT64, 1, &ignored, &g->workspace);
        g->plan = plan;
        taken = 1;
    }
    if (!taken) /* room for the next mode */
        while (g->kept_count > first)
            api.cudnnBackendDestroyDescriptor(g->kept[--g->kept_count]);
    return taken;
}

static int graph_build(graph *g, void *vendor_handle, int skip) {
    static const int heuristics[] = {PBN_CUDNN_HEUR_MODE_A, PBN_CUDNN_HEUR_MODE_FALLBACK};
    void *operations = graph_create(g, PBN_CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph_set(g, operations, PBN_CUDNN_ATTR_OPERATIONGRAPH_OPS, PBN_CUDNN_TYPE_BACKEND_DESCRIPTOR, g->op_count, g->ops);
    graph_set(g, operations, PBN_CUDNN_ATTR_OPERATIONGRAPH_HANDLE, PBN_CUDNN_TYPE_HANDLE, 1, &vendor_handle);
    graph_finish(g, operations);
    for (int i = 0; g->status == PBN_OK && i < 2; i++) {
        if (graph_try_plans(g, vendor_handle, operations, heuristics[i], &skip))
            return g->status;
        if (g->status != PBN_OK && cudnn_status_class(g->status) == PBN_CLASS_NOT_SUPPORTED)
            g->status = PBN_OK; /* this mode has nothing; the next may */
    }
    return g->status != PBN_OK ? g->status : pbn_refuse(PBN_E_UNSUPPORTED, no_graph_plan);
}

static int graph_run(graph *g, void *vendor_handle, void *const *slots, void *workspace) {
    void *pointers[GRAPH_TENSORS + 1], *pack = NULL;
    int64_t uids[GRAPH_TENSORS];
    int count = 0, status;
    for (int i = 0; i < g->tensor_count; i++)
        if (g->slots[i] != SLOT_VIRTUAL) {
            if (slots[g->slots[i]] == NULL)
                return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
            uids[count] = g->uids[i];
            pointers[count++] = slots[g->slots[i]];
        }
    pointers[count] = workspace;
    if (g->pack == NULL || memcmp(pointers, g->bound, (size_t)(count + 1) * sizeof *pointers) != 0) {
        graph_drop_pack(g);
        status = api.cudnnBackendCreateDescriptor(PBN_CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
        if (status != PBN_OK)
            return status;
        status = api.cudnnBackendSetAttribute(pack, PBN_CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, PBN_CUDNN_TYPE_INT64, count,
                                              uids);
        if (status == PBN_OK)
            status = api.cudnnBackendSetAttribute(pack, PBN_CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                                                  PBN_CUDNN_TYPE_VOID_PTR, count, pointers);
        if (status == PBN_OK)
            status = api.cudnnBackendSetAttribute(pack, PBN_CUDNN_ATTR_VARIANT_PACK_WORKSPACE, PBN_CUDNN_TYPE_VOID_PTR,
                                                  1, &workspace);
        if (status == PBN_OK)
            status = api.cudnnBackendFinalize(pack);
        if (status != PBN_OK) {
            api.cudnnBackendDestroyDescriptor(pack);
            return status;
        }
        g->pack = pack;
        memcpy(g->bound, pointers, sizeof pointers);
    }
    return api.cudnnBackendExecute(vendor_handle, g->plan, g->pack);
}

static int graph_ready(void) {
    static const char *const parts[] = {"libcudnn_heuristic.so.9", "libcudnn_engines_precompiled.so.9",
                                        "libcudnn_engines_runtime_compiled.so.9"};
    static atomic_int opened;
    pbn_library here;
    if (api.major != 9 || api.cudnnBackendCreateDescriptor == NULL || api.cudnnBackendDestroyDescriptor == NULL ||
        api.cudnnBackendSetAttribute == NULL || api.cudnnBackendGetAttribute == NULL ||
        api.cudnnBackendFinalize == NULL || api.cudnnBackendExecute == NULL)
        return pbn_refuse(PBN_E_SYMBOL, no_graph);
    if (atomic_load(&opened))
        return PBN_OK;
    memcpy(here.path, loaded_path, sizeof here.path);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (open_part(&here, parts[i]) != PBN_OK)
            return pbn_refuse(PBN_E_LIBRARY, no_graph_part);
    atomic_store(&opened, 1);
    return PBN_OK;
}

/* ---- plans: the ways to one result ---------------------------------------------------------------- */

/* The plain entry point takes up to PLAIN_ROWS images. A piece has an even number of them, so that each starts as well
 * aligned as 16-bit kernels want it where the first does. */
enum { PLAN_ALIGNMENT = 256, PLAIN_ROWS = 65535, SPLIT_ROWS = PLAIN_ROWS - 1, PLAN_NAME = 24 };

struct pbn_plan {
    int kind; /* index into algorithm_names */
    char name[2 * PLAN_NAME];
    const char *why;
    void *context; /* the handle's */
    int mode; /* pbn_mode of a plain or Ex call */
    size_t workspace;
    size_t reserve;                 /* ex with an activation: bytes that backward is given as forward left them */
    void *activation;               /* and the vendor's descriptor of it */
    int fused;                      /* made for calls with an activation */
    int any;                        /* chosen by "auto" or "fast" */
    size_t scratch;                 /* bytes in front of the vendor's own part of it */
    size_t offsets[SLOT_COUNT];
    float values[6];                /* read by graphs from the host; the first two are epsilon and factor */
    int64_t alignment;
    graph graphs[5];
    pbn_tensor part, rest;          /* split: a piece of x, and the last, smaller one */
    pbn_tensor y_part, y_rest;
    int64_t lines, depth, merged;   /* columns, rows: lines of the matrix, values in one, lines of a channel */
    pbn_tensor one, map;            /* (1, C, 1, 1), also of ex with an activation, and the lines; in float32 */
    pbn_tensor two, maps;           /* columns: the same with 2 C */
    pbn_tensor three, spread;       /* the same with 3 C */
    pbn_tensor firsts, first;       /* rows: the first value of each, where it lies and packed */
    pbn_tensor zeros;               /* (1, 8 C, 1, 1) */
    pbn_plan *inner;                /* dense: the plan for packed copies, which lie in the workspace */
    pbn_tensor packed;              /* also of ex with an activation: every data tensor */
    pbn_call inner_call;
    size_t copy;                    /* bytes from one copy to the next */
    pbn_plan *moments;              /* backward without saved statistics: the step that computes them */
    size_t vectors;                 /* bytes of these two, in front of the rest of the workspace */
    int moments_only;               /* of that step: columns or rows, as far as the channel's moments */
    int last;                       /* and its columns are those of channels-last memory */
};

enum { VALUE_EPSILON, VALUE_FACTOR };

static const char *const algorithm_names[] = {"plain", "spatial", "persistent", "ex", "graph", "pointwise", "split",
                                              "columns", "rows", "dense", NULL};
enum { PLAIN, SPATIAL, PERSISTENT, EX, GRAPH, POINTWISE, SPLIT, COLUMNS, ROWS, DENSE };
static const char *const numbered_names[] = {"graph", "pointwise", "columns", "rows", NULL};

static size_t rounded(size_t bytes) {
    return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

/* Channels-last in memory: also where channels-first means the same, as for (N, C) and (N, C, 1, 1). */
static int is_channels_last_memory(const pbn_tensor *t) {
    int order[PBN_MAX_RANK];
    for (int i = 0; i < t->rank; i++)
        order[i] = i == 0 ? 0 : i == t->rank - 1 ? 1 : i + 1;
    return pbn_is_packed(t->rank, t->dims, t->strides, order);
}

/* What is added before the activation, or in backward its gradient; NULL without. */
static const pbn_tensor *residual(const pbn_call *call) {
    return call->operation == PBN_OP_BACKWARD ? call->dz_desc : call->z_desc;
}

static int all_channels_last(const pbn_call *call) {
    const pbn_tensor *also = residual(call);
    if (!is_channels_last_memory(call->x_desc) || (also != NULL && !is_channels_last_memory(also)) ||
        (call->y_desc != NULL && !is_channels_last_memory(call->y_desc)))
        return 0;
    if (call->operation == PBN_OP_BACKWARD)
        return is_channels_last_memory(call->dy_desc) && is_channels_last_memory(call->dx_desc);
    return is_channels_last_memory(call->y_desc);
}

static int all_channels_first(const pbn_call *call) {
    if (call->x_desc->layout != PBN_CHANNELS_FIRST)
        return 0;
    if (call->operation == PBN_OP_BACKWARD)
        return call->dy_desc->layout == PBN_CHANNELS_FIRST && call->dx_desc->layout == PBN_CHANNELS_FIRST;
    return call->y_desc->layout == PBN_CHANNELS_FIRST;
}

static int blends(const pbn_call *call) {
    return call->alpha != 1 || call->beta != 0 ||
           (call->operation == PBN_OP_BACKWARD && (call->alpha_param != 1 || call->beta_param != 0));
}

static const char *operation_tensors_missing(const pbn_call *call) {
    const pbn_tensor *other = call->operation == PBN_OP_BACKWARD ? call->dy_desc : call->y_desc;
    if (call->x_desc == NULL || call->x_desc->rank == 0 || other == NULL || other->rank == 0 ||
        call->param_desc == NULL || call->param_desc->rank == 0 ||
        (call->operation == PBN_OP_BACKWARD && (call->dx_desc == NULL || call->dx_desc->rank == 0)) ||
        (residual(call) != NULL && residual(call)->rank == 0) || (call->y_desc != NULL && call->y_desc->rank == 0) ||
        (call->activation != PBN_ACTIVATION_NONE && call->y_desc == NULL))
        return no_tensor;
    return NULL;
}

/* dims and channels-last strides of x at rank 4 or 5, and of a parameter beside it. */
typedef struct view {
    int rank;
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int64_t param_dims[PBN_MAX_RANK], param_strides[PBN_MAX_RANK];
    int64_t one[PBN_MAX_RANK];
} view;

static int make_view(const pbn_tensor *x, view *v) {
    int status = pbn_fold(x, 4, 5, &v->rank, v->dims, v->strides);
    if (status != PBN_OK)
        return status;
    pbn_packed_strides(v->rank, v->dims, is_channels_last_memory(x) ? PBN_CHANNELS_LAST : PBN_CHANNELS_FIRST,
                       v->strides);
    for (int i = 0; i < v->rank; i++)
        v->param_dims[i] = v->one[i] = 1;
    v->param_dims[1] = v->dims[1];
    pbn_packed_strides(v->rank, v->param_dims, PBN_CHANNELS_LAST, v->param_strides);
    return PBN_OK;
}

static void *param_tensor(graph *g, int slot, const view *v) {
    return graph_tensor(g, slot, PBN_FLOAT32, v->rank, v->param_dims, v->param_strides, 4);
}

static void *scalar_tensor(graph *g, int slot, const view *v) {
    return graph_tensor(g, slot, PBN_FLOAT32, v->rank, v->one, v->one, 4);
}

static void norm_attribute(graph *g, void *op, int attribute, void *tensor) {
    graph_set_desc(g, op, attribute, tensor);
}

/* NORM_FORWARD in its training phase. It wants mean and inverse deviation written, so where the caller does not,
 * they go to the workspace. Running statistics are updated in place (checked on an H200, 9.19). */
static int build_norm_forward(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graphs[0];
    view v;
    int status = make_view(call->x_desc, &v), dtype = call->x_desc->dtype;
    const int saved = call->saved_mean != NULL;
    void *op, *mean, *variance;
    if (status != PBN_OK)
        return status;
    op = graph_create(g, PBN_CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR);
    graph_set_int(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_MODE, PBN_CUDNN_TYPE_NORM_MODE, PBN_CUDNN_BATCH_NORM);
    graph_set_int(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, PBN_CUDNN_TYPE_NORM_FWD_PHASE,
                  PBN_CUDNN_NORM_FWD_TRAINING);
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_XDESC,
                   graph_tensor(g, SLOT_X, dtype, v.rank, v.dims, v.strides, p->alignment));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_YDESC,
                   graph_tensor(g, SLOT_Y, dtype, v.rank, v.dims, v.strides, p->alignment));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, param_tensor(g, SLOT_SCALE, &v));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, param_tensor(g, SLOT_BIAS, &v));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC, scalar_tensor(g, SLOT_VALUE + VALUE_EPSILON, &v));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC,
                   param_tensor(g, saved ? SLOT_SAVED_MEAN : SLOT_SCRATCH, &v));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC,
                   param_tensor(g, saved ? SLOT_SAVED_INV_VARIANCE : SLOT_SCRATCH + 1, &v));
    if (!saved) {
        p->offsets[SLOT_SCRATCH + 1] = rounded((size_t)v.dims[1] * sizeof(float));
        p->scratch = 2 * p->offsets[SLOT_SCRATCH + 1];
    }
    if (call->running_mean != NULL) {
        norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC,
                       scalar_tensor(g, SLOT_VALUE + VALUE_FACTOR, &v));
        mean = param_tensor(g, SLOT_RUNNING_MEAN, &v);
        variance = param_tensor(g, SLOT_RUNNING_VARIANCE, &v);
        norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC, mean);
        norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC, variance);
        norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC,
                       param_tensor(g, SLOT_RUNNING_MEAN, &v));
        norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC,
                       param_tensor(g, SLOT_RUNNING_VARIANCE, &v));
    }
    graph_add(g, op);
    return graph_build(g, vendor_handle, skip);
}

static int build_norm_backward(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graphs[0];
    view v;
    int status = make_view(call->x_desc, &v), dtype = call->x_desc->dtype;
    void *op;
    if (status != PBN_OK)
        return status;
    op = graph_create(g, PBN_CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR);
    graph_set_int(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_MODE, PBN_CUDNN_TYPE_NORM_MODE, PBN_CUDNN_BATCH_NORM);
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_XDESC,
                   graph_tensor(g, SLOT_X, dtype, v.rank, v.dims, v.strides, p->alignment));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC,
                   graph_tensor(g, SLOT_DY, dtype, v.rank, v.dims, v.strides, p->alignment));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC,
                   graph_tensor(g, SLOT_DX, dtype, v.rank, v.dims, v.strides, p->alignment));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC, param_tensor(g, SLOT_SCALE, &v));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC, param_tensor(g, SLOT_SAVED_MEAN, &v));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC,
                   param_tensor(g, SLOT_SAVED_INV_VARIANCE, &v));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC, param_tensor(g, SLOT_DSCALE, &v));
    norm_attribute(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC, param_tensor(g, SLOT_DBIAS, &v));
    graph_add(g, op);
    return graph_build(g, vendor_handle, skip);
}

/* y = ((x - mean) * rsqrt(variance + epsilon)) * scale + bias in one kernel. x - mean first, where the plain entry
 * point's channels-last kernel folds to a*x + b and errs by 4e-4 at mean/sigma = 1e4 (H200, 9.19). In the same kernel,
 * if asked for, what follows: + z, and relu. */
static int build_pointwise(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graphs[0];
    view v;
    int status = make_view(call->x_desc, &v), dtype = call->x_desc->dtype;
    void *x, *shifted, *sum, *root, *normal, *scaled, *shown, *y;
    if (status != PBN_OK)
        return status;
    x = graph_tensor(g, SLOT_X, dtype, v.rank, v.dims, v.strides, p->alignment);
    y = graph_tensor(g, SLOT_Y, dtype, v.rank, v.dims, v.strides, p->alignment);
    shifted = graph_tensor(g, SLOT_VIRTUAL, PBN_FLOAT32, v.rank, v.dims, v.strides, 16);
    normal = graph_tensor(g, SLOT_VIRTUAL, PBN_FLOAT32, v.rank, v.dims, v.strides, 16);
    scaled = graph_tensor(g, SLOT_VIRTUAL, PBN_FLOAT32, v.rank, v.dims, v.strides, 16);
    sum = param_tensor(g, SLOT_VIRTUAL, &v);
    root = param_tensor(g, SLOT_VIRTUAL, &v);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, param_tensor(g, SLOT_RUNNING_VARIANCE, &v),
                    scalar_tensor(g, SLOT_VALUE + VALUE_EPSILON, &v), sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RSQRT, sum, NULL, root);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, x, param_tensor(g, SLOT_RUNNING_MEAN, &v), shifted);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, shifted, root, normal);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, normal, param_tensor(g, SLOT_SCALE, &v), scaled);
    shown = fuses(call) ? graph_tensor(g, SLOT_VIRTUAL, PBN_FLOAT32, v.rank, v.dims, v.strides, 16) : y;
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, scaled, param_tensor(g, SLOT_BIAS, &v), shown);
    if (residual(call) != NULL) {
        void *total = graph_tensor(g, SLOT_VIRTUAL, PBN_FLOAT32, v.rank, v.dims, v.strides, 16);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, shown,
                        graph_tensor(g, SLOT_Z, dtype, v.rank, v.dims, v.strides, p->alignment), total);
        shown = total;
    }
    if (fuses(call))
        graph_pointwise(g, PBN_CUDNN_POINTWISE_RELU_FWD, shown, NULL, y);
    return graph_build(g, vendor_handle, skip);
}

/* ---- the matrix views: packed channels-first memory for kernels that know channels-last memory only
 *
 * The column view is (N, C*S), S positions in an image, each column of one channel; the row view is (N*C*P, S/P), each
 * row of one channel, in P pieces where there are few. A line is a column of the one or a row of the other.
 * Forward training: per line the sums of d and d^2, d = x less the line's first value (so that nothing cancels, unless
 * that value is hundreds of deviations away, which a long row feels more than a column of N values); their means and
 * variances merge over the lines of a channel, by a batch norm of the plain entry point over the small maps, whose saved
 * mean is the average and whose running variance that of the means; then y = (x - mean) * g + bias with the three
 * vectors expanded to lines.
 * Backward: per line the sums of dy * (x - mean) and of dy, merged in the same way, then
 * dx = a * dy + b * (x - mean) + c. Inference is the last step of forward. Forward up to the statistics, which reads x
 * and writes next to nothing, is also what a backward without saved ones does first; then over packed channels-last
 * memory too, whose columns have a channel each as it is.
 * Only the row view has one kernel for two 16-bit sums as fast as one sum (161 us against 2 * 165 for 256x256x56x56),
 * short vectors in place of those of C * S numbers, and room for images of any size; only the column view serves rows
 * that are no whole number of 16 bytes well (H200, 9.19). */

/* More columns are more blocks of 32 than a launch takes, and a row's length is held to the same; with more rows nothing
 * was tried, and with fewer than ROWS_ENOUGH auto does not try (H200, 9.19). */
enum { LINES_MOST = 65535 * 32, ROWS_MOST = 1 << 19, ROWS_WANTED = 1 << 12, ROWS_ENOUGH = 1 << 10, ROW_LEAST = 512 };

/* A block of a kernel takes several whole rows, so where they are few and long each is cut into pieces: a power of two
 * of them, of whole numbers of 16 bytes. */
static int64_t row_pieces(const pbn_tensor *x) {
    const int64_t lines = x->dims[0] * x->dims[1], size = pbn_numel(x->rank, x->dims) / lines;
    const int64_t elements = x->dtype == PBN_FLOAT32 ? 4 : 8;
    int64_t pieces = 1;
    while (lines * pieces < ROWS_WANTED && size / pieces / 2 >= ROW_LEAST && size % (2 * pieces * elements) == 0)
        pieces *= 2;
    return pieces;
}

/* Channels-last memory is the matrix (N*S, C), few columns and long ones; P of its rows beside one another make it
 * (N*S/P, P*C), which has P columns for each channel: enough of them to occupy the device, and shorter sums. */
enum { COLUMNS_WANTED = 1 << 15, COLUMN_LEAST = 1 << 8 };

static int64_t column_groups(const pbn_tensor *x) {
    const int64_t rows = pbn_numel(x->rank, x->dims) / x->dims[1], wanted = COLUMNS_WANTED / x->dims[1];
    int64_t groups = rows / COLUMN_LEAST < wanted ? rows / COLUMN_LEAST : wanted;
    while (groups > 1 && rows % groups != 0)
        groups--;
    return groups > 1 ? groups : 1;
}

/* Vectors in the workspace: of lines without a gap between them, of channels without one. */
enum {
    LINE_0 = SLOT_SCRATCH, /* two of sums; then what the small batch norm writes for y; then two expanded vectors */
    LINE_1,
    LINE_2, /* two of means and variances, or of backward's sums; then the third expanded vector */
    LINE_3,
    LINE_MEAN,       /* the expanded mean, for backward */
    CHANNEL_AVERAGE, /* 2 C: saved mean of the small batch norm */
    CHANNEL_AVERAGE_2,
    CHANNEL_INVERSE, /* 2 C: its saved inverse deviation, not used; then the channel's own where none is saved */
    CHANNEL_ZERO,    /* 8 C zeros: its scale and bias, running mean and running variance */
    CHANNEL_A,       /* 3 C: what is expanded to lines */
    CHANNEL_B,
    CHANNEL_C,
    CHANNEL_BETWEEN, /* in CHANNEL_ZERO: that running variance */
    LINE_FIRST       /* of rows, in the dtype of x */
};

static int make_map(pbn_tensor *t, int dtype, int64_t rows, int64_t channels, int64_t size) {
    const int64_t dims[4] = {rows, channels, size, 1};
    int64_t strides[4];
    int status = cudnn_tensor_create(t);
    if (status != PBN_OK)
        return status;
    pbn_packed_strides(4, dims, PBN_CHANNELS_FIRST, strides);
    return cudnn_tensor_set(t, dtype, 4, dims, strides);
}

/* Descriptors of the small maps of the lines: (1, C, S, 1) of columns, (N, C, P, 1) of rows, (P, C, 1, 1) of columns of
 * channels-last memory. */
static int make_maps(pbn_plan *p, const pbn_tensor *x, int64_t size) {
    const int64_t rows = x->dims[0], channels = x->dims[1], pieces = p->merged / rows;
    const int64_t dims[4] = {rows, channels, pieces, 1}, strides[4] = {channels * size, size, p->depth, 1};
    int status;
    if ((status = make_map(&p->one, PBN_FLOAT32, 1, channels, 1)) != PBN_OK ||
        (status = make_map(&p->zeros, PBN_FLOAT32, 1, 8 * channels, 1)) != PBN_OK)
        return status;
    if (p->last)
        return make_map(&p->map, PBN_FLOAT32, p->merged, channels, 1);
    if (p->kind == COLUMNS) {
        if ((status = make_map(&p->map, PBN_FLOAT32, 1, channels, size)) != PBN_OK ||
            (status = make_map(&p->two, PBN_FLOAT32, 1, 2 * channels, 1)) != PBN_OK ||
            (status = make_map(&p->maps, PBN_FLOAT32, 1, 2 * channels, size)) != PBN_OK ||
            (status = make_map(&p->three, PBN_FLOAT32, 1, 3 * channels, 1)) != PBN_OK)
            return status;
        return make_map(&p->spread, PBN_FLOAT32, 1, 3 * channels, size);
    }
    if ((status = make_map(&p->map, PBN_FLOAT32, rows, channels, pieces)) != PBN_OK ||
        (status = make_map(&p->first, x->dtype, rows, channels, pieces)) != PBN_OK ||
        (status = cudnn_tensor_create(&p->firsts)) != PBN_OK)
        return status;
    return cudnn_tensor_set(&p->firsts, x->dtype, 4, dims, strides);
}

static int make_lines(pbn_plan *p, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int64_t rows = x->dims[0], channels = x->dims[1], size = pbn_numel(x->rank, x->dims) / rows / channels;
    size_t *offset = p->offsets, vector = (size_t)channels * sizeof(float), line, lines;
    int fifth;
    p->merged = p->last ? column_groups(x) : p->kind == ROWS ? rows * row_pieces(x) : size;
    p->depth = rows * size / p->merged;
    p->lines = channels * p->merged;
    line = (size_t)p->lines * sizeof(float);
    fifth = call->operation == PBN_OP_BACKWARD || (call->operation == PBN_OP_FORWARD_TRAINING && p->kind == ROWS);
    lines = rounded((fifth ? 5 : 4) * line);
    for (int i = LINE_0; i <= LINE_MEAN; i++)
        offset[i] = (size_t)(i - LINE_0) * line;
    offset[LINE_FIRST] = offset[LINE_MEAN]; /* forward has no such mean */
    offset[CHANNEL_AVERAGE] = lines;
    offset[CHANNEL_AVERAGE_2] = lines + vector;
    offset[CHANNEL_INVERSE] = lines + 2 * vector;
    offset[CHANNEL_ZERO] = lines + 4 * vector;
    offset[CHANNEL_BETWEEN] = offset[CHANNEL_ZERO] + 6 * vector;
    offset[CHANNEL_A] = lines + 12 * vector;
    offset[CHANNEL_B] = lines + 13 * vector;
    offset[CHANNEL_C] = lines + 14 * vector;
    p->scratch = rounded(lines + 15 * vector);
    return make_maps(p, x, size);
}

/* x, y, dy or dx as a matrix. */
static void *matrix_tensor(const pbn_plan *p, graph *g, int slot, int dtype) {
    const int64_t rows = p->kind == ROWS ? p->lines : p->depth, all = p->kind == ROWS ? p->depth : p->lines;
    const int64_t dims[4] = {rows, all, 1, 1}, strides[4] = {all, 1, all, all};
    return graph_tensor(g, slot, slot == SLOT_VIRTUAL ? PBN_FLOAT32 : dtype, 4, dims, strides,
                        slot == SLOT_VIRTUAL ? 16 : p->alignment);
}

/* One number for each line: beside the matrix along its lines, on their own always as columns' are, because no engine
 * takes pointwise operations on vectors that lie down alone. */
static void *vector_tensor(const pbn_plan *p, graph *g, int slot, int dtype, int64_t alignment, int beside) {
    const int64_t n = p->lines, along[4] = {1, n, 1, 1}, along_strides[4] = {n, 1, n, n};
    const int64_t down[4] = {n, 1, 1, 1}, down_strides[4] = {1, 1, 1, 1};
    const int lies_down = beside && p->kind == ROWS;
    return graph_tensor(g, slot, dtype, 4, lies_down ? down : along, lies_down ? down_strides : along_strides, alignment);
}

static void *line_tensor(const pbn_plan *p, graph *g, int slot) {
    return vector_tensor(p, g, slot, PBN_FLOAT32, 4, 1);
}

static void *lone_tensor(const pbn_plan *p, graph *g, int slot) {
    return vector_tensor(p, g, slot, PBN_FLOAT32, 4, 0);
}

/* The first value of each line: columns' are the first row of the matrix. */
static void *first_tensor(const pbn_plan *p, graph *g, int dtype, int beside) {
    return vector_tensor(p, g, p->kind == ROWS ? LINE_FIRST : SLOT_X, dtype, p->kind == ROWS ? 4 : p->alignment,
                         beside);
}

static void *channel_tensor(const pbn_call *call, graph *g, int slot) {
    const int64_t n = call->x_desc->dims[1], dims[4] = {1, n, 1, 1}, strides[4] = {n, 1, n, n};
    return graph_tensor(g, slot, PBN_FLOAT32, 4, dims, strides, 4);
}

static void *number_tensor(pbn_plan *p, graph *g, int which, double value) {
    static const int64_t ones[4] = {1, 1, 1, 1};
    if (which > VALUE_FACTOR)
        p->values[which] = (float)value;
    return graph_tensor(g, SLOT_VALUE + which, PBN_FLOAT32, 4, ones, ones, 4);
}

/* Two sums in one kernel where that is the faster way, else a kernel for each (columns of 16 bits): columns f32 464
 * against 530 us, f16 483 against 330 us for 256x64x112x112 (H200, 9.19). */
static int one_kernel(const pbn_plan *p, const pbn_call *call) {
    return p->kind == ROWS || call->x_desc->dtype == PBN_FLOAT32;
}

static int build_forward_sums(pbn_plan *p, const pbn_call *call, void *vendor_handle, int which) {
    graph *g = &p->graphs[which];
    const int dtype = call->x_desc->dtype, both = one_kernel(p, call);
    void *x = matrix_tensor(p, g, SLOT_X, dtype), *first = first_tensor(p, g, dtype, 1);
    void *d = matrix_tensor(p, g, SLOT_VIRTUAL, dtype), *square;
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, x, first, d);
    if (both || which == 0)
        graph_sum(g, d, line_tensor(p, g, LINE_0));
    if (both || which == 1) {
        square = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, d, d, square);
        graph_sum(g, square, line_tensor(p, g, LINE_1));
    }
    return graph_build(g, vendor_handle, 0);
}

static int build_backward_sums(pbn_plan *p, const pbn_call *call, void *vendor_handle, int which) {
    graph *g = &p->graphs[which];
    const int dtype = call->x_desc->dtype, both = one_kernel(p, call);
    void *dy = matrix_tensor(p, g, SLOT_DY, dtype), *wide, *d, *product;
    if (both || which == 0) {
        d = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
        product = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, matrix_tensor(p, g, SLOT_X, dtype),
                        line_tensor(p, g, LINE_MEAN), d);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, d, dy, product);
        graph_sum(g, product, line_tensor(p, g, LINE_2));
    }
    if (both || which == 1) {
        wide = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, dy, NULL, wide);
        graph_sum(g, wide, line_tensor(p, g, LINE_3));
    }
    return graph_build(g, vendor_handle, 0);
}

/* Mean and variance of each line from its sums about its first value. */
static int build_line_moments(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[2];
    void *each = number_tensor(p, g, 2, 1.0 / (double)p->depth);
    void *shift = lone_tensor(p, g, SLOT_VIRTUAL), *average = lone_tensor(p, g, SLOT_VIRTUAL);
    void *squared = lone_tensor(p, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, lone_tensor(p, g, LINE_0), each, shift);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, shift, first_tensor(p, g, call->x_desc->dtype, 0),
                    lone_tensor(p, g, LINE_2));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, lone_tensor(p, g, LINE_1), each, average);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, shift, shift, squared);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, average, squared, lone_tensor(p, g, LINE_3));
    return graph_build(g, vendor_handle, 0);
}

/* The channel's statistics from the merged ones of its lines, or from those of its one line; then its factor g, and the
 * running ones. */
static int build_channel_moments(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[3];
    const double merged = (double)p->merged, m = merged * (double)p->depth, f = call->factor;
    const int saved = call->saved_mean != NULL, one = p->merged == 1;
    void *mean = channel_tensor(call, g, one ? LINE_2 : CHANNEL_AVERAGE), *between, *kept, *added;
    void *variance = channel_tensor(call, g, one ? LINE_3 : SLOT_VIRTUAL), *sum = channel_tensor(call, g, SLOT_VIRTUAL);
    void *inverse = channel_tensor(call, g, saved ? SLOT_SAVED_INV_VARIANCE : CHANNEL_INVERSE);
    if (!one) { /* the small batch norm's running variance is the unbiased one of the lines' means */
        between = channel_tensor(call, g, SLOT_VIRTUAL);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, CHANNEL_BETWEEN),
                        number_tensor(p, g, 3, (merged - 1) / merged), between);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, channel_tensor(call, g, CHANNEL_AVERAGE_2), between, variance);
    }
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, variance, number_tensor(p, g, VALUE_EPSILON, 0), sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RSQRT, sum, NULL, inverse);
    if (p->moments_only) {
        graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, mean, NULL, channel_tensor(call, g, SLOT_SAVED_MEAN));
        return graph_build(g, vendor_handle, 0);
    }
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, inverse, channel_tensor(call, g, SLOT_SCALE),
                    channel_tensor(call, g, CHANNEL_B));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, mean, NULL, channel_tensor(call, g, CHANNEL_A));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, channel_tensor(call, g, SLOT_BIAS), NULL,
                    channel_tensor(call, g, CHANNEL_C));
    if (saved)
        graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, mean, NULL, channel_tensor(call, g, SLOT_SAVED_MEAN));
    if (call->running_mean != NULL) {
        void *keep = number_tensor(p, g, 4, 1 - f);
        kept = channel_tensor(call, g, SLOT_VIRTUAL), added = channel_tensor(call, g, SLOT_VIRTUAL);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, SLOT_RUNNING_MEAN), keep, kept);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, mean, number_tensor(p, g, VALUE_FACTOR, 0), added);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, kept, added, channel_tensor(call, g, SLOT_RUNNING_MEAN));
        kept = channel_tensor(call, g, SLOT_VIRTUAL), added = channel_tensor(call, g, SLOT_VIRTUAL);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, SLOT_RUNNING_VARIANCE), keep, kept);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, variance, number_tensor(p, g, 5, f * m / (m - 1)), added);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, kept, added, channel_tensor(call, g, SLOT_RUNNING_VARIANCE));
    }
    return graph_build(g, vendor_handle, 0);
}

/* Inference: mean, g = scale / sqrt(variance + epsilon) and bias beside one another. */
static int build_channel_factor(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[3];
    void *sum = channel_tensor(call, g, SLOT_VIRTUAL), *inverse = channel_tensor(call, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, channel_tensor(call, g, SLOT_RUNNING_VARIANCE),
                    number_tensor(p, g, VALUE_EPSILON, 0), sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RSQRT, sum, NULL, inverse);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, inverse, channel_tensor(call, g, SLOT_SCALE),
                    channel_tensor(call, g, CHANNEL_B));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, channel_tensor(call, g, SLOT_RUNNING_MEAN), NULL,
                    channel_tensor(call, g, CHANNEL_A));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, channel_tensor(call, g, SLOT_BIAS), NULL,
                    channel_tensor(call, g, CHANNEL_C));
    return graph_build(g, vendor_handle, 0);
}

/* dbias, dscale and the three factors of dx, from the channel's averages of the lines' sums. */
static int build_channel_gradients(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[3];
    const double depth = (double)p->depth, merged = (double)p->merged;
    void *average = channel_tensor(call, g, CHANNEL_AVERAGE_2), *inverse = channel_tensor(call, g, SLOT_SAVED_INV_VARIANCE);
    void *count = number_tensor(p, g, 2, merged), *sum = channel_tensor(call, g, SLOT_VIRTUAL);
    void *dscale = channel_tensor(call, g, SLOT_DSCALE), *a = channel_tensor(call, g, CHANNEL_A);
    void *scaled = channel_tensor(call, g, SLOT_VIRTUAL), *share = channel_tensor(call, g, SLOT_VIRTUAL);
    void *part = channel_tensor(call, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, average, count, channel_tensor(call, g, SLOT_DBIAS));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, CHANNEL_AVERAGE), count, sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, sum, inverse, dscale);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, SLOT_SCALE), inverse, a);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, dscale, inverse, scaled);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, scaled, number_tensor(p, g, 3, -1.0 / (depth * merged)), share);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, share, a, channel_tensor(call, g, CHANNEL_B));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, average, number_tensor(p, g, 4, -1.0 / depth), part);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, part, a, channel_tensor(call, g, CHANNEL_C));
    return graph_build(g, vendor_handle, 0);
}

static int build_forward_apply(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graphs[4];
    const int dtype = call->x_desc->dtype;
    void *d = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    void *scaled = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, matrix_tensor(p, g, SLOT_X, dtype),
                    line_tensor(p, g, LINE_0), d);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, d, line_tensor(p, g, LINE_1), scaled);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, scaled, line_tensor(p, g, LINE_2),
                    matrix_tensor(p, g, SLOT_Y, dtype));
    return graph_build(g, vendor_handle, skip);
}

static int build_backward_apply(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graphs[4];
    const int dtype = call->x_desc->dtype;
    void *d = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    void *by_x = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    void *by_dy = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    void *sum = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, matrix_tensor(p, g, SLOT_X, dtype),
                    line_tensor(p, g, LINE_MEAN), d);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, d, line_tensor(p, g, LINE_1), by_x);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, matrix_tensor(p, g, SLOT_DY, dtype),
                    line_tensor(p, g, LINE_0), by_dy);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, by_x, by_dy, sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, sum, line_tensor(p, g, LINE_2),
                    matrix_tensor(p, g, SLOT_DX, dtype));
    return graph_build(g, vendor_handle, skip);
}

static int build_lines(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    int status = make_lines(p, call);
    int64_t most = 0;
    if (status == PBN_OK && call->operation == PBN_OP_FORWARD_TRAINING) {
        if ((status = build_forward_sums(p, call, vendor_handle, 0)) == PBN_OK && !one_kernel(p, call))
            status = build_forward_sums(p, call, vendor_handle, 1);
        if (status == PBN_OK)
            status = build_line_moments(p, call, vendor_handle);
        if (status == PBN_OK)
            status = build_channel_moments(p, call, vendor_handle);
    } else if (status == PBN_OK && call->operation == PBN_OP_BACKWARD) {
        if ((status = build_backward_sums(p, call, vendor_handle, 0)) == PBN_OK && !one_kernel(p, call))
            status = build_backward_sums(p, call, vendor_handle, 1);
        if (status == PBN_OK)
            status = build_channel_gradients(p, call, vendor_handle);
    } else if (status == PBN_OK) {
        status = build_channel_factor(p, call, vendor_handle);
    }
    if (status == PBN_OK && !p->moments_only)
        status = call->operation == PBN_OP_BACKWARD ? build_backward_apply(p, call, vendor_handle, skip)
                                                    : build_forward_apply(p, call, vendor_handle, skip);
    for (size_t i = 0; i < sizeof p->graphs / sizeof p->graphs[0]; i++)
        most = p->graphs[i].workspace > most ? p->graphs[i].workspace : most;
    p->workspace = p->scratch + (size_t)most;
    return status;
}

static const char no_blending[] = "the graphs of batch norm do not blend: alpha must be 1 and beta 0";
static const char no_float64[] = "cuDNN's graph API has no float64 batch norm";
static const char spatial_only[] = "the algorithm is for the spatial modes";
static const char who_fuses[] = "of cuDNN's ways only the Ex entry points (algorithm ex) fuse an activation in "
                                "training, and only the pointwise graph in inference";
static const char relu_only[] = "cuDNN's plans fuse RELU, with or without a residual, and nothing else";
static const char no_small_epsilon[] = "the graphs read epsilon as float32, in whose normal range (or 0) this one is not";

static int is_single(double value) {
    return value == 0 || (value >= FLT_MIN && value <= FLT_MAX);
}

/* ---- dense copies: x (and dy) packed in the workspace, a plan for those, and the result copied back ---- */

static int cudnn_plan_create(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan);
static int cudnn_plan_run(pbn_handle *handle, pbn_plan *plan, const pbn_call *call);

static int build_dense(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int64_t element = x->dtype == PBN_FLOAT64 ? 8 : x->dtype == PBN_FLOAT32 ? 4 : 2;
    int64_t strides[PBN_MAX_RANK];
    /* The fast channels-last paths have no float64. */
    const int last = x->strides[1] == 1 && x->dims[1] > 1 && x->dtype != PBN_FLOAT64;
    int status = cudnn_tensor_create(&p->packed);
    if (status != PBN_OK)
        return status;
    pbn_packed_strides(x->rank, x->dims, last ? PBN_CHANNELS_LAST : PBN_CHANNELS_FIRST, strides);
    status = cudnn_tensor_set(&p->packed, x->dtype, x->rank, x->dims, strides);
    if (status != PBN_OK)
        return status;
    p->inner_call = *call;
    p->inner_call.x_desc = &p->packed;
    if (call->operation == PBN_OP_BACKWARD)
        p->inner_call.dy_desc = p->inner_call.dx_desc = &p->packed;
    else
        p->inner_call.y_desc = &p->packed;
    p->inner_call.x = p->inner_call.dy = p->inner_call.y = p->inner_call.dx = NULL; /* workspace is well aligned */
    status = cudnn_plan_create(handle, &p->inner_call, "auto", &p->inner);
    if (status != PBN_OK)
        return status;
    p->copy = rounded((size_t)(pbn_numel(x->rank, x->dims) * element));
    p->scratch = (call->operation == PBN_OP_BACKWARD ? 3 : 2) * p->copy;
    p->workspace = p->scratch + p->inner->workspace;
    return PBN_OK;
}

static int copy_tensor(pbn_handle *handle, const pbn_tensor *from_desc, const void *from, const pbn_tensor *to_desc,
                       void *to) {
    const pbn_call call = {.operation = PBN_OP_AXPBY, .alpha = 1, .x_desc = from_desc, .x = from, .y_desc = to_desc,
                           .y = to};
    return cudnn_axpby(handle, &call);
}

static int run_dense(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    pbn_call inner = *call;
    char *space = call->workspace;
    const int backward = call->operation == PBN_OP_BACKWARD;
    const pbn_tensor *out_desc = backward ? call->dx_desc : call->y_desc;
    void *result = backward ? call->dx : call->y, *out = space + p->copy;
    int status = copy_tensor(handle, call->x_desc, call->x, &p->packed, space);
    if (status == PBN_OK && call->beta != 0)
        status = copy_tensor(handle, out_desc, result, &p->packed, out);
    if (status == PBN_OK && backward)
        status = copy_tensor(handle, call->dy_desc, call->dy, &p->packed, space + 2 * p->copy);
    if (status != PBN_OK)
        return status;
    inner.x_desc = &p->packed;
    inner.x = space;
    if (backward) {
        inner.dy_desc = inner.dx_desc = &p->packed;
        inner.dy = space + 2 * p->copy;
        inner.dx = out;
    } else {
        inner.y_desc = &p->packed;
        inner.y = out;
    }
    inner.workspace = space + p->scratch;
    inner.workspace_size = call->workspace_size - p->scratch;
    status = cudnn_plan_run(handle, p->inner, &inner);
    return status != PBN_OK ? status : copy_tensor(handle, &p->packed, out, out_desc, result);
}

/* Views whose plain kernels are 7 to 18 times slower than copy, packed kernel and copy together: an innermost axis
 * with gaps, or channels-last that is not packed. Channel slices of channels-first memory cost nothing. */
static int is_slow_view(const pbn_tensor *t) {
    return t->layout == PBN_STRIDED &&
           (t->strides[t->rank - 1] != 1 || (t->strides[1] == 1 && t->dims[1] > 1 && t->rank > 2));
}

static int any_slow(const pbn_call *call) {
    if (call->x_desc->dtype == PBN_FLOAT64 && call->operation != PBN_OP_FORWARD_INFERENCE &&
        call->x_desc->layout == PBN_CHANNELS_LAST)
        return 1; /* float64 has the channels-first kernels only */
    if (is_slow_view(call->x_desc))
        return 1;
    return call->operation == PBN_OP_BACKWARD ? is_slow_view(call->dy_desc) || is_slow_view(call->dx_desc)
                                              : is_slow_view(call->y_desc);
}

static uintptr_t data_bits(const pbn_call *call) {
    return bits(call->x) | bits(call->y) | bits(call->dy) | bits(call->dx) | bits(call->z) | bits(call->dz);
}

static uintptr_t param_bits(const pbn_call *call) {
    return bits(call->scale) | bits(call->bias) | bits(call->running_mean) | bits(call->running_variance) |
           bits(call->saved_mean) | bits(call->saved_inv_variance) | bits(call->dscale) | bits(call->dbias);
}

/* The largest power of two up to 16 that divides every data address; 16 where none is known yet. */
static int64_t common_alignment(const pbn_call *call) {
    const uintptr_t all = data_bits(call) | 16;
    return (int64_t)(all & (~all + 1));
}

/* The norm graphs' kernels load several elements at once whatever alignment their tensors are declared with: data at
 * 4 bytes lost the context (9.19, H200). Ex without an activation is known to do with 8 bytes of the data; what its
 * kernels, and the fused ones, want of parameters is not known, so 16 is caution. The plain entry point's kernels, the
 * pointwise graph's and those of the column view take any element's address (the same). */
enum { WIDE_ALIGNMENT = 16 };
static const char ex_alignment[] = "the Ex entry points' channels-last kernels load several elements at once: tensors "
                                   "and parameters must be 16-byte aligned, or the CUDA context would be lost";
static const char graph_alignment[] = "the norm graphs' kernels load several elements at once: tensors and parameters "
                                      "must be 16-byte aligned, or the CUDA context would be lost";
static const char fused_alignment[] = "tensors and parameters of a fused activation must be 16-byte aligned: cuDNN's "
                                      "kernels would lose the CUDA context";

/* Why the Ex entry points, which serve `call` without an activation, cannot with its own. What they were seen to do
 * with other calls: NOT_SUPPORTED for channels-first and float64, whose size queries say 0 (9.19); without saved
 * statistics they leave their fused kernels. C is documented as a multiple of 4 for the residual. Blending behind an
 * activation is nowhere documented. */
static const char *cannot_fuse(const pbn_call *call) {
    if (call->activation != PBN_ACTIVATION_RELU)
        return relu_only;
    if ((call->operation == PBN_OP_BACKWARD ? call->z_desc : call->dz_desc) != NULL)
        return "z belongs to forward and dz to backward";
    if (!has_activation() || api.cudnnGetBatchNormalizationTrainingExReserveSpaceSize == NULL)
        return "this cuDNN library lacks the activation descriptors or the reserve space query of the Ex entry points";
    if (call->x_desc->dtype == PBN_FLOAT64)
        return "cuDNN's Ex entry points fuse no activation for float64";
    if (!all_channels_last(call))
        return "cuDNN's Ex entry points fuse an activation for packed channels-last tensors only";
    if (call->x_desc->dims[1] % 4 != 0)
        return "cuDNN's Ex entry points fuse an activation for channels in multiples of 4 only";
    if (blends(call))
        return "cuDNN does not say how its Ex entry points blend behind an activation: alpha must be 1 and beta 0";
    if (call->saved_mean == NULL)
        return "cuDNN's fused kernels write the saved statistics, and its fused backward needs them";
    if (common_alignment(call) < WIDE_ALIGNMENT)
        return fused_alignment;
    return NULL;
}

/* ---- backward without saved statistics, where the vendor's own way to them is slow ----------------------------------
 *
 * cuDNN recomputes them in the plain entry points' kernels: its Ex call takes 12269 us in place of 134 us for f16
 * 256x256x28x28, persistent 5836 in place of 1456 us for f32 256x64x112x112 (H200, 9.19), and dscale errs by 4e-4 at
 * mean/sigma = 1e4. So they are computed first, and the fast kernels are given them as saved ones. */

static const char *unavailable(int kind, const pbn_call *call);

/* Ex over other memory does not have the fused kernels with saved statistics either, and is left to itself. */
static int computes_moments(int kind, const pbn_call *call) {
    if (call->operation != PBN_OP_BACKWARD || call->saved_mean != NULL || fuses(call))
        return 0;
    return kind == GRAPH || kind == COLUMNS || kind == ROWS ||
           (kind == EX && call->x_desc->dtype != PBN_FLOAT64 && all_channels_last(call));
}

/* The forward training whose statistics they are. */
static pbn_call moments_call(const pbn_call *call, void *mean, void *inverse) {
    pbn_call forward = *call;
    forward.operation = PBN_OP_FORWARD_TRAINING;
    forward.alpha = 1;
    forward.beta = 0;
    forward.y_desc = call->x_desc;
    forward.saved_mean = mean;
    forward.saved_inv_variance = inverse;
    return forward;
}

/* Of which view they are computed, COLUMNS or ROWS, for a backward by `kind`; why not, or NULL. The sums of rows are
 * added in any order, so what is not about rows takes columns where it can. */
static const char *choose_moments(int kind, const pbn_call *call, int *view) {
    const pbn_tensor *x = call->x_desc;
    const pbn_call forward = moments_call(call, (void *)(uintptr_t)call, (void *)(uintptr_t)call);
    const char *why;
    int64_t values, groups;
    *view = kind == ROWS ? ROWS : COLUMNS;
    if (kind == COLUMNS || kind == ROWS)
        return NULL; /* it has the same needs */
    if (!all_channels_last(call)) {
        why = unavailable(COLUMNS, &forward);
        if (why != NULL && unavailable(ROWS, &forward) == NULL) {
            *view = ROWS;
            why = NULL;
        }
        return why;
    }
    values = pbn_numel(x->rank, x->dims) / x->dims[1];
    groups = column_groups(x);
    if (!is_single(call->epsilon))
        return no_small_epsilon;
    if (values < 2)
        return "with one value in a channel there are no statistics to compute, and none are saved";
    if (x->dims[1] * groups < 2 || x->dims[1] * groups > LINES_MOST || values / groups > ROWS_MOST)
        return "without saved statistics channels-last memory is taken as a matrix of 2 to 65535 * 32 columns and up to "
               "524288 rows, which this shape does not make";
    return api.cudnnSetTensor == NULL ? no_fill : NULL;
}

/* Why `kind` cannot do `call`; NULL where it can be tried. */
static const char *unavailable(int kind, const pbn_call *call) {
    const int64_t alignment = common_alignment(call);
    int64_t size, pieces;
    int view;
    if (kind != EX && kind != POINTWISE && fuses(call))
        return who_fuses;
    switch (kind) {
    case PLAIN:
        return NULL;
    case SPATIAL:
    case PERSISTENT:
        return call->mode == PBN_PER_ACTIVATION ? spatial_only : NULL;
    case EX:
        if (call->operation == PBN_OP_FORWARD_INFERENCE)
            return "cuDNN has no Ex entry point for inference";
        if (call->mode == PBN_PER_ACTIVATION)
            return spatial_only;
        if (api.cudnnBatchNormalizationForwardTrainingEx == NULL || api.cudnnBatchNormalizationBackwardEx == NULL ||
            api.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize == NULL ||
            api.cudnnGetBatchNormalizationBackwardExWorkspaceSize == NULL)
            return "this cuDNN library lacks the Ex entry points";
        if (alignment < WIDE_ALIGNMENT)
            return ex_alignment;
        if (computes_moments(kind, call))
            return choose_moments(kind, call, &view);
        return fuses(call) ? cannot_fuse(call) : NULL;
    case GRAPH:
    case POINTWISE:
        if ((kind == POINTWISE) != (call->operation == PBN_OP_FORWARD_INFERENCE))
            return kind == POINTWISE ? "the pointwise graph is for inference"
                                     : "cuDNN's graph API has no batch-norm inference node; its pointwise graph does it";
        if (call->mode == PBN_PER_ACTIVATION)
            return spatial_only;
        if (call->x_desc->dtype == PBN_FLOAT64)
            return no_float64;
        if (fuses(call) && (call->activation != PBN_ACTIVATION_RELU || call->dz_desc != NULL))
            return relu_only;
        if (blends(call))
            return no_blending;
        if (!is_single(call->epsilon))
            return no_small_epsilon;
        if (kind == GRAPH && alignment < WIDE_ALIGNMENT)
            return graph_alignment;
        if (!all_channels_last(call) && (kind == POINTWISE || !all_channels_first(call)))
            return kind == POINTWISE ? "the pointwise graph takes packed channels-last tensors"
                                     : "the graphs of batch norm take packed tensors, all in one layout";
        return computes_moments(kind, call) ? choose_moments(kind, call, &view) : NULL;
    case SPLIT:
        if (call->operation != PBN_OP_FORWARD_INFERENCE || call->mode == PBN_PER_ACTIVATION)
            return "only spatial inference can be split along N";
        return NULL;
    case COLUMNS:
    case ROWS:
        if (call->mode == PBN_PER_ACTIVATION)
            return spatial_only;
        if (call->x_desc->dtype == PBN_FLOAT64)
            return no_float64;
        if (blends(call))
            return no_blending;
        if (!is_single(call->epsilon))
            return no_small_epsilon;
        if (!all_channels_first(call))
            return "the matrix views are those of packed channels-first tensors";
        size = pbn_numel(call->x_desc->rank, call->x_desc->dims) / call->x_desc->dims[0] / call->x_desc->dims[1];
        if (size < 2)
            return "with one position in a channel there is nothing to merge";
        if (kind == COLUMNS && size * call->x_desc->dims[1] > LINES_MOST)
            return "an image of more than 65535 * 32 values: a column each is more than a launch holds";
        pieces = row_pieces(call->x_desc);
        if (kind == ROWS && (size / pieces > LINES_MOST || call->x_desc->dims[0] > PLAIN_ROWS ||
                             call->x_desc->dims[0] * call->x_desc->dims[1] > ROWS_MOST))
            return "the row view is for up to 65535 images, 524288 rows N * C and 65535 * 32 values in each";
        if (kind == ROWS && call->operation != PBN_OP_FORWARD_INFERENCE && call->x_desc->dims[0] * pieces < 2)
            return "with one row for each channel there is nothing to merge";
        if (api.cudnnAddTensor == NULL || api.cudnnSetTensor == NULL ||
            (kind == ROWS && axpby_function(call->x_desc->dtype) == NULL))
            return no_axpby;
        return NULL;
    case DENSE:
        if (api.cudnnTransformTensor == NULL)
            return no_axpby;
        if (!any_slow(call))
            return "a packed copy pays for strided views, and for channels-last float64 in training, only";
        return NULL;
    default:
        return "there is no such algorithm";
    }
}

static int make_piece(pbn_tensor *piece, const pbn_tensor *whole, int64_t rows) {
    int64_t dims[PBN_MAX_RANK];
    int status = cudnn_tensor_create(piece);
    if (status != PBN_OK)
        return status;
    memcpy(dims, whole->dims, sizeof dims);
    dims[0] = rows;
    return cudnn_tensor_set(piece, whole->dtype, whole->rank, dims, whole->strides);
}

static int fused_ops(const pbn_call *call) {
    return residual(call) != NULL ? PBN_CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION : PBN_CUDNN_BATCHNORM_OPS_BN_ACTIVATION;
}

/* All data tensors are the same packed channels-last memory, so one descriptor serves them: of rank 4, with the strides
 * of its axes of length 1 such that cuDNN takes it for channels-last, whatever rank and strides the caller's have. */
static int build_fused(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const int mode = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, ops = fused_ops(call);
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    void *t, *z, *param, *activation;
    int rank, status = pbn_fold(call->x_desc, 4, 4, &rank, dims, strides);
    if (status != PBN_OK)
        return status;
    pbn_packed_strides(rank, dims, PBN_CHANNELS_LAST, strides);
    if ((status = cudnn_tensor_create(&p->packed)) != PBN_OK ||
        (status = cudnn_tensor_set(&p->packed, call->x_desc->dtype, rank, dims, strides)) != PBN_OK ||
        (status = make_map(&p->one, PBN_FLOAT32, 1, dims[1], 1)) != PBN_OK || (status = new_relu(&activation)) != PBN_OK)
        return status;
    p->activation = activation;
    t = p->packed.compute;
    z = residual(call) != NULL ? t : NULL;
    param = p->one.compute;
    status = call->operation == PBN_OP_BACKWARD
                 ? api.cudnnGetBatchNormalizationBackwardExWorkspaceSize(handle->vendor, mode, ops, t, t, t, z, t,
                                                                         param, activation, &p->workspace)
                 : api.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(handle->vendor, mode, ops, t, z, t,
                                                                                param, activation, &p->workspace);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    /* Without a workspace the Ex entry points are documented to do what the plain ones do: no activation. */
    if (p->workspace == 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, "cuDNN asks for no workspace, so it has no fused kernel for this shape");
    return api.cudnnGetBatchNormalizationTrainingExReserveSpaceSize(handle->vendor, mode, ops, activation, t,
                                                                    &p->reserve);
}

static int build_moments(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const pbn_call forward = moments_call(call, p, p); /* its saved statistics are there; where, a run says */
    const char *why;
    pbn_plan *m = calloc(1, sizeof *m);
    int status;
    if (m == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    p->moments = m;
    if ((status = graph_ready()) != PBN_OK)
        return status;
    why = choose_moments(p->kind, call, &m->kind);
    if (why != NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, why);
    m->moments_only = 1;
    m->last = p->kind != COLUMNS && p->kind != ROWS && all_channels_last(call);
    m->alignment = p->alignment;
    m->values[VALUE_EPSILON] = (float)call->epsilon;
    status = build_lines(m, &forward, handle->vendor, 0);
    p->vectors = 2 * rounded((size_t)call->x_desc->dims[1] * sizeof(float));
    p->workspace = p->vectors + (m->workspace > p->workspace ? m->workspace : p->workspace);
    return status;
}

/* The way itself, which is given saved statistics whoever has them. */
static int build_way(pbn_plan *p, pbn_handle *handle, const pbn_call *call, int skip) {
    void *x, *y, *dy, *dx, *param;
    int64_t rows;
    int status = PBN_OK;
    p->mode = call->mode;
    p->fused = fuses(call);
    p->values[VALUE_EPSILON] = (float)call->epsilon;
    p->values[VALUE_FACTOR] = (float)call->factor;
    switch (p->kind) {
    case SPATIAL:
        p->mode = PBN_SPATIAL;
        return PBN_OK;
    case PERSISTENT:
        p->mode = PBN_SPATIAL_PERSISTENT;
        return PBN_OK;
    case EX: /* with the persistent mode: the plain mode over Ex runs the plain entry point's kernels */
        p->mode = PBN_SPATIAL_PERSISTENT;
        if (fuses(call))
            return build_fused(p, handle, call);
        if ((status = to_compute(call->x_desc, &x)) != PBN_OK ||
            (status = to_compute(call->param_desc, &param)) != PBN_OK)
            return status;
        if (call->operation == PBN_OP_FORWARD_TRAINING) {
            if ((status = to_compute(call->y_desc, &y)) != PBN_OK)
                return status;
            return api.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
                handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, PBN_CUDNN_BATCHNORM_OPS_BN, x, NULL, y, param,
                NULL, &p->workspace);
        }
        if ((status = to_compute(call->dy_desc, &dy)) != PBN_OK || (status = to_compute(call->dx_desc, &dx)) != PBN_OK)
            return status;
        return api.cudnnGetBatchNormalizationBackwardExWorkspaceSize(
            handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, PBN_CUDNN_BATCHNORM_OPS_BN, x, NULL, dy, NULL, dx,
            param, NULL, &p->workspace);
    case GRAPH:
    case POINTWISE:
        if ((status = graph_ready()) != PBN_OK)
            return status;
        status = p->kind == POINTWISE                            ? build_pointwise(p, call, handle->vendor, skip)
                 : call->operation == PBN_OP_FORWARD_TRAINING ? build_norm_forward(p, call, handle->vendor, skip)
                                                                 : build_norm_backward(p, call, handle->vendor, skip);
        p->workspace = p->scratch + (size_t)p->graphs[0].workspace;
        return status;
    case COLUMNS:
    case ROWS:
        status = graph_ready();
        return status != PBN_OK ? status : build_lines(p, call, handle->vendor, skip);
    case DENSE:
        return build_dense(p, handle, call);
    case SPLIT:
        rows = call->x_desc->dims[0];
        if ((status = make_piece(&p->part, call->x_desc, rows < SPLIT_ROWS ? rows : SPLIT_ROWS)) != PBN_OK ||
            (status = make_piece(&p->y_part, call->y_desc, rows < SPLIT_ROWS ? rows : SPLIT_ROWS)) != PBN_OK)
            return status;
        if (rows > SPLIT_ROWS && rows % SPLIT_ROWS != 0 &&
            ((status = make_piece(&p->rest, call->x_desc, rows % SPLIT_ROWS)) != PBN_OK ||
             (status = make_piece(&p->y_rest, call->y_desc, rows % SPLIT_ROWS)) != PBN_OK))
            return status;
        return PBN_OK;
    default:
        return PBN_OK;
    }
}

static int build(pbn_plan *p, pbn_handle *handle, const pbn_call *call, int skip) {
    const int status = build_way(p, handle, call, skip);
    return status == PBN_OK && computes_moments(p->kind, call) ? build_moments(p, handle, call) : status;
}

static void cudnn_plan_destroy(pbn_plan *plan);

static void drop_built(pbn_plan *p) {
    pbn_tensor *tensors[] = {&p->part, &p->rest, &p->y_part, &p->y_rest, &p->one, &p->map, &p->two,
                             &p->maps, &p->three, &p->spread, &p->firsts, &p->first, &p->zeros, &p->packed};
    for (size_t i = 0; i < sizeof p->graphs / sizeof p->graphs[0]; i++)
        graph_drop(&p->graphs[i]);
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        cudnn_tensor_destroy(tensors[i]);
    cudnn_plan_destroy(p->inner);
    p->inner = NULL;
    cudnn_plan_destroy(p->moments);
    p->moments = NULL;
    if (p->activation != NULL)
        api.cudnnDestroyActivationDescriptor(p->activation);
    p->activation = NULL;
}

static void cudnn_plan_destroy(pbn_plan *plan) {
    if (plan == NULL)
        return;
    drop_built(plan);
    free(plan);
}

/* What "auto" takes, the first row that fits and can be built; figures: H200, cuDNN 9.19, medians over the shapes
 * of networks. Every row's results but those for "fast" stay within the stable class of the error bound. The same bits at
 * every call were seen of inference, spatial, and ex and graph with saved statistics; sums of matrices, which columns,
 * rows and backward without saved statistics go by, differ in their last digits on large maps. The rows of backward
 * without saved statistics have the thresholds of the same ways with them, because either side reads x once more. */
#define HALVES (1u << PBN_FLOAT16 | 1u << PBN_BFLOAT16)
#define SINGLE (1u << PBN_FLOAT32)
#define ANY_DTYPE (HALVES | SINGLE | 1u << PBN_FLOAT64)

typedef struct rule {
    int operation;
    uint32_t dtypes;
    int layout; /* pbn_layout of all tensors, ANY_LAYOUT, SLOW_VIEW, or WHOLE_ROWS: FIRST, S of 16 bytes, rows enough */
    int saved;  /* 1: with saved statistics only, -1: without only */
    int fast;   /* 1: for "fast" only */
    int64_t rows_from, channels_from, channels_to, size_from; /* N, C, positions of a channel in one image */
    int64_t megabytes_from, megabytes_to;                     /* of x */
    const char *algorithm, *why;
} rule;

enum { FIRST = PBN_CHANNELS_FIRST, LAST = PBN_CHANNELS_LAST, ANY_LAYOUT = -1, SLOW_VIEW = -2, WHOLE_ROWS = -3 };
#define MOST INT64_MAX

static const char persistent_why[] =
    "up to 7 times faster than spatial, but sums in fixed point: the absolute error of a gradient is about 2e-6 for "
    "800000 values, and values below 1e-5 or above 1e10 lose their digits";
static const char rows_why[] =
    "up to 1.2 times faster than columns or persistent, without the latter's limits of range; but less exact than "
    "columns where a channel begins with a value far from its others";
static const char moments_last_why[] =
    "computes the statistics that are not saved first, by sums that write no y, for kernels made for channels-last: 3 to "
    "60 times faster than the plain entry point, f16 256x256x28x28 in 244 us in place of 12442";
static const char moments_first_why[] =
    "computes the statistics that are not saved first, as in forward: 1.1 to 5 times faster than the plain entry point, "
    "256x64x112x112 in 1669 us in place of 5675 in f32, 1111 in place of 5445 in f16";
static const char moments_rows_why[] =
    "computes the statistics that are not saved first, as in forward: 1.2 to 1.4 times faster than columns; but less "
    "exact where a channel begins with a value far from its others";
static const char packed_why[] =
    "packed copies through fast kernels: 7 to 18 times faster than the plain entry point's uncoalesced ones";

static const rule rules[] = {
    /* channels-last */
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, 0, 0, 0, 0, MOST, 0, 0, 8, "pointwise",
     "one fused kernel, and the heuristic's own choice is the fastest of its plans in L2"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, 0, 0, 0, 128, MOST, 0, 0, MOST, "pointwise:1",
     "one fused kernel at 70 to 89 % of the copy ceiling, where the plain entry point's channels-last kernel reaches 35 "
     "to 66 % and errs by 4e-4 at mean/sigma = 1e4"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, 0, 0, 0, 0, MOST, 0, 0, MOST, "pointwise:2",
     "as with more channels, where the next plan is the faster one"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, 0, 0, 0, 0, MOST, 0, 0, MOST, "pointwise",
     "as with more channels; a version with fewer plans"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, 1, 0, 0, 512, MOST, 0, 0, MOST, "graph",
     "1.2 to 1.6 times faster than Ex from 512 channels on"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, 1, 0, 0, 0, MOST, 0, 0, 8, "graph", "1.2 times faster than Ex in L2"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, 1, 0, 0, 128, MOST, 0, 0, MOST, "graph",
     "1.1 to 1.5 times faster than Ex from 128 channels on"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, 1, 0, 0, 0, MOST, 0, 256, MOST, "graph",
     "1.04 times faster than Ex on large maps"},
    {PBN_OP_BACKWARD, SINGLE, LAST, 1, 0, 0, 512, MOST, 0, 0, MOST, "graph",
     "1.1 times faster than Ex from 512 channels on"},
    {PBN_OP_BACKWARD, HALVES, LAST, 1, 0, 0, 128, MOST, 0, 0, MOST, "graph", "up to 1.6 times faster than Ex"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, 1, 0, 0, 0, MOST, 0, 0, MOST, "ex",
     "16 to 76 times faster than the plain entry point, whose channels-last kernels are the channels-first ones"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, 1, 0, 0, 0, MOST, 0, 0, MOST, "ex",
     "16 to 76 times faster than the plain entry point, whose channels-last kernels are the channels-first ones"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, 0, 0, 0, 0, MOST, 0, 0, MOST, "graph",
     "without saved statistics Ex falls to a slow kernel; the graph writes them to the workspace"},
    {PBN_OP_BACKWARD, SINGLE, LAST, -1, 0, 0, 512, MOST, 0, 0, MOST, "graph", moments_last_why},
    {PBN_OP_BACKWARD, HALVES, LAST, -1, 0, 0, 128, MOST, 0, 0, MOST, "graph", moments_last_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, -1, 0, 0, 0, MOST, 0, 0, MOST, "ex", moments_last_why},
    /* channels-first */
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, 0, 1, 0, 0, MOST, 0, 0, MOST, "persistent", persistent_why},
    {PBN_OP_BACKWARD, SINGLE, WHOLE_ROWS, 1, 1, 0, 0, MOST, 2048, 64, MOST, "rows:1", rows_why},
    {PBN_OP_BACKWARD, HALVES, WHOLE_ROWS, 1, 1, 0, 0, MOST, 8192, 64, MOST, "rows:1", rows_why},
    {PBN_OP_BACKWARD, HALVES, FIRST, 1, 1, 0, 0, MOST, 0, 0, MOST, "persistent", persistent_why},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, WHOLE_ROWS, 0, 0, 0, 0, MOST, 8192, 32, MOST, "rows:1",
     "71 to 91 % of the copy ceiling on images of millions of values, where the plain entry point reaches 14 to 73 %"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, 0, 0, 0, 0, MOST, 0, 32, MOST, "columns:1",
     "68 to 79 % of the copy ceiling, where the plain entry point reaches 8 to 72 %"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, 0, 0, 0, 0, 96, 4096, 64, MOST, "columns:1",
     "with fewer channels than multiprocessors spatial leaves some idle: 2 to 4.9 times faster"},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, 0, 0, 0, 0, MOST, 512, 128, MOST, "columns:1", "1.2 to 1.5 times faster"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, 1, 0, 0, 0, MOST, 2048, 64, MOST, "columns:1",
     "1.2 to 6 times faster than spatial on large maps"},
    {PBN_OP_BACKWARD, SINGLE, WHOLE_ROWS, -1, 1, 0, 0, MOST, 2048, 64, MOST, "rows:1", moments_rows_why},
    {PBN_OP_BACKWARD, HALVES, WHOLE_ROWS, -1, 1, 0, 0, MOST, 8192, 64, MOST, "rows:1", moments_rows_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, -1, 0, 0, 0, MOST, 2048, 64, MOST, "columns:1", moments_first_why},
    {PBN_OP_BACKWARD, SINGLE, FIRST, 1, 1, 0, 0, 96, 16384, 32, MOST, "persistent", persistent_why},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, 1, 0, 0, 0, 96, 16384, 32, MOST, "graph",
     "images too large for columns: through a channels-last copy 1.9 times faster than spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, 1, 0, 0, 0, 96, 16384, 32, MOST, "graph",
     "images too large for columns: through a channels-last copy 1.9 to 2.6 times faster than spatial"},
    /* strided views, channels-last float64 */
    {PBN_OP_FORWARD_TRAINING, ANY_DTYPE, SLOW_VIEW, 0, 0, 0, 0, MOST, 0, 4, MOST, "dense", packed_why},
    {PBN_OP_FORWARD_INFERENCE, ANY_DTYPE, SLOW_VIEW, 0, 0, 0, 0, MOST, 0, 4, MOST, "dense", packed_why},
    {PBN_OP_BACKWARD, ANY_DTYPE, SLOW_VIEW, 0, 0, 0, 0, MOST, 0, 4, MOST, "dense", packed_why},
    {PBN_OP_FORWARD_INFERENCE, ANY_DTYPE, ANY_LAYOUT, 0, 0, PLAIN_ROWS + 1, 0, MOST, 0, 0, MOST, "split",
     "the plain entry point refuses N above 65535"},
};

static const rule spatial_rule = {.algorithm = "spatial",
                                  .why = "exact to rounding over any range, where persistent sums in fixed point"};
static const rule fused_rule = {.algorithm = "pointwise", .why = "the one way of cuDNN with a fused activation"};
static const rule plain_rule = {.algorithm = "plain", .why = "the one entry point for this mode"};
static int fits(const rule *r, const pbn_call *call, int fast) {
    const pbn_tensor *x = call->x_desc;
    const int64_t elements = pbn_numel(x->rank, x->dims), size = elements / x->dims[0] / x->dims[1];
    const int64_t element = x->dtype == PBN_FLOAT64 ? 8 : x->dtype == PBN_FLOAT32 ? 4 : 2;
    const int64_t megabytes = elements * element >> 20;
    if (r->layout == LAST && !all_channels_last(call))
        return 0;
    if ((r->layout == FIRST || r->layout == WHOLE_ROWS) && !all_channels_first(call))
        return 0;
    if (r->layout == WHOLE_ROWS &&
        (size * element % 16 != 0 || x->dims[0] * x->dims[1] * row_pieces(x) < ROWS_ENOUGH))
        return 0;
    if (r->layout == SLOW_VIEW && !any_slow(call))
        return 0;
    return r->operation == call->operation && (r->dtypes & 1u << x->dtype) != 0 && (!r->fast || fast) &&
           (!r->saved || (r->saved > 0) == (call->saved_mean != NULL)) && x->dims[0] >= r->rows_from &&
           x->dims[1] >= r->channels_from && x->dims[1] <= r->channels_to && size >= r->size_from &&
           megabytes >= r->megabytes_from && megabytes < r->megabytes_to;
}

/* "graph:2" is the third plan that compiles, in the heuristic's order. */
static int parse_algorithm(const char *algorithm, int *kind, int *skip) {
    const char *colon = strchr(algorithm, ':');
    const size_t length = colon != NULL ? (size_t)(colon - algorithm) : strlen(algorithm);
    *skip = 0;
    if (colon != NULL) {
        if (colon[1] < '0' || colon[1] > '9' || colon[2] != '\0')
            return pbn_refuse(PBN_E_ARGUMENT, "behind the colon of an algorithm stands one digit");
        *skip = colon[1] - '0';
    }
    for (int i = 0; algorithm_names[i] != NULL; i++)
        if (strlen(algorithm_names[i]) == length && memcmp(algorithm, algorithm_names[i], length) == 0) {
            *kind = i;
            for (int j = 0; colon != NULL; j++) {
                if (numbered_names[j] == NULL)
                    return pbn_refuse(PBN_E_ARGUMENT, "only graph, pointwise, columns and rows have plans to choose from");
                if (strcmp(numbered_names[j], algorithm_names[i]) == 0)
                    break;
            }
            return PBN_OK;
        }
    return pbn_refuse(PBN_E_ARGUMENT, "the algorithm is none of auto, fast, plain, spatial, persistent, ex, graph, "
                                      "pointwise, split, columns, rows, dense");
}

/* An algorithm that cannot be built leaves the plan as it was. */
static int try_algorithm(pbn_plan *p, pbn_handle *handle, const pbn_call *call, const char *algorithm,
                         const char *why) {
    const char *reason;
    int skip, status = parse_algorithm(algorithm, &p->kind, &skip);
    if (status != PBN_OK)
        return status;
    reason = unavailable(p->kind, call);
    if (reason != NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, reason);
    status = build(p, handle, call, skip);
    if (status != PBN_OK) {
        const int64_t alignment = p->alignment;
        drop_built(p);
        memset(p, 0, sizeof *p);
        p->alignment = alignment;
        return status;
    }
    if (p->kind == DENSE)
        snprintf(p->name, sizeof p->name, "dense+%.*s", PLAN_NAME, p->inner->name);
    else
        pbn_copy_text(p->name, sizeof p->name, algorithm);
    p->why = why;
    return PBN_OK;
}

static int cudnn_plan_create(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan) {
    const int any = algorithm != NULL && (strcmp(algorithm, "auto") == 0 || strcmp(algorithm, "fast") == 0);
    const char *missing;
    const rule *last;
    pbn_plan *p;
    int status = PBN_OK;
    if (handle == NULL || call == NULL || plan == NULL || algorithm == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    *plan = NULL;
    missing = operation_tensors_missing(call);
    if (missing != NULL)
        return pbn_refuse(PBN_E_ARGUMENT, missing);
    p = calloc(1, sizeof *p);
    if (p == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    p->context = handle->context;
    p->alignment = common_alignment(call);
    forget_vendor_text();
    if (!any) {
        status = try_algorithm(p, handle, call, algorithm, "asked for");
    } else if (fuses(call) && call->operation != PBN_OP_FORWARD_INFERENCE) {
        status = try_algorithm(p, handle, call, "ex", "the one way of cuDNN with a fused activation");
    } else {
        last = fuses(call) ? &fused_rule : call->mode == PBN_PER_ACTIVATION ? &plain_rule : &spatial_rule;
        status = PBN_E_UNSUPPORTED;
        for (size_t i = 0; status != PBN_OK && last != &plain_rule && i < sizeof rules / sizeof rules[0]; i++)
            if (fits(&rules[i], call, algorithm[0] == 'f'))
                status = try_algorithm(p, handle, call, rules[i].algorithm, rules[i].why);
        if (status != PBN_OK)
            status = try_algorithm(p, handle, call, last->algorithm, last->why);
    }
    if (status != PBN_OK) {
        cudnn_plan_destroy(p);
        return status;
    }
    p->any = any;
    *plan = p;
    return PBN_OK;
}

/* Whether the way's results stay in the stable class of the error bound for this call. The persistent kernels sum in
 * fixed point, those of rows lose digits where a channel begins with a value far from its others; Ex runs those of the
 * plain entry point, except over channels-last memory with saved statistics, which backward has computed where there
 * are none. */
static int is_stable(int kind, const pbn_call *call) {
    int view;
    if (kind == EX)
        return all_channels_last(call) && (call->saved_mean != NULL || call->operation == PBN_OP_BACKWARD) &&
               ((HALVES | SINGLE) & 1u << call->x_desc->dtype) != 0;
    if (kind == GRAPH && computes_moments(kind, call))
        return choose_moments(kind, call, &view) == NULL && view == COLUMNS;
    return kind != PERSISTENT && (kind != ROWS || call->operation == PBN_OP_FORWARD_INFERENCE);
}

/* Without "plain", which is spatial or persistent; with some of the plans behind the heuristic's first. */
static const char *cudnn_plan_candidate(const pbn_call *call, int fast, int index) {
    static const char *const names[] = {
        "spatial",     "ex",          "graph",   "graph:1",   "graph:2",   "graph:3", "pointwise", "pointwise:1",
        "pointwise:2", "pointwise:3", "columns", "columns:1", "columns:2", "rows",    "rows:1",    "rows:2",
        "split",       "dense",       "persistent",
    };
    int kind, skip;
    if (call == NULL || operation_tensors_missing(call) != NULL)
        return NULL;
    if (call->mode == PBN_PER_ACTIVATION)
        return index == 0 ? plain_rule.algorithm : NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (parse_algorithm(names[i], &kind, &skip) != PBN_OK || unavailable(kind, call) != NULL ||
            (kind == SPLIT && call->x_desc->dims[0] <= PLAIN_ROWS) || !(fast || is_stable(kind, call)))
            continue; /* split of one piece is spatial */
        if (index-- == 0)
            return names[i];
    }
    return NULL;
}

static void cudnn_plan_info(const pbn_plan *plan, size_t *workspace, size_t *reserve, const char **algorithm,
                            const char **why) {
    *workspace = plan->workspace;
    *reserve = plan->reserve;
    *algorithm = plan->name;
    *why = plan->why;
}

/* `call` was held against cannot_fuse when the plan was made: alpha 1, beta 0, saved statistics, no float64. */
static int run_fused(pbn_handle *handle, const pbn_plan *p, const pbn_call *call) {
    const int mode = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, ops = fused_ops(call);
    const float one = 1, zero = 0;
    void *t = p->packed.compute, *z = residual(call) != NULL ? t : NULL, *param = p->one.compute;
    void *reserve = p->reserve != 0 ? call->reserve : NULL;
    const int backward = call->operation == PBN_OP_BACKWARD;
    if (call->x == NULL || call->y == NULL || call->scale == NULL || call->bias == NULL || call->saved_mean == NULL ||
        call->saved_inv_variance == NULL || (z != NULL && (backward ? call->dz : call->z) == NULL) ||
        (backward && (call->dy == NULL || call->dx == NULL || call->dscale == NULL || call->dbias == NULL)))
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (p->reserve > call->reserve_size || (p->reserve != 0 && (reserve == NULL || (bits(reserve) & 63) != 0)))
        return pbn_refuse(PBN_E_WORKSPACE, "the plan's reserve is missing, too small or not aligned to 64 bytes");
    if (((data_bits(call) | param_bits(call)) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, fused_alignment);
    if (backward)
        return api.cudnnBatchNormalizationBackwardEx(
            handle->vendor, mode, ops, &one, &zero, &one, &zero, t, call->x, t, call->y, t, call->dy, z,
            z != NULL ? call->dz : NULL, t, call->dx, param, call->scale, call->bias, call->dscale, call->dbias,
            call->epsilon, call->saved_mean, call->saved_inv_variance, p->activation, call->workspace,
            call->workspace_size, reserve, p->reserve);
    const int status = check_pair(call->running_mean, call->running_variance);
    if (status != PBN_OK)
        return status;
    return api.cudnnBatchNormalizationForwardTrainingEx(
        handle->vendor, mode, ops, &one, &zero, t, call->x, z, z != NULL ? call->z : NULL, t, call->y, param,
        call->scale, call->bias, call->factor, call->running_mean, call->running_variance, call->epsilon,
        call->saved_mean, call->saved_inv_variance, p->activation, call->workspace, call->workspace_size, reserve,
        p->reserve);
}

static int run_ex(pbn_handle *handle, const pbn_call *call) {
    scalar alpha, beta, alpha_param, beta_param;
    void *x, *y, *dy, *dx, *param;
    const int dtype = call->x_desc->dtype;
    const int backward = call->operation == PBN_OP_BACKWARD;
    int status;
    if ((status = to_compute(call->x_desc, &x)) != PBN_OK || (status = to_compute(call->param_desc, &param)) != PBN_OK ||
        (status = to_scalar(call->alpha, dtype, &alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, dtype, &beta)) != PBN_OK ||
        (status = check_pair(call->saved_mean, call->saved_inv_variance)) != PBN_OK ||
        (status = check_alignment(dtype, 1, data_bits(call), param_bits(call))) != PBN_OK)
        return status;
    if (((data_bits(call) | param_bits(call)) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, ex_alignment);
    if (backward) {
        if ((status = to_compute(call->dy_desc, &dy)) != PBN_OK || (status = to_compute(call->dx_desc, &dx)) != PBN_OK ||
            (status = to_scalar(call->alpha_param, dtype, &alpha_param)) != PBN_OK ||
            (status = to_scalar(call->beta_param, dtype, &beta_param)) != PBN_OK)
            return status;
        return api.cudnnBatchNormalizationBackwardEx(
            handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, PBN_CUDNN_BATCHNORM_OPS_BN, &alpha, &beta,
            &alpha_param, &beta_param, x, call->x, NULL, NULL, dy, call->dy, NULL, NULL, dx, call->dx, param,
            call->scale, NULL, call->dscale, call->dbias, call->epsilon, call->saved_mean, call->saved_inv_variance,
            NULL, call->workspace, call->workspace_size, NULL, 0);
    }
    if ((status = check_pair(call->running_mean, call->running_variance)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y)) != PBN_OK)
        return status;
    return api.cudnnBatchNormalizationForwardTrainingEx(
        handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, PBN_CUDNN_BATCHNORM_OPS_BN, &alpha, &beta, x, call->x,
        NULL, NULL, y, call->y, param, call->scale, call->bias, call->factor, call->running_mean,
        call->running_variance, call->epsilon, call->saved_mean, call->saved_inv_variance, NULL, call->workspace,
        call->workspace_size, NULL, 0);
}

/* What the graphs' slots stand for in this call. */
static void bind(pbn_plan *p, const pbn_call *call, void **slots) {
    const struct {
        int slot;
        const void *pointer;
    } pointers[] = {
        {SLOT_X, call->x},
        {SLOT_Y, call->y},
        {SLOT_DY, call->dy},
        {SLOT_DX, call->dx},
        {SLOT_Z, call->z},
        {SLOT_SCALE, call->scale},
        {SLOT_BIAS, call->bias},
        {SLOT_RUNNING_MEAN, call->running_mean},
        {SLOT_RUNNING_VARIANCE, call->running_variance},
        {SLOT_SAVED_MEAN, call->saved_mean},
        {SLOT_SAVED_INV_VARIANCE, call->saved_inv_variance},
        {SLOT_DSCALE, call->dscale},
        {SLOT_DBIAS, call->dbias},
    };
    memset(slots, 0, SLOT_COUNT * sizeof *slots);
    for (size_t i = 0; i < sizeof pointers / sizeof pointers[0]; i++)
        slots[pointers[i].slot] = (void *)(uintptr_t)pointers[i].pointer;
    for (int i = SLOT_VALUE; i < SLOT_SCRATCH; i++)
        slots[i] = &p->values[i - SLOT_VALUE];
    for (int i = SLOT_SCRATCH; call->workspace != NULL && i < SLOT_COUNT; i++)
        slots[i] = (char *)call->workspace + p->offsets[i];
}

static int run_graph(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    char *workspace = call->workspace;
    void *slots[SLOT_COUNT];
    const int status = check_alignment(call->x_desc->dtype, 1, data_bits(call), param_bits(call));
    if (status != PBN_OK)
        return status;
    if ((data_bits(call) & (uintptr_t)(p->alignment - 1)) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, less_aligned);
    if (p->kind == GRAPH && (param_bits(call) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, graph_alignment);
    bind(p, call, slots);
    return graph_run(&p->graphs[0], handle->vendor, slots, workspace != NULL ? workspace + p->scratch : NULL);
}

/* A number for each channel to the lines of that channel. */
static int expand(pbn_handle *handle, const pbn_tensor *from, const void *vector, const pbn_tensor *to, void *lines) {
    const float one = 1, zero = 0;
    return api.cudnnAddTensor(handle->vendor, &one, from->compute, vector, &zero, to->compute, lines);
}

/* The channels' three vectors to the lines. */
static int run_expand(pbn_handle *handle, const pbn_plan *p, void *const *slots) {
    int status;
    if (p->kind == COLUMNS)
        return expand(handle, &p->three, slots[CHANNEL_A], &p->spread, slots[LINE_0]);
    if ((status = expand(handle, &p->one, slots[CHANNEL_A], &p->map, slots[LINE_0])) != PBN_OK ||
        (status = expand(handle, &p->one, slots[CHANNEL_B], &p->map, slots[LINE_1])) != PBN_OK)
        return status;
    return expand(handle, &p->one, slots[CHANNEL_C], &p->map, slots[LINE_2]);
}

/* One of the small batch norms: averages of `lines` over the lines of each of the channels of `param`, to `average`;
 * if `variance`, theirs to zeros + 3 vectors of them: a running variance that takes all of the batch's. */
static int run_average(pbn_handle *handle, const pbn_tensor *map, const pbn_tensor *param, const void *lines, void *out,
                       char *zeros, int variance, void *average, void *inverse) {
    const float one = 1, zero = 0;
    const size_t vector = (size_t)param->dims[1] * sizeof(float);
    return api.cudnnBatchNormalizationForwardTraining(
        handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL, &one, &zero, map->compute, lines, map->compute, out,
        param->compute, zeros, zeros + vector, 1.0, variance ? zeros + 2 * vector : NULL,
        variance ? zeros + 3 * vector : NULL, 1.0, average, inverse);
}

/* Averages of LINE_2 and LINE_3 to CHANNEL_AVERAGE and CHANNEL_AVERAGE_2; in forward also the variance of the former,
 * to CHANNEL_BETWEEN, the seventh of the zeros' eight vectors of C. */
static int run_merge(pbn_handle *handle, const pbn_plan *p, void *const *slots, int variance) {
    const float zero = 0;
    const size_t vector = (size_t)p->one.dims[1] * sizeof(float);
    char *zeros = slots[CHANNEL_ZERO];
    int status = api.cudnnSetTensor(handle->vendor, p->zeros.compute, zeros, &zero);
    if (status != PBN_OK)
        return status;
    if (p->kind == COLUMNS && !p->last)
        return run_average(handle, &p->maps, &p->two, slots[LINE_2], slots[LINE_0], zeros, variance,
                           slots[CHANNEL_AVERAGE], slots[CHANNEL_INVERSE]);
    status = run_average(handle, &p->map, &p->one, slots[LINE_2], slots[LINE_0], zeros + 3 * vector, variance,
                         slots[CHANNEL_AVERAGE], slots[CHANNEL_INVERSE]);
    if (status != PBN_OK)
        return status;
    return run_average(handle, &p->map, &p->one, slots[LINE_3], slots[LINE_0], zeros, 0, slots[CHANNEL_AVERAGE_2],
                       (char *)slots[CHANNEL_INVERSE] + vector);
}

static int run_lines(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    void *slots[SLOT_COUNT];
    const int forward = call->operation == PBN_OP_FORWARD_TRAINING, backward = call->operation == PBN_OP_BACKWARD;
    void *last = (char *)call->workspace + p->scratch;
    int status = check_alignment(call->x_desc->dtype, 1, data_bits(call), param_bits(call));
    if (status != PBN_OK)
        return status;
    if ((data_bits(call) & (uintptr_t)(p->alignment - 1)) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, less_aligned);
    bind(p, call, slots);
    if (forward && p->kind == ROWS &&
        (status = copy_tensor(handle, &p->firsts, call->x, &p->first, slots[LINE_FIRST])) != PBN_OK)
        return status;
    if (backward && (status = expand(handle, &p->one, call->saved_mean, &p->map, slots[LINE_MEAN])) != PBN_OK)
        return status;
    for (int i = 0; i < 3; i++)
        if (p->graphs[i].plan != NULL && (status = graph_run(&p->graphs[i], handle->vendor, slots, last)) != PBN_OK)
            return status;
    if ((forward || backward) && p->merged > 1 && (status = run_merge(handle, p, slots, forward)) != PBN_OK)
        return status;
    status = graph_run(&p->graphs[3], handle->vendor, slots, last);
    if (status != PBN_OK || p->moments_only || (status = run_expand(handle, p, slots)) != PBN_OK)
        return status;
    return graph_run(&p->graphs[4], handle->vendor, slots, last);
}

/* The statistics that `call` does not have, to the front of its workspace; `with` is the call that has them. */
static int run_moments(pbn_handle *handle, const pbn_plan *p, const pbn_call *call, pbn_call *with) {
    char *space = call->workspace;
    pbn_call forward;
    /* What the way itself would refuse, before anything is enqueued. */
    if (p->kind == EX && ((data_bits(call) | param_bits(call)) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, ex_alignment);
    if (p->kind == GRAPH && (param_bits(call) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, graph_alignment);
    *with = *call;
    with->saved_mean = space;
    with->saved_inv_variance = space + p->vectors / 2;
    with->workspace = space + p->vectors;
    with->workspace_size = call->workspace_size - p->vectors;
    forward = moments_call(with, with->saved_mean, with->saved_inv_variance);
    return run_lines(handle, p->moments, &forward);
}

static int run_split(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    pbn_call piece = *call;
    const int64_t rows = call->x_desc->dims[0];
    const int64_t size = call->x_desc->dtype == PBN_FLOAT64 ? 8 : call->x_desc->dtype == PBN_FLOAT32 ? 4 : 2;
    int status = PBN_OK;
    for (int64_t row = 0; status == PBN_OK && row < rows; row += SPLIT_ROWS) {
        const int whole = rows <= SPLIT_ROWS || row + SPLIT_ROWS <= rows;
        piece.x_desc = whole ? &p->part : &p->rest;
        piece.y_desc = whole ? &p->y_part : &p->y_rest;
        piece.x = (const char *)call->x + row * call->x_desc->strides[0] * size;
        piece.y = (char *)call->y + row * call->y_desc->strides[0] * size;
        status = cudnn_forward_inference(handle, &piece);
    }
    return status;
}

static int cudnn_plan_run(pbn_handle *handle, pbn_plan *plan, const pbn_call *call) {
    pbn_call plain, with;
    int kind, status;
    if (handle == NULL || plan == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (plan->workspace > call->workspace_size ||
        (plan->workspace != 0 && (bits(call->workspace) & 63) != 0) || (plan->workspace != 0 && call->workspace == NULL))
        return pbn_refuse(PBN_E_WORKSPACE, "the plan's workspace is missing, too small or not aligned to 64 bytes");
    if (fuses(call) != plan->fused)
        return pbn_refuse(PBN_E_ARGUMENT, "the plan was made with another activation or residual");
    forget_vendor_text();
    plain = *call;
    plain.mode = plan->mode;
    kind = plan->kind;
    /* Slices of one buffer of parameters. */
    if (plan->any && !plan->fused && (kind == EX || kind == GRAPH) && (param_bits(call) & (WIDE_ALIGNMENT - 1)) != 0) {
        plain.mode = PBN_SPATIAL;
        kind = PLAIN;
    }
    if (plan->moments != NULL && kind != PLAIN) {
        status = run_moments(handle, plan, call, &with);
        if (status != PBN_OK)
            return status;
        call = &with;
    }
    switch (kind) {
    case EX:
        return plan->activation != NULL ? run_fused(handle, plan, call) : run_ex(handle, call);
    case GRAPH:
    case POINTWISE:
        return run_graph(handle, plan, call);
    case SPLIT:
        return run_split(handle, plan, call);
    case COLUMNS:
    case ROWS:
        return run_lines(handle, plan, call);
    case DENSE:
        return run_dense(handle, plan, call);
    default:
        break;
    }
    switch (call->operation) {
    case PBN_OP_FORWARD_TRAINING:
        return cudnn_forward_training(handle, &plain);
    case PBN_OP_FORWARD_INFERENCE:
        return cudnn_forward_inference(handle, &plain);
    case PBN_OP_BACKWARD:
        return cudnn_backward(handle, &plain);
    default:
        return pbn_refuse(PBN_E_ARGUMENT, "the operation has no plans");
    }
}

PBN_CALL_THERE(cudnn_forward_training)
PBN_CALL_THERE(cudnn_forward_inference)
PBN_CALL_THERE(cudnn_backward)
PBN_CALL_THERE(cudnn_axpby)
PBN_CALL_THERE(cudnn_fill)
PBN_CALL_THERE(cudnn_relu)
PBN_CALL_THERE(cudnn_relu_backward)
PBN_THERE(cudnn_stream_set, (pbn_handle * handle, void *stream), (handle, stream))
PBN_THERE(cudnn_stream_get, (pbn_handle * handle, void **stream), (handle, stream))
PBN_THERE(cudnn_runtime_error, (pbn_handle * handle, int query, int *recorded), (handle, query, recorded))
PBN_THERE(cudnn_plan_create, (pbn_handle * handle, const pbn_call *call, const char *algorithm, pbn_plan **plan),
          (handle, call, algorithm, plan))
PBN_THERE(cudnn_plan_run, (pbn_handle * handle, pbn_plan *plan, const pbn_call *call), (handle, plan, call))

static void cudnn_plan_destroy_there(pbn_plan *plan) {
    int before;
    go_to(plan != NULL ? plan->context : NULL, &before); /* whether or not it is still there */
    cudnn_plan_destroy(plan);
    come_back(before);
}

const pbn_backend pbn_backend_cudnn = {
    .name = "cudnn",
    .label = "cuDNN",
    .device_type = 2,
    .load = cudnn_load,
    .status_name = cudnn_status_name,
    .status_class = cudnn_status_class,
    .last_error = cudnn_last_error,
    .context_lost = cudnn_context_lost,
    .handle_device = cudnn_handle_device,
    .device_count = cudnn_device_count,
    .memory_device = cudnn_memory_device,
    .handle_create = cudnn_handle_create,
    .handle_borrow = cudnn_handle_borrow,
    .handle_destroy = cudnn_handle_destroy,
    .handle_pointer = cudnn_handle_pointer,
    .stream_set = cudnn_stream_set_there,
    .stream_get = cudnn_stream_get_there,
    .tensor_create = cudnn_tensor_create,
    .tensor_borrow = cudnn_tensor_borrow,
    .tensor_set = cudnn_tensor_set,
    .tensor_get = cudnn_tensor_get,
    .tensor_size = cudnn_tensor_size,
    .tensor_destroy = cudnn_tensor_destroy,
    .derive = cudnn_derive,
    .capability = cudnn_capability,
    .workspace_size = cudnn_workspace_size,
    .forward_training = cudnn_forward_training_there,
    .forward_inference = cudnn_forward_inference_there,
    .backward = cudnn_backward_there,
    .axpby = cudnn_axpby_there,
    .fill = cudnn_fill_there,
    .relu = cudnn_relu_there,
    .relu_backward = cudnn_relu_backward_there,
    .algorithms = algorithm_names,
    .numbered = numbered_names,
    .plan_create = cudnn_plan_create_there,
    .plan_info = cudnn_plan_info,
    .plan_run = cudnn_plan_run_there,
    .plan_destroy = cudnn_plan_destroy_there,
    .runtime_error = cudnn_runtime_error_there,
    .plan_candidate = cudnn_plan_candidate,
    .has_symbol = cudnn_has_symbol,
};

#endif /* PBN_PROTOTYPES_ONLY */
