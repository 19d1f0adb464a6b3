/* The statistics of several batches, of one number of values each, to those of all. Part of adapter.c.
 *
 * x has a row of means for each rank, z one of their variances, y takes the merged variance. All is pointwise over vectors
 * of C, unrolled over the ranks: one kernel, where the library's own calls would be eight. Means are taken less the first
 * rank's, and those less their own mean, so that nothing cancels. */

static const char no_merge[] = "the statistics of 2 to 8 ranks are merged, in float32";
static const char merge_untried[] = "on a GPU the merge of the ranks' statistics by one graph has run for 2 ranks";
enum { MERGE_MEASURED = 2 };

static int is_single(double value);
static void drop_built(pbn_plan *p);

static int merges(const pbn_call *call) {
    return call->operation == PBN_OP_FORWARD_TRAINING && call->sums_only && call->share != 0;
}

/* out = a (mode) b; a virtual one if `out` is NULL. */
static void *merge_step(const pbn_call *call, graph *g, int mode, void *a, void *b, void *out) {
    if (out == NULL)
        out = channel_tensor(call, g, SLOT_VIRTUAL);
    graph_pointwise(g, mode, a, b, out);
    return out;
}

static void *merge_sum(const pbn_call *call, graph *g, int64_t count, void *const *terms) {
    void *sum = terms[0];
    for (int64_t i = 1; i < count; i++)
        sum = merge_step(call, g, PBN_CUDNN_POINTWISE_ADD, sum, terms[i], NULL);
    return sum;
}

/* In one graph, or in two if `parts` is 2. */
static int build_merge(pbn_plan *p, const pbn_call *call, void *vendor_handle, int parts) {
    const double n = floor(1 / call->share + 0.5);
    const int64_t ranks = call->x_desc->dims[0];
    graph *g = &p->graphs[0];
    void *first = channel_tensor(call, g, LINE_0), *each = number_tensor(p, g, 3, 1.0 / (double)ranks);
    void *mean = channel_tensor(call, g, SLOT_SAVED_MEAN), *variance = channel_tensor(call, g, SLOT_Y);
    void *apart[MERGE_RANKS], *squares[MERGE_RANKS], *inside[MERGE_RANKS], *shift, *sum, *within;
    int status;
    for (int i = 0; i < ranks; i++) {
        inside[i] = channel_tensor(call, g, LINE_0 + MERGE_RANKS + i);
        if (i > 0)
            apart[i] = merge_step(call, g, PBN_CUDNN_POINTWISE_SUB, channel_tensor(call, g, LINE_0 + i), first, NULL);
    }
    shift = merge_step(call, g, PBN_CUDNN_POINTWISE_MUL, merge_sum(call, g, ranks - 1, apart + 1), each, NULL);
    merge_step(call, g, PBN_CUDNN_POINTWISE_ADD, first, shift, mean);
    squares[0] = merge_step(call, g, PBN_CUDNN_POINTWISE_MUL, shift, shift, NULL);
    for (int i = 1; i < ranks; i++) {
        sum = merge_step(call, g, PBN_CUDNN_POINTWISE_SUB, apart[i], shift, NULL);
        squares[i] = merge_step(call, g, PBN_CUDNN_POINTWISE_MUL, sum, sum, NULL);
    }
    sum = merge_step(call, g, PBN_CUDNN_POINTWISE_MUL, merge_sum(call, g, ranks, squares), each, NULL);
    within = merge_step(call, g, PBN_CUDNN_POINTWISE_MUL, merge_sum(call, g, ranks, inside),
                        number_tensor(p, g, 5, call->alpha), NULL);
    merge_step(call, g, PBN_CUDNN_POINTWISE_ADD, sum, within, variance);
    if (parts == 2) {
        if ((status = graph_build(g, vendor_handle, 0)) != PBN_OK)
            return status;
        g = &p->graphs[1];
        mean = channel_tensor(call, g, SLOT_SAVED_MEAN);
        variance = channel_tensor(call, g, SLOT_Y);
    }
    sum = merge_step(call, g, PBN_CUDNN_POINTWISE_ADD, variance, number_tensor(p, g, VALUE_EPSILON, 0), NULL);
    merge_step(call, g, PBN_CUDNN_POINTWISE_RSQRT, sum, NULL, channel_tensor(call, g, SLOT_SAVED_INV_VARIANCE));
    if (call->running_mean != NULL) {
        update_running(p, call, g, SLOT_RUNNING_MEAN, mean, number_tensor(p, g, VALUE_FACTOR, 0));
        update_running(p, call, g, SLOT_RUNNING_VARIANCE, variance, number_tensor(p, g, 6, call->factor * n / (n - 1)));
    }
    return graph_build(g, vendor_handle, 0);
}

static int try_merge(pbn_plan *p, pbn_handle *handle, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    int64_t most = 0;
    int status;
    if (x->rank != 2 || x->dtype != PBN_FLOAT32 || x->strides[1] != 1 || x->dims[0] < 2 || x->dims[0] > MERGE_RANKS ||
        call->z_desc == NULL || call->saved_mean == NULL || !is_single(call->epsilon))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_merge);
    if ((status = graph_ready()) != PBN_OK)
        return status;
    for (int parts = 1; parts <= 2; parts++) {
        drop_built(p);
        memset(p->graphs, 0, sizeof p->graphs);
        if ((status = build_merge(p, call, handle->vendor, parts)) == PBN_OK)
            break;
    }
    for (int i = 0; i < 2; i++)
        most = p->graphs[i].workspace > most ? p->graphs[i].workspace : most;
    p->kind = MERGE;
    p->fused = fuses(call);
    p->given = p->moments_only = 1;
    p->values[VALUE_EPSILON] = (float)call->epsilon;
    p->values[VALUE_FACTOR] = (float)call->factor;
    p->values[VALUE_LESS] = (float)-call->share;
    p->workspace = (size_t)most;
    p->why = p->graphs[1].plan == NULL ? "one kernel" : "two kernels";
    pbn_copy_text(p->name, sizeof p->name, merge_name);
    return status;
}

static int run_merge_graphs(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    const int64_t step = call->x_desc->strides[0] * (int64_t)sizeof(float);
    void *slots[SLOT_COUNT];
    int status = check_alignment(PBN_FLOAT32, 1, data_bits(call), param_bits(call));
    if (status != PBN_OK)
        return status;
    if (call->x == NULL || call->z == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (p->values[VALUE_LESS] != (float)-call->share)
        return pbn_refuse(PBN_E_ARGUMENT, "the plan was made for another number of values");
    bind(p, call, slots);
    for (int i = 0; i < call->x_desc->dims[0]; i++) {
        slots[LINE_0 + i] = (char *)(uintptr_t)call->x + i * step;
        slots[LINE_0 + MERGE_RANKS + i] = (char *)(uintptr_t)call->z + i * step;
    }
    status = graph_run(&p->graphs[0], handle->vendor, slots, call->workspace);
    if (status == PBN_OK && p->graphs[1].plan != NULL)
        status = graph_run(&p->graphs[1], handle->vendor, slots, call->workspace);
    return status;
}
