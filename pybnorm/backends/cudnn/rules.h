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
 * `why` has what it gains and is what `Plan.reason` shows. rules_swept.h is made from sweeps of random shapes.
 *
 * The results of every rule but those for "fast" stay within the stable class of the error bound. Which ways give the
 * same bits at every call is said in plans.c (`repeats`): sums of the others differ in their last digits on large maps.
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
    int layout;                                            /* pbn_layout of all tensors, ANY_LAYOUT or SLOW_VIEW */
    int saved;                                             /* 1: with saved statistics only, -1: without only */
    int fast;                                              /* 1: for "fast" only */
    int half;                                              /* SUMS, GIVEN: that half of a batch norm, else the whole */
    int fused;                                             /* RELU, ADD_RELU: training and backward with it, else without */
    int row_bytes, channel_bytes;                          /* divisors of S and of C in bytes, where not 0 */
    span images, channels, size, values, lines, kilobytes; /* N, C, S, N * S, N * C, of x in KiB */
    const char *algorithm, *why;
} rule;

/* Sums without y or dx, by the rule's algorithm; dx from sums that are given, in the way of an inference. A half without
 * a rule goes by calls of the whole batch norm. */
enum { SUMS = 1, GIVEN = 2 };

/* With a residual backward reads what forward left, so that both directions have one rule. */
enum { RELU = 1, ADD_RELU = 2 };

enum { FIRST = PBN_CHANNELS_FIRST, LAST = PBN_CHANNELS_LAST, ANY_LAYOUT = -1, SLOW_VIEW = -2 };

static const char packed_why[] =
    "packed copies through fast kernels: 7 to 18 times faster than the plain entry point's uncoalesced ones";

/* Halves of synchronized batch norm, by docs/results/h200-halves.txt. Backward's two are timed together there; dx over
 * channels-last memory is one kernel in place of six, whatever the shape. */
static const char half_forward_why[] =
    "sums in one pass that writes no y: up to 2.5 times faster than the whole forward's calls; with less data its small "
    "kernels cost more than that";
static const char half_backward_why[] =
    "sums in one pass, then dx in one: 1.1 to 5.2 times faster than the whole backward's calls and two passes for dx";

/* An activation fused: docs/results/h200-fused.txt. */
static const char fused_graph_why[] =
    "the norm graph with ReLU: up to 1.9 times as fast as Ex forward, 1.2 times backward; Ex is slow over small maps";

static const rule rules[] = {
    /* training and backward with an activation */
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, .fused = RELU, .algorithm = "graph", .why = fused_graph_why},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, .fused = RELU, .kilobytes = {0, 256 << 10}, .algorithm = "graph",
     .why = fused_graph_why},
    {PBN_OP_FORWARD_TRAINING, SINGLE, LAST, .fused = RELU, .channels = {128, 0}, .algorithm = "graph",
     .why = fused_graph_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .fused = RELU, .size = {100, 1600}, .kilobytes = {8 << 10, 0},
     .algorithm = "graph", .why = fused_graph_why},
    {PBN_OP_FORWARD_TRAINING, HALVES, LAST, .fused = ADD_RELU, .size = {0, 1600}, .algorithm = "graph",
     .why = fused_graph_why},
    {PBN_OP_BACKWARD, HALVES, LAST, .fused = ADD_RELU, .size = {0, 1600}, .algorithm = "graph", .why = fused_graph_why},
    /* halves of synchronized batch norm */
    {PBN_OP_FORWARD_TRAINING, SINGLE, ANY_LAYOUT, .half = SUMS, .kilobytes = {64 << 10, 0}, .algorithm = "columns",
     .why = half_forward_why},
    {PBN_OP_FORWARD_TRAINING, HALVES, FIRST, .half = SUMS, .size = {2, 0}, .kilobytes = {32 << 10, 0},
     .algorithm = "columns", .why = half_forward_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .half = SUMS, .values = {4096, 0}, .kilobytes = {4 << 10, 0},
     .algorithm = "columns", .why = half_backward_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .half = SUMS, .images = {16, 0}, .size = {2, 0},
     .kilobytes = {4 << 10, 0}, .algorithm = "columns", .why = half_backward_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, LAST, .half = GIVEN, .why = half_backward_why},
    {PBN_OP_BACKWARD, HALVES | SINGLE, FIRST, .half = GIVEN, .images = {16, 0}, .size = {2, 0},
     .kilobytes = {4 << 10, 0}, .why = half_backward_why},
    /* whole calls */
#include "rules_swept.h"
    {PBN_OP_FORWARD_TRAINING, HALVES | SINGLE, LAST, .algorithm = "graph",
     .why = "without saved statistics Ex falls to a slow kernel; the graph writes them to the workspace"},
    /* strided views, channels-last float64 */
    {PBN_OP_FORWARD_TRAINING, ANY_DTYPE, SLOW_VIEW, .kilobytes = {4 << 10, 0}, .algorithm = "dense", .why = packed_why},
    {PBN_OP_FORWARD_INFERENCE, ANY_DTYPE, SLOW_VIEW, .kilobytes = {4 << 10, 0}, .algorithm = "dense",
     .why = packed_why},
    {PBN_OP_BACKWARD, ANY_DTYPE, SLOW_VIEW, .kilobytes = {4 << 10, 0}, .algorithm = "dense", .why = packed_why},
};

/* One table for all devices that were swept: they are of one architecture. The first is also that of the others; halves
 * and fused activations were measured on it alone. */
static const struct rule_table {
    const char *device;    /* the driver's name of it */
    const char *libraries; /* cuDNN's versions that the table was measured with */
    const char *date;
    const rule *rules;
    size_t count;
} rule_tables[] = {
    {"NVIDIA H200", "9.19", "2026-11-23", rules, sizeof rules / sizeof rules[0]},
    {"NVIDIA H100 80GB HBM3", "9.19", "2026-11-25", rules, sizeof rules / sizeof rules[0]},
};

#endif
