/* y = a*x + b*y in C, from any strides to any, between the types that are computed in. Part of adapter.c. */
#include "problem.h"

static inline float bits_to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t float_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float from_f32(float f) { return f; }
static inline float to_f32(double d) { return (float)d; }
static inline double from_f64(double d) { return d; }
static inline double to_f64(double d) { return d; }
static inline float from_bf16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

/* The float next to d towards zero, its last bit set if d lies beyond: rounding that to 16 bits gives
 * what rounding d itself would, where rounding twice to nearest does not always. */
static inline uint32_t sticky_float_bits(double d) {
    const float f = (float)d;
    return (float_to_bits(f) - (fabs((double)f) > fabs(d))) | (fabs((double)f) != fabs(d));
}

/* The nearest number of 16 bits, of a float's bits. Choices without branches, so that compilers vectorise them. */
static inline uint16_t bf16_of(uint32_t bits) {
    uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest);
}

static inline uint16_t f16_of(uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    /* Below 2^-14: adding 1/2 leaves the multiple of 2^-24 in the low bits, rounded. */
    uint32_t small = float_to_bits(bits_to_float(size) + 0.5f) - 0x3f000000u;
    uint32_t finite = size < 0x38800000u ? small : normal;
    uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u; /* NaN; 2^16 and above */
    return (uint16_t)(sign | (size >= 0x47800000u ? large : finite));
}

static inline uint16_t to_bf16(double d) { return bf16_of(sticky_float_bits(d)); }
static inline uint16_t to_f16(double d) { return f16_of(sticky_float_bits(d)); }

static inline float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, size = h & 0x7fffu;
    uint32_t normal = (size << 13) + (size >= 0x7c00u ? 0x70000000u : 0x38000000u);
    uint32_t small = float_to_bits((float)(int32_t)size * 0x1p-24f); /* subnormals are multiples of 2^-24 */
    return bits_to_float(sign | (size < 0x400u ? small : normal));
}

/* Unit strides apart so that the compiler vectorises them; b = 0 apart so that y is not read. */
#define ROW(name, X, from_x, Y, from_y, to_y)                                                                       \
    static void name(const void *xv, int64_t sx, void *yv, int64_t sy, int64_t n, double a, double b) {             \
        const X *x = (const X *)xv;                                                                                 \
        Y *y = (Y *)yv;                                                                                             \
        if (sx == 1 && sy == 1) {                                                                                   \
            if (b == 0)                                                                                             \
                for (int64_t i = 0; i < n; i++)                                                                     \
                    y[i] = to_y(a * from_x(x[i]));                                                                  \
            else                                                                                                    \
                for (int64_t i = 0; i < n; i++)                                                                     \
                    y[i] = to_y(a * from_x(x[i]) + b * from_y(y[i]));                                               \
        } else if (b == 0)                                                                                          \
            for (int64_t i = 0; i < n; i++)                                                                         \
                y[i * sy] = to_y(a * from_x(x[i * sx]));                                                            \
        else                                                                                                        \
            for (int64_t i = 0; i < n; i++)                                                                         \
                y[i * sy] = to_y(a * from_x(x[i * sx]) + b * from_y(y[i * sy]));                                    \
    }

ROW(row_f32, float, from_f32, float, from_f32, to_f32)
ROW(row_f64, double, from_f64, double, from_f64, to_f64)
ROW(row_f16, uint16_t, from_f16, uint16_t, from_f16, to_f16)
ROW(row_bf16, uint16_t, from_bf16, uint16_t, from_bf16, to_bf16)
ROW(row_f32_to_f16, float, from_f32, uint16_t, from_f16, to_f16)
ROW(row_f32_to_bf16, float, from_f32, uint16_t, from_bf16, to_bf16)
#undef ROW

/* y = x in another type. */
#define CONVERSION(name, X, Y, value)                                                      \
    static void name(const void *xv, int64_t sx, void *yv, int64_t sy, int64_t n) {        \
        const X *restrict x = (const X *)xv;                                               \
        Y *restrict y = (Y *)yv;                                                           \
        if (sx == 1 && sy == 1)                                                            \
            for (int64_t i = 0; i < n; i++)                                                \
                y[i] = value(x[i]);                                                        \
        else                                                                               \
            for (int64_t i = 0; i < n; i++)                                                \
                y[i * sy] = value(x[i * sx]);                                              \
    }
#define F16_OF_FLOAT(f) f16_of(float_to_bits(f))
#define BF16_OF_FLOAT(f) bf16_of(float_to_bits(f))
CONVERSION(f16_to_f32, uint16_t, float, from_f16)
CONVERSION(bf16_to_f32, uint16_t, float, from_bf16)
CONVERSION(f32_to_f16, float, uint16_t, F16_OF_FLOAT)
CONVERSION(f32_to_bf16, float, uint16_t, BF16_OF_FLOAT)
#undef CONVERSION

/* From a type to a type: what is blended has the result's, or is of float32. */
enum { TYPES = PBN_BFLOAT16 + 1 };
static void (*const rows[TYPES][TYPES])(const void *, int64_t, void *, int64_t, int64_t, double, double) = {
    [PBN_FLOAT32] = {row_f32, NULL, row_f32_to_f16, row_f32_to_bf16},
    [PBN_FLOAT64] = {NULL, row_f64},
    [PBN_FLOAT16] = {[PBN_FLOAT16] = row_f16},
    [PBN_BFLOAT16] = {[PBN_BFLOAT16] = row_bf16},
};
static void (*const conversions[TYPES][TYPES])(const void *, int64_t, void *, int64_t, int64_t) = {
    [PBN_FLOAT32] = {NULL, NULL, f32_to_f16, f32_to_bf16}, [PBN_FLOAT16] = {f16_to_f32}, [PBN_BFLOAT16] = {bf16_to_f32}};

/* Rows of up to three tensors of the same dims, along the axis on which the first one's elements lie nearest. */
typedef struct walk {
    axis axes[PBN_MAX_RANK];
    int64_t index[PBN_MAX_RANK], n, steps[3]; /* of the row: elements, and from one to the next */
    char *at[3];
    int64_t item[3];
    int left;
} walk;

static void start_walk(walk *w, const pbn_tensor *const tensors[TENSORS], const void *const data[3]) {
    memset(w, 0, sizeof *w);
    w->left = fold_axes(tensors, 0, w->axes);
    w->n = w->left > 0 ? w->axes[--w->left].length : 1;
    for (int t = 0; t < 3; t++) {
        w->steps[t] = w->n > 1 ? w->axes[w->left].steps[t] : 1;
        w->at[t] = (char *)(uintptr_t)data[t];
        w->item[t] = tensors[t] != NULL ? (int64_t)pbn_item_size(tensors[t]->dtype) : 0;
    }
}

static int next_row(walk *w) {
    for (int i = w->left - 1; i >= 0; i--) {
        const int64_t length = w->axes[i].length;
        const int64_t turns = ++w->index[i] < length ? 1 : 1 - length; /* one on, or back to the axis' start */
        for (int t = 0; t < 3; t++)
            w->at[t] += turns * w->axes[i].steps[t] * w->item[t];
        if (turns == 1)
            return 1;
        w->index[i] = 0;
    }
    return 0;
}

static void blend(int rank, const int64_t *dims, int x_dtype, const void *x, const int64_t *x_strides, double a,
                  int y_dtype, void *y, const int64_t *y_strides, double b) {
    pbn_tensor x_of = {.rank = rank, .dtype = x_dtype}, y_of = {.rank = rank, .dtype = y_dtype};
    const pbn_tensor *const tensors[TENSORS] = {&y_of, &x_of};
    walk w;
    for (int i = 0; i < rank; i++) {
        x_of.dims[i] = y_of.dims[i] = dims[i];
        x_of.strides[i] = x_strides[i], y_of.strides[i] = y_strides[i];
    }
    start_walk(&w, tensors, (const void *const[3]){y, x, NULL});
    const int copies = a == 1 && b == 0, converts = copies && x_dtype != y_dtype;
    do {
        if (converts)
            conversions[x_dtype][y_dtype](w.at[1], w.steps[1], w.at[0], w.steps[0], w.n);
        else if (copies && w.steps[0] == 1 && w.steps[1] == 1)
            memmove(w.at[0], w.at[1], (size_t)(w.n * w.item[0]));
        else
            rows[x_dtype][y_dtype](w.at[1], w.steps[1], w.at[0], w.steps[0], w.n, a, b);
    } while (next_row(&w));
}
