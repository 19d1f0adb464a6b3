/* What runs, and the imperative ("legacy") calls. Part of adapter.c. */

/* ---- what runs ---------------------------------------------------------------------------------- */

static const char no_relu[] = "this cuDNN library lacks the symbols of cudnnActivationForward and -Backward";
static const char no_fill[] = "this cuDNN library lacks the symbol cudnnSetTensor";
static const char no_fused[] = "cuDNN's plain batch-norm calls have no fused activation and no residual; its plans have";
static const char no_axpby[] = "this cuDNN library lacks the symbol cudnnTransformTensor, through which y = a*x + b*y goes";

static int has_activation(void) {
    return api.cudnnCreateActivationDescriptor != NULL && api.cudnnSetActivationDescriptor != NULL &&
           api.cudnnDestroyActivationDescriptor != NULL && api.cudnnActivationForward != NULL &&
           api.cudnnActivationBackward != NULL;
}

static uint32_t cudnn_capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    const uint32_t runs = PBN_CAP_RUNS | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
    const char *ignored;
    int number;
    if (why == NULL)
        why = &ignored;
    *why = NULL;
    if (rank < 2 || rank > PBN_MAX_RANK) {
        *why = bad_rank;
    } else if (rank == 2 && api.major == 8) {
        *why = rank2_in_8;
    } else if (pbn_to_vendor_dtype(dtypes, dtype, &number) != PBN_OK) {
        *why = pbn_reason;
    } else if (layout != PBN_CHANNELS_FIRST && layout != PBN_CHANNELS_LAST && layout != PBN_STRIDED) {
        *why = "the layout is none of CHANNELS_FIRST, CHANNELS_LAST, STRIDED";
    } else if (operation != PBN_OP_AXPBY && operation != PBN_OP_FILL && operation != PBN_OP_RELU &&
               operation != PBN_OP_RELU_BACKWARD && to_vendor_mode(mode, &number) != PBN_OK) {
        *why = bad_mode;
    } else {
        switch (operation) {
        case PBN_OP_DERIVE:
            return PBN_CAP_RUNS;
        case PBN_OP_AXPBY:
            if (api.major != 0 && api.cudnnTransformTensor == NULL) {
                *why = no_axpby;
                return 0;
            }
            break;
        case PBN_OP_FILL:
            if (api.major != 0 && api.cudnnSetTensor == NULL) {
                *why = no_fill;
                return 0;
            }
            return runs;
        case PBN_OP_RELU:
        case PBN_OP_RELU_BACKWARD:
            if (api.major != 0 && !has_activation()) {
                *why = no_relu;
                return 0;
            }
            return runs;
        case PBN_OP_FORWARD_TRAINING:
        case PBN_OP_FORWARD_INFERENCE:
        case PBN_OP_BACKWARD:
            break;
        default:
            *why = "the operation is unknown";
            return 0;
        }
        return runs | PBN_CAP_BLEND_NATIVE | (operation == PBN_OP_AXPBY ? 0u : (uint32_t)PBN_CAP_RESIDUAL);
    }
    return 0;
}

static int fuses(const pbn_call *call) {
    return call->activation != PBN_ACTIVATION_NONE || pbn_has_residual(call);
}

static int cudnn_workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    if (handle == NULL || call == NULL || bytes == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    *bytes = 0; /* cuDNN blends by itself, and the plain entry points take no workspace */
    return PBN_OK;
}

/* ---- calls -------------------------------------------------------------------------------------- */

/* alpha and beta point to a double when x is float64 and to a float otherwise; cuDNN cannot be told which. */
typedef union scalar {
    float narrow;
    double wide;
} scalar;

static int to_scalar(double value, int dtype, scalar *out) {
    if (dtype == PBN_FLOAT64) {
        out->wide = value;
        return PBN_OK;
    }
    if (!(value >= -FLT_MAX && value <= FLT_MAX))
        return pbn_refuse(PBN_E_ARGUMENT, "a blending factor is outside the range of the float32 that cuDNN reads");
    out->narrow = (float)value;
    return PBN_OK;
}

static int to_compute(const pbn_tensor *t, void **desc) {
    if (t == NULL || t->rank == 0)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (t->compute == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, not_mergeable);
    *desc = t->compute;
    return PBN_OK;
}

static inline uintptr_t bits(const void *pointer) {
    return (uintptr_t)pointer;
}

/* A misaligned access is no status in cuDNN: it is reported by the next synchronisation and the CUDA context
 * is lost. The 16-bit batch-norm kernels load pairs of elements, except where every tensor is channels-last;
 * cudnnTransformTensor, cudnnSetTensor and the activation calls take any element address
 * (tried on an H200 with cuDNN 9.19).
 * `data` and `params` are the call's addresses or-ed together. */
static int check_alignment(int dtype, int any_element, uintptr_t data, uintptr_t params) {
    uintptr_t element = pbn_item_size(dtype);
    uintptr_t param = dtype == PBN_FLOAT64 ? 8 : 4;
    if ((data & (element - 1)) != 0 || (params & (param - 1)) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, "a pointer is not aligned to its element size");
    if (element == 2 && !any_element && (data & 3) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, "known defect cudnn-misaligned: float16 and bfloat16 tensors that are not "
                                             "channels-last must be 4-byte aligned: cuDNN's kernels would lose the "
                                             "CUDA context");
    return PBN_OK;
}

static int is_channels_last(const pbn_tensor *t) {
    return t != NULL && t->layout == PBN_CHANNELS_LAST;
}

static int check_pair(const void *first, const void *second) {
    if ((first == NULL) != (second == NULL))
        return pbn_refuse(PBN_E_ARGUMENT, "of a pair of statistics one pointer is given and the other is missing");
    return PBN_OK;
}

/* What cuDNN's batch-norm calls take from one of ours; the other data tensors are the call's own. */
typedef struct batch_norm {
    void *x_desc, *param_desc;
    int mode;
    scalar alpha, beta;
} batch_norm;

/* Checks what the three have in common. `there`: whether every pointer that may not be NULL is given; `any_element`:
 * whether every tensor is channels-last; `data` and `params` as for check_alignment. */
static int to_batch_norm(const pbn_handle *handle, const pbn_call *call, int there, int any_element, uintptr_t data,
                         uintptr_t params, batch_norm *out) {
    int status;
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (!there)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    if ((status = to_vendor_mode(call->mode, &out->mode)) != PBN_OK ||
        (status = to_compute(call->x_desc, &out->x_desc)) != PBN_OK ||
        (status = to_compute(call->param_desc, &out->param_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha, call->x_desc->dtype, &out->alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, call->x_desc->dtype, &out->beta)) != PBN_OK ||
        (status = check_pair(call->running_mean, call->running_variance)) != PBN_OK ||
        (status = check_pair(call->saved_mean, call->saved_inv_variance)) != PBN_OK)
        return status;
    return check_alignment(call->x_desc->dtype, any_element, data, params);
}

static int cudnn_forward_training(pbn_handle *handle, const pbn_call *call) {
    batch_norm n;
    void *y_desc;
    int status = to_batch_norm(
        handle, call, call->x != NULL && call->y != NULL && call->scale != NULL && call->bias != NULL,
        is_channels_last(call->x_desc) && is_channels_last(call->y_desc), bits(call->x) | bits(call->y),
        bits(call->scale) | bits(call->bias) | bits(call->running_mean) | bits(call->running_variance) |
            bits(call->saved_mean) | bits(call->saved_inv_variance),
        &n);
    if (status != PBN_OK || (status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationForwardTraining(
        handle->vendor, n.mode, &n.alpha, &n.beta, n.x_desc, call->x, y_desc, call->y, n.param_desc, call->scale,
        call->bias, call->factor, call->running_mean, call->running_variance, call->epsilon, call->saved_mean,
        call->saved_inv_variance);
}

static int cudnn_forward_inference(pbn_handle *handle, const pbn_call *call) {
    batch_norm n;
    void *y_desc;
    int status = to_batch_norm(
        handle, call,
        call->x != NULL && call->y != NULL && call->scale != NULL && call->bias != NULL &&
            call->running_mean != NULL && call->running_variance != NULL,
        is_channels_last(call->x_desc) && is_channels_last(call->y_desc), bits(call->x) | bits(call->y),
        bits(call->scale) | bits(call->bias) | bits(call->running_mean) | bits(call->running_variance), &n);
    if (status != PBN_OK || (status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationForwardInference(
        handle->vendor, n.mode, &n.alpha, &n.beta, n.x_desc, call->x, y_desc, call->y, n.param_desc, call->scale,
        call->bias, call->running_mean, call->running_variance, call->epsilon);
}

static int cudnn_backward(pbn_handle *handle, const pbn_call *call) {
    batch_norm n;
    scalar alpha_param, beta_param;
    void *dy_desc, *dx_desc;
    int status = to_batch_norm(
        handle, call,
        call->x != NULL && call->dy != NULL && call->dx != NULL && call->scale != NULL && call->dscale != NULL &&
            call->dbias != NULL,
        is_channels_last(call->x_desc) && is_channels_last(call->dy_desc) && is_channels_last(call->dx_desc),
        bits(call->x) | bits(call->dy) | bits(call->dx),
        bits(call->scale) | bits(call->dscale) | bits(call->dbias) | bits(call->saved_mean) |
            bits(call->saved_inv_variance),
        &n);
    if (status != PBN_OK || (status = to_compute(call->dy_desc, &dy_desc)) != PBN_OK ||
        (status = to_compute(call->dx_desc, &dx_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha_param, call->x_desc->dtype, &alpha_param)) != PBN_OK ||
        (status = to_scalar(call->beta_param, call->x_desc->dtype, &beta_param)) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationBackward(
        handle->vendor, n.mode, &n.alpha, &n.beta, &alpha_param, &beta_param, n.x_desc, call->x, dy_desc, call->dy,
        dx_desc, call->dx, n.param_desc, call->scale, call->dscale, call->dbias, call->epsilon, call->saved_mean,
        call->saved_inv_variance);
}

/* y = a*x + b*y for tensors of the same dims with strides of their own: cudnnTransformTensor is the call that documents
 * exactly this, layouts differing included; x and y must not overlap there. That every dtype runs and that beta = 0
 * leaves y unread (the vendor's general rule for blending) is documented, not measured. */
static int cudnn_axpby(pbn_handle *handle, const pbn_call *call) {
    scalar alpha, beta;
    void *x_desc, *y_desc;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha, call->x_desc->dtype, &alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, call->x_desc->dtype, &beta)) != PBN_OK ||
        /* which of these kernels load pairs is unknown, so all of them are held to it */
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->y), 0)) != PBN_OK)
        return status;
    if (api.cudnnTransformTensor == NULL)
        return pbn_refuse(PBN_E_SYMBOL, no_axpby);
    forget_vendor_text();
    return api.cudnnTransformTensor(handle->vendor, &alpha, x_desc, call->x, &beta, y_desc, call->y);
}

/* cudnnSetTensor reads a float for 16-bit tensors, not the tensor's own type as documented: seen on an H200 with
 * cuDNN 9.19, where the bits of a half gave zeros. Rounded here, so that the vendor's own conversion is exact. */
static int cudnn_fill(pbn_handle *handle, const pbn_call *call) {
    void *y_desc;
    double wide;
    float narrow;
    int status, is_double;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = check_alignment(call->y_desc->dtype, 1, bits(call->y), 0)) != PBN_OK)
        return status;
    if (api.cudnnSetTensor == NULL)
        return pbn_refuse(PBN_E_SYMBOL, no_fill);
    is_double = call->y_desc->dtype == PBN_FLOAT64;
    wide = call->alpha;
    narrow = (float)(call->y_desc->dtype == PBN_FLOAT32 || is_double ? wide : pbn_round(wide, call->y_desc->dtype));
    forget_vendor_text();
    return api.cudnnSetTensor(handle->vendor, y_desc, call->y, is_double ? (void *)&wide : (void *)&narrow);
}

/* The descriptor is host memory that a call reads before it returns. */
static int new_relu(void **activation) {
    int status;
    if (!has_activation())
        return pbn_refuse(PBN_E_SYMBOL, no_relu);
    status = api.cudnnCreateActivationDescriptor(activation);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    status = api.cudnnSetActivationDescriptor(*activation, PBN_CUDNN_ACTIVATION_RELU, PBN_CUDNN_PROPAGATE_NAN, 0.0);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        api.cudnnDestroyActivationDescriptor(*activation);
    return status;
}

static int cudnn_relu(pbn_handle *handle, const pbn_call *call) {
    scalar one, zero;
    void *x_desc, *y_desc, *activation;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = to_scalar(1, call->x_desc->dtype, &one)) != PBN_OK ||
        (status = to_scalar(0, call->x_desc->dtype, &zero)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->y), 0)) != PBN_OK)
        return status;
    forget_vendor_text();
    status = new_relu(&activation);
    if (status != PBN_OK)
        return status;
    status = api.cudnnActivationForward(handle->vendor, activation, &one, x_desc, call->x, &zero, y_desc, call->y);
    api.cudnnDestroyActivationDescriptor(activation);
    return status;
}

/* Axes of length 1 have no place in memory, but cuDNN compares their strides too. */
static int same_strides(const pbn_tensor *a, const pbn_tensor *b) {
    if (a->rank != b->rank)
        return 0;
    for (int i = 0; i < a->rank; i++)
        if (a->dims[i] != b->dims[i] || (a->dims[i] > 1 && a->strides[i] != b->strides[i]))
            return 0;
    return 1;
}

/* cudnnActivationBackward wants the activation's output too; its sign is that of x, so x is passed. It takes
 * y and dy of the same strides and x and dx of the same strides only (9.19), which makes that one for all. */
static int cudnn_relu_backward(pbn_handle *handle, const pbn_call *call) {
    scalar one, zero;
    void *desc, *activation;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->dy == NULL || call->dx == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (call->x_desc == NULL || call->dy_desc == NULL || call->dx_desc == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (!same_strides(call->x_desc, call->dy_desc) || !same_strides(call->x_desc, call->dx_desc))
        return pbn_refuse(PBN_E_UNSUPPORTED, "cudnnActivationBackward takes x, dy and dx of the same strides only");
    if ((status = to_compute(call->x_desc, &desc)) != PBN_OK ||
        (status = to_scalar(1, call->x_desc->dtype, &one)) != PBN_OK ||
        (status = to_scalar(0, call->x_desc->dtype, &zero)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->dy) | bits(call->dx), 0)) !=
            PBN_OK)
        return status;
    forget_vendor_text();
    status = new_relu(&activation);
    if (status != PBN_OK)
        return status;
    status = api.cudnnActivationBackward(handle->vendor, activation, &one, desc, call->x, desc, call->dy, desc, call->x,
                                         &zero, desc, call->dx);
    api.cudnnDestroyActivationDescriptor(activation);
    return status;
}
