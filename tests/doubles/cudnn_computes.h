/* The part of the double that computes, on the host's memory: the legacy calls, the norm graphs and graphs of pointwise
 * operations; float32 and bfloat16, rank 4 and of batch norm also 5. Part of cudnn.c.
 *
 * Its pointwise graphs have the limit that cuDNN 9.19 was seen to have on an H200: packed channels-last tensors only.
 * Whoever asks for a workspace writes all of it, before and after it computes. DOUBLE_SLIP is added to what float32 data
 * are written, so that whoever checks results has something to find.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DOUBLE_AXES 5
#include "cudnn_tensors.h"

enum { not_supported = 3000, most = 64, graph_workspace = 192, ex_workspace = 320 };

#ifndef DOUBLE_SLIP
#define DOUBLE_SLIP 0
#endif

int double_slow = 0; /* gradients by the kernels that are slow: the plain entry point's, and Ex without what it wants */

int cudnnCreate(void **handle) { return (*handle = malloc(1)) == NULL; }
int cudnnDestroy(void *handle) { free(handle); return 0; }
static void *current_stream = NULL;
int cudnnSetStream(void *handle, void *stream) {
    current_stream = stream;
    return handle == NULL;
}
int cudnnGetStream(void *handle, void **stream) {
    *stream = current_stream;
    return handle == NULL;
}
void cudnnGetLastErrorString(char *text, size_t size) {
    if (size != 0)
        *text = 0;
}

/* ---- elements */

#define EXTENT(t, axis) ((axis) < (t)->rank ? (t)->dims[axis] : 1)
#define LOOPS(t, from, to) /* every index i of a tensor with i[1] in a range */                               \
    for (int i[5] = {0, 0, 0, 0, 0}; i[0] < EXTENT(t, 0); i[0]++)                                              \
        for (i[1] = (from); i[1] < (to); i[1]++)                                                               \
            for (i[2] = 0; i[2] < EXTENT(t, 2); i[2]++)                                                        \
                for (i[3] = 0; i[3] < EXTENT(t, 3); i[3]++)                                                    \
                    for (i[4] = 0; i[4] < EXTENT(t, 4); i[4]++)
#define EACH(t) LOOPS(t, 0, EXTENT(t, 1))
#define EACH_OF(t, channel) LOOPS(t, channel, (channel) + 1)

static size_t at(const tensor *t, const int *i) {
    size_t offset = 0;
    for (int axis = 0; axis < t->rank; axis++)
        offset += t->dims[axis] == 1 ? 0 : (size_t)i[axis] * (size_t)t->strides[axis];
    return offset;
}
static float load(const tensor *t, const void *memory, const int *i) {
    uint32_t wide;
    float value;
    if (t->dtype != PBN_CUDNN_DATA_BFLOAT16)
        return ((const float *)memory)[at(t, i)];
    wide = (uint32_t)((const uint16_t *)memory)[at(t, i)] << 16;
    memcpy(&value, &wide, sizeof value);
    return value;
}
static void store(const tensor *t, void *memory, const int *i, float value) {
    uint32_t wide;
    if (t->dtype != PBN_CUDNN_DATA_BFLOAT16) {
        ((float *)memory)[at(t, i)] = value + DOUBLE_SLIP;
        return;
    }
    memcpy(&wide, &value, sizeof wide);
    wide += value != value ? 0 : 0x7fff + (wide >> 16 & 1); /* to nearest, ties to even */
    ((uint16_t *)memory)[at(t, i)] = (uint16_t)(wide >> 16);
}
static int same_dims(const tensor *a, const tensor *b) {
    return a->rank == b->rank && memcmp(a->dims, b->dims, (size_t)a->rank * sizeof(int)) == 0;
}

/* ---- the legacy calls */

int cudnnTransformTensor(void *handle, const void *alpha, const void *x_desc, const void *x, const void *beta,
                         const void *y_desc, void *y) {
    const tensor *from = x_desc, *to = y_desc;
    const float factor = *(const float *)alpha, keep = *(const float *)beta;
    const int status = fails();
    if (status != 0 || !same_dims(from, to))
        return status != 0 ? status : not_supported;
    EACH(to) store(to, y, i, factor * load(from, x, i) + (keep == 0 ? 0 : keep * load(to, y, i)));
    return 0;
}
int cudnnSetTensor(void *handle, const void *desc, void *y, const void *value) {
    const tensor *t = desc;
    const int status = fails();
    if (status != 0)
        return status;
    EACH(t) store(t, y, i, *(const float *)value);
    return 0;
}
/* Statistics of x, what becomes of the running ones, and y, blended by data[2]. */
static void training(const float *data, const tensor *from, const void *x, const tensor *to, void *y,
                     const float *scale, const float *bias, double factor, const float *const running[2],
                     float *const updated[2], double epsilon, float *saved_mean, float *saved_inv_variance) {
    const double count = (double)EXTENT(from, 0) * EXTENT(from, 2) * EXTENT(from, 3) * EXTENT(from, 4);
    for (int c = 0; c < from->dims[1]; c++) {
        double mean = 0, squares = 0;
        EACH_OF(from, c) mean += load(from, x, i) / count;
        EACH_OF(from, c) squares += pow(load(from, x, i) - mean, 2);
        const double inverse = 1 / sqrt(squares / count + epsilon), batch[2] = {mean, squares / (count - 1)};
        for (int k = 0; k < 2 && updated[0] != NULL; k++)
            updated[k][c] = (float)((1 - factor) * running[k][c] + factor * batch[k]);
        if (saved_mean != NULL)
            saved_mean[c] = (float)mean, saved_inv_variance[c] = (float)inverse;
        EACH_OF(from, c) {
            const double normal = (load(from, x, i) - mean) * inverse * scale[c] + bias[c];
            store(to, y, i, (float)(data[0] * normal + (data[1] == 0 ? 0 : data[1] * load(to, y, i))));
        }
    }
}
int cudnnBatchNormalizationForwardTraining(TRAINING) {
    float *const running[2] = {running_mean, running_variance};
    const int status = fails();
    const float data[2] = {*(const float *)alpha, *(const float *)beta};
    if (mode == PBN_CUDNN_BATCHNORM_PER_ACTIVATION)
        return not_supported;
    if (status != 0)
        return status;
    training(data, x_desc, x, y_desc, y, scale, bias, factor, (const float *const *)running, running, epsilon, saved_mean,
             saved_inv_variance);
    return 0;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(EX_TRAINING_SIZE) {
    *bytes = ex_workspace;
    return fails();
}
int cudnnBatchNormalizationForwardTrainingEx(EX_TRAINING) {
    memset(workspace, 0xa5, workspace_size);
    return cudnnBatchNormalizationForwardTraining(
        handle, PBN_CUDNN_BATCHNORM_SPATIAL, alpha, beta, x_desc, x, y_desc, y, param_desc, scale, bias, factor,
        running_mean, running_variance, epsilon, saved_mean, saved_inv_variance);
}
int cudnnBatchNormalizationForwardInference(INFERENCE) {
    const tensor *t = x_desc, *to = y_desc, *of = param_desc;
    const float factor = *(const float *)alpha, keep = *(const float *)beta;
    const int status = fails();
    if (status != 0)
        return status;
    EACH(t) {
        const double normal = (load(t, x, i) - load(of, mean, i)) / sqrt(load(of, variance, i) + epsilon);
        const double result = factor * (normal * load(of, scale, i) + load(of, bias, i));
        store(to, y, i, (float)(result + (keep == 0 ? 0 : keep * load(to, y, i))));
    }
    return 0;
}

/* The gradients by their formulas, from the statistics given or from x; blended by data[2] and params[2]. */
static void gradients(const float *data, const float *params, const tensor *x_desc, const void *x, const tensor *dy_desc,
                      const void *dy, const tensor *dx_desc, void *dx, const float *scale, float *dscale, float *dbias,
                      double epsilon, const float *mean, const float *inverse) {
    const double count = (double)EXTENT(x_desc, 0) * EXTENT(x_desc, 2) * EXTENT(x_desc, 3) * EXTENT(x_desc, 4);
    for (int c = 0; c < x_desc->dims[1]; c++) {
        double m = 0, v = 0, sum = 0, product = 0;
        EACH_OF(x_desc, c) m += load(x_desc, x, i) / count;
        EACH_OF(x_desc, c) v += pow(load(x_desc, x, i) - m, 2) / count;
        m = mean != NULL ? mean[c] : m;
        v = inverse != NULL ? inverse[c] : 1 / sqrt(v + epsilon);
        EACH_OF(x_desc, c) sum += load(dy_desc, dy, i);
        EACH_OF(x_desc, c) product += load(dy_desc, dy, i) * (load(x_desc, x, i) - m) * v;
        EACH_OF(x_desc, c) {
            const double g = load(dy_desc, dy, i) - (sum + (load(x_desc, x, i) - m) * v * product) / count;
            const double old = data[1] == 0 ? 0 : data[1] * load(dx_desc, dx, i);
            store(dx_desc, dx, i, (float)(data[0] * scale[c] * v * g + old));
        }
        dscale[c] = (float)(params[0] * product + (params[1] == 0 ? 0 : params[1] * dscale[c]));
        dbias[c] = (float)(params[0] * sum + (params[1] == 0 ? 0 : params[1] * dbias[c]));
    }
}
int cudnnBatchNormalizationBackward(BACKWARD) {
    const float data[2] = {*(const float *)alpha, *(const float *)beta};
    const float params[2] = {*(const float *)alpha_param, *(const float *)beta_param};
    const int status = fails();
    if (mode == PBN_CUDNN_BATCHNORM_PER_ACTIVATION)
        return not_supported;
    if (status != 0)
        return status;
    double_slow++;
    gradients(data, params, x_desc, x, dy_desc, dy, dx_desc, dx, scale, dscale, dbias, epsilon, saved_mean,
              saved_inv_variance);
    return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(EX_BACKWARD_SIZE) {
    *bytes = ex_workspace;
    return fails();
}
int cudnnBatchNormalizationBackwardEx(EX_BACKWARD) {
    const float data[2] = {*(const float *)alpha, *(const float *)beta};
    const float params[2] = {*(const float *)alpha_param, *(const float *)beta_param};
    const int status = fails();
    if (ops != PBN_CUDNN_BATCHNORM_OPS_BN)
        return not_supported;
    if (status != 0)
        return status;
    if (mode != PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT || workspace == NULL || workspace_size < ex_workspace ||
        saved_mean == NULL || ((const tensor *)x_desc)->strides[1] != 1)
        double_slow++;
    if (workspace != NULL)
        memset(workspace, 0xff, ex_workspace);
    gradients(data, params, x_desc, x, dy_desc, dy, dx_desc, dx, scale, dscale, dbias, epsilon, saved_mean,
              saved_inv_variance);
    if (workspace != NULL)
        memset(workspace, 0xff, ex_workspace);
    return 0;
}

/* ---- graphs */

typedef struct node {
    int type, mode, is_virtual;
    int64_t uid, count;
    tensor shape;
    struct node *how, *x, *b, *y, *graph; /* of an operation; the operation graph of whatever is made from it */
    struct node *scale, *mean, *inverse, *dscale, *dbias; /* of a norm's gradient, whose b is dy and whose y is dx */
    struct node *epsilon, *factor, *old[2], *updated[2];  /* of a norm, whose b is the bias */
    void *many[most];                     /* operations of a graph; addresses of a variant pack */
    int64_t uids[most];
    void *memory; /* of a virtual tensor */
    void *workspace;
} node;

/* What each descriptor of an operation's is: X(member, the attribute's name). */
#define TENSORS(X) \
    X(how, POINTWISE_PW_DESCRIPTOR) \
    X(x, POINTWISE_XDESC) \
    X(x, NORM_BWD_XDESC) \
    X(x, NORM_FWD_XDESC) \
    X(b, POINTWISE_BDESC) \
    X(b, NORM_BWD_DYDESC) \
    X(b, NORM_FWD_BIAS_DESC) \
    X(y, POINTWISE_YDESC) \
    X(y, NORM_BWD_DXDESC) \
    X(y, NORM_FWD_YDESC) \
    X(epsilon, NORM_FWD_EPSILON_DESC) \
    X(factor, NORM_FWD_EXP_AVG_FACTOR_DESC) \
    X(old[0], NORM_FWD_INPUT_RUNNING_MEAN_DESC) \
    X(old[1], NORM_FWD_INPUT_RUNNING_VAR_DESC) \
    X(updated[0], NORM_FWD_OUTPUT_RUNNING_MEAN_DESC) \
    X(updated[1], NORM_FWD_OUTPUT_RUNNING_VAR_DESC) \
    X(scale, NORM_BWD_SCALE_DESC) \
    X(scale, NORM_FWD_SCALE_DESC) \
    X(mean, NORM_BWD_MEAN_DESC) \
    X(mean, NORM_FWD_MEAN_DESC) \
    X(inverse, NORM_BWD_INV_VARIANCE_DESC) \
    X(inverse, NORM_FWD_INV_VARIANCE_DESC) \
    X(dscale, NORM_BWD_DSCALE_DESC) \
    X(dbias, NORM_BWD_DBIAS_DESC)
#define CASE(member, name) \
    case PBN_CUDNN_ATTR_OPERATION_##name: n->member = one; break;

int cudnnBackendCreateDescriptor(int type, void **desc) {
    const int status = fails();
    node *n = status == 0 ? calloc(1, sizeof *n) : NULL;
    if (n == NULL)
        return status;
    n->type = type;
    *desc = n;
    double_live++;
    return 0;
}
int cudnnBackendDestroyDescriptor(void *desc) {
    free(((node *)desc)->memory);
    free(desc);
    double_live--;
    return 0;
}
int cudnnBackendSetAttribute(void *desc, int attribute, int type, int64_t count, const void *values) {
    node *n = desc, *one = type == PBN_CUDNN_TYPE_BACKEND_DESCRIPTOR ? *(node *const *)values : NULL;
    const int status = fails();
    if (count > most)
        return not_supported;
    if (status != 0)
        return status;
    switch (attribute) {
    case PBN_CUDNN_ATTR_TENSOR_UNIQUE_ID:
        n->uid = *(const int64_t *)values;
        break;
    case PBN_CUDNN_ATTR_TENSOR_DATA_TYPE:
        n->shape.dtype = *(const int *)values;
        break;
    case PBN_CUDNN_ATTR_TENSOR_DIMENSIONS:
    case PBN_CUDNN_ATTR_TENSOR_STRIDES:
        n->shape.rank = (int)count;
        for (int64_t i = 0; i < count; i++)
            (attribute == PBN_CUDNN_ATTR_TENSOR_STRIDES ? n->shape.strides : n->shape.dims)[i] =
                (int)((const int64_t *)values)[i];
        break;
    case PBN_CUDNN_ATTR_TENSOR_IS_VIRTUAL:
        n->is_virtual = 1;
        break;
    case PBN_CUDNN_ATTR_POINTWISE_MODE:
    case PBN_CUDNN_ATTR_OPERATION_NORM_FWD_MODE:
        n->mode = *(const int *)values;
        break;
        TENSORS(CASE)
    case PBN_CUDNN_ATTR_OPERATIONGRAPH_OPS:
    case PBN_CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS:
        n->count = count;
        memcpy(n->many, values, (size_t)count * sizeof *n->many);
        break;
    case PBN_CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS:
        memcpy(n->uids, values, (size_t)count * sizeof *n->uids);
        break;
    case PBN_CUDNN_ATTR_VARIANT_PACK_WORKSPACE:
        n->workspace = *(void *const *)values;
        break;
    case PBN_CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH:
        n->graph = one;
        break;
    case PBN_CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG:
        n->graph = one->graph;
        break;
    default:
        break;
    }
    return 0;
}
int cudnnBackendGetAttribute(const void *desc, int attribute, int type, int64_t requested, int64_t *count,
                             void *values) {
    const int status = fails();
    if (status != 0)
        return status;
    *count = 1;
    if (attribute == PBN_CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
        *(int64_t *)values = graph_workspace;
    else /* the one engine configuration, in a descriptor of the caller's */
        (*(node **)values)->graph = ((const node *)desc)->graph;
    return 0;
}

static int is_packed(const tensor *t, int channels_first) {
    int64_t step = 1;
    for (int i = 0; i < t->rank; i++) {
        const int axis = channels_first ? t->rank - 1 - i : i == 0 ? 1 : i == t->rank - 1 ? 0 : t->rank - i;
        if (t->dims[axis] != 1 && t->strides[axis] != step)
            return 0;
        step *= t->dims[axis];
    }
    return 1;
}
static int is_last(const node *t) { return t == NULL || is_packed(&t->shape, 0); }
static int is_first(const node *t) { return is_packed(&t->shape, 1); }
int cudnnBackendFinalize(void *desc) {
    const node *n = desc;
    const int status = fails();
    if (status != 0 || n->type != PBN_CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)
        return status;
    for (int64_t k = 0; k < n->graph->count; k++) {
        const node *op = n->graph->many[k];
        const int last = is_last(op->x) && is_last(op->b) && is_last(op->y);
        if (op->type == PBN_CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR) {
            if (!last && !(is_first(op->x) && is_first(op->b) && is_first(op->y)))
                return not_supported;
        } else if (op->type == PBN_CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR) {
            if (n->graph->count > 1 || !(is_last(op->x) ? is_last(op->y) : is_first(op->x) && is_first(op->y)))
                return not_supported; /* fused graphs are not among what it computes */
        } else if (!last || op->x->shape.rank != 4) {
            return not_supported;
        }
    }
    return 0;
}

static void *memory_of(node *t, const node *pack) {
    if (t == NULL)
        return NULL;
    if (t->is_virtual) {
        if (t->memory == NULL)
            t->memory = calloc((size_t)t->shape.dims[0] * t->shape.dims[1] * t->shape.dims[2] * t->shape.dims[3],
                               sizeof(float));
        return t->memory;
    }
    for (int64_t k = 0; k < most; k++)
        if (pack->uids[k] == t->uid)
            return pack->many[k];
    return NULL;
}
int cudnnBackendExecute(void *handle, void *plan, void *pack) {
    static const float whole[2] = {1, 0};
    const node *graph = ((const node *)plan)->graph;
    void *workspace = ((const node *)pack)->workspace;
    const int status = fails();
    if (status != 0)
        return status;
    memset(workspace, 0xff, graph_workspace);
    for (int64_t k = 0; k < graph->count; k++) {
        const node *op = graph->many[k];
        const tensor *from = &op->x->shape, *to = &op->y->shape;
        const void *x = memory_of(op->x, pack), *b = memory_of(op->b, pack);
        void *y = memory_of(op->y, pack);
        if (x == NULL || y == NULL || (op->b != NULL && b == NULL))
            return 1;
        if (op->type == PBN_CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR) {
            gradients(whole, whole, from, x, &op->b->shape, b, to, y, memory_of(op->scale, pack),
                      memory_of(op->dscale, pack), memory_of(op->dbias, pack), NAN, memory_of(op->mean, pack),
                      memory_of(op->inverse, pack));
            continue;
        }
        if (op->type == PBN_CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR) {
            const float *const old[2] = {memory_of(op->old[0], pack), memory_of(op->old[1], pack)};
            float *const updated[2] = {memory_of(op->updated[0], pack), memory_of(op->updated[1], pack)};
            const float *factor = memory_of(op->factor, pack);
            void *const mean = memory_of(op->mean, pack), *const inverse = memory_of(op->inverse, pack);
            if ((((uintptr_t)x | (uintptr_t)y | (uintptr_t)b | (uintptr_t)mean | (uintptr_t)inverse) & 15) != 0)
                return 1;
            training(whole, from, x, to, y, memory_of(op->scale, pack), b, factor != NULL ? *factor : 0, old, updated,
                     *(const float *)memory_of(op->epsilon, pack), mean, inverse);
            continue;
        }
        EACH(to) {
            const float left = load(from, x, i), right = b == NULL ? 0 : load(&op->b->shape, b, i);
            switch (op->how->mode) {
            case PBN_CUDNN_POINTWISE_ADD: store(to, y, i, left + right); break;
            case PBN_CUDNN_POINTWISE_SUB: store(to, y, i, left - right); break;
            case PBN_CUDNN_POINTWISE_MUL: store(to, y, i, left * right); break;
            case PBN_CUDNN_POINTWISE_RSQRT: store(to, y, i, 1 / sqrtf(left)); break;
            case PBN_CUDNN_POINTWISE_RELU_FWD: store(to, y, i, left <= 0 ? 0 : left); break;
            default: return not_supported;
            }
        }
    }
    memset(workspace, 0xff, graph_workspace);
    return 0;
}
