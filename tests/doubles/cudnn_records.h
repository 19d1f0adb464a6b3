/* Descriptors that hold what was set, and calls that compute nothing and write down what reached them: a line each in
 * double_log. What they answer is in the other variables. tests/abi holds the numbers in it against NVIDIA's headers. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DOUBLE_AXES 8
#include "cudnn_tensors.h"

typedef struct act { int mode, nan; double coefficient; } act;
typedef struct context { void *stream; } context;

char double_log[1 << 16];
int double_status = 0;   /* what the batch-norm calls return, and cudnnDestroy; or ... */
char double_failing[64]; /* ... the one call of this name */
int double_recorded = 0; /* what cudnnQueryRuntimeError finds */
int double_destroyed = 0; /* graph and activation descriptors, which plans make; each also said aloud */
int double_aloud = 0;
int double_configs = 1;  /* how many engine configurations a heuristic says it has found */
int double_unbuilt = 0;  /* whether none of them can be made a plan of */
int double_tried = 0;    /* how many that was tried with */
int double_sets = 0;     /* how often a stream was set */
size_t double_workspace = 4096, double_reserve = 1024;

static void note(const char *format, ...) {
    const size_t used = strlen(double_log);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(double_log + used, sizeof double_log - used, format, arguments);
    va_end(arguments);
}

static int named(const char *name) { return strcmp(double_failing, name) == 0 ? double_status : 0; }
static int answer(const char *name) { return double_failing[0] == 0 ? double_status : named(name); }

static void note_data(const char *name, const void *desc, const void *address) {
    const tensor *t = desc;
    note(" %s=", name);
    if (t == NULL) {
        note("-");
    } else {
        note("%d:", t->dtype);
        for (int i = 0; i < t->rank; i++)
            note("%s%d", i ? "," : "", t->dims[i]);
        for (int i = 0; i < t->rank; i++)
            note("%s%d", i ? "," : "/", t->strides[i]);
    }
    if (address != (const void *)(uintptr_t)-1)
        note("@%#zx", (size_t)(uintptr_t)address);
}

#define DESCRIBED(name, desc) note_data(name, desc, (const void *)(uintptr_t)-1)

static void note_activation(const void *desc) {
    const act *a = desc;
    if (a == NULL)
        note(" act=-");
    else
        note(" act=%d,%d,%g", a->mode, a->nan, a->coefficient);
}

static void note_scalar(const char *name, const void *desc, const void *value) {
    const int wide = ((const tensor *)desc)->dtype == PBN_CUDNN_DATA_DOUBLE;
    note(" %s=%g", name, wide ? *(const double *)value : (double)*(const float *)value);
}

/* Addresses, by the words of a list. */
static void note_vectors(const char *names, ...) {
    va_list addresses;
    va_start(addresses, names);
    for (int length = 0; sscanf(names, "%*s%n", &length) == 0 && length > 0; names += length, length = 0)
        note("%.*s=%#zx", length, names, (size_t)va_arg(addresses, const void *));
    va_end(addresses);
}

/* Writes a line: the call's name and what it was given. */
#define LINE(...) (note("%s", __func__), __VA_ARGS__, note("\n"))
#define X_Y note_data("x", x_desc, x), note_data("y", y_desc, y)
#define FACTORS note_scalar("alpha", x_desc, alpha), note_scalar("beta", x_desc, beta)

int cudnnCreate(void **handle) {
    double_live++;
    *handle = calloc(1, sizeof(context));
    if (named(__func__) != 0)
        double_live--, free(*handle);
    return named(__func__);
}
int cudnnDestroy(void *handle) {
    double_live--;
    free(handle);
    note("cudnnDestroy\n");
    return answer(__func__);
}
int cudnnSetStream(void *handle, void *stream) {
    ((context *)handle)->stream = stream;
    double_sets++;
    return 0;
}
int cudnnGetStream(void *handle, void **stream) {
    *stream = ((context *)handle)->stream;
    return 0;
}
void cudnnGetLastErrorString(char *text, size_t size) {
    snprintf(text, size, "%s", double_status ? "said the double" : "");
}

/* For the tests: a descriptor that somebody else made. */
void *double_descriptor(int dtype, int rank, const int *dims, const int *strides) {
    static tensor made[16];
    static int count;
    tensor *t = &made[count++ % 16];
    t->dtype = dtype, t->rank = rank;
    memcpy(t->dims, dims, (size_t)rank * sizeof *dims);
    memcpy(t->strides, strides, (size_t)rank * sizeof *strides);
    return t;
}
int cudnnGetTensorSizeInBytes(const void *desc, size_t *size) {
    const tensor *t = desc;
    size_t last = 0;
    for (int i = 0; i < t->rank; i++)
        last += (size_t)(t->dims[i] - 1) * (size_t)t->strides[i];
    *size = (last + 1) * (t->dtype == PBN_CUDNN_DATA_DOUBLE ? 8 : t->dtype == PBN_CUDNN_DATA_FLOAT ? 4 : 2);
    return 0;
}

int cudnnTransformTensor(void *handle, const void *alpha, const void *x_desc, const void *x, const void *beta,
                         const void *y_desc, void *y) {
    LINE(FACTORS, X_Y);
    return named(__func__);
}
int cudnnSetTensor(void *handle, const void *y_desc, void *y, const void *value) {
    LINE(note_scalar("value", y_desc, value), note_data("y", y_desc, y));
    return named(__func__);
}

int cudnnCreateActivationDescriptor(void **desc) {
    if (named(__func__) != 0)
        return double_status;
    double_live++;
    return (*desc = calloc(1, sizeof(act))) == NULL;
}
static int destroy(void *desc) {
    if (double_aloud)
        fprintf(stderr, "destroyed\n");
    double_destroyed++;
    double_live--;
    free(desc);
    return 0;
}
int cudnnDestroyActivationDescriptor(void *desc) { return destroy(desc); }
int cudnnSetActivationDescriptor(void *desc, int mode, int nan, double coefficient) {
    *(act *)desc = (act){mode, nan, coefficient};
    return named(__func__);
}
int cudnnActivationForward(void *handle, void *desc, const void *alpha, const void *x_desc, const void *x,
                           const void *beta, const void *y_desc, void *y) {
    LINE(note_activation(desc), FACTORS, X_Y);
    return named(__func__);
}
int cudnnActivationBackward(void *handle, void *desc, const void *alpha, const void *y_desc, const void *y,
                            const void *dy_desc, const void *dy, const void *x_desc, const void *x, const void *beta,
                            const void *dx_desc, void *dx) {
    LINE(note_activation(desc), FACTORS, note_data("y", y_desc, y), note_data("dy", dy_desc, dy),
         note_data("x", x_desc, x), note_data("dx", dx_desc, dx));
    return named(__func__);
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(EX_TRAINING_SIZE) {
    note("forward workspace mode=%d ops=%d", mode, ops);
    DESCRIBED("x", x_desc), DESCRIBED("z", z_desc), DESCRIBED("y", y_desc), DESCRIBED("param", param_desc);
    note_activation(activation), note("\n");
    *bytes = double_workspace;
    return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(EX_BACKWARD_SIZE) {
    note("backward workspace mode=%d ops=%d", mode, ops);
    DESCRIBED("x", x_desc), DESCRIBED("y", y_desc), DESCRIBED("dy", dy_desc), DESCRIBED("dz", dz_desc);
    DESCRIBED("dx", dx_desc), DESCRIBED("param", param_desc), note_activation(activation), note("\n");
    *bytes = double_workspace;
    return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int ops, const void *activation,
                                                         const void *x_desc, size_t *bytes) {
    note("reserve mode=%d ops=%d", mode, ops);
    note_activation(activation), DESCRIBED("x", x_desc), note("\n");
    *bytes = ops == PBN_CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION ? double_reserve : 0;
    return 0;
}

int cudnnBatchNormalizationForwardTrainingEx(EX_TRAINING) {
    note("forward mode=%d ops=%d alpha=%g,%g", mode, ops, *(const float *)alpha, *(const float *)beta);
    note_data("x", x_desc, x), note_data("z", z_desc, z), note_data("y", y_desc, y), DESCRIBED("param", param_desc);
    note_vectors(" scale bias rm rv sm si ws rs", scale, bias, running_mean, running_variance, saved_mean,
                 saved_inv_variance, workspace, reserve);
    note(" factor=%g epsilon=%g sizes=%zu,%zu", factor, epsilon, workspace_size, reserve_size);
    note_activation(activation), note("\n");
    return answer(__func__);
}
int cudnnBatchNormalizationBackwardEx(EX_BACKWARD) {
    note("backward mode=%d ops=%d alpha=%g,%g,%g,%g", mode, ops, *(const float *)alpha, *(const float *)beta,
         *(const float *)alpha_param, *(const float *)beta_param);
    X_Y, note_data("dy", dy_desc, dy), note_data("dz", dz_desc, dz);
    note_data("dx", dx_desc, dx), DESCRIBED("param", param_desc);
    note_vectors(" scale bias dscale dbias sm si ws rs", scale, bias, dscale, dbias, saved_mean, saved_inv_variance,
                 workspace, reserve);
    note(" epsilon=%g sizes=%zu,%zu", epsilon, workspace_size, reserve_size), note_activation(activation), note("\n");
    return answer(__func__);
}
int cudnnBatchNormalizationForwardTraining(TRAINING) {
    LINE(note(" mode=%d", mode), FACTORS, X_Y, note_data("scale", param_desc, scale),
         note_vectors(" bias rm rv sm si", bias, running_mean, running_variance, saved_mean, saved_inv_variance),
         note(" factor=%g epsilon=%g", factor, epsilon));
    return answer(__func__);
}
int cudnnBatchNormalizationForwardInference(INFERENCE) {
    LINE(note(" mode=%d", mode), FACTORS, X_Y, note_data("scale", param_desc, scale),
         note_vectors(" bias rm rv", bias, mean, variance), note(" epsilon=%g", epsilon));
    return answer(__func__);
}
int cudnnBatchNormalizationBackward(BACKWARD) {
    LINE(note(" mode=%d", mode), FACTORS, note_scalar("alpha_param", x_desc, alpha_param),
         note_scalar("beta_param", x_desc, beta_param), note_data("x", x_desc, x), note_data("dy", dy_desc, dy),
         note_data("dx", dx_desc, dx), note_data("scale", param_desc, scale),
         note_vectors(" dscale dbias sm si", dscale, dbias, saved_mean, saved_inv_variance),
         note(" epsilon=%g", epsilon));
    return answer(__func__);
}

int cudnnQueryRuntimeError(void *handle, int *recorded, int mode, void *tag) {
    note("query mode=%d tag=%#zx\n", mode, (size_t)(uintptr_t)tag);
    *recorded = double_recorded;
    double_recorded = 0;
    return answer(__func__);
}

/* Graphs: what each pointwise operation does and is done to, and which addresses a run binds; tensors by their uid. */
typedef struct node { int type, dtype, is_virtual; int64_t uid; } node;

static void note_tensor(const char *name, const void *const *desc) {
    const node *t = *desc;
    note(" %s=%s%d:%d", name, t->is_virtual ? "virtual" : "#", (int)t->uid, t->dtype);
}

int cudnnBackendCreateDescriptor(int type, void **desc) {
    node *n = calloc(1, sizeof *n);
    double_live++;
    n->type = type;
    *desc = n;
    return 0;
}
int cudnnBackendDestroyDescriptor(void *desc) { return destroy(desc); }
int cudnnBackendFinalize(void *desc) {
    if (((node *)desc)->type == PBN_CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)
        note("\n");
    return double_unbuilt && ((node *)desc)->type == PBN_CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR ? 3000 : 0;
}
int cudnnBackendSetAttribute(void *desc, int attribute, int type, int64_t count, const void *values) {
    static int64_t uids[64];
    node *n = desc;
    switch (attribute) {
    case PBN_CUDNN_ATTR_TENSOR_UNIQUE_ID:
        n->uid = *(const int64_t *)values;
        break;
    case PBN_CUDNN_ATTR_TENSOR_DATA_TYPE:
        n->dtype = *(const int *)values;
        break;
    case PBN_CUDNN_ATTR_TENSOR_IS_VIRTUAL:
        n->is_virtual = 1;
        break;
    case PBN_CUDNN_ATTR_POINTWISE_MODE:
        note("pointwise %d", *(const int *)values);
        break;
    case PBN_CUDNN_ATTR_POINTWISE_NAN_PROPAGATION:
        note(" nan=%d type=%d", *(const int *)values, type);
        break;
    case PBN_CUDNN_ATTR_OPERATION_POINTWISE_XDESC:
        note_tensor("x", values);
        break;
    case PBN_CUDNN_ATTR_OPERATION_POINTWISE_BDESC:
        note_tensor("b", values);
        break;
    case PBN_CUDNN_ATTR_OPERATION_POINTWISE_YDESC:
        note_tensor("y", values);
        break;
    case PBN_CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG:
        double_tried++;
        break;
    case PBN_CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS:
        memcpy(uids, values, (size_t)count * sizeof *uids);
        break;
    case PBN_CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS:
        note("bound");
        for (int64_t i = 0; i < count; i++)
            note(" #%d@%#zx", (int)uids[i], (size_t)(uintptr_t)((void *const *)values)[i]);
        note("\n");
        break;
    default:
        break;
    }
    return 0;
}
int cudnnBackendGetAttribute(const void *desc, int attribute, int type, int64_t requested, int64_t *count,
                             void *values) {
    *count = double_configs; /* each configuration is the caller's own descriptor */
    if (attribute == PBN_CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
        *(int64_t *)values = 0;
    return 0;
}
int cudnnBackendExecute(void *handle, void *plan, void *pack) { note("execute\n"); return answer(__func__); }
