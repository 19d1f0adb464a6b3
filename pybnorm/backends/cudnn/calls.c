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

/* The optional symbol that an operation lacks; NULL where it lacks none. */
static const char *lacks(int operation) {
    switch (operation) {
    case PBN_OP_AXPBY:
        return api.cudnnTransformTensor == NULL ? no_axpby : NULL;
    case PBN_OP_FILL:
        return api.cudnnSetTensor == NULL ? no_fill : NULL;
    case PBN_OP_RELU:
    case PBN_OP_RELU_BACKWARD:
        return has_activation() ? NULL : no_relu;
    default:
        return NULL;
    }
}

static uint32_t cudnn_capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    const uint32_t runs = PBN_CAP_RUNS | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
    (void)mode, (void)dtype, (void)layout;
    *why = rank == 2 && api.major == 8 ? rank2_in_8 : lacks(operation);
    if (*why != NULL)
        return 0;
    switch (operation) {
    case PBN_OP_DERIVE:
        return PBN_CAP_RUNS;
    case PBN_OP_FILL:
    case PBN_OP_RELU:
    case PBN_OP_RELU_BACKWARD:
        return runs;
    case PBN_OP_AXPBY:
        return runs | PBN_CAP_BLEND_NATIVE;
    default:
        return runs | PBN_CAP_BLEND_NATIVE | PBN_CAP_RESIDUAL;
    }
}

static int fuses(const pbn_call *call) {
    return call->activation != PBN_ACTIVATION_NONE || pbn_has_residual(call);
}

static int cudnn_workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    (void)handle;
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

static scalar to_scalar(double value, int dtype) {
    return dtype == PBN_FLOAT64 ? (scalar){.wide = value} : (scalar){.narrow = (float)value};
}

static int to_compute(const pbn_tensor *t, void **desc) {
    if (t->compute == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, not_mergeable);
    *desc = t->compute;
    return PBN_OK;
}

/* The members of pbn_call that are tensors: of data, and parameters. */
#define DATA_MEMBERS(M) M(x) M(y) M(dy) M(dx) M(z) M(dz)
#define PARAM_MEMBERS(M) \
    M(scale) M(bias) M(running_mean) M(running_variance) M(saved_mean) M(saved_inv_variance) M(dscale) M(dbias)
#define OR_BITS(member) | (uintptr_t)call->member

static uintptr_t data_bits(const pbn_call *call) {
    return 0 DATA_MEMBERS(OR_BITS);
}

/* What is added before the activation, or in backward its gradient; NULL without. */
static const pbn_tensor *residual(const pbn_call *call) {
    return call->operation == PBN_OP_BACKWARD ? call->dz_desc : call->z_desc;
}

/* Whether it holds of every data tensor of the call. */
static int every(const pbn_call *call, int (*holds)(const pbn_tensor *)) {
    const pbn_tensor *const all[] = {call->x_desc, call->y_desc, call->dy_desc, call->dx_desc, residual(call)};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i] != NULL && !holds(all[i]))
            return 0;
    return 1;
}

static int is_channels_last(const pbn_tensor *t) {
    return t->layout == PBN_CHANNELS_LAST;
}

/* A misaligned access is no status in cuDNN: it is reported by the next synchronisation and the CUDA context
 * is lost. The 16-bit batch-norm kernels load pairs of elements, except where every tensor is channels-last;
 * cudnnTransformTensor, cudnnSetTensor and the activation calls take any element address
 * (tried on an H200 with cuDNN 9.19). */
static int check_alignment(const pbn_call *call) {
    if (pbn_item_size(call->x_desc->dtype) == 2 && !every(call, is_channels_last) && (data_bits(call) & 3) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, "known defect cudnn-misaligned: float16 and bfloat16 tensors that are not "
                                             "channels-last must be 4-byte aligned: cuDNN's kernels would lose the "
                                             "CUDA context");
    return PBN_OK;
}

/* What cuDNN's batch-norm calls take from one of ours; the other data tensors are the call's own. */
typedef struct batch_norm {
    void *x_desc, *param_desc;
    int mode;
    scalar alpha, beta;
} batch_norm;

/* What the three have in common. */
static int to_batch_norm(const pbn_call *call, batch_norm *out) {
    int status;
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    out->mode = modes[call->mode];
    out->alpha = to_scalar(call->alpha, call->x_desc->dtype);
    out->beta = to_scalar(call->beta, call->x_desc->dtype);
    if ((status = to_compute(call->x_desc, &out->x_desc)) != PBN_OK ||
        (status = to_compute(call->param_desc, &out->param_desc)) != PBN_OK ||
        (status = check_alignment(call)) != PBN_OK)
        return status;
    forget_vendor_text();
    return PBN_OK;
}

static int cudnn_forward_training(pbn_handle *handle, const pbn_call *call) {
    batch_norm n;
    void *y_desc;
    int status;
    if ((status = to_batch_norm(call, &n)) != PBN_OK || (status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
        return status;
    return api.cudnnBatchNormalizationForwardTraining(
        handle->vendor, n.mode, &n.alpha, &n.beta, n.x_desc, call->x, y_desc, call->y, n.param_desc, call->scale,
        call->bias, call->factor, call->running_mean, call->running_variance, call->epsilon, call->saved_mean,
        call->saved_inv_variance);
}

static int cudnn_forward_inference(pbn_handle *handle, const pbn_call *call) {
    batch_norm n;
    void *y_desc;
    int status;
    if ((status = to_batch_norm(call, &n)) != PBN_OK || (status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
        return status;
    return api.cudnnBatchNormalizationForwardInference(
        handle->vendor, n.mode, &n.alpha, &n.beta, n.x_desc, call->x, y_desc, call->y, n.param_desc, call->scale,
        call->bias, call->running_mean, call->running_variance, call->epsilon);
}

static int cudnn_backward(pbn_handle *handle, const pbn_call *call) {
    const scalar alpha_param = to_scalar(call->alpha_param, call->x_desc->dtype);
    const scalar beta_param = to_scalar(call->beta_param, call->x_desc->dtype);
    batch_norm n;
    void *dy_desc, *dx_desc;
    int status;
    if ((status = to_batch_norm(call, &n)) != PBN_OK || (status = to_compute(call->dy_desc, &dy_desc)) != PBN_OK ||
        (status = to_compute(call->dx_desc, &dx_desc)) != PBN_OK)
        return status;
    return api.cudnnBatchNormalizationBackward(
        handle->vendor, n.mode, &n.alpha, &n.beta, &alpha_param, &beta_param, n.x_desc, call->x, dy_desc, call->dy,
        dx_desc, call->dx, n.param_desc, call->scale, call->dscale, call->dbias, call->epsilon, call->saved_mean,
        call->saved_inv_variance);
}

/* y = a*x + b*y for tensors of the same dims with strides of their own: cudnnTransformTensor is the call that documents
 * exactly this, layouts differing included; x and y must not overlap there. That every dtype runs and that beta = 0
 * leaves y unread (the vendor's general rule for blending) is documented, not measured. */
static int cudnn_axpby(pbn_handle *handle, const pbn_call *call) {
    const scalar alpha = to_scalar(call->alpha, call->x_desc->dtype), beta = to_scalar(call->beta, call->x_desc->dtype);
    void *x_desc, *y_desc;
    int status;
    if ((status = to_compute(call->x_desc, &x_desc)) != PBN_OK || (status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
        return status;
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
    if ((status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
        return status;
    is_double = call->y_desc->dtype == PBN_FLOAT64;
    wide = call->alpha;
    narrow = (float)(call->y_desc->dtype == PBN_FLOAT32 || is_double ? wide : pbn_round(wide, call->y_desc->dtype));
    forget_vendor_text();
    return api.cudnnSetTensor(handle->vendor, y_desc, call->y, is_double ? (void *)&wide : (void *)&narrow);
}

/* The descriptor is host memory that a call reads before it returns. */
static int new_relu(void **activation) {
    int status = api.cudnnCreateActivationDescriptor(activation);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    status = api.cudnnSetActivationDescriptor(*activation, PBN_CUDNN_ACTIVATION_RELU, PBN_CUDNN_PROPAGATE_NAN, 0.0);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        api.cudnnDestroyActivationDescriptor(*activation);
    return status;
}

static int cudnn_relu(pbn_handle *handle, const pbn_call *call) {
    const scalar one = to_scalar(1, call->x_desc->dtype), zero = to_scalar(0, call->x_desc->dtype);
    void *x_desc, *y_desc, *activation;
    int status;
    if ((status = to_compute(call->x_desc, &x_desc)) != PBN_OK || (status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
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
    for (int i = 0; i < a->rank; i++)
        if (a->dims[i] > 1 && a->strides[i] != b->strides[i])
            return 0;
    return 1;
}

/* cudnnActivationBackward wants the activation's output too; its sign is that of x, so x is passed. It takes
 * y and dy of the same strides and x and dx of the same strides only (9.19), which makes that one for all. */
static int cudnn_relu_backward(pbn_handle *handle, const pbn_call *call) {
    const scalar one = to_scalar(1, call->x_desc->dtype), zero = to_scalar(0, call->x_desc->dtype);
    void *desc, *activation;
    int status;
    if (!same_strides(call->x_desc, call->dy_desc) || !same_strides(call->x_desc, call->dx_desc))
        return pbn_refuse(PBN_E_UNSUPPORTED, "cudnnActivationBackward takes x, dy and dx of the same strides only");
    if ((status = to_compute(call->x_desc, &desc)) != PBN_OK)
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
