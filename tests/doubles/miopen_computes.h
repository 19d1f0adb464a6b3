/* The part of the double that computes: float32, packed NCHW of rank 4, float64 inside, the same in the plain calls, in
 * those of _V2 and in those with an activation. "Device" memory is the host's. Part of miopen.c.
 * As MIOpen 3.5.1 does, it leaves the activation out in per-activation mode, and reports success.
 *
 * double_plain_calls, -_v2_calls, -_fused_calls and -_inverse_calls count what was called; double_activation is what the last fused call
 * was given: mode, alpha, beta, gamma. double_live_descriptors and -_activations exist; double_status is what creating
 * a handle and asking for its stream return; double_wrong_derivation adds a channel; double_no_device: HIP has none;
 * double_policy is the tuning policy of every handle; with one that tunes, backward is as MIOpen's kernel variant 1;
 * double_call_status: what training and inference return; double_architecture: the devices'.
 * double_capturing: whether the stream is captured; double_policy_device: the device that was current when it was asked for last.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct descriptor {
    int dtype, rank, dims[8], strides[8];
};
struct activation {
    int mode;
    double alpha, beta, gamma;
};

int double_plain_calls, double_v2_calls, double_fused_calls, double_inverse_calls;
double double_activation[4];
int double_live_activations, double_live_descriptors, double_status, double_wrong_derivation, double_no_device;
int double_policy = PBN_miopenTuningPolicyNone, double_policy_device = -1, double_call_status, double_capturing;

enum { success = 0, bad_parameter = 3, not_implemented = 6, unknown = 7 };

static char handle_object;

/* HIP: the devices, the one that is current, and memory: from, to, device, whether managed, whether pinned. */
int double_devices = 1, double_switches = 0, double_questions = 0, double_last_error = 0, double_gone = -1;
unsigned long long double_memory[8][5];
char double_architecture[64];
static _Thread_local int current;

int hipGetDevice(int *ordinal) {
    *ordinal = current;
    return double_no_device ? 100 : success; /* hipErrorNoDevice */
}
int hipSetDevice(int ordinal) {
    if (ordinal == double_gone || ordinal < 0 || ordinal >= double_devices)
        return 101; /* hipErrorInvalidDevice */
    double_switches++;
    current = ordinal;
    return success;
}
int hipGetDeviceCount(int *count) {
    *count = double_devices;
    return success;
}
int hipPointerGetAttributes(struct pbn_hip_pointer *attributes, const void *address) {
    double_questions++;
    for (int i = 0; i < 8; i++)
        if (double_memory[i][0] <= (size_t)address && (size_t)address < double_memory[i][1]) {
            *attributes = (struct pbn_hip_pointer){
                .type = 2, .device = (int)double_memory[i][2], .device_pointer = (void *)(size_t)address,
                .host_pointer = double_memory[i][4] ? (void *)(size_t)address : NULL, .managed = (int)double_memory[i][3]};
            return success;
        }
    return double_last_error = 1; /* hipErrorInvalidValue */
}
int hipGetDevicePropertiesR0600(struct pbn_hip_properties *properties, int ordinal) {
    properties->wave_size = 32;
    memcpy(properties->architecture, double_architecture, sizeof double_architecture);
    return ordinal == current ? success : 101;
}
int hipStreamIsCapturing(void *stream, int *status) {
    *status = double_capturing;
    return stream != NULL;
}
int hipMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    memcpy(to, from, size);
    return kind != 2 || stream != NULL;
}
int hipStreamSynchronize(void *stream) {
    return stream != NULL;
}
int hipGetLastError(void) {
    const int last = double_last_error;
    double_last_error = success;
    return last;
}
int miopenCreate(void **handle) {
    *handle = &handle_object;
    return double_status;
}
int miopenDestroy(void *handle) {
    return handle == &handle_object ? success : bad_parameter;
}
int miopenGetTuningPolicy(void *handle, int *policy) {
    *policy = double_policy;
    double_policy_device = current;
    return handle == &handle_object ? success : bad_parameter;
}
int miopenSetStream(void *handle, void *stream) {
    return handle == &handle_object ? success : bad_parameter;
}
int miopenGetStream(void *handle, void **stream) {
    *stream = NULL;
    return handle == &handle_object ? double_status : bad_parameter;
}
int miopenCreateTensorDescriptor(void **desc) {
    *desc = calloc(1, sizeof(struct descriptor));
    double_live_descriptors++;
    return success;
}
int miopenDestroyTensorDescriptor(void *desc) {
    free(desc);
    double_live_descriptors--;
    return success;
}
int miopenSetTensorDescriptor(void *desc, int dtype, int rank, const int *dims, const int *strides) {
    struct descriptor *d = desc;
    d->dtype = dtype, d->rank = rank;
    memcpy(d->dims, dims, sizeof *dims * (size_t)rank);
    memcpy(d->strides, strides, sizeof *strides * (size_t)rank);
    return success;
}
int miopenGetTensorDescriptorSize(void *desc, int *rank) {
    *rank = ((struct descriptor *)desc)->rank;
    return success;
}
int miopenGetTensorDescriptor(void *desc, int *dtype, int *dims, int *strides) {
    const struct descriptor *d = desc;
    *dtype = d->dtype;
    memcpy(dims, d->dims, sizeof *dims * (size_t)d->rank);
    memcpy(strides, d->strides, sizeof *strides * (size_t)d->rank);
    return success;
}
int miopenDeriveBNTensorDescriptor(void *derived, void *x_desc, int mode) {
    const struct descriptor *x = x_desc;
    int dims[8], strides[8], step = 1;
    if (x->rank != 4)
        abort(); /* below 4 the real one writes out of bounds */
    for (int i = 0; i < 4; i++)
        dims[i] = i == 1 || (i > 1 && mode == 0) ? x->dims[i] + (i == 1 && double_wrong_derivation) : 1;
    for (int i = 3; i >= 0; i--) {
        strides[i] = step;
        step *= dims[i];
    }
    return miopenSetTensorDescriptor(derived, PBN_miopenFloat, 4, dims, strides);
}

static size_t count(const struct descriptor *d) {
    size_t n = 1;
    for (int i = 0; i < d->rank; i++)
        n *= (size_t)d->dims[i];
    return n;
}

int miopenOpTensor(void *handle, int op, const void *alpha1, void *a_desc, const void *a, const void *alpha2, void *b_desc,
                   const void *b, const void *beta, void *c_desc, void *c) {
    const float *A = a, *B = b, fa = *(const float *)alpha1, fb = *(const float *)alpha2;
    float *C = c;
    if (*(const float *)beta != 0 || ((struct descriptor *)a_desc)->dtype != PBN_miopenFloat)
        abort();
    for (size_t i = 0; i < count(a_desc); i++)
        C[i] = op == PBN_miopenTensorOpAdd ? fa * A[i] + fb * B[i] : fmaxf(fa * A[i], fb * B[i]);
    return success;
}

int miopenSetTensor(void *handle, void *y_desc, void *y, const void *value) {
    for (size_t i = 0; i < count(y_desc); i++)
        ((float *)y)[i] = *(const float *)value;
    return success;
}

/* Elements of any strides; not where MIOpen takes two neighbouring axes for one that are not: it would be wrong. */
static int one_axis(const struct descriptor *d, int i, int k) {
    return d->strides[i] / d->strides[k] == d->dims[k];
}
static int exact(const struct descriptor *d, int i, int k) {
    return d->strides[i] == d->strides[k] * d->dims[k];
}
int miopenTransformTensor(void *handle, const void *alpha, void *x_desc, const void *x, const void *beta, void *y_desc,
                          void *y) {
    const struct descriptor *from = x_desc, *to = y_desc;
    const size_t item = from->dtype == PBN_miopenHalf ? 2 : 4;
    if (*(const float *)alpha != 1 || *(const float *)beta != 0 || from->dtype != to->dtype || from->rank != to->rank ||
        to->rank > 5 || (from->dtype != PBN_miopenFloat && from->dtype != PBN_miopenHalf))
        abort();
    for (int i = 0, k = 1; k < to->rank; i = k++)
        if (one_axis(from, i, k) && one_axis(to, i, k) && !(exact(from, i, k) && exact(to, i, k)))
            abort();
    for (size_t n = 0; n < count(from); n++) {
        size_t rest = n, a = 0, b = 0;
        for (int i = from->rank - 1; i >= 0; i--) {
            const size_t at = rest % (size_t)from->dims[i];
            rest /= (size_t)from->dims[i];
            a += at * (size_t)from->strides[i];
            b += at * (size_t)to->strides[i];
        }
        memcpy((char *)y + b * item, (const char *)x + a * item, item);
    }
    return success;
}

int miopenCreateActivationDescriptor(void **desc) {
    *desc = calloc(1, sizeof(struct activation));
    double_live_activations++;
    return success;
}
int miopenDestroyActivationDescriptor(void *desc) {
    free(desc);
    double_live_activations--;
    return success;
}
int miopenSetActivationDescriptor(void *desc, int mode, double alpha, double beta, double gamma) {
    *(struct activation *)desc = (struct activation){mode, alpha, beta, gamma};
    return success;
}

static void bounds_of(const struct activation *a, double *low, double *high) {
    *low = -INFINITY, *high = INFINITY;
    if (a == NULL)
        return;
    *low = a->mode == PBN_miopenActivationCLAMP ? a->alpha : 0;
    if (a->mode == PBN_miopenActivationCLIPPEDRELU)
        *high = a->alpha;
    else if (a->mode == PBN_miopenActivationCLAMP)
        *high = a->beta;
    else if (a->mode != PBN_miopenActivationRELU)
        abort();
}

int miopenActivationForward(void *handle, void *activation, const void *alpha, void *x_desc, const void *x,
                            const void *beta, void *y_desc, void *y) {
    double low, high;
    bounds_of(activation, &low, &high);
    if (*(const float *)alpha != 1 || *(const float *)beta != 0)
        return bad_parameter;
    for (size_t i = 0; i < count(x_desc); i++)
        ((float *)y)[i] = (float)fmin(fmax(((const float *)x)[i], low), high);
    return success;
}
int miopenActivationBackward(void *handle, void *activation, const void *alpha, void *y_desc, const void *y,
                             void *dy_desc, const void *dy, void *x_desc, const void *x, const void *beta,
                             void *dx_desc, void *dx) {
    double low, high;
    bounds_of(activation, &low, &high);
    if (*(const float *)alpha != 1 || *(const float *)beta != 0)
        return bad_parameter;
    for (size_t i = 0; i < count(x_desc); i++) {
        const float v = ((const float *)x)[i];
        ((float *)dx)[i] = v > low && v <= high ? ((const float *)dy)[i] : 0;
    }
    return success;
}

/* Element k of statistic s. */
struct shape {
    size_t n, c, s, statistics, each;
    int spatial;
};
static struct shape shape_of(const struct descriptor *x, int mode) {
    struct shape h = {(size_t)x->dims[0], (size_t)x->dims[1], (size_t)x->dims[2] * (size_t)x->dims[3], 0, 0, mode == 1};
    if (x->dtype != PBN_miopenFloat || x->rank != 4)
        abort();
    h.statistics = h.spatial ? h.c : h.c * h.s;
    h.each = h.spatial ? h.n * h.s : h.n;
    return h;
}
static size_t at(const struct shape *h, size_t statistic, size_t k) {
    return h->spatial ? k / h->s * h->c * h->s + statistic * h->s + k % h->s : k * h->c * h->s + statistic;
}

static void batch(const struct shape *h, const float *x, size_t s, double *mean, double *variance) {
    double sum = 0, squares = 0;
    for (size_t k = 0; k < h->each; k++)
        sum += x[at(h, s, k)];
    *mean = sum / (double)h->each;
    for (size_t k = 0; k < h->each; k++)
        squares += (x[at(h, s, k)] - *mean) * (x[at(h, s, k)] - *mean);
    *variance = squares / (double)h->each;
}

static int only_one_and_zero(const void *alpha, const void *beta) {
    return *(const float *)alpha == 1 && *(const float *)beta == 0;
}

static int train(int mode, const void *alpha, const void *beta, void *x_desc, const float *x, float *y,
                 const float *scale, const float *bias, double factor, float *running_mean, float *running_variance,
                 double epsilon, float *saved_mean, float *saved_inv_variance, const struct activation *activation) {
    const struct shape h = shape_of(x_desc, mode);
    double low, high, mean, variance;
    bounds_of(activation, &low, &high);
    if (double_call_status != success)
        return double_call_status;
    if (!only_one_and_zero(alpha, beta))
        return unknown;
    for (size_t s = 0; s < h.statistics; s++) {
        batch(&h, x, s, &mean, &variance);
        const double inverse = 1 / sqrt(variance + epsilon), m = (double)h.each;
        for (size_t k = 0; k < h.each; k++)
            y[at(&h, s, k)] =
                (float)fmin(fmax(scale[s] * (x[at(&h, s, k)] - mean) * inverse + bias[s], low), high);
        if (running_mean != NULL && running_variance != NULL) {
            running_mean[s] = (float)((1 - factor) * running_mean[s] + factor * mean);
            running_variance[s] = (float)((1 - factor) * running_variance[s] + factor * variance * m / (m - 1));
        }
        if (saved_mean != NULL && saved_inv_variance != NULL) {
            saved_mean[s] = (float)mean;
            saved_inv_variance[s] = (float)inverse;
        }
    }
    return success;
}

static int infer(int mode, const void *alpha, const void *beta, void *x_desc, const float *x, float *y,
                 const float *scale, const float *bias, const float *mean, const float *variance, double epsilon,
                 const struct activation *activation) {
    const struct shape h = shape_of(x_desc, mode);
    double low, high;
    bounds_of(activation, &low, &high);
    if (double_call_status != success)
        return double_call_status;
    if (!only_one_and_zero(alpha, beta))
        return bad_parameter;
    for (size_t s = 0; s < h.statistics; s++)
        for (size_t k = 0; k < h.each; k++)
            y[at(&h, s, k)] = (float)fmin(
                fmax(scale[s] * (x[at(&h, s, k)] - (double)mean[s]) / sqrt(variance[s] + epsilon) + bias[s], low), high);
    return success;
}

static int back(int mode, const void *alpha_data, const void *beta_data, const void *alpha_param, const void *beta_param,
                void *x_desc, const float *x, const float *dy, float *dx, const float *scale, const float *bias,
                float *dscale, float *dbias, double epsilon, const float *saved_mean, const float *saved_inv_variance,
                const struct activation *activation) {
    const struct shape h = shape_of(x_desc, mode);
    double low, high;
    bounds_of(activation, &low, &high);
    if (!only_one_and_zero(alpha_data, beta_data) || !only_one_and_zero(alpha_param, beta_param))
        return bad_parameter;
    for (size_t s = 0; s < h.statistics; s++) {
        double mean, variance, inverse, sum = 0, product = 0;
        batch(&h, x, s, &mean, &variance);
        inverse = 1 / sqrt(variance + epsilon);
        if (saved_mean != NULL && saved_inv_variance != NULL)
            mean = saved_mean[s], inverse = saved_inv_variance[s];
        for (int pass = 0; pass < 2; pass++)
            for (size_t k = 0; k < h.each; k++) {
                const size_t i = at(&h, s, k);
                const double hat = (x[i] - mean) * inverse, out = activation != NULL ? scale[s] * hat + bias[s] : 0;
                const double g = activation == NULL || (out > low && out <= high) ? dy[i] : 0, m = (double)h.each;
                if (pass == 0)
                    sum += g, product += g * hat;
                else
                    dx[i] = (float)(scale[s] * inverse * (g - sum / m - hat * product / m));
            }
        dscale[s] = (float)product;
        dbias[s] = (float)sum;
        if (double_policy > PBN_miopenTuningPolicyNone && double_policy < PBN_miopenTuningPolicyDbClean && h.spatial &&
            h.s % 4 != 0 && (h.c > 1 || h.each % 4 != 0)) /* variant 1: it has read into the next channel */
            dx[at(&h, s, 0)] = dscale[s] = dbias[s] = NAN;
    }
    return success;
}

static const struct activation *fused(void *activation, int mode) {
    const struct activation *a = activation;
    double_fused_calls++;
    double_activation[0] = a->mode, double_activation[1] = a->alpha;
    double_activation[2] = a->beta, double_activation[3] = a->gamma;
    return mode == 1 ? a : NULL;
}

/* Parameters of the entry points, which differ in the descriptors and the activation. */
#define DATA void *handle, int mode, void *alpha, void *beta, void *x_desc, const void *x, void *y_desc, void *y
#define DESCRIBED void *scale_desc, void *bias_desc, void *mean_desc, void *variance_desc
#define TRAINING                                                                                                  \
    void *scale, void *bias, double factor, void *running_mean, void *running_variance, double epsilon,            \
        void *saved_mean, void *saved_inv_variance
#define INFERENCE void *scale, void *bias, void *mean, void *variance, double epsilon
#define GRADIENTS                                                                                                 \
    void *handle, int mode, const void *alpha_data, const void *beta_data, const void *alpha_param,                \
        const void *beta_param, void *x_desc, const void *x, void *dy_desc, const void *dy, void *dx_desc, void *dx
#define SAVED void *dscale, void *dbias, double epsilon, const void *saved_mean, const void *saved_inv_variance
#define TRAIN(activation)                                                                                         \
    train(mode, alpha, beta, x_desc, x, y, scale, bias, factor, running_mean, running_variance, epsilon,           \
          saved_mean, saved_inv_variance, activation)
#define INFER(activation) infer(mode, alpha, beta, x_desc, x, y, scale, bias, mean, variance, epsilon, activation)
#define BACK(bias, activation)                                                                                    \
    back(mode, alpha_data, beta_data, alpha_param, beta_param, x_desc, x, dy, dx, scale, bias, dscale, dbias,      \
         epsilon, saved_mean, saved_inv_variance, activation)

int miopenBatchNormalizationForwardTraining(DATA, void *param_desc, TRAINING) {
    double_plain_calls++;
    return TRAIN(NULL);
}
int miopenBatchNormalizationForwardTraining_V2(DATA, DESCRIBED, TRAINING) {
    double_v2_calls++;
    return TRAIN(NULL);
}
int miopenBatchNormForwardTrainingActivation(DATA, DESCRIBED, TRAINING, void *activation) {
    return TRAIN(fused(activation, mode));
}
int miopenBatchNormalizationForwardInference(DATA, void *param_desc, INFERENCE) {
    double_plain_calls++;
    return INFER(NULL);
}
int miopenBatchNormalizationForwardInference_V2(DATA, DESCRIBED, INFERENCE) {
    double_v2_calls++;
    return INFER(NULL);
}
/* Of given 1/sqrt(variance + epsilon); with a NULL the real one takes the statistics of the batch. */
int miopenBatchNormalizationForwardInferenceInvVariance(DATA, void *scale_desc, void *bias_desc, void *mean_desc,
                                                        void *inv_variance_desc, void *scale, void *bias, void *mean,
                                                        void *inv_variance) {
    const struct shape h = shape_of(x_desc, mode);
    const float *gain = scale, *offset = bias, *centre = mean, *inverse = inv_variance;
    if (handle != &handle_object || y_desc == NULL || scale_desc != bias_desc || mean_desc != inv_variance_desc ||
        count(scale_desc) != h.statistics || count(mean_desc) != h.statistics || mean == NULL || inv_variance == NULL)
        abort();
    double_inverse_calls++;
    if (!only_one_and_zero(alpha, beta))
        return bad_parameter;
    for (size_t s = 0; s < h.statistics; s++)
        for (size_t k = 0; k < h.each; k++)
            ((float *)y)[at(&h, s, k)] =
                (float)(gain[s] * (((const float *)x)[at(&h, s, k)] - (double)centre[s]) * inverse[s] + offset[s]);
    return success;
}
int miopenBatchNormForwardInferenceActivation(DATA, DESCRIBED, INFERENCE, void *activation) {
    return INFER(fused(activation, mode));
}
int miopenBatchNormalizationBackward(GRADIENTS, void *param_desc, const void *scale, SAVED) {
    double_plain_calls++;
    return BACK(NULL, NULL);
}
int miopenBatchNormalizationBackward_V2(GRADIENTS, DESCRIBED, const void *scale, SAVED) {
    double_v2_calls++;
    return BACK(NULL, NULL);
}
int miopenBatchNormBackwardActivation(GRADIENTS, DESCRIBED, const void *scale, const void *bias, SAVED,
                                      void *activation) {
    return BACK(bias, fused(activation, mode));
}
