/* The matrix views: packed channels-first memory for kernels that know channels-last memory only. Part of adapter.c.
 *
 * The column view is (N, C*S), S positions in an image, each column of one channel; the row view is (N*C*P, S/P), each
 * row of one channel, in P pieces where there are few. A line is a column of the one or a row of the other.
 * Forward training: per line the sums of d and d^2, d = x less the line's first value (so that nothing cancels, unless
 * that value is hundreds of deviations away, which a long row feels more than a column of N values); their means and
 * variances merge over the lines of a channel, by a batch norm of the plain entry point over the small maps, whose saved
 * mean is the average and whose running variance that of the means; then y = (x - mean) * g + bias with the three
 * vectors expanded to lines.
 * Backward: per line the sums of dy * (x - mean) and of dy, merged in the same way, then
 * dx = a * dy + b * (x - mean) + c. Inference is the last step of forward. Forward up to the statistics, which reads x
 * and writes next to nothing, is also what a backward without saved ones does first; then over packed channels-last
 * memory too, whose columns have a channel each as it is.
 * The elementwise half of a synchronized backward is backward's last step alone, of sums that are given.
 * Only the row view has one kernel for two 16-bit sums as fast as one sum, short vectors in place of those of C * S
 * numbers, and room for images of any size; only the column view serves rows that are no whole number of 16 bytes well
 * (H200, 9.19). Training and backward over packed channels-last memory are by its columns in the same way. */

/* More columns are more blocks of 32 than a launch takes, and a row's length is held to the same; with more rows nothing
 * was tried, and fewer than ROWS_ENOUGH leave much of the device idle (H200, 9.19). */
enum { LINES_MOST = 65535 * 32, ROWS_MOST = 1 << 19, ROWS_WANTED = 1 << 12, ROWS_ENOUGH = 1 << 10, ROW_LEAST = 512, ROW_LONG = 1 << 13 };

/* A block of a kernel takes several whole rows, so where they are few and long each is cut into pieces: a power of two
 * of them, of whole numbers of 16 bytes. */
static int64_t row_pieces(const pbn_tensor *x) {
    const int64_t lines = x->dims[0] * x->dims[1], size = pbn_numel(x->rank, x->dims) / lines;
    const int64_t elements = x->dtype == PBN_FLOAT32 ? 4 : 8;
    int64_t pieces = 1;
    while (lines * pieces < ROWS_WANTED && size / pieces / 2 >= ROW_LEAST && size % (2 * pieces * elements) == 0)
        pieces *= 2;
    return pieces;
}

/* Channels-last memory is the matrix (N*S, C), few columns and long ones; P of its rows beside one another make it
 * (N*S/P, P*C), which has P columns for each channel: enough of them to occupy the device, and shorter sums. */
enum { COLUMNS_WANTED = 1 << 15, COLUMN_LEAST = 1 << 8 };

/* Whether columns are those of channels-last memory, which (N, C) is as well. */
static int columns_last(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    return all_channels_last(call) && (!all_channels_first(call) || pbn_numel(x->rank, x->dims) == x->dims[0] * x->dims[1]);
}

static int64_t column_groups(const pbn_tensor *x) {
    const int64_t rows = pbn_numel(x->rank, x->dims) / x->dims[1], wanted = COLUMNS_WANTED / x->dims[1];
    int64_t groups = rows / COLUMN_LEAST < wanted ? rows / COLUMN_LEAST : wanted;
    while (groups > 1 && rows % groups != 0)
        groups--;
    return groups > 1 ? groups : 1;
}

/* Vectors in the workspace: of lines without a gap between them, of channels without one. */
enum {
    LINE_0 = SLOT_SCRATCH, /* two of sums; then what the small batch norm writes for y; then two expanded vectors */
    LINE_1,
    LINE_2, /* two of means and variances, or of backward's sums; then the third expanded vector */
    LINE_3,
    LINE_MEAN,       /* the expanded mean, for backward */
    CHANNEL_AVERAGE, /* 2 C: saved mean of the small batch norm */
    CHANNEL_AVERAGE_2,
    CHANNEL_INVERSE, /* 2 C: its saved inverse standard deviation, not used; then the channel's own where none is saved */
    CHANNEL_ZERO,    /* 8 C zeros: its scale and bias, running mean and running variance */
    CHANNEL_A,       /* 3 C: what is expanded to lines */
    CHANNEL_B,
    CHANNEL_C,
    CHANNEL_BETWEEN, /* in CHANNEL_ZERO: that running variance */
    LINE_FIRST       /* of rows, in the dtype of x */
};

static int make_map(pbn_tensor *t, int dtype, int64_t rows, int64_t channels, int64_t size) {
    const int64_t dims[4] = {rows, channels, size, 1};
    int64_t strides[4];
    int status = cudnn_tensor_create(t);
    if (status != PBN_OK)
        return status;
    pbn_packed_strides(4, dims, PBN_CHANNELS_FIRST, strides);
    return cudnn_tensor_set(t, dtype, 4, dims, strides);
}

static int64_t layer_pieces(const pbn_tensor *x);
static int build_layer_moments(pbn_plan *p, const pbn_call *call, void *vendor_handle);
static int build_layer_apply(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip);
static int run_layer_apply(pbn_handle *handle, pbn_plan *p, const pbn_call *call, void *const *slots);
static const char writes_first[] = "the layer normalization writes y, or dx, before x and dy have been read for the last "
                                   "time, and so it may not be one of these";

/* Descriptors of the small maps of the lines: (1, C, S, 1) of columns, (N, C, P, 1) of rows and of layer_norm, (P, C, 1,
 * 1) of columns of channels-last memory. */
static int make_maps(pbn_plan *p, const pbn_tensor *x, int64_t size) {
    const int64_t rows = x->dims[0], channels = x->dims[1], pieces = p->merged / rows;
    const int64_t dims[4] = {rows, channels, pieces, 1}, strides[4] = {channels * size, size, p->depth, 1};
    int status;
    if ((status = make_map(&p->one, PBN_FLOAT32, 1, channels, 1)) != PBN_OK ||
        (status = make_map(&p->zeros, PBN_FLOAT32, 1, 8 * channels, 1)) != PBN_OK)
        return status;
    if (p->last)
        return make_map(&p->map, PBN_FLOAT32, p->merged, channels, 1);
    if (p->kind == COLUMNS) {
        if ((status = make_map(&p->map, PBN_FLOAT32, 1, channels, size)) != PBN_OK ||
            (status = make_map(&p->two, PBN_FLOAT32, 1, 2 * channels, 1)) != PBN_OK ||
            (status = make_map(&p->maps, PBN_FLOAT32, 1, 2 * channels, size)) != PBN_OK ||
            (status = make_map(&p->three, PBN_FLOAT32, 1, 3 * channels, 1)) != PBN_OK)
            return status;
        return make_map(&p->spread, PBN_FLOAT32, 1, 3 * channels, size);
    }
    if ((status = make_map(&p->map, PBN_FLOAT32, rows, channels, pieces)) != PBN_OK || p->kind == LAYER_NORM)
        return status;
    if ((status = make_map(&p->first, x->dtype, rows, channels, pieces)) != PBN_OK ||
        (status = cudnn_tensor_create(&p->firsts)) != PBN_OK)
        return status;
    return cudnn_tensor_set(&p->firsts, x->dtype, 4, dims, strides);
}

static int make_lines(pbn_plan *p, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    const int64_t rows = x->dims[0], channels = x->dims[1], size = pbn_numel(x->rank, x->dims) / rows / channels;
    size_t *offset = p->offsets, vector = (size_t)channels * sizeof(float), line, lines;
    int fifth;
    p->merged = p->last                 ? column_groups(x)
                : p->kind == ROWS       ? rows * row_pieces(x)
                : p->kind == LAYER_NORM ? rows * layer_pieces(x)
                                        : size;
    p->depth = rows * size / p->merged;
    p->lines = channels * p->merged;
    line = (size_t)p->lines * sizeof(float);
    if (p->kind == LAYER_NORM)
        line = rounded(line); /* written by a norm graph */
    fifth = call->operation == PBN_OP_BACKWARD || (call->operation == PBN_OP_FORWARD_TRAINING && p->kind == ROWS);
    lines = rounded((fifth ? 5 : 4) * line);
    for (int i = LINE_0; i <= LINE_MEAN; i++)
        offset[i] = (size_t)(i - LINE_0) * line;
    offset[LINE_FIRST] = offset[LINE_MEAN]; /* forward has no such mean */
    offset[CHANNEL_AVERAGE] = lines;
    offset[CHANNEL_AVERAGE_2] = lines + vector;
    offset[CHANNEL_INVERSE] = lines + 2 * vector;
    offset[CHANNEL_ZERO] = lines + 4 * vector;
    offset[CHANNEL_BETWEEN] = offset[CHANNEL_ZERO] + 6 * vector;
    offset[CHANNEL_A] = lines + 12 * vector;
    offset[CHANNEL_B] = lines + 13 * vector;
    offset[CHANNEL_C] = lines + 14 * vector;
    p->scratch = rounded(lines + 15 * vector);
    return make_maps(p, x, size);
}

/* x, y, dy or dx as a matrix. */
static void *matrix_tensor(const pbn_plan *p, graph *g, int slot, int dtype) {
    const int64_t rows = p->kind == COLUMNS ? p->depth : p->lines, all = p->kind == COLUMNS ? p->lines : p->depth;
    const int64_t dims[4] = {rows, all, 1, 1}, strides[4] = {all, 1, all, all};
    return graph_tensor(g, slot, slot == SLOT_VIRTUAL ? PBN_FLOAT32 : dtype, 4, dims, strides,
                        slot == SLOT_VIRTUAL ? 16 : p->alignment);
}

/* One number for each line: beside the matrix along its lines, on their own always as columns' are, because no engine
 * takes pointwise operations on vectors that lie down alone. */
static void *vector_tensor(const pbn_plan *p, graph *g, int slot, int dtype, int64_t alignment, int beside) {
    const int64_t n = p->lines, along[4] = {1, n, 1, 1}, along_strides[4] = {n, 1, n, n};
    const int64_t down[4] = {n, 1, 1, 1}, down_strides[4] = {1, 1, 1, 1};
    const int lies_down = beside && p->kind != COLUMNS;
    return graph_tensor(g, slot, dtype, 4, lies_down ? down : along, lies_down ? down_strides : along_strides, alignment);
}

static void *line_tensor(const pbn_plan *p, graph *g, int slot) {
    return vector_tensor(p, g, slot, PBN_FLOAT32, 4, 1);
}

static void *lone_tensor(const pbn_plan *p, graph *g, int slot) {
    return vector_tensor(p, g, slot, PBN_FLOAT32, 4, 0);
}

/* The first value of each line: columns' are the first row of the matrix. */
static void *first_tensor(const pbn_plan *p, graph *g, int dtype, int beside) {
    return vector_tensor(p, g, p->kind == ROWS ? LINE_FIRST : SLOT_X, dtype, p->kind == ROWS ? 4 : p->alignment,
                         beside);
}

static void *channel_tensor(const pbn_call *call, graph *g, int slot) {
    const int64_t n = call->x_desc->dims[1], dims[4] = {1, n, 1, 1}, strides[4] = {n, 1, n, n};
    return graph_tensor(g, slot, PBN_FLOAT32, 4, dims, strides, 4);
}

static void *number_tensor(pbn_plan *p, graph *g, int which, double value) {
    static const int64_t ones[4] = {1, 1, 1, 1};
    if (which > VALUE_FACTOR)
        p->values[which] = (float)value;
    return graph_tensor(g, SLOT_VALUE + which, PBN_FLOAT32, 4, ones, ones, 4);
}

/* Two sums in one kernel where that is the faster way, else a kernel for each (columns of 16 bits). */
static int one_kernel(const pbn_plan *p, const pbn_call *call) {
    return p->kind == ROWS || call->x_desc->dtype == PBN_FLOAT32;
}

static int build_forward_sums(pbn_plan *p, const pbn_call *call, void *vendor_handle, int which, int skip) {
    graph *g = &p->graphs[which];
    const int dtype = call->x_desc->dtype, both = one_kernel(p, call);
    void *x = matrix_tensor(p, g, SLOT_X, dtype), *first = first_tensor(p, g, dtype, 1);
    void *d = matrix_tensor(p, g, SLOT_VIRTUAL, dtype), *square;
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, x, first, d);
    if (both || which == 0)
        graph_sum(g, d, line_tensor(p, g, LINE_0));
    if (both || which == 1) {
        square = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, d, d, square);
        graph_sum(g, square, line_tensor(p, g, LINE_1));
    }
    return graph_build(g, vendor_handle, skip);
}

static int build_backward_sums(pbn_plan *p, const pbn_call *call, void *vendor_handle, int which, int skip) {
    graph *g = &p->graphs[which];
    const int dtype = call->x_desc->dtype, both = one_kernel(p, call);
    void *dy = matrix_tensor(p, g, SLOT_DY, dtype), *wide, *d, *product;
    if (both || which == 0) {
        d = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
        product = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, matrix_tensor(p, g, SLOT_X, dtype),
                        line_tensor(p, g, LINE_MEAN), d);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, d, dy, product);
        graph_sum(g, product, line_tensor(p, g, LINE_2));
    }
    if (both || which == 1) {
        wide = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, dy, NULL, wide);
        graph_sum(g, wide, line_tensor(p, g, LINE_3));
    }
    return graph_build(g, vendor_handle, skip);
}

/* Mean and variance of each line from its sums about its first value. */
static int build_line_moments(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[2];
    void *each = number_tensor(p, g, 2, 1.0 / (double)p->depth);
    void *shift = lone_tensor(p, g, SLOT_VIRTUAL), *average = lone_tensor(p, g, SLOT_VIRTUAL);
    void *squared = lone_tensor(p, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, lone_tensor(p, g, LINE_0), each, shift);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, shift, first_tensor(p, g, call->x_desc->dtype, 0),
                    lone_tensor(p, g, LINE_2));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, lone_tensor(p, g, LINE_1), each, average);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, shift, shift, squared);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, average, squared, lone_tensor(p, g, LINE_3));
    return graph_build(g, vendor_handle, 0);
}

/* running = (1 - factor) * running + `share` * batch; with sums_only and factor 1 the prior is not read. */
static void update_running(pbn_plan *p, const pbn_call *call, graph *g, int slot, void *batch, void *share) {
    void *running = channel_tensor(call, g, slot), *kept, *added;
    if (call->sums_only && call->factor == 1) {
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, batch, share, running);
        return;
    }
    kept = channel_tensor(call, g, SLOT_VIRTUAL), added = channel_tensor(call, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, slot), number_tensor(p, g, 4, 1 - call->factor),
                    kept);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, batch, share, added);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, kept, added, running);
}

/* The channel's statistics from the merged ones of its lines, or from those of its one line; then its factor g, and the
 * running ones. */
static int build_channel_moments(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[3];
    const double merged = (double)p->merged, m = merged * (double)p->depth, f = call->factor;
    const int saved = call->saved_mean != NULL, one = p->merged == 1;
    void *mean = channel_tensor(call, g, one ? LINE_2 : CHANNEL_AVERAGE), *between;
    void *variance = channel_tensor(call, g, one ? LINE_3 : SLOT_VIRTUAL), *sum = channel_tensor(call, g, SLOT_VIRTUAL);
    void *inverse = channel_tensor(call, g, saved ? SLOT_SAVED_INV_VARIANCE : CHANNEL_INVERSE);
    if (!one) { /* the small batch norm's running variance is the unbiased one of the lines' means */
        between = channel_tensor(call, g, SLOT_VIRTUAL);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, CHANNEL_BETWEEN),
                        number_tensor(p, g, 3, (merged - 1) / merged), between);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, channel_tensor(call, g, CHANNEL_AVERAGE_2), between, variance);
    }
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, variance, number_tensor(p, g, VALUE_EPSILON, 0), sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RSQRT, sum, NULL, inverse);
    if (!p->moments_only) {
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, inverse, channel_tensor(call, g, SLOT_SCALE),
                        channel_tensor(call, g, CHANNEL_B));
        graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, mean, NULL, channel_tensor(call, g, CHANNEL_A));
        graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, channel_tensor(call, g, SLOT_BIAS), NULL,
                        channel_tensor(call, g, CHANNEL_C));
    }
    if (saved)
        graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, mean, NULL, channel_tensor(call, g, SLOT_SAVED_MEAN));
    if (call->running_mean != NULL) {
        update_running(p, call, g, SLOT_RUNNING_MEAN, mean, number_tensor(p, g, VALUE_FACTOR, 0));
        update_running(p, call, g, SLOT_RUNNING_VARIANCE, variance, number_tensor(p, g, 5, f * m / (m - 1)));
    }
    return graph_build(g, vendor_handle, 0);
}

/* Inference: mean, g = scale / sqrt(variance + epsilon) and bias beside one another. */
static int build_channel_factor(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[3];
    void *sum = channel_tensor(call, g, SLOT_VIRTUAL), *inverse = channel_tensor(call, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, channel_tensor(call, g, SLOT_RUNNING_VARIANCE),
                    number_tensor(p, g, VALUE_EPSILON, 0), sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RSQRT, sum, NULL, inverse);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, inverse, channel_tensor(call, g, SLOT_SCALE),
                    channel_tensor(call, g, CHANNEL_B));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, channel_tensor(call, g, SLOT_RUNNING_MEAN), NULL,
                    channel_tensor(call, g, CHANNEL_A));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_IDENTITY, channel_tensor(call, g, SLOT_BIAS), NULL,
                    channel_tensor(call, g, CHANNEL_C));
    return graph_build(g, vendor_handle, 0);
}

/* dbias, dscale and the three factors of dx, from the channel's averages of the lines' sums, or those of its one line. */
static int build_channel_gradients(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[3];
    const double depth = (double)p->depth, merged = (double)p->merged;
    const int one = p->merged == 1;
    void *average = channel_tensor(call, g, one ? LINE_3 : CHANNEL_AVERAGE_2), *inverse = channel_tensor(call, g, SLOT_SAVED_INV_VARIANCE);
    void *count = number_tensor(p, g, 2, merged), *sum = channel_tensor(call, g, SLOT_VIRTUAL);
    void *dscale = channel_tensor(call, g, SLOT_DSCALE), *a = channel_tensor(call, g, CHANNEL_A);
    void *scaled = channel_tensor(call, g, SLOT_VIRTUAL), *share = channel_tensor(call, g, SLOT_VIRTUAL);
    void *part = channel_tensor(call, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, average, count, channel_tensor(call, g, SLOT_DBIAS));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, one ? LINE_2 : CHANNEL_AVERAGE), count, sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, sum, inverse, dscale);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, SLOT_SCALE), inverse, a);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, dscale, inverse, scaled);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, scaled, number_tensor(p, g, 3, -1.0 / (depth * merged)), share);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, share, a, channel_tensor(call, g, CHANNEL_B));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, average, number_tensor(p, g, 4, -1.0 / depth), part);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, part, a, channel_tensor(call, g, CHANNEL_C));
    return graph_build(g, vendor_handle, 0);
}

/* The same factors from sums that are given. */
static int build_channel_given(pbn_plan *p, const pbn_call *call, void *vendor_handle) {
    graph *g = &p->graphs[3];
    void *less = number_tensor(p, g, VALUE_LESS, -call->share), *inverse = channel_tensor(call, g, SLOT_SAVED_INV_VARIANCE);
    void *a = channel_tensor(call, g, CHANNEL_A), *square = channel_tensor(call, g, SLOT_VIRTUAL);
    void *moment = channel_tensor(call, g, SLOT_VIRTUAL), *slope = channel_tensor(call, g, SLOT_VIRTUAL);
    void *average = channel_tensor(call, g, SLOT_VIRTUAL);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, SLOT_SCALE), inverse, a);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, inverse, inverse, square);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, SLOT_DSCALE), less, moment);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, moment, square, slope);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, slope, a, channel_tensor(call, g, CHANNEL_B));
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, channel_tensor(call, g, SLOT_DBIAS), less, average);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, average, a, channel_tensor(call, g, CHANNEL_C));
    return graph_build(g, vendor_handle, 0);
}

static int build_forward_apply(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graphs[4];
    const int dtype = call->x_desc->dtype;
    void *d = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    void *scaled = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, matrix_tensor(p, g, SLOT_X, dtype),
                    line_tensor(p, g, LINE_0), d);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, d, line_tensor(p, g, LINE_1), scaled);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, scaled, line_tensor(p, g, LINE_2),
                    matrix_tensor(p, g, SLOT_Y, dtype));
    return graph_build(g, vendor_handle, skip);
}

static int build_backward_apply(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graphs[4];
    const int dtype = call->x_desc->dtype;
    void *d = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    void *by_x = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    void *by_dy = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    void *sum = matrix_tensor(p, g, SLOT_VIRTUAL, dtype);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, matrix_tensor(p, g, SLOT_X, dtype),
                    line_tensor(p, g, LINE_MEAN), d);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, d, line_tensor(p, g, LINE_1), by_x);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, matrix_tensor(p, g, SLOT_DY, dtype),
                    line_tensor(p, g, LINE_0), by_dy);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, by_x, by_dy, sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, sum, line_tensor(p, g, LINE_2),
                    matrix_tensor(p, g, SLOT_DX, dtype));
    return graph_build(g, vendor_handle, skip);
}

/* `skip` is of the graph over the data: the last one, or of sums alone those of the sums. */
static int build_lines(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    const int sums = p->moments_only ? skip : 0;
    int status = make_lines(p, call);
    int64_t most = 0;
    if (status == PBN_OK && call->operation == PBN_OP_FORWARD_TRAINING && p->kind == LAYER_NORM) {
        status = build_layer_moments(p, call, vendor_handle);
        if (status == PBN_OK)
            status = build_channel_moments(p, call, vendor_handle);
    } else if (status == PBN_OK && call->operation == PBN_OP_FORWARD_TRAINING) {
        if ((status = build_forward_sums(p, call, vendor_handle, 0, sums)) == PBN_OK && !one_kernel(p, call))
            status = build_forward_sums(p, call, vendor_handle, 1, sums);
        if (status == PBN_OK)
            status = build_line_moments(p, call, vendor_handle);
        if (status == PBN_OK)
            status = build_channel_moments(p, call, vendor_handle);
    } else if (status == PBN_OK && p->given) {
        status = build_channel_given(p, call, vendor_handle);
    } else if (status == PBN_OK && call->operation == PBN_OP_BACKWARD) {
        if ((status = build_backward_sums(p, call, vendor_handle, 0, sums)) == PBN_OK && !one_kernel(p, call))
            status = build_backward_sums(p, call, vendor_handle, 1, sums);
        if (status == PBN_OK)
            status = build_channel_gradients(p, call, vendor_handle);
    } else if (status == PBN_OK) {
        status = build_channel_factor(p, call, vendor_handle);
    }
    if (status == PBN_OK && !p->moments_only)
        status = call->operation == PBN_OP_BACKWARD ? build_backward_apply(p, call, vendor_handle, skip)
                 : p->kind == LAYER_NORM            ? build_layer_apply(p, call, vendor_handle, skip)
                                                    : build_forward_apply(p, call, vendor_handle, skip);
    for (size_t i = 0; i < sizeof p->graphs / sizeof p->graphs[0]; i++)
        most = p->graphs[i].workspace > most ? p->graphs[i].workspace : most;
    if (p->inner != NULL && p->inner->workspace > (size_t)most)
        most = (int64_t)p->inner->workspace;
    p->workspace = p->scratch + (size_t)most;
    return status;
}

static int copy_tensor(pbn_handle *handle, const pbn_tensor *from_desc, const void *from, const pbn_tensor *to_desc,
                       void *to) {
    const pbn_call call = {.operation = PBN_OP_AXPBY, .alpha = 1, .x_desc = from_desc, .x = from, .y_desc = to_desc,
                           .y = to};
    return cudnn_axpby(handle, &call);
}

/* A number for each channel to the lines of that channel. */
static int expand(pbn_handle *handle, const pbn_tensor *from, const void *vector, const pbn_tensor *to, void *lines) {
    const float one = 1, zero = 0;
    return api.cudnnAddTensor(handle->vendor, &one, from->compute, vector, &zero, to->compute, lines);
}

/* The channels' three vectors to the lines. */
static int run_expand(pbn_handle *handle, const pbn_plan *p, void *const *slots) {
    int status;
    if (p->kind == COLUMNS && !p->last)
        return expand(handle, &p->three, slots[CHANNEL_A], &p->spread, slots[LINE_0]);
    if ((status = expand(handle, &p->one, slots[CHANNEL_A], &p->map, slots[LINE_0])) != PBN_OK ||
        (status = expand(handle, &p->one, slots[CHANNEL_B], &p->map, slots[LINE_1])) != PBN_OK)
        return status;
    return expand(handle, &p->one, slots[CHANNEL_C], &p->map, slots[LINE_2]);
}

/* One of the small batch norms: averages of `lines` over the lines of each of the channels of `param`, to `average`;
 * if `variance`, theirs to zeros + 3 vectors of them: a running variance that takes all of the batch's. */
static int run_average(pbn_handle *handle, const pbn_tensor *map, const pbn_tensor *param, const void *lines, void *out,
                       char *zeros, int variance, void *average, void *inverse) {
    const float one = 1, zero = 0;
    const size_t vector = (size_t)param->dims[1] * sizeof(float);
    return api.cudnnBatchNormalizationForwardTraining(
        handle->vendor, PBN_CUDNN_BATCHNORM_SPATIAL, &one, &zero, map->compute, lines, map->compute, out,
        param->compute, zeros, zeros + vector, 1.0, variance ? zeros + 2 * vector : NULL,
        variance ? zeros + 3 * vector : NULL, 1.0, average, inverse);
}

/* Averages of LINE_2 and LINE_3 to CHANNEL_AVERAGE and CHANNEL_AVERAGE_2; in forward also the variance of the former,
 * to CHANNEL_BETWEEN, the seventh of the zeros' eight vectors of C. */
static int run_merge(pbn_handle *handle, const pbn_plan *p, void *const *slots, int variance) {
    const float zero = 0;
    const size_t vector = (size_t)p->one.dims[1] * sizeof(float);
    char *zeros = slots[CHANNEL_ZERO];
    int status = api.cudnnSetTensor(handle->vendor, p->zeros.compute, zeros, &zero);
    if (status != PBN_OK)
        return status;
    if (p->kind == COLUMNS && !p->last)
        return run_average(handle, &p->maps, &p->two, slots[LINE_2], slots[LINE_0], zeros, variance,
                           slots[CHANNEL_AVERAGE], slots[CHANNEL_INVERSE]);
    status = run_average(handle, &p->map, &p->one, slots[LINE_2], slots[LINE_0], zeros + 3 * vector, variance,
                         slots[CHANNEL_AVERAGE], slots[CHANNEL_INVERSE]);
    if (status != PBN_OK)
        return status;
    return run_average(handle, &p->map, &p->one, slots[LINE_3], slots[LINE_0], zeros, 0, slots[CHANNEL_AVERAGE_2],
                       (char *)slots[CHANNEL_INVERSE] + vector);
}

static int run_lines(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    void *slots[SLOT_COUNT];
    const int forward = call->operation == PBN_OP_FORWARD_TRAINING, backward = call->operation == PBN_OP_BACKWARD;
    void *last = (char *)call->workspace + p->scratch;
    int status = check_alignment(call->x_desc->dtype, 1, data_bits(call), param_bits(call));
    if (status != PBN_OK)
        return status;
    if ((data_bits(call) & (uintptr_t)(p->alignment - 1)) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, less_aligned);
    if (p->writes_first && (call->y == call->x || call->y == call->dy))
        return pbn_refuse(PBN_E_UNSUPPORTED, writes_first);
    bind(p, call, slots);
    if (forward && p->kind == ROWS &&
        (status = copy_tensor(handle, &p->firsts, call->x, &p->first, slots[LINE_FIRST])) != PBN_OK)
        return status;
    if (backward && (status = expand(handle, &p->one, call->saved_mean, &p->map, slots[LINE_MEAN])) != PBN_OK)
        return status;
    for (int i = 0; i < 3; i++)
        if (p->graphs[i].plan != NULL && (status = graph_run(&p->graphs[i], handle->vendor, slots, last)) != PBN_OK)
            return status;
    if ((forward || backward) && !p->given && p->merged > 1 && (status = run_merge(handle, p, slots, forward)) != PBN_OK)
        return status;
    status = graph_run(&p->graphs[3], handle->vendor, slots, last);
    if (status == PBN_OK && p->inner != NULL)
        return run_layer_apply(handle, p, call, slots);
    if (status != PBN_OK || p->moments_only || (status = run_expand(handle, p, slots)) != PBN_OK)
        return status;
    return graph_run(&p->graphs[4], handle->vendor, slots, last);
}

