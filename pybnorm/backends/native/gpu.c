/* native on a GPU: which kernels of kernels.cuh compute a call, and with what. The kernels are compiled by NVRTC or
 * hipRTC for the handle's device at first use and kept in the user's cache folder. (kernels.c has that; descriptors.h what
 * the CPU shares.) Part of cuda.c and of hip.c, each of which is a driver.
 */
struct pbn_handle {
    void *pointer, *context, *stream;
    gpu device;
    kernel *found[64]; /* by a hash of their keys */
};

#include "kernels.c"

/* ------------------------------------------------------------------ a call as launches */

enum { MOST_LAUNCHES = 6, STATISTICS = 0, SUMS = 1, RESULTS = 2, STAGES = 3, THREADS = 256, COLUMNS_WIDE = 32 };
enum { SHORT_RUN = 16, MEDIUM_RUN = 64, FEW_ROWS = 32 }; /* of elements that are reduced; of runs of a channel */
enum { TILES_BYTES = 12 << 20 }; /* of more, fewer and wider reads by two launches take less time */
enum { SMALL_BYTES = 1 << 20, SUPERROW_ELEMENTS = 1 << 19 }; /* up to which one launch pays; from which superrows do */
enum { SHORT_CHANNEL = 8192, TINY_ELEMENTS = 1 << 15 }; /* of a channel, of a tensor: so many suit narrower vectors */
enum { USUAL_CLUSTER = 8 }; /* blocks: a GPU holds few larger clusters at once */
enum { BY_SUMS = 1, BY_RESULTS = 2 };
enum { SHIFTED = 0, ALIGNED = 1, ANY = 2 }; /* FORM of the kernels */

/* What a call was found to be, its launches and the memory that they take. */
typedef struct work {
    const pbn_call *call;
    pbn_handle *handle;
    problem p;
    int form, vector, superrow, backward, constant, fused, by_columns; /* constant: backward by running statistics */
    int residual; /* of several launches: which writes dz */
    unsigned used;               /* bits of the tensors that are read or written */
    unsigned shift[PLACES];      /* elements of an address past 16 bytes */
    int64_t span[PLACES];        /* of those that are used */
    arguments args[STAGES];      /* statistics that were not saved; sums; results */
    axis_list axes;
    launch launches[MOST_LAUNCHES];
    int count, stats;
    size_t parts_bytes, stats_bytes;
} work;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t over(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int has_residual_out(const pbn_call *c) { return c->operation == PBN_OP_BACKWARD && c->dz_desc != NULL; }

/* One launch more. `fused`, `backward`: of the kernel. NULL where it cannot be compiled; pbn_reason or the text says why. */
static launch *add_launch(work *w, enum kernel_name name, int stage, int backward, int fused, int *status) {
    const int dtype = w->call->x_desc->dtype;
    const int param = w->call->param_desc != NULL ? w->call->param_desc->dtype : dtype == PBN_FLOAT64 ? PBN_FLOAT64 : PBN_FLOAT32;
    launch *l = &w->launches[w->count];
    const int alike = name == KERNEL_FINISH || name == KERNEL_MERGE; /* of every form */
    memset(l, 0, sizeof *l);
    if (!backward && (alike || name == KERNEL_ROW_SUMS || name == KERNEL_COLUMN_SUMS))
        fused = 0;
    *status = find_kernel(w->handle, (instance){name, dtype, param, backward ? 1 + w->constant : 0, fused, alike ? 1 : w->form, alike ? 1 : w->vector}, &l->of);
    if (*status != PBN_OK)
        return NULL;
    l->stage = stage;
    l->grid[1] = l->grid[2] = l->block[1] = l->block[2] = l->cluster = 1;
    w->count++;
    return l;
}

/* ---- the form of a call's tensors ---- */

static void note_axis(axis_list *list, int at, int64_t length, const int64_t *steps, int64_t times, int64_t vector) {
    list->length[at] = length;
    list->vector[at] = vector;
    for (int t = 0; t < PLACES; t++)
        list->step[at][t] = steps[t] * times;
}

/* All axes, from the innermost outwards: those that are reduced, then the others. */
static void list_axes(work *w) {
    const problem *p = &w->p;
    axis_list *list = &w->axes;
    int at = 0;
    memset(list, 0, sizeof *list);
    if (!p->columns)
        note_axis(list, at++, p->run, p->steps, 1, 0);
    else if (p->repeat > 1)
        note_axis(list, at++, p->repeat, p->steps, 1, 0);
    for (int i = p->row_axes - 1; i >= 0; i--)
        note_axis(list, at++, p->of_rows[i].length, p->of_rows[i].steps, 1, 0);
    list->reduced = at;
    if (p->columns)
        note_axis(list, at++, p->period, p->steps, p->repeat, p->step);
    for (int i = p->group_axes - 1; i >= 0; i--)
        note_axis(list, at++, p->of_groups[i].length, p->of_groups[i].steps, 1, p->of_groups[i].step);
    list->kept = at - list->reduced;
}

static int64_t step_of_rows(const problem *p, int t) { return p->row_axes > 0 ? p->of_rows[0].steps[t] : 0; }
static int64_t step_of_groups(const problem *p, int t) { return p->group_axes > 0 ? p->of_groups[0].steps[t] : 0; }

/* The largest power of two that divides `value`, at most `most`. */
static int divisor(int64_t value, int most) {
    while (value % most != 0)
        most /= 2;
    return most;
}

/* Whether taking several rows as one pays, where their vectors are of so many bytes, at most 16. */
static int suits_superrows(const problem *p, int bytes, int item) {
    return p->group_axes == 0 && bytes < 16 && p->rows >= (bytes < 8 ? 16 : 64) * (16 / item) &&
           p->channels * p->count > SUPERROW_ELEMENTS;
}

static void choose_form(work *w) {
    const problem *p = &w->p;
    const int item = (int)pbn_item_size(w->call->x_desc->dtype), full = 16 / item;
    int plain = p->row_axes <= 1 && p->group_axes <= 1, vector = divisor(p->run, full), packed = p->group_axes == 0, even = 1;
    w->form = ANY;
    w->vector = w->superrow = 1;
    w->by_columns = p->columns;
    for (int t = 0; t < PLACES; t++) {
        if (!(w->used >> t & 1))
            continue;
        const int64_t row = step_of_rows(p, t), group = step_of_groups(p, t);
        plain &= p->run == 1 || p->steps[t] == 1;
        packed &= w->shift[t] == 0 && (p->row_axes == 0 || row == p->run);
        vector = (int)least(vector, least(divisor(row, full), least(divisor(group, full), divisor(w->shift[t], full))));
        even &= (row - step_of_rows(p, AT_X)) % full == 0 && (group - step_of_groups(p, AT_X)) % full == 0 &&
                w->shift[t] == w->shift[AT_X] && w->span[t] >= 2 * full; /* there is an aligned vector in it */
    }
    if (!plain)
        return;
    if (p->channels * p->count <= TINY_ELEMENTS) /* what takes longest is to fetch the instructions */
        vector = (int)least(vector, 4);
    if (p->columns) {
        if (p->run * p->groups >= (int64_t)1 << 30)
            return;
        w->form = ALIGNED;
        w->vector = vector;
        if (packed && suits_superrows(p, vector * item, item))
            w->superrow = full / divisor(p->run, full);
        return;
    }
    /* Vectors of 8 bytes, and narrower ones of short channels, cost less than rows that begin and end within vectors. */
    const int narrow = w->call->operation != PBN_OP_FORWARD_INFERENCE &&
              p->count <= SHORT_CHANNEL * vector && p->channels * p->count * item <= 2 * SMALL_BYTES;
    const int whole = vector * item >= 8 || narrow;
    const int taken = whole ? vector : full;
    if ((whole || even) && p->rows * (p->run / taken + 2) * 2 < (int64_t)1 << 31 && p->channels < (int64_t)1 << 31) {
        w->form = whole ? ALIGNED : SHIFTED;
        w->vector = taken;
    }
}

/* ---- arguments ---- */

static void set_numbers(arguments *a, const pbn_call *c) {
    a->epsilon = c->epsilon, a->factor = c->factor, a->alpha = c->alpha, a->beta = c->beta;
    a->alpha_param = c->alpha_param, a->beta_param = c->beta_param;
    a->activation = c->activation;
    a->low = c->activation == PBN_ACTIVATION_CLAMP ? c->activation_low : 0;
    a->high = c->activation >= PBN_ACTIVATION_CLIPPED_RELU ? c->activation_high : INFINITY;
    a->sums_only = c->sums_only;
    a->given = c->operation == PBN_OP_BACKWARD && c->share != 0;
    a->inverse = c->inverse || (c->operation == PBN_OP_BACKWARD && c->running_mean == NULL);
    a->reads_y = has_residual_out(c) && c->activation != PBN_ACTIVATION_NONE;
}

static void set_shape(work *w) {
    const problem *p = &w->p;
    const pbn_call *c = w->call;
    arguments *a = &w->args[SUMS];
    set_numbers(a, c);
    for (int t = 0; t < PLACES; t++) {
        a->row[t] = step_of_rows(p, t);
        a->group[t] = step_of_groups(p, t);
        a->span[t] = w->span[t];
    }
    a->rows = p->rows, a->run = p->run, a->channels = p->channels, a->count = p->count;
    a->share = a->given ? c->share : 1.0 / (double)p->count;
    a->unbiased = p->count > 1 ? (double)p->count / (double)(p->count - 1) : 1;
    a->group_vector = p->group_axes > 0 ? p->of_groups[0].step : 0;
    a->vector_step = p->step, a->repeat = p->repeat, a->columns = p->run * p->groups;
    a->superrow = (unsigned)w->superrow;
    a->shift = w->shift[AT_X];
    a->splits = 1;
    a->kind = w->form == ANY ? 1 : p->columns ? 2 : 0;
    a->vectors = (unsigned)(w->form == ALIGNED ? p->run / w->vector : (p->run + w->vector - 2) / w->vector + 1);
    a->total = (unsigned)(p->rows * a->vectors);
    if (w->form == ANY)
        a->vectors = a->total = 0;
}

/* Rows are taken `superrow` at a time, as if they were groups: vectors then fill 16 bytes whatever a row's length is. */
static void take_superrows(work *w, arguments *a) {
    const int full = 16 / (int)pbn_item_size(w->call->x_desc->dtype);
    if (w->superrow == 1)
        return;
    w->vector = full;
    a->tail_rows = a->rows % w->superrow;
    a->rows /= w->superrow;
    a->columns = a->run * w->superrow;
    a->group_vector = 0;
    for (int t = 0; t < PLACES; t++) {
        a->group[t] = a->run;
        a->row[t] = a->columns;
    }
}

/* ---- one launch: a channel, or a tile of columns, is one cluster's, whose blocks keep what they read ---- */

static int plan_rows(work *w, arguments *a, int stage, int backward, int fused, int *done) {
    const gpu *g = &w->handle->device;
    const int64_t arrays = backward ? 2 : 1, blocks = backward ? 2 : 4, least_blocks = 2 * g->multiprocessors;
    int status;
    launch *l = add_launch(w, KERNEL_ROWS, stage, backward, fused, &status);
    if (l == NULL)
        return status;
    const int64_t vector = (int64_t)w->vector * (int64_t)pbn_item_size(w->call->x_desc->dtype);
    const int64_t most = l->of->shared_limit, usual = least(l->of->cluster_limit, USUAL_CLUSTER);
    /* Fewer vectors are read sooner than a cluster starts. */
    const int64_t least_part = backward && a->channels * 2 >= g->multiprocessors ? 6400 : 3072;
    int64_t splits = 1;
#define ROW_BYTES(splits) (over(a->total, splits) * vector * arrays)
    /* Several blocks on a multiprocessor: some read while others write. */
    while (splits < l->of->cluster_limit && ROW_BYTES(splits) > g->shared_multiprocessor / blocks - 4096)
        splits *= 2;
    while (splits < usual && a->channels * splits < least_blocks && a->total / splits > least_part)
        splits *= 2;
    const int64_t fit = g->shared_multiprocessor / (ROW_BYTES(splits) + 4096), resident = least(blocks, fit > 1 ? fit : 1);
    *done = ROW_BYTES(splits) <= most && (fit > 1 || (backward && a->channels * splits >= g->multiprocessors)) && (splits > 1 || a->channels * 3 >= g->multiprocessors || a->total <= least_part);
    if (!*done) {
        w->count--;
        return PBN_OK;
    }
    a->splits = (unsigned)splits;
    a->per = (unsigned)over(a->total, splits);
    l->cluster = (unsigned)splits;
    l->grid[0] = (unsigned)(a->channels * splits);
    l->block[0] = (unsigned)least(resident > 2 ? 1024 / resident / 32 * 32 : 512, over(over(a->per, 4) > 1 ? over(a->per, 4) : 1, 32) * 32);
    l->shared = (unsigned)ROW_BYTES(splits);
    return PBN_OK;
#undef ROW_BYTES
}

/* Shared memory of a tile beside its rows. */
static int64_t tile_bytes(const work *w, int threads, int width) {
    const int64_t number = w->call->x_desc->dtype == PBN_FLOAT64 ? 8 : 4, pair = 2 * number * w->vector;
    return threads * (pair > 16 ? pair : 16) + width * (24 + 6 * number) + 32;
}

/* Threads of a block: so many along a row; of whole channels, if `whole`. */
static void shape_block(const work *w, const arguments *a, int wide, int whole, unsigned block[3]) {
    const int64_t unit = a->repeat / divisor(a->repeat, w->vector), vectors = over(a->columns, w->vector);
    const int64_t balanced = over(vectors, over(vectors, wide));
    int64_t x = wide, lines = 1;
    while (x > 1 && x / 2 >= balanced)
        x /= 2;
    if (whole)
        x = over(x, unit) * unit;
    else if (balanced > 4 && balanced * 8 < x * 7) /* idle lanes cost more than sums of lines that are no share of a warp */
        x = balanced;
    while (lines * x < THREADS && (lines < a->rows || lines * x < 32 || lines < w->vector)) /* no more than rows or columns need */
        lines *= 2;
    block[0] = (unsigned)x;
    block[1] = (unsigned)(lines * x <= THREADS ? lines : THREADS / x > 0 ? THREADS / x : 1);
}

static int plan_tiles(work *w, arguments *a, int stage, int backward, int fused, int *done) {
    const gpu *g = &w->handle->device;
    const int64_t arrays = backward ? 2 : 1, item = (int64_t)pbn_item_size(w->call->x_desc->dtype);
    int status, wide = COLUMNS_WIDE;
    *done = 0;
    if (w->superrow > 4 || a->repeat > 64 || a->rows * a->columns * item * arrays > TILES_BYTES)
        return PBN_OK;
    launch *l = add_launch(w, KERNEL_TILES, stage, backward, fused, &status);
    if (l == NULL)
        return status;
    const int64_t usual = least(l->of->cluster_limit, USUAL_CLUSTER);
    for (;; wide /= 2) { /* narrower tiles where there would be few of them */
        shape_block(w, a, wide, 1, l->block);
        if (wide <= 4 || wide * w->vector * item <= 32 ||
            over(a->columns, (int64_t)l->block[0] * w->vector) * usual >= g->multiprocessors)
            break;
    }
    const int64_t width = (int64_t)l->block[0] * w->vector, tiles = over(a->columns, width);
    const int64_t row = width * item * arrays, fixed = tile_bytes(w, (int)(l->block[0] * l->block[1]), (int)width);
    const int64_t most = l->of->shared_limit;
    int64_t splits = 1;
    while (splits < l->of->cluster_limit && a->rows / splits > l->block[1] * 2) {
        const int64_t bytes = over(a->rows, splits) * row + fixed;
        const int few = tiles * splits < g->multiprocessors && a->rows / splits > l->block[1] * 4;
        if (splits < usual ? bytes <= g->shared_multiprocessor / 2 - 2048 && !few : bytes <= most && !(few && tiles <= 6))
            break;
        splits *= 2;
    }
    *done = over(a->rows, splits) * row + fixed <= most && a->rows < (int64_t)1 << 31 &&
            (tiles * splits * 2 >= g->multiprocessors || a->rows / splits <= l->block[1] * 16);
    if (!*done) {
        w->count--;
        return PBN_OK;
    }
    a->splits = (unsigned)splits;
    a->per = (unsigned)over(a->rows, splits);
    l->cluster = (unsigned)splits;
    l->grid[0] = (unsigned)(tiles * splits);
    a->early = l->grid[0] <= g->multiprocessors;
    l->shared = (unsigned)(a->per * row + fixed);
    return PBN_OK;
}

/* ---- launches that wait for nothing: sums of parts, channels, results ---- */

static int plan_sums(work *w, arguments *a, int stage, int backward, int fused) {
    const gpu *g = &w->handle->device;
    int status;
    if (w->by_columns && w->form != ANY && backward && fused && w->vector == 8)
        w->vector = 4; /* coefficients and sums of eight columns are more than there are registers */
    launch *l = add_launch(w, w->by_columns && w->form != ANY ? KERNEL_COLUMN_SUMS : KERNEL_ROW_SUMS, stage, backward, fused, &status);
    if (l == NULL)
        return status;
    const int64_t blocks = (a->kind == 2 && (w->vector == 8 || (backward && fused)) ? 3 : 4) * g->multiprocessors; /* as many as run at once */
    int64_t parts;
    if (a->kind == 2) {
        shape_block(w, a, COLUMNS_WIDE, 0, l->block);
        const int64_t tiles = over(a->columns, (int64_t)l->block[0] * w->vector);
        parts = least(blocks / tiles > 1 ? blocks / tiles : 1, over(a->rows, l->block[1] * 4));
        parts = parts < over(a->rows, l->block[1] * 4096) ? over(a->rows, l->block[1] * 4096) : parts;
        a->per = (unsigned)over(a->rows, parts);
        a->splits = (unsigned)over(a->rows, a->per);
        l->grid[0] = (unsigned)tiles;
        l->grid[1] = a->splits;
        l->shared = (unsigned)tile_bytes(w, (int)(l->block[0] * l->block[1]), (int)(l->block[0] * (unsigned)w->vector));
        w->parts_bytes = 24 * (size_t)(a->splits * a->columns);
    } else {
        const int64_t total = w->form == ANY ? a->count : a->total;
        parts = least(over(blocks, a->channels), over(total, 1024));
        parts = parts < over(total, (int64_t)1 << 24) ? over(total, (int64_t)1 << 24) : parts;
        a->per = (unsigned)over(total, parts);
        a->splits = (unsigned)over(total, a->per);
        l->grid[0] = a->splits;
        l->grid[1] = (unsigned)least(a->channels, 65535);
        l->block[0] = (unsigned)least(512, over(over(a->per, 4) > 1 ? over(a->per, 4) : 1, 32) * 32);
        w->parts_bytes = 24 * (size_t)(a->splits * a->channels);
    }
    l = add_launch(w, KERNEL_FINISH, stage, backward, fused, &status);
    if (l == NULL)
        return status;
    const int64_t records = (int64_t)a->splits * (a->kind == 2 ? a->repeat * a->superrow : 1);
    a->across = a->kind == 2 && a->channels >= 32 && records <= 64;
    l->block[0] = a->across || records <= 128 ? 32 : 256;
    l->block[1] = THREADS / l->block[0];
    l->grid[0] = (unsigned)over(a->channels, a->across ? 32 : l->block[1]);
    return PBN_OK;
}

static int plan_results(work *w, arguments *a) {
    const gpu *g = &w->handle->device;
    const enum kernel_name name = w->form == ANY ? KERNEL_ANY_APPLY : w->by_columns ? KERNEL_COLUMN_APPLY : KERNEL_ROW_APPLY;
    int status;
    if (name == KERNEL_COLUMN_APPLY && w->backward && w->vector == 8)
        w->vector = 4; /* coefficients of eight columns fill the registers: few blocks would run at once */
    launch *l = add_launch(w, name, RESULTS, w->backward, w->fused, &status);
    if (l == NULL)
        return status;
    if (name == KERNEL_ANY_APPLY) {
        l->block[0] = THREADS;
        l->grid[0] = (unsigned)least(over(a->count, THREADS), 65535);
        l->grid[1] = (unsigned)least(a->channels, 65535);
    } else if (name == KERNEL_COLUMN_APPLY) {
        shape_block(w, a, COLUMNS_WIDE, 0, l->block);
        l->grid[0] = (unsigned)over(a->columns, (int64_t)l->block[0] * w->vector);
        const int64_t most = w->backward ? 4 : 8, even = over(a->rows * l->grid[0], 2 * g->multiprocessors * l->block[1]);
        const int64_t each = even < 1 ? 1 : least(even, most); /* rows of a thread */
        a->per = (unsigned)(over(over(a->rows, least(over(16 * g->multiprocessors, l->grid[0]), 65535)), l->block[1] * each) *
                            l->block[1] * each);
        l->grid[1] = (unsigned)(a->rows > 0 ? over(a->rows, a->per) : 1);
    } else {
        const int64_t most = over(a->rows * a->channels * a->vectors, 2 * THREADS * g->multiprocessors);
        const int64_t turns = most > 4 ? 4 : most > 2 ? 2 : 1; /* vectors of a thread, where enough blocks are left */
        int64_t x = THREADS;
        while (x > 4 && x / 2 * turns >= a->vectors)
            x /= 2;
        l->block[0] = (unsigned)x;
        l->block[1] = (unsigned)(THREADS / x);
        l->grid[0] = (unsigned)over(a->rows * a->channels, l->block[1]);
        l->grid[1] = (unsigned)over(a->vectors, x * 4);
    }
    return PBN_OK;
}

/* ---- the whole call ---- */

/* The launch of the sums writes dz, which is dy where it passes: results are of dz, and neither y nor dy is read again. */
static void take_residual(arguments *a) {
    a->reads_y = a->activation = 0;
    a->row[AT_W] = a->row[AT_DZ];
    a->group[AT_W] = a->group[AT_DZ];
    a->span[AT_W] = a->span[AT_DZ];
}

static int plan_statistics(work *w, arguments *a, int stage, int backward, int fused, int results) {
    int done = 0, status = PBN_OK;
    if (w->form != ANY)
        status = (w->by_columns ? plan_tiles : plan_rows)(w, a, stage, backward, fused, &done);
    if (status != PBN_OK || done)
        return status;
    w->stats = 1;
    if (w->by_columns)
        take_superrows(w, a);
    status = plan_sums(w, a, stage, backward, fused);
    if (status != PBN_OK || !results)
        return status;
    w->args[RESULTS] = *a;
    if (backward && has_residual_out(w->call)) /* rows that make no whole superrow are no part of these sums */
        w->residual = w->form != ANY && a->tail_rows == 0 ? BY_SUMS : BY_RESULTS;
    if (w->residual == BY_SUMS)
        take_residual(&w->args[RESULTS]);
    if (!backward) /* those in the workspace were not rounded to the parameters' type */
        w->args[RESULTS].saved_mean = w->args[RESULTS].saved_inverse = NULL;
    return plan_results(w, &w->args[RESULTS]);
}

static int plan_merge(work *w) {
    const pbn_call *c = w->call;
    arguments *a = &w->args[SUMS];
    int status;
    if (c->x_desc->rank != 2 || c->z_desc == NULL || c->z_desc->rank != 2 || c->saved_mean == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, "statistics are merged from two matrices, a row for each rank");
    w->form = ALIGNED, w->vector = 1;
    a->rows = c->x_desc->dims[0], a->channels = c->x_desc->dims[1];
    a->share = c->share, a->unbiased = 1 / (1 - c->share);
    const pbn_tensor *const of[PLACES] = {c->x_desc, c->y_desc, c->z_desc, NULL, NULL};
    for (int t = 0; t < 3; t++)
        if (of[t] != NULL)
            a->row[t] = of[t]->strides[0], a->group[t] = of[t]->strides[1];
    launch *l = add_launch(w, KERNEL_MERGE, SUMS, 0, 0, &status);
    if (l == NULL)
        return status;
    l->block[0] = 128;
    l->grid[0] = (unsigned)over(a->channels, 128);
    return PBN_OK;
}

static void note_pointers(work *w, const void *const data[PLACES]) {
    const unsigned item = (unsigned)pbn_item_size(w->call->x_desc->dtype);
    for (int t = 0; t < PLACES; t++)
        w->shift[t] = data == NULL || data[t] == NULL ? 0 : (unsigned)((uintptr_t)data[t] % 16 / item);
}

static void data_of(const pbn_call *c, const void *data[PLACES]) {
    const int backward = c->operation == PBN_OP_BACKWARD || c->operation == PBN_OP_RELU_BACKWARD;
    data[AT_X] = c->x;
    data[AT_Y] = c->y;
    data[AT_W] = backward ? c->dy : c->z;
    data[AT_DX] = c->dx;
    data[AT_DZ] = c->dz;
}

/* Short runs that are reduced are rows, or columns beside those of other channels: these are read in whole vectors, and
 * pay where each column has several rows. */
static void choose_problem(work *w, const pbn_tensor *const tensors[TENSORS]) {
    const uint32_t kept = kept_axes(w->call->x_desc, w->call->mode);
    const int item = (int)pbn_item_size(w->call->x_desc->dtype);
    make_problem(&w->p, tensors, kept, 0, 1);
    if (w->p.columns || w->p.rows < FEW_ROWS)
        return;
    const int64_t run = w->p.run, bytes = w->p.channels * w->p.count * item;
    const problem rows = w->p;
    const int whole = divisor(run, 16 / item) * item >= 8; /* rows are of whole vectors */
    const int small = bytes < SMALL_BYTES && (whole || w->call->operation != PBN_OP_FORWARD_INFERENCE);
    /* Rows of less than two sectors of memory, where a channel is not kept between its sums and its result. */
    const int scattered = run * item < 64 && (w->call->operation == PBN_OP_FORWARD_INFERENCE || bytes > TILES_BYTES);
    if (small || run >= (!whole ? MEDIUM_RUN : scattered ? run + 1 : SHORT_RUN))
        return;
    make_problem(&w->p, tensors, kept, 0, run + 1);
    const int vector = divisor(w->p.run, 16 / item) * item;
    if (run >= SHORT_RUN && vector < 8 && !suits_superrows(&w->p, vector, item))
        w->p = rows;
}

/* Fills `w` for `call` of a handle whose context is current; `data` for how addresses are aligned. */
static int make_work(work *w, pbn_handle *handle, const pbn_call *call, const void *const data[PLACES]) {
    memset(w, 0, sizeof *w);
    w->call = call, w->handle = handle;
    w->backward = call->operation == PBN_OP_BACKWARD;
    w->constant = w->backward && call->running_mean != NULL;
    w->fused = call->activation != PBN_ACTIVATION_NONE || call->alpha != 1 || call->beta != 0 || pbn_has_residual(call);
    note_pointers(w, data);
    if (!w->backward && call->operation == PBN_OP_FORWARD_TRAINING && call->sums_only && call->share != 0) {
        set_numbers(&w->args[SUMS], call);
        return plan_merge(w);
    }
    const pbn_tensor *const tensors[TENSORS] = {call->x_desc, call->sums_only && !has_residual_out(call) ? NULL : call->y_desc,
                                                w->backward ? call->dy_desc : call->z_desc,
                                                w->backward && !call->sums_only ? call->dx_desc : NULL,
                                                w->backward ? call->dz_desc : NULL};
    for (int t = 0; t < PLACES; t++)
        if (tensors[t] != NULL && !(t == AT_Y && w->backward && !has_residual_out(call))) {
            w->used |= 1u << t;
            w->span[t] = pbn_span(tensors[t]->rank, tensors[t]->dims, tensors[t]->strides);
        }
    choose_problem(w, tensors);
    choose_form(w);
    list_axes(w);
    set_shape(w);
    arguments *a = &w->args[SUMS];
    if (call->operation == PBN_OP_FORWARD_INFERENCE || (w->backward && call->share != 0)) {
        if (w->by_columns && w->form != ANY)
            take_superrows(w, a);
        w->args[RESULTS] = *a;
        return plan_results(w, &w->args[RESULTS]);
    }
    if (w->backward && call->saved_mean == NULL && !w->constant) {
        const int vector = w->vector;
        w->args[STATISTICS] = *a;
        w->args[STATISTICS].sums_only = 1;
        const int status = plan_statistics(w, &w->args[STATISTICS], STATISTICS, 0, 0, 0);
        if (status != PBN_OK)
            return status;
        w->vector = vector;
        w->stats = 1;
    }
    return plan_statistics(w, a, SUMS, w->backward, w->backward ? w->fused : w->fused && !call->sums_only, !call->sums_only);
}

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t stats_size(const work *w) {
    return w->stats ? rounded(4 * (w->call->x_desc->dtype == PBN_FLOAT64 ? 8 : 4) * (size_t)w->p.channels) : 0;
}

static size_t workspace_of(const work *w) { return stats_size(w) + rounded(w->parts_bytes); }

static void bind(work *w) {
    const pbn_call *c = w->call;
    const void *data[PLACES];
    const int running = w->constant || c->operation == PBN_OP_FORWARD_INFERENCE; /* are given */
    char *const workspace = c->workspace;
    data_of(c, data);
    for (int stage = 0; stage < STAGES; stage++) {
        arguments *a = &w->args[stage];
        for (int t = 0; t < PLACES; t++)
            a->data[t] = (void *)(uintptr_t)data[t];
        if (!w->backward && c->z == NULL)
            a->data[AT_W] = NULL;
        if (stage == RESULTS && w->residual == BY_SUMS)
            a->data[AT_W] = c->dz;
        if (stage == (w->residual == BY_SUMS ? RESULTS : SUMS) && (w->residual != 0 || c->sums_only))
            a->data[AT_DZ] = NULL;
        if (a->given)
            a->share = c->share;
        a->scale = c->scale, a->bias = c->bias;
        a->dscale = c->dscale, a->dbias = c->dbias;
        a->stats = w->stats ? workspace : NULL;
        a->parts = workspace + stats_size(w);
        a->running_mean = running || stage == STATISTICS ? NULL : c->running_mean;
        a->running_variance = running ? NULL : c->running_variance;
        a->saved_mean = running ? c->running_mean : c->saved_mean;
        a->saved_inverse = running ? c->running_variance : c->saved_inv_variance;
        if (stage == STATISTICS || (stage == RESULTS && c->operation == PBN_OP_FORWARD_TRAINING))
            a->saved_mean = a->saved_inverse = NULL; /* in the workspace they are not rounded to the parameters' type */
        if (a->saved_mean == NULL)
            a->inverse = 1;
    }
}

static int launch_all(work *w) {
    for (int i = 0; i < w->count; i++) {
        const launch *l = &w->launches[i];
        void *parameters[] = {&w->args[l->stage], &w->axes};
        const int status = start(&w->handle->device, w->handle->stream, l, parameters);
        if (status != PBN_OK)
            return status;
    }
    return PBN_OK;
}

static int run_work(work *w) {
    const pbn_call *call = w->call;
    if (workspace_of(w) > 0 && (call->workspace == NULL || call->workspace_size < workspace_of(w)))
        return pbn_refuse(PBN_E_WORKSPACE, "the workspace is smaller than workspace_size says");
    bind(w);
    return launch_all(w);
}

static int is_empty(const pbn_call *call) {
    return pbn_numel(call->x_desc->rank, call->x_desc->dims) == 0;
}

static int compute(pbn_handle *handle, const pbn_call *call) {
    const void *data[PLACES];
    work w;
    int status = check_call(call);
    if (status != PBN_OK || is_empty(call))
        return status;
    data_of(call, data);
    status = make_work(&w, handle, call, data);
    return status == PBN_OK ? run_work(&w) : status;
}

/* Whatever addresses the call will have: aligned, off by one element alike, and apart from one another. */
static int workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    const uintptr_t item = call->x_desc != NULL ? pbn_item_size(call->x_desc->dtype) : 4;
    work w;
    *bytes = 0;
    if (call->operation > PBN_OP_BACKWARD)
        return PBN_OK;
    int status = check_call(call);
    if (status != PBN_OK || is_empty(call))
        return status;
    for (uintptr_t way = 0; way < 3; way++) {
        const void *data[PLACES];
        for (uintptr_t t = 0; t < PLACES; t++)
            data[t] = (const void *)(way == 0 ? (uintptr_t)16 : way == 1 ? 16 + item : 16 + t % 2 * item);
        if ((status = make_work(&w, handle, call, data)) != PBN_OK)
            return status;
        *bytes = workspace_of(&w) > *bytes ? workspace_of(&w) : *bytes;
    }
    return PBN_OK;
}

/* ------------------------------------------------------------------ elementwise calls */

static int elementwise(pbn_handle *handle, const pbn_call *call) {
    const int fills = call->operation == PBN_OP_FILL, gradient = call->operation == PBN_OP_RELU_BACKWARD;
    const pbn_tensor *out = gradient ? call->dx_desc : call->y_desc;
    const pbn_tensor *const tensors[TENSORS] = {fills ? out : call->x_desc, gradient ? NULL : out, gradient ? call->dy_desc : NULL,
                                                gradient ? out : NULL, NULL};
    pbn_call like = *call;
    const void *data[PLACES];
    work w;
    int status = PBN_OK;
    if (out == NULL || tensors[0] == NULL || out->rank < 1)
        return pbn_refuse(PBN_E_ARGUMENT, "a tensor descriptor is missing or was never set");
    for (int t = 1; t < TENSORS && status == PBN_OK; t++)
        if (tensors[t] != NULL)
            status = check_tensor(tensors[t], tensors[0]);
    if (status != PBN_OK || pbn_numel(out->rank, out->dims) == 0)
        return status;
    memset(&w, 0, sizeof w);
    like.x_desc = tensors[0];
    like.param_desc = NULL;
    w.call = &like, w.handle = handle;
    data_of(call, data);
    note_pointers(&w, data);
    make_problem(&w.p, tensors, 0, 0, 1);
    list_axes(&w);
    arguments *a = &w.args[SUMS];
    int64_t vector = 16 / (int64_t)pbn_item_size(out->dtype);
    int flat = w.axes.reduced == 1 && w.axes.kept == 0;
    if (w.p.columns) /* a single element */
        w.axes.reduced = 1, w.axes.kept = 0, w.axes.length[0] = 1, flat = 1;
    for (int t = 0; t < TENSORS; t++)
        if (tensors[t] != NULL) {
            flat &= w.p.run == 1 || w.p.steps[t] == 1;
            vector = least(vector, least(divisor(w.shift[t], 8), divisor(w.p.run, 8)));
        }
    a->count = pbn_numel(out->rank, out->dims);
    w.form = flat ? ALIGNED : ANY;
    w.vector = flat ? (int)vector : 1;
    a->count /= w.vector;
    a->alpha = call->alpha, a->beta = call->beta, a->kind = call->operation;
    for (int t = 0; t < PLACES; t++)
        a->data[t] = (void *)(uintptr_t)data[t];
    launch *l = add_launch(&w, KERNEL_ELEMENTS, SUMS, 0, 0, &status);
    if (l == NULL)
        return status;
    l->block[0] = THREADS;
    l->grid[0] = (unsigned)least(over(a->count, THREADS), 1 << 20);
    return launch_all(&w);
}

/* ------------------------------------------------------------------ plans */

struct pbn_plan {
    work w;
    pbn_call call;
    void *context;
    size_t workspace;
};

static int plan_create(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan) {
    const void *data[PLACES];
    int status = check_call(call);
    (void)algorithm; /* there is one way */
    *plan = NULL;
    if (status != PBN_OK)
        return status;
    pbn_plan *p = calloc(1, sizeof *p);
    if (p == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    p->call = *call;
    p->context = handle->context;
    status = workspace_size(handle, call, &p->workspace);
    if (status == PBN_OK && !is_empty(call)) {
        data_of(call, data);
        status = make_work(&p->w, handle, &p->call, data);
    }
    if (status != PBN_OK) {
        free(p);
        return status;
    }
    *plan = p;
    return PBN_OK;
}

static void plan_info(const pbn_plan *plan, size_t *workspace, size_t *reserve, const char **algorithm, const char **why) {
    *workspace = plan->workspace;
    *reserve = 0;
    *algorithm = algorithm_names[0];
    *why = plan->w.count == 1 ? "one launch" : "several launches";
}

/* Launches are those of the plan where the addresses are aligned as they were when it was made. */
static int plan_run(pbn_handle *handle, pbn_plan *plan, const pbn_call *call) {
    const void *data[PLACES];
    unsigned before[PLACES];
    work *w = &plan->w;
    if (is_empty(call))
        return PBN_OK;
    memcpy(before, w->shift, sizeof before);
    w->call = call;
    data_of(call, data);
    note_pointers(w, data);
    if (memcmp(before, w->shift, sizeof before) != 0) {
        memcpy(w->shift, before, sizeof before);
        return compute(handle, call);
    }
    return run_work(w);
}

static void plan_destroy(pbn_plan *plan) { free(plan); }

PBN_CALL_THERE(compute)
PBN_CALL_THERE(elementwise)
PBN_THERE(workspace_size, (pbn_handle * handle, const pbn_call *call, size_t *bytes), (handle, call, bytes))
PBN_THERE(plan_create, (pbn_handle * handle, const pbn_call *call, const char *algorithm, pbn_plan **plan),
          (handle, call, algorithm, plan))
PBN_THERE(plan_run, (pbn_handle * handle, pbn_plan *plan, const pbn_call *call), (handle, plan, call))

/* What the tables of both drivers have alike. */
#define GPU_TABLE()                                                                                                   \
    PBN_LIBRARY_AND_HANDLES(gpu_), .memory_device = gpu_memory_device, .stream_set = gpu_stream_set,                  \
    .stream_get = gpu_stream_get, PBN_TENSORS(), .workspace_size = workspace_size_there,                              \
    .forward_training = compute_there, .forward_inference = compute_there, .backward = compute_there,                 \
    .axpby = elementwise_there, .fill = elementwise_there, .relu = elementwise_there,                                 \
    .relu_backward = elementwise_there, .algorithms = algorithm_names, .plan_create = plan_create_there,              \
    .plan_info = plan_info, .plan_run = plan_run_there, .plan_destroy = plan_destroy,                                 \
    .unrepeated = unrepeated, .has_symbol = gpu_has_symbol
