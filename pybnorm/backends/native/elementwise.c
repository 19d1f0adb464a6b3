/* axpby, fill, ReLU and its gradient over any strides. Part of the adapters of CPU backends. */

static int axpby(pbn_handle *h, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc, *y = call->y_desc;
    (void)h;
    blend(x->rank, x->dims, x->dtype, call->x, x->strides, call->alpha, y->dtype, call->y, y->strides, call->beta);
    return PBN_OK;
}

/* The elements of the innermost axis are written in turn, the other axes counted through. */
static int fill(pbn_handle *h, const pbn_call *call) {
    const pbn_tensor *y = call->y_desc;
    int64_t dims[PBN_MAX_RANK], steps[PBN_MAX_RANK], at[PBN_MAX_RANK] = {0};
    double value; /* room for any of the types */
    int rank = 0, i;
    (void)h;
    const size_t item = pbn_item_size(y->dtype);
    pbn_encode(call->alpha, y->dtype, &value);
    for (i = y->rank - 1; i >= 0; i--) { /* innermost first; axes that continue one another become one */
        if (y->dims[i] == 1)
            continue;
        if (rank > 0 && y->strides[i] == steps[rank - 1] * dims[rank - 1]) {
            dims[rank - 1] *= y->dims[i];
        } else {
            dims[rank] = y->dims[i];
            steps[rank++] = y->strides[i];
        }
    }
    if (rank == 0) {
        dims[0] = steps[0] = 1;
        rank = 1;
    }
    char *to = (char *)call->y;
    do {
        for (int64_t k = 0; k < dims[0]; k++)
            memcpy(to + (size_t)(k * steps[0]) * item, &value, item);
        for (i = 1; i < rank; i++) {
            to += (size_t)steps[i] * item;
            if (++at[i] < dims[i])
                break;
            to -= (size_t)(steps[i] * dims[i]) * item;
            at[i] = 0;
        }
    } while (i < rank);
    return PBN_OK;
}

/* ------------------------------------------------------------------ ReLU */


/* Forward without dy: a NaN stays. Backward: dy where x > 0. */
#define RELU_ROW(name, T, from_x)                                                                                   \
    static void name(const void *xv, int64_t sx, const void *dyv, int64_t sdy, void *outv, int64_t so, int64_t n) { \
        const T *x = (const T *)xv, *dy = (const T *)dyv;                                                           \
        T *out = (T *)outv;                                                                                         \
        if (dy == NULL)                                                                                             \
            for (int64_t i = 0; i < n; i++)                                                                         \
                out[i * so] = from_x(x[i * sx]) <= 0 ? (T)0 : x[i * sx];                                            \
        else                                                                                                        \
            for (int64_t i = 0; i < n; i++)                                                                         \
                out[i * so] = from_x(x[i * sx]) > 0 ? dy[i * sdy] : (T)0;                                           \
    }

RELU_ROW(relu_row_f32, float, from_f32)
RELU_ROW(relu_row_f64, double, from_f64)
RELU_ROW(relu_row_f16, uint16_t, from_f16)
RELU_ROW(relu_row_bf16, uint16_t, from_bf16)
#undef RELU_ROW

/* Rows of one axis, the longest that is contiguous to itself in all three memories; `dy` may be NULL. */
static void relu_rows(const pbn_tensor *x, const void *xv, const pbn_tensor *dy, const void *dyv, const pbn_tensor *out,
                      void *outv) {
    void (*const row)(const void *, int64_t, const void *, int64_t, void *, int64_t, int64_t) =
        x->dtype == PBN_FLOAT32   ? relu_row_f32
        : x->dtype == PBN_FLOAT64 ? relu_row_f64
        : x->dtype == PBN_FLOAT16 ? relu_row_f16
                                  : relu_row_bf16;
    const int64_t item = (int64_t)pbn_item_size(x->dtype), *sd = dyv != NULL ? dy->strides : x->strides;
    int64_t n[PBN_MAX_RANK], s[PBN_MAX_RANK][3], at[PBN_MAX_RANK] = {0};
    int order[PBN_MAX_RANK], axes = 0, merged = 0;
    for (int i = 0; i < out->rank; i++) { /* innermost first, by the output's stride */
        if (out->dims[i] == 1)
            continue;
        int j = axes++;
        for (; j > 0 && out->strides[order[j - 1]] > out->strides[i]; j--)
            order[j] = order[j - 1];
        order[j] = i;
    }
    for (int i = 0; i < axes; i++) {
        const int axis = order[i], below = merged - 1;
        const int64_t steps[] = {x->strides[axis], sd[axis], out->strides[axis]};
        if (merged > 0 && steps[0] == s[below][0] * n[below] && steps[1] == s[below][1] * n[below] &&
            steps[2] == s[below][2] * n[below]) {
            n[below] *= out->dims[axis];
            continue;
        }
        n[merged] = out->dims[axis];
        memcpy(s[merged++], steps, sizeof steps);
    }
    if (merged == 0) {
        n[0] = s[0][0] = s[0][1] = s[0][2] = 1;
        merged = 1;
    }
    const char *px = (const char *)xv, *pd = (const char *)dyv;
    char *po = (char *)outv;
    int i;
    do {
        row(px, s[0][0], pd, s[0][1], po, s[0][2], n[0]);
        for (i = 1; i < merged; i++) {
            const int64_t turns = ++at[i] < n[i] ? 1 : 1 - n[i]; /* one on, or back to the axis' start */
            px += turns * s[i][0] * item;
            if (pd != NULL)
                pd += turns * s[i][1] * item;
            po += turns * s[i][2] * item;
            if (turns == 1)
                break;
            at[i] = 0;
        }
    } while (i < merged);
}

static int relu(pbn_handle *h, const pbn_call *call) {
    (void)h;
    relu_rows(call->x_desc, call->x, NULL, NULL, call->y_desc, call->y);
    return PBN_OK;
}

static int relu_backward(pbn_handle *h, const pbn_call *call) {
    (void)h;
    relu_rows(call->x_desc, call->x, call->dy_desc, call->dy, call->dx_desc, call->dx);
    return PBN_OK;
}
