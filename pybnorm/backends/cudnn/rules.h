#ifndef PYBNORM_CUDNN_RULES_H
#define PYBNORM_CUDNN_RULES_H

/* What "auto" takes, by device: the first rule of the table that fits and can be built.
 *
 * Why there are rules at all: cuDNN has several ways for one call and chooses none. Its plain entry points read
 * channels-last memory by kernels made for channels-first; Ex and the graph have kernels of their own for it, and which of
 * these two is faster turns at some number of channels. Over channels-first memory the plain kernels give each channel to
 * one block of threads, so that few channels, or large maps, leave most of the device idle: columns and rows cut a channel
 * into parts. Tensors that fit in the cache (the bounds in megabytes) have other winners, since there the launch counts and
 * not the memory. The bounds are where measured times cross, on the device and versions that the table names; a rule's
 * `why` has what it gains and is what `Plan.reason` shows.
 *
 * The results of every rule but
 * those for "fast" stay within the stable class of the error bound. Which ways give the same bits at every call is said in
 * plans.c (`repeats`): sums of the others differ in their last digits on large maps. Backward without saved statistics has the thresholds of the same ways with them: either reads x
 * once more.
 */
#include "pybnorm/shim.h"

#define HALVES (1u << PBN_FLOAT16 | 1u << PBN_BFLOAT16)
#define SINGLE (1u << PBN_FLOAT32)
#define ANY_DTYPE (HALVES | SINGLE | 1u << PBN_FLOAT64)

typedef struct rule {
    int operation;
    uint32_t dtypes;
    int layout; /* pbn_layout of all tensors, ANY_LAYOUT, SLOW_VIEW, or WHOLE_ROWS: FIRST, S of 16 bytes, rows enough */
    int saved;  /* 1: with saved statistics only, -1: without only */
    int fast;   /* 1: for "fast" only */
    int64_t rows_from, channels_from, channels_to, size_from; /* N, C, positions of a channel in one image */
    int64_t megabytes_from, megabytes_to;                     /* of x */
    const char *algorithm, *why;
} rule;

enum { FIRST = PBN_CHANNELS_FIRST, LAST = PBN_CHANNELS_LAST, ANY_LAYOUT = -1, SLOW_VIEW = -2, WHOLE_ROWS = -3 };
#define MOST INT64_MAX

static const char persistent_why[] =
    "up to 7 times faster than spatial, but sums in fixed point: the absolute error of a gradient is about 2e-6 for "
    "800000 values, and values below 1e-5 or above 1e10 lose their digits";
static const char rows_why[] =
    "up to 1.2 times faster than columns or persistent, without the latter's limits of range; but less exact than "
    "columns where a channel begins with a value far from its others";
static const char moments_last_why[] =
    "computes the statistics that are not saved first, by sums that write no y, for kernels made for channels-last: 3 to "
    "60 times faster than the plain entry point, f16 256x256x28x28 in 244 us in place of 12442";
static const char moments_first_why[] =
    "computes the statistics that are not saved first, as in forward: 1.1 to 5 times faster than the plain entry point, "
    "256x64x112x112 in 1669 us in place of 5675 in f32, 1111 in place of 5445 in f16";
static const char moments_rows_why[] =
    "computes the statistics that are not saved first, as in forward: 1.2 to 1.4 times faster than columns; but less "
    "exact where a channel begins with a value far from its others";
static const char packed_why[] =
    "packed copies through fast kernels: 7 to 18 times faster than the plain entry point's uncoalesced ones";

static const rule h200_rules[] = {
    /* channels-last */
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, 0, 0, 0, 0, MOST, 0, 0, 8, "pointwise",
     "one fused kernel, and the heuristic's own choice is the fastest of its plans in L2"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, 0, 0, 0, 128, MOST, 0, 0, MOST, "pointwise:1",
     "one fused kernel at 70 to 89 % of the copy ceiling, where the plain entry point's channels-last kernel reaches 35 "
     "to 66 % and errs by 4e-4 at mean/sigma = 1e4"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, 0, 0, 0, 0, MOST, 0, 0, MOST, "pointwise:2",
     "as with more channels, where the next plan is the faster one"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, 0, 0, 0, 0, MOST, 0, 0, MOST, "pointwise",
     "as with more channels; a version with fewer plans"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, 1, 0, 0, 512, MOST, 0, 0, MOST, "graph",
     "1.2 to 1.6 times faster than Ex from 512 channels on"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, 1, 0, 0, 0, MOST, 0, 0, 8, "graph", "1.2 times faster than Ex in L2"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, 1, 0, 0, 128, MOST, 0, 0, MOST, "graph",
     "1.1 to 1.5 times faster than Ex from 128 channels on"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, 1, 0, 0, 0, MOST, 0, 256, MOST, "graph",
     "1.04 times faster than Ex on large maps"},
    {PBN_OP_BACKWARD, SINGLE, LAST, 1, 0, 0, 512, MOST, 0, 0, MOST, "graph",
     "1.1 times faster than Ex from 512 channels on"},
    {PBN_OP_BACKWARD, HALVES, LAST, 1, 0, 0, 128, MOST, 0, 0, MOST, "graph", "up to 1.6 times faster than Ex"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, 1, 0, 0, 0, MOST, 0, 0, MOST, "ex",
     "16 to 76 times faster than the plain entry point, whose channels-last kernels are the channels-first ones"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, 1, 0, 0, 0, MOST, 0, 0, MOST, "ex",
     "16 to 76 times faster than the plain entry point, whose channels-last kernels are the channels-first ones"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, 0, 0, 0, 0, MOST, 0, 0, MOST, "graph",
     "without saved statistics Ex falls to a slow kernel; the graph writes them to the workspace"},
    {PBN_OP_BACKWARD, SINGLE, LAST, -1, 0, 0, 512, MOST, 0, 0, MOST, "graph", moments_last_why},
    {PBN_OP_BACKWARD, HALVES, LAST, -1, 0, 0, 128, MOST, 0, 0, MOST, "graph", moments_last_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, -1, 0, 0, 0, MOST, 0, 0, MOST, "ex", moments_last_why},
    /* channels-first */
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, 0, 1, 0, 0, MOST, 0, 0, MOST, "persistent", persistent_why},
    {PBN_OP_BACKWARD, SINGLE, WHOLE_ROWS, 1, 1, 0, 0, MOST, 2048, 64, MOST, "rows:1", rows_why},
    {PBN_OP_BACKWARD, HALVES, WHOLE_ROWS, 1, 1, 0, 0, MOST, 8192, 64, MOST, "rows:1", rows_why},
    {PBN_OP_BACKWARD, HALVES, FIRST, 1, 1, 0, 0, MOST, 0, 0, MOST, "persistent", persistent_why},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, WHOLE_ROWS, 0, 0, 0, 0, MOST, 8192, 32, MOST, "rows:1",
     "71 to 91 % of the copy ceiling on images of millions of values, where the plain entry point reaches 14 to 73 %"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, 0, 0, 0, 0, MOST, 0, 32, MOST, "columns:1",
     "68 to 79 % of the copy ceiling, where the plain entry point reaches 8 to 72 %"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, 0, 0, 0, 0, 96, 4096, 64, MOST, "columns:1",
     "with fewer channels than multiprocessors spatial leaves some idle: 2 to 4.9 times faster"},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, 0, 0, 0, 0, MOST, 512, 128, MOST, "columns:1", "1.2 to 1.5 times faster"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, 1, 0, 0, 0, MOST, 2048, 64, MOST, "columns:1",
     "1.2 to 6 times faster than spatial on large maps"},
    {PBN_OP_BACKWARD, SINGLE, WHOLE_ROWS, -1, 1, 0, 0, MOST, 2048, 64, MOST, "rows:1", moments_rows_why},
    {PBN_OP_BACKWARD, HALVES, WHOLE_ROWS, -1, 1, 0, 0, MOST, 8192, 64, MOST, "rows:1", moments_rows_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, -1, 0, 0, 0, MOST, 2048, 64, MOST, "columns:1", moments_first_why},
    {PBN_OP_BACKWARD, SINGLE, FIRST, 1, 1, 0, 0, 96, 16384, 32, MOST, "persistent", persistent_why},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, 1, 0, 0, 0, 96, 16384, 32, MOST, "graph",
     "images too large for columns: through a channels-last copy 1.9 times faster than spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, 1, 0, 0, 0, 96, 16384, 32, MOST, "graph",
     "images too large for columns: through a channels-last copy 1.9 to 2.6 times faster than spatial"},
    /* strided views, channels-last float64 */
    {PBN_OP_FORWARD_TRAINING, ANY_DTYPE, SLOW_VIEW, 0, 0, 0, 0, MOST, 0, 4, MOST, "dense", packed_why},
    {PBN_OP_FORWARD_INFERENCE, ANY_DTYPE, SLOW_VIEW, 0, 0, 0, 0, MOST, 0, 4, MOST, "dense", packed_why},
    {PBN_OP_BACKWARD, ANY_DTYPE, SLOW_VIEW, 0, 0, 0, 0, MOST, 0, 4, MOST, "dense", packed_why},
};

/* The first is also that of devices without one of their own. */
static const struct rule_table {
    const char *device;    /* the driver's name of it */
    const char *libraries; /* cuDNN's versions that the table was measured with */
    const char *date;
    const rule *rules;
    size_t count;
} rule_tables[] = {
    {"NVIDIA H200", "9.19", "2026-11-22", h200_rules, sizeof h200_rules / sizeof h200_rules[0]},
};

#endif
