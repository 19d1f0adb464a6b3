/* What the kernels of kernels.inc are given, and the table of them for a dtype. Part of cpu.c. */
#include "problem.h"

enum { MEAN, A, B, SLOPE, CENTRE, VECTORS }; /* coefficients */
enum { X, Y, DY, DX, DZ, Z = DY };           /* places of tensors in steps */

typedef struct fusion {
    int activation, by_result, in_order, streams; /* columns are summed row by row; the result goes past the cache */
    int rereads;                        /* the result's memory is read, too */
    double low, high, alpha, beta;
} fusion;

/* Rows that are equally far from one another, of one width; of several channels, which are as well, at `apart`. */
typedef struct piece {
    char *at[TENSORS];
    int64_t channels, rows, n;
    const int64_t *apart, *steps; /* elements, by tensor */
    int64_t column;               /* the first one, of those of its cursor; of rows 0 */
} piece;

/* FINISH_GIVEN: coefficients that need no sums, those of inference, of saved statistics and of sums that are given. */
enum { FINISH_TRAINING, FINISH_GRADIENT, FINISH_GIVEN };

/* At most STRIP channels, from their sums to statistics, gradients of parameters and coefficients. */
typedef struct finishing {
    const pbn_call *call;
    int stage;
    int64_t n, at, step;            /* the first one's place in the vectors of parameters, and from one to the next */
    double m, unbiased;             /* elements of each; times the variance, what the running one takes */
    const double *first, *second;   /* means and M2, or the sums of dy and of dy * (x - mean) */
    void *to[VECTORS];              /* coefficients: of each channel `repeat` times, all of them `copies` times */
    int64_t repeat, copies, distance;
} finishing;

/* `by`: coefficients of the piece's columns or channels. */
typedef void near_fn(const piece *, void *about);
typedef void sums_fn(const piece *, const void *const *by, const fusion *, double *first, double *second);
typedef void results_fn(const piece *, const void *const *by, const fusion *);
typedef struct kernels {
    near_fn *near[2]; /* by whether coefficients are of columns ... */
    sums_fn *sums[2];
    results_fn *results[2][2][2]; /* by whether it is backward, the same, and whether anything is fused */
    void (*exact)(const piece *, const void *const *by, const fusion *, double *first, double *second, int columns);
    void (*finish)(const finishing *);
    int (*look)(int64_t n, double count, const double *sum, const double *square);
    void (*settle)(int64_t n, double count, const void *about, double *sum, double *square);
    int lanes; /* numbers of a vector */
} kernels;
