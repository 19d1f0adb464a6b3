/* What a launch is given; gpu.c fills it, a kernel reads it. Both sources have it, so only C's own types are here. */
#ifndef PYBNORM_NATIVE_ARGUMENTS_H
#define PYBNORM_NATIVE_ARGUMENTS_H

enum { AT_X, AT_Y, AT_W, AT_DX, AT_DZ, PLACES }; /* W: dy in backward, z in forward calls */

typedef struct arguments {
    void *data[PLACES];
    long long row[PLACES], group[PLACES]; /* elements from one row, and from one group, to the next */
    long long span[PLACES];               /* elements from a tensor's first one to its last, and one more */
    const void *scale, *bias;             /* parameters and running statistics are of the dtype PARAM ... */
    void *running_mean, *running_variance, *saved_mean, *saved_inverse, *dscale, *dbias;
    void *stats;                          /* ... and these of the numbers that are computed with: mean, 1/deviation, */
    void *parts;                          /* sum, dot, of each channel; records of parts */
    long long rows, run, channels;        /* rows of a channel, elements of a row; of columns: rows, columns of a group */
    long long count;                      /* elements of a channel */
    long long columns, group_vector, vector_step, repeat; /* columns in all; steps in the vectors of parameters */
    long long tail_rows;                  /* rows that make no whole superrow */
    unsigned vectors, total, per, splits; /* vectors of a row, of a channel, of a part; parts of a channel */
    unsigned superrow, shift;             /* rows taken as one; elements of x's address past a vector's boundary */
    int kind, across;                     /* of finish: 0 rows, 1 any strides, 2 columns; lanes are channels */
    int early;                            /* of tiles: the next launch's blocks have places beside these */
    int activation, reads_y, sums_only, inverse, given; /* given: sums that apply reads are dscale's and dbias' */
    double epsilon, factor, alpha, beta, alpha_param, beta_param, low, high;
    double share, unbiased; /* 1 over the number of values of the statistics; that number over one less */
} arguments;

/* Any strides: axes that are reduced, then axes with parameters of their own, each from the innermost outwards. */
typedef struct axis_list {
    int reduced, kept;
    long long length[16], step[16][PLACES], vector[16];
} axis_list;

#endif
