/* A backend of its own distribution: batch norm in plain C loops over float32 and float64 on the CPU.
 *
 * It shows the contract of pybnorm/shim.h at its smallest: one exported table, handles, descriptors, the batch-norm calls
 * and the elementwise ones. Sums are taken in double. Any strides will do: an element is found by its number.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pybnorm/adapter.h"

/* ---- the library, which is this file, and its failures: it has no statuses of its own */

static int load(const char *file, int no_load, pbn_library *out) {
    (void)no_load;
    memset(out, 0, sizeof *out);
    out->version[0] = 1;
    pbn_copy_text(out->path, sizeof out->path, file);
    return PBN_OK;
}

static const char *status_name(int status) {
    (void)status;
    return "not a status of the loops";
}

static int status_class(int status) { return status == PBN_OK ? PBN_CLASS_SUCCESS : PBN_CLASS_INTERNAL; }

static void last_error(int status, char *text, size_t size) {
    pbn_copy_text(text, size, status < 0 ? pbn_reason : NULL);
}

static int has_symbol(const char *name) {
    (void)name;
    return -1;
}

/* ---- handles: the CPU needs none, so a handle holds nothing */

struct pbn_handle {
    void *vendor;
};

static int handle_borrow(void *vendor, pbn_handle **handle) {
    const int status = pbn_new_handle(sizeof **handle, handle);
    if (status == PBN_OK)
        (*handle)->vendor = vendor;
    return status;
}

static int handle_create(pbn_handle **handle) {
    const int status = handle_borrow(NULL, handle);
    if (status == PBN_OK)
        (*handle)->vendor = *handle;
    return status;
}

static int handle_destroy(pbn_handle *handle) {
    free(handle);
    return PBN_OK;
}

static void *handle_pointer(const pbn_handle *handle) { return handle->vendor; }

static int handle_device(const pbn_handle *handle) {
    (void)handle;
    return 0;
}

static int device_count(void) { return 1; }

static int stream_set(pbn_handle *handle, void *stream) {
    (void)handle;
    return stream == NULL ? PBN_OK : pbn_refuse(PBN_E_UNSUPPORTED, "the loops have no streams");
}

static int stream_get(pbn_handle *handle, void **stream) {
    (void)handle;
    *stream = NULL;
    return PBN_OK;
}

/* ---- descriptors: what a vendor would keep is a copy of the record */

static int tensor_create(pbn_tensor *tensor) {
    memset(tensor, 0, sizeof *tensor);
    tensor->vendor = calloc(1, sizeof *tensor);
    tensor->owned = 1;
    return tensor->vendor != NULL ? PBN_OK : pbn_refuse(PBN_E_MEMORY, "no host memory for a descriptor");
}

static int tensor_borrow(void *vendor, pbn_tensor *tensor) {
    *tensor = *(const pbn_tensor *)vendor;
    tensor->vendor = vendor;
    tensor->owned = 0;
    return PBN_OK;
}

static int tensor_set(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    tensor->dtype = dtype;
    tensor->rank = rank;
    memcpy(tensor->dims, dims, (size_t)rank * sizeof *dims);
    memcpy(tensor->strides, strides, (size_t)rank * sizeof *strides);
    tensor->layout = pbn_layout_of(rank, dims, strides);
    memcpy(tensor->vendor, tensor, sizeof *tensor);
    return PBN_OK;
}

static int tensor_get(const pbn_tensor *tensor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    const pbn_tensor *kept = tensor->vendor;
    *dtype = kept->dtype;
    *rank = kept->rank;
    memcpy(dims, kept->dims, sizeof kept->dims);
    memcpy(strides, kept->strides, sizeof kept->strides);
    return PBN_OK;
}

static int tensor_size(const pbn_tensor *tensor, size_t *bytes) {
    *bytes = (size_t)pbn_span(tensor->rank, tensor->dims, tensor->strides) * pbn_item_size(tensor->dtype);
    return PBN_OK;
}

static int tensor_destroy(pbn_tensor *tensor) {
    if (tensor->owned)
        free(tensor->vendor);
    memset(tensor, 0, sizeof *tensor);
    return PBN_OK;
}

static int derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    for (int i = 0; i < x->rank; i++)
        dims[i] = i == 1 || (i > 1 && mode == PBN_PER_ACTIVATION) ? x->dims[i] : 1;
    pbn_packed_strides(x->rank, dims, PBN_CHANNELS_FIRST, strides);
    return tensor_set(derived, x->dtype == PBN_FLOAT64 ? PBN_FLOAT64 : PBN_FLOAT32, x->rank, dims, strides);
}

/* ---- elements: number i in the order of the dims, the last one fastest */

typedef struct view {
    const pbn_tensor *desc;
    void *data;
} view;

static void *place(view v, int64_t i) {
    int64_t offset = 0;
    for (int axis = v.desc->rank - 1; axis >= 0; axis--) {
        offset += i % v.desc->dims[axis] * v.desc->strides[axis];
        i /= v.desc->dims[axis];
    }
    return (char *)v.data + (size_t)offset * pbn_item_size(v.desc->dtype);
}

static double load_element(const void *at, int dtype) {
    return dtype == PBN_FLOAT64 ? *(const double *)at : *(const float *)at;
}

static double get(view v, int64_t i) { return load_element(place(v, i), v.desc->dtype); }

/* Element i becomes alpha * value + beta * what it was; with beta = 0 that is not read. */
static void put(view v, int64_t i, double alpha, double value, double beta) {
    void *at = place(v, i);
    const double before = beta == 0 ? 0 : beta * load_element(at, v.desc->dtype);
    pbn_encode(alpha * value + before, v.desc->dtype, at);
}

static view in(const pbn_tensor *desc, const void *data) { return (view){desc, (void *)(uintptr_t)data}; }

/* ---- what is computed, and what is refused */

static uint32_t capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    (void)mode, (void)layout, (void)rank;
    *why = "the loops are written for float32 and float64";
    if (dtype != PBN_FLOAT32 && dtype != PBN_FLOAT64)
        return 0;
    *why = NULL;
    return operation >= PBN_OP_FORWARD_TRAINING && operation <= PBN_OP_BACKWARD ? PBN_CAP_RUNS | PBN_CAP_BLEND_NATIVE
                                                                                : PBN_CAP_RUNS;
}

static int workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    (void)handle, (void)call;
    *bytes = 0;
    return PBN_OK;
}

/* `first` is computable and all others are of its dims and dtype; what is NULL is left out. */
static int check(const pbn_call *call, const pbn_tensor *first, const pbn_tensor *second, const pbn_tensor *third) {
    const pbn_tensor *others[] = {second, third};
    const char *why;
    if (capability(call->operation, call->mode, first->dtype, first->layout, first->rank, &why) == 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, why);
    if (call->activation != PBN_ACTIVATION_NONE)
        return pbn_refuse(PBN_E_UNSUPPORTED, "the loops fuse no activation");
    for (int i = 0; i < 2; i++)
        if (others[i] != NULL && (others[i]->dtype != first->dtype || others[i]->rank != first->rank ||
                                  memcmp(others[i]->dims, first->dims, (size_t)first->rank * sizeof *first->dims) != 0))
            return pbn_refuse(PBN_E_ARGUMENT, "the tensors differ in dims or dtype");
    return PBN_OK;
}

/* Which elements of x one parameter is of. */
typedef struct groups {
    int64_t count, members, size; /* parameters, elements of each, positions of an image that share one */
} groups;

static groups groups_of(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int64_t channels = x->dims[1], all = pbn_numel(x->rank, x->dims), size = all / x->dims[0] / channels;
    const int each = call->mode == PBN_PER_ACTIVATION;
    const int64_t count = each ? channels * size : channels;
    return (groups){count, all / count, each ? 1 : size};
}

static int64_t member(groups g, int64_t p, int64_t k) { return (k / g.size * g.count + p) * g.size + k % g.size; }

static view vector(const pbn_call *call, const void *data) { return in(call->param_desc, data); }

static void moments(groups g, int64_t p, view x, double *mean, double *variance) {
    double sum = 0, squares = 0;
    for (int64_t k = 0; k < g.members; k++)
        sum += get(x, member(g, p, k));
    *mean = sum / (double)g.members;
    for (int64_t k = 0; k < g.members; k++) {
        const double d = get(x, member(g, p, k)) - *mean;
        squares += d * d;
    }
    *variance = squares / (double)g.members;
}

static void apply(const pbn_call *call, groups g, int64_t p, double mean, double inverse) {
    const view x = in(call->x_desc, call->x), y = in(call->y_desc, call->y);
    const double scale = get(vector(call, call->scale), p), bias = get(vector(call, call->bias), p);
    for (int64_t k = 0; k < g.members; k++) {
        const int64_t i = member(g, p, k);
        put(y, i, call->alpha, scale * ((get(x, i) - mean) * inverse) + bias, call->beta);
    }
}

static int forward_training(pbn_handle *handle, const pbn_call *call) {
    const int status = check(call, call->x_desc, call->y_desc, NULL);
    (void)handle;
    if (status != PBN_OK)
        return status;
    const groups g = groups_of(call);
    const double m = (double)g.members, f = call->factor;
    for (int64_t p = 0; p < g.count; p++) {
        double mean, variance;
        moments(g, p, in(call->x_desc, call->x), &mean, &variance);
        const double inverse = 1 / sqrt(variance + call->epsilon);
        if (call->running_mean != NULL) {
            put(vector(call, call->running_mean), p, f, mean, 1 - f);
            put(vector(call, call->running_variance), p, f, variance * m / (m - 1), 1 - f);
        }
        if (call->saved_mean != NULL) {
            put(vector(call, call->saved_mean), p, 1, mean, 0);
            put(vector(call, call->saved_inv_variance), p, 1, inverse, 0);
        }
        apply(call, g, p, mean, inverse);
    }
    return PBN_OK;
}

static int forward_inference(pbn_handle *handle, const pbn_call *call) {
    const int status = check(call, call->x_desc, call->y_desc, NULL);
    (void)handle;
    if (status != PBN_OK)
        return status;
    const groups g = groups_of(call);
    for (int64_t p = 0; p < g.count; p++)
        apply(call, g, p, get(vector(call, call->running_mean), p),
              1 / sqrt(get(vector(call, call->running_variance), p) + call->epsilon));
    return PBN_OK;
}

static int backward(pbn_handle *handle, const pbn_call *call) {
    const view x = in(call->x_desc, call->x), dy = in(call->dy_desc, call->dy), dx = in(call->dx_desc, call->dx);
    const int status = check(call, call->x_desc, call->dy_desc, call->dx_desc);
    (void)handle;
    if (status != PBN_OK)
        return status;
    const groups g = groups_of(call);
    const double m = (double)g.members;
    for (int64_t p = 0; p < g.count; p++) {
        double mean, inverse, dscale = 0, dbias = 0;
        if (call->saved_mean != NULL) {
            mean = get(vector(call, call->saved_mean), p);
            inverse = get(vector(call, call->saved_inv_variance), p);
        } else {
            moments(g, p, x, &mean, &inverse);
            inverse = 1 / sqrt(inverse + call->epsilon);
        }
        for (int64_t k = 0; k < g.members; k++) {
            const double gradient = get(dy, member(g, p, k));
            dbias += gradient;
            dscale += gradient * (get(x, member(g, p, k)) - mean) * inverse;
        }
        const double factor = get(vector(call, call->scale), p) * inverse;
        for (int64_t k = 0; k < g.members; k++) {
            const int64_t i = member(g, p, k);
            const double normal = (get(x, i) - mean) * inverse;
            put(dx, i, call->alpha, factor * (get(dy, i) - dbias / m - normal * dscale / m), call->beta);
        }
        put(vector(call, call->dscale), p, call->alpha_param, dscale, call->beta_param);
        put(vector(call, call->dbias), p, call->alpha_param, dbias, call->beta_param);
    }
    return PBN_OK;
}

/* ---- elementwise: `number` is the value of element i before it is blended */

typedef double number(const pbn_call *call, int64_t i);

static int each(const pbn_call *call, const pbn_tensor *first, const pbn_tensor *second, view out, number *of,
                double alpha, double beta) {
    const int status = check(call, out.desc, first, second);
    for (int64_t i = 0; status == PBN_OK && i < pbn_numel(out.desc->rank, out.desc->dims); i++)
        put(out, i, alpha, of(call, i), beta);
    return status;
}

static double x_of(const pbn_call *call, int64_t i) { return get(in(call->x_desc, call->x), i); }

static double one_of(const pbn_call *call, int64_t i) {
    (void)call, (void)i;
    return 1;
}

static double relu_of(const pbn_call *call, int64_t i) { return x_of(call, i) <= 0 ? 0 : x_of(call, i); }

static double gradient_of(const pbn_call *call, int64_t i) {
    return x_of(call, i) > 0 ? get(in(call->dy_desc, call->dy), i) : 0;
}

static int axpby(pbn_handle *handle, const pbn_call *call) {
    (void)handle;
    return each(call, call->x_desc, NULL, in(call->y_desc, call->y), x_of, call->alpha, call->beta);
}

static int fill(pbn_handle *handle, const pbn_call *call) {
    (void)handle;
    return each(call, NULL, NULL, in(call->y_desc, call->y), one_of, call->alpha, 0);
}

static int relu(pbn_handle *handle, const pbn_call *call) {
    (void)handle;
    return each(call, call->x_desc, NULL, in(call->y_desc, call->y), relu_of, 1, 0);
}

static int relu_backward(pbn_handle *handle, const pbn_call *call) {
    (void)handle;
    return each(call, call->x_desc, call->dy_desc, in(call->dx_desc, call->dx), gradient_of, 1, 0);
}

const pbn_backend pbn_backend_loop = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_CPU,
    .name = "loop",
    .label = "Loop",
    .load = load,
    .status_name = status_name,
    .status_class = status_class,
    .last_error = last_error,
    .handle_device = handle_device,
    .device_count = device_count,
    .handle_create = handle_create,
    .handle_borrow = handle_borrow,
    .handle_destroy = handle_destroy,
    .handle_pointer = handle_pointer,
    .stream_set = stream_set,
    .stream_get = stream_get,
    .tensor_create = tensor_create,
    .tensor_borrow = tensor_borrow,
    .tensor_set = tensor_set,
    .tensor_get = tensor_get,
    .tensor_size = tensor_size,
    .tensor_destroy = tensor_destroy,
    .derive = derive,
    .capability = capability,
    .workspace_size = workspace_size,
    .forward_training = forward_training,
    .forward_inference = forward_inference,
    .backward = backward,
    .axpby = axpby,
    .fill = fill,
    .relu = relu,
    .relu_backward = relu_backward,
    .has_symbol = has_symbol,
};
