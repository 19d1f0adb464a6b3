/* Rows, and any strides: kernels whose threads read along a channel. */

#if defined(KERNEL_rows) || defined(KERNEL_row_sums) || defined(KERNEL_any_apply) || defined(KERNEL_row_apply)
#if FORM == 2
typedef i64 index;
#else
typedef u32 index;
#endif

/* Vector `v` of channel c: where it lies, and which of its elements are the row's. */
struct spot {
    i64 row, element; /* FORM 2: the index, and nothing */
    int first, end;
    bool past; /* of what was read: it reaches past a tensor, by elements that are not the row's */
};

#if FORM == 2
static __device__ __forceinline__ i64 offset_of(const axis_list &axes, int place, int first, int end, i64 number) {
    i64 offset = 0;
#pragma unroll 1
    for (int i = first; i < end; i++) {
        const i64 rest = i == end - 1 ? 0 : quotient(number, axes.length[i]);
        offset += (number - rest * axes.length[i]) * (place < 0 ? axes.vector[i] : axes.step[i][place]);
        number = rest;
    }
    return offset;
}
#define AXES , CONSTANT axis_list axes
#define WITH_AXES , const axis_list &axes
#define GIVE_AXES , axes
#else
#define AXES
#define WITH_AXES
#define GIVE_AXES
#endif

static __device__ __forceinline__ i64 vector_place(const arguments &a, i64 c WITH_AXES) {
#if FORM == 2
    return offset_of(axes, -1, axes.reduced, axes.reduced + axes.kept, c);
#else
    return c * a.group_vector;
#endif
}

static __device__ __forceinline__ spot spot_in(const arguments &a, i64 c, i64 row, u32 w) {
    spot at = {row, (i64)w * V, 0, V, false};
#if FORM == 0
    const int before = (int)((a.shift + (u64)(row * a.row[AT_X] + c * a.group[AT_X])) & (V - 1));
    at.element -= before;
    at.first = at.element < 0 ? (int)-at.element : 0;
    at.end = a.run - at.element < V ? (int)(a.run - at.element) : V;
#endif
    return at;
}

static __device__ __forceinline__ spot spot_of(const arguments &a, i64 c, index v) {
#if FORM == 2
    return spot{v, 0, 0, 1, false};
#else
    const u32 row = v / a.vectors;
    return spot_in(a, c, row, v - row * a.vectors);
#endif
}

static __device__ __forceinline__ i64 offset_at(const arguments &a, int place, i64 c, const spot &at WITH_AXES) {
#if FORM == 2
    return offset_of(axes, place, 0, axes.reduced, at.row) +
           offset_of(axes, place, axes.reduced, axes.reduced + axes.kept, c);
#else
    return at.row * a.row[place] + c * a.group[place] + at.element;
#endif
}

static __device__ __forceinline__ bool is_whole(const spot &at) { return FORM != 0 || at.end - at.first == V; }

/* A branch would make each load wait for the one before: of what reaches past the tensor another vector of it is read,
 * and mend() reads the row's elements when all loads are on their way. */
static __device__ __forceinline__ pack load(const arguments &a, int place, i64 c, spot &at WITH_AXES) {
    i64 offset = offset_at(a, place, c, at GIVE_AXES);
    if (FORM == 0 && (u64)offset > (u64)(a.span[place] - V)) {
        at.past = true;
        offset = -a.shift & (V - 1);
    }
    return *(const pack *)((const T *)a.data[place] + offset);
}

static __device__ __noinline__ pack load_elements(const T *from, int first, int end) {
    pack v = {};
#pragma unroll
    for (int i = 0; i < V; i++)
        if (i >= first && i < end)
            v.e[i] = from[i];
    return v;
}

static __device__ __forceinline__ void mend(const arguments &a, int place, i64 c, const spot &at, pack &v WITH_AXES) {
    v = load_elements((const T *)a.data[place] + offset_at(a, place, c, at GIVE_AXES), at.first, at.end);
}

static __device__ __forceinline__ void save(const arguments &a, int place, i64 c, const spot &at, const pack &v WITH_AXES) {
    T *to = (T *)a.data[place] + offset_at(a, place, c, at GIVE_AXES);
    if (is_whole(at)) {
        store(to, v);
        return;
    }
#pragma unroll
    for (int i = 0; i < V; i++)
        if (i >= at.first && i < at.end)
            to[i] = v.e[i];
}

/* Elements of a channel before vector v. */
static __device__ __forceinline__ i64 elements_before(const arguments &a, i64 c, index v) {
#if FORM == 2
    return v;
#else
    if (v >= a.total)
        return a.rows * a.run;
    const spot at = spot_of(a, c, v);
    return at.row * a.run + (at.element < 0 ? 0 : at.element < a.run ? at.element : a.run);
#endif
}

/* x, dy and y from memory. */
static __device__ __forceinline__ void read(const arguments &a, i64 c, spot &at, pack &x, pack &d, pack &y WITH_AXES) {
    x = load(a, AT_X, c, at GIVE_AXES);
    if (BACKWARD)
        d = load(a, AT_W, c, at GIVE_AXES);
    if (BACKWARD && FUSED && a.reads_y)
        y = load(a, AT_Y, c, at GIVE_AXES);
}

static __device__ __forceinline__ void mend_all(const arguments &a, i64 c, const spot &at, pack &x, pack &d, pack &y WITH_AXES) {
    mend(a, AT_X, c, at, x GIVE_AXES);
    if (BACKWARD)
        mend(a, AT_W, c, at, d GIVE_AXES);
    if (BACKWARD && FUSED && a.reads_y)
        mend(a, AT_Y, c, at, y GIVE_AXES);
}

/* dy where the activation lets it pass. Only when all loads are on their way: each would be waited for. */
static __device__ __forceinline__ void pass(const arguments &a, const coefficients &k, const pack &x, pack &d, const pack &y) {
    if (!BACKWARD || !FUSED || !a.activation)
        return;
#pragma unroll
    for (int i = 0; i < V; i++)
        d.e[i] = D::put(gradient_in(a, k, D::get(x.e[i]), D::get(d.e[i]), D::get(y.e[i])));
}

template <class A> static __device__ __forceinline__ void add(const spot &at, A about, const pack &x, const pack &d, A &s, A &q) {
    A vs = 0, vq = 0;
#pragma unroll
    for (int i = 0; i < V; i++) {
        const bool in = FORM != 0 || (i >= at.first && i < at.end);
        const A e = in ? (A)D::get(x.e[i]) - about : (A)0, w = BACKWARD ? (in ? (A)D::get(d.e[i]) : (A)0) : e;
        vs += w;
        vq += w * e;
    }
    s += vs;
    q += vq;
}

/* Where a thread is in a channel: vectors are `step` apart, which is so many rows and so many vectors of one. */
struct walker {
    u32 row, w, rows, ws;
    __device__ walker(const arguments &a, index v, u32 step) {
        if (FORM == 2)
            return;
        row = (u32)v / a.vectors;
        w = (u32)v - row * a.vectors;
        rows = step / a.vectors;
        ws = step - rows * a.vectors;
    }
    __device__ spot here(const arguments &a, i64 c, index v) const { return FORM == 2 ? spot_of(a, c, v) : spot_in(a, c, row, w); }
    __device__ void go(const arguments &a) {
        if (FORM == 2)
            return;
        row += rows;
        w += ws;
        if (w >= a.vectors) {
            w -= a.vectors;
            row++;
        }
    }
};

/* One of 32 elements that are spread over a part, by lane: where it lies. */
static __device__ __forceinline__ i64 sample_place(const arguments &a, i64 c, index lo, index hi WITH_AXES) {
    const index v = lo + (index)((u64)(hi - lo) * (threadIdx.x & 31) / 32);
    spot at = spot_of(a, c, v);
#if FORM != 2
    at.element = at.element < 0 ? 0 : at.element < a.run ? at.element : a.run - 1;
#endif
    return offset_at(a, AT_X, c, at GIVE_AXES);
}

/* Vectors lo to hi of channel c, lo < hi or empty, of n elements. It is made before the launch in front has ended. */
struct part {
    i64 c, sample;
    index lo, hi;
    walker at;
    double n, share; /* 1 / n, which backward does not need */
    __device__ __forceinline__ part(const arguments &a, i64 c, index lo, index hi WITH_AXES)
        : c(c), sample(0), lo(lo), hi(hi), at(a, lo + threadIdx.x, blockDim.x) {
        n = (double)(elements_before(a, c, hi) - elements_before(a, c, lo));
        share = 0;
        if (!BACKWARD && lo < hi) {
            sample = sample_place(a, c, lo, hi GIVE_AXES);
            share = 1 / n;
        }
    }
};

/* The mean of all lanes' values; 0 where that is not finite. */
static __device__ N mean_of_warp(N k) {
    k *= (N)(1.0 / 32);
    for (int lane = 16; lane; lane >>= 1)
        k += shuffle(k, lane);
    return fabs(k) <= (N)1e37 || DTYPE == 1 ? k : (N)0;
}

/* Sums of a part that is not empty, about a value that is near the mean of `sample` of all lanes (of x),
 * or `about` (of dy). The first loads wait for nothing. x and d go to `kept` where there is one. */
static __device__ void part_sums(const arguments &a, const coefficients &k, const part &of, N sample, N &about, pack *kept,
                                 u32 per, double &s, double &q WITH_AXES) {
    enum { BATCH = FORM == 2 ? 1 : (FORM == 0 || FUSED) && BACKWARD ? 2 : 4 };
    const i64 c = of.c;
    const index lo = of.lo, hi = of.hi, step = blockDim.x;
    index v = lo + threadIdx.x;
    walker at = of.at;
    N s1 = 0, q1 = 0;
    int batches = 0;
    s = q = 0;
    do {
        pack x[BATCH], d[BATCH], y[BATCH];
        spot spots[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (v + i * step < hi) {
                spots[i] = at.here(a, c, v + i * step);
                read(a, c, spots[i], x[i], d[i], y[i] GIVE_AXES);
            }
            at.go(a);
        }
        if (!BACKWARD && batches == 0 && v - lo == threadIdx.x) /* the first turn, which all lanes take */
            about = mean_of_warp(sample);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (v + i * step < hi) {
                if (spots[i].past) /* seldom: the spot is found again, as to keep it would take registers */
                    mend_all(a, c, spot_of(a, c, v + i * step), x[i], d[i], y[i] GIVE_AXES);
                pass(a, k, x[i], d[i], y[i]);
                if (FUSED && BACKWARD && !kept && a.data[AT_DZ])
                    save(a, AT_DZ, c, spots[i], d[i] GIVE_AXES);
                if (kept) {
                    kept[(u32)(v - lo) + i * step] = x[i];
                    if (BACKWARD)
                        kept[per + (u32)(v - lo) + i * step] = d[i];
                }
                add<N>(spots[i], about, x[i], d[i], s1, q1);
            }
        v += BATCH * step;
        if (++batches == CHAIN / BATCH || v >= hi) {
            s += (double)s1;
            q += (double)q1;
            s1 = q1 = 0;
            batches = 0;
        }
    } while (v < hi);
}

static __device__ __forceinline__ void part_sums_again(const arguments &a, const coefficients &k, i64 c, index lo, index hi,
                                                       double about, double &s, double &q WITH_AXES) {
    s = q = 0;
#pragma unroll 1
    for (index v = lo + threadIdx.x; v < hi; v += blockDim.x) {
        spot at = spot_of(a, c, v);
        pack x, d, y;
        read(a, c, at, x, d, y GIVE_AXES);
        if (at.past)
            mend_all(a, c, at, x, d, y GIVE_AXES);
        pass(a, k, x, d, y);
        add<double>(at, about, x, d, s, q);
    }
}

/* A part's record, from one pass over its memory; every thread has it. */
static __device__ record sum_part(const arguments &a, const coefficients &k, const part &of, pack *kept, u32 per,
                                  double *shared WITH_AXES) {
    const i64 c = of.c;
    const index lo = of.lo, hi = of.hi;
    record r = {0, 0, 0};
    if (lo >= hi)
        return r;
    N about = k.mean;
    double s, q;
    const N sample = BACKWARD ? (N)0 : D::get(((const T *)a.data[AT_X])[of.sample]);
    part_sums(a, k, of, sample, about, kept, per, s, q GIVE_AXES);
    block_sum(s, q, shared);
    r.n = of.n;
    double from = about;
    if (!is_held(s, q, r.n)) { /* the same of every thread */
        if (!BACKWARD && fabs(s) <= 1e300)
            from += s * of.share;
        __syncthreads();
        part_sums_again(a, k, c, lo, hi, from, s, q GIVE_AXES);
        block_sum(s, q, shared);
    }
    const double shift = s * of.share;
    r.first = BACKWARD ? s : from + shift;
    r.second = BACKWARD ? q : q - s * shift;
    return r;
}

static __device__ coefficients start_coefficients(const arguments &a, i64 i, N &inverse) {
    coefficients k = {0, 0, 0, 0, 0, 0};
    inverse = 0;
    if (BACKWARD) {
        inverse = inverse_of(a, i);
        k = affine(a, i, given_mean(a, i), inverse);
    }
    return k;
}

static __device__ __forceinline__ void write(const arguments &a, const coefficients &k, i64 c, spot at, const pack &x,
                                             const pack &d WITH_AXES) {
    const int to = BACKWARD ? AT_DX : AT_Y;
    pack out, w = d, prior = x;
    if (FUSED && a.beta != 0) {
        prior = load(a, to, c, at GIVE_AXES);
        if (at.past)
            mend(a, to, c, at, prior GIVE_AXES);
    }
    if (FUSED && !BACKWARD && a.data[AT_W]) {
        w = load(a, AT_W, c, at GIVE_AXES);
        if (at.past)
            mend(a, AT_W, c, at, w GIVE_AXES);
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        const N e = D::get(x.e[i]), p = FUSED ? D::get(prior.e[i]) : (N)0;
        out.e[i] = D::put(BACKWARD ? gradient(a, k, e, D::get(w.e[i]), p)
                                   : result(a, k, e, FUSED && a.data[AT_W] ? D::get(w.e[i]) : (N)0, p));
    }
    if (FUSED && BACKWARD && a.data[AT_DZ]) /* before dx: dy may be dx */
        save(a, AT_DZ, c, at, d GIVE_AXES);
    save(a, to, c, at, out GIVE_AXES);
}
#endif

#ifdef KERNEL_rows
/* A channel is one cluster's, a part of it one block's, which keeps it: one read, one write. */
extern "C" __global__ void __launch_bounds__(512, 2) rows(CONSTANT arguments a) {
    extern __shared__ uint4 memory[];
    __shared__ double shared[64];
    __shared__ record mine;
    __shared__ coefficients found;
    pack *kept = (pack *)memory;
    const u32 c = blockIdx.x / a.splits, j = blockIdx.x % a.splits;
    const u32 lo = min(j * a.per, a.total), hi = min(lo + a.per, a.total);
    const i64 i = c * a.group_vector;
    const part of(a, c, lo, hi);
    after_previous();
    N inverse;
    coefficients k = start_coefficients(a, i, inverse);
    const before old(a, i, !BACKWARD && threadIdx.x == 0);
    const record sums = sum_part(a, k, of, kept, a.per, shared);
    if (a.splits > 1) {
        if (threadIdx.x == 0)
            mine = sums;
        cluster_arrive(); /* it orders this block's threads, too: `shared` is free then */
        cluster_wait();
        if (threadIdx.x < a.splits) {
            shared[3 * threadIdx.x] = of_block(&mine.first, threadIdx.x);
            shared[3 * threadIdx.x + 1] = of_block(&mine.second, threadIdx.x);
            shared[3 * threadIdx.x + 2] = of_block(&mine.n, threadIdx.x);
        }
        cluster_arrive(); /* waited for at the end: a block that is still read must not be gone */
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        double first = sums.first, second = sums.second;
        if (a.splits > 1) {
            combined all(shared[0]);
            for (u32 z = 0; z < a.splits; z++)
                all.add(shared[3 * z], shared[3 * z + 1], shared[3 * z + 2]);
            first = all.first(a.share), second = all.second(a.share);
        }
        if (BACKWARD) {
            if (j == 0)
                finish_backward(a, i, first, second, inverse);
            slope_of(a, k, inverse, (N)first, (N)second);
        } else {
            N mean;
            finish_forward(a, i, old, first, fmax(second, second - second), j == 0, mean, inverse);
            k = coefficients{mean, old.scale * inverse, old.bias, 0, 0, 0};
        }
        found = k;
    }
    __syncthreads();
    let_next_start();
    if (!a.sums_only) {
        k = found;
        walker at(a, lo + threadIdx.x, blockDim.x);
#pragma unroll 4
        for (u32 v = lo + threadIdx.x; v < hi; v += blockDim.x) {
            write(a, k, c, at.here(a, c, v), kept[v - lo], kept[(BACKWARD ? a.per : 0) + v - lo]);
            at.go(a);
        }
    }
    if (a.splits > 1)
        cluster_wait();
}
#endif

#ifdef KERNEL_row_sums
extern "C" __global__ void __launch_bounds__(512) row_sums(CONSTANT arguments a AXES) {
    __shared__ double shared[64];
    after_previous();
    let_next_start();
    for (i64 c = blockIdx.y; c < a.channels; c += gridDim.y) {
        const index total = FORM == 2 ? (index)a.count : (index)a.total, j = blockIdx.x;
        const index lo = min(j * (index)a.per, total), hi = min(lo + (index)a.per, total);
        N inverse;
        const coefficients k = start_coefficients(a, vector_place(a, c GIVE_AXES), inverse);
        const record sums = sum_part(a, k, part(a, c, lo, hi GIVE_AXES), 0, 0, shared GIVE_AXES);
        if (threadIdx.x == 0)
            ((record *)a.parts)[c * a.splits + j] = sums;
        __syncthreads();
    }
}
#endif

#ifdef KERNEL_row_apply
/* Threads lie along a row, and over several of them where rows are short. */
extern "C" __global__ void __launch_bounds__(256) row_apply(CONSTANT arguments a) {
    enum { TURNS = 4 };
    const i64 rows = a.rows * a.channels;
    const u32 from = blockIdx.y * blockDim.x * TURNS + threadIdx.x;
    i64 r = (i64)blockIdx.x * blockDim.y + threadIdx.y, n = quotient(r, a.channels), c = r - n * a.channels;
    after_previous();
    let_next_start();
    for (; r < rows; r += (i64)gridDim.x * blockDim.y, n = quotient(r, a.channels), c = r - n * a.channels) {
        const channel of(a, c * a.group_vector);
        pack x[TURNS], d[TURNS], y[TURNS];
        bool past[TURNS];
#pragma unroll
        for (int i = 0; i < TURNS; i++)
            if (from + i * blockDim.x < a.vectors) {
                spot at = spot_in(a, c, n, from + i * blockDim.x);
                read(a, c, at, x[i], d[i], y[i]);
                past[i] = at.past;
            }
        const coefficients k = of.found(a);
#pragma unroll
        for (int i = 0; i < TURNS; i++)
            if (from + i * blockDim.x < a.vectors) {
                const spot at = spot_in(a, c, n, from + i * blockDim.x);
                if (past[i])
                    mend_all(a, c, at, x[i], d[i], y[i]);
                pass(a, k, x[i], d[i], y[i]);
                write(a, k, c, at, x[i], d[i]);
            }
    }
}
#endif

#ifdef KERNEL_any_apply
extern "C" __global__ void __launch_bounds__(256) any_apply(CONSTANT arguments a AXES) {
    after_previous();
    let_next_start();
    for (i64 c = blockIdx.y; c < a.channels; c += gridDim.y) {
        const coefficients k = channel(a, vector_place(a, c GIVE_AXES)).found(a);
        for (i64 v = (i64)blockIdx.x * blockDim.x + threadIdx.x; v < a.count; v += (i64)gridDim.x * blockDim.x) {
            spot at = spot_of(a, c, v);
            pack x, d, y;
            read(a, c, at, x, d, y GIVE_AXES);
            pass(a, k, x, d, y);
            write(a, k, c, at, x, d GIVE_AXES);
        }
    }
}
#endif
