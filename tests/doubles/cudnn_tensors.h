/* Tensor descriptors that hold what was set. Part of the doubles of cuDNN. */
#include <stdlib.h>
#include <string.h>

typedef struct tensor { int dtype, rank, dims[8], strides[8]; } tensor;

/* Parameters of batch norms, as the adapter's file groups them. */
#define TRAINING void *handle, int mode, PBN_CUDNN_X, const void *y_desc, void *y, PBN_CUDNN_SCALE, PBN_CUDNN_TRAINING
#define INFERENCE                                                                                                 \
    void *handle, int mode, PBN_CUDNN_X, const void *y_desc, void *y, PBN_CUDNN_SCALE, const void *mean,           \
        const void *variance, double epsilon
#define BACKWARD                                                                                                  \
    void *handle, int mode, PBN_CUDNN_DX_X, const void *dy_desc, const void *dy, const void *dx_desc, void *dx,    \
        const void *param_desc, const void *scale, PBN_CUDNN_GRADIENTS
#define EX_TRAINING                                                                                               \
    void *handle, int mode, int ops, PBN_CUDNN_X, const void *z_desc, const void *z, const void *y_desc, void *y,  \
        PBN_CUDNN_SCALE, PBN_CUDNN_TRAINING, PBN_CUDNN_EX
#define EX_TRAINING_SIZE                                                                                          \
    void *handle, int mode, int ops, const void *x_desc, const void *z_desc, const void *y_desc,                   \
        const void *param_desc, const void *activation, size_t *bytes
#define EX_BACKWARD                                                                                               \
    void *handle, int mode, int ops, PBN_CUDNN_DX_X, const void *y_desc, const void *y, const void *dy_desc,       \
        const void *dy, const void *dz_desc, void *dz, const void *dx_desc, void *dx, PBN_CUDNN_SCALE,             \
        PBN_CUDNN_GRADIENTS, PBN_CUDNN_EX
#define EX_BACKWARD_SIZE                                                                                          \
    void *handle, int mode, int ops, const void *x_desc, const void *y_desc, const void *dy_desc,                  \
        const void *dz_desc, const void *dx_desc, const void *param_desc, const void *activation, size_t *bytes

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
    if (status != 0 || rank > DOUBLE_AXES || (DOUBLE_VERSION < 90000 && rank < 3))
        return status != 0 ? status : DOUBLE_VERSION < 90000 ? 9 : PBN_CUDNN_STATUS_NOT_SUPPORTED;
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
