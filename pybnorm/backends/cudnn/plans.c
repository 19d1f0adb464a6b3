/* Plans: cuDNN's algorithms by name, which of them can do a call, and which "auto" takes. Part of adapter.c. */

static const char no_blending[] = "the graphs of batch norm do not blend: alpha must be 1 and beta 0";
static const char no_float64[] = "cuDNN's graph API has no float64 batch norm";
static const char spatial_only[] = "the algorithm is for the spatial modes";
static const char who_fuses[] = "of cuDNN's algorithms only the Ex entry points and the norm graph (ex, graph) fuse an "
                                "activation in training, and only the pointwise graph in inference";
static const char relu_only[] = "cuDNN's plans fuse RELU, with or without a residual, and nothing else";
static const char no_small_epsilon[] = "the graphs read epsilon as float32, in whose normal range (or 0) this one is not";

static int is_single(double value) {
    return value == 0 || (value >= FLT_MIN && value <= FLT_MAX);
}

static const char ex_alignment[] = "the Ex entry points' channels-last kernels load several elements at once: tensors "
                                   "and parameters must be 16-byte aligned, or the CUDA context would be lost";

static const char *cannot_fuse_any(const pbn_call *call) {
    if (call->activation != PBN_ACTIVATION_RELU)
        return relu_only;
    if ((call->operation == PBN_OP_BACKWARD ? call->z_desc : call->dz_desc) != NULL)
        return "z belongs to forward and dz to backward";
    return call->saved_mean == NULL ? "cuDNN's fused kernels write the saved statistics, and its fused backward needs them"
                                    : NULL;
}

/* Why the norm graph, which serves `call` without an activation, cannot with its own. With a residual forward leaves a
 * bit for each element, which is tried for channels in whole bytes. */
static const char *cannot_fuse_graph(const pbn_call *call) {
    const char *why = cannot_fuse_any(call);
    if (why != NULL)
        return why;
    if (!all_channels_last(call))
        return "cuDNN's graphs fuse an activation for packed channels-last tensors only";
    return residual(call) != NULL && call->x_desc->dims[1] % 8 != 0
               ? "cuDNN's graphs fuse a residual for channels in multiples of 8 only"
               : NULL;
}

/* Why the Ex entry points, which serve `call` without an activation, cannot with its own. What they were seen to do
 * with other calls: NOT_SUPPORTED for channels-first and float64, whose size queries say 0 (9.19); without saved
 * statistics they leave their fused kernels. C is documented as a multiple of 4 for the residual. Blending behind an
 * activation is nowhere documented. */
static const char *cannot_fuse(const pbn_call *call) {
    const char *why = cannot_fuse_any(call);
    if (why != NULL)
        return why;
    if (!has_activation() || api.cudnnGetBatchNormalizationTrainingExReserveSpaceSize == NULL)
        return "this cuDNN library lacks the activation descriptors or the reserve space query of the Ex entry points";
    if (call->x_desc->dtype == PBN_FLOAT64)
        return "cuDNN's Ex entry points fuse no activation for float64";
    if (!all_channels_last(call))
        return "cuDNN's Ex entry points fuse an activation for packed channels-last tensors only";
    if (call->x_desc->dims[1] % 4 != 0)
        return "cuDNN's Ex entry points fuse an activation for channels in multiples of 4 only";
    if (blends(call))
        return "cuDNN does not say how its Ex entry points blend after an activation: alpha must be 1 and beta 0";
    return NULL;
}

/* Why `kind` cannot do `call`; NULL where it can be tried. */
static const char *unavailable(int kind, const pbn_call *call) {
    const int64_t alignment = common_alignment(call);
    if (call->share != 0 || call->sums_only)
        return "cuDNN has no calls for parts of a batch norm; native computes them";
    if (kind != EX && kind != GRAPH && kind != POINTWISE && fuses(call))
        return who_fuses;
    switch (kind) {
    case PLAIN:
        return NULL;
    case SPATIAL:
    case PERSISTENT:
        return call->mode == PBN_PER_ACTIVATION ? spatial_only : NULL;
    case EX:
        if (call->operation == PBN_OP_FORWARD_INFERENCE)
            return "cuDNN has no Ex entry point for inference";
        if (call->mode == PBN_PER_ACTIVATION)
            return spatial_only;
        if (api.cudnnBatchNormalizationForwardTrainingEx == NULL || api.cudnnBatchNormalizationBackwardEx == NULL ||
            api.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize == NULL ||
            api.cudnnGetBatchNormalizationBackwardExWorkspaceSize == NULL)
            return "this cuDNN library lacks the Ex entry points";
        if (alignment < WIDE_ALIGNMENT)
            return ex_alignment;
        return fuses(call) ? cannot_fuse(call) : NULL;
    case GRAPH:
    case POINTWISE:
        if ((kind == POINTWISE) != (call->operation == PBN_OP_FORWARD_INFERENCE))
            return kind == POINTWISE ? "the pointwise graph is for inference"
                                     : "cuDNN's graph API has no batch-norm inference node; its pointwise graph does it";
        if (call->mode == PBN_PER_ACTIVATION)
            return spatial_only;
        if (call->x_desc->dtype == PBN_FLOAT64)
            return no_float64;
        if (call->operation == PBN_OP_BACKWARD && call->saved_mean == NULL)
            return "cuDNN's norm graph reads the saved statistics in backward; spatial and ex compute them from x";
        if (kind == POINTWISE && fuses(call) && (call->activation != PBN_ACTIVATION_RELU || call->dz_desc != NULL))
            return relu_only;
        if (kind == GRAPH && fuses(call) && cannot_fuse_graph(call) != NULL)
            return cannot_fuse_graph(call);
        if (blends(call))
            return no_blending;
        if (!is_single(call->epsilon))
            return no_small_epsilon;
        if (kind == GRAPH && alignment < WIDE_ALIGNMENT)
            return graph_alignment;
        if (!all_channels_last(call) && (kind == POINTWISE || !every(call, is_channels_first)))
            return kind == POINTWISE ? "the pointwise graph takes packed channels-last tensors"
                                     : "the graphs of batch norm take packed tensors, all in one layout";
        return NULL;
    default:
        return "there is no such algorithm";
    }
}

static int fused_ops(const pbn_call *call) {
    return residual(call) != NULL ? PBN_CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION : PBN_CUDNN_BATCHNORM_OPS_BN_ACTIVATION;
}

/* All data tensors are the same packed channels-last memory, so one descriptor serves them: of rank 4, with the strides
 * of its axes of length 1 such that cuDNN takes it for channels-last, whatever rank and strides the caller's have. */
static int make_packed_last(pbn_plan *p, const pbn_tensor *x) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int rank, status = pbn_fold(x, 4, 4, &rank, dims, strides);
    if (status != PBN_OK || (status = cudnn_tensor_create(&p->packed)) != PBN_OK)
        return status;
    pbn_packed_strides(rank, dims, PBN_CHANNELS_LAST, strides);
    return cudnn_tensor_set(&p->packed, x->dtype, rank, dims, strides);
}

/* The descriptor of a parameter: (1, C, 1, 1) in float32. */
static int make_vector(pbn_tensor *t, int64_t channels) {
    const int64_t dims[4] = {1, channels, 1, 1};
    int64_t strides[4];
    int status = cudnn_tensor_create(t);
    if (status != PBN_OK)
        return status;
    pbn_packed_strides(4, dims, PBN_CHANNELS_FIRST, strides);
    return cudnn_tensor_set(t, PBN_FLOAT32, 4, dims, strides);
}

/* What an Ex call is given: fused ones the packed memory, others what the caller described. */
typedef struct ex_call {
    int ops;
    void *x, *y, *dy, *dx, *z, *param;
} ex_call;

static int to_ex(const pbn_plan *p, const pbn_call *call, ex_call *e) {
    void *const t = p->packed.compute;
    int status;
    if (p->fused) {
        *e = (ex_call){fused_ops(call), t, t, t, t, residual(call) != NULL ? t : NULL, p->one.compute};
        return PBN_OK;
    }
    *e = (ex_call){.ops = PBN_CUDNN_BATCHNORM_OPS_BN};
    if ((status = to_compute(call->x_desc, &e->x)) != PBN_OK ||
        (status = to_compute(call->param_desc, &e->param)) != PBN_OK)
        return status;
    if (call->operation == PBN_OP_FORWARD_TRAINING)
        return to_compute(call->y_desc, &e->y);
    status = to_compute(call->dy_desc, &e->dy);
    return status != PBN_OK ? status : to_compute(call->dx_desc, &e->dx);
}

/* With the persistent mode: the plain mode over Ex runs the plain entry point's kernels. */
static int build_ex(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const int mode = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT;
    ex_call e;
    int status;
    p->mode = PBN_SPATIAL_PERSISTENT;
    if (p->fused && ((status = make_packed_last(p, call->x_desc)) != PBN_OK ||
                     (status = make_vector(&p->one, call->x_desc->dims[1])) != PBN_OK ||
                     (status = new_relu(&p->activation)) != PBN_OK))
        return status;
    if ((status = to_ex(p, call, &e)) != PBN_OK)
        return status;
    status = call->operation == PBN_OP_BACKWARD
                 ? api.cudnnGetBatchNormalizationBackwardExWorkspaceSize(
                       handle->vendor, mode, e.ops, e.x, e.y, e.dy, e.z, e.dx, e.param, p->activation, &p->workspace)
                 : api.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
                       handle->vendor, mode, e.ops, e.x, e.z, e.y, e.param, p->activation, &p->workspace);
    if (status != PBN_CUDNN_STATUS_SUCCESS || !p->fused)
        return status;
    /* Without a workspace the Ex entry points are documented to do what the plain ones do: no activation. */
    if (p->workspace == 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, "cuDNN asks for no workspace, so it has no fused kernel for this shape");
    return api.cudnnGetBatchNormalizationTrainingExReserveSpaceSize(handle->vendor, mode, e.ops, p->activation, e.x,
                                                                    &p->reserve);
}

static int build(pbn_plan *p, pbn_handle *handle, const pbn_call *call, int skip) {
    int status;
    p->mode = call->mode;
    p->fused = fuses(call);
    p->values[VALUE_EPSILON] = (float)call->epsilon;
    p->values[VALUE_FACTOR] = (float)call->factor;
    switch (p->kind) {
    case SPATIAL:
        p->mode = PBN_SPATIAL;
        return PBN_OK;
    case PERSISTENT:
        p->mode = PBN_SPATIAL_PERSISTENT;
        return PBN_OK;
    case EX:
        return build_ex(p, handle, call);
    case GRAPH:
    case POINTWISE:
        if ((status = graph_ready()) != PBN_OK)
            return status;
        status = p->kind == POINTWISE                         ? build_pointwise(p, call, handle->vendor, skip)
                 : call->operation == PBN_OP_FORWARD_TRAINING ? build_norm_forward(p, call, handle->vendor, skip)
                                                              : build_norm_backward(p, call, handle->vendor, skip);
        p->workspace = p->scratch + (size_t)p->graph.workspace;
        if (p->kind == GRAPH && residual(call) != NULL)
            p->reserve = rounded((size_t)(pbn_numel(call->x_desc->rank, call->x_desc->dims) / 8));
        return status;
    default:
        return PBN_OK;
    }
}

static void drop_built(pbn_plan *p) {
    graph_drop(&p->graph);
    cudnn_tensor_destroy(&p->one);
    cudnn_tensor_destroy(&p->packed);
    if (p->activation != NULL)
        api.cudnnDestroyActivationDescriptor(p->activation);
    p->activation = NULL;
}

static void cudnn_plan_destroy(pbn_plan *plan) {
    drop_built(plan);
    free(plan);
}

/* "graph:2" is the third plan that compiles, in the heuristic's order. */
static int parse_algorithm(const char *algorithm, int *kind, int *skip) {
    const char *colon = strchr(algorithm, ':');
    const size_t length = colon != NULL ? (size_t)(colon - algorithm) : strlen(algorithm);
    *skip = 0;
    if (colon != NULL) {
        if (colon[1] < '0' || colon[1] > '9' || colon[2] != '\0')
            return pbn_refuse(PBN_E_ARGUMENT, "an algorithm's colon is followed by one digit");
        *skip = colon[1] - '0';
    }
    for (int i = 0; algorithm_names[i] != NULL; i++)
        if (strlen(algorithm_names[i]) == length && memcmp(algorithm, algorithm_names[i], length) == 0) {
            *kind = i;
            for (int j = 0; colon != NULL; j++) {
                if (numbered_names[j] == NULL)
                    return pbn_refuse(PBN_E_ARGUMENT, "only graph and pointwise have plans to choose from");
                if (strcmp(numbered_names[j], algorithm_names[i]) == 0)
                    break;
            }
            return PBN_OK;
        }
    return pbn_refuse(PBN_E_ARGUMENT, "the algorithm is none of auto, fast, plain, spatial, persistent, ex, graph, "
                                      "pointwise");
}

/* An algorithm that cannot be built leaves the plan as it was. */
static int try_algorithm(pbn_plan *p, pbn_handle *handle, const pbn_call *call, const char *algorithm,
                         const char *why) {
    const char *reason;
    int skip, status = parse_algorithm(algorithm, &p->kind, &skip);
    if (status != PBN_OK)
        return status;
    reason = unavailable(p->kind, call);
    if (reason != NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, reason);
    p->why = why;
    status = build(p, handle, call, skip);
    if (status != PBN_OK) {
        const int64_t alignment = p->alignment;
        void *const context = p->context;
        drop_built(p);
        memset(p, 0, sizeof *p);
        p->alignment = alignment;
        p->context = context;
        return status;
    }
    pbn_copy_text(p->name, sizeof p->name, algorithm);
    return PBN_OK;
}

/* Whether Ex has kernels of its own for this call. Over other memory it runs the persistent ones, which sum in fixed
 * point, and without saved statistics the plain entry point's slow ones. */
static int ex_has_kernels(const pbn_call *call) {
    return is_channels_last(call->x_desc) && all_channels_last(call) && call->saved_mean != NULL &&
           call->x_desc->dtype != PBN_FLOAT64;
}

static const char fused_why[] = "an entry point of cuDNN that fuses an activation";
static const char fused_graph_why[] = "the norm graph fuses an activation for this call, the Ex entry points do not";
static const char fused_inference_why[] = "cuDNN fuses an activation into inference in its pointwise graph only";
static const char mode_why[] = "the one entry point for this mode";
static const char inference_why[] = "subtracts the mean before it multiplies, and takes any number of images: over "
                                    "channels-last memory the plain entry point loses the digits that a large mean "
                                    "cancels, and it refuses more than 65535 images";
static const char ex_why[] = "cuDNN's kernels for channels-last memory are in the Ex entry points";
static const char graph_why[] = "the norm graph has cuDNN's kernels for channels-last memory, Ex only with saved "
                                "statistics";
static const char fast_why[] = "spreads a channel over several blocks, but sums in fixed point: values below 1e-5 or "
                               "above 1e10 lose their digits";
static const char spatial_why[] = "exact to rounding over any range, where persistent sums in fixed point";
static const char gradient_why[] = "adds gradients without the coarser steps of the Ex entry points and graphs";

/* With a residual backward reads what forward's algorithm left, so what another call could take is not tried. */
static int choose_fused(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    int status, graph;
    if (call->operation == PBN_OP_FORWARD_INFERENCE)
        return try_algorithm(p, handle, call, "pointwise", fused_inference_why);
    graph = residual(call) == NULL && unavailable(GRAPH, call) == NULL && graph_ready() == PBN_OK;
    status = try_algorithm(p, handle, call, "ex", fused_why); /* after what else leaves a reason: its own is told */
    return status != PBN_OK && graph ? try_algorithm(p, handle, call, "graph", fused_graph_why) : status;
}

/* What "auto" takes: what is right for the call, and of that what has kernels for its layout. */
static int choose(pbn_plan *p, pbn_handle *handle, const pbn_call *call, int fast) {
    const int inference = call->operation == PBN_OP_FORWARD_INFERENCE, last = is_channels_last(call->x_desc);
    const int gradient = call->operation == PBN_OP_BACKWARD && last && !fast; /* cudnn-channels-last-gradients */
    int status = PBN_E_UNSUPPORTED;
    if (fuses(call))
        return choose_fused(p, handle, call);
    if (call->mode == PBN_PER_ACTIVATION)
        return try_algorithm(p, handle, call, "plain", mode_why);
    if (inference && (last || call->x_desc->dims[0] > PLAIN_ROWS))
        status = try_algorithm(p, handle, call, "pointwise", inference_why);
    else if (fast && !inference && every(call, is_channels_first) && call->x_desc->dtype != PBN_FLOAT64)
        status = try_algorithm(p, handle, call, "persistent", fast_why);
    else if (!inference && !gradient && ex_has_kernels(call))
        status = try_algorithm(p, handle, call, "ex", ex_why);
    if (status != PBN_OK && !inference && !gradient && last)
        status = try_algorithm(p, handle, call, "graph", graph_why);
    return status != PBN_OK ? try_algorithm(p, handle, call, "spatial", gradient ? gradient_why : spatial_why) : status;
}

static int cudnn_plan_create(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan) {
    const int any = algorithm != NULL && (strcmp(algorithm, "auto") == 0 || strcmp(algorithm, "fast") == 0);
    pbn_plan *p;
    int status;
    p = calloc(1, sizeof *p);
    if (p == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    p->context = handle->context;
    p->alignment = common_alignment(call);
    forget_vendor_text();
    status = any ? choose(p, handle, call, algorithm[0] == 'f')
                 : try_algorithm(p, handle, call, algorithm, "asked for");
    if (status != PBN_OK) {
        cudnn_plan_destroy(p);
        return status;
    }
    p->any = any;
    *plan = p;
    return PBN_OK;
}

/* The bits of all of these were seen to be those of every equal call (9.19, H200). */
static const char *cudnn_unrepeated(const pbn_call *call, const char *algorithm) {
    (void)call;
    (void)algorithm;
    return NULL;
}

static void cudnn_plan_info(const pbn_plan *plan, size_t *workspace, size_t *reserve, const char **algorithm,
                            const char **why) {
    *workspace = plan->workspace;
    *reserve = plan->reserve;
    *algorithm = plan->name;
    *why = plan->why;
}

/* plan_create checks calls with an activation by cannot_fuse: alpha is 1, beta is 0, statistics are saved. */
static int run_ex(pbn_handle *handle, const pbn_plan *p, const pbn_call *call) {
    const int dtype = call->x_desc->dtype, mode = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT;
    const scalar alpha = to_scalar(call->alpha, dtype), beta = to_scalar(call->beta, dtype);
    const scalar alpha_param = to_scalar(call->alpha_param, dtype), beta_param = to_scalar(call->beta_param, dtype);
    void *reserve = p->reserve != 0 ? call->reserve : NULL;
    ex_call e;
    const int status = to_ex(p, call, &e);
    if (status != PBN_OK)
        return status;
    if (((data_bits(call) | param_bits(call)) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, ex_alignment);
    if (call->operation == PBN_OP_BACKWARD)
        return api.cudnnBatchNormalizationBackwardEx(
            handle->vendor, mode, e.ops, &alpha, &beta, &alpha_param, &beta_param, e.x, call->x, e.y,
            p->fused ? call->y : NULL, e.dy, call->dy, e.z, e.z != NULL ? call->dz : NULL, e.dx, call->dx, e.param,
            call->scale, p->fused ? call->bias : NULL, call->dscale, call->dbias, call->epsilon, call->saved_mean,
            call->saved_inv_variance, p->activation, call->workspace, call->workspace_size, reserve, p->reserve);
    return api.cudnnBatchNormalizationForwardTrainingEx(
        handle->vendor, mode, e.ops, &alpha, &beta, e.x, call->x, e.z, e.z != NULL ? call->z : NULL, e.y, call->y,
        e.param, call->scale, call->bias, call->factor, call->running_mean, call->running_variance, call->epsilon,
        call->saved_mean, call->saved_inv_variance, p->activation, call->workspace, call->workspace_size, reserve,
        p->reserve);
}

static int cudnn_plan_run(pbn_handle *handle, pbn_plan *plan, const pbn_call *call) {
    pbn_call plain;
    int kind;
    forget_vendor_text();
    plain = *call;
    plain.mode = plan->mode;
    kind = plan->kind;
    /* Slices of one buffer of parameters. */
    if (plan->any && !plan->fused && (kind == EX || kind == GRAPH) && (param_bits(call) & (WIDE_ALIGNMENT - 1)) != 0) {
        plain.mode = PBN_SPATIAL;
        kind = PLAIN;
    }
    switch (kind) {
    case EX:
        return run_ex(handle, plan, call);
    case GRAPH:
    case POINTWISE:
        return run_graph(handle, plan, call);
    default:
        break;
    }
    switch (call->operation) {
    case PBN_OP_FORWARD_TRAINING:
        return cudnn_forward_training(handle, &plain);
    case PBN_OP_FORWARD_INFERENCE:
        return cudnn_forward_inference(handle, &plain);
    case PBN_OP_BACKWARD:
        return cudnn_backward(handle, &plain);
    default:
        return pbn_refuse(PBN_E_ARGUMENT, "the operation has no plans");
    }
}
