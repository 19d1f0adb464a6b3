/* How a call is computed where not by the batch-normalization primitive alone: by rows, and folded. Part of adapter.c.
 *
 * oneDNN's batch normalization has vector kernels for channels that lie side by side, a multiple of 8 or 16 of them, and
 * plain ones for everything else. Its other primitives have vector kernels for more:
 *
 * ROWS: of packed channels-first memory each row, a channel of an image, is summed by layer normalization or reduction.
 * FOLDED: packed memory is a matrix. Several of its rows side by side are one row of a matrix of a good width, whose
 * columns are summed by batch normalization or a product with ones. What is left over is a second, smaller matrix.
 *
 * Rows or columns are merged to channels in double, and y or dx is one pass of elementwise primitives. */

#define NOWHERE SIZE_MAX
#define ALIGNMENT 64

typedef enum way { PLAIN, ROWS, FOLDED } way;

/* Packed memory as `rows` rows of `group` rows of `columns` elements, and `tail` rows of `columns`. The elements of a
 * row are those of the channels in turn, `inner` of each. */
typedef struct fold {
    int64_t columns, inner, group, rows, tail;
} fold;

/* How one call reaches the primitive, a function of the call's descriptors, scalars and of which
 * statistics pointers are given. Offsets lie in the caller's workspace; NOWHERE means not needed.
 *
 * One memory order serves all tensors of the primitive, x's own where that is possible. A tensor in
 * another order is copied; a result in another order, or to be blended, is computed in the workspace,
 * in place of the copied input if there is one. 16-bit data that are blended, or that oneDNN has no
 * kernel for, are computed in float32, so that the result is rounded to 16 bits once. */
typedef struct part {
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
    way way;                     /* PLAIN where a tensor would be written over one that is still to be read */
    fold fold;                   /* of sums */
    fold flat;                   /* of elementwise steps: narrow, so that the first cache holds their vectors */
    int wide;                    /* elementwise steps are folded, their vectors repeated */
    size_t means, variances, sums, factor, offset, repeated[4], ones, product;
    size_t scratchpad, total;
    primitive *steps[KINDS][2]; /* NULL where none is needed; the second is for what folding leaves over */
    uint64_t made[KINDS][2];    /* others may have taken their places since */
} part;

static size_t reserve(part *p, size_t bytes) {
    size_t offset = p->total;
    p->total += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return offset;
}

static void *place(char *base, size_t offset) {
    return offset == NOWHERE ? NULL : base + offset;
}

/* ------------------------------------------------------------------ which */

static int is_blended(const pbn_call *call) {
    return call->alpha != 1 || call->beta != 0;
}

static int has_steps(void) {
    return api.dnnl_layer_normalization_forward_primitive_desc_create != NULL &&
           api.dnnl_reduction_primitive_desc_create != NULL && api.dnnl_binary_primitive_desc_create != NULL &&
           api.dnnl_matmul_primitive_desc_create != NULL && api.dnnl_reorder_primitive_desc_create != NULL &&
           api.dnnl_post_ops_create != NULL && api.dnnl_post_ops_append_binary != NULL &&
           api.dnnl_post_ops_append_eltwise != NULL &&
           api.dnnl_post_ops_destroy != NULL && api.dnnl_primitive_attr_set_post_ops != NULL;
}

static int64_t plane_of(const pbn_call *call) {
    return pbn_numel(call->x_desc->rank, call->x_desc->dims) / call->x_desc->dims[0] / call->x_desc->dims[1];
}

/* Why a call cannot be computed so. */
static const char *no_way(const pbn_call *call, way way) {
    const int layout = call->x_desc->layout;
    if (way == PLAIN)
        return NULL;
    if (!has_steps())
        return "this oneDNN lacks its layer normalization, reduction, matmul, reorder or binary primitive";
    if (call->mode != PBN_SPATIAL)
        return way == ROWS ? "rows are of the spatial mode" : "folding is of the spatial mode";
    if (way == FOLDED && layout == PBN_CHANNELS_FIRST && call->x_desc->dims[0] == 1)
        return "folding is of several images, or of channels-last memory";
    if (way == FOLDED)
        return layout == PBN_CHANNELS_FIRST || layout == PBN_CHANNELS_LAST ? NULL : "folding is of packed memory";
    if (layout != PBN_CHANNELS_FIRST || call->x_desc->rank == 2)
        return "rows are of packed channels-first memory";
    if (plane_of(call) == 1)
        return "rows of one element"; /* oneDNN 3.2 gives all channels the factor of the first, and sums none */
    return NULL;
}

/* Whether 16-bit data are computed in float32. The steps are asked for bfloat16 alone: float16 has other processors. */
static int widened(const pbn_call *call, way way) {
    const int dtype = call->x_desc->dtype;
    return dtype != PBN_FLOAT32 &&
           ((way != PLAIN && dtype != PBN_BFLOAT16) || is_blended(call) || !api.runs[dtype][call->operation]);
}

/* Measured on an EPYC with AVX-512 and oneDNN 3.2 against PyTorch 2.13: `pybnorm bench device --backend onednn`. */
static way fastest(const pbn_call *call, const char **why) {
    const pbn_tensor *x = call->x_desc;
    const int64_t images = x->dims[0], channels = x->dims[1], plane = plane_of(call);
    const int training = call->operation == PBN_OP_FORWARD_TRAINING, backward = call->operation == PBN_OP_BACKWARD;
    const int side_by_side = x->layout == PBN_CHANNELS_LAST || plane == 1, is_float = x->dtype == PBN_FLOAT32;
    const int small = images * channels * plane <= 1 << 13;
    const int alone = api.omp_get_max_threads != NULL && api.omp_get_max_threads() == 1;
    if ((*why = no_way(call, side_by_side ? FOLDED : ROWS)) != NULL)
        return PLAIN;
    if (x->dtype == PBN_FLOAT16 && !widened(call, PLAIN) && !alone) {
        *why = "float16 would be converted by the calling thread alone";
        return PLAIN;
    }
    if (side_by_side) {
        *why = "channels side by side, in whole vectors";
        if (widened(call, PLAIN) || channels % 16 == 0 || (is_float && channels % 8 == 0 && (channels == 8 || small)))
            return PLAIN;
        *why = "channels side by side, too few values of each to fold";
        if (training && !is_float && images * plane < 16)
            return PLAIN;
        *why = "channels side by side, but no whole number of vectors of them";
        return FOLDED;
    }
    if (is_float && ((training && plane < 8 && images < 8) ||
                     (images * channels * plane <= 1600 && ((backward && plane < 64) || (training && plane <= 16))))) {
        *why = "few and short rows"; /* one step is the fastest then */
        return PLAIN;
    }
    if (images > 1 && ((backward && plane < 64) || (training && plane < 8 && images >= 16))) {
        *why = "several short rows side by side fill vectors";
        return FOLDED;
    }
    *why = "vector kernels over the rows of channels-first memory";
    return ROWS;
}

/* ------------------------------------------------------------------ planning */

#define WIDTH 16             /* elements of a vector; batch normalization wants whole ones */
#define LEAST_COLUMNS 512    /* of a matrix: shorter rows cost more than they hold */
#define LONGEST_CHAIN(m) (4 * sqrt((double)(m))) /* elements of a column, which is one chain of sums */

static fold fold_of(const pbn_call *call, const part *p, int sums) {
    const int64_t plane = plane_of(call), inner = call->x_desc->layout == PBN_CHANNELS_LAST ? 1 : plane;
    const int64_t columns = p->params * inner, rows = p->count / columns;
    int64_t group = 1;
    while (columns * group % WIDTH != 0)
        group *= 2;
    if (group > rows)
        group = 1;
    while (rows / (group * 2) >= 8 &&
           (columns * group < LEAST_COLUMNS || (sums && (double)(rows / group) > LONGEST_CHAIN(rows * inner))))
        group *= 2;
    return (fold){columns, inner, group, rows / group, rows % group};
}

static int step(pbn_handle *h, part *p, kind k, int which, float epsilon, const view *memory, int64_t params) {
    int code = primitive_get(h, k, epsilon, memory, params, &p->steps[k][which]);
    if (code != PBN_OK)
        return code;
    p->made[k][which] = p->steps[k][which]->made;
    if (p->steps[k][which]->scratchpad > p->scratchpad)
        p->scratchpad = p->steps[k][which]->scratchpad;
    return PBN_OK;
}

/* A step over the matrix and over what it leaves. */
static int folded_step(pbn_handle *h, part *p, kind k, int dtype) {
    const fold *f = recipes[k].family == BINARY ? &p->flat : &p->fold;
    const view main = {dtype, 2, {f->rows, f->group * f->columns}, {f->group * f->columns, 1}};
    const view rest = {dtype, 2, {f->tail, f->columns}, {f->columns, 1}};
    int code = step(h, p, k, 0, 0, &main, f->group * f->columns);
    return code == PBN_OK && f->tail > 0 ? step(h, p, k, 1, 0, &rest, f->columns) : code;
}

static int elementwise_step(pbn_handle *h, part *p, kind k) {
    const int dtype = p->memory.dtype;
    if (p->wide)
        return folded_step(h, p, k, dtype);
    const int64_t plane = p->fold.inner, images = p->count / p->fold.columns;
    const view image = {dtype, 3, {images, p->params, plane}, {p->fold.columns, plane, 1}};
    return step(h, p, k, 0, 0, &image, p->params);
}

/* Sums or statistics of rows or columns. */
static int sums_step(pbn_handle *h, part *p, kind by_rows, kind by_columns, int dtype) {
    if (p->way == FOLDED)
        return folded_step(h, p, by_columns, dtype);
    const int64_t rows = p->count / p->fold.inner;
    const view row = {dtype, 2, {rows, p->fold.inner}, {p->fold.inner, 1}};
    return step(h, p, by_rows, 0, 0, &row, rows);
}

static void reserve_steps(const pbn_call *call, part *p) {
    const int backward = call->operation == PBN_OP_BACKWARD;
    const fold *f = &p->fold;
    const int64_t images = call->x_desc->dims[0];
    const size_t vector = (size_t)p->params * sizeof(float);
    p->factor = reserve(p, vector);
    p->offset = reserve(p, vector);
    if (call->operation != PBN_OP_FORWARD_INFERENCE) {
        const int64_t pieces = p->way == FOLDED ? (f->group + (f->tail > 0)) * f->columns : images * p->params;
        p->means = reserve(p, (size_t)pieces * sizeof(float));
        p->variances = reserve(p, (size_t)pieces * sizeof(float));
        p->sums = reserve(p, 2 * (size_t)p->params * sizeof(double));
    }
    for (int i = 0; p->wide && i < (backward ? 4 : 3); i++)
        p->repeated[i] = reserve(p, (size_t)(p->flat.group * f->columns) * sizeof(float));
    if (call->operation != PBN_OP_FORWARD_INFERENCE && p->way == FOLDED)
        p->ones = reserve(p, 2 * (size_t)(f->rows > f->tail ? f->rows : f->tail) * sizeof(float));
    if (backward && p->memory.dtype != PBN_FLOAT32)
        p->product = reserve(p, (size_t)p->count * sizeof(float));
}

/* Elements of rows that elementwise steps take several of: the more images, the less it costs to repeat vectors. */
static int64_t short_row(int64_t images) {
    return images < 4 ? 64 : images < 16 ? 128 : 512;
}

/* The primitives of a call by rows or folded, and the memory that they need. */
static int plan_steps(pbn_handle *h, const pbn_call *call, part *p) {
    const int dtype = p->memory.dtype;
    const int64_t image = p->count / call->x_desc->dims[0];
    const view all = {dtype, 2, {call->x_desc->dims[0], image}, {image, 1}};
    int code = PBN_OK;
    p->fold = fold_of(call, p, 1);
    p->flat = fold_of(call, p, 0);
    p->wide = p->way == FOLDED || (p->flat.rows > 1 && p->fold.inner < short_row(call->x_desc->dims[0]));
    reserve_steps(call, p);
    if (call->operation == PBN_OP_FORWARD_TRAINING || p->recompute)
        code = p->way == FOLDED && dtype == PBN_FLOAT32 ? folded_step(h, p, COLUMN_SUMS, dtype)
                                                        : sums_step(h, p, ROW_STATISTICS, COLUMN_STATISTICS, dtype);
    if (code == PBN_OK && p->steps[COLUMN_SUMS][0] != NULL)
        code = folded_step(h, p, SQUARES, dtype);
    if (call->operation != PBN_OP_BACKWARD)
        return code == PBN_OK ? elementwise_step(h, p, APPLY) : code;
    if (code == PBN_OK && dtype != PBN_FLOAT32)
        code = step(h, p, WIDENED, 0, 0, &all, 1);
    if (code == PBN_OK)
        code = elementwise_step(h, p, PRODUCT);
    if (code == PBN_OK)
        code = sums_step(h, p, ROW_SUMS, COLUMN_SUMS, PBN_FLOAT32);
    if (code == PBN_OK)
        code = sums_step(h, p, ROW_SUMS_OF_DY, COLUMN_SUMS_OF_DY, dtype);
    return code == PBN_OK ? elementwise_step(h, p, GRADIENT) : code;
}

/* ------------------------------------------------------------------ running */

/* A step over the matrix and what it leaves, or over everything. */
static int run_step(pbn_handle *h, const part *p, kind k, char *base, const void *const *tensors,
                    const void *const *vectors) {
    const recipe *r = &recipes[k];
    const fold *f = r->family == BINARY ? &p->flat : &p->fold;
    const void *pointers[MAX_ARGS];
    const int two = p->steps[k][1] != NULL;
    int code = PBN_OK;
    for (int which = 0; which <= two && code == PBN_OK; which++) {
        const size_t from = which ? (size_t)(f->rows * f->group * f->columns) : 0;
        for (int i = 0; i < r->tensors; i++) {
            const int is_float = (r->other & BIT(i)) != 0 && r->family != MATMUL;
            const size_t item = is_float ? sizeof(float) : pbn_item_size(p->steps[k][which]->key.memory.dtype);
            pointers[i] = r->family == MATMUL && i == 1 ? tensors[i] : (const char *)tensors[i] + from * item;
        }
        for (int i = r->tensors; i < r->count; i++)
            pointers[i] = vectors[i - r->tensors];
        if (which && r->family != BINARY) /* the sums of what is left over follow those of the matrix */
            for (int i = r->tensors; i < r->count; i++)
                pointers[i] = (const float *)pointers[i] + f->group * f->columns;
        code = primitive_run(h, p->steps[k][which], pointers, place(base, p->scratchpad));
    }
    return code;
}

/* The vector of channels as the columns of the matrix have it. */
static const float *repeat(const part *p, const float *channels, float *to) {
    const int64_t columns = p->fold.columns, inner = p->fold.inner;
    if (inner == 1)
        memcpy(to, channels, (size_t)columns * sizeof *to);
    else
        for (int64_t c = 0; c < p->params; c++)
            for (int64_t i = 0; i < inner; i++)
                to[c * inner + i] = channels[c];
    for (int64_t g = 1; g < p->flat.group; g++)
        memcpy(to + g * columns, to, (size_t)columns * sizeof *to);
    return to;
}

static int elementwise(pbn_handle *h, const part *p, kind k, char *base, const void *const *tensors,
                       const void *const *channels) {
    const void *vectors[MAX_ARGS];
    for (int i = 0; i < recipes[k].count - recipes[k].tensors; i++)
        vectors[i] = p->wide ? repeat(p, channels[i], place(base, p->repeated[i])) : channels[i];
    return run_step(h, p, k, base, tensors, vectors);
}

/* Adds to each channel's sum those of its rows or columns, of which `squares` are the variances and `mean` the mean that
 * their squares are taken around, or NULL for both. */
static void add_up(const part *p, int64_t outer, int64_t inner, double weight, const float *values,
                   const float *squares, const double *mean, double *sums) {
    for (int64_t o = 0; o < outer; o++)
        for (int64_t c = 0; c < p->params; c++, values += inner) {
            double sum = 0;
            for (int64_t i = 0; i < inner; i++)
                sum += squares == NULL ? values[i]
                                       : squares[i] + (values[i] - mean[c]) * (values[i] - mean[c]);
            if (squares != NULL)
                squares += inner;
            sums[c] += weight * sum;
        }
}

/* `weighted`: of means, each of as many elements as its row or column has. */
static void add_all(const part *p, int weighted, const float *values, const float *squares, const double *mean,
                    double *sums) {
    const fold *f = &p->fold;
    memset(sums, 0, (size_t)p->params * sizeof *sums);
    if (p->way == ROWS) {
        add_up(p, p->count / f->columns, 1, weighted ? (double)f->inner : 1, values, squares, mean, sums);
        return;
    }
    const int64_t all = f->group * f->columns;
    add_up(p, f->group, f->inner, weighted ? (double)f->rows : 1, values, squares, mean, sums);
    if (f->tail > 0)
        add_up(p, 1, f->inner, weighted ? (double)f->tail : 1, values + all, squares != NULL ? squares + all : NULL,
               mean, sums);
}

/* The sums of all rows or columns of a tensor, of each channel in double. */
static int channel_sums(pbn_handle *h, const part *p, char *base, kind by_rows, kind by_columns, const void *tensor,
                        double *sums) {
    float *pieces = place(base, p->means);
    const kind k = p->way == ROWS ? by_rows : by_columns;
    const fold *f = &p->fold;
    const int64_t most = f->rows > f->tail ? f->rows : f->tail;
    const void *tensors[] = {tensor, place(base, p->ones)}, *vectors[] = {pieces};
    if (p->way == FOLDED && p->steps[k][0]->key.memory.dtype == PBN_FLOAT32)
        for (int64_t i = 0; i < most; i++)
            ((float *)(uintptr_t)tensors[1])[i] = 1;
    else if (p->way == FOLDED)
        for (int64_t i = 0; i < most; i++)
            ((uint16_t *)(uintptr_t)tensors[1])[i] = bf16_of(float_to_bits(1));
    int code = run_step(h, p, k, base, tensors, vectors);
    if (code == PBN_OK)
        add_all(p, 0, pieces, NULL, NULL, sums);
    return code;
}

/* Mean and biased variance of each channel, from those of its rows or columns; `y` is overwritten. */
static int statistics(pbn_handle *h, const part *p, char *base, const void *x, void *y, float *mean, float *variance) {
    const double m = (double)(p->count / p->params);
    float *means = place(base, p->means), *variances = place(base, p->variances);
    double *middle = place(base, p->sums), *squares = middle + p->params;
    const void *tensors[] = {x, y}, *vectors[] = {means, variances}, *around[] = {mean};
    int code;
    if (p->steps[SQUARES][0] != NULL) { /* faster than batch normalization's, of float32 */
        code = channel_sums(h, p, base, KINDS, COLUMN_SUMS, x, middle);
        for (int64_t c = 0; c < p->params; c++)
            mean[c] = (float)(middle[c] / m);
        if (code == PBN_OK)
            code = elementwise(h, p, SQUARES, base, tensors, around);
        if (code == PBN_OK)
            code = channel_sums(h, p, base, KINDS, COLUMN_SUMS, y, squares);
        for (int64_t c = 0; c < p->params; c++)
            variance[c] = (float)(squares[c] / m);
        return code;
    }
    code = run_step(h, p, p->way == ROWS ? ROW_STATISTICS : COLUMN_STATISTICS, base, tensors, vectors);
    if (code != PBN_OK)
        return code;
    add_all(p, 1, means, NULL, NULL, middle);
    for (int64_t c = 0; c < p->params; c++)
        middle[c] /= m;
    add_all(p, 1, means, variances, middle, squares);
    for (int64_t c = 0; c < p->params; c++) {
        mean[c] = (float)middle[c];
        variance[c] = (float)(squares[c] / m);
    }
    return PBN_OK;
}

/* y = (x - mean)*scale/sqrt(variance + epsilon) + bias in one pass. */
static int apply(pbn_handle *h, const part *p, char *base, const void *x, void *y, const float *mean,
                 const float *variance, const void *scale, const void *bias, double epsilon) {
    float *factor = place(base, p->factor);
    for (int64_t c = 0; c < p->params; c++)
        factor[c] = (float)(((const float *)scale)[c] / sqrt(variance[c] + epsilon));
    const void *tensors[] = {x, y}, *vectors[] = {mean, factor, bias};
    return elementwise(h, p, APPLY, base, tensors, vectors);
}

static int train_by_steps(pbn_handle *h, const part *p, const pbn_call *call, char *base, const void *const *given) {
    void *y = (void *)(uintptr_t)given[1];
    float *mean = (float *)(uintptr_t)given[2], *variance = (float *)(uintptr_t)given[3];
    int code = statistics(h, p, base, given[0], y, mean, variance);
    return code == PBN_OK ? apply(h, p, base, given[0], y, mean, variance, given[4], given[5], call->epsilon) : code;
}

/* With d = x - mean, r = 1/sqrt(variance + epsilon), m elements a channel: dbias = sum dy, dscale = r * sum d*dy,
 * dx = scale*r * (dy - dbias/m - d * r*dscale/m). */
static int backward_by_steps(pbn_handle *h, const part *p, const pbn_call *call, char *base, const void *x,
                             const void *dy, void *dx, const float *mean, const float *variance, float *dscale,
                             float *dbias) {
    const double m = (double)(p->count / p->params);
    float *slope = place(base, p->variance), *offset = place(base, p->offset), *factor = place(base, p->factor);
    double *sums = place(base, p->sums), *dots = sums + p->params;
    void *product = p->product != NOWHERE ? place(base, p->product) : dx;
    const void *from = x;
    int code = PBN_OK;
    if (p->product != NOWHERE) {
        const void *widen[] = {x, from = product};
        code = run_step(h, p, WIDENED, base, widen, NULL);
    }
    const void *tensors[] = {from, dy, product}, *means[] = {mean};
    if (code == PBN_OK)
        code = elementwise(h, p, PRODUCT, base, tensors, means);
    if (code == PBN_OK)
        code = channel_sums(h, p, base, ROW_SUMS, COLUMN_SUMS, product, dots);
    if (code == PBN_OK)
        code = channel_sums(h, p, base, ROW_SUMS_OF_DY, COLUMN_SUMS_OF_DY, dy, sums);
    if (code != PBN_OK)
        return code;
    for (int64_t c = 0; c < p->params; c++) {
        const double r = call->saved_mean != NULL ? ((const float *)call->saved_inv_variance)[c]
                                                  : 1 / sqrt(variance[c] + call->epsilon);
        dbias[c] = (float)sums[c];
        dscale[c] = (float)(r * dots[c]);
        factor[c] = (float)(((const float *)call->scale)[c] * r);
        offset[c] = (float)(-sums[c] / m);
        slope[c] = (float)(-r * r * dots[c] / m); /* over the variance, which is not needed any more */
    }
    const void *all[] = {x, dy, dx}, *vectors[] = {mean, slope, offset, factor};
    return elementwise(h, p, GRADIENT, base, all, vectors);
}
