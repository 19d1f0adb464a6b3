/* The three batch-norm calls: how each reaches its primitive, and its run. Part of adapter.c. */

#define NOWHERE SIZE_MAX
#define ALIGNMENT 64
#define MOST_TRIED 4096 /* numbers of images that may divide a matrix whose bytes are too many for one */

/* How one call reaches the primitive, a function of the call's descriptors, scalars and of which
 * statistics pointers are given. Offsets lie in the caller's workspace; NOWHERE means not needed.
 *
 * One memory order serves all tensors of the primitive, x's own where that is possible. A tensor in
 * another order is copied; a result in another order, or to be blended, is computed in the workspace,
 * in place of the copied input if there is one. 16-bit data that are blended, or that oneDNN has no
 * kernel for, are computed in float32, so that the result is rounded to 16 bits once. */
typedef struct plan {
    view memory;
    int64_t order[PBN_MAX_RANK]; /* strides, in x's rank, of the memory the primitive sees */
    int64_t count;               /* elements of x */
    int64_t params;              /* statistics */
    /* Parameter (c, s) is element c*positions + s for the caller and s*channels + c for the primitive;
     * positions is 1 unless per-activation parameters follow a channels-last x. */
    int64_t channels, positions;
    int recompute;               /* backward without saved statistics */
    size_t x, dy, result, statistics_y;
    size_t scale, bias, mean, variance, dscale, dbias;
    size_t scratchpad, total;
    primitive *steps[KINDS]; /* NULL where none is needed */
    uint64_t made[KINDS];    /* others may have taken their places since */
} plan;

static size_t reserve(plan *p, size_t bytes) {
    size_t offset = p->total;
    p->total += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return offset;
}

static void *place(char *base, size_t offset) {
    return offset == NOWHERE ? NULL : base + offset;
}

static int is_blended(const pbn_call *call) {
    return call->alpha != 1 || call->beta != 0;
}

/* Whether 16-bit data are computed in float32. */
static int widened(const pbn_call *call) {
    const int dtype = call->x_desc->dtype;
    return dtype != PBN_FLOAT32 && (is_blended(call) || !api.runs[dtype][call->operation]);
}

static int step(pbn_handle *h, plan *p, kind k, float epsilon) {
    int code = primitive_get(h, k, epsilon, &p->memory, p->params, &p->steps[k]);
    if (code != PBN_OK)
        return code;
    p->made[k] = p->steps[k]->made;
    if (p->steps[k]->scratchpad > p->scratchpad)
        p->scratchpad = p->steps[k]->scratchpad;
    return PBN_OK;
}

static view matrix(int dtype, int64_t elements, int64_t width) {
    return (view){dtype, 2, {elements / width, width}, {width, 1}};
}

/* The same matrix, with a column for each channel: that of (rows, columns) takes two to three times as long. Kernels count
 * the bytes of an image in 32 bits, and read and write elsewhere past that. */
static view side_by_side(int dtype, int64_t elements, int64_t width) {
    const int64_t rows = elements / width, most = INT32_MAX / width / (int64_t)pbn_item_size(dtype);
    const int64_t least = most > 0 ? (rows - 1) / most + 1 : rows;
    for (int64_t images = least; most > 0 && images < least + MOST_TRIED; images++)
        if (rows % images == 0)
            return (view){dtype, 4, {images, width, rows / images, 1}, {rows / images * width, 1, width, width}};
    return matrix(dtype, elements, width);
}

static int matches(const pbn_tensor *t, const int64_t *order) {
    for (int i = 0; i < t->rank; i++)
        if (t->dims[i] != 1 && t->strides[i] != order[i])
            return 0;
    return 1;
}

/* Chooses the memory order and the view of it that the primitive takes. */
static void choose_memory(plan *p, const pbn_call *call, int one_order, int widen) {
    const pbn_tensor *x = call->x_desc;
    const int per_activation = call->mode == PBN_PER_ACTIVATION;
    int64_t c = x->dims[1], s = p->count / x->dims[0] / c;
    int64_t *d = p->memory.dims, *t = p->memory.strides;
    const int last = x->layout == PBN_CHANNELS_LAST;
    const int strided = x->layout == PBN_STRIDED && one_order && !per_activation && x->rank <= VIEW_RANK;
    p->memory.dtype = widen ? PBN_FLOAT32 : x->dtype;
    p->channels = p->params = per_activation ? c * s : c;
    p->positions = 1;
    if (strided) /* oneDNN does not look at the stride of an axis of length 1 */
        memcpy(p->order, x->strides, sizeof *p->order * (size_t)x->rank);
    else
        pbn_packed_strides(x->rank, x->dims, last ? PBN_CHANNELS_LAST : PBN_CHANNELS_FIRST, p->order);
    if (per_activation) {
        p->memory = side_by_side(p->memory.dtype, p->count, c * s);
        if (last) {
            p->channels = c;
            p->positions = s;
        }
    } else if (!strided && (s == 1 || (last && s * c * (int64_t)pbn_item_size(p->memory.dtype) > INT32_MAX))) {
        p->memory = side_by_side(p->memory.dtype, p->count, c);
    } else if (x->rank <= VIEW_RANK) {
        p->memory.rank = x->rank;
        memcpy(d, x->dims, sizeof *d * (size_t)x->rank);
        memcpy(t, p->order, sizeof *t * (size_t)x->rank);
    } else {
        p->memory.rank = 3;
        d[0] = x->dims[0], t[0] = c * s;
        d[1] = c, t[1] = last ? 1 : s;
        d[2] = s, t[2] = last ? c : 1;
    }
}

static int plan_call(pbn_handle *h, const pbn_call *call, plan *p) {
    const int backward = call->operation == PBN_OP_BACKWARD, inference = call->operation == PBN_OP_FORWARD_INFERENCE;
    const pbn_tensor *x = call->x_desc, *out = backward ? call->dx_desc : call->y_desc;
    int code = check_support(call->operation, call->mode, x->dtype);
    if (code == PBN_OK && call->activation != PBN_ACTIVATION_NONE)
        code = pbn_refuse(PBN_E_UNSUPPORTED, "oneDNN's fused ReLU is not used: its backward wants the forward's "
                                             "workspace, which no other library here has");
    if (code != PBN_OK)
        return code;

    memset(p, 0, sizeof *p);
    p->x = p->dy = p->result = p->statistics_y = NOWHERE;
    p->scale = p->bias = p->mean = p->variance = p->dscale = p->dbias = p->scratchpad = NOWHERE;
    p->count = pbn_numel(x->rank, x->dims);
    p->recompute = backward && call->saved_mean == NULL;
    const int widen = widened(call), copied = widen || is_blended(call);
    const int one_order = !copied && !p->recompute && matches(out, x->strides) &&
                          (!backward || matches(call->dy_desc, x->strides));
    choose_memory(p, call, one_order, widen);

    /* Tensors. The result is known to be copied to its place whenever it has an offset here. */
    const size_t tensor = (size_t)p->count * pbn_item_size(p->memory.dtype);
    const int permuted = p->positions > 1, direct = !copied && matches(out, p->order);
    if (widen || !matches(x, p->order))
        p->x = reserve(p, tensor);
    if (backward && (widen || !matches(call->dy_desc, p->order)))
        p->dy = reserve(p, tensor);
    if (!direct) {
        p->result = backward ? p->dy : p->x;
        if (p->result == NOWHERE) {
            p->result = reserve(p, tensor);
            p->statistics_y = p->result;
        }
    }
    if (p->recompute && p->statistics_y == NOWHERE)
        p->statistics_y = reserve(p, tensor);

    /* Vectors. Backward always changes their form: signs, variance, blending. */
    const size_t vector = (size_t)p->params * sizeof(float);
    if (backward || permuted)
        p->scale = reserve(p, vector);
    if (!backward && permuted)
        p->bias = reserve(p, vector);
    if (permuted || p->recompute || (!backward && !inference && call->saved_mean == NULL))
        p->mean = reserve(p, vector);
    if (permuted || backward || (!inference && call->saved_inv_variance == NULL))
        p->variance = reserve(p, vector);
    if (backward) {
        p->dscale = reserve(p, vector);
        p->dbias = reserve(p, vector);
    }

    /* With saved statistics the variance is made from the inverse standard deviation, epsilon included. */
    const float epsilon = backward && !p->recompute ? 0.0f : (float)call->epsilon;
    p->scratchpad = 0; /* the size, as the steps ask for it; its offset once it is reserved */
    code = step(h, p, backward ? BACKWARD : inference ? INFERENCE : TRAINING, epsilon);
    if (code == PBN_OK && p->recompute)
        code = step(h, p, STATISTICS, 0.0f);
    p->scratchpad = p->scratchpad > 0 ? reserve(p, p->scratchpad) : NOWHERE;
    return code;
}

/* The workspace, or NULL where none is needed. */
static int claim(size_t total, const pbn_call *call, char **base) {
    *base = total > 0 ? (char *)call->workspace : NULL;
    if (total > 0 && (*base == NULL || (uintptr_t)*base % ALIGNMENT != 0 || call->workspace_size < total))
        return pbn_refuse(PBN_E_WORKSPACE, "the workspace is missing, smaller than the workspace query's answer or not "
                                           "aligned to 64 bytes");
    return PBN_OK;
}

static int workspace_size(pbn_handle *h, const pbn_call *call, size_t *bytes) {
    plan p;
    *bytes = 0;
    if (call->operation == PBN_OP_AXPBY)
        return PBN_OK;
    int code = plan_call(h, call, &p);
    if (code == PBN_OK)
        *bytes = p.total;
    return code;
}

/* The caller's tensor as the primitive reads it. */
static const void *tensor_in(const plan *p, const pbn_tensor *t, const void *data, void *copy) {
    if (copy == NULL)
        return data;
    blend(t->rank, t->dims, t->dtype, data, t->strides, 1, p->memory.dtype, copy, p->order, 0);
    return copy;
}

static void tensor_out(const plan *p, const pbn_tensor *t, const void *result, void *data, double alpha, double beta) {
    if (result != NULL)
        blend(t->rank, t->dims, p->memory.dtype, result, p->order, alpha, t->dtype, data, t->strides, beta);
}

/* For each parameter its index for the caller, u, and for the primitive, v: nearly always one loop. */
#define EACH_PARAMETER(p, u, v)                                                                           \
    for (int64_t s_ = 0, v = 0, last_ = (p)->channels; s_ < (p)->positions; s_++, last_ += (p)->channels) \
        for (int64_t u = s_; v < last_; u += (p)->positions, v++)

static const float *vector_in(const plan *p, const void *data, float *copy) {
    const float *from = (const float *)data;
    if (copy == NULL)
        return from;
    EACH_PARAMETER(p, u, v)
        copy[v] = from[u];
    return copy;
}

/* ------------------------------------------------------------------ the calls */

static int run_forward_training(pbn_handle *h, const plan *p, const pbn_call *call) {
    char *base;
    int code = claim(p->total, call, &base);
    if (code != PBN_OK)
        return code;
    const int64_t m = p->count / p->params;

    void *result = place(base, p->result);
    float *mean = p->mean != NOWHERE ? place(base, p->mean) : call->saved_mean;
    float *variance = p->variance != NOWHERE ? place(base, p->variance) : call->saved_inv_variance;
    const void *pointers[] = {tensor_in(p, call->x_desc, call->x, place(base, p->x)),
                              result != NULL ? result : call->y,
                              mean,
                              variance,
                              vector_in(p, call->scale, place(base, p->scale)),
                              vector_in(p, call->bias, place(base, p->bias))};
    code = primitive_run(h, p->steps[TRAINING], pointers, place(base, p->scratchpad));
    if (code != PBN_OK)
        return code;

    if (call->running_mean != NULL) {
        float *running_mean = call->running_mean, *running_variance = call->running_variance;
        const double keep = 1 - call->factor, unbiased = (double)m / (double)(m - 1);
        EACH_PARAMETER(p, u, v) { /* what is replaced whole may be memory that nobody set */
            const double old_mean = keep == 0 ? 0 : keep * running_mean[u];
            const double old_variance = keep == 0 ? 0 : keep * running_variance[u];
            running_mean[u] = (float)(old_mean + call->factor * mean[v]);
            running_variance[u] = (float)(old_variance + call->factor * unbiased * variance[v]);
        }
    }
    if (call->saved_mean != NULL) {
        float *saved_mean = call->saved_mean, *saved_inv_variance = call->saved_inv_variance;
        EACH_PARAMETER(p, u, v) {
            saved_mean[u] = mean[v];
            saved_inv_variance[u] = (float)(1 / sqrt(variance[v] + call->epsilon));
        }
    }
    tensor_out(p, call->y_desc, result, call->y, call->alpha, call->beta);
    return PBN_OK;
}

static int run_forward_inference(pbn_handle *h, const plan *p, const pbn_call *call) {
    char *base;
    int code = claim(p->total, call, &base);
    if (code != PBN_OK)
        return code;

    void *result = place(base, p->result);
    const void *pointers[] = {tensor_in(p, call->x_desc, call->x, place(base, p->x)),
                              result != NULL ? result : call->y,
                              vector_in(p, call->running_mean, place(base, p->mean)),
                              vector_in(p, call->running_variance, place(base, p->variance)),
                              vector_in(p, call->scale, place(base, p->scale)),
                              vector_in(p, call->bias, place(base, p->bias))};
    code = primitive_run(h, p->steps[INFERENCE], pointers, place(base, p->scratchpad));
    if (code == PBN_OK)
        tensor_out(p, call->y_desc, result, call->y, call->alpha, call->beta);
    return code;
}

#define LEAST_FACTOR 0x1p-60f /* whose square's inverse is a normal float */

static int are_usual(const float *factors, int64_t count) {
    int usual = 1;
    for (int64_t i = 0; i < count; i++)
        usual &= factors[i] >= LEAST_FACTOR && factors[i] <= 1 / LEAST_FACTOR;
    return usual;
}

/* oneDNN takes a variance. 1/iv^2 with epsilon = 0 gives any iv back: 0 from an infinite variance,
 * infinity from a zero one, and a negative iv as |iv| with scale and dscale negated, because dx is
 * scale*iv*(...) around a product of two iv. */
static float variance_of(double iv) {
    return (float)(1 / (iv * iv));
}

static int check_saved(const float *inv_variance, int64_t params) {
    if (are_usual(inv_variance, params))
        return PBN_OK; /* without a division */
    for (int64_t i = 0; i < params; i++)
        if (!isnormal(variance_of(inv_variance[i])) && isfinite(inv_variance[i]) && inv_variance[i] != 0)
            return pbn_refuse(PBN_E_UNSUPPORTED, "a finite saved_inv_variance beyond about 1e-19 to 1e19 has no "
                                                 "float32 variance, which is what oneDNN takes");
    return PBN_OK;
}

static void variance_from_saved(const plan *p, const float *inv_variance, float *variance, float *scale) {
    EACH_PARAMETER(p, u, v) {
        variance[v] = variance_of(inv_variance[u]);
        if (inv_variance[u] < 0)
            scale[v] = -scale[v];
    }
}

static void gradient_out(const plan *p, const float *from, void *data, const float *inv_variance, double alpha,
                         double beta) {
    float *to = (float *)data;
    if (to == NULL)
        return;
    EACH_PARAMETER(p, u, v) {
        const double sign = inv_variance != NULL && inv_variance[u] < 0 ? -1 : 1;
        to[u] = (float)(beta == 0 ? sign * alpha * from[v] : sign * alpha * from[v] + beta * to[u]);
    }
}

static int run_backward(pbn_handle *h, const plan *p, const pbn_call *call) {
    char *base;
    int code = claim(p->total, call, &base);
    if (code != PBN_OK)
        return code;

    float *scale = place(base, p->scale), *variance = place(base, p->variance), *own_mean = place(base, p->mean);
    float *dscale = place(base, p->dscale), *dbias = place(base, p->dbias);
    void *result = place(base, p->result), *scratchpad = place(base, p->scratchpad);
    const void *x = tensor_in(p, call->x_desc, call->x, place(base, p->x));
    const void *dy = tensor_in(p, call->dy_desc, call->dy, place(base, p->dy));
    if (result == NULL)
        result = call->dx;
    const float *mean = own_mean, *inv_variance = call->saved_inv_variance;
    if (p->recompute) {
        void *y = place(base, p->statistics_y);
        const void *pointers[] = {x, y, mean, variance};
        code = primitive_run(h, p->steps[STATISTICS], pointers, scratchpad);
    } else {
        code = check_saved(inv_variance, p->params);
        mean = vector_in(p, call->saved_mean, own_mean);
    }
    if (code == PBN_OK) {
        vector_in(p, call->scale, scale);
        if (!p->recompute)
            variance_from_saved(p, inv_variance, variance, scale);
        const void *pointers[] = {x, dy, result, mean, variance, scale, dscale, dbias};
        code = primitive_run(h, p->steps[BACKWARD], pointers, scratchpad);
    }
    if (code != PBN_OK)
        return code;
    gradient_out(p, dscale, call->dscale, inv_variance, call->alpha_param, call->beta_param);
    gradient_out(p, dbias, call->dbias, NULL, call->alpha_param, call->beta_param);
    tensor_out(p, call->dx_desc, place(base, p->result), call->dx, call->alpha, call->beta);
    return PBN_OK;
}

static int run_plan(pbn_handle *h, const plan *p, const pbn_call *call) {
    return call->operation == PBN_OP_BACKWARD            ? run_backward(h, p, call)
           : call->operation == PBN_OP_FORWARD_INFERENCE ? run_forward_inference(h, p, call)
                                                         : run_forward_training(h, p, call);
}

/* Planned for this call alone. */
static int run_once(pbn_handle *h, const pbn_call *call) {
    plan p;
    const int code = plan_call(h, call, &p);
    return code == PBN_OK ? run_plan(h, &p, call) : code;
}

/* ------------------------------------------------------------------ plans: planned once */

struct pbn_plan {
    plan p;
    int threads; /* that it was planned for: planned anew for others it might need more workspace */
};

static int plan_create(pbn_handle *h, const pbn_call *call, const char *algorithm, pbn_plan **out) {
    (void)algorithm; /* there is one */
    *out = NULL;
    pbn_plan *made = malloc(sizeof *made);
    if (made == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no memory for the plan");
    made->threads = api.omp_get_max_threads != NULL ? api.omp_get_max_threads() : 0;
    int code = plan_call(h, call, &made->p);
    if (code == PBN_OK)
        *out = made;
    else
        free(made);
    return code;
}

/* Each sum is cut among the threads by their number alone. */
static const char *unrepeated(const pbn_call *call, const char *algorithm) {
    (void)call;
    (void)algorithm;
    return NULL;
}

static void plan_info(const pbn_plan *made, size_t *workspace, size_t *reserve_bytes, const char **algorithm,
                      const char **why) {
    *workspace = made->p.total;
    *reserve_bytes = 0;
    *algorithm = "plain";
    *why = "the one entry point of this backend";
}

/* Primitives belong to the handle, which drops them for newer ones and with its engine. */
static int is_made(pbn_handle *h, plan *p) {
    int made = 1;
    h->calls++;
    for (int i = 0; i < KINDS; i++) {
        primitive *one = p->steps[i];
        if (one != NULL) {
            one->last_use = h->calls;
            made &= one->made == p->made[i];
        }
    }
    return made;
}

static int plan_run(pbn_handle *h, pbn_plan *made, const pbn_call *call) {
    if (!is_made(h, &made->p)) {
        plan again;
        const int threads = api.omp_get_max_threads != NULL ? api.omp_get_max_threads() : 0;
        const int others = threads != made->threads && api.omp_set_num_threads != NULL;
        if (others)
            api.omp_set_num_threads(made->threads);
        int code = plan_call(h, call, &again);
        if (others)
            api.omp_set_num_threads(threads);
        if (code != PBN_OK)
            return code;
        made->p = again;
    }
    return run_plan(h, &made->p, call);
}

static void plan_destroy(pbn_plan *made) {
    free(made);
}
