/* Batch norm on the CPU: how a call is cut into tasks, and what they compute. Part of adapter.c.
 *
 * A group's rows are cut into parts by the shape alone. Each part's statistics are taken about a value near its own mean
 * and are combined in double in the order of the parts:
 *
 *     mean = k + sum n_i (mean_i - k) / m,  M2 = sum M2_i + sum n_i (mean_i - mean)^2     (Chan, Golub, LeVeque 1983)
 *
 * so that neither the mean's size nor the number of threads changes what comes out. Where a channel, or a strip of columns,
 * stays in the cache one task computes its statistics and its result; else the statistics of all parts come first.
 */

enum {
    CHAIN = 56,           /* additions of one lane in float32, at most a few more */
    STRIP = 256,          /* columns of a task */
    RESULTS_STRIP = 8192, /* those of results alone, or elements of so many rows */
    TOGETHER = 16384,     /* elements of the channels of a task, of rows */
    PART_ROWS = 256,      /* rows of a part, where the run is of columns */
    PART = 16384,         /* elements of one, where it is of rows */
    NEAR = 256,           /* elements, and rows, from which the value near the mean is taken */
    NEAR_ROWS = 4,
    FEW_ROWS = 4,         /* columns: rows that are added before their sums meet memory ... */
    IN_ORDER_BYTES = 6 << 20, /* ... but of so much memory that is one row after another: it is read fastest in order */
    FUSED_PARTS = 64,     /* a channel of so many parts is computed by one task */
    FUSED_TASKS = 64,     /* where there are as many */
    STREAM_BYTES = 1 << 25, /* data and result of more go past the cache */
    THREAD_BYTES = 1 << 17, /* what is worth a thread */
    SPARE = 16            /* numbers behind a vector of coefficients, which the kernels' last vector reads */
};
/* Sums about k are good for M2 = square - sum^2/n where at most so much of `square` goes. */
#define NEAR_SHARE 0.83
/* Float32 held a sum of squares of n terms that is more than n times this. */
#define LEAST_SQUARE 1e-34

#include "kernels.h"

/* ------------------------------------------------------------------ numbers and vectors of them */

#define INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed to functions that are always inlined */

#define EITHER(bits, v, w) (((bits) & (v)) | (~(bits) & (w)))

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#define KIND(name) name##_any
#define KERNEL
#define BYTES 16
#include "kinds.inc"
#if defined(__x86_64__) && defined(__GNUC__)
#define KIND(name) name##_avx2
#define KERNEL __attribute__((target("avx2,fma,f16c")))
#define BYTES 32
#define F16C
#include "kinds.inc"
#define KIND(name) name##_avx512
#define KERNEL __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define BYTES 64
#define F16C
#include "kinds.inc"
#endif

static const kernels *const *kernels_here = kernels_any;

/* Those for this processor. */
static void choose_kernels(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned a, b, c = 0, d; /* __builtin_cpu_supports of clang 14 does not know f16c */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C)) {
        kernels_here = kernels_avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            kernels_here = kernels_avx512;
    }
#endif
}

/* ------------------------------------------------------------------ a call and its tasks */

typedef struct job {
    const pbn_call *call;
    const kernels *run;
    fusion f;
    problem p;
    char *data[TENSORS];
    size_t item, number; /* bytes of an element and of a number that is computed with */
    int backward, constant, fuses, gathers, reads_y, large; /* constant: backward by running statistics */
    int stage; /* a FINISH_ of the tasks that run */
    int64_t parts, segments, part_rows; /* of a group's rows; segments of one long row */
    int64_t strip, strips;              /* columns of a task */
    int64_t together;                   /* channels of a task, of rows */
    double *first, *second;             /* of all parts: means and M2, or the sums of dy and of dy*(x - mean) */
    char *vectors;                      /* coefficients of all channels, or of all columns */
    size_t stride;                      /* from one vector of coefficients to the next, bytes */
} job;

typedef struct cursor {
    int64_t row, end, column, columns, channels, base[TENSORS];
} cursor;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static const int64_t no_steps[TENSORS];

/* The next rows of a cursor; 0 at its end. */
static int next_piece(const job *j, cursor *c, piece *next) {
    const problem *p = &j->p;
    int64_t offsets[TENSORS];
    if (c->row >= c->end)
        return 0;
    const axis *inner = p->row_axes > 0 ? &p->of_rows[p->row_axes - 1] : NULL;
    next->steps = inner != NULL ? inner->steps : no_steps;
    const int64_t inside = p->row_axes > 1 ? c->row % inner->length : c->row;
    next->rows = smaller(c->end - c->row, inner != NULL ? inner->length - inside : 1);
    next->n = c->columns;
    if (p->last < p->run) {
        if (c->row == p->rows - 1)
            next->n = smaller(c->columns, p->last - c->column);
        else
            next->rows = smaller(next->rows, p->rows - 1 - c->row);
        if (next->n <= 0)
            return 0;
    }
    memcpy(offsets, c->base, sizeof offsets);
    place_of(p->of_rows, p->row_axes, c->row, offsets, NULL);
    for (int t = 0; t < TENSORS; t++)
        next->at[t] = j->data[t] == NULL ? NULL : j->data[t] + (offsets[t] + c->column * p->steps[t]) * (int64_t)j->item;
    next->column = 0;
    next->channels = c->channels;
    next->apart = p->group_axes > 0 ? p->of_groups[p->group_axes - 1].steps : no_steps;
    c->row += next->rows;
    return 1;
}

static cursor cursor_of(const job *j, int64_t group, int64_t *vector) {
    cursor c = {0, j->p.rows, 0, j->p.run, 1, {0}};
    int64_t at = 0;
    place_of(j->p.of_groups, j->p.group_axes, group, c.base, &at);
    if (vector != NULL)
        *vector = at;
    return c;
}

/* Part number `part` of a group. */
static void take_part(const job *j, cursor *c, int64_t part) {
    if (j->segments > 1) {
        c->row = part / j->segments;
        c->end = c->row + 1;
        c->column = part % j->segments * PART;
        c->columns = smaller(PART, j->p.run - c->column);
    } else {
        c->row = part * j->part_rows;
        c->end = smaller(c->row + j->part_rows, j->p.rows);
    }
}

typedef void visit(const job *j, const piece *of, void *with);

/* Where elements of a run lie apart, rows are copied to memory where they do not, a few hundred elements at a time. */
static void gathered(const job *j, const piece *of, visit *visited, void *with, unsigned written) {
    enum { FEW = 256 };
    double copies[TENSORS][FEW]; /* of any type */
    const int64_t item = (int64_t)j->item;
    for (int64_t row = 0; row < of->rows; row++)
        for (int64_t first = 0; first < of->n; first += FEW) {
            piece copy = {.channels = 1, .rows = 1, .n = smaller(FEW, of->n - first), .apart = no_steps, .steps = no_steps,
                          .column = j->p.columns ? first : 0};
            for (int back = 0; back < 2; back++) {
                for (int t = 0; t < TENSORS; t++) {
                    if (of->at[t] == NULL || (back && !(written >> t & 1)))
                        continue;
                    char *at = of->at[t] + (row * of->steps[t] + first * j->p.steps[t]) * item, *near = (char *)copies[t];
                    copy.at[t] = near;
                    for (int64_t i = 0; i < copy.n; i++, at += j->p.steps[t] * item, near += item)
                        memcpy(back ? at : near, back ? near : at, j->item);
                }
                if (!back)
                    visited(j, &copy, with);
            }
        }
}

static void each_piece(const job *j, cursor c, visit *visited, void *with, unsigned written) {
    for (piece next; next_piece(j, &c, &next);)
        if (j->gathers)
            gathered(j, &next, visited, with, written);
        else
            visited(j, &next, with);
}

static double number_at(const job *j, const void *vector, int64_t i) {
    return j->number == 8 ? ((const double *)vector)[i] : (double)((const float *)vector)[i];
}

static void set_number(const job *j, void *vector, int64_t i, double value) {
    if (j->number == 8)
        ((double *)vector)[i] = value;
    else
        ((float *)vector)[i] = (float)value;
}

static const char *from_column(const job *j, const void *vector, int64_t column) {
    return (const char *)vector + (size_t)column * j->number;
}

/* ------------------------------------------------------------------ sums of a part */

/* What a part's sums are taken with, of each column or each channel, and where they go. */
typedef struct sums {
    double *first, *second;
    const char *vectors[VECTORS]; /* of x: k in the place of the mean, and no others */
} sums;

/* Those of the columns of a piece. */
static void vectors_of(const job *j, const piece *of, const char *const *vectors, const void *by[VECTORS]) {
    for (int i = 0; i < VECTORS; i++)
        by[i] = vectors[i] == NULL ? NULL : from_column(j, vectors[i], of->column);
}

static void visit_near(const job *j, const piece *of, void *with) {
    j->run->near[j->p.columns](of, (char *)with + (size_t)of->column * j->number);
}

static void visit_sums(const job *j, const piece *of, void *with) {
    const sums *s = with;
    const void *by[VECTORS];
    vectors_of(j, of, s->vectors, by);
    j->run->sums[j->p.columns](of, by, &j->f, s->first + of->column, s->second + of->column);
}

static void visit_exact(const job *j, const piece *of, void *with) {
    const sums *s = with;
    const void *by[VECTORS];
    vectors_of(j, of, s->vectors, by);
    j->run->exact(of, by, &j->f, s->first + of->column, s->second + of->column, j->p.columns);
}

static void take_sums(const job *j, cursor c, visit *visited, sums *s, int64_t n) {
    memset(s->first, 0, (size_t)n * sizeof *s->first);
    memset(s->second, 0, (size_t)n * sizeof *s->second);
    each_piece(j, c, visited, s, 0);
}

/* The mean and M2 of a part, of each column or each channel. */
static void part_moments(const job *j, cursor c, double *mean, double *m2) {
    double about[STRIP + SPARE]; /* floats or doubles */
    const int columns = j->p.columns;
    const int64_t n = columns ? c.columns : c.channels;
    sums s = {mean, m2, {(const char *)about}};
    cursor start = c;
    /* Where the last row is shorter the columns from `split` on have one element less. */
    const int64_t left = !columns || c.end < j->p.rows ? n : smaller(n, j->p.last - c.column);
    const int64_t split = left < 0 ? 0 : left, others = n - split;
    const double count = (double)(c.end - c.row) * (columns ? 1 : (double)c.columns), less = count > 1 ? count - 1 : 1;
    int seen = 0;
    if (columns) {
        if (others > 0 && count > 1)
            start.end--;
        start.end = smaller(start.end, start.row + NEAR_ROWS);
        memset(about, 0, sizeof about);
    } else {
        start.end = start.row + 1;
        start.columns = smaller(c.columns, count < 16 * NEAR ? NEAR / 16 : NEAR);
    }
    each_piece(j, start, visit_near, about, 0);
    for (int turn = 0; turn < 3; turn++) {
        take_sums(j, c, visit_sums, &s, n);
        seen = j->run->look(split, count, mean, m2) | j->run->look(others, less, mean + split, m2 + split);
        if (!(seen & 1))
            break;
        for (int64_t i = 0; i < n; i++)
            if (isfinite(mean[i]))
                set_number(j, about, i, number_at(j, about, i) + mean[i] / (i < split ? count : less));
    }
    if (j->number == 4 && seen & 2)
        take_sums(j, c, visit_exact, &s, n);
    j->run->settle(split, count, about, mean, m2);
    j->run->settle(others, less, from_column(j, about, split), mean + split, m2 + split);
}

/* The sums of dy and of dy * (x - mean), by the coefficients that the stage before left in `vectors`. */
static void part_dots(const job *j, cursor c, const char *vectors, size_t stride, double *sum, double *dot) {
    const int64_t n = j->p.columns ? c.columns : c.channels;
    sums s = {sum, dot, {vectors, vectors + stride, vectors + 2 * stride}};
    int kept = 1;
    take_sums(j, c, visit_sums, &s, n);
    for (int64_t i = 0; i < n; i++) /* a product lost below float32's range is below its other terms', too */
        kept &= isfinite(sum[i]) && isfinite(dot[i]);
    if (j->number == 4 && !kept)
        take_sums(j, c, visit_exact, &s, n);
}

static void take_part_sums(const job *j, cursor c, int stage, const char *vectors, size_t stride, double *first,
                           double *second) {
    if (stage == FINISH_TRAINING)
        part_moments(j, c, first, second);
    else
        part_dots(j, c, vectors, stride, first, second);
}

/* ------------------------------------------------------------------ from sums to coefficients */

/* A channel's sums of all parts and all its columns, from `column` on, in a fixed order: of means and M2, or as they are.
 * `first`, `second`: the group's of part 0, at its run's beginning. Rows have one sum a part. */
static void add_up(const job *j, int moments, int64_t column, const double *first, const double *second, double *to_first,
                   double *to_second) {
    const problem *p = &j->p;
    const int64_t width = p->columns ? p->run : 1, repeat = p->columns ? p->repeat : 1;
    const int64_t period = p->columns ? p->period * repeat : 1;
    double about = moments && isfinite(first[column]) ? first[column] : 0, sum = 0, other = 0;
    for (int turn = 0; turn <= moments; turn++) { /* moments: the mean, then M2 about it */
        for (int64_t part = 0; part < j->parts; part++) {
            const double *const f = first + part * width, *const q = second + part * width;
            cursor c = {0, p->rows, 0, p->run, 1, {0}};
            take_part(j, &c, part);
            const double whole = (double)(c.end - c.row) * (p->columns ? 1 : (double)c.columns);
            const int64_t last = p->columns && c.end == p->rows ? p->last : width; /* columns of the last row */
            for (int64_t from = column; from < width; from += period)
                for (int64_t i = from; i < from + repeat; i++) {
                    const double count = i < last ? whole : whole - 1, off = f[i] - about;
                    if (!moments)
                        sum += f[i], other += q[i];
                    else if (turn == 0)
                        sum += count * off;
                    else
                        other += q[i] + count * off * off;
                }
        }
        if (moments && turn == 0)
            about += sum / (double)p->count;
    }
    *to_first = moments ? about : sum;
    *to_second = other;
}

/* `finish` where parameters are of 16 bits: by float32 beside them, each rounded once where it is written. */
static void finish_narrow(const job *j, const finishing *of) {
    const pbn_call *call = of->call;
    const int own = call->param_desc->dtype, training = call->operation == PBN_OP_FORWARD_TRAINING;
    const int gradient = of->stage == FINISH_GRADIENT;
    const int given = call->inverse ? PBN_FLOAT32 : own, sums = call->share != 0 ? PBN_FLOAT32 : own;
    pbn_call wide = *call;
    const struct {
        int dtype, written;
        const void *vector, *place; /* where the call has it, and where `wide` says so */
    } members[] = {
        {own, 0, call->scale, &wide.scale},
        {own, 0, call->bias, &wide.bias},
        {given, training, call->running_mean, &wide.running_mean},
        {given, training, call->running_variance, &wide.running_variance},
        {PBN_FLOAT32, training, call->saved_mean, &wide.saved_mean},
        {PBN_FLOAT32, training, call->saved_inv_variance, &wide.saved_inv_variance},
        {sums, gradient, call->dscale, &wide.dscale},
        {sums, gradient, call->dbias, &wide.dbias},
    };
    enum { MEMBERS = sizeof members / sizeof members[0] };
    float numbers[MEMBERS][STRIP];
    finishing beside = *of;
    beside.call = &wide, beside.at = 0, beside.step = 1;
    for (int back = 0; back < 2; back++) {
        for (int i = 0; i < MEMBERS; i++) {
            const int dtype = members[i].dtype;
            char *const at = (char *)(uintptr_t)members[i].vector + of->at * (int64_t)pbn_item_size(dtype);
            const void *const near = numbers[i];
            if (members[i].vector == NULL)
                continue;
            if (!back) {
                blend(1, &of->n, dtype, at, &of->step, 1, PBN_FLOAT32, numbers[i], &beside.step, 0);
                memcpy((void *)(uintptr_t)members[i].place, &near, sizeof near);
            } else if (members[i].written)
                blend(1, &of->n, PBN_FLOAT32, near, &beside.step, 1, dtype, at, &of->step, 0);
        }
        if (!back)
            j->run->finish(&beside);
    }
}

/* Coefficients of `n` channels, at most STRIP columns: of a group's run from channel `index` on, or of so many groups.
 * They go to their place in the run, or the group's, of `vectors`. */
static void finish(const job *j, int stage, int64_t group, int64_t index, int64_t n, const double *first,
                   const double *second, char *vectors, size_t stride, int64_t place) {
    const problem *p = &j->p;
    const int64_t columns = p->columns, period = columns ? p->period * p->repeat : 1;
    const double m = (double)p->count;
    double all_first[STRIP], all_second[STRIP];
    finishing of = {.call = j->call, .stage = stage, .n = n, .m = m, .unbiased = m > 1 ? m / (m - 1) : 1,
                    .first = all_first, .second = all_second, .repeat = 1, .copies = 1, .distance = period};
    cursor_of(j, group, &of.at);
    if (columns) {
        of.at += index * p->step;
        of.step = p->step;
        of.repeat = p->repeat;
        of.copies = p->run / period;
    } else
        of.step = p->group_axes > 0 ? p->of_groups[p->group_axes - 1].step : 1;
    for (int i = 0; i < VECTORS; i++)
        of.to[i] = vectors + (size_t)i * stride + (size_t)place * j->number;
    const int alone = j->parts == 1 && (!columns || p->run == p->period); /* a channel has one sum */
    if (alone && stage != FINISH_GIVEN) {
        of.first = first + index;
        of.second = second + index;
    }
    const int64_t group_sums = columns ? 0 : j->parts;
    for (int64_t i = 0; i < n && stage != FINISH_GIVEN && !alone; i++)
        add_up(j, stage == FINISH_TRAINING, columns ? (index + i) * p->repeat : 0, first + i * group_sums,
               second + i * group_sums, all_first + i, all_second + i);
    if (j->call->param_desc->dtype > PBN_FLOAT64)
        finish_narrow(j, &of);
    else
        j->run->finish(&of);
}

/* Groups whose parameters are equally far from one another can be finished together. */
static int64_t groups_together(const job *j, int64_t group) {
    const problem *p = &j->p;
    if (p->columns || p->group_axes == 0)
        return 1;
    const int64_t length = p->of_groups[p->group_axes - 1].length;
    return smaller(STRIP, length - group % length);
}

/* ------------------------------------------------------------------ results */

static void visit_results(const job *j, const piece *of, void *with) {
    const void *by[VECTORS];
    vectors_of(j, of, with, by);
    if (j->constant) { /* an inference of dy by the mean 0: what is in x does not matter */
        const int64_t steps[TENSORS] = {of->steps[DY], of->steps[DX]}, apart[TENSORS] = {of->apart[DY], of->apart[DX]};
        const piece one = {.at = {of->at[DY], of->at[DX]}, .channels = of->channels, .rows = of->rows, .n = of->n,
                           .apart = apart, .steps = steps, .column = of->column};
        j->run->results[0][j->p.columns][j->fuses](&one, by, &j->f);
    } else
        j->run->results[j->backward][j->p.columns][j->fuses](of, by, &j->f);
}

static void write_results(const job *j, cursor c, const char *vectors, size_t stride, int64_t place) {
    const char *of[VECTORS];
    for (int i = 0; i < VECTORS; i++)
        of[i] = from_column(j, vectors + (size_t)i * stride, place);
    each_piece(j, c, visit_results, of, j->backward ? 1u << DX | 1u << DZ : 1u << Y);
#if defined(__x86_64__) && defined(__GNUC__)
    if (j->f.streams)
        _mm_sfence(); /* such stores are seen by others in no order without it */
#endif
}

/* ------------------------------------------------------------------ tasks */

/* Some channels, or one strip of a group's columns, from their sums to their result. */
static void whole_strip(const job *j, int64_t group, int64_t groups, int64_t first_column, int64_t columns) {
    enum { MOST = STRIP + SPARE };
    double first[MOST], second[MOST], vectors[VECTORS][MOST];
    const size_t stride = sizeof vectors[0];
    const int64_t index = j->p.columns ? first_column / j->p.repeat : 0;
    const int64_t n = j->p.columns ? smaller(columns / j->p.repeat, j->p.period) : groups;
    const int saved = j->backward && (j->constant || j->call->saved_mean != NULL);
    char *const to = (char *)vectors;
    if (saved)
        finish(j, FINISH_GIVEN, group, index, n, NULL, NULL, to, stride, 0);
    cursor all = cursor_of(j, group, NULL);
    all.column = first_column;
    all.columns = columns;
    all.channels = groups;
    for (int stage = saved; stage < 1 + j->backward; stage++) {
        for (int64_t part = 0; part < j->parts; part++) { /* one where there are columns, or several channels */
            cursor c = all;
            take_part(j, &c, part);
            take_part_sums(j, c, stage, to, stride, first + part, second + part);
        }
        finish(j, stage, group, index, n, first - first_column, second - first_column, to, stride, 0);
    }
    if (!j->call->sums_only)
        write_results(j, all, to, stride, 0);
}

/* Inference of rows in the order of memory, coefficients of all channels at hand: images outside, channels inside. */
static void inference_rows(void *data, int64_t first, int64_t end) {
    const job *j = data;
    for (int64_t task = first, groups; task < end; task += groups) {
        const int64_t row = task / j->p.groups, group = task % j->p.groups;
        groups = smaller(end - task, j->p.groups - group);
        cursor c = cursor_of(j, group, NULL);
        c.row = row;
        c.end = row + 1;
        c.channels = groups;
        write_results(j, c, j->vectors, j->stride, group);
    }
}

static int has_inference_rows(const job *j) {
    return !j->p.columns && !j->gathers && !j->backward && j->p.row_axes < 2 && j->p.group_axes < 2 && j->p.groups > 1;
}

static void fused_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    for (int64_t task = first; task < end && !j->p.columns;) {
        const int64_t groups = smaller(smaller(j->together, end - task), groups_together(j, task));
        whole_strip(j, task, groups, 0, j->p.run);
        task += groups;
    }
    for (int64_t task = first; task < end && j->p.columns; task++) {
        const int64_t column = task % j->strips * j->strip;
        whole_strip(j, task / j->strips, 1, column, smaller(j->strip, j->p.run - column));
    }
}

/* The part and the strip of a task, its sums, and its place among the coefficients. */
static cursor cut(const job *j, int64_t task, int64_t *sums, int64_t *place) {
    const int64_t strip = task % j->strips, part = task / j->strips % j->parts, group = task / j->strips / j->parts;
    cursor c = cursor_of(j, group, NULL);
    *sums = group * j->parts + part;
    *place = group;
    if (j->p.columns) {
        c.column = strip * j->strip;
        c.columns = smaller(j->strip, j->p.run - c.column);
        *sums = *sums * j->p.run + c.column;
        *place = group * j->p.run + c.column;
    }
    take_part(j, &c, part);
    return c;
}

static void sums_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    for (int64_t task = first, sums, place; task < end; task++) {
        const cursor c = cut(j, task, &sums, &place);
        take_part_sums(j, c, j->stage, from_column(j, j->vectors, place), j->stride, j->first + sums, j->second + sums);
    }
}

static void results_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    for (int64_t task = first, sums, place; task < end; task++) {
        const cursor c = cut(j, task, &sums, &place);
        write_results(j, c, j->vectors, j->stride, place);
    }
}

static void channels_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    const problem *p = &j->p;
    const int64_t width = p->columns ? p->run : 1, inside = p->columns ? p->period : 1;
    for (int64_t task = first, n; task < end; task += n) {
        const int64_t group = task / inside, index = task % inside, sums = group * j->parts * width;
        n = smaller(end - task, p->columns ? smaller(STRIP / p->repeat, inside - index) : groups_together(j, group));
        finish(j, j->stage, group, index, n, j->first + sums, j->second + sums, j->vectors, j->stride,
               group * width + (p->columns ? index * p->repeat : 0));
    }
}

static int is_fused(const job *j) {
    const int64_t tasks = j->p.groups * j->strips;
    return j->p.columns ? j->parts == 1 : j->parts == 1 || (j->parts <= FUSED_PARTS && tasks >= FUSED_TASKS);
}

static size_t sums_bytes(const job *j) {
    return sizeof(double) * (size_t)(j->p.groups * j->parts * (j->p.columns ? j->p.run : 1));
}

static size_t vector_bytes(const job *j) {
    return j->number * (size_t)(j->p.groups * (j->p.columns ? j->p.run : 1) + SPARE);
}

static int needs_no_sums(const pbn_call *call) {
    return call->operation == PBN_OP_FORWARD_INFERENCE || (call->operation == PBN_OP_BACKWARD && call->share != 0);
}

static int merges(const pbn_call *call) {
    return call->operation == PBN_OP_FORWARD_TRAINING && call->sums_only && call->share != 0;
}

/* What addresses decide. */
static void bind(job *j, const pbn_call *call) {
    char *const data[TENSORS] = {(char *)(uintptr_t)call->x, (char *)call->y,
                                 (char *)(uintptr_t)(j->backward ? call->dy : call->z), (char *)call->dx, (char *)call->dz};
    const void *const result = j->backward ? call->dx : call->y;
    memcpy(j->data, data, sizeof data);
    j->call = call;
    if (call->sums_only)
        j->data[j->backward ? DX : Y] = NULL;
    if (j->backward && !j->reads_y)
        j->data[Y] = NULL;
    j->f.rereads = call->beta != 0 || result == call->x || result == call->dy || result == call->z ||
                   (call->dz != NULL && (call->dz == call->dy || call->dz == call->x || call->dz == call->y)) ||
                   (j->backward && result == call->y);
    j->f.streams = j->large && !j->f.rereads;
}

static void make_job(job *j, const pbn_call *call) {
    const int backward = call->operation == PBN_OP_BACKWARD, sums = call->sums_only;
    const pbn_tensor *const tensors[TENSORS] = {call->x_desc, sums && !backward ? NULL : call->y_desc,
                                                backward ? call->dy_desc : call->z_desc,
                                                backward && !sums ? call->dx_desc : NULL, backward ? call->dz_desc : NULL};
    memset(j, 0, sizeof *j);
    j->call = call;
    j->backward = backward;
    j->constant = backward && call->running_mean != NULL;
    j->run = kernels_here[call->x_desc->dtype];
    j->item = pbn_item_size(call->x_desc->dtype);
    j->number = call->x_desc->dtype == PBN_FLOAT64 ? 8 : 4;
    j->f = (fusion){.activation = call->activation, .high = INFINITY, .alpha = call->alpha, .beta = call->beta};
    if (call->activation == PBN_ACTIVATION_CLIPPED_RELU || call->activation == PBN_ACTIVATION_CLAMP)
        j->f.high = call->activation_high;
    if (call->activation == PBN_ACTIVATION_CLAMP)
        j->f.low = call->activation_low;
    j->reads_y = backward && call->dz_desc != NULL;
    j->f.by_result = j->reads_y;
    j->fuses = call->activation != PBN_ACTIVATION_NONE || call->alpha != 1 || call->beta != 0 || pbn_has_residual(call);
    /* Short runs of one channel are better columns: always for results alone, else where each has some rows to be summed,
     * or where they do not fill a vector. */
    const int64_t images = call->x_desc->dims[0];
    make_problem(&j->p, tensors, kept_axes(call->x_desc, call->mode), WIDE_RUN,
                 call->operation == PBN_OP_FORWARD_INFERENCE || images >= 16 ? 64 : j->run->lanes);
    for (int t = 0; t < TENSORS; t++)
        j->gathers |= j->p.run > 1 && j->p.steps[t] != 1;
    j->large = !j->gathers && 2 * j->p.channels * j->p.count * (int64_t)j->item > STREAM_BYTES;
    j->strip = j->p.run;
    j->strips = j->segments = 1;
    if (j->p.columns) {
        j->strip = j->p.repeat * (STRIP / j->p.repeat);
        j->strips = (j->p.run + j->strip - 1) / j->strip;
        j->part_rows = PART_ROWS;
    } else {
        j->segments = (j->p.run + PART - 1) / PART;
        j->part_rows = PART / j->p.run > 0 ? PART / j->p.run : 1;
    }
    const int64_t *const row = j->p.row_axes == 1 ? j->p.of_rows[0].steps : no_steps;
    j->f.in_order = j->strips == 1 && row[X] == j->p.run && (!backward || row[DY] == j->p.run) &&
                    j->p.channels * j->p.count * (int64_t)j->item > IN_ORDER_BYTES;
    j->together = !j->gathers && j->p.count < TOGETHER ? TOGETHER / j->p.count : 1;
    j->parts = j->segments > 1 ? j->p.rows * j->segments : (j->p.rows + j->part_rows - 1) / j->part_rows;
}

/* Results alone: tasks are of whole rows, as they lie in memory. */
static void widen(job *j) {
    if (!j->p.columns)
        return;
    j->strip = smaller(RESULTS_STRIP, j->p.run);
    j->strips = (j->p.run + j->strip - 1) / j->strip;
    j->part_rows = smaller(PART_ROWS, RESULTS_STRIP / j->strip);
    j->parts = (j->p.rows + j->part_rows - 1) / j->part_rows;
}

static size_t workspace_of(const job *j) {
    if (needs_no_sums(j->call))
        return (j->backward ? VECTORS : SLOPE) * vector_bytes(j); /* inference has no slope */
    if (is_fused(j))
        return 0;
    return 2 * sums_bytes(j) + VECTORS * vector_bytes(j);
}

/* Statistics of all, of as many values in each row of x, its means; alpha times the sum of z is the variance within rows. */
static int merge(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc, *z = call->z_desc;
    const int64_t rows = x->dims[0];
    const job j = {.call = call, .number = pbn_item_size(x->dtype)};
    if (x->rank != 2 || z == NULL || z->rank != 2 || call->saved_mean == NULL || x->dtype > PBN_FLOAT64)
        return pbn_refuse(PBN_E_UNSUPPORTED, "statistics are merged from two matrices, a row for each rank");
    const kernels *run = kernels_here[x->dtype];
    double mean[STRIP], variance[STRIP];
    for (int64_t first = 0; first < x->dims[1]; first += STRIP) {
        const int64_t channels = smaller(STRIP, x->dims[1] - first);
        for (int64_t i = 0; i < channels; i++) {
            const double about = number_at(&j, call->x, (first + i) * x->strides[1]), n = (double)rows;
            double sum = 0, square = 0, within = 0;
            for (int64_t r = 0; r < rows; r++) {
                const double d = number_at(&j, call->x, r * x->strides[0] + (first + i) * x->strides[1]) - about;
                sum += d;
                square += d * d;
                within += number_at(&j, call->z, r * z->strides[0] + (first + i) * z->strides[1]);
            }
            const double shift = sum / n, apart = square / n - shift * shift;
            mean[i] = about + shift;
            variance[i] = (apart < 0 ? 0 : apart) + call->alpha * within;
            if (call->y != NULL)
                set_number(&j, call->y, (first + i) * call->y_desc->strides[1], variance[i]);
        }
        run->finish(&(finishing){.call = call, .stage = FINISH_TRAINING, .n = channels, .at = first, .step = 1, .m = 1,
                                 .unbiased = 1 / (1 - call->share), .first = mean, .second = variance});
    }
    return PBN_OK;
}

/* Sums of all parts, where the stage has some, and the channels' coefficients. */
static void run_stage(job *j, int stage, int64_t threads) {
    j->stage = stage;
    if (stage != FINISH_GIVEN)
        share_out(sums_tasks, j, j->p.groups * j->parts * j->strips, threads);
    share_out(channels_tasks, j, j->p.channels, j->p.channels < 256 ? 1 : threads);
}

static int run_job(const job *made) {
    job j = *made;
    const pbn_call *call = j.call;
    const int64_t bytes = j.p.channels * j.p.count * (int64_t)j.item * (j.backward ? 3 : 2);
    const int64_t threads = threads_for(bytes, THREAD_BYTES);
    const int infers = needs_no_sums(call);
    if (!infers && is_fused(&j)) {
        share_out(fused_tasks, &j, j.p.groups * j.strips, threads);
        return PBN_OK;
    }
    if (call->workspace_size < workspace_of(&j) || call->workspace == NULL)
        return pbn_refuse(PBN_E_WORKSPACE, "the workspace is smaller than workspace_size says");
    j.first = call->workspace;
    j.second = j.first + sums_bytes(&j) / sizeof *j.first;
    j.vectors = infers ? call->workspace : (char *)call->workspace + 2 * sums_bytes(&j);
    j.stride = vector_bytes(&j);
    run_stage(&j, infers || j.constant || (j.backward && call->saved_mean != NULL) ? FINISH_GIVEN : FINISH_TRAINING, threads);
    if (j.backward && !infers)
        run_stage(&j, FINISH_GRADIENT, threads);
    if (infers && has_inference_rows(&j))
        share_out(inference_rows, &j, j.p.rows * j.p.groups, threads);
    else if (!call->sums_only) {
        widen(&j);
        share_out(results_tasks, &j, j.p.groups * j.parts * j.strips, threads);
    }
    return PBN_OK;
}

/* The bytes of workspace, and `j` where the call is none of ranks' statistics. */
static int prepare(job *j, const pbn_call *call, size_t *bytes) {
    const int status = check_call(call);
    *bytes = 0;
    if (status != PBN_OK || merges(call))
        return status;
    make_job(j, call);
    *bytes = workspace_of(j);
    return PBN_OK;
}

static int run_call(job *made, const pbn_call *call) {
    if (merges(call))
        return merge(call);
    bind(made, call);
    return run_job(made);
}

static int compute(pbn_handle *handle, const pbn_call *call) {
    job j;
    size_t bytes;
    const int status = prepare(&j, call, &bytes);
    (void)handle;
    return status == PBN_OK ? run_call(&j, call) : status;
}

static int workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    job j;
    (void)handle;
    *bytes = 0;
    return call->operation > PBN_OP_BACKWARD ? PBN_OK : prepare(&j, call, bytes);
}

/* ------------------------------------------------------------------ plans */

struct pbn_plan {
    job made;
    size_t workspace;
};

static int plan_create(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan) {
    pbn_plan *made = calloc(1, sizeof *made);
    (void)handle, (void)algorithm; /* there is one */
    *plan = NULL;
    if (made == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    const int status = prepare(&made->made, call, &made->workspace);
    if (status == PBN_OK)
        *plan = made;
    else
        free(made);
    return status;
}

static void plan_info(const pbn_plan *plan, size_t *workspace, size_t *reserve, const char **algorithm, const char **why) {
    *workspace = plan->workspace;
    *reserve = 0;
    *algorithm = algorithm_names[0];
    *why = "the one entry point of this backend";
}

static int plan_run(pbn_handle *handle, pbn_plan *plan, const pbn_call *call) {
    (void)handle;
    return run_call(&plan->made, call); /* under the handle's lock */
}

static void plan_destroy(pbn_plan *plan) { free(plan); }
