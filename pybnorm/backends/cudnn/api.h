/* The binary interface of cuDNN 8 and 9, and the little of the CUDA driver's that the adapter needs.
 * Readable as C and as C++: tests/abi compares it with the vendor's headers, the test doubles and the benchmark in C are
 * compiled from it.
 */
#ifndef PYBNORM_CUDNN_API_H
#define PYBNORM_CUDNN_API_H

#include <stddef.h>
#include <stdint.h>

/* C(name, value): the same in cuDNN 8 and 9. */
#define PBN_CUDNN_CONSTANTS(C) \
    C(CUDNN_DATA_FLOAT, 0) C(CUDNN_DATA_DOUBLE, 1) C(CUDNN_DATA_HALF, 2) C(CUDNN_DATA_BFLOAT16, 9) \
    C(CUDNN_DATA_BOOLEAN, 11) C(CUDNN_BATCHNORM_PER_ACTIVATION, 0) C(CUDNN_BATCHNORM_SPATIAL, 1) \
    C(CUDNN_BATCHNORM_SPATIAL_PERSISTENT, 2) C(CUDNN_ACTIVATION_RELU, 1) C(CUDNN_PROPAGATE_NAN, 1) \
    C(CUDNN_STATUS_SUCCESS, 0) C(CUDNN_BATCHNORM_OPS_BN, 0) C(CUDNN_BATCHNORM_OPS_BN_ACTIVATION, 1) \
    C(CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION, 2) C(CUDNN_ERRQUERY_RAWCODE, 0) C(CUDNN_ERRQUERY_NONBLOCKING, 1) \
    C(CUDNN_ERRQUERY_BLOCKING, 2) C(CUDNN_TYPE_HANDLE, 0) C(CUDNN_TYPE_DATA_TYPE, 1) C(CUDNN_TYPE_BOOLEAN, 2) \
    C(CUDNN_TYPE_INT64, 3) C(CUDNN_TYPE_VOID_PTR, 6) C(CUDNN_TYPE_HEUR_MODE, 8) C(CUDNN_TYPE_POINTWISE_MODE, 14) \
    C(CUDNN_TYPE_BACKEND_DESCRIPTOR, 15) C(CUDNN_TYPE_NORM_MODE, 27) C(CUDNN_TYPE_NORM_FWD_PHASE, 28) \
    C(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, 0) C(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, 3) \
    C(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, 4) C(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, 5) \
    C(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, 13) C(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, 15) \
    C(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, 16) C(CUDNN_BACKEND_TENSOR_DESCRIPTOR, 17) \
    C(CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR, 29) C(CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR, 30) \
    C(CUDNN_ATTR_POINTWISE_MODE, 0) C(CUDNN_ATTR_POINTWISE_MATH_PREC, 1) C(CUDNN_ATTR_ENGINEHEUR_MODE, 200) \
    C(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, 201) C(CUDNN_ATTR_ENGINEHEUR_RESULTS, 202) \
    C(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, 400) C(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, 401) \
    C(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, 402) C(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, 750) \
    C(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, 751) C(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, 752) \
    C(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, 753) C(CUDNN_ATTR_OPERATION_POINTWISE_DXDESC, 756) \
    C(CUDNN_ATTR_OPERATION_POINTWISE_DYDESC, 757) C(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, 800) \
    C(CUDNN_ATTR_OPERATIONGRAPH_OPS, 801) C(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 900) \
    C(CUDNN_ATTR_TENSOR_DATA_TYPE, 901) C(CUDNN_ATTR_TENSOR_DIMENSIONS, 902) C(CUDNN_ATTR_TENSOR_STRIDES, 903) \
    C(CUDNN_ATTR_TENSOR_UNIQUE_ID, 906) C(CUDNN_ATTR_TENSOR_IS_VIRTUAL, 907) C(CUDNN_ATTR_TENSOR_IS_BY_VALUE, 908) \
    C(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, 1000) C(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, 1001) \
    C(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, 1003) C(CUDNN_ATTR_OPERATION_NORM_FWD_MODE, 2000) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, 2001) C(CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, 2002) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC, 2003) C(CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC, 2004) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, 2005) C(CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, 2006) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC, 2007) C(CUDNN_ATTR_OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC, 2008) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC, 2009) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC, 2010) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC, 2011) \
    C(CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC, 2012) C(CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, 2013) \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_MODE, 2100) C(CUDNN_ATTR_OPERATION_NORM_BWD_XDESC, 2101) \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC, 2102) C(CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC, 2103) \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC, 2104) C(CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC, 2105) \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC, 2107) C(CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC, 2108) \
    C(CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC, 2109) C(CUDNN_HEUR_MODE_FALLBACK, 2) C(CUDNN_HEUR_MODE_A, 3) \
    C(CUDNN_BATCH_NORM, 2) C(CUDNN_NORM_FWD_INFERENCE, 0) C(CUDNN_NORM_FWD_TRAINING, 1) C(CUDNN_POINTWISE_ADD, 0) \
    C(CUDNN_POINTWISE_MUL, 1) C(CUDNN_POINTWISE_SUB, 9) C(CUDNN_POINTWISE_RSQRT, 17) \
    C(CUDNN_POINTWISE_RELU_FWD, 100) C(CUDNN_POINTWISE_RELU_BWD, 200) C(CUDNN_POINTWISE_CMP_GT, 302) \
    C(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, 2) C(CUDNN_TYPE_NAN_PROPOGATION, 10)

/* C(name, value, class): cuDNN 9's statuses of a class of their own, and the first of each thousand, whose class is
 * that of the rest (1008 exists since 9.2). The NOT_SUPPORTED_ ones here say that the installation is broken. */
#define PBN_CUDNN9_STATUSES(C) \
    C(CUDNN_STATUS_NOT_INITIALIZED, 1001, NOT_INITIALIZED) \
    C(CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH, 1002, VERSION) \
    C(CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH, 1003, VERSION) C(CUDNN_STATUS_DEPRECATED, 1004, NOT_SUPPORTED) \
    C(CUDNN_STATUS_LICENSE_ERROR, 1005, NOT_INITIALIZED) C(CUDNN_STATUS_RUNTIME_IN_PROGRESS, 1006, EXECUTION) \
    C(CUDNN_STATUS_RUNTIME_FP_OVERFLOW, 1007, EXECUTION) \
    C(CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED, 1008, NOT_INITIALIZED) C(CUDNN_STATUS_BAD_PARAM, 2000, BAD_PARAMETER) \
    C(CUDNN_STATUS_NOT_SUPPORTED, 3000, NOT_SUPPORTED) \
    C(CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER, 3005, NOT_INITIALIZED) \
    C(CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDART, 3006, NOT_INITIALIZED) \
    C(CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING, 3008, NOT_INITIALIZED) \
    C(CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE, 3009, NOT_INITIALIZED) \
    C(CUDNN_STATUS_INTERNAL_ERROR, 4000, INTERNAL) \
    C(CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, 4003, ALLOCATION) \
    C(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, 4004, ALLOCATION) \
    C(CUDNN_STATUS_EXECUTION_FAILED, 5000, EXECUTION)

/* All of cuDNN 8's statuses but success; some names are those of cuDNN 9 with another number. */
#define PBN_CUDNN8_STATUSES(C) \
    C(CUDNN_STATUS_NOT_INITIALIZED, 1, NOT_INITIALIZED) C(CUDNN_STATUS_ALLOC_FAILED, 2, ALLOCATION) \
    C(CUDNN_STATUS_BAD_PARAM, 3, BAD_PARAMETER) C(CUDNN_STATUS_INTERNAL_ERROR, 4, INTERNAL) \
    C(CUDNN_STATUS_INVALID_VALUE, 5, BAD_PARAMETER) C(CUDNN_STATUS_ARCH_MISMATCH, 6, NOT_SUPPORTED) \
    C(CUDNN_STATUS_MAPPING_ERROR, 7, INTERNAL) C(CUDNN_STATUS_EXECUTION_FAILED, 8, EXECUTION) \
    C(CUDNN_STATUS_NOT_SUPPORTED, 9, NOT_SUPPORTED) C(CUDNN_STATUS_LICENSE_ERROR, 10, NOT_INITIALIZED) \
    C(CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING, 11, NOT_INITIALIZED) \
    C(CUDNN_STATUS_RUNTIME_IN_PROGRESS, 12, EXECUTION) C(CUDNN_STATUS_RUNTIME_FP_OVERFLOW, 13, EXECUTION) \
    C(CUDNN_STATUS_VERSION_MISMATCH, 14, VERSION)

/* The driver's results after which, as cuda.h says of them, all further work of the process fails in the same way. Not
 * CONTEXT_IS_DESTROYED: it is also what is said of a context for which there was no memory. */
#define PBN_CUDA_LOST(C) \
    C(CUDA_ERROR_ECC_UNCORRECTABLE, 214) C(CUDA_ERROR_NVLINK_UNCORRECTABLE, 220) C(CUDA_ERROR_ILLEGAL_ADDRESS, 700) \
    C(CUDA_ERROR_LAUNCH_TIMEOUT, 702) C(CUDA_ERROR_ASSERT, 710) C(CUDA_ERROR_HARDWARE_STACK_ERROR, 714) \
    C(CUDA_ERROR_ILLEGAL_INSTRUCTION, 715) C(CUDA_ERROR_MISALIGNED_ADDRESS, 716) \
    C(CUDA_ERROR_INVALID_ADDRESS_SPACE, 717) C(CUDA_ERROR_INVALID_PC, 718) C(CUDA_ERROR_LAUNCH_FAILED, 719)

#define PBN_CUDA_CONSTANTS(C) \
    C(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2) C(CU_POINTER_ATTRIBUTE_IS_MANAGED, 8) \
    C(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9) C(CU_MEMORYTYPE_DEVICE, 2)

#define PBN_CONSTANT(name, value, ...) PBN_##name = value,
#define PBN_CONSTANT8(name, value, ...) PBN_V8_##name = value,
enum { PBN_CUDNN_CONSTANTS(PBN_CONSTANT) PBN_CUDNN9_STATUSES(PBN_CONSTANT) PBN_CUDA_LOST(PBN_CONSTANT)
       PBN_CUDA_CONSTANTS(PBN_CONSTANT) };
enum { PBN_CUDNN8_STATUSES(PBN_CONSTANT8) };
#undef PBN_CONSTANT
#undef PBN_CONSTANT8

/* Parameters that batch-norm calls have in common. */
#define PBN_CUDNN_SCALE const void *param_desc, const void *scale, const void *bias
#define PBN_CUDNN_TRAINING \
    double factor, void *running_mean, void *running_variance, double epsilon, void *saved_mean, \
        void *saved_inv_variance
#define PBN_CUDNN_GRADIENTS \
    void *dscale, void *dbias, double epsilon, const void *saved_mean, const void *saved_inv_variance
#define PBN_CUDNN_X const void *alpha, const void *beta, const void *x_desc, const void *x
#define PBN_CUDNN_DX_X \
    const void *alpha, const void *beta, const void *alpha_param, const void *beta_param, const void *x_desc, \
        const void *x
#define PBN_CUDNN_EX void *activation, void *workspace, size_t workspace_size, void *reserve, size_t reserve_size
/* X(result, name, (parameters)); statuses, modes and dtypes are int-sized enums, handles, descriptors
 * and streams pointers to opaque structs. */
#define PBN_CUDNN_SYMBOLS(REQUIRED, OPTIONAL) \
    REQUIRED(size_t, cudnnGetVersion, (void)) \
    REQUIRED(const char *, cudnnGetErrorString, (int status)) \
    REQUIRED(int, cudnnCreate, (void **handle)) \
    REQUIRED(int, cudnnDestroy, (void *handle)) \
    REQUIRED(int, cudnnSetStream, (void *handle, void *stream)) \
    REQUIRED(int, cudnnGetStream, (void *handle, void **stream)) \
    REQUIRED(int, cudnnCreateTensorDescriptor, (void **desc)) \
    REQUIRED(int, cudnnDestroyTensorDescriptor, (void *desc)) \
    REQUIRED(int, cudnnSetTensorNdDescriptor, (void *desc, int dtype, int rank, const int *dims, const int *strides)) \
    REQUIRED(int, cudnnGetTensorNdDescriptor, \
             (const void *desc, int rank_requested, int *dtype, int *rank, int *dims, int *strides)) \
    REQUIRED(int, cudnnGetTensorSizeInBytes, (const void *desc, size_t *bytes)) \
    REQUIRED(int, cudnnDeriveBNTensorDescriptor, (void *derived, const void *x_desc, int mode)) \
    REQUIRED(int, cudnnBatchNormalizationForwardTraining, \
             (void *handle, int mode, PBN_CUDNN_X, const void *y_desc, void *y, PBN_CUDNN_SCALE, \
              PBN_CUDNN_TRAINING)) \
    REQUIRED(int, cudnnBatchNormalizationForwardInference, \
             (void *handle, int mode, PBN_CUDNN_X, const void *y_desc, void *y, PBN_CUDNN_SCALE, \
              const void *running_mean, const void *running_variance, double epsilon)) \
    REQUIRED(int, cudnnBatchNormalizationBackward, \
             (void *handle, int mode, PBN_CUDNN_DX_X, const void *dy_desc, const void *dy, const void *dx_desc, \
              void *dx, const void *param_desc, const void *scale, PBN_CUDNN_GRADIENTS)) \
    OPTIONAL(void, cudnnGetLastErrorString, (char *text, size_t size)) /* cuDNN 9 */ \
    OPTIONAL(int, cudnnTransformTensor, \
             (void *handle, const void *alpha, const void *x_desc, const void *x, const void *beta, \
              const void *y_desc, void *y)) \
    OPTIONAL(int, cudnnSetTensor, (void *handle, const void *y_desc, void *y, const void *value)) \
    OPTIONAL(int, cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, \
             (void *handle, int mode, int ops, const void *x_desc, const void *z_desc, const void *y_desc, \
              const void *param_desc, const void *activation, size_t *bytes)) \
    OPTIONAL(int, cudnnBatchNormalizationForwardTrainingEx, \
             (void *handle, int mode, int ops, PBN_CUDNN_X, const void *z_desc, const void *z, \
              const void *y_desc, void *y, PBN_CUDNN_SCALE, PBN_CUDNN_TRAINING, PBN_CUDNN_EX)) \
    OPTIONAL(int, cudnnGetBatchNormalizationBackwardExWorkspaceSize, \
             (void *handle, int mode, int ops, const void *x_desc, const void *y_desc, const void *dy_desc, \
              const void *dz_desc, const void *dx_desc, const void *param_desc, const void *activation, \
              size_t *bytes)) \
    OPTIONAL(int, cudnnBatchNormalizationBackwardEx, \
             (void *handle, int mode, int ops, PBN_CUDNN_DX_X, const void *y_desc, const void *y, \
              const void *dy_desc, const void *dy, const void *dz_desc, void *dz, const void *dx_desc, void *dx, \
              PBN_CUDNN_SCALE, PBN_CUDNN_GRADIENTS, PBN_CUDNN_EX)) \
    OPTIONAL(int, cudnnGetBatchNormalizationTrainingExReserveSpaceSize, \
             (void *handle, int mode, int ops, const void *activation, const void *x_desc, size_t *bytes)) \
    OPTIONAL(int, cudnnQueryRuntimeError, (void *handle, int *recorded, int mode, void *tag)) \
    OPTIONAL(int, cudnnBackendCreateDescriptor, (int type, void **desc)) \
    OPTIONAL(int, cudnnBackendDestroyDescriptor, (void *desc)) \
    OPTIONAL(int, cudnnBackendSetAttribute, (void *desc, int attribute, int type, int64_t count, const void *values)) \
    OPTIONAL(int, cudnnBackendGetAttribute, \
             (const void *desc, int attribute, int type, int64_t requested, int64_t *count, void *values)) \
    OPTIONAL(int, cudnnBackendFinalize, (void *desc)) \
    OPTIONAL(int, cudnnBackendExecute, (void *handle, void *plan, void *variant_pack)) \
    OPTIONAL(int, cudnnCreateActivationDescriptor, (void **desc)) \
    OPTIONAL(int, cudnnSetActivationDescriptor, (void *desc, int mode, int nan, double coefficient)) \
    OPTIONAL(int, cudnnDestroyActivationDescriptor, (void *desc)) \
    OPTIONAL(int, cudnnActivationForward, \
             (void *handle, void *activation, const void *alpha, const void *x_desc, const void *x, \
              const void *beta, const void *y_desc, void *y)) \
    OPTIONAL(int, cudnnActivationBackward, \
             (void *handle, void *activation, const void *alpha, const void *y_desc, const void *y, \
              const void *dy_desc, const void *dy, const void *x_desc, const void *x, const void *beta, \
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

#endif
