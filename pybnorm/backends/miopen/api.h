/* MIOpen's binary interface, and the little of HIP's that the adapter needs: facts alone.
 * Readable as C and as C++: tests/abi compares it with the vendor's headers, the test doubles are compiled from it.
 */
#ifndef PYBNORM_MIOPEN_API_H
#define PYBNORM_MIOPEN_API_H

#include <stddef.h>

/* C(name, value): becomes the constant PBN_<name> */
#define PBN_MIOPEN_CONSTANTS(C) \
    C(miopenStatusSuccess, 0) C(miopenStatusNotInitialized, 1) C(miopenStatusInvalidValue, 2) \
    C(miopenStatusBadParm, 3) C(miopenStatusAllocFailed, 4) C(miopenStatusInternalError, 5) \
    C(miopenStatusNotImplemented, 6) C(miopenStatusUnknownError, 7) C(miopenStatusUnsupportedOp, 8) \
    C(miopenStatusGpuOperationsSkipped, 9) C(miopenStatusVersionMismatch, 10) C(miopenHalf, 0) C(miopenFloat, 1) \
    C(miopenBFloat16, 5) C(miopenDouble, 6) C(miopenBNPerActivation, 0) C(miopenBNSpatial, 1) \
    C(miopenTensorOpAdd, 0) C(miopenTensorOpMax, 3) C(miopenActivationRELU, 3) C(miopenActivationCLIPPEDRELU, 7)
/* Those of MIOpen 3.5 on. */
#define PBN_MIOPEN_CONSTANTS_3_5(C) \
    C(miopenActivationCLAMP, 10) C(miopenTuningPolicyNone, 1) C(miopenTuningPolicyDbClean, 5)

/* S(result, name, parameters). Handles, descriptors and streams are opaque pointers, enums are int.
 * The adapter cannot work without a REQUIRED symbol. Of the OPTIONAL ones, the _V2 calls take the
 * plain calls' parameter descriptor four times and are preferred; those of HIP belong to
 * libamdhip64 and are found in libMIOpen's own dependencies. */
#define PBN_MIOPEN_SYMBOLS(REQUIRED, OPTIONAL) \
    PBN_MIOPEN_SYMBOLS_2_0(REQUIRED, OPTIONAL) \
    PBN_MIOPEN_SYMBOLS_3_5(OPTIONAL) \
    PBN_MIOPEN_SYMBOLS_NEWER(OPTIONAL)
/* Parameters that the batch-norm calls have in common. */
#define PBN_MIOPEN_FORWARD \
    void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y
#define PBN_MIOPEN_BACKWARD \
    void *handle, int mode, const void *alpha_data, const void *beta_data, const void *alpha_param, \
        const void *beta_param, void *x_desc, const void *x, void *dy_desc, const void *dy, void *dx_desc, void *dx
#define PBN_MIOPEN_V2 void *scale_desc, void *bias_desc, void *mean_desc, void *variance_desc
#define PBN_MIOPEN_TRAINING \
    void *scale, void *bias, double factor, void *running_mean, void *running_variance, double epsilon, \
        void *saved_mean, void *saved_inv_variance
#define PBN_MIOPEN_INFERENCE void *scale, void *bias, void *mean, void *variance, double epsilon
#define PBN_MIOPEN_GRADIENTS \
    void *dscale, void *dbias, double epsilon, const void *saved_mean, const void *saved_inv_variance
#define PBN_MIOPEN_SYMBOLS_2_0(REQUIRED, OPTIONAL) \
    REQUIRED(int, miopenGetVersion, (size_t *major, size_t *minor, size_t *patch)) \
    REQUIRED(const char *, miopenGetErrorString, (int status)) \
    REQUIRED(int, miopenCreate, (void **handle)) \
    REQUIRED(int, miopenDestroy, (void *handle)) \
    REQUIRED(int, miopenSetStream, (void *handle, void *stream)) \
    REQUIRED(int, miopenGetStream, (void *handle, void **stream)) \
    REQUIRED(int, miopenCreateTensorDescriptor, (void **desc)) \
    REQUIRED(int, miopenDestroyTensorDescriptor, (void *desc)) \
    REQUIRED(int, miopenSetTensorDescriptor, (void *desc, int dtype, int rank, const int *dims, const int *strides)) \
    REQUIRED(int, miopenGetTensorDescriptorSize, (void *desc, int *rank)) \
    REQUIRED(int, miopenGetTensorDescriptor, (void *desc, int *dtype, int *dims, int *strides)) \
    REQUIRED(int, miopenGetTensorNumBytes, (void *desc, size_t *bytes)) \
    REQUIRED(int, miopenDeriveBNTensorDescriptor, (void *derived, void *x_desc, int mode)) \
    REQUIRED(int, miopenOpTensor, \
             (void *handle, int op, const void *alpha1, void *a_desc, const void *a, const void *alpha2, \
              void *b_desc, const void *b, const void *beta, void *c_desc, void *c)) \
    REQUIRED(int, miopenSetTensor, (void *handle, void *y_desc, void *y, const void *value)) \
    REQUIRED(int, miopenTransformTensor, \
             (void *handle, const void *alpha, void *x_desc, const void *x, const void *beta, void *y_desc, void *y)) \
    REQUIRED(int, miopenCreateActivationDescriptor, (void **desc)) \
    REQUIRED(int, miopenSetActivationDescriptor, (void *desc, int mode, double alpha, double beta, double gamma)) \
    REQUIRED(int, miopenDestroyActivationDescriptor, (void *desc)) \
    REQUIRED(int, miopenActivationForward, \
             (void *handle, void *activation, const void *alpha, void *x_desc, const void *x, const void *beta, \
              void *y_desc, void *y)) \
    REQUIRED(int, miopenActivationBackward, \
             (void *handle, void *activation, const void *alpha, void *y_desc, const void *y, void *dy_desc, \
              const void *dy, void *x_desc, const void *x, const void *beta, void *dx_desc, void *dx)) \
    REQUIRED(int, miopenBatchNormalizationForwardTraining, \
             (PBN_MIOPEN_FORWARD, void *param_desc, PBN_MIOPEN_TRAINING)) \
    REQUIRED(int, miopenBatchNormalizationForwardInference, \
             (PBN_MIOPEN_FORWARD, void *param_desc, PBN_MIOPEN_INFERENCE)) \
    REQUIRED(int, miopenBatchNormalizationBackward, \
             (PBN_MIOPEN_BACKWARD, void *param_desc, const void *scale, PBN_MIOPEN_GRADIENTS)) \
    OPTIONAL(int, miopenBatchNormalizationForwardTraining_V2, \
             (PBN_MIOPEN_FORWARD, PBN_MIOPEN_V2, PBN_MIOPEN_TRAINING)) \
    OPTIONAL(int, miopenBatchNormalizationForwardInference_V2, \
             (PBN_MIOPEN_FORWARD, PBN_MIOPEN_V2, PBN_MIOPEN_INFERENCE)) \
    OPTIONAL(int, miopenBatchNormalizationBackward_V2, \
             (PBN_MIOPEN_BACKWARD, PBN_MIOPEN_V2, const void *scale, PBN_MIOPEN_GRADIENTS)) \
    OPTIONAL(int, hipGetDevice, (int *ordinal)) \
    OPTIONAL(int, hipSetDevice, (int ordinal)) \
    OPTIONAL(int, hipGetDeviceCount, (int *count)) \
    OPTIONAL(int, hipPointerGetAttributes, (struct pbn_hip_pointer * attributes, const void *address)) \
    OPTIONAL(int, hipGetLastError, (void)) \
    OPTIONAL(int, hipStreamIsCapturing, (void *stream, int *status)) \
    OPTIONAL(int, hipMemcpyAsync, (void *to, const void *from, size_t size, int kind, void *stream)) \
    OPTIONAL(int, hipStreamSynchronize, (void *stream)) \
    OPTIONAL(int, hipGetDevicePropertiesR0600, (struct pbn_hip_properties * properties, int ordinal))
/* Whether the handle's calls time kernels, and keep the fastest.
 * The calls with a fused activation: those of _V2 and an activation descriptor, which is last. CLIPPEDRELU's upper
 * bound is its alpha; CLAMP's lower bound is alpha and its upper one beta. Backward takes the bias, too. */
#define PBN_MIOPEN_SYMBOLS_3_5(OPTIONAL) \
    OPTIONAL(int, miopenGetTuningPolicy, (void *handle, int *policy)) \
    OPTIONAL(int, miopenBatchNormForwardTrainingActivation, \
             (PBN_MIOPEN_FORWARD, PBN_MIOPEN_V2, PBN_MIOPEN_TRAINING, void *activation)) \
    OPTIONAL(int, miopenBatchNormForwardInferenceActivation, \
             (PBN_MIOPEN_FORWARD, PBN_MIOPEN_V2, PBN_MIOPEN_INFERENCE, void *activation)) \
    OPTIONAL(int, miopenBatchNormBackwardActivation, \
             (PBN_MIOPEN_BACKWARD, PBN_MIOPEN_V2, const void *scale, const void *bias, PBN_MIOPEN_GRADIENTS, \
              void *activation))

/* In the header of ROCm's development branch, which calls itself 3.5 too; the 3.5.1 of ROCm 7.2 is without it. With NULL
 * for a statistic it takes those of the batch. */
#define PBN_MIOPEN_SYMBOLS_NEWER(OPTIONAL) \
    OPTIONAL(int, miopenBatchNormalizationForwardInferenceInvVariance, \
             (PBN_MIOPEN_FORWARD, void *scale_desc, void *bias_desc, void *mean_desc, void *inv_variance_desc, void \
              *scale, void *bias, void *mean, void *inv_variance))

/* HIP's hipPointerAttribute_t; the numbers of `type` changed with ROCm 6. */
struct pbn_hip_pointer {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
};

/* HIP's hipDeviceProp_tR0600, which it may lengthen. */
struct pbn_hip_properties {
    char before[308];
    int wave_size;
    char between[848];
    char architecture[256];
    char behind[2048];
};

#define PBN_MIOPEN_CONSTANT(name, value) PBN_##name = value,
enum { PBN_MIOPEN_CONSTANTS(PBN_MIOPEN_CONSTANT) PBN_MIOPEN_CONSTANTS_3_5(PBN_MIOPEN_CONSTANT) };
#undef PBN_MIOPEN_CONSTANT

#define PBN_MIOPEN_POINTER(result, name, parameters) typedef result(*pbn_##name##_fn) parameters;
PBN_MIOPEN_SYMBOLS(PBN_MIOPEN_POINTER, PBN_MIOPEN_POINTER)
#undef PBN_MIOPEN_POINTER

#endif
