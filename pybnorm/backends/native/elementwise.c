/* axpby, fill, ReLU and its gradient over any strides. Part of the adapters of CPU backends. */

static int axpby(pbn_handle *h, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc, *y = call->y_desc;
    (void)h;
    blend(x->rank, x->dims, x->dtype, call->x, x->strides, call->alpha, y->dtype, call->y, y->strides, call->beta);
    return PBN_OK;
}

static int fill(pbn_handle *h, const pbn_call *call) {
    const pbn_tensor *const tensors[TENSORS] = {call->y_desc};
    double value; /* room for any of the types */
    walk w;
    (void)h;
    pbn_encode(call->alpha, call->y_desc->dtype, &value);
    start_walk(&w, tensors, (const void *const[3]){call->y});
    do
        for (int64_t k = 0; k < w.n; k++)
            memcpy(w.at[0] + k * w.steps[0] * w.item[0], &value, (size_t)w.item[0]);
    while (next_row(&w));
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

static int relu(pbn_handle *h, const pbn_call *call) {
    const int gradient = call->operation == PBN_OP_RELU_BACKWARD;
    static void (*const row[])(const void *, int64_t, const void *, int64_t, void *, int64_t, int64_t) = {
        relu_row_f32, relu_row_f64, relu_row_f16, relu_row_bf16};
    const pbn_tensor *const tensors[TENSORS] = {gradient ? call->dx_desc : call->y_desc, call->x_desc, call->dy_desc};
    walk w;
    (void)h;
    start_walk(&w, tensors, (const void *const[3]){gradient ? call->dx : call->y, call->x, call->dy});
    do
        row[call->x_desc->dtype](w.at[1], w.steps[1], w.at[2], w.steps[2], w.at[0], w.steps[0], w.n);
    while (next_row(&w));
    return PBN_OK;
}
