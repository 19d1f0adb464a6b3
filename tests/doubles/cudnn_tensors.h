/* Tensor descriptors that hold what was set. Part of the doubles of cuDNN. */
#include <stdlib.h>
#include <string.h>

typedef struct tensor { int dtype, rank, dims[8], strides[8]; } tensor;

/* Parameters of cuDNN's calls, of both doubles. */
#define TRAINING \
    void *handle, int mode, const void *alpha, const void *beta, const void *x_desc, const void *x, \
    const void *y_desc, void *y, const void *param_desc, const void *scale, const void *bias, double factor, \
    void *running_mean, void *running_variance, double epsilon, void *saved_mean, void *saved_inv_variance
#define INFERENCE \
    void *handle, int mode, const void *alpha, const void *beta, const void *x_desc, const void *x, \
    const void *y_desc, void *y, const void *param_desc, const void *scale, const void *bias, const void *mean, \
    const void *variance, double epsilon
#define EX_TRAINING_SIZE \
    void *handle, int mode, int ops, const void *x_desc, const void *z_desc, const void *y_desc, \
    const void *param_desc, const void *act, size_t *bytes
#define EX_TRAINING \
    void *handle, int mode, int ops, const void *alpha, const void *beta, const void *x_desc, const void *x, \
    const void *z_desc, const void *z, const void *y_desc, void *y, const void *param_desc, const void *scale, \
    const void *bias, double factor, void *running_mean, void *running_variance, double epsilon, void *saved_mean, \
    void *saved_inv_variance, void *act, void *workspace, size_t workspace_size, void *reserve, size_t reserve_size
#define EX_BACKWARD_SIZE \
    void *handle, int mode, int ops, const void *x_desc, const void *y_desc, const void *dy_desc, \
    const void *dz_desc, const void *dx_desc, const void *param_desc, const void *act, size_t *bytes
#define EX_BACKWARD \
    void *handle, int mode, int ops, const void *alpha, const void *beta, const void *alpha_param, \
    const void *beta_param, const void *x_desc, const void *x, const void *y_desc, const void *y, \
    const void *dy_desc, const void *dy, const void *dz_desc, void *dz, const void *dx_desc, void *dx, \
    const void *param_desc, const void *scale, const void *bias, void *dscale, void *dbias, double epsilon, \
    const void *saved_mean, const void *saved_inv_variance, void *act, void *workspace, size_t workspace_size, \
    void *reserve, size_t reserve_size

int double_live = 0; /* descriptors and handles made and not destroyed */
int double_calls = 0; /* calls that can fail, up to now */
int double_fail = 0;  /* the number of the one that does */

static int fails(void) { return ++double_calls == double_fail ? 4000 : 0; }

int cudnnCreateTensorDescriptor(void **desc) {
    const int status = fails();
    if (status != 0)
        return status;
    double_live++;
    return (*desc = calloc(1, sizeof(tensor))) == NULL;
}
int cudnnDestroyTensorDescriptor(void *desc) { double_live--; free(desc); return 0; }
int cudnnSetTensorNdDescriptor(void *desc, int dtype, int rank, const int *dims, const int *strides) {
    tensor *t = desc;
    const int status = fails();
    if (status != 0)
        return status;
    t->dtype = dtype, t->rank = rank;
    memcpy(t->dims, dims, (size_t)rank * sizeof *dims);
    memcpy(t->strides, strides, (size_t)rank * sizeof *strides);
    return 0;
}
int cudnnGetTensorNdDescriptor(const void *desc, int requested, int *dtype, int *rank, int *dims, int *strides) {
    const tensor *t = desc;
    *dtype = t->dtype, *rank = t->rank;
    memcpy(dims, t->dims, (size_t)t->rank * sizeof *dims);
    memcpy(strides, t->strides, (size_t)t->rank * sizeof *strides);
    return 0;
}
int cudnnDeriveBNTensorDescriptor(void *derived, const void *x_desc, int mode) {
    const tensor *x = x_desc;
    tensor *t = derived;
    int step = 1;
    t->dtype = x->dtype == PBN_CUDNN_DATA_DOUBLE ? PBN_CUDNN_DATA_DOUBLE : PBN_CUDNN_DATA_FLOAT;
    t->rank = x->rank;
    for (int i = x->rank - 1; i >= 0; i--) {
        t->dims[i] = i == 1 || (i > 1 && mode == PBN_CUDNN_BATCHNORM_PER_ACTIVATION) ? x->dims[i] : 1;
        t->strides[i] = step;
        step *= t->dims[i];
    }
    return 0;
}
