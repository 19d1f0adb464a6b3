/* A cuDNN that computes float32 batch norm of at most 5 dims, as far as raw_cudnn.c asks; SLIP is added to every y and
 * dx, so that a program that checks its results has something to find. */
#include CUDNN_BACKEND
#include <math.h>
#include <stdlib.h>

#ifndef SLIP
#define SLIP 0
#endif
#define DECLARE(result, name, parameters) result name parameters;
PBN_CUDNN_SYMBOLS(DECLARE, DECLARE)

typedef struct tensor { int rank, dims[5], strides[5]; } tensor;

const char *cudnnGetErrorString(int status) { return status ? "CUDNN_STATUS_OF_THE_TEST" : "CUDNN_STATUS_SUCCESS"; }
int cudnnCreate(void **handle) { *handle = handle; return 0; }
int cudnnSetStream(void *handle, void *stream) { return !handle || !stream; }
int cudnnCreateTensorDescriptor(void **desc) { *desc = calloc(1, sizeof(tensor)); return 0; }
int cudnnDestroyTensorDescriptor(void *desc) { free(desc); return 0; }
int cudnnDeriveBNTensorDescriptor(void *derived, const void *x_desc, int mode)
{
    return !derived || !x_desc || mode != PBN_CUDNN_BATCHNORM_SPATIAL;
}
int cudnnSetTensorNdDescriptor(void *desc, int dtype, int rank, const int *dims, const int *strides)
{
    tensor *t = desc;
    if (dtype != PBN_CUDNN_DATA_FLOAT || rank > 5) return PBN_CUDNN_STATUS_NOT_SUPPORTED;
    t->rank = rank;
    for (int i = 0; i < 5; i++) t->dims[i] = i < rank ? dims[i] : 1, t->strides[i] = i < rank ? strides[i] : 0;
    return 0;
}

#define EACH(t, c)                                                                              \
    for (int n = 0; n < (t)->dims[0]; n++)                                                      \
        for (int i = 0; i < (t)->dims[2]; i++)                                                  \
            for (int j = 0; j < (t)->dims[3]; j++)                                              \
                for (int k = 0, at = n * (t)->strides[0] + (c) * (t)->strides[1] +              \
                                 i * (t)->strides[2] + j * (t)->strides[3]; k < (t)->dims[4];   \
                     k++, at += (t)->strides[4])

static double count(const tensor *t) { return (double)t->dims[0] * t->dims[2] * t->dims[3] * t->dims[4]; }

int cudnnBatchNormalizationForwardTraining(
    void *handle, int mode, const void *alpha, const void *beta, const void *x_desc, const void *x, const void *y_desc,
    void *y, const void *param_desc, const void *scale, const void *bias, double factor, void *running_mean,
    void *running_variance, double epsilon, void *saved_mean, void *saved_inv_variance)
{
    const tensor *t = x_desc;
    const float *in = x;
    (void)handle, (void)mode, (void)alpha, (void)beta, (void)y_desc, (void)param_desc, (void)factor;
    (void)running_mean, (void)running_variance;
    for (int c = 0; c < t->dims[1]; c++) {
        double mean = 0, variance = 0;
        EACH(t, c) mean += in[at] / count(t);
        EACH(t, c) variance += (in[at] - mean) * (in[at] - mean) / count(t);
        double inv = 1 / sqrt(variance + epsilon);
        ((float *)saved_mean)[c] = (float)mean, ((float *)saved_inv_variance)[c] = (float)inv;
        EACH(t, c)
            ((float *)y)[at] = (float)((in[at] - mean) * inv * ((float *)scale)[c] + ((float *)bias)[c]) + SLIP;
    }
    return 0;
}

int cudnnBatchNormalizationForwardInference(
    void *handle, int mode, const void *alpha, const void *beta, const void *x_desc, const void *x, const void *y_desc,
    void *y, const void *param_desc, const void *scale, const void *bias, const void *running_mean,
    const void *running_variance, double epsilon)
{
    const tensor *t = x_desc;
    (void)handle, (void)mode, (void)alpha, (void)beta, (void)y_desc, (void)param_desc;
    for (int c = 0; c < t->dims[1]; c++) {
        double mean = ((float *)running_mean)[c], inv = 1 / sqrt(((float *)running_variance)[c] + epsilon);
        EACH(t, c)
            ((float *)y)[at] =
                (float)((((float *)x)[at] - mean) * inv * ((float *)scale)[c] + ((float *)bias)[c]) + SLIP;
    }
    return 0;
}

int cudnnBatchNormalizationBackward(
    void *handle, int mode, const void *alpha, const void *beta, const void *alpha_param, const void *beta_param,
    const void *x_desc, const void *x, const void *dy_desc, const void *dy, const void *dx_desc, void *dx,
    const void *param_desc, const void *scale, void *dscale, void *dbias, double epsilon, const void *saved_mean,
    const void *saved_inv_variance)
{
    const tensor *t = x_desc;
    const float *in = x, *gradient = dy;
    (void)handle, (void)mode, (void)alpha, (void)beta, (void)alpha_param, (void)beta_param, (void)dy_desc;
    (void)dx_desc, (void)param_desc, (void)epsilon;
    for (int c = 0; c < t->dims[1]; c++) {
        double mean = ((float *)saved_mean)[c], inv = ((float *)saved_inv_variance)[c], sum = 0, product = 0;
        EACH(t, c) sum += gradient[at], product += gradient[at] * (in[at] - mean) * inv;
        ((float *)dscale)[c] = (float)product, ((float *)dbias)[c] = (float)sum;
        EACH(t, c)
            ((float *)dx)[at] = (float)(((float *)scale)[c] * inv *
                                        (gradient[at] - sum / count(t) - (in[at] - mean) * inv * product / count(t))) +
                                SLIP;
    }
    return 0;
}
