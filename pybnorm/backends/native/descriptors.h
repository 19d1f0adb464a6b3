/* What the CPU's and the GPU's table of native answer alike: descriptors, which hold nothing of a vendor's, and checks. */
#ifndef PYBNORM_NATIVE_DESCRIPTORS_H
#define PYBNORM_NATIVE_DESCRIPTORS_H

#include "pybnorm/adapter.h"

static const char *const algorithm_names[] = {"plain", NULL};

static const char *unrepeated(const pbn_call *call, const char *algorithm) {
    (void)call, (void)algorithm; /* sums are cut by the shape and the device alone, and added in order */
    return NULL;
}

static int tensor_create(pbn_tensor *t) {
    memset(t, 0, sizeof *t);
    t->vendor = calloc(1, sizeof *t);
    t->owned = 1;
    return t->vendor != NULL ? PBN_OK : pbn_refuse(PBN_E_MEMORY, "no host memory for a descriptor");
}

static int tensor_borrow(void *vendor, pbn_tensor *t) {
    if (vendor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "the descriptor's address is NULL");
    *t = *(const pbn_tensor *)vendor;
    t->vendor = vendor;
    t->owned = 0;
    return PBN_OK;
}

static int tensor_set(pbn_tensor *t, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    t->dtype = dtype;
    t->rank = rank;
    memmove(t->dims, dims, (size_t)rank * sizeof *dims);
    memmove(t->strides, strides, (size_t)rank * sizeof *strides);
    t->layout = pbn_layout_of(rank, t->dims, t->strides);
    memcpy(t->vendor, t, sizeof *t);
    return PBN_OK;
}

static int tensor_get(const pbn_tensor *t, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    const pbn_tensor *kept = t->vendor;
    if (kept == NULL || kept->rank == 0)
        return pbn_refuse(PBN_E_ARGUMENT, "the tensor descriptor has not been set");
    *dtype = kept->dtype;
    *rank = kept->rank;
    memcpy(dims, kept->dims, sizeof kept->dims);
    memcpy(strides, kept->strides, sizeof kept->strides);
    return PBN_OK;
}

static int tensor_size(const pbn_tensor *t, size_t *bytes) {
    if (t->rank == 0)
        return pbn_refuse(PBN_E_ARGUMENT, "the tensor descriptor has not been set");
    *bytes = (size_t)pbn_span(t->rank, t->dims, t->strides) * pbn_item_size(t->dtype);
    return PBN_OK;
}

static int tensor_destroy(pbn_tensor *t) {
    if (t->owned)
        free(t->vendor);
    memset(t, 0, sizeof *t);
    return PBN_OK;
}

static int check_mode(int mode) {
    if (mode == PBN_SPATIAL || mode == PBN_PER_ACTIVATION)
        return PBN_OK;
    if (mode == PBN_SPATIAL_PERSISTENT)
        return pbn_refuse(PBN_E_UNSUPPORTED, "SPATIAL_PERSISTENT is cuDNN's; SPATIAL is the same mathematics");
    return pbn_refuse(PBN_E_ARGUMENT, "unknown mode");
}

static int derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    const int status = check_mode(mode);
    if (status != PBN_OK)
        return status;
    if (x->rank < 2)
        return pbn_refuse(PBN_E_ARGUMENT, "the tensor descriptor of x has not been set");
    for (int i = 0; i < x->rank; i++)
        dims[i] = i == 1 || (i > 1 && mode == PBN_PER_ACTIVATION) ? x->dims[i] : 1;
    pbn_packed_strides(x->rank, dims, PBN_CHANNELS_FIRST, strides);
    return tensor_set(derived, x->dtype == PBN_FLOAT64 ? PBN_FLOAT64 : PBN_FLOAT32, x->rank, dims, strides);
}

static uint32_t capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    uint32_t bits = PBN_CAP_RUNS;
    int status = PBN_OK;
    (void)layout;
    if (rank < 2 || rank > PBN_MAX_RANK)
        status = pbn_refuse(PBN_E_ARGUMENT, "the rank must be 2 to 8");
    else if (dtype < PBN_FLOAT32 || dtype > PBN_BFLOAT16)
        status = pbn_refuse(PBN_E_ARGUMENT, "the dtype is none of float32, float64, float16, bfloat16");
    else if (operation < PBN_OP_DERIVE || operation > PBN_OP_RELU_BACKWARD)
        status = pbn_refuse(PBN_E_ARGUMENT, "unknown operation");
    else if (operation <= PBN_OP_BACKWARD)
        status = check_mode(mode);
    if (operation >= PBN_OP_FORWARD_TRAINING && operation <= PBN_OP_BACKWARD)
        bits |= PBN_CAP_BLEND_NATIVE | PBN_CAP_ACTIVATION | PBN_CAP_IN_PLACE | PBN_CAP_RESIDUAL |
                PBN_CAP_OWN_PARAMETERS | (operation == PBN_OP_FORWARD_INFERENCE ? PBN_CAP_INVERSE : PBN_CAP_HALVES) |
                (operation == PBN_OP_BACKWARD ? PBN_CAP_CONSTANTS : 0);
    if (why != NULL)
        *why = status == PBN_OK ? NULL : pbn_reason;
    return status == PBN_OK ? bits : 0;
}

static int check_tensor(const pbn_tensor *t, const pbn_tensor *x) {
    if (t == NULL || t->rank != x->rank || t->dtype != x->dtype ||
        memcmp(t->dims, x->dims, sizeof *x->dims * (size_t)x->rank) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, "the tensors of one call must agree in shape and data type");
    return PBN_OK;
}

static int check_call(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int backward = call->operation == PBN_OP_BACKWARD, wide = x != NULL && x->dtype == PBN_FLOAT64;
    if (x == NULL || x->rank < 2 || call->param_desc == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "x_desc and param_desc must be set");
    int status = check_mode(call->mode);
    if (status == PBN_OK)
        status = check_tensor(backward ? call->dx_desc : call->y_desc, x);
    if (status == PBN_OK && backward)
        status = check_tensor(call->dy_desc, x);
    if (status == PBN_OK && call->z_desc != NULL && !call->sums_only)
        status = check_tensor(call->z_desc, x);
    if (status == PBN_OK && call->dz_desc != NULL)
        status = check_tensor(call->dz_desc, x);
    if (status == PBN_OK && call->dz_desc != NULL)
        status = check_tensor(call->y_desc, x);
    if (status != PBN_OK)
        return status;
    if (call->param_desc->dtype != (wide ? PBN_FLOAT64 : PBN_FLOAT32) && call->param_desc->dtype != x->dtype)
        return pbn_refuse(PBN_E_ARGUMENT, "parameters are float64 for float64 data, else float32 or as the data");
    if (backward && call->share != 0 && call->saved_mean == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, "the gradient of sums that are given needs the saved statistics");
    if (backward && call->running_mean != NULL && (call->saved_mean != NULL || call->activation != PBN_ACTIVATION_NONE))
        return pbn_refuse(PBN_E_UNSUPPORTED, "running statistics stand in place of saved ones, without an activation");
    if (call->operation == PBN_OP_FORWARD_TRAINING && call->share != 0 && !call->sums_only)
        return pbn_refuse(PBN_E_UNSUPPORTED, "statistics are merged with sums_only");
    return PBN_OK;
}

#endif
