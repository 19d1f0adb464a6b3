/* The part of the double that computes, on the host's memory: graphs of pointwise operations and sums, and the legacy
 * calls that the matrix views are made of; float32, rank 4. Part of cudnn.c.
 *
 * Its graphs have the limits that cuDNN 9.19 was seen to have on an H200: packed channels-last tensors only, and no
 * pointwise operation whose result is a vector that lies down, (R, 1, 1, 1), with R above 1.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cudnn_tensors.h"

enum { not_supported = 3000, most = 64 };

int cudnnCreate(void **handle) { return (*handle = malloc(1)) == NULL; }
int cudnnDestroy(void *handle) { free(handle); return 0; }
int cudnnSetStream(void *handle, void *stream) { (void)stream; return handle == NULL; }
void cudnnGetLastErrorString(char *text, size_t size) {
    if (size != 0)
        *text = 0;
}

/* ---- the legacy calls */

#define EACH(t) /* every index i of a tensor of rank 4 */                                                    \
    for (int i[4] = {0, 0, 0, 0}; i[0] < (t)->dims[0]; i[0]++)                                                \
        for (i[1] = 0; i[1] < (t)->dims[1]; i[1]++)                                                           \
            for (i[2] = 0; i[2] < (t)->dims[2]; i[2]++)                                                       \
                for (i[3] = 0; i[3] < (t)->dims[3]; i[3]++)

static size_t at(const tensor *t, const int *i) {
    size_t offset = 0;
    for (int axis = 0; axis < 4; axis++)
        offset += t->dims[axis] == 1 ? 0 : (size_t)i[axis] * (size_t)t->strides[axis];
    return offset;
}

int cudnnAddTensor(void *handle, const void *alpha, const void *a_desc, const void *a, const void *beta,
                   const void *c_desc, void *c) {
    const tensor *from = a_desc, *to = c_desc;
    const float factor = *(const float *)alpha, keep = *(const float *)beta;
    (void)handle;
    for (int axis = 0; axis < 4; axis++)
        if (from->dims[axis] != 1 && from->dims[axis] != to->dims[axis])
            return not_supported;
    EACH(to) {
        float *out = (float *)c + at(to, i);
        *out = factor * ((const float *)a)[at(from, i)] + (keep == 0 ? 0 : keep * *out);
    }
    return 0;
}
int cudnnTransformTensor(void *handle, const void *alpha, const void *x_desc, const void *x, const void *beta,
                         const void *y_desc, void *y) {
    return memcmp(((const tensor *)x_desc)->dims, ((const tensor *)y_desc)->dims, 4 * sizeof(int)) != 0
               ? not_supported
               : cudnnAddTensor(handle, alpha, x_desc, x, beta, y_desc, y);
}
int cudnnSetTensor(void *handle, const void *desc, void *y, const void *value) {
    const tensor *t = desc;
    (void)handle;
    EACH(t)((float *)y)[at(t, i)] = *(const float *)value;
    return 0;
}
int cudnnBatchNormalizationForwardTraining(
    void *handle, int mode, const void *alpha, const void *beta, const void *x_desc, const void *x, const void *y_desc,
    void *y, const void *param_desc, const void *scale, const void *bias, double factor, void *running_mean,
    void *running_variance, double epsilon, void *saved_mean, void *saved_inv_variance) {
    const tensor *t = x_desc, *to = y_desc;
    const double count = (double)t->dims[0] * t->dims[2] * t->dims[3];
    (void)handle, (void)alpha, (void)beta, (void)param_desc;
    if (mode != PBN_CUDNN_BATCHNORM_SPATIAL || t->rank != 4)
        return not_supported;
    for (int c = 0; c < t->dims[1]; c++) {
        double mean = 0, squares = 0;
        EACH(t) if (i[1] == c) mean += ((const float *)x)[at(t, i)] / count;
        EACH(t) if (i[1] == c) squares += pow(((const float *)x)[at(t, i)] - mean, 2);
        if (running_mean != NULL) {
            float *m = (float *)running_mean + c, *v = (float *)running_variance + c;
            *m = (float)((1 - factor) * *m + factor * mean);
            *v = (float)((1 - factor) * *v + factor * squares / (count - 1));
        }
        if (saved_mean != NULL) {
            ((float *)saved_mean)[c] = (float)mean;
            ((float *)saved_inv_variance)[c] = (float)(1 / sqrt(squares / count + epsilon));
        }
        EACH(t) if (i[1] == c)((float *)y)[at(to, i)] =
            (float)((((const float *)x)[at(t, i)] - mean) / sqrt(squares / count + epsilon)) * ((const float *)scale)[c] +
            ((const float *)bias)[c];
    }
    return 0;
}

/* ---- graphs */

typedef struct node {
    int type, mode, is_virtual;
    int64_t uid, count;
    tensor shape;
    struct node *how, *x, *b, *y, *graph; /* of an operation; the operation graph of whatever is made from it */
    void *many[most];                     /* operations of a graph; addresses of a variant pack */
    int64_t uids[most];
    float *memory; /* of a virtual tensor */
} node;

int cudnnBackendCreateDescriptor(int type, void **desc) {
    node *n = calloc(1, sizeof *n);
    if (n == NULL)
        return 1;
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
    if (count > most)
        return not_supported;
    switch (attribute) {
    case PBN_CUDNN_ATTR_TENSOR_UNIQUE_ID:
        n->uid = *(const int64_t *)values;
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
        n->mode = *(const int *)values;
        break;
    case PBN_CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR:
    case PBN_CUDNN_ATTR_OPERATION_REDUCTION_DESC:
        n->how = one;
        break;
    case PBN_CUDNN_ATTR_OPERATION_POINTWISE_XDESC:
    case PBN_CUDNN_ATTR_OPERATION_REDUCTION_XDESC:
        n->x = one;
        break;
    case PBN_CUDNN_ATTR_OPERATION_POINTWISE_BDESC:
        n->b = one;
        break;
    case PBN_CUDNN_ATTR_OPERATION_POINTWISE_YDESC:
    case PBN_CUDNN_ATTR_OPERATION_REDUCTION_YDESC:
        n->y = one;
        break;
    case PBN_CUDNN_ATTR_OPERATIONGRAPH_OPS:
    case PBN_CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS:
        n->count = count;
        memcpy(n->many, values, (size_t)count * sizeof *n->many);
        break;
    case PBN_CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS:
        memcpy(n->uids, values, (size_t)count * sizeof *n->uids);
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
    (void)type, (void)requested;
    *count = 1;
    if (attribute == PBN_CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
        *(int64_t *)values = 0;
    else /* the one engine configuration, in a descriptor of the caller's */
        (*(node **)values)->graph = ((const node *)desc)->graph;
    return 0;
}

static int is_packed(const tensor *t) {
    static const int order[4] = {1, 3, 2, 0};
    int64_t step = 1;
    for (int i = 0; i < 4; i++) {
        if (t->dims[order[i]] != 1 && t->strides[order[i]] != step)
            return 0;
        step *= t->dims[order[i]];
    }
    return t->rank == 4;
}
int cudnnBackendFinalize(void *desc) {
    const node *n = desc;
    if (n->type != PBN_CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)
        return 0;
    for (int64_t k = 0; k < n->graph->count; k++) {
        const node *op = n->graph->many[k];
        if (!is_packed(&op->x->shape) || !is_packed(&op->y->shape) || (op->b != NULL && !is_packed(&op->b->shape)) ||
            (op->type == PBN_CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR && op->y->shape.dims[0] > 1 &&
             op->y->shape.dims[1] == 1))
            return not_supported;
    }
    return 0;
}

static float *memory_of(node *t, const node *pack) {
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
    const node *graph = ((const node *)plan)->graph;
    (void)handle;
    for (int64_t k = 0; k < graph->count; k++) {
        const node *op = graph->many[k];
        const float *x = memory_of(op->x, pack), *b = op->b == NULL ? NULL : memory_of(op->b, pack);
        float *y = memory_of(op->y, pack);
        if (x == NULL || y == NULL || (op->b != NULL && b == NULL))
            return 1;
        if (op->type == PBN_CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
            EACH(&op->y->shape) y[at(&op->y->shape, i)] = 0;
            EACH(&op->x->shape) y[at(&op->y->shape, i)] += x[at(&op->x->shape, i)];
            continue;
        }
        EACH(&op->y->shape) {
            const float left = x[at(&op->x->shape, i)], right = b == NULL ? 0 : b[at(&op->b->shape, i)];
            float *out = &y[at(&op->y->shape, i)];
            switch (op->how->mode) {
            case PBN_CUDNN_POINTWISE_ADD: *out = left + right; break;
            case PBN_CUDNN_POINTWISE_SUB: *out = left - right; break;
            case PBN_CUDNN_POINTWISE_MUL: *out = left * right; break;
            case PBN_CUDNN_POINTWISE_RSQRT: *out = 1 / sqrtf(left); break;
            case PBN_CUDNN_POINTWISE_IDENTITY: *out = left; break;
            default: return not_supported;
            }
        }
    }
    return 0;
}
