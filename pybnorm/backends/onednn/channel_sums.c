/* The sums of a call's channels, of rows or of columns in C, shared among the threads of oneDNN's OpenMP.
 * Part of adapter.c. */

#define STRIP (4 * LANES) /* columns */

/* Moments of `count` channels, or columns, from `first` on, or with dy the sums that gradients are made of. */
typedef struct job {
    void (*run)(const struct job *job, int64_t first, int64_t count);
    const part *p;
    int64_t first, count, unit;
    const void *x, *dy;
    const float *mean;
    double *one, *other;
} job;

static void take_share(void *data) {
    const job *j = data;
    const int64_t threads = api.omp_get_num_threads(), thread = api.omp_get_thread_num();
    const int64_t units = (j->count + j->unit - 1) / j->unit;
    const int64_t from = units * thread / threads * j->unit, end = units * (thread + 1) / threads * j->unit;
    const int64_t to = end < j->count ? end : j->count;
    if (from < to)
        j->run(j, j->first + from, to - from);
}

static void share(const job *j, int64_t elements) {
    const int64_t threads = shares_of(elements, INT32_MAX);
    if (threads > 1)
        api.GOMP_parallel(take_share, (void *)(uintptr_t)j, (unsigned)threads, 0);
    else
        j->run(j, j->first, j->count);
}

/* Of n columns of `rows` elements, and of the first `longer` one more, the sum: of means times their elements, or of the
 * squares around `middle`, given those around the means. Four chains: one would take four times as long. */
static double weighted(int64_t n, const double *means, const double *squares, double middle, double rows,
                       int64_t longer) {
    double sum[4] = {0};
    for (int64_t i = 0; i < n; i++) {
        const double off = means[i] - middle, each = rows + (i < longer);
        sum[i % 4] += squares == NULL ? each * off : squares[i] + each * off * off;
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static void sums_of_rows(const job *j, int64_t first, int64_t count) {
    const part *p = j->p;
    const int64_t columns = p->fold.columns, plane = columns / p->params, images = p->count / columns;
    const kernels *own = kernels_here();
    const float *x = j->x, *dy = j->dy, *mean = dy == NULL ? NULL : j->mean + first;
    const uint16_t *narrow_x = j->x, *narrow_dy = j->dy;
    double *one = j->one + first, *other = j->other + first;
    for (int64_t i = 0, at = first * plane; i < images; i++, at += columns)
        if (p->memory.dtype == PBN_FLOAT32 && dy == NULL)
            own->row_moments_f32(x + at, count, plane, i * plane, one, other);
        else if (p->memory.dtype == PBN_FLOAT32)
            own->row_gradients_f32(x + at, dy + at, count, plane, mean, one, other);
        else if (dy == NULL)
            own->row_moments_bf16(narrow_x + at, count, plane, i * plane, one, other);
        else
            own->row_gradients_bf16(narrow_x + at, narrow_dy + at, count, plane, mean, one, other);
}

static void sums_of_columns(const job *j, int64_t first, int64_t count) {
    const int dtype = j->p->memory.dtype;
    const int64_t elements = j->p->count, width = j->count, last = first + count;
    if (j->dy == NULL)
        column_moments(dtype, j->x, elements, width, first, last, j->one, j->other);
    else
        column_gradients(dtype, j->x, j->dy, elements, width, first, last, j->mean, j->one, j->other);
}

/* Mean and biased variance of `count` channels from `first` on. Rows go image by image, all channels of one in turn;
 * columns, which are of all channels, are merged to them. */
static void own_statistics(const part *p, char *base, const void *x, int64_t first, int64_t count, float *mean,
                           float *variance) {
    const fold *f = &p->fold;
    const int64_t plane = f->columns / p->params, width = f->group * f->columns, m = p->count / p->params;
    double *middle = place(base, p->sums), *squares = middle + p->params;
    memset(middle + first, 0, (size_t)count * sizeof *middle);
    memset(squares + first, 0, (size_t)count * sizeof *squares);
    if (!takes_columns(p)) {
        const job rows = {sums_of_rows, p, first, count, 1, x, NULL, NULL, middle, squares};
        share(&rows, count * m);
    } else {
        double *means = place(base, p->wide_sums), *around = means + width;
        const job columns = {sums_of_columns, p, 0, width, STRIP, x, NULL, NULL, means, around};
        const int64_t rows = p->count / width, longer = p->count % width;
        share(&columns, p->count);
        for (int64_t i = 0; i < width;)
            for (int64_t c = 0; c < p->params; c++, i += plane)
                middle[c] += weighted(plane, means + i, NULL, 0, (double)rows, longer - i);
        for (int64_t c = 0; c < p->params; c++)
            middle[c] /= (double)m;
        for (int64_t i = 0; i < width;)
            for (int64_t c = 0; c < p->params; c++, i += plane)
                squares[c] += weighted(plane, means + i, around + i, middle[c], (double)rows, longer - i);
    }
    for (int64_t c = first; c < first + count; c++) {
        mean[c] = (float)middle[c];
        variance[c] = (float)(squares[c] / (double)m);
    }
}

/* Of the same channels the sums of (x - mean)*dy and of dy. */
static void own_gradient_sums(const part *p, char *base, const void *x, const void *dy, int64_t first, int64_t count,
                              const float *mean, double *dots, double *sums) {
    const fold *f = &p->fold;
    const int64_t plane = f->columns / p->params, width = f->group * f->columns;
    memset(dots + first, 0, (size_t)count * sizeof *dots);
    memset(sums + first, 0, (size_t)count * sizeof *sums);
    if (!takes_columns(p)) {
        const job rows = {sums_of_rows, p, first, count, 1, x, dy, mean, dots, sums};
        share(&rows, count * (p->count / p->params));
        return;
    }
    double *wide_dots = place(base, p->wide_sums), *wide = wide_dots + width;
    const float *around = repeat(p->params, mean, plane, f->group, (float *)(wide + width));
    const job columns = {sums_of_columns, p, 0, width, STRIP, x, dy, around, wide_dots, wide};
    share(&columns, p->count);
    for (int64_t i = 0; i < width;)
        for (int64_t c = 0; c < p->params; c++)
            for (int64_t s = 0; s < plane; s++, i++) {
                dots[c] += wide_dots[i];
                sums[c] += wide[i];
            }
}
