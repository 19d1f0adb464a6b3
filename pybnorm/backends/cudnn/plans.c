/* Plans: the ways to one result, which of them can do a call, and what "auto" takes. Part of adapter.c. */

static const char no_blending[] = "the graphs of batch norm do not blend: alpha must be 1 and beta 0";
static const char no_float64[] = "cuDNN's graph API has no float64 batch norm";
static const char spatial_only[] = "the algorithm is for the spatial modes";
static const char who_fuses[] = "of cuDNN's ways only the Ex entry points and the norm graph (algorithms ex, graph) fuse "
                                "an activation in training, and only the pointwise graph in inference";
static const char relu_only[] = "cuDNN's plans fuse RELU, with or without a residual, and nothing else";
static const char no_small_epsilon[] = "the graphs read epsilon as float32, in whose normal range (or 0) this one is not";

static int is_single(double value) {
    return value == 0 || (value >= FLT_MIN && value <= FLT_MAX);
}

/* ---- dense copies: x (and dy) packed in the workspace, a plan for those, and the result copied back ---- */

static int cudnn_plan_create(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan);
static int cudnn_plan_run(pbn_handle *handle, pbn_plan *plan, const pbn_call *call);

static int build_dense(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int64_t element = (int64_t)pbn_item_size(x->dtype);
    int64_t strides[PBN_MAX_RANK];
    /* The fast channels-last paths have no float64. */
    const int last = x->strides[1] == 1 && x->dims[1] > 1 && x->dtype != PBN_FLOAT64;
    int status = cudnn_tensor_create(&p->packed);
    if (status != PBN_OK)
        return status;
    pbn_packed_strides(x->rank, x->dims, last ? PBN_CHANNELS_LAST : PBN_CHANNELS_FIRST, strides);
    status = cudnn_tensor_set(&p->packed, x->dtype, x->rank, x->dims, strides);
    if (status != PBN_OK)
        return status;
    p->inner_call = *call;
    p->inner_call.x_desc = &p->packed;
    if (call->operation == PBN_OP_BACKWARD)
        p->inner_call.dy_desc = p->inner_call.dx_desc = &p->packed;
    else
        p->inner_call.y_desc = &p->packed;
    p->inner_call.x = p->inner_call.dy = p->inner_call.y = p->inner_call.dx = NULL; /* workspace is well aligned */
    status = cudnn_plan_create(handle, &p->inner_call, "auto", &p->inner);
    if (status != PBN_OK)
        return status;
    p->copy = rounded((size_t)(pbn_numel(x->rank, x->dims) * element));
    p->scratch = (call->operation == PBN_OP_BACKWARD ? 3 : 2) * p->copy;
    p->workspace = p->scratch + p->inner->workspace;
    return PBN_OK;
}

static int run_dense(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    pbn_call inner = *call;
    char *space = call->workspace;
    const int backward = call->operation == PBN_OP_BACKWARD;
    const pbn_tensor *out_desc = backward ? call->dx_desc : call->y_desc;
    void *result = backward ? call->dx : call->y, *out = space + p->copy;
    int status = copy_tensor(handle, call->x_desc, call->x, &p->packed, space);
    if (status == PBN_OK && call->beta != 0)
        status = copy_tensor(handle, out_desc, result, &p->packed, out);
    if (status == PBN_OK && backward)
        status = copy_tensor(handle, call->dy_desc, call->dy, &p->packed, space + 2 * p->copy);
    if (status != PBN_OK)
        return status;
    inner.x_desc = &p->packed;
    inner.x = space;
    if (backward) {
        inner.dy_desc = inner.dx_desc = &p->packed;
        inner.dy = space + 2 * p->copy;
        inner.dx = out;
    } else {
        inner.y_desc = &p->packed;
        inner.y = out;
    }
    inner.workspace = space + p->scratch;
    inner.workspace_size = call->workspace_size - p->scratch;
    status = cudnn_plan_run(handle, p->inner, &inner);
    return status != PBN_OK ? status : copy_tensor(handle, &p->packed, out, out_desc, result);
}

/* Views whose plain kernels are slower than copy, packed kernel and copy together: an innermost axis with gaps, or
 * channels-last that is not packed. Channel slices of channels-first memory cost nothing. */
static int is_slow_view(const pbn_tensor *t) {
    return t->layout == PBN_STRIDED &&
           (t->strides[t->rank - 1] != 1 || (t->strides[1] == 1 && t->dims[1] > 1 && t->rank > 2));
}

static int any_slow(const pbn_call *call) {
    if (call->x_desc->dtype == PBN_FLOAT64 && call->operation != PBN_OP_FORWARD_INFERENCE &&
        call->x_desc->layout == PBN_CHANNELS_LAST)
        return 1; /* float64 has the channels-first kernels only */
    if (is_slow_view(call->x_desc))
        return 1;
    return call->operation == PBN_OP_BACKWARD ? is_slow_view(call->dy_desc) || is_slow_view(call->dx_desc)
                                              : is_slow_view(call->y_desc);
}

static const char ex_alignment[] = "the Ex entry points' channels-last kernels load several elements at once: tensors "
                                   "and parameters must be 16-byte aligned, or the CUDA context would be lost";
static const char fused_alignment[] = "tensors and parameters of a fused activation must be 16-byte aligned: cuDNN's "
                                      "kernels would lose the CUDA context";

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
    if (common_alignment(call) < WIDE_ALIGNMENT)
        return fused_alignment;
    return NULL;
}

/* ---- backward without saved statistics, where the vendor's own way to them is slow ----------------------------------
 *
 * cuDNN recomputes them in slow kernels of the plain entry points, whose dscale loses the digits that a large mean
 * cancels. So they are computed first, and the fast kernels are given them as saved ones. */

static const char *unavailable(int kind, const pbn_call *call);

/* Ex over other memory does not have the fused kernels with saved statistics either, and is left to itself. */
static int computes_moments(int kind, const pbn_call *call) {
    if (call->operation != PBN_OP_BACKWARD || call->saved_mean != NULL || fuses(call))
        return 0;
    return kind == GRAPH || kind == COLUMNS || kind == ROWS || kind == LAYER_NORM ||
           (kind == EX && call->x_desc->dtype != PBN_FLOAT64 && all_channels_last(call));
}

/* The forward training whose statistics they are. */
static pbn_call moments_call(const pbn_call *call, void *mean, void *inverse) {
    pbn_call forward = *call;
    forward.operation = PBN_OP_FORWARD_TRAINING;
    forward.alpha = 1;
    forward.beta = 0;
    forward.y_desc = call->x_desc;
    forward.y = call->dx; /* where the step writes one */
    forward.saved_mean = mean;
    forward.saved_inv_variance = inverse;
    return forward;
}

static const char *no_columns_last(const pbn_tensor *x) {
    const int64_t values = pbn_numel(x->rank, x->dims) / x->dims[1], groups = column_groups(x);
    if (values < 2)
        return "with one value in a channel there are no statistics to compute";
    return x->dims[1] * groups < 2 || x->dims[1] * groups > LINES_MOST || values / groups > ROWS_MOST
               ? "channels-last memory is taken as a matrix of 2 to 65535 * 32 columns and up to 524288 rows, which this "
                 "shape does not make"
               : NULL;
}

/* Of which view they are computed, COLUMNS or ROWS, for a backward by `kind`; why not, or NULL. The sums of rows are
 * added in any order, so what is not about rows takes columns where it can. */
static const char *choose_moments(int kind, const pbn_call *call, int *view) {
    const pbn_tensor *x = call->x_desc;
    const pbn_call forward = moments_call(call, (void *)(uintptr_t)call, (void *)(uintptr_t)call);
    const char *why;
    *view = kind == ROWS ? ROWS : COLUMNS;
    if (kind == COLUMNS || kind == ROWS)
        return NULL; /* it has the same needs */
    if (!all_channels_last(call)) {
        why = unavailable(COLUMNS, &forward);
        if (why != NULL && unavailable(ROWS, &forward) == NULL) {
            *view = ROWS;
            why = NULL;
        }
        return why;
    }
    if (!is_single(call->epsilon))
        return no_small_epsilon;
    why = no_columns_last(x);
    return why != NULL ? why : api.cudnnSetTensor == NULL ? no_fill : NULL;
}

/* Whether the bits of a way are those of every equal call, as far as was seen (rules.h); what is known of it is here
 * alone, for plans that are asked for it and for the judge, which holds every plan to it. */
static int repeats(int kind, const pbn_call *call) {
    if (call->operation == PBN_OP_FORWARD_INFERENCE || call->share != 0)
        return 1;
    return kind != COLUMNS && kind != ROWS && kind != LAYER_NORM && !computes_moments(kind, call);
}

static const char bits_differ[] =
    "the sums of columns and rows, and of statistics that backward computes because they are not saved, differ in their "
    "last digits from call to call; the bits of spatial repeat, and with saved statistics those of ex and graph";

/* Why `kind` cannot do `call`; NULL where it can be tried. */
static const char *unavailable(int kind, const pbn_call *call) {
    const int64_t alignment = common_alignment(call);
    int64_t size, pieces;
    int view;
    if (kind != EX && kind != GRAPH && kind != POINTWISE && fuses(call))
        return who_fuses;
    if (call->deterministic && !repeats(kind, call))
        return bits_differ;
    if (call->share != 0 && kind != POINTWISE && kind != COLUMNS && kind != ROWS)
        return "only the pointwise graph, columns and rows take sums that are given";
    if (call->sums_only && (kind != COLUMNS && kind != ROWS))
        return "only columns and rows make sums without y or dx";
    if (call->sums_only && (call->operation == PBN_OP_FORWARD_INFERENCE ||
                            (call->operation == PBN_OP_BACKWARD && (call->saved_mean == NULL || call->share != 0))))
        return "sums alone are those of training, or of a backward with saved statistics";
    if (call->share != 0 && (call->operation != PBN_OP_BACKWARD || call->saved_mean == NULL))
        return "sums are given to backward with saved statistics only";
    switch (kind) {
    case PLAIN:
        return api.graphs_only ? no_ops : NULL;
    case SPATIAL:
    case PERSISTENT:
        if (api.graphs_only)
            return no_ops;
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
        if (computes_moments(kind, call))
            return choose_moments(kind, call, &view);
        return fuses(call) ? cannot_fuse(call) : NULL;
    case GRAPH:
    case POINTWISE:
        if ((kind == POINTWISE) != (call->operation == PBN_OP_FORWARD_INFERENCE || call->share != 0))
            return kind == POINTWISE ? "the pointwise graph is for inference"
                                     : "cuDNN's graph API has no batch-norm inference node; its pointwise graph does it";
        if (call->mode == PBN_PER_ACTIVATION)
            return spatial_only;
        if (call->x_desc->dtype == PBN_FLOAT64)
            return no_float64;
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
        if (!all_channels_last(call) && (kind == POINTWISE || !all_channels_first(call)))
            return kind == POINTWISE ? "the pointwise graph takes packed channels-last tensors"
                                     : "the graphs of batch norm take packed tensors, all in one layout";
        return computes_moments(kind, call) ? choose_moments(kind, call, &view) : NULL;
    case SPLIT:
        if (api.graphs_only)
            return no_ops;
        if (call->operation != PBN_OP_FORWARD_INFERENCE || call->mode == PBN_PER_ACTIVATION)
            return "only spatial inference can be split along N";
        return NULL;
    case COLUMNS:
    case ROWS:
    case LAYER_NORM:
        if (call->mode == PBN_PER_ACTIVATION)
            return spatial_only;
        if (call->x_desc->dtype == PBN_FLOAT64)
            return no_float64;
        if (blends(call))
            return no_blending;
        if (!is_single(call->epsilon))
            return no_small_epsilon;
        if (kind == COLUMNS && columns_last(call)) {
            if (call->operation == PBN_OP_FORWARD_INFERENCE)
                return "over channels-last memory the pointwise graph is the one for inference";
            if (api.cudnnAddTensor == NULL || api.cudnnSetTensor == NULL)
                return no_axpby;
            return no_columns_last(call->x_desc);
        }
        if (!all_channels_first(call))
            return kind == COLUMNS ? "the column view is of packed tensors, all in one layout"
                                   : "the row view is of packed channels-first tensors";
        size = pbn_numel(call->x_desc->rank, call->x_desc->dims) / call->x_desc->dims[0] / call->x_desc->dims[1];
        if (size < 2)
            return "with one position in a channel there is nothing to merge";
        if (kind == LAYER_NORM)
            return api.cudnnAddTensor == NULL || api.cudnnSetTensor == NULL ? no_axpby : layer_unavailable(call);
        if (kind == COLUMNS && size * call->x_desc->dims[1] > LINES_MOST)
            return "an image of more than 65535 * 32 values: a column each is more than a launch holds";
        pieces = row_pieces(call->x_desc);
        if (kind == ROWS && (size / pieces > LINES_MOST || call->x_desc->dims[0] > PLAIN_ROWS ||
                             call->x_desc->dims[0] * call->x_desc->dims[1] > ROWS_MOST))
            return "the row view is for up to 65535 images, 524288 rows N * C and 65535 * 32 values in each";
        if (kind == ROWS && call->operation != PBN_OP_FORWARD_INFERENCE && call->share == 0 &&
            call->x_desc->dims[0] * pieces < 2)
            return "with one row for each channel there is nothing to merge";
        if (api.cudnnAddTensor == NULL || api.cudnnSetTensor == NULL ||
            (kind == ROWS && axpby_function(call->x_desc->dtype) == NULL))
            return no_axpby;
        return NULL;
    case DENSE:
        if (api.cudnnTransformTensor == NULL)
            return no_axpby;
        if (!any_slow(call))
            return "a packed copy pays for strided views, and for channels-last float64 in training, only";
        return NULL;
    default:
        return "there is no such algorithm";
    }
}

static int make_piece(pbn_tensor *piece, const pbn_tensor *whole, int64_t rows) {
    int64_t dims[PBN_MAX_RANK];
    int status = cudnn_tensor_create(piece);
    if (status != PBN_OK)
        return status;
    memcpy(dims, whole->dims, sizeof dims);
    dims[0] = rows;
    return cudnn_tensor_set(piece, whole->dtype, whole->rank, dims, whole->strides);
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

static int build_fused(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const int mode = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, ops = fused_ops(call);
    void *t, *z, *param, *activation;
    int status;
    if ((status = make_packed_last(p, call->x_desc)) != PBN_OK ||
        (status = make_map(&p->one, PBN_FLOAT32, 1, call->x_desc->dims[1], 1)) != PBN_OK ||
        (status = new_relu(&activation)) != PBN_OK)
        return status;
    p->activation = activation;
    t = p->packed.compute;
    z = residual(call) != NULL ? t : NULL;
    param = p->one.compute;
    status = call->operation == PBN_OP_BACKWARD
                 ? api.cudnnGetBatchNormalizationBackwardExWorkspaceSize(handle->vendor, mode, ops, t, t, t, z, t,
                                                                         param, activation, &p->workspace)
                 : api.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(handle->vendor, mode, ops, t, z, t,
                                                                                param, activation, &p->workspace);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    /* Without a workspace the Ex entry points are documented to do what the plain ones do: no activation. */
    if (p->workspace == 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, "cuDNN asks for no workspace, so it has no fused kernel for this shape");
    return api.cudnnGetBatchNormalizationTrainingExReserveSpaceSize(handle->vendor, mode, ops, activation, t,
                                                                    &p->reserve);
}

static int build_moments(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const pbn_call forward = moments_call(call, p, p); /* its saved statistics are there; where, a run says */
    const char *why;
    pbn_plan *m = calloc(1, sizeof *m);
    int status;
    if (m == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    p->moments = m;
    if ((status = graph_ready()) != PBN_OK)
        return status;
    m->kind = LAYER_NORM;
    why = p->by_layer ? NULL : choose_moments(p->kind, call, &m->kind);
    if (why != NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, why);
    m->moments_only = 1;
    m->last = p->kind == COLUMNS || p->kind == ROWS ? p->last : all_channels_last(call);
    m->alignment = p->alignment;
    m->values[VALUE_EPSILON] = (float)call->epsilon;
    status = build_lines(m, &forward, handle->vendor, 0);
    p->vectors = 2 * rounded((size_t)call->x_desc->dims[1] * sizeof(float));
    p->workspace = p->vectors + (m->workspace > p->workspace ? m->workspace : p->workspace);
    return status;
}

/* The way itself, which is given saved statistics whoever has them. */
static int build_way(pbn_plan *p, pbn_handle *handle, const pbn_call *call, int skip) {
    void *x, *y, *dy, *dx, *param;
    int64_t rows;
    int status = PBN_OK;
    p->mode = call->mode;
    p->fused = fuses(call);
    p->given = call->share != 0;
    p->values[VALUE_EPSILON] = (float)call->epsilon;
    p->values[VALUE_FACTOR] = (float)call->factor;
    switch (p->kind) {
    case SPATIAL:
        p->mode = PBN_SPATIAL;
        return PBN_OK;
    case PERSISTENT:
        p->mode = PBN_SPATIAL_PERSISTENT;
        return PBN_OK;
    case EX: /* with the persistent mode: the plain mode over Ex runs the plain entry point's kernels */
        p->mode = PBN_SPATIAL_PERSISTENT;
        if (fuses(call))
            return build_fused(p, handle, call);
        if ((status = to_compute(call->x_desc, &x)) != PBN_OK ||
            (status = to_compute(call->param_desc, &param)) != PBN_OK)
            return status;
        if (call->operation == PBN_OP_FORWARD_TRAINING) {
            if ((status = to_compute(call->y_desc, &y)) != PBN_OK)
                return status;
            return api.cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
                handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, PBN_CUDNN_BATCHNORM_OPS_BN, x, NULL, y, param,
                NULL, &p->workspace);
        }
        if ((status = to_compute(call->dy_desc, &dy)) != PBN_OK || (status = to_compute(call->dx_desc, &dx)) != PBN_OK)
            return status;
        return api.cudnnGetBatchNormalizationBackwardExWorkspaceSize(
            handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, PBN_CUDNN_BATCHNORM_OPS_BN, x, NULL, dy, NULL, dx,
            param, NULL, &p->workspace);
    case GRAPH:
    case POINTWISE:
        if ((status = graph_ready()) != PBN_OK)
            return status;
        status = p->given                                     ? build_pointwise_gradient(p, call, handle->vendor, skip)
                 : p->kind == POINTWISE                       ? build_pointwise(p, call, handle->vendor, skip)
                 : call->operation == PBN_OP_FORWARD_TRAINING ? build_norm_forward(p, call, handle->vendor, skip)
                                                                 : build_norm_backward(p, call, handle->vendor, skip);
        p->workspace = p->scratch + (size_t)p->graphs[0].workspace;
        if (p->kind == GRAPH && residual(call) != NULL)
            p->reserve = rounded((size_t)(pbn_numel(call->x_desc->rank, call->x_desc->dims) / 8));
        return status;
    case COLUMNS:
    case ROWS:
    case LAYER_NORM:
        p->by_layer = p->kind == LAYER_NORM && call->operation == PBN_OP_BACKWARD;
        if (p->by_layer)
            p->kind = layer_view(call);
        p->last = p->kind == COLUMNS && columns_last(call);
        p->moments_only = call->sums_only;
        status = graph_ready();
        return status != PBN_OK ? status : build_lines(p, call, handle->vendor, skip);
    case DENSE:
        return build_dense(p, handle, call);
    case SPLIT:
        rows = call->x_desc->dims[0];
        if ((status = make_piece(&p->part, call->x_desc, rows < SPLIT_ROWS ? rows : SPLIT_ROWS)) != PBN_OK ||
            (status = make_piece(&p->y_part, call->y_desc, rows < SPLIT_ROWS ? rows : SPLIT_ROWS)) != PBN_OK)
            return status;
        if (rows > SPLIT_ROWS && rows % SPLIT_ROWS != 0 &&
            ((status = make_piece(&p->rest, call->x_desc, rows % SPLIT_ROWS)) != PBN_OK ||
             (status = make_piece(&p->y_rest, call->y_desc, rows % SPLIT_ROWS)) != PBN_OK))
            return status;
        return PBN_OK;
    default:
        return PBN_OK;
    }
}

static int build(pbn_plan *p, pbn_handle *handle, const pbn_call *call, int skip) {
    const int status = build_way(p, handle, call, skip);
    return status == PBN_OK && computes_moments(p->kind, call) ? build_moments(p, handle, call) : status;
}

static void cudnn_plan_destroy(pbn_plan *plan);

static void drop_built(pbn_plan *p) {
    pbn_tensor *tensors[] = {&p->part, &p->rest, &p->y_part, &p->y_rest, &p->one, &p->map, &p->two,
                             &p->maps, &p->three, &p->spread, &p->firsts, &p->first, &p->zeros, &p->packed};
    for (size_t i = 0; i < sizeof p->graphs / sizeof p->graphs[0]; i++)
        graph_drop(&p->graphs[i]);
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        cudnn_tensor_destroy(tensors[i]);
    cudnn_plan_destroy(p->inner);
    p->inner = NULL;
    cudnn_plan_destroy(p->moments);
    p->moments = NULL;
    if (p->activation != NULL)
        api.cudnnDestroyActivationDescriptor(p->activation);
    p->activation = NULL;
}

static void cudnn_plan_destroy(pbn_plan *plan) {
    if (plan == NULL)
        return;
    drop_built(plan);
    free(plan);
}

static const rule spatial_rule = {.algorithm = "spatial",
                                  .why = "exact to rounding over any range, where persistent sums in fixed point"};
static const rule split_rule = {PBN_OP_FORWARD_INFERENCE, ANY_DTYPE, ANY_LAYOUT, .images = {PLAIN_ROWS + 1, 0},
                                .algorithm = "split", .why = "the plain entry point refuses N above 65535"};
static const rule fused_rule = {.algorithm = "pointwise", .why = "the one way of cuDNN with a fused activation"};
static const rule graph_rules[] = {{.algorithm = "graph", .why = "the one way of an installation without libcudnn_ops"},
                                   {.algorithm = "pointwise", .why = "the one way of an installation without libcudnn_ops"}};
static const rule half_rule = {.algorithm = "columns", .why = "asked for"};
static const rule plain_rule = {.algorithm = "plain", .why = "the one entry point for this mode"};

static const rule ex_rule = {.algorithm = "ex", .why = "the way of cuDNN with a fused activation"};

static int fused_of(const pbn_call *call) {
    if (call->operation == PBN_OP_FORWARD_INFERENCE || !fuses(call))
        return 0; /* inference with one goes the way of inference */
    return residual(call) != NULL ? ADD_RELU : RELU;
}

static int half_of(const pbn_call *call) {
    return call->sums_only ? SUMS : call->share != 0 ? GIVEN : 0;
}

static int within(span s, int64_t value) {
    return value >= s.from && (s.below == 0 || value < s.below);
}

static int fits(const rule *r, const pbn_call *call, int fast) {
    const pbn_tensor *x = call->x_desc;
    const int64_t elements = pbn_numel(x->rank, x->dims), images = x->dims[0], channels = x->dims[1];
    const int64_t size = elements / images / channels, element = (int64_t)pbn_item_size(x->dtype);
    if (r->layout == LAST && !all_channels_last(call))
        return 0;
    if (r->layout == FIRST && !all_channels_first(call))
        return 0;
    if (r->layout == SLOW_VIEW && !any_slow(call))
        return 0;
    if ((r->row_bytes != 0 && size * element % r->row_bytes != 0) ||
        (r->channel_bytes != 0 && channels * element % r->channel_bytes != 0))
        return 0;
    return r->operation == call->operation && r->half == half_of(call) && r->fused == fused_of(call) && (r->dtypes & 1u << x->dtype) != 0 && (!r->fast || fast) &&
           (!r->saved || (r->saved > 0) == (call->saved_mean != NULL)) && within(r->images, images) &&
           within(r->channels, channels) && within(r->size, size) && within(r->values, images * size) &&
           within(r->lines, images * channels) && within(r->kilobytes, elements * element >> 10);
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
                    return pbn_refuse(PBN_E_ARGUMENT, "only graph, pointwise, columns, rows and layer_norm have plans to "
                                                           "choose from");
                if (strcmp(numbered_names[j], algorithm_names[i]) == 0)
                    break;
            }
            return PBN_OK;
        }
    return pbn_refuse(PBN_E_ARGUMENT, "the algorithm is none of auto, fast, plain, spatial, persistent, ex, graph, "
                                      "pointwise, split, columns, rows, layer_norm, dense");
}

/* Never the fastest in the sweep of an H200, and layer normalization takes seconds to compile. */
static int is_by_name_only(int kind, const pbn_call *call) {
    return kind == LAYER_NORM || (kind == COLUMNS && half_of(call) == 0 && columns_last(call));
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
        drop_built(p);
        memset(p, 0, sizeof *p);
        p->alignment = alignment;
        return status;
    }
    if (p->kind == DENSE)
        snprintf(p->name, sizeof p->name, "dense+%.*s", PLAN_NAME, p->inner->name);
    else
        pbn_copy_text(p->name, sizeof p->name, algorithm);
    return PBN_OK;
}

/* The elementwise half goes the way of inference, of which it is the twin, or else over columns or rows. */
static int try_given(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    static const char *const others[] = {"pointwise", "columns:1", "columns", "rows"};
    static const char why[] = "as inference: a pass over the data";
    const struct rule_table *table = handle->rules;
    pbn_call inference = *call;
    int status = PBN_E_UNSUPPORTED;
    inference.operation = PBN_OP_FORWARD_INFERENCE;
    inference.y_desc = call->dx_desc;
    inference.share = 0;
    for (size_t i = 0; status != PBN_OK && i < table->count; i++)
        if (fits(&table->rules[i], &inference, 0))
            status = try_algorithm(p, handle, call, table->rules[i].algorithm, why);
    for (size_t i = 0; status != PBN_OK && i < sizeof others / sizeof others[0]; i++)
        status = try_algorithm(p, handle, call, others[i], why);
    return status;
}

static const char whole_calls[] = "the calls of a whole batch norm are the faster way to this half, by the table";

/* "fast" takes every half, "auto" those that the table has as faster. Sums of rows are less exact than those of columns. */
static int try_half(pbn_plan *p, pbn_handle *handle, const pbn_call *call, int fast) {
    const struct rule_table *table = handle->rules;
    const rule *found = fast ? &half_rule : NULL;
    for (size_t i = 0; found == NULL && i < table->count; i++)
        if (fits(&table->rules[i], call, 0))
            found = &table->rules[i];
    if (found == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, whole_calls);
    return call->sums_only ? try_algorithm(p, handle, call, found->algorithm, found->why) : try_given(p, handle, call);
}

/* Whether the way's results stay in the stable class of the error bound for this call. The persistent kernels sum in
 * fixed point, those of rows lose digits where a channel begins with a value far from its others; Ex runs those of the
 * plain entry point, except over channels-last memory with saved statistics, which backward has computed where there
 * are none. */
static int is_stable(int kind, const pbn_call *call) {
    int view;
    if (kind == EX)
        return all_channels_last(call) && (call->saved_mean != NULL || call->operation == PBN_OP_BACKWARD) &&
               ((HALVES | SINGLE) & 1u << call->x_desc->dtype) != 0;
    if (kind == GRAPH && computes_moments(kind, call))
        return choose_moments(kind, call, &view) == NULL && view == COLUMNS;
    return kind != PERSISTENT && (kind != ROWS || call->operation == PBN_OP_FORWARD_INFERENCE);
}

/* With a residual one direction reads what the other left: the rule alone decides, also where it cannot be built, and
 * on the device alone that it was measured on. */
static int try_fused(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const struct rule_table *table = handle->rules;
    const rule *found = &ex_rule;
    int status;
    for (size_t i = 0; found == &ex_rule && i < table->count; i++)
        if (fits(&table->rules[i], call, 0) && unavailable(GRAPH, call) == NULL && graph_ready() == PBN_OK &&
            (residual(call) == NULL || strcmp(handle->device_name, rule_tables[0].device) == 0))
            found = &table->rules[i];
    status = try_algorithm(p, handle, call, found->algorithm, found->why);
    return status != PBN_OK && found != &ex_rule && residual(call) == NULL
               ? try_algorithm(p, handle, call, ex_rule.algorithm, ex_rule.why)
               : status;
}

static int may_take(const rule *r, const pbn_call *call, int fast) {
    int kind, skip;
    return fits(r, call, fast) &&
           (fast || (parse_algorithm(r->algorithm, &kind, &skip) == PBN_OK && is_stable(kind, call)));
}

static int cudnn_plan_create(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan) {
    const int any = algorithm != NULL && (strcmp(algorithm, "auto") == 0 || strcmp(algorithm, "fast") == 0);
    const struct rule_table *table;
    const char *missing;
    int by_table;
    const rule *last;
    pbn_plan *p;
    int status = PBN_OK;
    if (handle == NULL || call == NULL || plan == NULL || algorithm == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    *plan = NULL;
    missing = operation_tensors_missing(call);
    if (missing != NULL)
        return pbn_refuse(PBN_E_ARGUMENT, missing);
    p = calloc(1, sizeof *p);
    if (p == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    p->context = handle->context;
    p->alignment = common_alignment(call);
    forget_vendor_text();
    if (!any) {
        status = try_algorithm(p, handle, call, algorithm, "asked for");
    } else if (merges(call)) {
        status = algorithm[0] == 'f' || call->x_desc->dims[0] == MERGE_MEASURED
                     ? try_merge(p, handle, call)
                     : pbn_refuse(PBN_E_UNSUPPORTED, merge_untried);
    } else if (half_of(call) != 0) {
        status = try_half(p, handle, call, algorithm[0] == 'f');
    } else if (fuses(call) && call->operation != PBN_OP_FORWARD_INFERENCE) {
        status = try_fused(p, handle, call);
    } else {
        last = fuses(call) ? &fused_rule : call->mode == PBN_PER_ACTIVATION ? &plain_rule : &spatial_rule;
        if (api.graphs_only && last == &spatial_rule)
            last = &graph_rules[call->operation == PBN_OP_FORWARD_INFERENCE];
        table = handle->rules;
        status = PBN_E_UNSUPPORTED;
        for (size_t i = 0; status != PBN_OK && last != &plain_rule && i < table->count; i++)
            if (may_take(&table->rules[i], call, algorithm[0] == 'f'))
                status = try_algorithm(p, handle, call, table->rules[i].algorithm, table->rules[i].why);
        by_table = status == PBN_OK;
        if (status != PBN_OK && last != &plain_rule && fits(&split_rule, call, 0))
            status = try_algorithm(p, handle, call, split_rule.algorithm, split_rule.why);
        if (status != PBN_OK) {
            status = try_algorithm(p, handle, call, last->algorithm, last->why);
            by_table = last == &spatial_rule;
        }
        if (status == PBN_OK && by_table && strcmp(handle->device_name, table->device) != 0) {
            snprintf(p->told, sizeof p->told, "%s (by the table of %s, cuDNN %s, %s: there is none of this device%s%s)",
                     p->why, table->device, table->libraries, table->date, handle->device_name[0] != '\0' ? ", " : "",
                     handle->device_name);
            p->why = p->told;
        }
    }
    if (status != PBN_OK) {
        cudnn_plan_destroy(p);
        return status;
    }
    p->any = any;
    *plan = p;
    return PBN_OK;
}

/* Without "plain", which is spatial or persistent, and what is by name only; with some of the plans after the heuristic's
 * first. */
static const char *cudnn_plan_candidate(const pbn_call *call, int fast, int index) {
    static const char *const names[] = {
        "spatial",     "ex",          "graph",   "graph:1",   "graph:2",   "graph:3", "pointwise", "pointwise:1",
        "pointwise:2", "pointwise:3", "columns", "columns:1", "columns:2", "rows",    "rows:1",    "rows:2",
        "split",       "dense",       "persistent",
    };
    int kind, skip;
    if (call == NULL || operation_tensors_missing(call) != NULL)
        return NULL;
    if (call->mode == PBN_PER_ACTIVATION)
        return index == 0 && !api.graphs_only ? plain_rule.algorithm : NULL;
    /* With a residual the two directions must go one way, which leaves the reserve that the other reads. */
    if (residual(call) != NULL && call->operation != PBN_OP_FORWARD_INFERENCE)
        return index == 0 && cannot_fuse(call) == NULL ? "ex" : NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (parse_algorithm(names[i], &kind, &skip) != PBN_OK || unavailable(kind, call) != NULL || is_by_name_only(kind, call) ||
            (kind == SPLIT && call->x_desc->dims[0] <= PLAIN_ROWS) || !(fast || is_stable(kind, call)))
            continue; /* split of one piece is spatial */
        if (index-- == 0)
            return names[i];
    }
    return NULL;
}

static const char *cudnn_unrepeated(const pbn_call *call, const char *algorithm) {
    static const char dense[] = "dense+";
    const size_t front = sizeof dense - 1;
    int kind, skip;
    if (algorithm == NULL || strcmp(algorithm, merge_name) == 0)
        return NULL;
    const int copied = strncmp(algorithm, dense, front) == 0; /* of packed copies, by the way whose name follows */
    if (parse_algorithm(copied ? algorithm + front : algorithm, &kind, &skip) != PBN_OK || !repeats(kind, call))
        return bits_differ;
    /* What those compute first `call` does not say, whose own tensors are not packed. */
    return copied && (kind == EX || kind == GRAPH) && call->operation == PBN_OP_BACKWARD && call->saved_mean == NULL
               ? bits_differ
               : NULL;
}

static void cudnn_plan_info(const pbn_plan *plan, size_t *workspace, size_t *reserve, const char **algorithm,
                            const char **why) {
    *workspace = plan->workspace;
    *reserve = plan->reserve;
    *algorithm = plan->name;
    *why = plan->why;
}

/* `call` was held against cannot_fuse when the plan was made: alpha 1, beta 0, saved statistics, no float64. */
static int run_fused(pbn_handle *handle, const pbn_plan *p, const pbn_call *call) {
    const int mode = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, ops = fused_ops(call);
    const float one = 1, zero = 0;
    void *t = p->packed.compute, *z = residual(call) != NULL ? t : NULL, *param = p->one.compute;
    void *reserve = p->reserve != 0 ? call->reserve : NULL;
    const int backward = call->operation == PBN_OP_BACKWARD;
    if (call->x == NULL || call->y == NULL || call->scale == NULL || call->bias == NULL || call->saved_mean == NULL ||
        call->saved_inv_variance == NULL || (z != NULL && (backward ? call->dz : call->z) == NULL) ||
        (backward && (call->dy == NULL || call->dx == NULL || call->dscale == NULL || call->dbias == NULL)))
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (((data_bits(call) | param_bits(call)) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, fused_alignment);
    if (backward)
        return api.cudnnBatchNormalizationBackwardEx(
            handle->vendor, mode, ops, &one, &zero, &one, &zero, t, call->x, t, call->y, t, call->dy, z,
            z != NULL ? call->dz : NULL, t, call->dx, param, call->scale, call->bias, call->dscale, call->dbias,
            call->epsilon, call->saved_mean, call->saved_inv_variance, p->activation, call->workspace,
            call->workspace_size, reserve, p->reserve);
    const int status = check_pair(call->running_mean, call->running_variance);
    if (status != PBN_OK)
        return status;
    return api.cudnnBatchNormalizationForwardTrainingEx(
        handle->vendor, mode, ops, &one, &zero, t, call->x, z, z != NULL ? call->z : NULL, t, call->y, param,
        call->scale, call->bias, call->factor, call->running_mean, call->running_variance, call->epsilon,
        call->saved_mean, call->saved_inv_variance, p->activation, call->workspace, call->workspace_size, reserve,
        p->reserve);
}

static int run_ex(pbn_handle *handle, const pbn_call *call) {
    scalar alpha, beta, alpha_param, beta_param;
    void *x, *y, *dy, *dx, *param;
    const int dtype = call->x_desc->dtype;
    const int backward = call->operation == PBN_OP_BACKWARD;
    int status;
    if ((status = to_compute(call->x_desc, &x)) != PBN_OK || (status = to_compute(call->param_desc, &param)) != PBN_OK ||
        (status = to_scalar(call->alpha, dtype, &alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, dtype, &beta)) != PBN_OK ||
        (status = check_pair(call->saved_mean, call->saved_inv_variance)) != PBN_OK ||
        (status = check_alignment(dtype, 1, data_bits(call), param_bits(call))) != PBN_OK)
        return status;
    if (((data_bits(call) | param_bits(call)) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, ex_alignment);
    if (backward) {
        if ((status = to_compute(call->dy_desc, &dy)) != PBN_OK || (status = to_compute(call->dx_desc, &dx)) != PBN_OK ||
            (status = to_scalar(call->alpha_param, dtype, &alpha_param)) != PBN_OK ||
            (status = to_scalar(call->beta_param, dtype, &beta_param)) != PBN_OK)
            return status;
        return api.cudnnBatchNormalizationBackwardEx(
            handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, PBN_CUDNN_BATCHNORM_OPS_BN, &alpha, &beta,
            &alpha_param, &beta_param, x, call->x, NULL, NULL, dy, call->dy, NULL, NULL, dx, call->dx, param,
            call->scale, NULL, call->dscale, call->dbias, call->epsilon, call->saved_mean, call->saved_inv_variance,
            NULL, call->workspace, call->workspace_size, NULL, 0);
    }
    if ((status = check_pair(call->running_mean, call->running_variance)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y)) != PBN_OK)
        return status;
    return api.cudnnBatchNormalizationForwardTrainingEx(
        handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT, PBN_CUDNN_BATCHNORM_OPS_BN, &alpha, &beta, x, call->x,
        NULL, NULL, y, call->y, param, call->scale, call->bias, call->factor, call->running_mean,
        call->running_variance, call->epsilon, call->saved_mean, call->saved_inv_variance, NULL, call->workspace,
        call->workspace_size, NULL, 0);
}

/* The statistics that `call` does not have, to the front of its workspace; `with` is the call that has them. */
static int run_moments(pbn_handle *handle, const pbn_plan *p, const pbn_call *call, pbn_call *with) {
    char *space = call->workspace;
    pbn_call forward;
    /* What the way itself would refuse, before anything is enqueued. */
    if (p->kind == EX && ((data_bits(call) | param_bits(call)) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, ex_alignment);
    if (p->kind == GRAPH && (param_bits(call) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, graph_alignment);
    *with = *call;
    with->saved_mean = space;
    with->saved_inv_variance = space + p->vectors / 2;
    with->workspace = space + p->vectors;
    with->workspace_size = call->workspace_size - p->vectors;
    forward = moments_call(with, with->saved_mean, with->saved_inv_variance);
    return run_lines(handle, p->moments, &forward);
}

static int run_split(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    pbn_call piece = *call;
    const int64_t rows = call->x_desc->dims[0];
    const int64_t size = (int64_t)pbn_item_size(call->x_desc->dtype);
    int status = PBN_OK;
    for (int64_t row = 0; status == PBN_OK && row < rows; row += SPLIT_ROWS) {
        const int whole = rows <= SPLIT_ROWS || row + SPLIT_ROWS <= rows;
        piece.x_desc = whole ? &p->part : &p->rest;
        piece.y_desc = whole ? &p->y_part : &p->y_rest;
        piece.x = (const char *)call->x + row * call->x_desc->strides[0] * size;
        piece.y = (char *)call->y + row * call->y_desc->strides[0] * size;
        status = cudnn_forward_inference(handle, &piece);
    }
    return status;
}

static int cudnn_plan_run(pbn_handle *handle, pbn_plan *plan, const pbn_call *call) {
    pbn_call plain, with;
    int kind, status;
    if (handle == NULL || plan == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (plan->workspace > call->workspace_size ||
        (plan->workspace != 0 && (bits(call->workspace) & 63) != 0) || (plan->workspace != 0 && call->workspace == NULL))
        return pbn_refuse(PBN_E_WORKSPACE, "the plan's workspace is missing, too small or not aligned to 64 bytes");
    if (plan->reserve > call->reserve_size ||
        (plan->reserve != 0 && (call->reserve == NULL || (bits(call->reserve) & 63) != 0)))
        return pbn_refuse(PBN_E_WORKSPACE, "the plan's reserve is missing, too small or not aligned to 64 bytes");
    if (fuses(call) != plan->fused)
        return pbn_refuse(PBN_E_ARGUMENT, "the plan was made with another activation or residual");
    if (plan->given != (call->share != 0) || plan->moments_only != (call->sums_only != 0))
        return pbn_refuse(PBN_E_ARGUMENT, "the plan was made for another half of a batch norm, or for the whole");
    if (plan->given && plan->kind != MERGE && plan->values[VALUE_LESS] != (float)-call->share) { /* of another number of values */
        plan->values[VALUE_LESS] = (float)-call->share;
        for (size_t i = 0; i < sizeof plan->graphs / sizeof plan->graphs[0]; i++)
            graph_drop_pack(&plan->graphs[i]);
    }
    forget_vendor_text();
    plain = *call;
    plain.mode = plan->mode;
    kind = plan->kind;
    /* Slices of one buffer of parameters. */
    if (plan->any && !plan->fused && (kind == EX || kind == GRAPH) && (param_bits(call) & (WIDE_ALIGNMENT - 1)) != 0) {
        plain.mode = PBN_SPATIAL;
        kind = PLAIN;
    }
    if (plan->moments != NULL && kind != PLAIN) {
        status = run_moments(handle, plan, call, &with);
        if (status != PBN_OK)
            return status;
        call = &with;
    }
    switch (kind) {
    case EX:
        return plan->activation != NULL ? run_fused(handle, plan, call) : run_ex(handle, call);
    case GRAPH:
    case POINTWISE:
        return run_graph(handle, plan, call);
    case SPLIT:
        return run_split(handle, plan, call);
    case COLUMNS:
    case ROWS:
    case LAYER_NORM:
        return run_lines(handle, plan, call);
    case DENSE:
        return run_dense(handle, plan, call);
    case MERGE:
        return run_merge_graphs(handle, plan, call);
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
