/* What runs, the checks before it, and the calls. Part of adapter.c. */

/* ---------------------------------------------------------------- what MIOpen can do right */

/* Whether the loaded library has the call of `operation` with a fused activation. */
static int has_fused(int operation) {
    return operation == PBN_OP_FORWARD_TRAINING    ? api.miopenBatchNormForwardTrainingActivation != NULL
           : operation == PBN_OP_FORWARD_INFERENCE ? api.miopenBatchNormForwardInferenceActivation != NULL
           : operation == PBN_OP_BACKWARD          ? api.miopenBatchNormBackwardActivation != NULL
                                                   : 0;
}

/* NULL when the combination runs. What MIOpen refuses with a status of its own, or gets wrong only
 * for some sizes of a supported combination, is not refused here: the vendor's answer is the answer. */
static const char *refused(int operation, int mode, int dtype, int layout) {
    if (operation == PBN_OP_AXPBY)
        return dtype == PBN_FLOAT64 ? "miopenOpTensor reads its factors as float32 for float64 tensors too" : NULL;
    if (operation == PBN_OP_FILL)
        return dtype == PBN_FLOAT64 ? "miopenSetTensor has no float64 kernel: its status is miopenStatusUnknownError"
                                    : NULL;
    if (operation == PBN_OP_RELU || operation == PBN_OP_RELU_BACKWARD) {
        if (dtype == PBN_FLOAT64 || dtype == PBN_BFLOAT16)
            return "MIOpen's activation kernels are compiled for float32 and float16 only";
        return layout == PBN_STRIDED ? "miopenActivationForward and -Backward are used on packed tensors only" : NULL;
    }
    if (mode == PBN_SPATIAL_PERSISTENT)
        return "MIOpen knows two modes; it would take SPATIAL_PERSISTENT for PER_ACTIVATION";
    if (dtype == PBN_FLOAT64)
        return "MIOpen has no float64 batch norm: no solver takes it, and float32 parameters are derived for it";
    if (operation == PBN_OP_DERIVE)
        return NULL; /* a matter of sizes only */
    if (layout == PBN_STRIDED)
        return "MIOpen takes packed tensors only; inference and backward ignore strides and return success";
    if (layout == PBN_CHANNELS_LAST && mode == PBN_PER_ACTIVATION)
        return "MIOpen's channels-last per-activation kernels read parameters in H, W, C order, "
               "against the descriptor that it derives";
    if (layout == PBN_CHANNELS_LAST && operation == PBN_OP_FORWARD_INFERENCE && loaded < 305)
        return "MIOpen's own kernels have no channels-last inference";
    return NULL;
}

static uint32_t capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    const char *reason = refused(operation, mode, dtype, layout);
    uint32_t bits = PBN_CAP_RUNS;
    *why = reason;
    if (reason != NULL)
        return 0;
    if (rank != 4)
        bits |= PBN_CAP_FOLDED;
    if (operation == PBN_OP_AXPBY && dtype != PBN_BFLOAT16) /* whose tensors are copied only */
        bits |= layout == PBN_STRIDED ? PBN_CAP_BLEND_SCRATCH : PBN_CAP_BLEND_NATIVE;
    else if (operation >= PBN_OP_FORWARD_TRAINING && operation <= PBN_OP_BACKWARD && dtype != PBN_BFLOAT16)
        bits |= PBN_CAP_BLEND_SCRATCH;
    if (operation >= PBN_OP_FORWARD_TRAINING && operation <= PBN_OP_BACKWARD && loaded >= 304)
        bits |= PBN_CAP_IN_PLACE; /* of older versions nothing is known */
    if (operation == PBN_OP_FORWARD_INFERENCE && api.miopenBatchNormalizationForwardInferenceInvVariance != NULL)
        bits |= PBN_CAP_INVERSE;
    if (has_fused(operation) && mode == PBN_SPATIAL)
        bits |= PBN_CAP_ACTIVATION;
    /* miopenOpTensor rounds each product to float16 before it adds them, and the scratch is float16 too */
    if ((bits & (PBN_CAP_BLEND_NATIVE | PBN_CAP_BLEND_SCRATCH)) != 0 && dtype == PBN_FLOAT16)
        bits |= PBN_CAP_BLEND_ROUNDS;
    return bits;
}

/* ---------------------------------------------------------------- checks before a call */

/* MIOpen looks at x's descriptor alone. */
static int check_like_x(const pbn_tensor *t, const pbn_tensor *x) {
    if (t->layout != x->layout)
        return pbn_refuse(PBN_E_UNSUPPORTED, "MIOpen takes y, dy and dx to lie in memory as x does, whatever their "
                                             "descriptors say");
    return PBN_OK;
}

static int check_x(const pbn_tensor *x) {
    int64_t n = 1;
    for (int i = 0; i < x->rank && n <= INT_MAX; i++)
        n *= x->dims[i]; /* below 2**62, as n was below 2**31 */
    return n <= INT_MAX ? PBN_OK
                        : pbn_refuse(PBN_E_UNSUPPORTED, "MIOpen's kernels index with 32 bits: 2**31 elements or more");
}

/* MIOpen reads factors as float, and miopenOpTensor rounds them to the tensors' type: one that
 * overflows or loses bits to underflow there would be another factor. */
#define CHECK_FACTOR(name, value, dtype)                                                                         \
    check_factor(value, dtype, name ": MIOpen reads it as float32, where it must be 0 or a normal number",      \
                 name ": miopenOpTensor rounds it to float16 with float16 data, so it must be 0 or from 2**-14 " \
                      "to 65504 in magnitude")

static int check_factor(double value, int dtype, const char *reason, const char *half_reason) {
    double low = dtype == PBN_FLOAT16 ? 0x1p-14 : FLT_MIN;
    double high = dtype == PBN_FLOAT16 ? 65504.0 : FLT_MAX;
    if (value == 0 || (fabs(value) >= low && fabs(value) <= high))
        return PBN_OK;
    return pbn_refuse(PBN_E_UNSUPPORTED, dtype == PBN_FLOAT16 ? half_reason : reason);
}

/* Whether y = a*x + b*y is more than a copy, and whether one miopenOpTensor call on x and y as they lie does it. */
static int computes(const pbn_call *call) {
    return call->alpha != 1 || call->beta != 0;
}

static int one_order(const pbn_call *call) {
    return call->x_desc->layout != PBN_STRIDED && call->x_desc->layout == call->y_desc->layout;
}

static int check_span(const pbn_tensor *t) {
    if (pbn_span(t->rank, t->dims, t->strides) <= INT_MAX)
        return PBN_OK;
    return pbn_refuse(PBN_E_UNSUPPORTED, "MIOpen's kernels index with 32 bits: strides reach over 2**31 elements");
}

static int check_axpby(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    int status;
    if ((status = check_span(x)) != PBN_OK || (status = check_span(call->y_desc)) != PBN_OK)
        return status;
    if (x->dtype == PBN_BFLOAT16 && computes(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, "bfloat16 tensors are copied only, with factors 1 and 0: miopenOpTensor's "
                                             "OpenCL source does not compile for that type");
    status = CHECK_FACTOR("a", call->alpha, x->dtype);
    return status != PBN_OK ? status : CHECK_FACTOR("b", call->beta, x->dtype);
}

static int check_activation(const pbn_call *call) {
    if (call->activation == PBN_ACTIVATION_NONE)
        return PBN_OK;
    if (!has_fused(call->operation))
        return pbn_refuse(PBN_E_UNSUPPORTED, "this libMIOpen has no batch norm with a fused activation; 3.5 added it: "
                                             "miopenBatchNormForwardTrainingActivation, -ForwardInferenceActivation, "
                                             "-BackwardActivation");
    if (call->mode != PBN_SPATIAL) /* 3.5.1: none of the three calls applies it, and each returns success */
        return pbn_refuse(PBN_E_UNSUPPORTED, "MIOpen's per-activation kernels leave the fused activation out");
    if (call->alpha != 1 && call->x_desc->dtype == PBN_BFLOAT16)
        return pbn_refuse(PBN_E_UNSUPPORTED, "alpha other than 1 after an activation needs a product that MIOpen "
                                             "lacks for bfloat16: miopenOpTensor does not compile for it");
    /* after the activation alpha is a factor of miopenOpTensor, like beta */
    return CHECK_FACTOR("alpha with an activation", call->alpha, call->x_desc->dtype);
}

static int check_call(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int operation = call->operation;
    int status = check_x(x);
    if (status != PBN_OK)
        return status;
    if (operation == PBN_OP_AXPBY)
        return check_axpby(call);
    if (operation == PBN_OP_BACKWARD) {
        if ((status = check_like_x(call->dy_desc, x)) != PBN_OK || (status = check_like_x(call->dx_desc, x)) != PBN_OK)
            return status;
    } else if ((status = check_like_x(call->y_desc, x)) != PBN_OK) {
        return status;
    }
    if (call->param_desc->layout != PBN_CHANNELS_FIRST)
        return pbn_refuse(PBN_E_ARGUMENT, "the parameter descriptor is not a contiguous vector");
    if (call->beta != 0 && x->dtype == PBN_BFLOAT16)
        return pbn_refuse(PBN_E_UNSUPPORTED, "beta other than 0 on bfloat16 data needs an addition that MIOpen lacks: "
                                             "miopenOpTensor does not compile for bfloat16");
    if ((status = CHECK_FACTOR("alpha", call->alpha, PBN_FLOAT32)) != PBN_OK ||
        (status = CHECK_FACTOR("beta", call->beta, x->dtype)) != PBN_OK)
        return status;
    if (operation == PBN_OP_BACKWARD &&
        ((status = CHECK_FACTOR("alpha_param", call->alpha_param, PBN_FLOAT32)) != PBN_OK ||
         (status = CHECK_FACTOR("beta_param", call->beta_param, PBN_FLOAT32)) != PBN_OK))
        return status;
    return check_activation(call);
}

/* ---------------------------------------------------------------- alpha and beta
 *
 * MIOpen's batch norm takes (1, 0) only. The rest is composed so that the prior value is not read
 * when beta is 0, and so that data is rounded as seldom as possible:
 *   alpha       scale and bias (forward) or scale (backward: dx is linear in it, dscale and dbias
 *               do not depend on it) are multiplied by alpha in float32 beforehand. No type of x
 *               is rounded twice, and bfloat16 works.
 *               Not with an activation, whose bounds (forward) and mask (backward) would move:
 *               then alpha goes the way of beta.
 *   beta        the result goes to scratch, and one addition puts it onto beta * prior.
 *   alpha_param, beta_param
 *               dscale and dbias go to scratch, and from there, blended, to their place. */

typedef struct workspace_plan {
    size_t scale, bias, data, dscale, dbias; /* bytes of each piece, 0 when it is not needed; laid out in this order */
    size_t total;
} workspace_plan;

static size_t piece(size_t bytes, size_t *total) {
    bytes = (bytes + 255) / 256 * 256;
    *total += bytes;
    return bytes;
}

static workspace_plan plan_workspace(const pbn_call *call) {
    const int operation = call->operation;
    workspace_plan plan = {0, 0, 0, 0, 0, 0};
    size_t data, params;
    data = (size_t)pbn_numel(call->x_desc->rank, call->x_desc->dims) * pbn_item_size(call->x_desc->dtype);
    if (operation == PBN_OP_AXPBY) { /* x and y, packed */
        if (computes(call) && !one_order(call))
            plan.data = piece(data, &plan.total);
        if (plan.data > 0 && call->beta != 0)
            piece(data, &plan.total);
        return plan;
    }
    params = (size_t)pbn_numel(call->param_desc->rank, call->param_desc->dims) * sizeof(float);
    if (call->alpha != 1 && call->activation == PBN_ACTIVATION_NONE) {
        plan.scale = piece(params, &plan.total);
        if (operation != PBN_OP_BACKWARD)
            plan.bias = piece(params, &plan.total);
    }
    if (call->beta != 0 || (call->alpha != 1 && call->activation != PBN_ACTIVATION_NONE))
        plan.data = piece(data, &plan.total);
    if (operation == PBN_OP_BACKWARD && (call->alpha_param != 1 || call->beta_param != 0)) {
        plan.dscale = piece(params, &plan.total);
        plan.dbias = piece(params, &plan.total);
    }
    return plan;
}

static int workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    const int status = check_call(call);
    (void)handle;
    if (status == PBN_OK)
        *bytes = plan_workspace(call).total;
    return status;
}

/* out = a * A + b * B on one packed layout; with b = 0, B and the former out are not read. The
 * maximum of a*A with itself is a*A for every A, where a*A + 0*A would turn infinities into NaN. */
static int op_tensor(pbn_handle *handle, const pbn_tensor *t, double a, const void *A, double b, const void *B,
                     void *out) {
    float fa = (float)a, fb = (float)b, zero = 0;
    if (b == 0)
        return api.miopenOpTensor(handle->vendor, PBN_miopenTensorOpMax, &fa, t->compute, A, &fa, t->compute, A, &zero,
                                  t->compute, out);
    return api.miopenOpTensor(handle->vendor, PBN_miopenTensorOpAdd, &fa, t->compute, A, &fb, t->compute, B, &zero,
                              t->compute, out);
}

/* Where a call reads its parameters from and puts its results, after the workspace took what it must. */
typedef struct routes {
    workspace_plan plan;
    const void *scale, *bias;
    void *out, *dscale, *dbias;
    void *activation; /* the vendor's descriptor, NULL without one */
} routes;

/* The vendor's descriptor of the call's activation, which has passed check_activation; RELU's of a call without one. */
static int new_activation(const pbn_call *call, void **activation) {
    const int clipped = call->activation == PBN_ACTIVATION_CLIPPED_RELU;
    const int clamp = call->activation == PBN_ACTIVATION_CLAMP;
    int status;
    *activation = NULL;
    status = api.miopenCreateActivationDescriptor(activation);
    if (status != PBN_miopenStatusSuccess)
        return status;
    status = api.miopenSetActivationDescriptor(
        *activation,
        clamp     ? PBN_miopenActivationCLAMP
        : clipped ? PBN_miopenActivationCLIPPEDRELU
                  : PBN_miopenActivationRELU,
        clamp ? call->activation_low : clipped ? call->activation_high : 0, clamp ? call->activation_high : 0, 0);
    if (status != PBN_miopenStatusSuccess) {
        api.miopenDestroyActivationDescriptor(*activation);
        *activation = NULL;
    }
    return status;
}

static int prepare(pbn_handle *handle, const pbn_call *call, routes *to) {
    char *next = call->workspace;
    int status = check_call(call);
    if (status != PBN_OK)
        return status;
    *to = (routes){.plan = plan_workspace(call),
                   .scale = call->scale,
                   .bias = call->bias,
                   .out = call->operation == PBN_OP_BACKWARD ? call->dx : call->y,
                   .dscale = call->dscale,
                   .dbias = call->dbias};
    if (to->plan.scale > 0) {
        status = op_tensor(handle, call->param_desc, call->alpha, call->scale, 0, NULL, next);
        to->scale = next;
        next += to->plan.scale;
    }
    if (to->plan.bias > 0 && status == PBN_OK) {
        status = op_tensor(handle, call->param_desc, call->alpha, call->bias, 0, NULL, next);
        to->bias = next;
        next += to->plan.bias;
    }
    if (to->plan.data > 0) {
        to->out = next;
        next += to->plan.data;
    }
    if (to->plan.dscale > 0) {
        to->dscale = next;
        to->dbias = next + to->plan.dscale;
    }
    if (status == PBN_OK && call->activation != PBN_ACTIVATION_NONE)
        status = new_activation(call, &to->activation);
    return status;
}

/* `status`: of the batch norm. */
static int finish(pbn_handle *handle, const pbn_call *call, const routes *to, int status) {
    const pbn_tensor *p = call->param_desc;
    double a = call->alpha_param, b = call->beta_param;
    if (to->activation != NULL)
        api.miopenDestroyActivationDescriptor(to->activation);
    if (to->plan.data > 0 && status == PBN_OK) {
        void *out = call->operation == PBN_OP_BACKWARD ? call->dx : call->y;
        const double alpha = call->activation == PBN_ACTIVATION_NONE ? 1 : call->alpha; /* else taken in before */
        status = op_tensor(handle, call->x_desc, alpha, to->out, call->beta, out, out);
    }
    if (to->plan.dscale > 0 && status == PBN_OK)
        status = op_tensor(handle, p, a, to->dscale, b, call->dscale, call->dscale);
    if (to->plan.dbias > 0 && status == PBN_OK)
        status = op_tensor(handle, p, a, to->dbias, b, call->dbias, call->dbias);
    return status;
}

/* ---------------------------------------------------------------- the calls */

/* Arguments that several of the vendor's calls have, of `handle`, `call` and `to`. MIOpen reads alpha and beta as floats
 * whatever the type of x. The calls of _V2 and those with an activation take a descriptor for each parameter. */
static const float one = 1, zero = 0;
#define FORWARD                                                                                               \
    handle->vendor, vendor_mode(call->mode), (void *)&one, (void *)&zero, call->x_desc->compute, call->x,     \
        call->y_desc->compute, to.out
#define BACKWARD                                                                                              \
    handle->vendor, vendor_mode(call->mode), &one, &zero, &one, &zero, call->x_desc->compute, call->x,        \
        call->dy_desc->compute, call->dy, call->dx_desc->compute, to.out
#define ALIKE pd, pd, pd, pd
#define TRAINING                                                                                              \
    (void *)to.scale, (void *)to.bias, call->factor, call->running_mean, call->running_variance,              \
        call->epsilon, call->saved_mean, call->saved_inv_variance
#define GIVEN (void *)to.scale, (void *)to.bias, call->running_mean, call->running_variance
#define GRADIENTS to.dscale, to.dbias, call->epsilon, call->saved_mean, call->saved_inv_variance

static int forward_training(pbn_handle *handle, const pbn_call *call) {
    routes to;
    void *const pd = call->param_desc->compute;
    int status = prepare(handle, call, &to);
    if (status != PBN_OK)
        return status;
    if (to.activation != NULL)
        status = api.miopenBatchNormForwardTrainingActivation(FORWARD, ALIKE, TRAINING, to.activation);
    else if (api.miopenBatchNormalizationForwardTraining_V2 != NULL)
        status = api.miopenBatchNormalizationForwardTraining_V2(FORWARD, ALIKE, TRAINING);
    else
        status = api.miopenBatchNormalizationForwardTraining(FORWARD, pd, TRAINING);
    return finish(handle, call, &to, status);
}

static int forward_inference(pbn_handle *handle, const pbn_call *call) {
    routes to;
    void *const pd = call->param_desc->compute;
    int status = prepare(handle, call, &to);
    if (status != PBN_OK)
        return status;
    if (to.activation != NULL)
        status = api.miopenBatchNormForwardInferenceActivation(FORWARD, ALIKE, GIVEN, call->epsilon, to.activation);
    else if (call->inverse)
        status = api.miopenBatchNormalizationForwardInferenceInvVariance(FORWARD, ALIKE, GIVEN);
    else if (api.miopenBatchNormalizationForwardInference_V2 != NULL)
        status = api.miopenBatchNormalizationForwardInference_V2(FORWARD, ALIKE, GIVEN, call->epsilon);
    else
        status = api.miopenBatchNormalizationForwardInference(FORWARD, pd, GIVEN, call->epsilon);
    return finish(handle, call, &to, status);
}

static int backward(pbn_handle *handle, const pbn_call *call) {
    routes to;
    void *const pd = call->param_desc->compute;
    int status = prepare(handle, call, &to);
    if (status != PBN_OK)
        return status;
    if (to.activation != NULL)
        status = api.miopenBatchNormBackwardActivation(BACKWARD, ALIKE, to.scale, call->bias, GRADIENTS, to.activation);
    else if (api.miopenBatchNormalizationBackward_V2 != NULL)
        status = api.miopenBatchNormalizationBackward_V2(BACKWARD, ALIKE, to.scale, GRADIENTS);
    else
        status = api.miopenBatchNormalizationBackward(BACKWARD, pd, to.scale, GRADIENTS);
    return finish(handle, call, &to, status);
}

/* On packed copies: miopenOpTensor does not look at the stride of the last axis. */
static int axpby_packed(pbn_handle *handle, const pbn_call *call) {
    const workspace_plan plan = plan_workspace(call);
    char *x = call->workspace, *y = x + plan.data;
    pbn_tensor packed = *call->x_desc;
    int status;
    pbn_packed_strides(packed.rank, packed.dims, PBN_CHANNELS_FIRST, packed.strides);
    packed.layout = PBN_CHANNELS_FIRST;
    status = new_view_4d(&packed.compute, packed.dtype, packed.rank, packed.dims, PBN_CHANNELS_FIRST);
    if (status != PBN_OK)
        return status;
    status = copy(handle, call->x_desc, call->x, &packed, x);
    if (status == PBN_OK && call->beta != 0)
        status = copy(handle, call->y_desc, call->y, &packed, y);
    if (status == PBN_OK)
        status = op_tensor(handle, &packed, call->alpha, x, call->beta, y, x);
    if (status == PBN_OK)
        status = copy(handle, &packed, x, call->y_desc, call->y);
    api.miopenDestroyTensorDescriptor(packed.compute);
    return status;
}

static int axpby(pbn_handle *handle, const pbn_call *call) {
    const int status = check_call(call);
    if (status != PBN_OK)
        return status;
    if (one_order(call) && call->x_desc->dtype != PBN_BFLOAT16)
        return op_tensor(handle, call->x_desc, call->alpha, call->x, call->beta, call->y, call->y);
    if (!computes(call))
        return copy(handle, call->x_desc, call->x, call->y_desc, call->y);
    return axpby_packed(handle, call);
}

/* miopenSetTensor reads the value in the tensor's own type. */
static int fill(pbn_handle *handle, const pbn_call *call) {
    const pbn_tensor *y = call->y_desc;
    double value; /* room and alignment for any of the types */
    int status = check_x(y);
    if (status != PBN_OK)
        return status;
    pbn_encode(call->alpha, y->dtype, &value);
    if (y->layout == PBN_STRIDED) {
        axis axes[PBN_MAX_RANK];
        const int n = merged_axes(y, y, axes);
        return (status = check_span(y)) != PBN_OK ? status : move(handle, y->dtype, axes, n, NULL, call->y, &value);
    }
    return api.miopenSetTensor(handle->vendor, y->compute, call->y, &value);
}

/* y = x * (x > 0) or, with dy, dx = dy * (x > 0): so in MIOpen's kernels, where 0 times infinity is NaN. The
 * backward call wants the activation's output too and does not read it for this activation, so x is passed. */
static int relu(pbn_handle *handle, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int back = call->operation == PBN_OP_RELU_BACKWARD;
    void *activation = NULL;
    int status;
    if ((status = check_x(x)) != PBN_OK)
        return status;
    if ((back && (status = check_like_x(call->dy_desc, x)) != PBN_OK) ||
        (status = check_like_x(back ? call->dx_desc : call->y_desc, x)) != PBN_OK)
        return status;
    status = new_activation(call, &activation);
    if (status != PBN_miopenStatusSuccess)
        return status;
    if (back)
        status = api.miopenActivationBackward(handle->vendor, activation, &one, x->compute, call->x,
                                              call->dy_desc->compute, call->dy, x->compute, call->x, &zero,
                                              call->dx_desc->compute, call->dx);
    else
        status = api.miopenActivationForward(handle->vendor, activation, &one, x->compute, call->x, &zero,
                                             call->y_desc->compute, call->y);
    api.miopenDestroyActivationDescriptor(activation);
    return status;
}
