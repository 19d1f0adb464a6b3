/* The sums over tensors that statistics and gradients are made of, in C. Part of adapter.c.
 *
 * oneDNN has no call for the sums of products of two tensors' rows, and none for moments that does not write the tensor
 * normalized, too: its primitives take two to four passes for one.
 *
 * Sums are of chains of at most CHAIN terms in float32, which are added up in double. Moments are around the mean of a
 * block, and corrected for what rounding left of it. */

#define LANES 16
#define CHAIN 32
#define TILE 1024           /* columns whose sums the first cache holds beside their tensors */
#define STREAMS 8           /* rows that are read at a time */
#define BLOCK (CHAIN * 4 * LANES) /* elements of a row: four vectors' chains */

typedef float lanes __attribute__((vector_size(64)));
typedef uint32_t lane_bits __attribute__((vector_size(64)));
typedef float loose_f32 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t loose_bits __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t loose_u16 __attribute__((vector_size(32), aligned(2), may_alias));

/* A vector of it from `LANES - n` on keeps the last n lanes. */
static const uint32_t last_lanes[2 * LANES] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                               ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u,
                                               ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};

#define LOAD_f32(at) ((lanes)*(const loose_f32 *)(at))
#define LOAD_bf16(at) ((lanes)(__builtin_convertvector(*(const loose_u16 *)(at), lane_bits) << 16))
#define MASKED(v, mask) ((lanes)((lane_bits)(v) & (mask)))

/* The sum of a vector's lanes, as a tree. */
#ifdef __clang__
#define TURNED(v, n)                                                                                                \
    __builtin_shufflevector(v, v, n, (n) + 1, (n) + 2, (n) + 3, (n) + 4, (n) + 5, (n) + 6, (n) + 7, (n) + 8,        \
                            ((n) + 9) % 16, ((n) + 10) % 16, ((n) + 11) % 16, ((n) + 12) % 16, ((n) + 13) % 16,     \
                            ((n) + 14) % 16, ((n) + 15) % 16)
#else
#define TURNED(v, n)                                                                                                \
    __builtin_shuffle(v, (lane_bits){n, (n) + 1, (n) + 2, (n) + 3, (n) + 4, (n) + 5, (n) + 6, (n) + 7, (n) + 8,     \
                                     (n) + 9, (n) + 10, (n) + 11, (n) + 12, (n) + 13, (n) + 14, (n) + 15})
#endif
#define TOTAL(v, total)        \
    do {                       \
        lanes v_ = (v);        \
        v_ += TURNED(v_, 8);   \
        v_ += TURNED(v_, 4);   \
        v_ += TURNED(v_, 2);   \
        v_ += TURNED(v_, 1);   \
        total += (double)v_[0]; \
    } while (0)

/* The vectors of the elements [at, at + n) of a row: whole ones in turns of four, and the last with a mask, whose first
 * lanes are of elements before. A row has LANES elements or more. */
#define EACH_VECTOR(n, BODY)                                                                                \
    do {                                                                                                    \
        int64_t i_ = 0;                                                                                     \
        for (; i_ + 4 * LANES <= (n); i_ += 4 * LANES) {                                                    \
            BODY(i_, 0)                                                                                     \
            BODY(i_ + LANES, 1)                                                                             \
            BODY(i_ + 2 * LANES, 2)                                                                         \
            BODY(i_ + 3 * LANES, 3)                                                                         \
        }                                                                                                   \
        for (; i_ + LANES <= (n); i_ += LANES)                                                              \
            BODY(i_, 0)                                                                                     \
    } while (0)

/* Of each of `channels` rows of `length` elements the sums of (x - mean)*dy and of dy, added. */
#define ROW_GRADIENTS(T, C, name, target)                                                                                 \
    target static void row_gradients_##T##name(const C *x, const C *dy, int64_t channels, int64_t length, \
                                                 const float *mean, double *dots, double *sums) {           \
        for (int64_t c = 0; c < channels; c++, x += length, dy += length) {                                 \
            const lanes u = mean[c] - (lanes){0};                                                           \
            for (int64_t at = 0; at < length; at += BLOCK) {                                                \
                const int64_t n = length - at < BLOCK ? length - at : BLOCK, whole = n / LANES * LANES;     \
                const C *px = x + at, *pd = dy + at;                                                        \
                lanes dot[4] = {{0}}, sum[4] = {{0}};                                                       \
                EACH_VECTOR(n, GRADIENT_VECTOR_##T);                                                        \
                if (n > whole) {                                                                            \
                    const lane_bits mask = *(const loose_bits *)(last_lanes + n - whole);                   \
                    const lanes d = MASKED(LOAD_##T(pd + n - LANES), mask);                                 \
                    dot[3] += MASKED(LOAD_##T(px + n - LANES) - u, mask) * d;                               \
                    sum[3] += d;                                                                            \
                }                                                                                           \
                TOTAL((dot[0] + dot[1]) + (dot[2] + dot[3]), dots[c]);                                      \
                TOTAL((sum[0] + sum[1]) + (sum[2] + sum[3]), sums[c]);                                      \
            }                                                                                               \
        }                                                                                                   \
    }
#define GRADIENT_VECTOR(T, i, k)              \
    {                                         \
        const lanes d = LOAD_##T(pd + (i));   \
        dot[k] += (LOAD_##T(px + (i)) - u) * d; \
        sum[k] += d;                          \
    }
#define GRADIENT_VECTOR_f32(i, k) GRADIENT_VECTOR(f32, i, k)
#define GRADIENT_VECTOR_bf16(i, k) GRADIENT_VECTOR(bf16, i, k)

/* Means, and sums of squares around them, of `before` elements each become those of n more, of which the sums around c. */
#define MERGE(before, n, c, sum, square, mean, squares)                                       \
    do {                                                                                      \
        const double off_ = (sum) / (double)(n), delta_ = (double)(c) + off_ - (mean);        \
        const double part_ = (double)(n) / (double)((before) + (n));                          \
        (squares) += ((square) - (sum)*off_) + delta_ * delta_ * (double)(before) * part_;    \
        (mean) += delta_ * part_;                                                             \
    } while (0)

/* Of each of `channels` rows the mean and the sum of squares around it, merged into those of `before` elements. */
#define ROW_MOMENTS(T, C, name, target)                                                                                     \
    target static void row_moments_##T##name(const C *x, int64_t channels, int64_t length, int64_t before,  \
                                               double *mean, double *squares) {                               \
        for (int64_t c = 0; c < channels; c++, x += length) {                                                 \
            for (int64_t at = 0; at < length; at += BLOCK) {                                                  \
                const int64_t n = length - at < BLOCK ? length - at : BLOCK, whole = n / LANES * LANES;       \
                const lane_bits mask = *(const loose_bits *)(last_lanes + n - whole);                         \
                const C *px = x + at;                                                                         \
                double first = 0, off = 0, square = 0;                                                        \
                lanes sum[4] = {{0}}, rest[4] = {{0}}, around[4] = {{0}};                                     \
                EACH_VECTOR(n, SUM_VECTOR_##T);                                                               \
                if (n > whole)                                                                                \
                    sum[3] += MASKED(LOAD_##T(px + n - LANES), mask);                                         \
                TOTAL((sum[0] + sum[1]) + (sum[2] + sum[3]), first);                                          \
                const float centre = (float)(first / (double)n);                                              \
                const lanes u = centre - (lanes){0};                                                          \
                EACH_VECTOR(n, MOMENT_VECTOR_##T);                                                            \
                if (n > whole) {                                                                              \
                    const lanes d = MASKED(LOAD_##T(px + n - LANES) - u, mask);                               \
                    rest[3] += d;                                                                             \
                    around[3] += d * d;                                                                       \
                }                                                                                             \
                TOTAL((rest[0] + rest[1]) + (rest[2] + rest[3]), off);                                        \
                TOTAL((around[0] + around[1]) + (around[2] + around[3]), square);                             \
                MERGE(before + at, n, centre, off, square, mean[c], squares[c]);                              \
            }                                                                                                 \
        }                                                                                                     \
    }
#define SUM_VECTOR_f32(i, k) sum[k] += LOAD_f32(px + (i));
#define SUM_VECTOR_bf16(i, k) sum[k] += LOAD_bf16(px + (i));
#define MOMENT_VECTOR(T, i, k)                  \
    {                                           \
        const lanes d = LOAD_##T(px + (i)) - u; \
        rest[k] += d;                           \
        around[k] += d * d;                     \
    }
#define MOMENT_VECTOR_f32(i, k) MOMENT_VECTOR(f32, i, k)
#define MOMENT_VECTOR_bf16(i, k) MOMENT_VECTOR(bf16, i, k)

/* Of each of `width` columns of `rows` rows, a chain, the sums of (x - mean)*dy and of dy, added to `dots` and `sums`. */
#define COLUMN_GRADIENTS(T, C, name, target)                                                                                  \
    target static void column_gradients_##T##name(const C *x, const C *dy, int64_t rows, int64_t stride,      \
                                                    int64_t width, const float *mean, double *dots,             \
                                                    double *sums) {                                             \
        float dot[TILE], sum[TILE];                                                                             \
        memset(dot, 0, (size_t)width * sizeof *dot);                                                            \
        memset(sum, 0, (size_t)width * sizeof *sum);                                                            \
        for (; rows >= STREAMS; rows -= STREAMS, x += STREAMS * stride, dy += STREAMS * stride)                 \
            for (int64_t i = 0; i < width; i++) {                                                               \
                const float u = mean[i];                                                                        \
                float a = 0, b = 0;                                                                             \
                for (int r = 0; r < STREAMS; r++) {                                                             \
                    const float d = from_##T(dy[r * stride + i]);                                               \
                    a += (from_##T(x[r * stride + i]) - u) * d;                                                 \
                    b += d;                                                                                     \
                }                                                                                               \
                dot[i] += a;                                                                                    \
                sum[i] += b;                                                                                    \
            }                                                                                                   \
        for (; rows > 0; rows--, x += stride, dy += stride)                                                     \
            for (int64_t i = 0; i < width; i++) {                                                               \
                const float d = from_##T(dy[i]);                                                                \
                dot[i] += (from_##T(x[i]) - mean[i]) * d;                                                       \
                sum[i] += d;                                                                                    \
            }                                                                                                   \
        for (int64_t i = 0; i < width; i++) {                                                                   \
            dots[i] += dot[i];                                                                                  \
            sums[i] += sum[i];                                                                                  \
        }                                                                                                       \
    }

/* Of each of `width` columns of `rows` rows, a chain, mean and sum of squares, merged into those of `before` rows. */
#define COLUMN_MOMENTS(T, C, name, target)                                                                                    \
    target static void column_moments_##T##name(const C *x, int64_t rows, int64_t stride, int64_t width,      \
                                                  int64_t before, double *mean, double *squares) {              \
        float centre[TILE], off[TILE], square[TILE];                                                            \
        int64_t row = 0;                                                                                        \
        memset(centre, 0, (size_t)width * sizeof *centre);                                                      \
        memset(off, 0, (size_t)width * sizeof *off);                                                            \
        memset(square, 0, (size_t)width * sizeof *square);                                                      \
        for (const C *p = x; row + STREAMS <= rows; row += STREAMS, p += STREAMS * stride)                      \
            for (int64_t i = 0; i < width; i++) {                                                               \
                float a = 0;                                                                                    \
                for (int r = 0; r < STREAMS; r++)                                                               \
                    a += from_##T(p[r * stride + i]);                                                           \
                centre[i] += a;                                                                                 \
            }                                                                                                   \
        for (const C *p = x + row * stride; row < rows; row++, p += stride)                                     \
            for (int64_t i = 0; i < width; i++)                                                                 \
                centre[i] += from_##T(p[i]);                                                                    \
        for (int64_t i = 0; i < width; i++)                                                                     \
            centre[i] /= (float)rows;                                                                           \
        row = 0;                                                                                                \
        for (const C *p = x; row + STREAMS <= rows; row += STREAMS, p += STREAMS * stride)                      \
            for (int64_t i = 0; i < width; i++) {                                                               \
                const float u = centre[i];                                                                      \
                float a = 0, b = 0;                                                                             \
                for (int r = 0; r < STREAMS; r++) {                                                             \
                    const float d = from_##T(p[r * stride + i]) - u;                                            \
                    a += d;                                                                                     \
                    b += d * d;                                                                                 \
                }                                                                                               \
                off[i] += a;                                                                                    \
                square[i] += b;                                                                                 \
            }                                                                                                   \
        for (const C *p = x + row * stride; row < rows; row++, p += stride)                                     \
            for (int64_t i = 0; i < width; i++) {                                                               \
                const float d = from_##T(p[i]) - centre[i];                                                     \
                off[i] += d;                                                                                    \
                square[i] += d * d;                                                                             \
            }                                                                                                   \
        for (int64_t i = 0; i < width; i++)                                                                     \
            MERGE(before, rows, centre[i], (double)off[i], (double)square[i], mean[i], squares[i]);             \
    }

/* Each value `times` times. A vector's end is written over by the next value, and the last by one of their own. */
#define REPEAT(name, target)                                                                                  \
    target static void repeat##name(const float *values, int64_t count, int64_t times, float *to) {           \
        for (int64_t c = 0; c < count; c++, to += times) {                                                    \
            const lanes v = values[c] - (lanes){0};                                                           \
            if (times < LANES && (count - c) * times < LANES) {                                               \
                for (int64_t i = 0; i < times; i++)                                                           \
                    to[i] = values[c];                                                                        \
                continue;                                                                                     \
            }                                                                                                 \
            *(loose_f32 *)to = v;                                                                             \
            for (int64_t i = LANES; i < times; i += LANES)                                                    \
                *(loose_f32 *)(to + (i + LANES <= times ? i : times - LANES)) = v;                            \
        }                                                                                                     \
    }

/* The functions for one kind of processor, and their table. */
#define KERNELS(name, target)                           \
    ROW_GRADIENTS(f32, float, name, target)             \
    ROW_GRADIENTS(bf16, uint16_t, name, target)         \
    ROW_MOMENTS(f32, float, name, target)               \
    ROW_MOMENTS(bf16, uint16_t, name, target)           \
    COLUMN_GRADIENTS(f32, float, name, target)          \
    COLUMN_GRADIENTS(bf16, uint16_t, name, target)      \
    COLUMN_MOMENTS(f32, float, name, target)            \
    COLUMN_MOMENTS(bf16, uint16_t, name, target)        \
    REPEAT(name, target)                                \
    static const kernels kernels##name = {repeat##name,               row_gradients_f32##name,    row_gradients_bf16##name,    row_moments_f32##name,    \
                                          row_moments_bf16##name,     column_gradients_f32##name,  column_gradients_bf16##name, \
                                          column_moments_f32##name,   column_moments_bf16##name};

typedef struct kernels {
    void (*repeat)(const float *, int64_t, int64_t, float *);
    void (*row_gradients_f32)(const float *, const float *, int64_t, int64_t, const float *, double *, double *);
    void (*row_gradients_bf16)(const uint16_t *, const uint16_t *, int64_t, int64_t, const float *, double *, double *);
    void (*row_moments_f32)(const float *, int64_t, int64_t, int64_t, double *, double *);
    void (*row_moments_bf16)(const uint16_t *, int64_t, int64_t, int64_t, double *, double *);
    void (*column_gradients_f32)(const float *, const float *, int64_t, int64_t, int64_t, const float *, double *,
                                 double *);
    void (*column_gradients_bf16)(const uint16_t *, const uint16_t *, int64_t, int64_t, int64_t, const float *,
                                  double *, double *);
    void (*column_moments_f32)(const float *, int64_t, int64_t, int64_t, int64_t, double *, double *);
    void (*column_moments_bf16)(const uint16_t *, int64_t, int64_t, int64_t, int64_t, double *, double *);
} kernels;

KERNELS(_any, )
#if defined(__x86_64__) && defined(__GNUC__)
KERNELS(_avx2, __attribute__((target("avx2,fma"))))
KERNELS(_avx512, __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

/* Those for this processor. */
static const kernels *kernels_here(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return &kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &kernels_avx2;
#endif
    return &kernels_any;
}

/* Each channel's value `inner` times, all that `group` times. */
static const float *repeat(int64_t params, const float *channels, int64_t inner, int64_t group, float *to) {
    const int64_t columns = params * inner;
    if (inner == 1)
        memcpy(to, channels, (size_t)columns * sizeof *to);
    else
        kernels_here()->repeat(channels, params, inner, to);
    for (int64_t g = 1; g < group; g++)
        memcpy(to + g * columns, to, (size_t)columns * sizeof *to);
    return to;
}

/* Columns from `first` to `last` of packed memory of so many elements, as rows of `width`, the last of which may have
 * fewer: in blocks of a chain's rows, of tiles. */
#define EACH_TILE(count, width, first, last, CALL)                                                             \
    do {                                                                                                       \
        const int64_t whole_ = (count) / (width), left_ = (count) % (width) < (last) ? (count) % (width) : (last);  \
        for (int64_t row = 0; row < whole_; row += 2 * CHAIN)                                                  \
            for (int64_t at = (first); at < (last); at += TILE)                                                \
                CALL(row, row + 2 * CHAIN < whole_ ? 2 * CHAIN : whole_ - row, at,                             \
                     at + TILE < (last) ? TILE : (last)-at);                                                   \
        for (int64_t row = whole_, at = (first); at < left_; at += TILE)                                       \
            CALL(row, 1, at, at + TILE < left_ ? TILE : left_ - at);                                           \
    } while (0)

static void column_gradients(int dtype, const void *x, const void *dy, int64_t count, int64_t width, int64_t first,
                             int64_t last, const float *mean, double *dots, double *sums) {
    const kernels *own = kernels_here();
#define GRADIENT_TILE(row, rows, at, n)                                                                            \
    if (dtype == PBN_FLOAT32)                                                                                      \
        own->column_gradients_f32((const float *)x + (row)*width + (at), (const float *)dy + (row)*width + (at), rows,  \
                             width, n, mean + (at), dots + (at), sums + (at));                                     \
    else                                                                                                           \
        own->column_gradients_bf16((const uint16_t *)x + (row)*width + (at), (const uint16_t *)dy + (row)*width + (at), \
                              rows, width, n, mean + (at), dots + (at), sums + (at))
    memset(dots + first, 0, (size_t)(last - first) * sizeof *dots);
    memset(sums + first, 0, (size_t)(last - first) * sizeof *sums);
    EACH_TILE(count, width, first, last, GRADIENT_TILE);
#undef GRADIENT_TILE
}

static void column_moments(int dtype, const void *x, int64_t count, int64_t width, int64_t first, int64_t last,
                           double *mean, double *squares) {
    const kernels *own = kernels_here();
#define MOMENT_TILE(row, rows, at, n)                                                                                \
    if (dtype == PBN_FLOAT32)                                                                                        \
        own->column_moments_f32((const float *)x + (row)*width + (at), rows, width, n, row, mean + (at), squares + (at)); \
    else                                                                                                             \
        own->column_moments_bf16((const uint16_t *)x + (row)*width + (at), rows, width, n, row, mean + (at), squares + (at))
    memset(mean + first, 0, (size_t)(last - first) * sizeof *mean);
    memset(squares + first, 0, (size_t)(last - first) * sizeof *squares);
    EACH_TILE(count, width, first, last, MOMENT_TILE);
#undef MOMENT_TILE
}
