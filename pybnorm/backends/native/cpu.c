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
    PART_ROWS = 256,      /* rows of a part, where the run is of columns */
    PART = 16384,         /* elements of one, where it is of rows */
    NEAR = 256,           /* elements, and rows, from which the value near the mean is taken */
    NEAR_ROWS = 4,
    FUSED_PARTS = 64,     /* a channel of so many parts is computed by one task */
    FUSED_TASKS = 64,     /* where there are as many */
    STREAM_BYTES = 1 << 24, /* data and result of more go past the cache */
    THREAD_BYTES = 1 << 17, /* what is worth a thread */
    SPARE = 16            /* numbers behind a vector of coefficients, which the kernels' last vector reads */
};

typedef struct fusion {
    int activation, by_result, streams; /* streams: the result goes past the cache */
    double low, high, alpha, beta;
} fusion;

typedef void moments_fn(const void *, int64_t, int64_t, int64_t, double, double *, double *);
typedef void column_moments_fn(const void *, int64_t, int64_t, int64_t, const void *, double *, double *);
typedef void dots_fn(const void *, const void *, const void *, int64_t, const int64_t *, int64_t, const void *,
                     const void *, const void *, const fusion *, double *, double *);
typedef dots_fn column_dots_fn;
typedef void apply_fn(const void *, void *, const void *, int64_t, const int64_t *, int64_t, const void *, const void *,
                      const void *, const fusion *);
typedef void gradient_fn(const void *, const void *, const void *, void *, void *, int64_t, const int64_t *, int64_t,
                         const void *, const void *, const void *, const void *, const void *, const fusion *);
typedef void exact_fn(const void *, const void *, const void *, int64_t, const int64_t *, int64_t, double, double, double,
                      const fusion *, double *, double *);
/* Channels side by side, from the sums of the one part that each has; vectors and outputs are of the first of them. */
typedef struct finishing {
    int backward;
    int64_t n;
    double m, epsilon, factor;
    const double *first, *second;
    const void *scale, *bias, *inverse;
    void *vectors[5];  /* as the coefficients come */
    void *outputs[4];  /* the saved pair or dscale and dbias, the running pair; NULL where there is none */
} finishing;

typedef void finish_fn(const finishing *);
typedef struct kernels {
    moments_fn *moments;
    column_moments_fn *column_moments;
    dots_fn *dots;
    column_dots_fn *column_dots;
    apply_fn *apply[2][2]; /* by whether coefficients are of columns, and whether anything is fused */
    gradient_fn *gradient[2][2];
    exact_fn *exact;
    finish_fn *finish_columns;
} kernels;

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

enum { X, Y, DY, DX, DZ, Z = DY };          /* places of tensors in steps */
enum { MEAN, A, B, SLOPE, CENTRE, VECTORS }; /* coefficients */

typedef struct job {
    const pbn_call *call;
    const kernels *run;
    fusion f;
    problem p;
    char *data[TENSORS];
    size_t item, number; /* bytes of an element and of a number that is computed with */
    int backward, fuses, gathers, reads_y, large;
    int64_t parts, segments, part_rows; /* of a group's rows; segments of one long row */
    int64_t strip, strips;              /* columns of a task */
    double *first, *second;             /* of all parts: means and M2, or the sums of dy and of dy*(x - mean) */
    char *vectors;                      /* coefficients of all channels, or of all columns */
    size_t stride;                      /* from one vector of coefficients to the next, bytes */
} job;

/* Rows that are equally far from one another, of one width. */
typedef struct piece {
    char *at[TENSORS];
    int64_t rows, n;
    const int64_t *steps;
    int64_t column; /* the first one of those of its cursor */
} piece;

typedef struct cursor {
    int64_t row, end, column, columns, base[TENSORS];
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
    next->rows = smaller(c->end - c->row, inner != NULL ? inner->length - c->row % inner->length : 1);
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
    c->row += next->rows;
    return 1;
}

static cursor cursor_of(const job *j, int64_t group, int64_t *vector) {
    cursor c = {0, j->p.rows, 0, j->p.run, {0}};
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
    for (int64_t row = 0; row < of->rows; row++)
        for (int64_t first = 0; first < of->n; first += FEW) {
            piece copy = {.rows = 1, .n = smaller(FEW, of->n - first), .steps = no_steps, .column = of->column + first};
            for (int t = 0; t < TENSORS; t++)
                if (of->at[t] != NULL) {
                    const char *from = of->at[t] + (row * of->steps[t] + first * j->p.steps[t]) * (int64_t)j->item;
                    copy.at[t] = (char *)copies[t];
                    for (int64_t i = 0; i < copy.n; i++, from += j->p.steps[t] * (int64_t)j->item)
                        memcpy(copy.at[t] + (size_t)i * j->item, from, j->item);
                }
            visited(j, &copy, with);
            for (int t = 0; t < TENSORS; t++)
                if (written >> t & 1 && of->at[t] != NULL) {
                    char *to = of->at[t] + (row * of->steps[t] + first * j->p.steps[t]) * (int64_t)j->item;
                    for (int64_t i = 0; i < copy.n; i++, to += j->p.steps[t] * (int64_t)j->item)
                        memcpy(to, copy.at[t] + (size_t)i * j->item, j->item);
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

/* A value rounded to the numbers that are computed with. */
static double as_number(const job *j, double value) { return j->number == 8 ? value : (double)(float)value; }

static const char *from_column(const job *j, const void *vector, int64_t column) {
    return (const char *)vector + (size_t)column * j->number;
}

/* ------------------------------------------------------------------ sums of a part */

/* What a part's sums are taken with, and what they are; of columns arrays, else of one value. */
typedef struct sums {
    double *first, *second;
    double about;           /* rows: k of the moments */
    const char *vectors[3]; /* columns: k; dots: mean, a, b of the activation */
    int columns;
} sums;

static void visit_moments(const job *j, const piece *of, void *with) {
    sums *s = with;
    if (s->columns) {
        j->run->column_moments(of->at[X], of->rows, of->steps[X], of->n, from_column(j, s->vectors[0], of->column),
                               s->first + of->column, s->second + of->column);
        return;
    }
    double sum, square;
    j->run->moments(of->at[X], of->rows, of->steps[X], of->n, s->about, &sum, &square);
    *s->first += sum;
    *s->second += square;
}

static void visit_exact_moments(const job *j, const piece *of, void *with) {
    sums *s = with;
    for (int64_t i = 0; i < (s->columns ? of->n : 1); i++) {
        const int64_t column = s->columns ? of->column + i : 0;
        double sum, square;
        j->run->exact(of->at[X] + (size_t)i * j->item, NULL, NULL, of->rows, of->steps, s->columns ? 1 : of->n,
                      s->columns ? number_at(j, s->vectors[0], column) : s->about, 0, 0, &j->f, &sum, &square);
        s->first[column] += sum;
        s->second[column] += square;
    }
}

static void visit_dots(const job *j, const piece *of, void *with) {
    sums *s = with;
    double sum, dot;
    const char *y = j->reads_y ? of->at[Y] : of->at[X];
    if (s->columns) {
        const char *v[3];
        for (int i = 0; i < 3; i++)
            v[i] = from_column(j, s->vectors[i], of->column);
        j->run->column_dots(of->at[X], of->at[DY], y, of->rows, of->steps, of->n, v[0], v[1], v[2], &j->f,
                            s->first + of->column, s->second + of->column);
        return;
    }
    j->run->dots(of->at[X], of->at[DY], y, of->rows, of->steps, of->n, s->vectors[0], s->vectors[1], s->vectors[2], &j->f,
                 &sum, &dot);
    *s->first += sum;
    *s->second += dot;
}

static void visit_exact_dots(const job *j, const piece *of, void *with) {
    sums *s = with;
    for (int64_t i = 0; i < (s->columns ? of->n : 1); i++) {
        const int64_t column = s->columns ? of->column + i : 0;
        double sum, dot;
        j->run->exact(of->at[X] + (size_t)i * j->item, of->at[DY] + (size_t)i * j->item,
                      of->at[j->reads_y ? Y : X] + (size_t)i * j->item, of->rows, of->steps, s->columns ? 1 : of->n,
                      number_at(j, s->vectors[0], column), number_at(j, s->vectors[1], column),
                      number_at(j, s->vectors[2], column), &j->f, &sum, &dot);
        s->first[column] += sum;
        s->second[column] += dot;
    }
}

static void clear(sums *s, int64_t n) {
    memset(s->first, 0, (size_t)n * sizeof *s->first);
    memset(s->second, 0, (size_t)n * sizeof *s->second);
}

/* Whether float32 held a sum of squares, or of products, of n terms: neither beyond its range nor lost below it. */
static int held(double sum, double square, double n) {
    return isfinite(square) && isfinite(sum) && (square > n * 1e-34 || (square == 0 && sum == 0));
}

/* The sums about k are good for M2 = square - sum^2/n where at most five sixths of `square` go. */
static int is_near(double sum, double square, double n) { return sum * sum <= 0.83 * square * n; }

static void row_moments(const job *j, cursor c, double *mean, double *m2) {
    double sum, square, n = (double)(c.end - c.row) * (double)c.columns;
    sums s = {&sum, &square, 0, {NULL}, 0};
    cursor start = c;
    /* A value near the mean: the first element of few, a mean of some of many. */
    start.end = start.row + 1;
    start.columns = n < 16 * NEAR ? 1 : smaller(NEAR, c.columns);
    clear(&s, 1);
    each_piece(j, start, visit_moments, &s, 0);
    s.about = as_number(j, sum / (double)start.columns);
    if (!isfinite(s.about))
        s.about = 0;
    for (int turn = 0; turn < 3; turn++) {
        clear(&s, 1);
        each_piece(j, c, visit_moments, &s, 0);
        if (!isfinite(sum) || is_near(sum, square, n))
            break;
        s.about = as_number(j, s.about + sum / n);
    }
    if (j->number == 4 && !held(sum, square, n)) {
        clear(&s, 1);
        each_piece(j, c, visit_exact_moments, &s, 0);
    }
    *mean = s.about + sum / n;
    *m2 = square - sum * (sum / n);
}

/* Rows of a part that have column `column`, of the run. */
static double rows_with(const job *j, const cursor *c, int64_t column) {
    return (double)(c->end - c->row - (c->end == j->p.rows && column >= j->p.last));
}

static void column_moments(const job *j, cursor c, double *mean, double *m2) {
    double about[STRIP + SPARE]; /* floats or doubles */
    sums s = {mean, m2, 0, {(const char *)about}, 1};
    cursor start = c;
    int near = 1, kept = 1;
    start.end = smaller(start.end, start.row + NEAR_ROWS);
    memset(about, 0, sizeof about);
    clear(&s, c.columns);
    each_piece(j, start, visit_moments, &s, 0);
    for (int64_t i = 0; i < c.columns; i++) {
        const double k = mean[i] / rows_with(j, &start, c.column + i);
        set_number(j, about, i, isfinite(as_number(j, k)) ? k : 0);
    }
    for (int turn = 0; turn < 3; turn++) {
        clear(&s, c.columns);
        each_piece(j, c, visit_moments, &s, 0);
        near = 1;
        for (int64_t i = 0; i < c.columns; i++)
            near &= !isfinite(mean[i]) || is_near(mean[i], m2[i], rows_with(j, &c, c.column + i));
        if (near)
            break;
        for (int64_t i = 0; i < c.columns; i++)
            if (isfinite(mean[i]))
                set_number(j, about, i, number_at(j, about, i) + mean[i] / rows_with(j, &c, c.column + i));
    }
    for (int64_t i = 0; i < c.columns; i++)
        kept &= held(mean[i], m2[i], rows_with(j, &c, c.column + i));
    if (j->number == 4 && !kept) {
        clear(&s, c.columns);
        each_piece(j, c, visit_exact_moments, &s, 0);
    }
    for (int64_t i = 0; i < c.columns; i++) {
        const double sum = mean[i], n = rows_with(j, &c, c.column + i);
        mean[i] = number_at(j, about, i) + sum / n;
        m2[i] -= sum * (sum / n);
    }
}

static void part_dots(const job *j, cursor c, const char *const vectors[3], double *sum, double *dot) {
    const int64_t columns = j->p.columns ? c.columns : 1;
    sums s = {sum, dot, 0, {vectors[0], vectors[1], vectors[2]}, j->p.columns};
    int kept = 1;
    clear(&s, columns);
    each_piece(j, c, visit_dots, &s, 0);
    for (int64_t i = 0; i < columns; i++) /* a product lost below float32's range is below its other terms', too */
        kept &= isfinite(sum[i]) && isfinite(dot[i]);
    if (j->number == 4 && !kept) {
        clear(&s, columns);
        each_piece(j, c, visit_exact_dots, &s, 0);
    }
}

/* ------------------------------------------------------------------ from sums to coefficients */

/* Sums of a channel's parts: of part i, at `first[i * part]` and so on; of columns, all that are the channel's. */
typedef struct channel {
    int64_t vector;            /* its place in the vectors of parameters */
    int64_t column, copies;    /* columns: the first one of it, and how often its run of `repeat` comes */
    const double *first, *second;
    int64_t part;              /* from one part's sums to the next, of one strip */
} channel;

#define EACH_SUM(j, ch, BODY)                                                                                         \
    for (int64_t part_ = 0; part_ < (j)->parts; part_++)                                                              \
        for (int64_t copy_ = 0; copy_ < (ch)->copies; copy_++)                                                        \
            for (int64_t i_ = 0; i_ < ((j)->p.columns ? (j)->p.repeat : 1); i_++) {                                   \
                const int64_t column = (ch)->column + copy_ * (j)->p.period * (j)->p.repeat + i_;                     \
                const int64_t at = part_ * (ch)->part + ((j)->p.columns ? column : 0);                                \
                BODY                                                                                                  \
            }

static double elements_of(const job *j, int64_t part, int64_t column) {
    cursor c = {0, j->p.rows, 0, j->p.run, {0}};
    take_part(j, &c, part);
    return j->p.columns ? rows_with(j, &c, column) : (double)(c.end - c.row) * (double)c.columns;
}

static void combine_moments(const job *j, const channel *ch, double *mean, double *variance) {
    const double m = (double)j->p.count;
    double near = ch->first[j->p.columns ? ch->column : 0], sum = 0, m2 = 0;
    if (!isfinite(near))
        near = 0;
    EACH_SUM(j, ch, { sum += elements_of(j, part_, column) * (ch->first[at] - near); })
    *mean = near + sum / m;
    EACH_SUM(j, ch, {
        const double off = ch->first[at] - *mean;
        m2 += ch->second[at] + elements_of(j, part_, column) * off * off;
    })
    *variance = m2 < 0 ? 0 : m2 / m;
}

static void blend_number(const job *j, void *vector, int64_t i, double value) {
    const pbn_call *c = j->call;
    set_number(j, vector, i,
               c->alpha_param * value + (c->beta_param != 0 ? c->beta_param * number_at(j, vector, i) : 0));
}

/* Writes a channel's coefficient to its place, or to all of its columns. */
static void spread(const job *j, char *vectors, size_t stride, const channel *ch, int64_t place, int which, double value) {
    char *to = vectors + (size_t)which * stride;
    if (!j->p.columns) {
        set_number(j, to, place, value);
        return;
    }
    for (int64_t copy = 0; copy < ch->copies; copy++)
        for (int64_t i = 0; i < j->p.repeat; i++)
            set_number(j, to, place + copy * j->p.period * j->p.repeat + i, value);
}

static double inverse_of(const job *j, double variance) { return 1 / sqrt(variance + j->call->epsilon); }

/* mean, a, b of (x - mean) * a + b: what rounding the mean leaves goes into b. */
static void spread_affine(const job *j, char *vectors, size_t stride, const channel *ch, int64_t place, double mean,
                          double inverse) {
    const pbn_call *c = j->call;
    const double a = number_at(j, c->scale, ch->vector) * inverse, rounded = as_number(j, mean);
    const double bias = c->bias != NULL ? number_at(j, c->bias, ch->vector) : 0;
    const double rest = isfinite(rounded) && isfinite(mean) ? mean - rounded : 0;
    spread(j, vectors, stride, ch, place, MEAN, rounded);
    spread(j, vectors, stride, ch, place, A, a);
    spread(j, vectors, stride, ch, place, B, bias - rest * a);
}

/* `unbiased`: times the variance, what the running one takes. */
static void finish_statistics(const job *j, int64_t at, double mean, double variance, double unbiased) {
    const pbn_call *c = j->call;
    const double f = c->factor;
    if (c->saved_mean != NULL) {
        set_number(j, c->saved_mean, at, mean);
        set_number(j, c->saved_inv_variance, at, inverse_of(j, variance));
    }
    if (c->running_mean != NULL) { /* with factor 1 the old ones are not read, nor with 0 the new ones */
        void *const running[] = {c->running_mean, c->running_variance};
        const double batch[] = {mean, variance * unbiased};
        for (int i = 0; i < 2; i++)
            set_number(j, running[i], at,
                       (f == 1 ? 0 : (1 - f) * number_at(j, running[i], at)) + (f == 0 ? 0 : f * batch[i]));
    }
}

static void finish_training(const job *j, const channel *ch, char *vectors, size_t stride, int64_t place) {
    const pbn_call *c = j->call;
    const double m = (double)j->p.count;
    double mean, variance;
    combine_moments(j, ch, &mean, &variance);
    const double inverse = inverse_of(j, variance);
    if (c->operation == PBN_OP_FORWARD_TRAINING)
        finish_statistics(j, ch->vector, mean, variance, m > 1 ? m / (m - 1) : 1);
    if (c->sums_only && !j->backward)
        return; /* statistics alone: scale and bias are not read */
    spread_affine(j, vectors, stride, ch, place, mean, inverse);
    if (j->backward) { /* of statistics that were not saved: 1/deviation waits where the gradient's slope will be */
        spread(j, vectors, stride, ch, place, SLOPE, inverse);
        spread(j, vectors, stride, ch, place, CENTRE, mean - as_number(j, mean));
    }
}

static void finish_backward(const job *j, const channel *ch, char *vectors, size_t stride, int64_t place) {
    const pbn_call *c = j->call;
    const double m = (double)j->p.count;
    double sum = 0, dot = 0;
    EACH_SUM(j, ch, {
        sum += ch->first[at];
        dot += ch->second[at];
    })
    const double inverse = c->saved_mean != NULL ? number_at(j, c->saved_inv_variance, ch->vector)
                                                 : number_at(j, vectors + SLOPE * stride, place);
    const double rest = c->saved_mean != NULL ? 0 : number_at(j, vectors + CENTRE * stride, place);
    dot -= rest * sum;
    blend_number(j, c->dscale, ch->vector, dot * inverse);
    blend_number(j, c->dbias, ch->vector, sum);
    if (c->sums_only)
        return;
    const double a = number_at(j, c->scale, ch->vector) * inverse, slope = -a * (dot * inverse / m) * inverse;
    spread(j, vectors, stride, ch, place, SLOPE, slope);
    spread(j, vectors, stride, ch, place, CENTRE, -a * (sum / m) - rest * slope);
}

/* Coefficients that need no sums: inference's, those of saved statistics, and of sums that are given. */
static void given_statistics(const job *j, const channel *ch, char *vectors, size_t stride, int64_t place) {
    const pbn_call *c = j->call;
    if (j->backward) {
        const double inverse = number_at(j, c->saved_inv_variance, ch->vector);
        spread_affine(j, vectors, stride, ch, place, number_at(j, c->saved_mean, ch->vector), inverse);
        if (c->share != 0) {
            const double a = number_at(j, c->scale, ch->vector) * inverse * c->share;
            const double slope = -a * number_at(j, c->dscale, ch->vector) * inverse * inverse;
            spread(j, vectors, stride, ch, place, SLOPE, slope);
            spread(j, vectors, stride, ch, place, CENTRE, -a * number_at(j, c->dbias, ch->vector));
        }
    } else {
        const double given = number_at(j, c->running_variance, ch->vector);
        spread_affine(j, vectors, stride, ch, place, number_at(j, c->running_mean, ch->vector),
                      c->inverse ? given : inverse_of(j, given));
    }
}

/* ------------------------------------------------------------------ results */

typedef struct results {
    const char *vectors[VECTORS];
} results;

static void visit_results(const job *j, const piece *of, void *with) {
    const results *r = with;
    const char *v[VECTORS];
    for (int i = 0; i < VECTORS; i++)
        v[i] = j->p.columns ? from_column(j, r->vectors[i], of->column) : r->vectors[i];
    if (j->backward)
        j->run->gradient[j->p.columns][j->fuses](of->at[X], of->at[DY], j->reads_y ? of->at[Y] : of->at[X], of->at[DX],
                                                 of->at[DZ], of->rows, of->steps, of->n, v[MEAN], v[A], v[B], v[SLOPE],
                                                 v[CENTRE], &j->f);
    else
        j->run->apply[j->p.columns][j->fuses](of->at[X], of->at[Y], of->at[Z], of->rows, of->steps, of->n, v[MEAN], v[A],
                                              v[B], &j->f);
}

static void write_results(const job *j, cursor c, const char *vectors, size_t stride, int64_t place) {
    results r;
    for (int i = 0; i < VECTORS; i++)
        r.vectors[i] = from_column(j, vectors + (size_t)i * stride, place);
    each_piece(j, c, visit_results, &r, j->backward ? 1u << DX | 1u << DZ : 1u << Y);
#if defined(__x86_64__) && defined(__GNUC__)
    if (j->f.streams)
        _mm_sfence(); /* such stores are seen by others in no order without it */
#endif
}

/* ------------------------------------------------------------------ tasks */

/* Channel `index` of a group's run, or the group's only one. */
static channel channel_of(const job *j, int64_t vector, int64_t index) {
    return (channel){.vector = vector + index * j->p.step,
                     .column = index * j->p.repeat,
                     .copies = j->p.columns ? j->p.run / (j->p.period * j->p.repeat) : 1};
}

static void part_moments(const job *j, const cursor *c, double *mean, double *m2) {
    (j->p.columns ? column_moments : row_moments)(j, *c, mean, m2);
}

typedef void finish(const job *j, const channel *ch, char *vectors, size_t stride, int64_t place);

static int finishes_side_by_side(const job *j) {
    const pbn_call *c = j->call;
    return j->p.columns && j->parts == 1 && j->p.run == j->p.period && j->p.step == 1 && !c->sums_only &&
           (j->backward ? c->saved_mean != NULL && c->alpha_param == 1 && c->beta_param == 0 : c->bias != NULL);
}

static void side_by_side(const job *j, int backward, int64_t vector, int64_t n, const double *first,
                         const double *second, char *vectors, size_t stride) {
    const pbn_call *c = j->call;
    void *const outputs[] = {backward ? c->dscale : c->saved_mean, backward ? c->dbias : c->saved_inv_variance,
                             backward ? NULL : c->running_mean, backward ? NULL : c->running_variance};
    finishing of = {.backward = backward, .n = n, .m = (double)j->p.count, .epsilon = c->epsilon, .factor = c->factor,
                    .first = first, .second = second, .scale = from_column(j, c->scale, vector)};
    if (backward)
        of.inverse = from_column(j, c->saved_inv_variance, vector);
    else
        of.bias = from_column(j, c->bias, vector);
    for (int i = 0; i < VECTORS; i++)
        of.vectors[i] = vectors + (size_t)i * stride;
    for (int i = 0; i < 4; i++)
        of.outputs[i] = outputs[i] == NULL ? NULL : (char *)outputs[i] + (size_t)vector * j->number;
    j->run->finish_columns(&of);
}

/* One channel, or one strip of a group's columns, from its sums to its result. */
static void whole_strip(const job *j, int64_t group, int64_t first_column, int64_t columns) {
    enum { MOST = FUSED_PARTS > STRIP + SPARE ? FUSED_PARTS : STRIP + SPARE };
    double first[MOST], second[MOST], vectors[VECTORS][STRIP + SPARE];
    const size_t stride = sizeof vectors[0];
    int64_t vector;
    cursor all = cursor_of(j, group, &vector);
    const int64_t period = j->p.columns ? smaller(columns / j->p.repeat, j->p.period) : 1;
    const int saved = j->backward && j->call->saved_mean != NULL;
    char *to = (char *)vectors;
    finish *const stages[] = {finish_training, finish_backward};
    all.column = first_column;
    all.columns = columns;
    if (saved)
        for (int64_t i = 0; i < period; i++) {
            const channel ch = channel_of(j, vector, first_column / j->p.repeat + i);
            given_statistics(j, &ch, to, stride, j->p.columns ? i * j->p.repeat : 0);
        }
    for (int stage = saved; stage < 1 + j->backward; stage++) {
        const char *const about[] = {to, to + stride, to + 2 * stride};
        for (int64_t part = 0; part < j->parts; part++) {
            cursor c = all;
            const int64_t at = j->p.columns ? 0 : part; /* one part where there are columns */
            take_part(j, &c, part);
            if (stage == 0)
                part_moments(j, &c, first + at, second + at);
            else
                part_dots(j, c, about, first + at, second + at);
        }
        if (finishes_side_by_side(j)) {
            side_by_side(j, stage, vector + first_column, columns, first, second, to, stride);
            continue;
        }
        for (int64_t i = 0; i < period; i++) {
            channel ch = channel_of(j, vector, first_column / j->p.repeat + i);
            ch.first = first - (j->p.columns ? first_column : 0);
            ch.second = second - (j->p.columns ? first_column : 0);
            ch.part = 1;
            stages[stage](j, &ch, to, stride, j->p.columns ? i * j->p.repeat : 0);
        }
    }
    if (!j->call->sums_only)
        write_results(j, all, to, stride, 0);
}

/* A task of results alone, with the coefficients at hand: inference's parts. */
static void inference_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    double vectors[VECTORS][STRIP + SPARE];
    for (int64_t task = first; task < end; task++) {
        const int64_t strip = task % j->strips, part = task / j->strips % j->parts, group = task / j->strips / j->parts;
        int64_t vector;
        cursor c = cursor_of(j, group, &vector);
        if (j->p.columns) {
            c.column = strip * j->strip;
            c.columns = smaller(j->strip, j->p.run - c.column);
        }
        const int64_t period = j->p.columns ? smaller(c.columns / j->p.repeat, j->p.period) : 1;
        for (int64_t i = 0; i < period; i++) {
            const channel ch = channel_of(j, vector, c.column / j->p.repeat * j->p.columns + i);
            given_statistics(j, &ch, (char *)vectors, sizeof vectors[0], j->p.columns ? i * j->p.repeat : 0);
        }
        take_part(j, &c, part);
        write_results(j, c, (const char *)vectors, sizeof vectors[0], 0);
    }
}

/* Inference of rows in the order of memory, coefficients of all channels at hand: images outside, channels inside. */
static void inference_rows(void *data, int64_t first, int64_t end) {
    const job *j = data;
    const problem *p = &j->p;
    const int64_t *const row = p->row_axes > 0 ? p->of_rows[0].steps : no_steps;
    const int64_t *const group = p->group_axes > 0 ? p->of_groups[0].steps : no_steps;
    for (int64_t task = first; task < end; task++) {
        const int64_t r = task / p->groups, g = task % p->groups;
        char *at[TENSORS];
        const char *v[3];
        for (int t = 0; t < TENSORS; t++)
            at[t] = j->data[t] == NULL ? NULL : j->data[t] + (r * row[t] + g * group[t]) * (int64_t)j->item;
        for (int i = 0; i < 3; i++)
            v[i] = from_column(j, j->vectors + (size_t)i * j->stride, g);
        j->run->apply[0][j->fuses](at[X], at[Y], at[Z], 1, no_steps, p->run, v[MEAN], v[A], v[B], &j->f);
    }
#if defined(__x86_64__) && defined(__GNUC__)
    if (j->f.streams)
        _mm_sfence();
#endif
}

static int has_inference_rows(const job *j) {
    return !j->p.columns && !j->gathers && !j->backward && j->p.row_axes < 2 && j->p.group_axes < 2 && j->p.groups > 1;
}

static void fused_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    for (int64_t task = first; task < end; task++) {
        const int64_t column = task % j->strips * j->strip;
        whole_strip(j, task / j->strips, column, smaller(j->strip, j->p.run - column));
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

static void moments_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    for (int64_t task = first, sums, place; task < end; task++) {
        const cursor c = cut(j, task, &sums, &place);
        part_moments(j, &c, j->first + sums, j->second + sums);
    }
}

static void dots_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    for (int64_t task = first, sums, place; task < end; task++) {
        const cursor c = cut(j, task, &sums, &place);
        const char *about[3];
        for (int i = 0; i < 3; i++)
            about[i] = from_column(j, j->vectors + (size_t)i * j->stride, place);
        part_dots(j, c, about, j->first + sums, j->second + sums);
    }
}

static void results_tasks(void *data, int64_t first, int64_t end) {
    const job *j = data;
    for (int64_t task = first, sums, place; task < end; task++) {
        const cursor c = cut(j, task, &sums, &place);
        write_results(j, c, j->vectors, j->stride, place);
    }
}

static void finish_channels(const job *j, int64_t first, int64_t end, finish *finished) {
    for (int64_t task = first; task < end; task++) {
        const int64_t inside = j->p.columns ? j->p.period : 1, group = task / inside, index = task % inside;
        int64_t vector;
        cursor_of(j, group, &vector);
        channel ch = channel_of(j, vector, index);
        const int64_t width = j->p.columns ? j->p.run : 1;
        ch.first = j->first + group * j->parts * width;
        ch.second = j->second + group * j->parts * width;
        ch.part = width;
        finished(j, &ch, j->vectors, j->stride, group * width + ch.column);
    }
}

static void given_channels(void *data, int64_t first, int64_t end) { finish_channels(data, first, end, given_statistics); }
static void training_channels(void *data, int64_t first, int64_t end) { finish_channels(data, first, end, finish_training); }
static void backward_channels(void *data, int64_t first, int64_t end) { finish_channels(data, first, end, finish_backward); }

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
    j->f.streams = j->large && result != call->x && result != call->dy && result != call->z;
}

static void make_job(job *j, const pbn_call *call) {
    const int backward = call->operation == PBN_OP_BACKWARD, sums = call->sums_only;
    const pbn_tensor *const tensors[TENSORS] = {call->x_desc, sums && !backward ? NULL : call->y_desc,
                                                backward ? call->dy_desc : call->z_desc,
                                                backward && !sums ? call->dx_desc : NULL, backward ? call->dz_desc : NULL};
    memset(j, 0, sizeof *j);
    j->call = call;
    j->backward = backward;
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
    /* Short runs of one channel are better columns: always for results alone, else where each has some rows to be summed. */
    const int64_t images = call->x_desc->dims[0];
    make_problem(&j->p, tensors, kept_axes(call->x_desc, call->mode), WIDE_RUN,
                 call->operation == PBN_OP_FORWARD_INFERENCE ? 128 : images >= 16 ? 64 : 16);
    for (int t = 0; t < TENSORS; t++)
        j->gathers |= j->p.run > 1 && j->p.steps[t] != 1;
    j->large = !j->gathers && 2 * j->p.channels * j->p.count * (int64_t)j->item > STREAM_BYTES;
    j->strip = j->p.run;
    j->strips = j->segments = 1;
    if (j->p.columns) {
        j->part_rows = PART_ROWS;
        j->strip = j->p.repeat * (STRIP / j->p.repeat);
        j->strips = (j->p.run + j->strip - 1) / j->strip;
    } else {
        j->segments = (j->p.run + PART - 1) / PART;
        j->part_rows = PART / j->p.run > 0 ? PART / j->p.run : 1;
    }
    j->parts = j->segments > 1 ? j->p.rows * j->segments : (j->p.rows + j->part_rows - 1) / j->part_rows;
}

static size_t workspace_of(const job *j) {
    if (needs_no_sums(j->call))
        return has_inference_rows(j) ? VECTORS * vector_bytes(j) : 0;
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
    for (int64_t c = 0; c < x->dims[1]; c++) {
        const double about = number_at(&j, call->x, c * x->strides[1]);
        double sum = 0, square = 0, within = 0;
        for (int64_t r = 0; r < rows; r++) {
            const double d = number_at(&j, call->x, r * x->strides[0] + c * x->strides[1]) - about;
            sum += d;
            square += d * d;
            within += number_at(&j, call->z, r * z->strides[0] + c * z->strides[1]);
        }
        const double n = (double)rows, shift = sum / n, apart = square / n - shift * shift;
        const double variance = (apart < 0 ? 0 : apart) + call->alpha * within;
        finish_statistics(&j, c, about + shift, variance, 1 / (1 - call->share));
        if (call->y != NULL)
            set_number(&j, call->y, c * call->y_desc->strides[1], variance);
    }
    return PBN_OK;
}

static int run_job(job *made) {
    job j = *made;
    const pbn_call *call = j.call;
    const int64_t tasks = j.p.groups * j.parts * j.strips, channels = j.p.channels;
    const int64_t bytes = j.p.channels * j.p.count * (int64_t)j.item * (j.backward ? 3 : 2);
    const int64_t threads = threads_for(bytes, THREAD_BYTES);
    const int infers = needs_no_sums(call);
    if (infers && !has_inference_rows(&j)) {
        share_out(inference_tasks, &j, tasks, threads);
        return PBN_OK;
    }
    if (!infers && is_fused(&j)) {
        share_out(fused_tasks, &j, j.p.groups * j.strips, threads);
        return PBN_OK;
    }
    if (call->workspace_size < workspace_of(&j) || call->workspace == NULL)
        return pbn_refuse(PBN_E_WORKSPACE, "the workspace is smaller than workspace_size says");
    const int64_t few = channels < 256 ? 1 : threads;
    j.stride = vector_bytes(&j);
    if (infers) {
        j.vectors = call->workspace;
        share_out(given_channels, &j, channels, few);
        share_out(inference_rows, &j, j.p.rows * j.p.groups, threads);
        return PBN_OK;
    }
    j.first = call->workspace;
    j.second = j.first + sums_bytes(&j) / sizeof *j.first;
    j.vectors = (char *)call->workspace + 2 * sums_bytes(&j);
    if (j.backward && call->saved_mean != NULL)
        share_out(given_channels, &j, channels, few);
    else {
        share_out(moments_tasks, &j, tasks, threads);
        share_out(training_channels, &j, channels, few);
    }
    if (j.backward) {
        share_out(dots_tasks, &j, tasks, threads);
        share_out(backward_channels, &j, channels, few);
    }
    if (!call->sums_only)
        share_out(results_tasks, &j, tasks, threads);
    return PBN_OK;
}

static int compute(pbn_handle *handle, const pbn_call *call) {
    job j;
    const int status = check_call(call);
    (void)handle;
    if (status != PBN_OK)
        return status;
    if (merges(call))
        return merge(call);
    make_job(&j, call);
    bind(&j, call);
    return run_job(&j);
}

/* ------------------------------------------------------------------ plans */

struct pbn_plan {
    job made;
    size_t workspace;
};

static int plan_create(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan) {
    const int status = check_call(call);
    (void)handle, (void)algorithm; /* there is one */
    *plan = NULL;
    if (status != PBN_OK)
        return status;
    pbn_plan *made = calloc(1, sizeof *made);
    if (made == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no host memory for a plan");
    if (!merges(call)) {
        make_job(&made->made, call);
        made->workspace = workspace_of(&made->made);
    }
    *plan = made;
    return PBN_OK;
}

static void plan_info(const pbn_plan *plan, size_t *workspace, size_t *reserve, const char **algorithm, const char **why) {
    *workspace = plan->workspace;
    *reserve = 0;
    *algorithm = algorithm_names[0];
    *why = "the one entry point of this backend";
}

static int plan_run(pbn_handle *handle, pbn_plan *plan, const pbn_call *call) {
    (void)handle;
    if (merges(call))
        return merge(call);
    bind(&plan->made, call); /* under the handle's lock */
    return run_job(&plan->made);
}

static void plan_destroy(pbn_plan *plan) { free(plan); }
