/* Running the steps that a way was planned as. Part of adapter.c. */

/* Each channel's value for each of its rows. */
static const float *each_row(const part *p, const float *channels, float *to) {
    const fold *f = &p->fold;
    return repeat(p->params, channels, f->columns / p->params / f->inner, p->count / f->columns, to);
}

/* A step over so many channels from `first` on. */
static int elementwise_block(pbn_handle *h, const part *p, kind k, char *base, const void *const *tensors,
                             const void *const *channels, int64_t first) {
    const recipe *r = &recipes[k];
    const int64_t plane = p->flat.inner, left = p->params - first, count = left < p->block ? left : p->block;
    const size_t item = pbn_item_size(p->memory.dtype);
    const void *pointers[MAX_ARGS];
    int code = PBN_OK;
    for (int i = r->tensors; i < r->count; i++) {
        const float *vector = (const float *)channels[i - r->tensors] + first;
        pointers[i] = p->wide ? repeat(count, vector, plane, 1, place(base, p->repeated[i - r->tensors])) : vector;
    }
    for (int64_t at = first * plane; at < p->count && code == PBN_OK; at += p->flat.columns) {
        for (int i = 0; i < r->tensors; i++)
            pointers[i] = (const char *)tensors[i] + (size_t)at * item;
        code = primitive_run(h, p->steps[k][count < p->block], pointers, place(base, p->scratchpad));
    }
    return code;
}

/* A step over everything; vectors have an element for each channel. */
static int elementwise(pbn_handle *h, const part *p, kind k, char *base, const void *const *tensors,
                       const void *const *channels) {
    const recipe *r = &recipes[k];
    const fold *f = &p->flat;
    const void *pointers[MAX_ARGS];
    int code = PBN_OK;
    for (int64_t first = 0; p->block > 0 && first < p->params && code == PBN_OK; first += p->block)
        code = elementwise_block(h, p, k, base, tensors, channels, first);
    if (p->block > 0)
        return code;
    for (int i = r->tensors; i < r->count; i++) {
        const void *vector = channels[i - r->tensors];
        pointers[i] = vector;
        if (p->wide)
            pointers[i] = repeat(p->params, vector, f->inner, f->group, place(base, p->repeated[i - r->tensors]));
    }
    for (int which = 0; which < 2 && p->steps[k][which] != NULL && code == PBN_OK; which++) {
        const size_t from = which ? (size_t)(f->rows * f->group * f->columns) : 0;
        for (int i = 0; i < r->tensors; i++)
            pointers[i] = (const char *)tensors[i] + from * pbn_item_size(p->memory.dtype);
        code = primitive_run(h, p->steps[k][which], pointers, place(base, p->scratchpad));
    }
    return code;
}

/* A step over one piece. */
static int run_piece(pbn_handle *h, const part *p, kind k, int which, char *base, const void *first,
                     const void *second, const void *third, const void *fourth) {
    const void *pointers[] = {first, second, third, fourth};
    return primitive_run(h, p->steps[k][which], pointers, place(base, p->scratchpad));
}

/* Adds to each channel's sum those of its rows or columns, of which `squares` are the variances and `mean` the mean that
 * their squares are taken around, or NULL for both. */
static void add_up(const part *p, int64_t outer, int64_t inner, double weight, const float *values,
                   const float *squares, const double *mean, double *sums) {
    const int64_t params = p->params;
    for (int64_t o = 0; o < outer; o++, values += params * inner, squares += squares != NULL ? params * inner : 0)
        if (inner == 1 && squares == NULL) /* whole vectors of channels */
            for (int64_t c = 0; c < params; c++)
                sums[c] += weight * values[c];
        else if (inner == 1)
            for (int64_t c = 0; c < params; c++)
                sums[c] += weight * (squares[c] + (values[c] - mean[c]) * (values[c] - mean[c]));
        else
            for (int64_t c = 0; c < params; c++) {
                double sum = 0;
                for (int64_t i = c * inner; i < (c + 1) * inner; i++)
                    sum += squares == NULL ? values[i]
                                           : squares[i] + (values[i] - mean[c]) * (values[i] - mean[c]);
                sums[c] += weight * sum;
            }
}

/* `weighted`: of means, each of as many elements as its row or column has. */
static void add_all(const part *p, int weighted, const float *values, const float *squares, const double *mean,
                    double *sums) {
    const fold *f = &p->fold;
    memset(sums, 0, (size_t)p->params * sizeof *sums);
    if (p->way == ROWS) {
        const int64_t rows = f->columns / p->params / f->inner;
        add_up(p, p->count / f->columns, weighted ? rows : rows * p->segments, weighted ? (double)f->inner : 1, values,
               squares, mean, sums);
        return;
    }
    const int64_t all = f->pieces * sums_of(p, 0);
    add_up(p, f->pieces * f->group, f->inner, weighted ? (double)rows_of(p, 0) : 1, values, squares, mean, sums);
    if (p->lengths[1] > 0)
        add_up(p, 1, f->inner, weighted ? (double)rows_of(p, 1) : 1, values + all,
               squares != NULL ? squares + all : NULL, mean, sums);
}

/* The row of ones that sums columns, of a data type; a row's sum needs none. */
static const void *ones(const part *p, char *base, int dtype) {
    if (p->sums_by != COLUMN_SUMS)
        return NULL;
    const int64_t floats = most_ones(p), count = dtype == PBN_FLOAT32 ? floats : most_rows(p);
    float *to = place(base, p->ones);
    uint16_t *narrow = (uint16_t *)(to + floats);
    for (int64_t i = 0; i < count; i++)
        if (dtype == PBN_FLOAT32)
            to[i] = 1;
        else
            narrow[i] = bf16_of(float_to_bits(1));
    return dtype == PBN_FLOAT32 ? (const void *)to : narrow;
}

/* The sums of a piece's rows or columns. */
static int piece_sums(pbn_handle *h, const part *p, kind k, int which, char *base, const void *tensor,
                      const void *row_of_ones, float *sums) {
    return recipes[k].family == REDUCTION ? run_piece(h, p, k, which, base, tensor, sums, NULL, NULL)
                                          : run_piece(h, p, k, which, base, tensor, row_of_ones, sums, NULL);
}

/* Mean and biased variance of each column of a piece that fills no vectors. `x` may be `squares`. */
static int column_statistics(pbn_handle *h, const part *p, int which, char *base, const void *x, void *squares,
                             const void *row_of_ones, float *means, float *variances) {
    const float rows = (float)rows_of(p, which);
    const int64_t columns = sums_of(p, which);
    int code = piece_sums(h, p, COLUMN_SUMS, which, base, x, row_of_ones, means);
    for (int64_t i = 0; i < columns; i++)
        means[i] /= rows;
    if (code == PBN_OK)
        code = run_piece(h, p, SQUARES, which, base, x, squares, means, NULL);
    if (code == PBN_OK)
        code = piece_sums(h, p, COLUMN_SUMS, which, base, squares, row_of_ones, variances);
    for (int64_t i = 0; i < columns; i++)
        variances[i] /= rows;
    return code;
}

/* Mean and biased variance of each channel, from those of its rows or columns; `y` may be overwritten. */
static int statistics(pbn_handle *h, const part *p, char *base, const void *x, void *y, float *mean, float *variance) {
    const double m = (double)(p->count / p->params);
    const size_t item = pbn_item_size(p->memory.dtype);
    float *means = place(base, p->means), *variances = place(base, p->variances);
    double *middle = place(base, p->sums), *squares = middle + p->params;
    const void *row_of_ones = p->own ? NULL : ones(p, base, PBN_FLOAT32);
    const char *from = x;
    int code = PBN_OK;
    if (p->own) {
        own_statistics(p, base, x, 0, p->params, mean, variance);
        return PBN_OK;
    }
    if (p->product != NOWHERE)
        y = (char *)place(base, p->product) + p->past;
    for (int64_t i = 0, at = 0; i <= p->fold.pieces && code == PBN_OK; i++) {
        const int which = i == p->fold.pieces;
        if (p->lengths[which] == 0)
            break;
        const int by_normalization = is_vectors(p, which);
        const int widen = p->way == FOLDED && !by_normalization && p->memory.dtype != PBN_FLOAT32;
        if (widen)
            code = run_piece(h, p, WIDENED, which, base, from, y, NULL, NULL);
        if (code == PBN_OK)
            code = p->way == ROWS || by_normalization
                       ? run_piece(h, p, by_normalization ? STATISTICS : ROW_STATISTICS, which, base, from, y,
                                   means + at, variances + at)
                       : column_statistics(h, p, which, base, widen ? y : from, y, row_of_ones, means + at,
                                           variances + at);
        from += (size_t)p->lengths[which] * item;
        at += sums_of(p, which);
    }
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

/* Of each channel the sums of (x - mean)*dy and of dy; `dx` may be overwritten. */
static int gradient_sums(pbn_handle *h, const part *p, char *base, const void *x, const void *dy, void *dx,
                         const float *mean, double *dots, double *sums) {
    const fold *f = &p->fold;
    const int by_rows = p->way == ROWS, by_row = by_rows && !p->wide, is_float = p->memory.dtype == PBN_FLOAT32;
    const size_t item = pbn_item_size(p->memory.dtype);
    const void *float_ones = ones(p, base, PBN_FLOAT32), *dy_ones = ones(p, base, p->memory.dtype);
    void *product = p->product != NOWHERE ? (char *)place(base, p->product) + p->past : dx;
    float *of_product = place(base, p->means), *of_dy = place(base, p->variances);
    float *centre = place(base, p->centre), *one_each = place(base, p->each[0]);
    float *around_each = place(base, p->around);
    const float *around = by_row ? each_row(p, mean, around_each)
                                 : repeat(p->params, mean, f->inner, by_rows ? p->flat.group : f->group, around_each);
    int code = PBN_OK;
    for (int64_t i = 0; p->centred && i < p->count / f->inner; i++)
        one_each[i] = 1;
    for (int64_t i = 0, at = 0, done = 0; i <= f->pieces && code == PBN_OK; i++) {
        const int which = i == f->pieces;
        const void *from = (const char *)x + (size_t)done * item, *dy_from = (const char *)dy + (size_t)done * item;
        if (p->lengths[which] == 0)
            break;
        done += p->lengths[which];
        if (is_vectors(p, which)) {
            const void *pointers[] = {from,       dy_from,    product,         around,
                                      float_ones, float_ones, of_product + at, of_dy + at};
            code = primitive_run(h, p->steps[GRADIENT_SUMS][which], pointers, place(base, p->scratchpad));
            at += sums_of(p, which);
            continue;
        }
        code = piece_sums(h, p, OF_DY(p->sums_by), which, base, dy_from, dy_ones, of_dy + at * p->segments);
        if (code == PBN_OK && p->centred) {
            code = run_piece(h, p, CENTRED, which, base, from, centre, around + at, one_each);
        } else if (code == PBN_OK && !is_float) {
            code = run_piece(h, p, WIDENED, which, base, from, product, NULL, NULL);
            from = product;
        }
        if (code == PBN_OK && p->centred)
            code = run_piece(h, p, TIMES, which, base, centre, dy_from, product, NULL);
        else if (code == PBN_OK)
            code = run_piece(h, p, PRODUCT, which, base, from, dy_from, product, by_row ? around + at : around);
        if (code == PBN_OK)
            code = piece_sums(h, p, p->sums_by, which, base, product, float_ones, of_product + at * p->segments);
        at += sums_of(p, which);
    }
    if (code != PBN_OK)
        return code;
    add_all(p, 0, of_product, NULL, NULL, dots);
    add_all(p, 0, of_dy, NULL, NULL, sums);
    return PBN_OK;
}

#define LEAST_FACTOR 0x1p-60f /* whose square's inverse is a normal float */

/* Whether layer normalization can multiply by each channel's factor: it takes the square's inverse of what is above 0. */
static int are_usual(const float *factors, int64_t count) {
    int usual = 1;
    for (int64_t i = 0; i < count; i++)
        usual &= factors[i] >= LEAST_FACTOR && factors[i] <= 1 / LEAST_FACTOR;
    return usual;
}

/* Of factors the variances that layer normalization multiplies so by. */
static void as_variances(const part *p, float *factor) {
    for (int64_t c = 0; c < p->params; c++)
        factor[c] = 1 / (factor[c] * factor[c]);
}

/* dx = (dy - offset)*factor + (x - mean)*slope; a piece's x - mean is made again where there are several. */
static int centred_gradient(pbn_handle *h, const part *p, char *base, const char *x, const char *dy, char *dx,
                            const float *mean, const float *offset, const float *variance, const float *slope) {
    float *one_each = place(base, p->each[0]);
    const float *around = p->own ? each_row(p, mean, place(base, p->around)) : place(base, p->around);
    for (int64_t i = 0; p->own && i < p->count / p->fold.inner; i++)
        one_each[i] = 1;
    const float *u = each_row(p, offset, place(base, p->means)), *v = each_row(p, variance, place(base, p->variances));
    const float *t = each_row(p, slope, place(base, p->each[1]));
    void *centre = place(base, p->centre);
    int code = PBN_OK;
    for (int64_t i = 0, at = 0; i <= p->fold.pieces && code == PBN_OK; i++) {
        const int which = i == p->fold.pieces;
        const size_t from = (size_t)(at * p->fold.inner) * sizeof(float);
        if (p->lengths[which] == 0)
            break;
        if (p->fold.pieces > 1 || p->own)
            code = run_piece(h, p, CENTRED, which, base, x + from, centre, around + at, one_each);
        if (code == PBN_OK)
            code = run_piece(h, p, CENTRED, which, base, dy + from, dx + from, u + at, v + at);
        if (code == PBN_OK)
            code = run_piece(h, p, ADDED, which, base, centre, dx + from, t + at, NULL);
        at += sums_of(p, which);
    }
    return code;
}

/* y = (x - mean)*scale/sqrt(variance + epsilon) + bias. */
static int apply(pbn_handle *h, const part *p, char *base, const void *x, void *y, const float *mean,
                 const float *variance, const void *scale, const void *bias, double epsilon) {
    float *factor = place(base, p->factor);
    for (int64_t c = 0; c < p->params; c++)
        factor[c] = (float)(((const float *)scale)[c] / sqrt(variance[c] + epsilon));
    const void *tensors[] = {x, y}, *vectors[] = {mean, factor, bias};
    if (!p->centred || !are_usual(factor, p->params))
        return elementwise(h, p, APPLY, base, tensors, vectors);
    as_variances(p, factor);
    int code = run_piece(h, p, CENTRED, 0, base, x, y, each_row(p, mean, place(base, p->each[0])),
                         each_row(p, factor, place(base, p->each[1])));
    tensors[0] = y;
    return code == PBN_OK ? elementwise(h, p, SHIFTED, base, tensors, vectors + 2) : code;
}

static int train_by_steps(pbn_handle *h, const part *p, const pbn_call *call, char *base, const void *const *given) {
    void *y = (void *)(uintptr_t)given[1];
    float *mean = (float *)(uintptr_t)given[2], *variance = (float *)(uintptr_t)given[3];
    int code = PBN_OK;
    for (int64_t first = 0; p->in_turn && first < p->params && code == PBN_OK; first += p->block) {
        float *factor = place(base, p->factor);
        const int64_t last = first + p->block < p->params ? first + p->block : p->params;
        const void *vectors[] = {mean, factor, given[5]};
        own_statistics(p, base, given[0], first, last - first, mean, variance);
        for (int64_t c = first; c < last; c++)
            factor[c] = (float)(((const float *)given[4])[c] / sqrt(variance[c] + call->epsilon));
        code = elementwise_block(h, p, APPLY, base, given, vectors, first);
    }
    if (p->in_turn)
        return code;
    code = statistics(h, p, base, given[0], y, mean, variance);
    if (code == PBN_OK && p->whole)
        return primitive_run(h, p->steps[INFERENCE][0], given, place(base, p->scratchpad));
    return code == PBN_OK ? apply(h, p, base, given[0], y, mean, variance, given[4], given[5], call->epsilon) : code;
}

/* With d = x - mean, r = 1/sqrt(variance + epsilon), m elements a channel: dbias = sum dy, dscale = r * sum d*dy,
 * dx = scale*r * (dy - dbias/m - d * r*dscale/m). */
static int backward_by_steps(pbn_handle *h, const part *p, const pbn_call *call, char *base, const void *x,
                             const void *dy, void *dx, const float *mean, const float *variance, float *dscale,
                             float *dbias) {
    const double each = (double)p->params / (double)p->count;
    float *slope = place(base, p->variance), *offset = place(base, p->offset), *factor = place(base, p->factor);
    double *sums = place(base, p->sums), *dots = sums + p->params;
    const void *all[] = {x, dy, dx}, *vectors[] = {mean, slope, offset, factor};
    const int64_t together = p->in_turn ? p->block : p->params;
    int code = p->own ? PBN_OK : gradient_sums(h, p, base, x, dy, dx, mean, dots, sums);
    for (int64_t first = 0; first < p->params && code == PBN_OK; first += together) {
        const int64_t last = first + together < p->params ? first + together : p->params;
        if (p->own)
            own_gradient_sums(p, base, x, dy, first, last - first, mean, dots, sums);
        for (int64_t c = first; c < last; c++) {
            const double r = call->saved_mean != NULL ? ((const float *)call->saved_inv_variance)[c]
                                                      : 1 / sqrt(variance[c] + call->epsilon);
            dbias[c] = (float)sums[c];
            dscale[c] = (float)(r * dots[c]);
            factor[c] = (float)(((const float *)call->scale)[c] * r);
            offset[c] = (float)(-sums[c] * each);
            slope[c] = (float)(-r * r * dots[c] * each); /* over the variance, which is not needed any more */
        }
        if (p->in_turn)
            code = elementwise_block(h, p, GRADIENT, base, all, vectors, first);
    }
    if (code != PBN_OK || p->in_turn)
        return code;
    if (p->steps[ADDED][0] == NULL || !are_usual(factor, p->params))
        return elementwise(h, p, GRADIENT, base, all, vectors);
    for (int64_t c = 0; c < p->params; c++) {
        slope[c] *= factor[c];
        offset[c] = -offset[c];
    }
    as_variances(p, factor);
    return centred_gradient(h, p, base, x, dy, dx, mean, offset, factor, slope);
}
