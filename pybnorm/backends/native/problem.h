/* A call's tensors as the kernels see them: one innermost run of elements, rows of runs, groups of rows.
 *
 * Axes are of two kinds, kept (each index has its own statistics) and reduced. Axes of length 1 are dropped; the others
 * are ordered by x's strides and merged where every tensor lets them be. Whatever the rank and the layout, what is left
 * is one of two forms:
 *
 *     rows      the run is reduced: a group is one channel, its statistics are sums over runs (channels first)
 *     columns   the run is kept: each column of it has statistics of its own, sums over rows (channels last, 2-D, per
 *               activation); also short runs that are reduced, together with the kept axis they lie in, and several
 *               rows taken as one where they follow each other in memory, so that the run is long enough for vectors
 *
 * No vendor and no device appears here: the CPU and the GPU kernels share it.
 */
#ifndef PYBNORM_NATIVE_PROBLEM_H
#define PYBNORM_NATIVE_PROBLEM_H

#include "pybnorm/adapter.h"

enum { TENSORS = 5, WIDE_RUN = 256 };

typedef struct axis {
    int64_t length;
    int64_t steps[TENSORS]; /* in each tensor, elements */
    int64_t step;           /* in the vectors of parameters; 0 for a reduced axis */
    int kept;
} axis;

typedef struct problem {
    int columns;
    int64_t run;            /* elements of a row */
    int64_t steps[TENSORS]; /* from one element of the run to the next, by tensor */
    int64_t period, repeat; /* columns: column j is of the run's channel j / repeat % period */
    int64_t step;           /* columns: between channels of the run, in the vectors */
    int64_t rows;           /* of a group */
    int64_t last;           /* elements of the last row: fewer than `run` where rows were taken together */
    int64_t groups;
    int row_axes, group_axes;
    axis of_rows[PBN_MAX_RANK], of_groups[PBN_MAX_RANK]; /* outermost first */
    int64_t channels, count; /* parameters, and elements of each */
} problem;

static inline int mergeable(const axis *outer, const axis *inner) {
    if (outer->kept != inner->kept || (outer->kept && outer->step != inner->length * inner->step))
        return 0;
    for (int t = 0; t < TENSORS; t++)
        if (outer->steps[t] != inner->length * inner->steps[t])
            return 0;
    return 1;
}

/* The axes of `tensors`, of the same dims, NULL where there is none; `kept` has a bit for each axis with parameters of
 * its own, which follow one another in the order of the axes. Returns how many are left, outermost first. */
static inline int fold_axes(const pbn_tensor *const tensors[TENSORS], uint32_t kept, axis axes[PBN_MAX_RANK]) {
    const pbn_tensor *first = tensors[0];
    int count = 0, left = 0;
    int64_t step = 1;
    for (int i = first->rank - 1; i >= 0; i--) {
        const int64_t length = first->dims[i];
        if (length == 1)
            continue;
        axis *at = &axes[count++];
        *at = (axis){.length = length, .kept = kept >> i & 1};
        for (int t = 0; t < TENSORS; t++)
            at->steps[t] = tensors[t] != NULL ? tensors[t]->strides[i] : first->strides[i];
        if (at->kept) {
            at->step = step;
            step *= length;
        }
    }
    for (int i = 1; i < count; i++) /* by x's strides, largest first: few, and nearly in order */
        for (int j = i; j > 0 && axes[j - 1].steps[0] < axes[j].steps[0]; j--) {
            const axis swapped = axes[j];
            axes[j] = axes[j - 1];
            axes[j - 1] = swapped;
        }
    for (int i = 0; i < count; i++) {
        if (left > 0 && mergeable(&axes[left - 1], &axes[i])) {
            const int64_t length = axes[left - 1].length * axes[i].length;
            axes[left - 1] = axes[i];
            axes[left - 1].length = length;
        } else
            axes[left++] = axes[i];
    }
    return left;
}

static inline int follows(const axis *outer, const int64_t steps[TENSORS], int64_t run) {
    for (int t = 0; t < TENSORS; t++)
        if (outer->steps[t] != run * steps[t])
            return 0;
    return 1;
}

/* `together`: at most so many elements are taken as one row where rows follow each other. `least`: shorter runs that are
 * reduced become columns. */
static inline void make_problem(problem *p, const pbn_tensor *const tensors[TENSORS], uint32_t kept, int64_t together,
                                int64_t least) {
    axis axes[PBN_MAX_RANK];
    int left = fold_axes(tensors, kept, axes);
    memset(p, 0, sizeof *p);
    p->run = p->period = p->repeat = p->rows = p->groups = p->channels = p->count = 1;
    for (int t = 0; t < TENSORS; t++)
        p->steps[t] = 1;
    for (int i = 0; i < left; i++)
        *(axes[i].kept ? &p->channels : &p->count) *= axes[i].length;
    if (left > 0) {
        const axis *inner = &axes[--left];
        p->run = inner->length;
        memcpy(p->steps, inner->steps, sizeof p->steps);
        p->columns = inner->kept;
        if (inner->kept) {
            p->period = inner->length;
            p->step = inner->step;
        } else if (left > 0 && axes[left - 1].kept && inner->length < least &&
                   follows(&axes[left - 1], inner->steps, inner->length)) {
            p->columns = 1;
            p->repeat = inner->length;
            p->period = axes[--left].length;
            p->step = axes[left].step;
            p->run *= p->period;
        }
        int others = 0; /* with other reduced axes each of their indices would have a last row */
        for (int i = 0; i < left - 1; i++)
            others += !axes[i].kept;
        if (p->columns && left > 0 && !axes[left - 1].kept && others == 0 && p->run * 2 <= together &&
            follows(&axes[left - 1], p->steps, p->run)) {
            const int64_t most = together / p->run, length = axes[left - 1].length, taken = length < most ? length : most;
            p->last = length % taken * p->run;
            axes[left - 1].length = (length + taken - 1) / taken;
            for (int t = 0; t < TENSORS; t++)
                axes[left - 1].steps[t] *= taken;
            p->run *= taken;
        }
    } else
        p->columns = 1; /* a single element */
    for (int i = 0; i < left; i++) {
        if (axes[i].kept) {
            p->of_groups[p->group_axes++] = axes[i];
            p->groups *= axes[i].length;
        } else {
            p->of_rows[p->row_axes++] = axes[i];
            p->rows *= axes[i].length;
        }
    }
    if (p->last == 0)
        p->last = p->run;
}

/* Element offsets in each tensor of row `number`, by the axes of rows or groups. */
static inline void place_of(const axis *axes, int count, int64_t number, int64_t offsets[TENSORS], int64_t *vector) {
    for (int i = count - 1; i >= 0; i--) {
        const int64_t index = i > 0 ? number % axes[i].length : number;
        number = i > 0 ? number / axes[i].length : 0;
        for (int t = 0; t < TENSORS; t++)
            offsets[t] += index * axes[i].steps[t];
        if (vector != NULL)
            *vector += index * axes[i].step;
    }
}

/* The bits of the axes that have parameters: `mode` is spatial, or per activation. */
static inline uint32_t kept_axes(const pbn_tensor *x, int mode) {
    return mode == PBN_PER_ACTIVATION ? ((1u << x->rank) - 1) & ~1u : 2u;
}

#endif
