#ifndef PYBNORM_CUDNN_RULES_H
#define PYBNORM_CUDNN_RULES_H

/* What "auto" takes, by device: the first rule of the table that fits and can be built.
 *
 * Why there are rules at all: cuDNN has several ways for one call and chooses none. Its plain entry points read
 * channels-last memory by kernels made for channels-first; Ex and the graph have kernels of their own for it, and which of
 * these two is faster turns at some number of channels. Over channels-first memory the plain kernels give each channel to
 * one block of threads, so that few channels, or large maps, leave most of the device idle: columns and rows cut a channel
 * into parts. Tensors that fit in the cache (the bounds in kilobytes) have other winners, since there the launch counts and
 * not the memory. The bounds are where measured times cross, on the device and versions that the table names; a rule's
 * `why` has what it gains and is what `Plan.reason` shows.
 *
 * The results of every rule but those for "fast" stay within the stable class of the error bound. Which ways give the
 * same bits at every call is said in plans.c (`repeats`): sums of the others differ in their last digits on large maps.
 * Backward without saved statistics has the thresholds of the same ways with them: either reads x once more.
 */
#include "pybnorm/shim.h"

#define HALVES (1u << PBN_FLOAT16 | 1u << PBN_BFLOAT16)
#define SINGLE (1u << PBN_FLOAT32)
#define ANY_DTYPE (HALVES | SINGLE | 1u << PBN_FLOAT64)

/* From the first on and below the second; below 0 is without an end, so that {0} is any. */
typedef struct span {
    int64_t from, below;
} span;

typedef struct rule {
    int operation;
    uint32_t dtypes;
    int layout; /* pbn_layout of all tensors, ANY_LAYOUT, SLOW_VIEW, or WHOLE_ROWS: FIRST, S of 16 bytes, rows enough */
    int saved;                                             /* 1: with saved statistics only, -1: without only */
    int fast;                                              /* 1: for "fast" only */
    int row_bytes, channel_bytes;                          /* divisors of S and of C in bytes, where not 0 */
    span images, channels, size, values, lines, kilobytes; /* N, C, S, N * S, N * C, of x in KiB */
    const char *algorithm, *why;
} rule;

enum { FIRST = PBN_CHANNELS_FIRST, LAST = PBN_CHANNELS_LAST, ANY_LAYOUT = -1, SLOW_VIEW = -2, WHOLE_ROWS = -3 };

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

/* Measured at 8 channels, and at 544 and 708, where it is no faster: the bound of 128 lies between them. */
static const char few_pairs_why[] = "one small kernel: 1.8 to 2.9 times faster than Ex and the graph for (417, 8), (945, 8)";
static const char few_values_why[] =
    "one small kernel: 1.05 to 2.1 times faster than Ex and the graph up to 190 values in each of 240 channels";
/* The two bounds of N are from a model of three measured shapes (256x256x56x56, 6x827x45x45, 32x96x16x16x16): columns
 * cost some 48 ps each beside their values, and pay where the plain entry point takes longer. */
static const char infer_columns_why[] =
    "68 to 91 % of the copy ceiling, where the plain entry point reaches 8 to 72 %; with fewer images the columns' "
    "vectors cost more than that";

static const rule h200_rules[] = {
    /* channels-last */
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .kilobytes = {0, 8 << 10}, .algorithm = "pointwise",
     .why = "one fused kernel, and the heuristic's own choice is the fastest of its plans in L2"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .channels = {128, 0}, .algorithm = "pointwise:1",
     .why = "one fused kernel at 70 to 89 % of the copy ceiling, where the plain entry point's channels-last kernel "
            "reaches 35 to 66 % and errs by 4e-4 at mean/sigma = 1e4"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .algorithm = "pointwise:2",
     .why = "as with more channels, where the next plan is the faster one"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, LAST, .algorithm = "pointwise",
     .why = "as with more channels; a version with fewer plans"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .saved = 1, .channels = {0, 128}, .size = {0, 2},
     .values = {0, 1024}, .algorithm = "spatial", .why = few_pairs_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {0, 128}, .size = {0, 2}, .values = {0, 1024},
     .algorithm = "spatial", .why = few_pairs_why},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .saved = 1, .channels = {0, 256}, .values = {0, 256},
     .algorithm = "spatial", .why = few_values_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .channels = {0, 256}, .values = {0, 256},
     .algorithm = "spatial", .why = few_values_why},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, .saved = 1, .channels = {512, 0}, .algorithm = "graph",
     .why = "1.2 to 1.6 times faster than Ex from 512 channels on"},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, .saved = 1, .kilobytes = {0, 8 << 10}, .algorithm = "graph",
     .why = "1.2 times faster than Ex in L2"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, .saved = 1, .channels = {128, 0}, .algorithm = "graph",
     .why = "1.1 to 1.5 times faster than Ex from 128 channels on"},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, .saved = 1, .kilobytes = {256 << 10, 0}, .algorithm = "graph",
     .why = "1.04 times faster than Ex on large maps"},
    {PBN_OP_BACKWARD, SINGLE, LAST, .saved = 1, .channels = {512, 0}, .algorithm = "graph",
     .why = "1.1 times faster than Ex from 512 channels on"},
    {PBN_OP_BACKWARD, HALVES, LAST, .saved = 1, .channels = {128, 0}, .algorithm = "graph",
     .why = "up to 1.6 times faster than Ex"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .saved = 1, .algorithm = "ex",
     .why = "16 to 76 times faster than the plain entry point, whose channels-last kernels are the channels-first "
            "ones"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = 1, .algorithm = "ex",
     .why = "16 to 76 times faster than the plain entry point, whose channels-last kernels are the channels-first "
            "ones"},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .algorithm = "graph",
     .why = "without saved statistics Ex falls to a slow kernel; the graph writes them to the workspace"},
    {PBN_OP_BACKWARD, SINGLE, LAST, .saved = -1, .channels = {512, 0}, .algorithm = "graph", .why = moments_last_why},
    {PBN_OP_BACKWARD, HALVES, LAST, .saved = -1, .channels = {128, 0}, .algorithm = "graph", .why = moments_last_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .saved = -1, .algorithm = "ex", .why = moments_last_why},
    /* channels-first */
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .fast = 1, .algorithm = "persistent", .why = persistent_why},
    {PBN_OP_BACKWARD, SINGLE, WHOLE_ROWS, .saved = 1, .fast = 1, .size = {2048, 0}, .kilobytes = {64 << 10, 0},
     .algorithm = "rows:1", .why = rows_why},
    {PBN_OP_BACKWARD, HALVES, WHOLE_ROWS, .saved = 1, .fast = 1, .size = {8192, 0}, .kilobytes = {64 << 10, 0},
     .algorithm = "rows:1", .why = rows_why},
    {PBN_OP_BACKWARD, HALVES, FIRST, .saved = 1, .fast = 1, .algorithm = "persistent", .why = persistent_why},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, WHOLE_ROWS, .size = {8192, 0}, .kilobytes = {32 << 10, 0},
     .algorithm = "rows:1",
     .why = "71 to 91 % of the copy ceiling on images of millions of values, where the plain entry point reaches 14 "
            "to 73 %"},
    {PBN_OP_FORWARD_INFERENCE, HALVES | SINGLE, FIRST, .size = {0, 256}, .kilobytes = {32 << 10, 0},
     .algorithm = "columns:1", .why = infer_columns_why},
    {PBN_OP_FORWARD_INFERENCE, HALVES, FIRST, .images = {40, 0}, .kilobytes = {32 << 10, 0}, .algorithm = "columns:1",
     .why = infer_columns_why},
    {PBN_OP_FORWARD_INFERENCE, SINGLE, FIRST, .images = {72, 0}, .kilobytes = {32 << 10, 0}, .algorithm = "columns:1",
     .why = infer_columns_why},
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, FIRST, .channels = {0, 97}, .size = {4096, 0}, .kilobytes = {64 << 10, 0},
     .algorithm = "columns:1",
     .why = "with fewer channels than multiprocessors spatial leaves some idle: 2 to 4.9 times faster"},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, .size = {512, 0}, .kilobytes = {128 << 10, 0}, .algorithm = "columns:1",
     .why = "1.2 to 1.5 times faster"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .size = {2048, 0}, .kilobytes = {64 << 10, 0},
     .algorithm = "columns:1",
     .why = "1.2 to 6 times faster than spatial on large maps"},
    {PBN_OP_BACKWARD, SINGLE, WHOLE_ROWS, .saved = -1, .fast = 1, .size = {2048, 0}, .kilobytes = {64 << 10, 0},
     .algorithm = "rows:1", .why = moments_rows_why},
    {PBN_OP_BACKWARD, HALVES, WHOLE_ROWS, .saved = -1, .fast = 1, .size = {8192, 0}, .kilobytes = {64 << 10, 0},
     .algorithm = "rows:1", .why = moments_rows_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = -1, .size = {2048, 0}, .kilobytes = {64 << 10, 0},
     .algorithm = "columns:1", .why = moments_first_why},
    {PBN_OP_BACKWARD, SINGLE, FIRST, .saved = 1, .fast = 1, .channels = {0, 97}, .size = {16384, 0}, .kilobytes = {32 << 10, 0},
     .algorithm = "persistent", .why = persistent_why},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, .saved = 1, .channels = {0, 97}, .size = {16384, 0}, .kilobytes = {32 << 10, 0},
     .algorithm = "graph",
     .why = "images too large for columns: through a channels-last copy 1.9 times faster than spatial"},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .saved = 1, .channels = {0, 97}, .size = {16384, 0}, .kilobytes = {32 << 10, 0},
     .algorithm = "graph",
     .why = "images too large for columns: through a channels-last copy 1.9 to 2.6 times faster than spatial"},
    /* strided views, channels-last float64 */
    {PBN_OP_FORWARD_TRAINING, ANY_DTYPE, SLOW_VIEW, .kilobytes = {4 << 10, 0}, .algorithm = "dense", .why = packed_why},
    {PBN_OP_FORWARD_INFERENCE, ANY_DTYPE, SLOW_VIEW, .kilobytes = {4 << 10, 0}, .algorithm = "dense",
     .why = packed_why},
    {PBN_OP_BACKWARD, ANY_DTYPE, SLOW_VIEW, .kilobytes = {4 << 10, 0}, .algorithm = "dense", .why = packed_why},
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
