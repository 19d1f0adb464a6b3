/* How a call is computed where not by the batch-normalization primitive alone: by rows, and folded. Part of adapter.c.
 *
 * oneDNN's batch normalization has vector kernels for channels that lie side by side, a multiple of 8 or 16 of them, and
 * plain ones for everything else. Its other primitives have vector kernels for more:
 *
 * ROWS: of packed channels-first memory each row, a channel of an image, is summed by layer normalization, by reduction
 * or, cut into segments, by a product with ones: the segments are the columns of the matrix turned.
 * FOLDED: packed memory is a matrix. Several of its rows side by side are one row of a matrix of a good width, whose
 * columns are summed by a product with ones. What is left over is a second, smaller matrix. Where rows are whole vectors
 * batch normalization itself has good kernels: it takes the statistics and the gradients of such a matrix, whose columns
 * are short chains of sums. Where channels are, or the statistics are of single activations, it then does the rest with
 * the merged ones, too.
 *
 * Memory that is not packed is copied, channels first.
 *
 * Where one thread computes, or OpenMP's threads, the sums of both are made in C instead: by rows or by columns as their
 * lengths want it, in one pass (sums.c, channel_sums.c). Primitives make them under TBB and SYCL.
 *
 * Of large tensors of rows the gradient is made in pieces, so that what is written for it alone never leaves the cache.
 * Rows or columns are merged to channels in double, and y or dx is one pass of elementwise primitives over the whole. */

#define NOWHERE SIZE_MAX
#define ALIGNMENT 64

#define OF_DY(k) ((kind)((k) + ROW_SUMS_OF_DY - ROW_SUMS))

typedef enum way { PLAIN, ROWS, FOLDED } way;

/* Packed memory as `pieces` times `rows` rows of `group` rows of `columns` elements, and `tail` rows of `columns`. The
 * elements of a row are those of the channels in turn, `inner` of each. Sums by rows are of `inner` elements each. */
typedef struct fold {
    int64_t columns, inner, group, rows, tail, pieces;
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
    int centred;                 /* elementwise steps are by layer normalization, around given means */
    int products;                /* gradients of columns are summed by products, not by batch normalization */
    kind sums_by;                /* what sums rows or columns of a gradient */
    int64_t segments;            /* of a row, each with a sum of its own */
    int own;                     /* sums are this adapter's */
    int64_t block;               /* channels that an elementwise step takes of one image; 0: all of all images */
    int in_turn;                 /* a block is summed, then computed, while it is in the cache */
    int whole;                   /* folding is for the statistics, and batch normalization does the rest */
    int64_t lengths[2];          /* elements of a piece, and of what is left over */
    size_t wide_sums;            /* of columns: two in double, and each channel's mean repeated */
    size_t means, variances, sums, factor, offset, repeated[4], ones, around, centre, each[2];
    size_t product;              /* of one piece */
    size_t past;                 /* bytes into it: what is aligned oneDNN writes past the cache */
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
           api.dnnl_post_ops_append_eltwise != NULL && api.dnnl_post_ops_append_sum != NULL &&
           api.dnnl_post_ops_destroy != NULL && api.dnnl_primitive_attr_set_post_ops != NULL;
}

static int64_t plane_of(const pbn_call *call) {
    return pbn_numel(call->x_desc->rank, call->x_desc->dims) / call->x_desc->dims[0] / call->x_desc->dims[1];
}

/* Whether the call takes mean and variance from x itself. */
static int recomputes(const pbn_call *call) {
    return call->operation == PBN_OP_FORWARD_TRAINING ||
           (call->operation == PBN_OP_BACKWARD && call->saved_mean == NULL);
}

/* Whether what has a statistic of its own lies side by side. */
static int is_side_by_side(const pbn_call *call) {
    return call->mode == PBN_PER_ACTIVATION || call->x_desc->layout == PBN_CHANNELS_LAST || plane_of(call) == 1;
}

/* Why a call cannot be computed so. */
static const char *no_way(const pbn_call *call, way way) {
    const int layout = call->x_desc->layout;
    if (way == PLAIN)
        return NULL;
    if (!has_steps())
        return "this oneDNN lacks its layer normalization, reduction, matmul, reorder or binary primitive";
    if (call->mode != PBN_SPATIAL && (way == ROWS || call->mode != PBN_PER_ACTIVATION))
        return way == ROWS ? "rows are of the spatial mode" : "folding is of two modes, spatial and per activation";
    if (call->mode == PBN_PER_ACTIVATION && !recomputes(call))
        return "folding of activations is for their statistics";
    if (way == FOLDED)
        return layout != PBN_CHANNELS_LAST && call->x_desc->dims[0] == 1
                   ? "folding is of several images, or of channels-last memory" : NULL;
    if (layout == PBN_CHANNELS_LAST || call->x_desc->rank == 2)
        return "rows are of channels-first memory";
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

/* Whether the calling thread computes alone. */
static int is_alone(void) {
    return (in_forked_child && api.loses_threads) || (api.omp_get_max_threads != NULL && api.omp_get_max_threads() == 1);
}

/* Whether functions of this adapter can be run by OpenMP's threads. */
static int has_team(void) {
    return !is_alone() && api.omp_get_max_threads != NULL && api.omp_get_num_threads != NULL &&
           api.omp_get_thread_num != NULL && api.GOMP_parallel != NULL;
}

#define SHORT_CHAIN 64 /* terms: of more that are equal, or few of which are not 0, roundings add up beyond the bound */

/* Whether the entry point sums too many terms in one chain. */
static int is_chained(const pbn_call *call) {
    const int64_t images = call->x_desc->dims[0];
    return recomputes(call) && images * (call->mode == PBN_PER_ACTIVATION ? 1 : plane_of(call)) > SHORT_CHAIN;
}

/* Measured with oneDNN 3.2 on an EPYC against PyTorch 2.13, and what folds of channels-first memory on a Xeon against 2.14:
 * `pybnorm bench device --backend onednn`. What is chained is left alone, however fast it is. */
static way fastest(const pbn_call *call, const char **why) {
    const pbn_tensor *x = call->x_desc;
    const int64_t images = x->dims[0], channels = x->dims[1], plane = plane_of(call);
    const int training = call->operation == PBN_OP_FORWARD_TRAINING, backward = call->operation == PBN_OP_BACKWARD;
    const int per_activation = call->mode == PBN_PER_ACTIVATION, is_float = x->dtype == PBN_FLOAT32;
    const int small = images * channels * plane <= 1 << 13;
    const int beside = is_side_by_side(call), chained = is_chained(call);
    const int half = is_float && channels % 8 == 0, eight = channels == 8;
    const int vectors = channels % 16 == 0 || (half && (training ? eight || small : backward ? small : eight));
    const int is_packed = x->layout == PBN_CHANNELS_FIRST || x->layout == PBN_CHANNELS_LAST;
    if ((*why = no_way(call, beside ? FOLDED : ROWS)) != NULL)
        return PLAIN;
    if (!is_packed && !chained) {
        *why = "other ways are of packed memory";
        return PLAIN;
    }
    if (x->dtype == PBN_FLOAT16 && !widened(call, PLAIN) && !is_alone() && !chained) {
        *why = "float16 would be converted by the calling thread alone";
        return PLAIN;
    }
    if (beside) {
        *why = "statistics of many values, by short chains of sums";
        if (chained)
            return FOLDED;
        *why = per_activation ? "statistics of few images" : "channels side by side, in whole vectors";
        if (per_activation || widened(call, PLAIN) || vectors)
            return PLAIN;
        *why = "channels side by side, but no whole number of vectors of them";
        return FOLDED;
    }
    const int few = images * channels * plane <= 1600 && ((backward && plane < 64) || (training && plane <= 16));
    if (is_float && !chained && (few || (training && plane < 8 && images < 8))) {
        *why = "few and short rows"; /* one step is the fastest then */
        return PLAIN;
    }
    const int many = images >= 16;
    const int64_t columns = channels * plane;
    const int little = columns <= 1 << 12 || (plane < 512 && images * columns < 1 << 18);
    const int fills = images * (columns % 16 == 0 ? 16 : columns & -columns) >= 8 * 16; /* whole vectors, of eight rows */
    int folds = plane < 8 && (backward || (training && many));
    if (!folds && is_float)
        folds = backward && images >= 8 && little;
    else if (!folds && backward)
        folds = fills && ((images >= 8 && columns <= 1 << 14) || (many && plane < 128));
    else if (!folds)
        folds = training && many && fills && (plane < 128 || (plane < 256 && little));
    if (images > 1 && folds) {
        *why = "several short rows side by side fill vectors";
        return FOLDED;
    }
    *why = "vector kernels over the rows of channels-first memory";
    return ROWS;
}

/* ------------------------------------------------------------------ planning */

#define WIDTH 16             /* elements of a vector */
#define BATCH (8 * WIDTH)
#define MOST_FLAT 1536       /* elements of a row for elementwise steps: four vectors of it fit into the first cache */
#define LEAST_COLUMNS 512    /* of a matrix that is summed by products: shorter rows cost more than they hold */
#define LEAST_SHARE ((int64_t)1 << 14) /* elements: to wake a thread takes as long as to sum some thousands */
#define MOST_STRIPS 8        /* of so many columns each, that threads share */
#define LEAST_CHANNELS 64    /* of a matrix whose statistics or gradients batch normalization takes */
#define MOST_REPEATED (3 << 12) /* elements of a vector for all of an image */
#define LONG_ROW 4096
#define LONG_SUM 2048        /* of a row that reduction sums as fast as a product does */
#define LEAST_ROWS 8         /* of a segment: what its sum costs is shared by so many */
#define PIECE ((int64_t)1 << 16) /* elements for each thread: x, dy and a product in float32 are 768 KiB */
#define MOST_TRIED 4096      /* numbers of images that may divide a matrix whose bytes are too many for one */
#define LONGEST_CHAIN(m) (8 + 4 * sqrt((double)(m))) /* elements of a column, which is one chain of sums */

/* Elements of a piece; 0 where pieces are not worth their steps, or may be too small for the threads. */
static int64_t piece_for(int64_t elements) {
    const int64_t piece = api.omp_get_max_threads != NULL ? PIECE * api.omp_get_max_threads() : 0;
    return elements >= 4 * piece ? piece : 0;
}

/* The number of pieces that leaves few of the units over. */
static int64_t pieces_of(int64_t units, int64_t unit) {
    const int64_t piece = piece_for(units * unit);
    int64_t best = piece == 0 ? 1 : units * unit / piece;
    if (best > units)
        best = units > 0 ? units : 1;
    for (int64_t n = best, last = n + n / 4; n <= last && n <= units; n++)
        if (units % n < units % best)
            best = n;
    return best;
}

/* How many rows side by side leave the fewest of a row's vectors over: elementwise steps take eight at a time. */
static int64_t flat_group(int64_t rows, int64_t columns) {
    int64_t best = 1, best_left = INT64_MAX;
    for (int64_t group = 1; group == 1 || (group * columns <= MOST_FLAT && rows / group >= 8); group++) {
        const int64_t width = group * columns, left = (width % BATCH + WIDTH - 1) / WIDTH;
        if (best_left == INT64_MAX || left * best * columns < best_left * width) {
            best = group;
            best_left = left;
        }
        if (left == 0)
            break;
    }
    return best;
}

/* How many threads, at most `most`, share so many elements. */
static int64_t shares_of(int64_t elements, int64_t most) {
    const int64_t threads = has_team() ? api.omp_get_max_threads() : 1, worth = elements / LEAST_SHARE;
    most = threads < most ? threads : most;
    return worth < 1 ? 1 : worth < most ? worth : most;
}

static fold fold_of(const pbn_call *call, const part *p, int sums) {
    const int64_t inner = is_side_by_side(call) ? 1 : plane_of(call);
    const int64_t columns = p->params * inner, rows = p->count / columns;
    const int64_t narrowest = p->own || p->products ? LEAST_COLUMNS * (p->own ? shares_of(p->count, MOST_STRIPS) : 1)
                                                    : LEAST_CHANNELS;
    int64_t group = 1;
    while (sums && rows / (group * 2) >= 8 &&
           (columns * group < narrowest || (!p->own && columns * group % WIDTH != 0)))
        group *= 2;
    if (!sums)
        group = flat_group(rows, columns);
    while (sums && !p->own && rows / (group * 2) >= 8 && (double)(rows / group) > LONGEST_CHAIN(rows * inner))
        group *= 2;
    return (fold){columns, inner, group, rows / group, rows % group, 1};
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

static view matrix(int dtype, int64_t elements, int64_t width) {
    return (view){dtype, 2, {elements / width, width}, {width, 1}};
}

/* The same matrix to batch normalization, with a column for each channel: that of (rows, columns) takes it two to three
 * times as long. Its kernels count the bytes of an image in 32 bits, and read and write elsewhere past that. */
static view side_by_side(int dtype, int64_t elements, int64_t width) {
    const int64_t rows = elements / width, most = INT32_MAX / width / (int64_t)pbn_item_size(dtype);
    const int64_t least = most > 0 ? (rows - 1) / most + 1 : rows;
    for (int64_t images = least; most > 0 && images < least + MOST_TRIED; images++)
        if (rows % images == 0)
            return (view){dtype, 4, {images, width, rows / images, 1}, {rows / images * width, 1, width, width}};
    return matrix(dtype, elements, width);
}

/* A step over everything. */
static int elementwise_step(pbn_handle *h, part *p, kind k) {
    const int dtype = p->memory.dtype;
    const fold *f = &p->flat;
    const int64_t images = p->count / f->columns, plane = f->inner, rest = f->tail * f->columns;
    const view image = {dtype, 3, {images, p->params, plane}, {f->columns, plane, 1}};
    const view main = matrix(dtype, p->count - rest, f->group * f->columns), tail = matrix(dtype, rest, f->columns);
    int code = PBN_OK;
    for (int which = 0; p->block > 0 && which < 2 && code == PBN_OK; which++) {
        const int64_t channels = which ? p->params % p->block : p->block, length = channels * plane;
        const view flat = {dtype, 2, {1, length}, {length, 1}}, rows = {dtype, 3, {1, channels, plane}, {length, plane, 1}};
        if (channels > 0)
            code = p->wide ? step(h, p, k, which, 0, &flat, length) : step(h, p, k, which, 0, &rows, channels);
    }
    if (p->block > 0)
        return code;
    if (!p->wide)
        return step(h, p, k, 0, 0, &image, p->params);
    code = step(h, p, k, 0, 0, &main, f->group * f->columns);
    return code == PBN_OK && rest > 0 ? step(h, p, k, 1, 0, &tail, f->columns) : code;
}

/* The elements of a row of the matrix that a piece, or what is left over, is for its sums. */
static int64_t width_of(const part *p, int which) {
    return p->way == ROWS ? p->fold.inner : which ? p->fold.columns : p->fold.group * p->fold.columns;
}

/* Sums of a piece: one for each row or column. */
static int64_t sums_of(const part *p, int which) {
    return p->way == ROWS ? p->lengths[which] / p->fold.inner : width_of(p, which);
}

/* Whether batch normalization has a good kernel for the matrix. */
static int is_vectors(const part *p, int which) {
    return p->way == FOLDED && !p->products && width_of(p, which) % WIDTH == 0;
}

/* Elements of one that a sum has. */
static int64_t rows_of(const part *p, int which) {
    return p->way == ROWS ? p->fold.inner / p->segments : p->lengths[which] / sums_of(p, which);
}

static int64_t most_rows(const part *p) {
    const int64_t piece = rows_of(p, 0), rest = rows_of(p, 1);
    return rest > piece ? rest : piece;
}

/* Those of float32 that are wanted at once: for the sums of columns, or one for each column. */
static int64_t most_ones(const part *p) {
    const int64_t rows = most_rows(p), width = is_vectors(p, 0) ? width_of(p, 0) : 0;
    return rows > width ? rows : width;
}

/* Whether the sums in C are of columns: of rows too short to fill vectors, or to be worth their beginning. */
static int takes_columns(const part *p) {
    const int64_t plane = p->fold.columns / p->params, images = p->count / p->fold.columns;
    const int vectors = images < 16 ? 1 : images < 32 ? 4 : p->memory.dtype == PBN_FLOAT32 ? 8 : 24;
    return plane < vectors * LANES;
}

/* A step over a piece, and over what is left over: of what is folded one is for whole vectors or for the rest. */
static int piece_step(pbn_handle *h, part *p, kind k, int dtype) {
    const fold *f = &p->flat;
    const int by_rows = p->way == ROWS, by_row = by_rows && recipes[k].family == BINARY;
    const int normalizes = recipes[k].family == BATCH_NORMALIZATION, sums = recipes[k].family == MATMUL;
    int code = PBN_OK;
    for (int which = 0; which < 2 && code == PBN_OK && p->lengths[which] > 0; which++) {
        const int64_t length = p->lengths[which], width = width_of(p, which);
        const int64_t flat = which ? f->columns : f->group * f->columns;
        const view rows = {dtype, 3, {1, length / width, width}, {length, width, 1}};
        const int64_t segment = width / (by_rows ? p->segments : 1);
        const view turned = {dtype, 2, {segment, length / segment}, {1, segment}};
        const view memory = normalizes        ? side_by_side(dtype, length, width)
                            : by_rows && sums ? turned
                            : !by_row         ? matrix(dtype, length, width)
                            : p->wide         ? matrix(dtype, length, flat)
                                              : rows;
        if (p->way == FOLDED && normalizes != is_vectors(p, which))
            continue;
        code = step(h, p, k, which, 0, &memory,
                    by_row && p->wide ? flat : sums ? memory.dims[1] : sums_of(p, which));
    }
    return code;
}

/* Reduction takes as long to begin a row as to sum thousands of elements. Shorter ones are cut, if they have segments of
 * one length that are short enough for a chain of sums each. */
static void choose_segments(part *p) {
    const int64_t inner = p->fold.inner;
    for (int64_t n = 1; inner < LONG_SUM && n * LEAST_ROWS <= inner && p->sums_by != COLUMN_SUMS; n++)
        if (inner % n == 0 && (double)(inner / n) <= LONGEST_CHAIN(p->count / p->params)) {
            p->segments = n;
            p->sums_by = COLUMN_SUMS;
        }
}

/* How a tensor is cut for sums by rows. Of short ones a piece has whole images, as the elementwise steps want them;
 * a row that is longer than a piece is cut, if that leaves nothing. Training's other rows are not: written for nothing,
 * y is then in the cache for what comes last. */
static void cut_rows(const pbn_call *call, part *p) {
    fold *f = &p->fold;
    p->lengths[0] = p->count;
    if (call->operation == PBN_OP_FORWARD_TRAINING && f->inner < LONG_ROW)
        return;
    const int64_t plane = f->inner, piece = piece_for(p->count), least = piece > 0 ? (plane - 1) / piece + 1 : 1;
    int64_t unit = p->flat.group * f->columns, parts = least;
    if (!p->wide) {
        while (plane % parts != 0 && parts < 4 * least)
            parts++;
        unit = f->inner = plane % parts == 0 ? plane / parts : plane;
    }
    f->pieces = pieces_of(p->count / unit, unit);
    p->lengths[0] = p->count / unit / f->pieces * unit;
}

/* oneDNN's binary primitive finds the vector of each post-operation anew for eight vectors of a row, and for each that is
 * left over. Layer normalization has nothing to find, and then a binary primitive without such vectors does the rest: two
 * passes for one. Whether they are faster, by what was measured of rows in the cache: a vector left over takes the time
 * of so many elements in the second pass. */
static int leaves_over(int64_t row, int is_float) {
    return row < (is_float ? 58 : 116) * ((row % BATCH + WIDTH - 1) / WIDTH);
}

static void reserve_steps(const pbn_call *call, part *p) {
    const int backward = call->operation == PBN_OP_BACKWARD, is_float = p->memory.dtype == PBN_FLOAT32;
    const fold *f = &p->fold;
    const size_t vector = (size_t)p->params * sizeof(float);
    const int64_t longest = p->lengths[p->lengths[1] > p->lengths[0]];
    if (!p->whole) {
        p->factor = reserve(p, vector);
        p->offset = reserve(p, vector);
    }
    if (p->own) {
        p->sums = reserve(p, 2 * (size_t)p->params * sizeof(double));
        if (p->centred && backward) {
            p->means = reserve(p, (size_t)(p->count / f->inner) * sizeof(float));
            p->variances = reserve(p, (size_t)(p->count / f->inner) * sizeof(float));
        }
    } else if (call->operation != PBN_OP_FORWARD_INFERENCE) {
        const size_t sums = (size_t)((f->pieces * sums_of(p, 0) + sums_of(p, 1)) * p->segments) * sizeof(float);
        p->means = reserve(p, sums);
        p->variances = reserve(p, sums);
        p->sums = reserve(p, 2 * (size_t)p->params * sizeof(double));
    }
    const size_t before = p->total;
    if (p->own && takes_columns(p))
        p->wide_sums = reserve(p, (size_t)(f->group * f->columns) * (2 * sizeof(double) + sizeof(float)));
    const size_t summed = p->total;
    p->total = before; /* vectors are repeated when the sums have been taken, in their place */
    for (int i = 0; p->wide && !p->whole && i < (backward ? 4 : 3); i++)
        p->repeated[i] = reserve(p, (size_t)(p->block > 0 ? p->block * p->flat.inner : p->flat.group * f->columns) *
                                        sizeof(float));
    p->total = p->total > summed ? p->total : summed;
    if (!p->own && call->operation != PBN_OP_FORWARD_INFERENCE && p->sums_by == COLUMN_SUMS)
        p->ones = reserve(p, (size_t)(most_ones(p) + most_rows(p)) * sizeof(float)); /* of float32, and of dy's type */
    if (backward && !p->whole && (!p->own || p->centred))
        p->around = reserve(p, (size_t)(p->way == ROWS && !p->wide ? p->count / f->inner
                                        : p->way == ROWS           ? p->flat.group * f->columns
                                                                   : width_of(p, 0)) * sizeof(float));
    const int widen = !is_float && (backward || p->way == FOLDED);
    p->past = is_vectors(p, 0) ? ALIGNMENT / 2 : 0;
    if (!p->own && call->operation != PBN_OP_FORWARD_INFERENCE && (f->pieces > 1 || widen || p->whole || (backward && p->past > 0)))
        p->product = reserve(p, p->past + (size_t)longest * sizeof(float));
    if (p->centred && backward) /* kept for the gradient, or where the product will be */
        p->centre = p->product == NOWHERE || (is_float && f->pieces > 1) ? reserve(p, (size_t)longest * sizeof(float))
                                                                         : p->product;
    for (int i = 0; p->centred && i < 2; i++)
        p->each[i] = reserve(p, (size_t)(p->count / f->inner) * sizeof(float));
}

#define MOST_VECTOR ((int64_t)1 << 16) /* elements of a vector for all of an image, of which a step reads up to four */

/* Whether elementwise steps take several rows: the more images, the less it costs to repeat vectors, as long as the cache
 * holds them. */
static int is_short(int64_t row, int64_t images, int64_t columns, int is_float) {
    if (!is_float && row < (images < 4 ? 128 : 512) && columns < MOST_VECTOR && leaves_over(row, 0))
        return 1;
    const int repeats = images >= 16 && (columns <= MOST_REPEATED || leaves_over(row, 1));
    return row < (images < 4 ? 64 : repeats ? 512 : 128);
}

#define BLOCK_BYTES ((int64_t)1 << 16) /* of a tensor: a primitive's call takes the time of a quarter of them */
#define MOST_BLOCK ((int64_t)1 << 16)  /* elements */
#define CACHED ((int64_t)1 << 20)      /* bytes of tensors that the cache holds until they are read again */

/* Cuts channels-first memory into blocks of channels, where the vectors of a whole image would not stay in the cache, or
 * the tensors themselves not from their sums to what is made of them. */
static void choose_block(const pbn_call *call, part *p) {
    const int64_t images = call->x_desc->dims[0], plane = p->flat.inner, item = (int64_t)pbn_item_size(p->memory.dtype);
    const int64_t bytes = item * (call->operation == PBN_OP_BACKWARD ? 2 : 1);
    const int64_t shares = shares_of(p->count, INT32_MAX);
    const int64_t least = BLOCK_BYTES / item * (shares > 1 ? 2 * shares : 1);
    const int wide = p->wide && p->flat.columns >= MOST_VECTOR;
    int64_t length = CACHED / images / bytes;
    if (is_side_by_side(call) || p->whole || (!is_alone() && !has_team()))
        return;
    length = length < least || p->wide ? least : length > MOST_BLOCK ? MOST_BLOCK : length;
    const int64_t channels = length / plane > 0 ? length / plane : 1;
    p->in_turn = p->own && is_alone() && !takes_columns(p) && channels * plane >= least / 2 &&
                 channels * plane * images * bytes <= CACHED && p->count * bytes > CACHED;
    if (channels < p->params && (p->in_turn || wide))
        p->block = channels;
    p->in_turn &= p->block > 0;
}

/* The primitives of a call by rows or folded, and the memory that they need. */
static int plan_steps(pbn_handle *h, const pbn_call *call, part *p) {
    const int dtype = p->memory.dtype, by_rows = p->way == ROWS, is_float = dtype == PBN_FLOAT32;
    const int backward = call->operation == PBN_OP_BACKWARD;
    int code = PBN_OK;
    p->own = call->operation != PBN_OP_FORWARD_INFERENCE && (is_alone() || has_team());
    p->products = backward && !p->whole && is_float && p->count > PIECE; /* batch normalization writes dx, too */
    p->fold = fold_of(call, p, 1);
    p->flat = fold_of(call, p, 0);
    p->wide = !by_rows || ((p->flat.rows > 1 || !is_float) && is_short(p->fold.inner, call->x_desc->dims[0], p->fold.columns, is_float)) ||
              (p->own && backward && call->x_desc->dims[0] >= 4 && p->fold.inner < 512 && leaves_over(p->fold.inner, 1));
    p->lengths[0] = p->fold.rows * width_of(p, 0);
    if (by_rows)
        cut_rows(call, p);
    p->lengths[1] = p->count - p->fold.pieces * p->lengths[0];
    p->centred = by_rows && !p->wide && ((backward && (is_float || !p->own)) || (is_float && p->fold.pieces == 1)) &&
                 leaves_over(p->fold.inner, 1);
    if (!p->centred)
        choose_block(call, p);
    p->sums_by = by_rows ? ROW_SUMS : COLUMN_SUMS;
    p->segments = 1;
    if (by_rows && backward && !p->own)
        choose_segments(p);
    reserve_steps(call, p);
    if (recomputes(call) && by_rows && !p->own)
        code = piece_step(h, p, ROW_STATISTICS, dtype);
    const kind of_columns[] = {STATISTICS, COLUMN_SUMS, SQUARES, WIDENED};
    for (int i = 0; recomputes(call) && !by_rows && !p->own && i < (is_float ? 3 : 4) && code == PBN_OK; i++)
        code = piece_step(h, p, of_columns[i], i == 0 || i == 3 ? dtype : PBN_FLOAT32);
    if (code != PBN_OK || p->whole)
        return code;
    if (p->centred)
        code = piece_step(h, p, CENTRED, dtype);
    if (code == PBN_OK && p->centred && is_float)
        code = backward ? piece_step(h, p, ADDED, dtype) : elementwise_step(h, p, SHIFTED);
    if (code != PBN_OK || !backward)
        return code == PBN_OK ? elementwise_step(h, p, APPLY) : code;
    if (p->own)
        return elementwise_step(h, p, GRADIENT);
    if (!by_rows)
        code = piece_step(h, p, GRADIENT_SUMS, dtype);
    if (code == PBN_OK && !p->centred && !is_float)
        code = piece_step(h, p, WIDENED, dtype);
    if (code == PBN_OK)
        code = piece_step(h, p, p->centred ? TIMES : PRODUCT, dtype);
    if (code == PBN_OK)
        code = piece_step(h, p, p->sums_by, PBN_FLOAT32);
    if (code == PBN_OK)
        code = piece_step(h, p, OF_DY(p->sums_by), dtype);
    return code == PBN_OK ? elementwise_step(h, p, GRADIENT) : code;
}
