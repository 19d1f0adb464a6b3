/* MIOpen (ROCm).
 *
 * The first part holds only facts about the vendor's binary interface, for this adapter, for the
 * checks against the real header and for test doubles: define PBN_PROTOTYPES_ONLY and include
 * this file, from C or C++, to get it alone. The second part is the adapter.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>

/* C(name, value): becomes the constant PBN_<name> */
#define PBN_MIOPEN_CONSTANTS(C)            \
    C(miopenStatusSuccess, 0)              \
    C(miopenStatusNotInitialized, 1)       \
    C(miopenStatusInvalidValue, 2)         \
    C(miopenStatusBadParm, 3)              \
    C(miopenStatusAllocFailed, 4)          \
    C(miopenStatusInternalError, 5)        \
    C(miopenStatusNotImplemented, 6)       \
    C(miopenStatusUnknownError, 7)         \
    C(miopenStatusUnsupportedOp, 8)        \
    C(miopenStatusGpuOperationsSkipped, 9) \
    C(miopenStatusVersionMismatch, 10)     \
    C(miopenHalf, 0)                       \
    C(miopenFloat, 1)                      \
    C(miopenBFloat16, 5)                   \
    C(miopenDouble, 6)                     \
    C(miopenBNPerActivation, 0)            \
    C(miopenBNSpatial, 1)                  \
    C(miopenTensorOpAdd, 0)                \
    C(miopenTensorOpMax, 3)                \
    C(miopenActivationRELU, 3)             \
    C(miopenActivationCLIPPEDRELU, 7)
/* Those of MIOpen 3.5 on. */
#define PBN_MIOPEN_CONSTANTS_3_5(C) \
    C(miopenActivationCLAMP, 10)    \
    C(miopenTuningPolicyNone, 1)    \
    C(miopenTuningPolicyDbClean, 5)

/* S(result, name, parameters). Handles, descriptors and streams are opaque pointers, enums are int.
 * The adapter cannot work without a REQUIRED symbol. Of the OPTIONAL ones, the _V2 calls take the
 * plain calls' parameter descriptor four times and are preferred; those of HIP belong to
 * libamdhip64 and are found in libMIOpen's own dependencies. */
#define PBN_MIOPEN_SYMBOLS(REQUIRED, OPTIONAL)     \
    PBN_MIOPEN_SYMBOLS_2_0(REQUIRED, OPTIONAL)     \
    PBN_MIOPEN_SYMBOLS_3_5(OPTIONAL)               \
    PBN_MIOPEN_SYMBOLS_NEWER(OPTIONAL)
#define PBN_MIOPEN_SYMBOLS_2_0(REQUIRED, OPTIONAL)                                                                  \
    REQUIRED(int, miopenGetVersion, (size_t *major, size_t *minor, size_t *patch))                                  \
    REQUIRED(const char *, miopenGetErrorString, (int status))                                                      \
    REQUIRED(int, miopenCreate, (void **handle))                                                                    \
    REQUIRED(int, miopenDestroy, (void *handle))                                                                    \
    REQUIRED(int, miopenSetStream, (void *handle, void *stream))                                                    \
    REQUIRED(int, miopenGetStream, (void *handle, void **stream))                                                   \
    REQUIRED(int, miopenCreateTensorDescriptor, (void **desc))                                                      \
    REQUIRED(int, miopenDestroyTensorDescriptor, (void *desc))                                                      \
    REQUIRED(int, miopenSetTensorDescriptor,                                                                        \
             (void *desc, int dtype, int rank, const int *dims, const int *strides))                                \
    REQUIRED(int, miopenGetTensorDescriptorSize, (void *desc, int *rank))                                           \
    REQUIRED(int, miopenGetTensorDescriptor, (void *desc, int *dtype, int *dims, int *strides))                     \
    REQUIRED(int, miopenGetTensorNumBytes, (void *desc, size_t *bytes))                                             \
    REQUIRED(int, miopenDeriveBNTensorDescriptor, (void *derived, void *x_desc, int mode))                          \
    REQUIRED(int, miopenOpTensor,                                                                                   \
             (void *handle, int op, const void *alpha1, void *a_desc, const void *a, const void *alpha2,            \
              void *b_desc, const void *b, const void *beta, void *c_desc, void *c))                                \
    REQUIRED(int, miopenSetTensor, (void *handle, void *y_desc, void *y, const void *value))                        \
    REQUIRED(int, miopenTransformTensor,                                                                            \
             (void *handle, const void *alpha, void *x_desc, const void *x, const void *beta, void *y_desc, void *y)) \
    REQUIRED(int, miopenCreateActivationDescriptor, (void **desc))                                                  \
    REQUIRED(int, miopenSetActivationDescriptor, (void *desc, int mode, double alpha, double beta, double gamma))   \
    REQUIRED(int, miopenDestroyActivationDescriptor, (void *desc))                                                  \
    REQUIRED(int, miopenActivationForward,                                                                          \
             (void *handle, void *activation, const void *alpha, void *x_desc, const void *x, const void *beta,     \
              void *y_desc, void *y))                                                                               \
    REQUIRED(int, miopenActivationBackward,                                                                         \
             (void *handle, void *activation, const void *alpha, void *y_desc, const void *y, void *dy_desc,        \
              const void *dy, void *x_desc, const void *x, const void *beta, void *dx_desc, void *dx))              \
    REQUIRED(int, miopenBatchNormalizationForwardTraining,                                                          \
             (void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y,  \
              void *param_desc, void *scale, void *bias, double factor, void *running_mean,                         \
              void *running_variance, double epsilon, void *saved_mean, void *saved_inv_variance))                  \
    REQUIRED(int, miopenBatchNormalizationForwardInference,                                                         \
             (void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y,  \
              void *param_desc, void *scale, void *bias, void *mean, void *variance, double epsilon))               \
    REQUIRED(int, miopenBatchNormalizationBackward,                                                                 \
             (void *handle, int mode, const void *alpha_data, const void *beta_data, const void *alpha_param,       \
              const void *beta_param, void *x_desc, const void *x, void *dy_desc, const void *dy, void *dx_desc,    \
              void *dx, void *param_desc, const void *scale, void *dscale, void *dbias, double epsilon,             \
              const void *saved_mean, const void *saved_inv_variance))                                              \
    OPTIONAL(int, miopenBatchNormalizationForwardTraining_V2,                                                       \
             (void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y,  \
              void *scale_desc, void *bias_desc, void *mean_desc, void *variance_desc, void *scale, void *bias,     \
              double factor, void *running_mean, void *running_variance, double epsilon, void *saved_mean,          \
              void *saved_inv_variance))                                                                            \
    OPTIONAL(int, miopenBatchNormalizationForwardInference_V2,                                                      \
             (void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y,  \
              void *scale_desc, void *bias_desc, void *mean_desc, void *variance_desc, void *scale, void *bias,     \
              void *mean, void *variance, double epsilon))                                                          \
    OPTIONAL(int, miopenBatchNormalizationBackward_V2,                                                              \
             (void *handle, int mode, const void *alpha_data, const void *beta_data, const void *alpha_param,       \
              const void *beta_param, void *x_desc, const void *x, void *dy_desc, const void *dy, void *dx_desc,    \
              void *dx, void *scale_desc, void *bias_desc, void *mean_desc, void *variance_desc, const void *scale, \
              void *dscale, void *dbias, double epsilon, const void *saved_mean, const void *saved_inv_variance))   \
    OPTIONAL(int, hipGetDevice, (int *ordinal))                                                                     \
    OPTIONAL(int, hipSetDevice, (int ordinal))                                                                      \
    OPTIONAL(int, hipGetDeviceCount, (int *count))                                                                  \
    OPTIONAL(int, hipPointerGetAttributes, (struct pbn_hip_pointer * attributes, const void *address))              \
    OPTIONAL(int, hipGetLastError, (void))                                                                          \
    OPTIONAL(int, hipStreamIsCapturing, (void *stream, int *status))                                                \
    OPTIONAL(int, hipMemcpyAsync, (void *to, const void *from, size_t size, int kind, void *stream))                \
    OPTIONAL(int, hipStreamSynchronize, (void *stream))                                                             \
    OPTIONAL(int, hipGetDevicePropertiesR0600, (struct pbn_hip_properties * properties, int ordinal))
/* Whether the handle's calls time kernels, and keep the fastest.
 * The calls with a fused activation: those of _V2 and an activation descriptor, which is last. CLIPPEDRELU's upper
 * bound is its alpha; CLAMP's lower bound is alpha and its upper one beta. Backward takes the bias, too. */
#define PBN_MIOPEN_SYMBOLS_3_5(OPTIONAL)                                                                            \
    OPTIONAL(int, miopenGetTuningPolicy, (void *handle, int *policy))                                               \
    OPTIONAL(int, miopenBatchNormForwardTrainingActivation,                                                         \
             (void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y,  \
              void *scale_desc, void *bias_desc, void *mean_desc, void *variance_desc, void *scale, void *bias,     \
              double factor, void *running_mean, void *running_variance, double epsilon, void *saved_mean,          \
              void *saved_inv_variance, void *activation))                                                          \
    OPTIONAL(int, miopenBatchNormForwardInferenceActivation,                                                        \
             (void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y,  \
              void *scale_desc, void *bias_desc, void *mean_desc, void *variance_desc, void *scale, void *bias,     \
              void *mean, void *variance, double epsilon, void *activation))                                        \
    OPTIONAL(int, miopenBatchNormBackwardActivation,                                                                \
             (void *handle, int mode, const void *alpha_data, const void *beta_data, const void *alpha_param,       \
              const void *beta_param, void *x_desc, const void *x, void *dy_desc, const void *dy, void *dx_desc,    \
              void *dx, void *scale_desc, void *bias_desc, void *mean_desc, void *variance_desc, const void *scale, \
              const void *bias, void *dscale, void *dbias, double epsilon, const void *saved_mean,                  \
              const void *saved_inv_variance, void *activation))

/* In the header of ROCm's development branch, which calls itself 3.5 too; the 3.5.1 of ROCm 7.2 is without it. With NULL
 * for a statistic it takes those of the batch. */
#define PBN_MIOPEN_SYMBOLS_NEWER(OPTIONAL)                                                                          \
    OPTIONAL(int, miopenBatchNormalizationForwardInferenceInvVariance,                                              \
             (void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y,  \
              void *scale_desc, void *bias_desc, void *mean_desc, void *inv_variance_desc, void *scale, void *bias, \
              void *mean, void *inv_variance))

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

#ifndef PBN_PROTOTYPES_ONLY

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "pybnorm/adapter.h"
#include "pybnorm/dl.h"

/* ---------------------------------------------------------------- the library */

typedef struct symbols {
    PBN_MIOPEN_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} symbols;

static symbols api; /* all zero until load has succeeded */
static int loaded;  /* its version, 100 * major + minor */

static int resolve(pbn_library *lib, symbols *table) {
    PBN_MIOPEN_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    return PBN_OK;
}

static int load(const char *file, int no_load, pbn_library *lib) {
    symbols found;
    size_t version[3] = {0, 0, 0};
    int status = pbn_dl_open(lib, file, no_load);
    if (status != PBN_OK)
        return status;
    status = resolve(lib, &found);
    if (status == PBN_OK) {
        int answer = found.miopenGetVersion(&version[0], &version[1], &version[2]);
        if (answer != PBN_miopenStatusSuccess) {
            snprintf(lib->message, sizeof lib->message, "miopenGetVersion returned %d", answer);
            status = PBN_E_VERSION;
        } else if (version[0] < 2) {
            snprintf(lib->message, sizeof lib->message, "MIOpen %zu.%zu.%zu; this backend speaks 2 and later", version[0],
                     version[1], version[2]);
            status = PBN_E_VERSION;
        }
    }
    if (status != PBN_OK) {
        pbn_dl_discard(lib);
        return status;
    }
    for (int i = 0; i < 3; i++)
        lib->version[i] = (int32_t)version[i];
    loaded = (int)(100 * version[0] + version[1]);
    api = found;
    return PBN_OK;
}

static int has_symbol(const char *name) {
    PBN_MIOPEN_SYMBOLS(PBN_DL_PRESENT, PBN_DL_PRESENT)
    return -1;
}

static int current_device(void) {
    int ordinal;
    return api.hipGetDevice != NULL && api.hipGetDevice(&ordinal) == 0 ? ordinal : -1;
}

static int device_count(void) {
    int count;
    return api.hipGetDeviceCount != NULL && api.hipGetDeviceCount(&count) == 0 ? count : 0;
}

/* Pinned memory has an address on the host, too. What HIP does not know is an error, which the thread keeps: nobody who
 * asks for his own last error is to find it. */
static int memory_device(const void *address) {
    struct pbn_hip_pointer found = {0};
    if (api.hipPointerGetAttributes == NULL)
        return -1;
    if (api.hipPointerGetAttributes(&found, address) != 0) {
        if (api.hipGetLastError != NULL)
            api.hipGetLastError();
        return -1;
    }
    return found.managed || found.host_pointer != NULL ? -1 : found.device;
}

static int card(int device, char *text, size_t size) {
    struct pbn_hip_properties found = {.wave_size = 0};
    if (api.hipGetDevicePropertiesR0600 == NULL || api.hipGetDevicePropertiesR0600(&found, device) != 0 ||
        strncmp(found.architecture, "gfx", 3) != 0)
        return 0;
    snprintf(text, size, "%.*s, wave size %d", (int)strcspn(found.architecture, ":"), found.architecture,
             found.wave_size);
    return 1;
}

static int no_device(void) {
    int ordinal;
    return api.hipGetDevice != NULL && api.hipGetDevice(&ordinal) != 0;
}

/* ---------------------------------------------------------------- statuses */

/* miopenCreate answers a missing device with UnknownError, which says nothing; HIP does say it. */
static _Thread_local int created_without_device;

static const char *status_name(int status) {
    const char *name = api.miopenGetErrorString(status);
    return name != NULL ? name : "unknown miopenStatus_t";
}

/* MIOpen writes its explanation to stderr and keeps no text, so `text` is only what the number means. */
typedef struct meaning {
    int class;
    const char *text;
} meaning;

static meaning meaning_of(int status) {
    static const meaning statuses[] = {
        [PBN_miopenStatusSuccess] = {PBN_CLASS_SUCCESS, ""},
        [PBN_miopenStatusNotInitialized] = {PBN_CLASS_NOT_INITIALIZED, "an object was not initialized"},
        [PBN_miopenStatusInvalidValue] = {PBN_CLASS_BAD_PARAMETER, "a value is invalid"},
        [PBN_miopenStatusBadParm] = {PBN_CLASS_BAD_PARAMETER, "MIOpen rejected a parameter"},
        [PBN_miopenStatusAllocFailed] = {PBN_CLASS_ALLOCATION, "an allocation failed"},
        [PBN_miopenStatusInternalError] = {PBN_CLASS_INTERNAL, "MIOpen failed, for example while building a kernel"},
        [PBN_miopenStatusNotImplemented] = {PBN_CLASS_NOT_SUPPORTED, "no solver of this MIOpen build takes the problem"},
        [PBN_miopenStatusUnknownError] = {PBN_CLASS_INTERNAL, "an error without a number of its own"},
        [PBN_miopenStatusUnsupportedOp] = {PBN_CLASS_NOT_SUPPORTED, "the operation is not supported"},
        /* no error to MIOpen, but nothing was computed */
        [PBN_miopenStatusGpuOperationsSkipped] = {PBN_CLASS_EXECUTION,
                                                  "the GPU operations were skipped; no result was computed"},
        [PBN_miopenStatusVersionMismatch] = {PBN_CLASS_VERSION, "binary data of another MIOpen version"},
    };
    if (status == PBN_miopenStatusUnknownError && created_without_device)
        return (meaning){PBN_CLASS_NOT_INITIALIZED, "HIP has no device"};
    if (status < 0 || status >= (int)(sizeof statuses / sizeof statuses[0]))
        return (meaning){PBN_CLASS_INTERNAL, ""};
    return statuses[status];
}

static int status_class(int status) {
    return meaning_of(status).class;
}

static void last_error(int status, char *text, size_t size) {
    pbn_copy_text(text, size, status < 0 ? pbn_reason : meaning_of(status).text);
}

/* ---------------------------------------------------------------- handles */

struct pbn_handle {
    void *vendor;
    int owned;
    int device; /* -1 if it is not known */
};

static int enter(const pbn_handle *handle, int *before) {
    const int current = handle->device >= 0 && api.hipSetDevice != NULL ? current_device() : -1;
    *before = -1;
    if (current < 0 || current == handle->device)
        return PBN_OK;
    if (api.hipSetDevice(handle->device) != 0)
        return pbn_refuse(PBN_E_DEVICE, pbn_no_place);
    *before = current;
    return PBN_OK;
}

static void leave(const pbn_handle *handle, int before, int status) {
    (void)handle;
    (void)status;
    if (before >= 0)
        api.hipSetDevice(before);
}

static int handle_device(const pbn_handle *handle) {
    return handle->device;
}

static int make_handle(void *vendor, int owned, pbn_handle **handle) {
    if (pbn_new_handle(sizeof **handle, handle) != PBN_OK)
        return PBN_E_MEMORY;
    (*handle)->vendor = vendor;
    (*handle)->owned = owned;
    (*handle)->device = current_device();
    return PBN_OK;
}

static int handle_create(pbn_handle **handle) {
    void *vendor = NULL;
    int status = api.miopenCreate(&vendor);
    created_without_device = status == PBN_miopenStatusUnknownError && no_device();
    if (status != PBN_miopenStatusSuccess)
        return status;
    status = make_handle(vendor, 1, handle);
    if (status != PBN_OK)
        api.miopenDestroy(vendor);
    return status;
}

static int handle_borrow(void *vendor, pbn_handle **handle) {
    return make_handle(vendor, 0, handle);
}

static int handle_destroy(pbn_handle *handle) {
    int status = PBN_OK;
    if (handle->owned) {
        int before;
        enter(handle, &before); /* whether or not its context is still there */
        status = api.miopenDestroy(handle->vendor);
        leave(handle, before, status);
    }
    free(handle);
    return status;
}

static void *handle_pointer(const pbn_handle *handle) {
    return handle->vendor;
}

static int stream_set(pbn_handle *handle, void *stream) {
    return api.miopenSetStream(handle->vendor, stream);
}

static int stream_get(pbn_handle *handle, void **stream) {
    return api.miopenGetStream(handle->vendor, stream);
}

static int takes_by_time(const pbn_handle *handle) {
    int policy = PBN_miopenTuningPolicyNone;
    return api.miopenGetTuningPolicy != NULL &&
           api.miopenGetTuningPolicy(handle->vendor, &policy) == PBN_miopenStatusSuccess &&
           policy != PBN_miopenTuningPolicyNone && policy != PBN_miopenTuningPolicyDbClean;
}

/* E[x^2] - mean^2 is off by 2^-24 of mean^2: by a sixteenth of the variance where that is 2^20 times smaller. */
static int far_from_zero(const pbn_handle *handle, const pbn_call *call) {
    enum { to_host = 2 };
    void *stream = NULL;
    int capturing = 0, far = 0;
    size_t count = 1;
    for (int i = 0; i < call->param_desc->rank; i++)
        count *= (size_t)call->param_desc->dims[i];
    if (api.hipStreamIsCapturing == NULL || api.hipMemcpyAsync == NULL || api.hipStreamSynchronize == NULL ||
        call->param_desc->dtype != PBN_FLOAT32 || api.miopenGetStream(handle->vendor, &stream) != 0 ||
        api.hipStreamIsCapturing(stream, &capturing) != 0 || capturing)
        return 0;
    float *mean = calloc(count, 2 * sizeof *mean);
    if (mean != NULL && api.hipMemcpyAsync(mean, call->saved_mean, count * sizeof *mean, to_host, stream) == 0 &&
        api.hipMemcpyAsync(mean + count, call->saved_inv_variance, count * sizeof *mean, to_host, stream) == 0 &&
        api.hipStreamSynchronize(stream) == 0)
        for (size_t i = 0; i < count; i++)
            far |= fabsf(mean[i] * mean[count + i]) >= 0x1p10f;
    free(mean);
    return far;
}

/* ---------------------------------------------------------------- tensors */

#define VENDOR_RANK 5 /* the most axes of miopenTransformTensor and miopenSetTensor */

static const int dtypes[] = {PBN_miopenFloat, PBN_miopenDouble, PBN_miopenHalf, PBN_miopenBFloat16};

/* MIOpen's descriptors hold C ints. */
static int check_range(int rank, const int64_t *dims, const int64_t *strides) {
    for (int i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a size is outside 1 to 2**31 - 1");
        if (strides[i] < 1 || strides[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a stride is outside 1 to 2**31 - 1");
    }
    return PBN_OK;
}

static int set_descriptor(void *desc, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    int vendor_dtype, d[PBN_MAX_RANK], s[PBN_MAX_RANK];
    int status = pbn_to_vendor_dtype(dtypes, dtype, &vendor_dtype);
    if (status == PBN_OK)
        status = check_range(rank, dims, strides);
    if (status != PBN_OK)
        return status;
    for (int i = 0; i < rank; i++) {
        d[i] = (int)dims[i];
        s[i] = (int)strides[i];
    }
    return api.miopenSetTensorDescriptor(desc, vendor_dtype, rank, d, s);
}

/* What the vendor says a descriptor holds; rank 0 (and dtype untouched) for one that was never set. */
static int get_descriptor(void *desc, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    int vendor_dtype = 0, d[PBN_MAX_RANK], s[PBN_MAX_RANK];
    int status = api.miopenGetTensorDescriptorSize(desc, rank); /* despite its name, the rank */
    if (status != PBN_miopenStatusSuccess || *rank == 0)
        return status;
    if (*rank < 0 || *rank > PBN_MAX_RANK) /* the getter below writes that many numbers unasked */
        return pbn_refuse(PBN_E_UNSUPPORTED, "the descriptor's rank is above 8");
    status = api.miopenGetTensorDescriptor(desc, &vendor_dtype, d, s);
    if (status != PBN_miopenStatusSuccess)
        return status;
    for (int i = 0; i < *rank; i++) {
        dims[i] = d[i];
        strides[i] = s[i];
    }
    return pbn_from_vendor_dtype(dtypes, vendor_dtype, dtype,
                                 "the descriptor's miopenDataType_t is none of miopenFloat, miopenDouble, miopenHalf, "
                                 "miopenBFloat16");
}

/* The same elements with rank 4, which is the one rank all of MIOpen's batch-norm paths take:
 * (N, C, 1, 1), (N, C, L, 1), (N, C, H, W), and (N, C, D*H*W, 1) for higher ranks. */
static void view_4d(int rank, const int64_t *dims, int64_t *view) {
    view[0] = dims[0];
    view[1] = rank > 1 ? dims[1] : 1;
    view[2] = 1;
    view[3] = rank == 4 ? dims[3] : 1;
    for (int i = 2; i < (rank == 4 ? 3 : rank); i++)
        view[2] *= dims[i];
}

static int new_view_4d(void **desc, int dtype, int rank, const int64_t *dims, int layout) {
    int64_t view[4], strides[4];
    int status;
    view_4d(rank, dims, view);
    pbn_packed_strides(4, view, layout, strides);
    *desc = NULL;
    status = api.miopenCreateTensorDescriptor(desc);
    if (status == PBN_miopenStatusSuccess)
        status = set_descriptor(*desc, dtype, 4, view, strides);
    if (status != PBN_OK && *desc != NULL) {
        api.miopenDestroyTensorDescriptor(*desc);
        *desc = NULL;
    }
    return status;
}

static int tensor_create(pbn_tensor *tensor) {
    int status;
    memset(tensor, 0, sizeof *tensor);
    status = api.miopenCreateTensorDescriptor(&tensor->vendor);
    tensor->owned = status == PBN_miopenStatusSuccess;
    return status;
}

/* Strided tensors and those of 2**31 elements or more get none: no call takes them. */
static int new_compute(void **desc, int dtype, int rank, const int64_t *dims, int layout) {
    *desc = NULL;
    if (layout == PBN_STRIDED || pbn_numel(rank, dims) > INT_MAX)
        return PBN_OK;
    return new_view_4d(desc, dtype, rank, dims, layout);
}

/* Writes down what `vendor` already holds. */
static void record(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides, int layout,
                   void *compute) {
    if (tensor->compute != NULL)
        api.miopenDestroyTensorDescriptor(tensor->compute);
    tensor->compute = compute;
    tensor->dtype = dtype;
    tensor->rank = rank;
    tensor->layout = layout;
    for (int i = 0; i < rank; i++) {
        tensor->dims[i] = dims[i];
        tensor->strides[i] = strides[i];
    }
}

static int tensor_borrow(void *vendor, pbn_tensor *tensor) {
    int dtype = 0, rank = 0, layout = PBN_CHANNELS_FIRST, status;
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    void *compute = NULL;
    memset(tensor, 0, sizeof *tensor);
    status = get_descriptor(vendor, &dtype, &rank, dims, strides);
    if (status == PBN_OK && rank > 0) {
        layout = pbn_layout_of(rank, dims, strides);
        status = new_compute(&compute, dtype, rank, dims, layout);
    }
    if (status != PBN_OK)
        return status;
    tensor->vendor = vendor;
    record(tensor, dtype, rank, dims, strides, layout, compute);
    return PBN_OK;
}

static int tensor_set(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    int layout, status;
    void *compute = NULL;
    layout = pbn_layout_of(rank, dims, strides);
    status = new_compute(&compute, dtype, rank, dims, layout);
    if (status != PBN_OK)
        return status;
    /* MIOpen leaves a descriptor as it was when it refuses new values, so nothing is half set. */
    status = set_descriptor(tensor->vendor, dtype, rank, dims, strides);
    if (status != PBN_OK) {
        if (compute != NULL)
            api.miopenDestroyTensorDescriptor(compute);
        return status;
    }
    record(tensor, dtype, rank, dims, strides, layout, compute);
    return PBN_OK;
}

static int tensor_get(const pbn_tensor *tensor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    return get_descriptor(tensor->vendor, dtype, rank, dims, strides);
}

static int tensor_size(const pbn_tensor *tensor, size_t *bytes) {
    return api.miopenGetTensorNumBytes(tensor->vendor, bytes);
}

static int tensor_destroy(pbn_tensor *tensor) {
    int status = PBN_OK;
    if (tensor->compute != NULL)
        status = api.miopenDestroyTensorDescriptor(tensor->compute);
    if (tensor->vendor != NULL && tensor->owned) {
        int second = api.miopenDestroyTensorDescriptor(tensor->vendor);
        status = status != PBN_OK ? status : second;
    }
    memset(tensor, 0, sizeof *tensor);
    return status;
}

/* ---------------------------------------------------------------- what MIOpen can do right */

/* Whether the loaded library has the call of `operation` with a fused activation. */
static int has_fused(int operation) {
    switch (operation) {
    case PBN_OP_FORWARD_TRAINING:
        return api.miopenBatchNormForwardTrainingActivation != NULL;
    case PBN_OP_FORWARD_INFERENCE:
        return api.miopenBatchNormForwardInferenceActivation != NULL;
    case PBN_OP_BACKWARD:
        return api.miopenBatchNormBackwardActivation != NULL;
    default:
        return 0;
    }
}

/* NULL when the combination runs. What MIOpen refuses with a status of its own, or gets wrong only
 * for some sizes of a supported combination, is not refused here: the vendor's answer is the answer. */
static const char *refused(int operation, int mode, int dtype, int layout) {
    if (operation == PBN_OP_AXPBY)
        return dtype == PBN_FLOAT64 ? "miopenOpTensor reads its factors as float32 for float64 tensors too" : NULL;
    if (operation == PBN_OP_FILL)
        return dtype == PBN_FLOAT64 ? "miopenSetTensor has no float64 kernel: its status is miopenStatusUnknownError"
                                    : NULL;
    if (operation == PBN_OP_RELU || operation == PBN_OP_RELU_BACKWARD) {
        if (dtype == PBN_FLOAT64 || dtype == PBN_BFLOAT16)
            return "MIOpen's activation kernels are compiled for float32 and float16 only";
        return layout == PBN_STRIDED ? "miopenActivationForward and -Backward are used on packed tensors only" : NULL;
    }
    if (mode == PBN_SPATIAL_PERSISTENT)
        return "MIOpen knows two modes; it would take SPATIAL_PERSISTENT for PER_ACTIVATION";
    if (dtype == PBN_FLOAT64)
        return "MIOpen has no float64 batch norm: no solver takes it, and float32 parameters are derived for it";
    if (operation == PBN_OP_DERIVE)
        return NULL; /* a matter of sizes only */
    if (layout == PBN_STRIDED)
        return "MIOpen takes packed tensors only; inference and backward ignore strides and return success";
    if (layout == PBN_CHANNELS_LAST && mode == PBN_PER_ACTIVATION)
        return "MIOpen's channels-last per-activation kernels read parameters in H, W, C order, "
               "against the descriptor that it derives";
    if (layout == PBN_CHANNELS_LAST && operation == PBN_OP_FORWARD_INFERENCE && loaded < 305)
        return "MIOpen's own kernels have no channels-last inference";
    return NULL;
}

static uint32_t capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    const char *reason = refused(operation, mode, dtype, layout);
    uint32_t bits = PBN_CAP_RUNS;
    *why = reason;
    if (reason != NULL)
        return 0;
    if (rank != 4)
        bits |= PBN_CAP_FOLDED;
    if (operation == PBN_OP_AXPBY && dtype != PBN_BFLOAT16) /* whose tensors are copied only */
        bits |= layout == PBN_STRIDED ? PBN_CAP_BLEND_SCRATCH : PBN_CAP_BLEND_NATIVE;
    else if (operation >= PBN_OP_FORWARD_TRAINING && operation <= PBN_OP_BACKWARD && dtype != PBN_BFLOAT16)
        bits |= PBN_CAP_BLEND_SCRATCH;
    if (operation >= PBN_OP_FORWARD_TRAINING && operation <= PBN_OP_BACKWARD && loaded >= 304)
        bits |= PBN_CAP_IN_PLACE; /* of older versions nothing is known */
    if (operation == PBN_OP_FORWARD_INFERENCE && api.miopenBatchNormalizationForwardInferenceInvVariance != NULL)
        bits |= PBN_CAP_INVERSE;
    if (has_fused(operation) && mode == PBN_SPATIAL)
        bits |= PBN_CAP_ACTIVATION;
    /* miopenOpTensor rounds each product to float16 before it adds them, and the scratch is float16 too */
    if ((bits & (PBN_CAP_BLEND_NATIVE | PBN_CAP_BLEND_SCRATCH)) != 0 && dtype == PBN_FLOAT16)
        bits |= PBN_CAP_BLEND_ROUNDS;
    return bits;
}

/* ---------------------------------------------------------------- derive */

static int vendor_mode(int mode) {
    return mode == PBN_SPATIAL ? PBN_miopenBNSpatial : PBN_miopenBNPerActivation;
}

static void parameter_dims(const pbn_tensor *x, int mode, int64_t *dims) {
    for (int i = 0; i < x->rank; i++)
        dims[i] = i == 1 || (i > 1 && mode == PBN_PER_ACTIVATION) ? x->dims[i] : 1;
}

/* MIOpen writes out of bounds when it derives from a rank below 4 and refuses ranks above 5, so it
 * is asked about the rank-4 view, and its answer is compared with the rule for it. */
static int derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    void *x_view = NULL, *answer = NULL;
    int dtype = -1, rank = 0, status;
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK], wanted[PBN_MAX_RANK], view[4];
    parameter_dims(x, mode, wanted);
    view_4d(x->rank, wanted, view);

    status = new_view_4d(&x_view, x->dtype, x->rank, x->dims, PBN_CHANNELS_FIRST);
    if (status != PBN_OK)
        return status;
    status = api.miopenCreateTensorDescriptor(&answer);
    if (status == PBN_miopenStatusSuccess) {
        status = api.miopenDeriveBNTensorDescriptor(answer, x_view, vendor_mode(mode));
        if (status == PBN_miopenStatusSuccess)
            status = get_descriptor(answer, &dtype, &rank, dims, strides);
        api.miopenDestroyTensorDescriptor(answer);
    }
    api.miopenDestroyTensorDescriptor(x_view);
    if (status != PBN_OK)
        return status;
    if (rank != 4 || dtype != PBN_FLOAT32 || memcmp(dims, view, sizeof view) != 0)
        return pbn_refuse(PBN_E_INTERNAL, "miopenDeriveBNTensorDescriptor gave other sizes than (1, C, 1, 1) or "
                                          "(1, C, H, W), or another type than float32");
    pbn_packed_strides(x->rank, wanted, PBN_CHANNELS_FIRST, strides);
    return tensor_set(derived, dtype, x->rank, wanted, strides);
}

/* ---------------------------------------------------------------- checks before a call */

/* MIOpen looks at x's descriptor alone. */
static int check_like_x(const pbn_tensor *t, const pbn_tensor *x) {
    if (t->layout != x->layout)
        return pbn_refuse(PBN_E_UNSUPPORTED, "MIOpen takes y, dy and dx to lie in memory as x does, whatever their "
                                             "descriptors say");
    return PBN_OK;
}

static int check_x(const pbn_tensor *x) {
    int64_t n = 1;
    for (int i = 0; i < x->rank; i++) {
        n *= x->dims[i]; /* below 2**62 here, as n was below 2**31 */
        if (n > INT_MAX)
            return pbn_refuse(PBN_E_UNSUPPORTED, "MIOpen's kernels index with 32 bits: 2**31 elements or more");
    }
    return PBN_OK;
}

/* MIOpen reads factors as float, and miopenOpTensor rounds them to the tensors' type: one that
 * overflows or loses bits to underflow there would be another factor. */
#define CHECK_FACTOR(name, value, dtype)                                                                         \
    check_factor(value, dtype, name ": MIOpen reads it as float32, where it must be 0 or a normal number",      \
                 name ": miopenOpTensor rounds it to float16 with float16 data, so it must be 0 or from 2**-14 " \
                      "to 65504 in magnitude")

static int check_factor(double value, int dtype, const char *reason, const char *half_reason) {
    double low = dtype == PBN_FLOAT16 ? 0x1p-14 : FLT_MIN;
    double high = dtype == PBN_FLOAT16 ? 65504.0 : FLT_MAX;
    if (value == 0 || (fabs(value) >= low && fabs(value) <= high))
        return PBN_OK;
    return pbn_refuse(PBN_E_UNSUPPORTED, dtype == PBN_FLOAT16 ? half_reason : reason);
}

/* Whether y = a*x + b*y is more than a copy, and whether one miopenOpTensor call on x and y as they lie does it. */
static int computes(const pbn_call *call) {
    return call->alpha != 1 || call->beta != 0;
}

static int one_order(const pbn_call *call) {
    return call->x_desc->layout != PBN_STRIDED && call->x_desc->layout == call->y_desc->layout;
}

static int check_span(const pbn_tensor *t) {
    return pbn_span(t->rank, t->dims, t->strides) <= INT_MAX
               ? PBN_OK
               : pbn_refuse(PBN_E_UNSUPPORTED, "MIOpen's kernels index with 32 bits: strides reach over 2**31 elements");
}

static int check_axpby(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    int status;
    if ((status = check_span(x)) != PBN_OK || (status = check_span(call->y_desc)) != PBN_OK)
        return status;
    if (x->dtype == PBN_BFLOAT16 && computes(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, "bfloat16 tensors are copied only, with factors 1 and 0: miopenOpTensor's "
                                             "OpenCL source does not compile for that type");
    status = CHECK_FACTOR("a", call->alpha, x->dtype);
    return status != PBN_OK ? status : CHECK_FACTOR("b", call->beta, x->dtype);
}

static int check_activation(const pbn_call *call) {
    if (call->activation == PBN_ACTIVATION_NONE)
        return PBN_OK;
    if (!has_fused(call->operation))
        return pbn_refuse(PBN_E_UNSUPPORTED, "this libMIOpen has no batch norm with a fused activation; 3.5 added it: "
                                             "miopenBatchNormForwardTrainingActivation, -ForwardInferenceActivation, "
                                             "-BackwardActivation");
    if (call->mode != PBN_SPATIAL) /* 3.5.1: none of the three calls applies it, and each returns success */
        return pbn_refuse(PBN_E_UNSUPPORTED, "MIOpen's per-activation kernels leave the fused activation out");
    if (call->alpha != 1 && call->x_desc->dtype == PBN_BFLOAT16)
        return pbn_refuse(PBN_E_UNSUPPORTED, "alpha other than 1 after an activation needs a product that MIOpen "
                                             "lacks for bfloat16: miopenOpTensor does not compile for it");
    /* after the activation alpha is a factor of miopenOpTensor, like beta */
    return CHECK_FACTOR("alpha with an activation", call->alpha, call->x_desc->dtype);
}

static int check_call(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int operation = call->operation;
    int status = check_x(x);
    if (status != PBN_OK)
        return status;
    if (operation == PBN_OP_AXPBY)
        return check_axpby(call);
    if (operation == PBN_OP_BACKWARD) {
        if ((status = check_like_x(call->dy_desc, x)) != PBN_OK || (status = check_like_x(call->dx_desc, x)) != PBN_OK)
            return status;
    } else if ((status = check_like_x(call->y_desc, x)) != PBN_OK) {
        return status;
    }
    if (call->param_desc->layout != PBN_CHANNELS_FIRST)
        return pbn_refuse(PBN_E_ARGUMENT, "the parameter descriptor is not a contiguous vector");
    if (call->beta != 0 && x->dtype == PBN_BFLOAT16)
        return pbn_refuse(PBN_E_UNSUPPORTED, "beta other than 0 on bfloat16 data needs an addition that MIOpen lacks: "
                                             "miopenOpTensor does not compile for bfloat16");
    if ((status = CHECK_FACTOR("alpha", call->alpha, PBN_FLOAT32)) != PBN_OK ||
        (status = CHECK_FACTOR("beta", call->beta, x->dtype)) != PBN_OK)
        return status;
    if (operation == PBN_OP_BACKWARD &&
        ((status = CHECK_FACTOR("alpha_param", call->alpha_param, PBN_FLOAT32)) != PBN_OK ||
         (status = CHECK_FACTOR("beta_param", call->beta_param, PBN_FLOAT32)) != PBN_OK))
        return status;
    return check_activation(call);
}

/* ---------------------------------------------------------------- alpha and beta
 *
 * MIOpen's batch norm takes (1, 0) only. The rest is composed so that the prior value is not read
 * when beta is 0, and so that data is rounded as seldom as possible:
 *   alpha       scale and bias (forward) or scale (backward: dx is linear in it, dscale and dbias
 *               do not depend on it) are multiplied by alpha in float32 beforehand. No type of x
 *               is rounded twice, and bfloat16 works.
 *               Not with an activation, whose bounds (forward) and mask (backward) would move:
 *               then alpha goes the way of beta.
 *   beta        the result goes to scratch, and one addition puts it onto beta * prior.
 *   alpha_param, beta_param
 *               dscale and dbias go to scratch, and from there, blended, to their place. */

typedef struct workspace_plan {
    size_t scale, bias, data, dscale, dbias; /* bytes of each piece, 0 when it is not needed; laid out in this order */
    size_t total;
} workspace_plan;

static size_t piece(size_t bytes, size_t *total) {
    bytes = (bytes + 255) / 256 * 256;
    *total += bytes;
    return bytes;
}

static workspace_plan plan_workspace(const pbn_call *call) {
    const int operation = call->operation;
    workspace_plan plan = {0, 0, 0, 0, 0, 0};
    size_t data, params;
    data = (size_t)pbn_numel(call->x_desc->rank, call->x_desc->dims) * pbn_item_size(call->x_desc->dtype);
    if (operation == PBN_OP_AXPBY) { /* x and y, packed */
        if (computes(call) && !one_order(call))
            plan.data = piece(data, &plan.total);
        if (plan.data > 0 && call->beta != 0)
            piece(data, &plan.total);
        return plan;
    }
    params = (size_t)pbn_numel(call->param_desc->rank, call->param_desc->dims) * sizeof(float);
    if (call->alpha != 1 && call->activation == PBN_ACTIVATION_NONE) {
        plan.scale = piece(params, &plan.total);
        if (operation != PBN_OP_BACKWARD)
            plan.bias = piece(params, &plan.total);
    }
    if (call->beta != 0 || (call->alpha != 1 && call->activation != PBN_ACTIVATION_NONE))
        plan.data = piece(data, &plan.total);
    if (operation == PBN_OP_BACKWARD && (call->alpha_param != 1 || call->beta_param != 0)) {
        plan.dscale = piece(params, &plan.total);
        plan.dbias = piece(params, &plan.total);
    }
    return plan;
}

static int workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    const int status = check_call(call);
    (void)handle;
    if (status == PBN_OK)
        *bytes = plan_workspace(call).total;
    return status;
}

/* out = a * A + b * B on one packed layout; with b = 0, B and the former out are not read. The
 * maximum of a*A with itself is a*A for every A, where a*A + 0*A would turn infinities into NaN. */
static int op_tensor(pbn_handle *handle, const pbn_tensor *t, double a, const void *A, double b, const void *B,
                     void *out) {
    float fa = (float)a, fb = (float)b, zero = 0;
    if (b == 0)
        return api.miopenOpTensor(handle->vendor, PBN_miopenTensorOpMax, &fa, t->compute, A, &fa, t->compute, A, &zero,
                                  t->compute, out);
    return api.miopenOpTensor(handle->vendor, PBN_miopenTensorOpAdd, &fa, t->compute, A, &fb, t->compute, B, &zero,
                              t->compute, out);
}

/* ---------------------------------------------------------------- copies between strides
 *
 * miopenTransformTensor copies between any strides, but:
 *  - its kernels compile for float32 and float16 only, and it reads float16 tensors' factors as float32 here and as
 *    float16 there: so elements of 16 bits go as float16, whatever they are, with factors 1 and 0, which moves bits;
 *  - it takes two neighbouring axes for one where the outer stride divided by the inner one, rounded down, is the inner
 *    length: of 3 steps of 2 in rows of 7 it drops the gap. miopenSetTensor does the same. Innermost axes first, no
 *    quotient is above 1, at the price of scattered access. */

typedef struct axis {
    int64_t size, from, to; /* strides in elements */
} axis;

/* The axes of more than one element, outermost of `to` first, those merged that are one in both. */
static int merged_axes(const pbn_tensor *from, const pbn_tensor *to, axis *axes) {
    int n = 0, merged = 0;
    for (int i = 0; i < to->rank; i++) {
        int k = n;
        if (to->dims[i] == 1)
            continue;
        for (; k > 0 && axes[k - 1].to < to->strides[i]; k--)
            axes[k] = axes[k - 1];
        axes[k] = (axis){to->dims[i], from->strides[i], to->strides[i]};
        n++;
    }
    for (int i = 0; i < n; i++) {
        axis *last = &axes[merged - 1];
        if (merged > 0 && last->from == axes[i].size * axes[i].from && last->to == axes[i].size * axes[i].to)
            *last = (axis){last->size * axes[i].size, axes[i].from, axes[i].to};
        else
            axes[merged++] = axes[i];
    }
    return merged;
}

static int misread(const axis *axes, int n) {
    for (int i = 1; i < n; i++)
        if (axes[i - 1].from / axes[i].from == axes[i].size && axes[i - 1].to / axes[i].to == axes[i].size)
            return 1;
    return 0;
}

static int new_strided(void **desc, int vendor_dtype, const axis *axes, int n, int target) {
    int dims[VENDOR_RANK] = {1}, strides[VENDOR_RANK] = {1};
    const int reversed = misread(axes, n);
    int status;
    for (int i = 0; i < n; i++) {
        const axis *a = &axes[reversed ? n - 1 - i : i];
        dims[i] = (int)a->size;
        strides[i] = (int)(target ? a->to : a->from);
    }
    *desc = NULL;
    status = api.miopenCreateTensorDescriptor(desc);
    if (status == PBN_miopenStatusSuccess)
        status = api.miopenSetTensorDescriptor(*desc, vendor_dtype, n > 0 ? n : 1, dims, strides);
    return status;
}

/* One call of the vendor for VENDOR_RANK axes; `value` is what to fill with, or NULL: a copy. */
static int move(pbn_handle *handle, int dtype, axis *axes, int n, const char *from, char *to, const void *value) {
    const float one = 1, zero = 0;
    const size_t item = pbn_item_size(dtype);
    void *source = NULL, *target = NULL;
    int status = PBN_OK;
    if (n > VENDOR_RANK) {
        int least = 0;
        axis cut;
        for (int i = 1; i < n; i++)
            least = axes[i].size < axes[least].size ? i : least;
        cut = axes[least];
        memmove(axes + least, axes + least + 1, (size_t)(n - 1 - least) * sizeof *axes);
        for (int64_t i = 0; i < cut.size && status == PBN_OK; i++) {
            axis rest[PBN_MAX_RANK];
            memcpy(rest, axes, (size_t)(n - 1) * sizeof *axes);
            status = move(handle, dtype, rest, n - 1, value != NULL ? NULL : from + (size_t)(i * cut.from) * item,
                          to + (size_t)(i * cut.to) * item, value);
        }
        return status;
    }
    const int number = value == NULL && dtype == PBN_BFLOAT16 ? PBN_miopenHalf : dtypes[dtype];
    status = new_strided(&target, number, axes, n, 1);
    if (status == PBN_miopenStatusSuccess && value == NULL)
        status = new_strided(&source, number, axes, n, 0);
    if (status == PBN_miopenStatusSuccess)
        status = value != NULL ? api.miopenSetTensor(handle->vendor, target, to, value)
                               : api.miopenTransformTensor(handle->vendor, &one, source, from, &zero, target, to);
    if (source != NULL)
        api.miopenDestroyTensorDescriptor(source);
    if (target != NULL)
        api.miopenDestroyTensorDescriptor(target);
    return status;
}

static int copy(pbn_handle *handle, const pbn_tensor *from, const void *source, const pbn_tensor *to, void *target) {
    axis axes[PBN_MAX_RANK];
    const int n = merged_axes(from, to, axes);
    return move(handle, to->dtype, axes, n, source, target, NULL);
}

/* Where a call reads its parameters from and puts its results, after the workspace took what it must. */
typedef struct routes {
    workspace_plan plan;
    const void *scale, *bias;
    void *out, *dscale, *dbias;
    void *activation; /* the vendor's descriptor, NULL without one */
} routes;

/* The vendor's descriptor of the call's activation, which has passed check_activation; RELU's of a call without one. */
static int new_activation(const pbn_call *call, void **activation) {
    const int clipped = call->activation == PBN_ACTIVATION_CLIPPED_RELU;
    const int clamp = call->activation == PBN_ACTIVATION_CLAMP;
    int status;
    *activation = NULL;
    status = api.miopenCreateActivationDescriptor(activation);
    if (status != PBN_miopenStatusSuccess)
        return status;
    status = api.miopenSetActivationDescriptor(
        *activation,
        clamp     ? PBN_miopenActivationCLAMP
        : clipped ? PBN_miopenActivationCLIPPEDRELU
                  : PBN_miopenActivationRELU,
        clamp ? call->activation_low : clipped ? call->activation_high : 0, clamp ? call->activation_high : 0, 0);
    if (status != PBN_miopenStatusSuccess) {
        api.miopenDestroyActivationDescriptor(*activation);
        *activation = NULL;
    }
    return status;
}

static int prepare(pbn_handle *handle, const pbn_call *call, routes *to) {
    char *next = call->workspace;
    int status = check_call(call);
    if (status != PBN_OK)
        return status;
    *to = (routes){.plan = plan_workspace(call),
                   .scale = call->scale,
                   .bias = call->bias,
                   .out = call->operation == PBN_OP_BACKWARD ? call->dx : call->y,
                   .dscale = call->dscale,
                   .dbias = call->dbias};
    if (to->plan.scale > 0) {
        status = op_tensor(handle, call->param_desc, call->alpha, call->scale, 0, NULL, next);
        to->scale = next;
        next += to->plan.scale;
    }
    if (to->plan.bias > 0 && status == PBN_OK) {
        status = op_tensor(handle, call->param_desc, call->alpha, call->bias, 0, NULL, next);
        to->bias = next;
        next += to->plan.bias;
    }
    if (to->plan.data > 0) {
        to->out = next;
        next += to->plan.data;
    }
    if (to->plan.dscale > 0) {
        to->dscale = next;
        to->dbias = next + to->plan.dscale;
    }
    if (status == PBN_OK && call->activation != PBN_ACTIVATION_NONE)
        status = new_activation(call, &to->activation);
    return status;
}

/* `status`: of the batch norm. */
static int finish(pbn_handle *handle, const pbn_call *call, const routes *to, int status) {
    const pbn_tensor *p = call->param_desc;
    double a = call->alpha_param, b = call->beta_param;
    if (to->activation != NULL)
        api.miopenDestroyActivationDescriptor(to->activation);
    if (to->plan.data > 0 && status == PBN_OK) {
        void *out = call->operation == PBN_OP_BACKWARD ? call->dx : call->y;
        const double alpha = call->activation == PBN_ACTIVATION_NONE ? 1 : call->alpha; /* else taken in before */
        status = op_tensor(handle, call->x_desc, alpha, to->out, call->beta, out, out);
    }
    if (to->plan.dscale > 0 && status == PBN_OK)
        status = op_tensor(handle, p, a, to->dscale, b, call->dscale, call->dscale);
    if (to->plan.dbias > 0 && status == PBN_OK)
        status = op_tensor(handle, p, a, to->dbias, b, call->dbias, call->dbias);
    return status;
}

/* ---------------------------------------------------------------- the calls */

static int forward_training(pbn_handle *handle, const pbn_call *call) {
    float one = 1, zero = 0; /* MIOpen reads floats here whatever the type of x */
    routes to;
    void *const xd = call->x_desc->compute, *const yd = call->y_desc->compute, *const pd = call->param_desc->compute;
    int status = prepare(handle, call, &to);
    if (status != PBN_OK)
        return status;
    if (to.activation != NULL)
        status = api.miopenBatchNormForwardTrainingActivation(
            handle->vendor, vendor_mode(call->mode), &one, &zero, xd, call->x, yd, to.out, pd, pd, pd, pd,
            (void *)to.scale, (void *)to.bias, call->factor, call->running_mean, call->running_variance,
            call->epsilon, call->saved_mean, call->saved_inv_variance, to.activation);
    else if (api.miopenBatchNormalizationForwardTraining_V2 != NULL)
        status = api.miopenBatchNormalizationForwardTraining_V2(
            handle->vendor, vendor_mode(call->mode), &one, &zero, xd, call->x, yd, to.out, pd, pd, pd, pd,
            (void *)to.scale, (void *)to.bias, call->factor, call->running_mean, call->running_variance, call->epsilon,
            call->saved_mean, call->saved_inv_variance);
    else
        status = api.miopenBatchNormalizationForwardTraining(
            handle->vendor, vendor_mode(call->mode), &one, &zero, xd, call->x, yd, to.out, pd, (void *)to.scale,
            (void *)to.bias, call->factor, call->running_mean, call->running_variance, call->epsilon, call->saved_mean,
            call->saved_inv_variance);
    return finish(handle, call, &to, status);
}

static int forward_inference(pbn_handle *handle, const pbn_call *call) {
    float one = 1, zero = 0;
    routes to;
    void *const xd = call->x_desc->compute, *const yd = call->y_desc->compute, *const pd = call->param_desc->compute;
    int status = prepare(handle, call, &to);
    if (status != PBN_OK)
        return status;
    if (to.activation != NULL)
        status = api.miopenBatchNormForwardInferenceActivation(
            handle->vendor, vendor_mode(call->mode), &one, &zero, xd, call->x, yd, to.out, pd, pd, pd, pd,
            (void *)to.scale, (void *)to.bias, call->running_mean, call->running_variance, call->epsilon,
            to.activation);
    else if (call->inverse)
        status = api.miopenBatchNormalizationForwardInferenceInvVariance(
            handle->vendor, vendor_mode(call->mode), &one, &zero, xd, call->x, yd, to.out, pd, pd, pd, pd,
            (void *)to.scale, (void *)to.bias, call->running_mean, call->running_variance);
    else if (api.miopenBatchNormalizationForwardInference_V2 != NULL)
        status = api.miopenBatchNormalizationForwardInference_V2(
            handle->vendor, vendor_mode(call->mode), &one, &zero, xd, call->x, yd, to.out, pd, pd, pd, pd,
            (void *)to.scale, (void *)to.bias, call->running_mean, call->running_variance, call->epsilon);
    else
        status = api.miopenBatchNormalizationForwardInference(
            handle->vendor, vendor_mode(call->mode), &one, &zero, xd, call->x, yd, to.out, pd, (void *)to.scale,
            (void *)to.bias, call->running_mean, call->running_variance, call->epsilon);
    return finish(handle, call, &to, status);
}

static int backward(pbn_handle *handle, const pbn_call *call) {
    float one = 1, zero = 0;
    routes to;
    void *const xd = call->x_desc->compute, *const dyd = call->dy_desc->compute, *const dxd = call->dx_desc->compute;
    void *const pd = call->param_desc->compute;
    int status = prepare(handle, call, &to);
    if (status != PBN_OK)
        return status;
    if (to.activation != NULL)
        status = api.miopenBatchNormBackwardActivation(
            handle->vendor, vendor_mode(call->mode), &one, &zero, &one, &zero, xd, call->x, dyd, call->dy, dxd,
            to.out, pd, pd, pd, pd, to.scale, call->bias, to.dscale, to.dbias, call->epsilon, call->saved_mean,
            call->saved_inv_variance, to.activation);
    else if (api.miopenBatchNormalizationBackward_V2 != NULL)
        status = api.miopenBatchNormalizationBackward_V2(
            handle->vendor, vendor_mode(call->mode), &one, &zero, &one, &zero, xd, call->x, dyd, call->dy, dxd, to.out,
            pd, pd, pd, pd, to.scale, to.dscale, to.dbias, call->epsilon, call->saved_mean, call->saved_inv_variance);
    else
        status = api.miopenBatchNormalizationBackward(
            handle->vendor, vendor_mode(call->mode), &one, &zero, &one, &zero, xd, call->x, dyd, call->dy, dxd, to.out,
            pd, to.scale, to.dscale, to.dbias, call->epsilon, call->saved_mean, call->saved_inv_variance);
    return finish(handle, call, &to, status);
}

/* On packed copies: miopenOpTensor does not look at the stride of the last axis. */
static int axpby_packed(pbn_handle *handle, const pbn_call *call) {
    const workspace_plan plan = plan_workspace(call);
    char *x = call->workspace, *y = x + plan.data;
    pbn_tensor packed = *call->x_desc;
    int status;
    pbn_packed_strides(packed.rank, packed.dims, PBN_CHANNELS_FIRST, packed.strides);
    packed.layout = PBN_CHANNELS_FIRST;
    status = new_view_4d(&packed.compute, packed.dtype, packed.rank, packed.dims, PBN_CHANNELS_FIRST);
    if (status != PBN_OK)
        return status;
    status = copy(handle, call->x_desc, call->x, &packed, x);
    if (status == PBN_OK && call->beta != 0)
        status = copy(handle, call->y_desc, call->y, &packed, y);
    if (status == PBN_OK)
        status = op_tensor(handle, &packed, call->alpha, x, call->beta, y, x);
    if (status == PBN_OK)
        status = copy(handle, &packed, x, call->y_desc, call->y);
    api.miopenDestroyTensorDescriptor(packed.compute);
    return status;
}

static int axpby(pbn_handle *handle, const pbn_call *call) {
    const int status = check_call(call);
    if (status != PBN_OK)
        return status;
    if (one_order(call) && call->x_desc->dtype != PBN_BFLOAT16)
        return op_tensor(handle, call->x_desc, call->alpha, call->x, call->beta, call->y, call->y);
    if (!computes(call))
        return copy(handle, call->x_desc, call->x, call->y_desc, call->y);
    return axpby_packed(handle, call);
}

/* miopenSetTensor reads the value in the tensor's own type. */
static int fill(pbn_handle *handle, const pbn_call *call) {
    const pbn_tensor *y = call->y_desc;
    double value; /* room and alignment for any of the types */
    int status = check_x(y);
    if (status != PBN_OK)
        return status;
    pbn_encode(call->alpha, y->dtype, &value);
    if (y->layout == PBN_STRIDED) {
        axis axes[PBN_MAX_RANK];
        const int n = merged_axes(y, y, axes);
        return (status = check_span(y)) != PBN_OK ? status : move(handle, y->dtype, axes, n, NULL, call->y, &value);
    }
    return api.miopenSetTensor(handle->vendor, y->compute, call->y, &value);
}

/* y = x * (x > 0) or, with dy, dx = dy * (x > 0): so in MIOpen's kernels, where 0 times infinity is NaN. The
 * backward call wants the activation's output too and does not read it for this activation, so x is passed. */
static int relu(pbn_handle *handle, const pbn_call *call) {
    const float one = 1, zero = 0; /* the only values that the calls take */
    const pbn_tensor *x = call->x_desc;
    const int back = call->operation == PBN_OP_RELU_BACKWARD;
    void *activation = NULL;
    int status;
    if ((status = check_x(x)) != PBN_OK)
        return status;
    if ((back && (status = check_like_x(call->dy_desc, x)) != PBN_OK) ||
        (status = check_like_x(back ? call->dx_desc : call->y_desc, x)) != PBN_OK)
        return status;
    status = new_activation(call, &activation);
    if (status != PBN_miopenStatusSuccess)
        return status;
    if (back)
        status = api.miopenActivationBackward(handle->vendor, activation, &one, x->compute, call->x,
                                              call->dy_desc->compute, call->dy, x->compute, call->x, &zero,
                                              call->dx_desc->compute, call->dx);
    else
        status = api.miopenActivationForward(handle->vendor, activation, &one, x->compute, call->x, &zero,
                                             call->y_desc->compute, call->y);
    api.miopenDestroyActivationDescriptor(activation);
    return status;
}

PBN_CALL_THERE(forward_training)
PBN_CALL_THERE(forward_inference)
PBN_CALL_THERE(backward)
PBN_CALL_THERE(axpby)
PBN_CALL_THERE(fill)
PBN_CALL_THERE(relu)
PBN_THERE(stream_set, (pbn_handle * handle, void *stream), (handle, stream))
PBN_THERE(stream_get, (pbn_handle * handle, void **stream), (handle, stream))
PBN_THERE(takes_by_time, (const pbn_handle *handle), (handle))
PBN_THERE(far_from_zero, (const pbn_handle *handle, const pbn_call *call), (handle, call))

const pbn_backend pbn_backend_miopen = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_ROCM,
    .name = "miopen",
    .label = "MIOpen",
    .search = {.sonames = "libMIOpen.so.1",
               .hint = "install ROCm's MIOpen (package miopen-hip, Debian and Ubuntu: libmiopen1), or AMD's "
                       "rocm[libraries] wheels",
               .loaded_names = "libMIOpen.so", /* carried, and linked to, by PyTorch's ROCm wheels */
               .rocm_sdk = "miopen",
               .rocm_sdk_needs = "amdhip64 amd_comgr hiprtc roctx64 hipblas hipblaslt hiprand",
               .roots = "ROCM_PATH ROCM_HOME HIP_PATH",
               .folders = "/opt/rocm/core*/lib /opt/rocm/lib /opt/rocm-*/lib",
               .variables = "MIOPEN_ HSA_ HIP_ AMD_ ROCM_"},
    PBN_LIBRARY_AND_HANDLES(),
    .memory_device = memory_device,
    .card = card,
    .stream_set = stream_set_there,
    .stream_get = stream_get_there,
    .takes_by_time = takes_by_time_there,
    .far_from_zero = far_from_zero_there,
    PBN_TENSORS(),
    .workspace_size = workspace_size,
    .forward_training = forward_training_there,
    .forward_inference = forward_inference_there,
    .backward = backward_there,
    .axpby = axpby_there,
    .fill = fill_there,
    .relu = relu_there,
    .relu_backward = relu_there,
    .has_symbol = has_symbol,
};

#endif
