/* Every kind of processor's sums against those in double, for the kinds that this one can run. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PBN_FLOAT32 };

static float from_f32(float f) {
    return f;
}

static float from_bf16(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

#include "sums.c"

static int wrong;

static void expect(const char *what, double got, double wanted, double size, int64_t length) {
    if (!(fabs(got - wanted) <= 2e-6 * size)) {
        printf("%s of %lld: %.9g is not %.9g\n", what, (long long)length, got, wanted);
        wrong++;
    }
}

/* Memory that ends where its elements do, so that a sanitizer sees what is read or written beyond. */
static void check(const kernels *k, int bf16, int64_t rows, int64_t length, float base) {
    const int64_t count = rows * length, item = bf16 ? 2 : 4;
    char *x = malloc((size_t)(count * item)), *dy = malloc((size_t)(count * item));
    float *mean = malloc((size_t)(rows > length ? rows : length) * sizeof *mean);
    double *sums = calloc((size_t)(4 * (rows + length)), sizeof *sums);
    double *dots = sums + rows, *means = dots + rows, *squares = means + rows, *wide = squares + rows;
    for (int64_t i = 0; i < count; i++) {
        const float a = (float)(rand() % 1000) / 256 + base, b = (float)(rand() % 1000) / 512 - 1;
        uint32_t u[2];
        memcpy(u, &a, 4);
        memcpy(u + 1, &b, 4);
        memcpy(x + i * item, (char *)u + 4 - item, (size_t)item);
        memcpy(dy + i * item, (char *)(u + 1) + 4 - item, (size_t)item);
    }
    for (int64_t i = 0; i < rows || i < length; i++)
        mean[i] = 4 + (float)i / 1024;
#define AT(tensor, i) ((double)(bf16 ? from_bf16(((uint16_t *)tensor)[i]) : ((float *)tensor)[i]))
    if (length >= LANES) {
        if (bf16) {
            k->row_gradients_bf16((uint16_t *)x, (uint16_t *)dy, rows, length, mean, dots, sums);
            k->row_moments_bf16((uint16_t *)x, rows, length, 0, means, squares);
        } else {
            k->row_gradients_f32((float *)x, (float *)dy, rows, length, mean, dots, sums);
            k->row_moments_f32((float *)x, rows, length, 0, means, squares);
        }
        for (int64_t r = 0; r < rows; r++) {
            double dot = 0, sum = 0, middle = 0, square = 0, size = 0;
            for (int64_t i = r * length; i < (r + 1) * length; i++) {
                dot += (AT(x, i) - mean[r]) * AT(dy, i);
                sum += AT(dy, i);
                size += fabs((AT(x, i) - mean[r]) * AT(dy, i)) + fabs(AT(dy, i));
                middle += AT(x, i) / (double)length;
            }
            for (int64_t i = r * length; i < (r + 1) * length; i++)
                square += (AT(x, i) - middle) * (AT(x, i) - middle);
            expect("dot of a row", dots[r], dot, size, length);
            expect("sum of a row", sums[r], sum, size, length);
            expect("mean of a row", means[r], middle, middle, length);
            expect("squares of a row", squares[r], square, square, length);
        }
    }
    double *column_dots = wide, *column_sums = wide + length, *column_means = column_sums + length;
    double *column_squares = column_means + length;
    if (length <= TILE) {
        if (bf16) {
            k->column_gradients_bf16((uint16_t *)x, (uint16_t *)dy, rows, length, length, mean, column_dots, column_sums);
            k->column_moments_bf16((uint16_t *)x, rows, length, length, 0, column_means, column_squares);
        } else {
            k->column_gradients_f32((float *)x, (float *)dy, rows, length, length, mean, column_dots, column_sums);
            k->column_moments_f32((float *)x, rows, length, length, 0, column_means, column_squares);
        }
        for (int64_t c = 0; c < length; c++) {
            double dot = 0, sum = 0, middle = 0, square = 0, size = 0;
            for (int64_t i = c; i < count; i += length) {
                dot += (AT(x, i) - mean[c]) * AT(dy, i);
                sum += AT(dy, i);
                size += fabs((AT(x, i) - mean[c]) * AT(dy, i)) + fabs(AT(dy, i));
                middle += AT(x, i) / (double)rows;
            }
            for (int64_t i = c; i < count; i += length)
                square += (AT(x, i) - middle) * (AT(x, i) - middle);
            expect("dot of a column", column_dots[c], dot, size, length);
            expect("sum of a column", column_sums[c], sum, size, length);
            expect("mean of a column", column_means[c], middle, middle, length);
            expect("squares of a column", column_squares[c], square, square + 1e-6, length);
        }
    }
    float *repeated = malloc((size_t)count * sizeof *repeated);
    k->repeat(mean, rows, length, repeated);
    for (int64_t i = 0; i < count; i++)
        expect("repeated", repeated[i], mean[i / length], 0, length);
    free(repeated);
    free(sums);
    free(mean);
    free(dy);
    free(x);
}

int main(void) {
    const int64_t lengths[] = {1, 2, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 1000, 1024, 2047, 2048, 2049, 2063,
                               5000};
    const int64_t rows[] = {1, 3, 8, 29, 64};
    const kernels *const all[] = {&kernels_any,
#if defined(__x86_64__) && defined(__GNUC__)
                                  kernels_here() != &kernels_any ? &kernels_avx2 : NULL,
                                  kernels_here() == &kernels_avx512 ? &kernels_avx512 : NULL
#endif
    };
    int kinds = 0;
    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
        for (size_t i = 0; all[k] != NULL && i < sizeof lengths / sizeof *lengths; i++)
            for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
                check(all[k], 0, rows[j], lengths[i], 3);
                check(all[k], 0, rows[j], lengths[i], 1 << 20); /* means that float32 rounds */
                check(all[k], 1, rows[j], lengths[i], 3);
                kinds |= 1 << k;
            }
    (void)column_gradients, (void)column_moments, (void)repeat;
    printf("kinds %d\n", kinds);
    return wrong > 0;
}
