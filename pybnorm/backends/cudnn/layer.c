/* Statistics of packed channels-first memory by cuDNN's layer normalization: one kernel that reads each row of the matrix
 * (N*C*P, S/P) once and gives its mean and inverse standard deviation, to 1e-7 and 1e-6 of themselves (H200, 9.19). The
 * row's variance is what the latter says; from there on all is as with other lines (matrix.c). Its y is of no use. Part of
 * adapter.c.
 *
 * It has run on a stand-in of cuDNN only, so far; its kernel ran on an H200 through NVIDIA's frontend, with y written, an
 * epsilon of 1e-5 and parameters of their own.
 *
 * Scale and bias are numbers that do not matter, and so x itself is read for them. Where y has to be written it goes to
 * the call's own y, or a backward's dx, before the result does. */

static const char *unavailable(int kind, const pbn_call *call);

/* What the layer normalization adds to a row's variance, so that a row of equal values has one, of 0, to subtract it
 * from; small beside the square of any difference of float32 numbers that has one. */
#define LAYER_EPSILON FLT_MIN

/* A row is a block's or a few blocks' work: shorter pieces of it where they are few or long. */
enum { LAYER_MOST = 1 << 14 };

static int64_t layer_pieces(const pbn_tensor *x) {
    const int64_t lines = x->dims[0] * x->dims[1], size = pbn_numel(x->rank, x->dims) / lines;
    const int64_t elements = x->dtype == PBN_FLOAT32 ? 4 : 8;
    int64_t pieces = 1;
    for (int64_t i = 1; i <= size / ROW_LEAST; i++) {
        if (size % i != 0 || (size % elements == 0 && size / i % elements != 0))
            continue;
        pieces = i;
        if (lines * i >= ROWS_WANTED && size / i <= LAYER_MOST)
            break;
    }
    return pieces;
}

/* The view whose last step, or backward's steps, follow the statistics: rows of whole vectors where they are enough and
 * long (H200, 9.19), but in backward only where there are no columns, since sums of those are more exact. */
static int layer_view(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int64_t lines = x->dims[0] * x->dims[1], size = pbn_numel(x->rank, x->dims) / lines;
    pbn_call after = *call;
    int rows;
    if (call->operation == PBN_OP_FORWARD_TRAINING)
        after.operation = PBN_OP_FORWARD_INFERENCE;
    rows = unavailable(ROWS, &after) == NULL;
    if (after.operation == PBN_OP_FORWARD_INFERENCE && rows && size >= ROW_LONG &&
        size * (int64_t)pbn_item_size(x->dtype) % 16 == 0 && lines * row_pieces(x) >= ROWS_ENOUGH)
        return ROWS;
    return unavailable(COLUMNS, &after) == NULL || !rows ? COLUMNS : ROWS;
}

static const char *layer_unavailable(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int64_t rows = x->dims[0] * layer_pieces(x);
    pbn_call after = *call;
    if (call->operation == PBN_OP_FORWARD_INFERENCE || (call->operation == PBN_OP_BACKWARD && call->saved_mean != NULL))
        return "the layer normalization computes statistics, which inference and a backward with saved ones are given";
    if (common_alignment(call) < WIDE_ALIGNMENT)
        return graph_alignment;
    if (x->dims[0] > PLAIN_ROWS || rows * x->dims[1] > ROWS_MOST || rows * x->dims[1] < 2)
        return "the layer normalization is for up to 65535 images and for 2 to 524288 rows N * C";
    if (call->operation == PBN_OP_FORWARD_TRAINING)
        after.operation = PBN_OP_FORWARD_INFERENCE;
    return unavailable(layer_view(call), &after);
}

static void *layer_tensor(graph *g, int slot, int dtype, int64_t rows, int64_t values) {
    const int64_t dims[4] = {rows, values, 1, 1}, strides[4] = {values, 1, values, values};
    return graph_tensor(g, slot, dtype, 4, dims, strides, WIDE_ALIGNMENT);
}

static int build_layer_norm(pbn_plan *p, const pbn_call *call, void *vendor_handle, int out, int params) {
    graph *g = &p->graphs[0];
    const int dtype = call->x_desc->dtype;
    void *op;
    graph_drop(g);
    memset(g, 0, sizeof *g);
    op = graph_create(g, PBN_CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR);
    graph_set_int(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_MODE, PBN_CUDNN_TYPE_NORM_MODE, PBN_CUDNN_LAYER_NORM);
    graph_set_int(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, PBN_CUDNN_TYPE_NORM_FWD_PHASE,
                  PBN_CUDNN_NORM_FWD_TRAINING);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, layer_tensor(g, SLOT_X, dtype, p->lines, p->depth));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, layer_tensor(g, out, dtype, p->lines, p->depth));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, layer_tensor(g, SLOT_X, params, 1, p->depth));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, layer_tensor(g, SLOT_X, params, 1, p->depth));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC, number_tensor(p, g, 2, LAYER_EPSILON));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC, line_tensor(p, g, LINE_2));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC, line_tensor(p, g, LINE_0));
    graph_add(g, op);
    return graph_build(g, vendor_handle, 0);
}

/* The variance, for it never below 0, from the inverse standard deviation. */
static int build_layer_variance(pbn_plan *p, void *vendor_handle) {
    graph *g = &p->graphs[2];
    void *deviation = lone_tensor(p, g, SLOT_VIRTUAL), *square = lone_tensor(p, g, SLOT_VIRTUAL);
    void *difference = lone_tensor(p, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RECIPROCAL, lone_tensor(p, g, LINE_0), NULL, deviation);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, deviation, deviation, square);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, square, number_tensor(p, g, 2, LAYER_EPSILON), difference);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RELU_FWD, difference, NULL, lone_tensor(p, g, LINE_3));
    return graph_build(g, vendor_handle, 0);
}

/* Means of the rows to LINE_2 and variances to LINE_3. Best without y; there are fast kernels for 16-bit data with
 * parameters of that dtype, and for some shapes with float32 ones alone. */
static int build_layer_moments(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    const int outs[] = {SLOT_VIRTUAL, SLOT_Y}, params[] = {call->x_desc->dtype, PBN_FLOAT32};
    int status = PBN_E_UNSUPPORTED;
    for (size_t i = 0; i < 4 && status != PBN_OK; i++) {
        if (i % 2 != 0 && params[0] == params[1])
            continue;
        status = build_layer_norm(p, call, vendor_handle, outs[i / 2], params[i % 2]);
        p->writes_first = outs[i / 2] == SLOT_Y;
    }
    return status != PBN_OK ? status : build_layer_variance(p, vendor_handle);
}

static int build_layer_apply(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    pbn_call after = *call;
    pbn_plan *inner = calloc(1, sizeof *inner);
    int status;
    if (inner == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    p->inner = inner;
    after.operation = PBN_OP_FORWARD_INFERENCE;
    inner->kind = layer_view(call);
    inner->alignment = p->alignment;
    if ((status = make_lines(inner, &after)) != PBN_OK)
        return status;
    status = build_forward_apply(inner, &after, vendor_handle, skip);
    inner->workspace = inner->scratch + (size_t)inner->graphs[4].workspace;
    return status;
}

/* The last step by the other plan, in what the vendor's part of the workspace was till then. */
static int run_layer_apply(pbn_handle *handle, pbn_plan *p, const pbn_call *call, void *const *slots) {
    pbn_call after = *call;
    void *others[SLOT_COUNT];
    int status;
    after.workspace = (char *)call->workspace + p->scratch;
    bind(p->inner, &after, others);
    for (int i = CHANNEL_A; i <= CHANNEL_C; i++)
        others[i] = slots[i];
    if ((status = run_expand(handle, p->inner, others)) != PBN_OK)
        return status;
    return graph_run(&p->inner->graphs[4], handle->vendor, others, (char *)after.workspace + p->inner->scratch);
}

