/* Batch norm on a GPU. One source for CUDA and HIP, compiled at run time; gpu.c says which kernel, by these macros:
 *
 *     KERNEL_name   the one kernel that is compiled
 *     DTYPE, PARAM  numbers of pbn_dtype: of the data; of parameters and statistics
 *     BACKWARD      0 or 1
 *     FUSED         0, or 1: an activation, a residual, or scalars alpha and beta other than 1 and 0
 *     FORM          0 rows that begin anywhere, 1 rows of whole vectors, 2 any strides, element by element
 *     VECTOR        columns: elements that a thread reads at once
 *
 * Sums. A thread adds at most 64 terms in float32, about a value k near the part's mean (of dy * (x - mean) nothing
 * cancels); threads' sums are added as doubles, and parts combined by Chan, Golub and LeVeque (1983) in double, all in an
 * order that the shape alone decides. A part whose k turns out to be far from its mean, or whose squares float32 cannot
 * hold, is summed again in double about that mean. So neither the mean's size nor what else runs changes the result.
 *
 * Blocks that exchange sums are one cluster: the hardware starts all of its blocks together or none, and its barrier is
 * the only thing that they wait for, so that no order of blocks and no other stream can leave one waiting for ever.
 * What does not fit a cluster's shared memory takes separate launches, which wait for nothing.
 */
#include "arguments.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

/* ------------------------------------------------------------------ what differs between CUDA and HIP */

/* CONSTANT: of a kernel's argument, which functions may refer to without a copy of it. */
#if defined(__HIP__)
#define CONSTANT const
static __device__ __forceinline__ float half_number(unsigned short h) { return (float)__builtin_bit_cast(_Float16, h); }
static __device__ __forceinline__ unsigned short half_of(float f) {
    return __builtin_bit_cast(unsigned short, (_Float16)f);
}
/* Of 32 lanes, which take the same way: a wave of RDNA, or one half of CDNA's, of which the other may take another. */
template <class V> static __device__ __forceinline__ V shuffle(V v, int lane) { return __shfl_xor(v, lane, 32); }
template <class V> static __device__ __forceinline__ void store_past_cache(V *to, const V &v) { *to = v; }
template <class A, class V> static __device__ __forceinline__ void store_as(V *to, const V &v) { *to = v; }
static __device__ __forceinline__ void after_previous() {}
static __device__ __forceinline__ void let_next_start() {}
#define CLUSTERS 0
#else
#define CONSTANT const __grid_constant__
static __device__ __forceinline__ float half_number(unsigned short h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
static __device__ __forceinline__ unsigned short half_of(float f) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
template <class V> static __device__ __forceinline__ V shuffle(V v, int lane) { return __shfl_xor_sync(~0u, v, lane); }
template <class V> static __device__ __forceinline__ void store_past_cache(V *to, const V &v) {
    __stcs((uint4 *)to, *(const uint4 *)&v);
}
template <class A, class V> static __device__ __forceinline__ void store_as(V *to, const V &v) {
    __stwb((A *)to, *(const A *)&v);
}
#if __CUDA_ARCH__ >= 900
#define CLUSTERS 1
/* A launch may begin before the one in front of it, ours or another's, has ended; what that one wrote is there after
 * after_previous(), with which every kernel begins. The next one is let in when the work is on its way, not before: its
 * blocks would take places that this launch's need. */
static __device__ __forceinline__ void after_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
static __device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
#else
#define CLUSTERS 0
static __device__ __forceinline__ void after_previous() {}
static __device__ __forceinline__ void let_next_start() {}
#endif
#endif

#if CLUSTERS
static __device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
static __device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
static __device__ __forceinline__ double of_block(const double *shared, u32 rank) {
    double v;
    const u32 here = (u32)__cvta_generic_to_shared(shared);
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(v) : "r"(there) : "memory");
    return v;
}
#else /* one block is a channel's: gpu.c asks for no more */
static __device__ __forceinline__ void cluster_arrive() {}
static __device__ __forceinline__ void cluster_wait() {}
static __device__ __forceinline__ double of_block(const double *shared, u32) { return *shared; }
#endif

/* ------------------------------------------------------------------ numbers */

template <int D> struct type;
template <> struct type<0> {
    typedef float element, number;
    static __device__ __forceinline__ float get(float e) { return e; }
    static __device__ __forceinline__ float put(float n) { return n; }
};
template <> struct type<1> {
    typedef double element, number;
    static __device__ __forceinline__ double get(double e) { return e; }
    static __device__ __forceinline__ double put(double n) { return n; }
};
template <> struct type<2> {
    typedef unsigned short element;
    typedef float number;
    static __device__ __forceinline__ float get(unsigned short e) { return half_number(e); }
    static __device__ __forceinline__ unsigned short put(float n) { return half_of(n); }
};
template <> struct type<3> {
    typedef unsigned short element;
    typedef float number;
    static __device__ __forceinline__ float get(unsigned short e) { return __uint_as_float((u32)e << 16); }
    static __device__ __forceinline__ unsigned short put(float n) {
#if !defined(__HIP__) && __CUDA_ARCH__ >= 800
        unsigned short h;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(n));
        return h;
#else
        const u32 bits = __float_as_uint(n);
        if ((bits & 0x7fffffff) > 0x7f800000)
            return bits >> 16 | 0x40;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
    }
};

typedef type<DTYPE> D;
typedef D::element T;
typedef D::number N;
typedef type<PARAM> PD;
typedef PD::element P;

#ifndef VECTOR
#if FORM == 2
#define VECTOR 1
#else
#define VECTOR (16 / (DTYPE == 1 ? 8 : DTYPE == 0 ? 4 : 2))
#endif
#endif
enum { V = VECTOR, CHAIN = 32 };

struct alignas(V * sizeof(T)) pack {
    T e[V];
};

static __device__ __forceinline__ void store(T *to, const pack &v) {
    if (sizeof(pack) == 16)
        store_past_cache((pack *)to, v);
    else if (sizeof(pack) == 8) /* a plain store of a pack becomes one of each element */
        store_as<u64>((pack *)to, v);
    else if (sizeof(pack) == 4)
        store_as<u32>((pack *)to, v);
    else
        *(pack *)to = v;
}

static __device__ __forceinline__ N parameter(const void *vector, i64 i) { return (N)PD::get(((const P *)vector)[i]); }
static __device__ __forceinline__ void set_parameter(void *vector, i64 i, double value) {
    ((P *)vector)[i] = PD::put((PD::number)value);
}

/* 1 / sqrt(v). In float32 the approximation and a step of Newton's: rsqrt of a double is a longer chain of operations. */
static __device__ __forceinline__ N inverse_root(double v) {
#if DTYPE != 1
    if (v >= 1e-36 && v <= 1e36) {
        const float f = (float)v, r = rsqrt(f);
        return fma(0.5f * r, fma(-f * r, r, 1.0f), r);
    }
#endif
    return (N)rsqrt(v);
}

/* A division that is not needed is not waited for. */
static __device__ __forceinline__ u32 quotient(u32 n, u32 by) { return by == 1 ? n : n < by ? 0 : n / by; }

/* Division of 64 bits takes a hundred instructions: they are there once, for numbers that need it. */
static __device__ __noinline__ i64 long_quotient(i64 n, i64 by) { return n / by; }
static __device__ __forceinline__ i64 quotient(i64 n, i64 by) {
    return (n | by) >> 32 ? long_quotient(n, by) : (i64)((u32)n / (u32)by);
}

/* ------------------------------------------------------------------ one element */

/* y = (x - mean) * a + b, dx = dy * a + (x - mean) * inverse * slope + centre: in one factor inverse * slope would leave
 * the range of float32 where x is very large or small. */
struct coefficients {
    N mean, a, b, slope, centre, inverse;
};

static __device__ __forceinline__ N passed(const arguments &a, N dy, N result) {
    return result > (N)a.low && result <= (N)a.high ? dy : (N)0;
}

static __device__ __forceinline__ N blended(const arguments &a, N v, N prior) {
    return (N)a.alpha * v + (a.beta != 0 ? (N)a.beta * prior : (N)0);
}

/* z and `prior` are 0 where there is none. A NaN stays one. */
static __device__ __forceinline__ N result(const arguments &a, const coefficients &k, N x, N z, N prior) {
    N v = (x - k.mean) * k.a + k.b;
    if (FUSED) {
        v += z;
        if (a.activation) {
            v = v <= (N)a.low ? (N)a.low : v;
            v = v > (N)a.high ? (N)a.high : v;
        }
        v = blended(a, v, prior);
    }
    return v;
}

static __device__ __forceinline__ N gradient(const arguments &a, const coefficients &k, N x, N d, N prior) {
    const N v = d * k.a + ((x - k.mean) * k.inverse * k.slope + k.centre);
    return FUSED ? blended(a, v, prior) : v;
}

/* dy where the activation lets it pass; y is batch norm's result where `reads_y`. */
static __device__ __forceinline__ N gradient_in(const arguments &a, const coefficients &k, N x, N dy, N y) {
    if (!FUSED || !a.activation)
        return dy;
    return passed(a, dy, a.reads_y ? y : (x - k.mean) * k.a + k.b);
}

/* ------------------------------------------------------------------ from sums to coefficients */

struct record { /* of a part: its mean and M2, or the sums of dy and dy * (x - mean); and its number of elements */
    double first, second, n;
};

/* Means and M2 of parts to those of all, about the first part's mean; sums are simply added. `share` is 1 over the number
 * of elements of all parts. */
struct combined {
    double about, sum, square;
    __device__ combined(double first) : about(BACKWARD || !(fabs(first) <= 1e300) ? 0 : first), sum(0), square(0) {}
    __device__ void add(double first, double second, double count) {
        if (BACKWARD) {
            sum += first;
            square += second;
        } else if (count > 0) {
            const double d = first - about;
            sum += count * d;
            square += second + count * d * d;
        }
    }
    __device__ double first(double share) const { return BACKWARD ? sum : about + sum * share; }
    __device__ double second(double share) const {
        return BACKWARD ? square : fmax(square - sum * (sum * share), square - square);
    }
};

static __device__ void blend_parameter(const arguments &a, void *vector, i64 i, double value) {
    value *= a.alpha_param;
    if (a.beta_param != 0)
        value += a.beta_param * (double)parameter(vector, i);
    set_parameter(vector, i, value);
}

/* What a channel's end reads, asked for before its sums are there. */
struct before {
    N scale, bias;
    double mean, variance;
    __device__ before(const arguments &a, i64 i, bool has) : scale(1), bias(0), mean(0), variance(0) {
        if (!has)
            return;
        if (a.scale && !a.sums_only)
            scale = parameter(a.scale, i);
        if (a.bias && !a.sums_only)
            bias = parameter(a.bias, i);
        if (a.running_mean && a.factor != 1) { /* with factor 1 they are not read */
            mean = (double)parameter(a.running_mean, i);
            variance = (double)parameter(a.running_variance, i);
        }
    }
};

/* The channel's mean and 1/deviation, which one thread writes. */
static __device__ void finish_forward(const arguments &a, i64 i, const before &old, double mean, double m2, bool writes, N &mu,
                                      N &inverse) {
    const double variance = m2 * a.share;
    mu = (N)mean;
    inverse = inverse_root(variance + a.epsilon);
    if (!writes)
        return;
    if (a.stats) {
        ((N *)a.stats)[i] = mu;
        ((N *)a.stats)[a.channels + i] = inverse;
    }
    if (a.saved_mean) {
        set_parameter(a.saved_mean, i, mean);
        set_parameter(a.saved_inverse, i, inverse);
    }
    if (a.running_mean) { /* with factor 0 the new ones are not read */
        const double f = a.factor, unbiased = variance * a.unbiased;
        set_parameter(a.running_mean, i, (f == 1 ? 0 : (1 - f) * old.mean) + (f == 0 ? 0 : f * mean));
        set_parameter(a.running_variance, i, (f == 1 ? 0 : (1 - f) * old.variance) + (f == 0 ? 0 : f * unbiased));
    }
}

static __device__ void finish_backward(const arguments &a, i64 i, double sum, double dot, N inverse) {
    blend_parameter(a, a.dscale, i, dot * inverse);
    blend_parameter(a, a.dbias, i, sum);
    if (a.stats) {
        ((N *)a.stats)[2 * a.channels + i] = (N)sum;
        ((N *)a.stats)[3 * a.channels + i] = (N)dot;
    }
}

/* Given: those of inference, those that were saved or are in the workspace. */
static __device__ __forceinline__ N given_mean(const arguments &a, i64 i) {
    if (a.saved_mean == 0)
        return ((const N *)a.stats)[i];
    return parameter(a.saved_mean, i);
}

static __device__ __forceinline__ N given_inverse(const arguments &a, i64 i) {
    if (a.saved_inverse == 0)
        return ((const N *)a.stats)[a.channels + i];
    return parameter(a.saved_inverse, i);
}

static __device__ __forceinline__ coefficients affine(const arguments &a, i64 i, N mean, N inverse) {
    coefficients k = {mean, (a.scale ? parameter(a.scale, i) : (N)1) * inverse, 0, 0, 0, 0};
    if (a.bias)
        k.b = parameter(a.bias, i);
    return k;
}

static __device__ __forceinline__ void slope_of(const arguments &a, coefficients &k, N inverse, N sum, N dot) {
    const N share = (N)a.share;
    k.inverse = inverse;
    k.slope = -k.a * (dot * inverse * share);
    k.centre = -k.a * (sum * share);
}

/* For results alone, of statistics and sums that are there: all are read before one is waited for. */
struct channel {
    N mean, inverse, scale, bias, sum, dot; /* inverse: or the variance */
    __device__ __forceinline__ channel(const arguments &a, i64 i) : mean(given_mean(a, i)), inverse(given_inverse(a, i)) {
        scale = a.scale ? parameter(a.scale, i) : (N)1;
        bias = a.bias ? parameter(a.bias, i) : (N)0;
        if (BACKWARD) {
            sum = a.given ? parameter(a.dbias, i) : ((const N *)a.stats)[2 * a.channels + i];
            dot = a.given ? parameter(a.dscale, i) : ((const N *)a.stats)[3 * a.channels + i];
        }
    }
    __device__ __forceinline__ coefficients found(const arguments &a) const {
        const N r = a.inverse ? inverse : inverse_root((double)inverse + a.epsilon);
        coefficients k = {mean, scale * r, bias, 0, 0, 0};
        if (BACKWARD)
            slope_of(a, k, r, sum, dot);
        return k;
    }
};

/* Whether sums of n terms in float32 are good: within its range, and k near enough to the mean that what cancels in
 * square - sum^2/n is less than the bound of a sum of n terms leaves. */
static __device__ __forceinline__ bool is_held(double sum, double square, double n) {
    if (DTYPE == 1 && BACKWARD)
        return true;
    if (!(fabs(sum) <= 1e37 && fabs(square) <= 1e37))
        return false;
    if (DTYPE != 1 && fabs(square) < n * 1e-34 && (!BACKWARD || sum != 0 || square != 0))
        return false;
    return BACKWARD || sum * sum <= (4 + 0.25 * sqrtf((float)n)) * (n * square - sum * sum);
}

/* Of all threads' sums, in one order; every thread has the result. `shared`: 64 doubles. */
static __device__ __forceinline__ void block_sum(double &s, double &q, double *shared) {
    const u32 warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int lane = 16; lane; lane >>= 1) {
        s += shuffle(s, lane);
        q += shuffle(q, lane);
    }
    if (warps == 1)
        return;
    if ((threadIdx.x & 31) == 0) {
        shared[2 * warp] = s;
        shared[2 * warp + 1] = q;
    }
    __syncthreads();
    s = q = 0;
    for (u32 i = 0; i < warps; i++) {
        s += shared[2 * i];
        q += shared[2 * i + 1];
    }
}

/* ------------------------------------------------------------------ rows, and any strides */

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

/* x and dy from memory. */
static __device__ __forceinline__ void read(const arguments &a, i64 c, spot &at, pack &x, pack &d WITH_AXES) {
    x = load(a, AT_X, c, at GIVE_AXES);
    if (BACKWARD)
        d = load(a, AT_W, c, at GIVE_AXES);
}

static __device__ __forceinline__ void mend_both(const arguments &a, i64 c, const spot &at, pack &x, pack &d WITH_AXES) {
    mend(a, AT_X, c, at, x GIVE_AXES);
    if (BACKWARD)
        mend(a, AT_W, c, at, d GIVE_AXES);
}

/* dy where the activation lets it pass. */
static __device__ __forceinline__ void pass(const arguments &a, const coefficients &k, i64 c, spot at, const pack &x,
                                            pack &d WITH_AXES) {
    if (!BACKWARD || !FUSED || !a.activation)
        return;
    pack y = x;
    if (a.reads_y) {
        at.past = false;
        y = load(a, AT_Y, c, at GIVE_AXES);
        if (at.past)
            mend(a, AT_Y, c, at, y GIVE_AXES);
    }
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
    enum { BATCH = FORM == 2 ? 1 : FORM == 0 && BACKWARD ? 2 : 4 };
    const i64 c = of.c;
    const index lo = of.lo, hi = of.hi, step = blockDim.x;
    index v = lo + threadIdx.x;
    walker at = of.at;
    N s1 = 0, q1 = 0;
    int batches = 0;
    s = q = 0;
    do {
        pack x[BATCH], d[BATCH];
        spot spots[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (v + i * step < hi) {
                spots[i] = at.here(a, c, v + i * step);
                read(a, c, spots[i], x[i], d[i] GIVE_AXES);
                if (FORM != 0)
                    pass(a, k, c, spots[i], x[i], d[i] GIVE_AXES);
            }
            at.go(a);
        }
        if (!BACKWARD && batches == 0 && v - lo == threadIdx.x) /* the first turn, which all lanes take */
            about = mean_of_warp(sample);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (v + i * step < hi) {
                if (spots[i].past) /* seldom: the spot is found again, as to keep it would take registers */
                    mend_both(a, c, spot_of(a, c, v + i * step), x[i], d[i] GIVE_AXES);
                if (FORM == 0)
                    pass(a, k, c, spots[i], x[i], d[i] GIVE_AXES);
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
        pack x, d;
        read(a, c, at, x, d GIVE_AXES);
        if (at.past)
            mend_both(a, c, at, x, d GIVE_AXES);
        pass(a, k, c, at, x, d GIVE_AXES);
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
        inverse = given_inverse(a, i);
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
        pack x[TURNS], d[TURNS];
        bool past[TURNS];
#pragma unroll
        for (int i = 0; i < TURNS; i++)
            if (from + i * blockDim.x < a.vectors) {
                spot at = spot_in(a, c, n, from + i * blockDim.x);
                read(a, c, at, x[i], d[i]);
                past[i] = at.past;
            }
        const coefficients k = of.found(a);
#pragma unroll
        for (int i = 0; i < TURNS; i++)
            if (from + i * blockDim.x < a.vectors) {
                const spot at = spot_in(a, c, n, from + i * blockDim.x);
                if (past[i])
                    mend_both(a, c, at, x[i], d[i]);
                pass(a, k, c, at, x[i], d[i]);
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
            pack x, d;
            read(a, c, at, x, d GIVE_AXES);
            pass(a, k, c, at, x, d GIVE_AXES);
            write(a, k, c, at, x, d GIVE_AXES);
        }
    }
}
#endif

/* ------------------------------------------------------------------ columns */

#if defined(KERNEL_tiles) || defined(KERNEL_column_sums) || defined(KERNEL_column_apply)
/* Column u, of those of all groups: its place in a tensor's row, and in the vectors of parameters. */
static __device__ __forceinline__ i64 column_place(const arguments &a, int place, u32 u) {
    const u32 group = quotient(u, (u32)a.run);
    return group * a.group[place] + (u - group * (u32)a.run);
}
static __device__ __forceinline__ i64 column_vector(const arguments &a, u32 u) {
    const u32 group = quotient(u, (u32)a.run), w = u - group * (u32)a.run;
    return group * a.group_vector + quotient(w, (u32)a.repeat) * a.vector_step;
}

struct column_reader { /* a thread's vector of columns */
    const T *x, *w, *y;
    coefficients k[V];

    __device__ __forceinline__ void read(const arguments &a, i64 r, pack &px, pack &pd) const {
        px = *(const pack *)(x + r * a.row[AT_X]);
        if (!BACKWARD)
            return;
        pd = *(const pack *)(w + r * a.row[AT_W]);
        if (FUSED && a.activation) {
            pack py = px;
            if (a.reads_y)
                py = *(const pack *)(y + r * a.row[AT_Y]);
#pragma unroll
            for (int i = 0; i < V; i++)
                pd.e[i] = D::put(gradient_in(a, k[i], D::get(px.e[i]), D::get(pd.e[i]), D::get(py.e[i])));
        }
    }
};

struct column_writer {
    T *out, *dz;
    const T *z;

    __device__ __forceinline__ column_writer(const arguments &a, u32 u) {
        const int to = BACKWARD ? AT_DX : AT_Y;
        out = (T *)a.data[to] + column_place(a, to, u);
        dz = FUSED && BACKWARD && a.data[AT_DZ] ? (T *)a.data[AT_DZ] + column_place(a, AT_DZ, u) : 0;
        z = FUSED && !BACKWARD && a.data[AT_W] ? (const T *)a.data[AT_W] + column_place(a, AT_W, u) : 0;
    }
    __device__ __forceinline__ void write(const arguments &a, const coefficients (&k)[V], i64 r, const pack &x,
                                          const pack &d) const {
        T *at = out + r * a.row[BACKWARD ? AT_DX : AT_Y];
        pack y, w = d, prior = x;
        if (FUSED && a.beta != 0)
            prior = *(const pack *)at;
        if (FUSED && z)
            w = *(const pack *)(z + r * a.row[AT_W]);
#pragma unroll
        for (int i = 0; i < V; i++) {
            const N e = D::get(x.e[i]), p = FUSED ? D::get(prior.e[i]) : (N)0;
            y.e[i] = D::put(BACKWARD ? gradient(a, k[i], e, D::get(w.e[i]), p)
                                     : result(a, k[i], e, FUSED && z ? D::get(w.e[i]) : (N)0, p));
        }
        if (FUSED && dz)
            store(dz + r * a.row[AT_DZ], d);
        store(at, y);
    }
};
#endif

#if defined(KERNEL_tiles) || defined(KERNEL_column_sums)
#ifdef KERNEL_tiles
enum { KEEPS = 1 };
#else
enum { KEEPS = 0 };
#endif

struct sum_pair {
    N s, q;
};

/* Shared memory of a block: `pairs` of all threads, later of doubles; records of its columns; coefficients; kept rows. */
struct tile {
    u32 width, columns, first; /* columns of a block and of this one, its first column */
    void *pairs;
    record *records;
    coefficients *found;
    pack *kept;
};

static __device__ __forceinline__ tile make_tile(uint4 *memory, const arguments &a, u32 number) {
    tile t;
    const u32 threads = blockDim.x * blockDim.y;
    t.width = blockDim.x * V;
    t.first = number * t.width;
    t.columns = (u32)min((i64)t.width, a.columns - (i64)t.first);
    t.pairs = memory;
    t.records = (record *)((char *)memory + threads * (V * sizeof(sum_pair) > 16 ? V * sizeof(sum_pair) : 16));
    t.found = (coefficients *)(t.records + t.width);
    t.kept = (pack *)((char *)memory + ((((char *)(t.found + t.width) - (char *)memory) + 15) & ~15));
    return t;
}

/* A column's coefficients are computed by one thread of the block. */
static __device__ __forceinline__ void find_coefficients(const arguments &a, const tile &t, column_reader &in, bool has) {
    if (!BACKWARD)
        return;
    for (u32 c = threadIdx.y * blockDim.x + threadIdx.x; c < t.columns; c += blockDim.x * blockDim.y) {
        const i64 at = column_vector(a, t.first + c);
        t.found[c] = affine(a, at, given_mean(a, at), given_inverse(a, at));
    }
    __syncthreads();
    if (has)
#pragma unroll
        for (int i = 0; i < V; i++)
            in.k[i] = t.found[threadIdx.x * V + i];
}

static __device__ __forceinline__ column_reader make_reader(const arguments &a, const tile &t, bool has) {
    const u32 u = t.first + threadIdx.x * V;
    column_reader in = {};
    if (!has)
        return in;
    in.x = (const T *)a.data[AT_X] + column_place(a, AT_X, u);
    if (BACKWARD) {
        in.w = (const T *)a.data[AT_W] + column_place(a, AT_W, u);
        in.y = FUSED && a.reads_y ? (const T *)a.data[AT_Y] + column_place(a, AT_Y, u) : 0;
    }
    return in;
}

/* Each column's value near the part's mean: of the first rows of it, one of each of a few lines of threads. */
static __device__ __forceinline__ void near_columns(const tile &t, u32 rows, bool has, const pack &x, N (&about)[V]) {
    enum { MOST_LINES = 8 };
    N *of = (N *)t.pairs;
    const u32 lines = min(min(blockDim.y, (u32)MOST_LINES), rows);
    if (has && threadIdx.y < lines)
#pragma unroll
        for (int i = 0; i < V; i++)
            of[threadIdx.y * t.width + threadIdx.x * V + i] = D::get(x.e[i]);
    __syncthreads();
    const N share = (N)1 / lines;
#pragma unroll
    for (int i = 0; i < V; i++)
        about[i] = 0;
#pragma unroll 1
    for (u32 y = 0; has && y < lines; y++)
#pragma unroll
        for (int i = 0; i < V; i++)
            about[i] += of[y * t.width + threadIdx.x * V + i] * share;
#pragma unroll
    for (int i = 0; i < V; i++) {
        about[i] = fabs(about[i]) <= (N)1e37 || DTYPE == 1 ? about[i] : (N)0;
        if (has && threadIdx.y == 0)
            t.found[threadIdx.x * V + i].mean = about[i];
    }
    __syncthreads();
}

/* A thread's sums are of at most 64 rows, and those of at most 64 such sums, about t.found's means: those of the first
 * rows read, forward. `share` is 1 over the number of rows, 0 in backward. Returns whether some column's sums are no good. */
static __device__ bool column_sums_of(const arguments &a, const tile &t, const column_reader &in, i64 lo, i64 hi, bool has,
                                      double share) {
    enum { BATCH = BACKWARD ? 2 : 4 };
    const u32 step = blockDim.y, id = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    N s[V], q[V], s1[V], q1[V], about[V];
    i64 r = lo + threadIdx.y;
    int turns = 0;
    bool first = !BACKWARD;
#pragma unroll
    for (int i = 0; i < V; i++)
        s[i] = q[i] = s1[i] = q1[i] = 0, about[i] = BACKWARD && has ? in.k[i].mean : (N)0;
    do {
        pack x[BATCH], d[BATCH];
#pragma unroll
        for (int z = 0; z < BATCH; z++)
            if (has && r + z * step < hi)
                in.read(a, r + z * step, x[z], d[z]);
        if (first) /* the turn that all threads take */
            near_columns(t, (u32)min(hi - lo, (i64)step), has, x[0], about);
        first = false;
#pragma unroll
        for (int z = 0; z < BATCH; z++)
            if (has && r + z * step < hi) {
                if (KEEPS) {
                    const u32 at = (u32)(r - lo) + z * step;
                    t.kept[at * blockDim.x + threadIdx.x] = x[z];
                    if (BACKWARD)
                        t.kept[(a.per + at) * blockDim.x + threadIdx.x] = d[z];
                }
#pragma unroll
                for (int i = 0; i < V; i++) {
                    const N e = D::get(x[z].e[i]) - about[i], w = BACKWARD ? D::get(d[z].e[i]) : e;
                    s1[i] += w;
                    q1[i] += w * e;
                }
            }
        r += BATCH * step;
        if (++turns == 2 * CHAIN / BATCH || r >= hi) {
            turns = 0;
#pragma unroll
            for (int i = 0; i < V; i++) {
                s[i] += s1[i];
                q[i] += q1[i];
                s1[i] = q1[i] = 0;
            }
        }
    } while (has && r < hi);
    /* Lines of one warp first, then of all warps; where a line is no share of a warp all lines at once. */
    const bool by_warps = (blockDim.x & (blockDim.x - 1)) == 0 && blockDim.x <= 32 && threads % 32 == 0;
    if (by_warps)
        for (u32 lane = blockDim.x; lane < 32; lane *= 2)
#pragma unroll
            for (int i = 0; i < V; i++) {
                s[i] += shuffle(s[i], (int)lane);
                q[i] += shuffle(q[i], (int)lane);
            }
    const u32 line = by_warps ? id >> 5 : threadIdx.y, lines = by_warps ? threads >> 5 : step;
    sum_pair *pairs = (sum_pair *)t.pairs;
    if (!by_warps || (id & 31) < blockDim.x)
#pragma unroll
        for (int i = 0; i < V; i++)
            pairs[line * t.width + threadIdx.x * V + i] = sum_pair{s[i], q[i]};
    __syncthreads();
    bool bad = false;
    for (u32 c = id; c < t.columns; c += threads) {
        double sum = 0, square = 0;
        const double n = (double)(hi - lo);
#pragma unroll 4
        for (u32 y = 0; y < lines; y++) {
            sum += (double)pairs[y * t.width + c].s;
            square += (double)pairs[y * t.width + c].q;
        }
        bad |= !is_held(sum, square, n);
        t.records[c] = record{BACKWARD ? sum : t.found[c].mean + sum * share, square - sum * (sum * share), n};
    }
    return bad;
}

/* The same in double, about the means that the records of a first turn tell. It is seldom needed: small code counts. */
static __device__ __noinline__ void column_sums_again(const arguments &a, const tile t, i64 lo, i64 hi, bool has) {
    column_reader in = make_reader(a, t, has);
    find_coefficients(a, t, in, has);
    double *pairs = (double *)t.pairs;
    const u32 step = blockDim.y, line = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll 1
    for (int i = 0; i < V; i++) {
        const u32 c = threadIdx.x * V + i;
        double s = 0, q = 0, k = 0;
        if (has)
            k = !BACKWARD && fabs(t.records[c].first) <= 1e300 ? t.records[c].first : (double)t.found[c].mean;
#pragma unroll 1
        for (i64 r = lo + threadIdx.y; has && r < hi; r += step) {
            pack x, d;
            in.read(a, r, x, d);
            const double e = (double)D::get(x.e[i]) - k, w = BACKWARD ? (double)D::get(d.e[i]) : e;
            s += w;
            q += w * e;
        }
        __syncthreads();
        pairs[2 * line] = s;
        pairs[2 * line + 1] = q;
        __syncthreads();
        if (has && threadIdx.y == 0) {
#pragma unroll 1
            for (u32 y = 1; y < step; y++) {
                s += pairs[2 * (y * blockDim.x + threadIdx.x)];
                q += pairs[2 * (y * blockDim.x + threadIdx.x) + 1];
            }
            t.records[c].first = BACKWARD ? s : k + s / t.records[c].n;
            t.records[c].second = BACKWARD ? q : q - s * (s / t.records[c].n);
        }
    }
    __syncthreads();
}

/* Records of all columns of a tile, over rows lo to hi. */
static __device__ void sum_tile(const arguments &a, const tile &t, const column_reader &in, i64 lo, i64 hi, bool has,
                                double share) {
    if (__syncthreads_or(column_sums_of(a, t, in, lo, hi, has, share)))
        column_sums_again(a, t, lo, hi, has);
}

#endif

#ifdef KERNEL_tiles
/* The records of each channel's columns, over rows lo to hi, to one in the place of the first. */
static __device__ void combine_columns(const tile &t, u32 repeat, u32 lo, u32 hi) {
    const u32 id = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y >> 5;
    const double n = (double)repeat * (hi - lo), share = n > 0 ? 1 / n : 0;
#pragma unroll 1
    for (u32 ch = id >> 5; ch < t.columns / repeat && id >> 5 < warps; ch += warps) {
        record *r = &t.records[ch * repeat];
        combined all(r->first);
        for (u32 i = id & 31; i < repeat; i += 32)
            all.add(r[i].first, r[i].second, r[i].n);
        for (int lane = 16; lane; lane >>= 1) {
            all.sum += shuffle(all.sum, lane);
            all.square += shuffle(all.square, lane);
        }
        if ((id & 31) == 0)
            *r = record{all.first(share), all.second(share), n};
    }
    __syncthreads();
}

/* A tile of columns is one cluster's, a part of its rows one block's, which keeps them. */
extern "C" __global__ void __launch_bounds__(256, 2) tiles(CONSTANT arguments a) {
    extern __shared__ uint4 memory[];
    const u32 j = blockIdx.x % a.splits, id = threadIdx.y * blockDim.x + threadIdx.x;
    const tile t = make_tile(memory, a, blockIdx.x / a.splits);
    const u32 u = t.first + threadIdx.x * V;
    const bool has = u < a.columns;
    const u32 lo = min(j * a.per, (u32)a.rows), hi = min(lo + a.per, (u32)a.rows);
    const u32 repeat = (u32)a.repeat;
    const bool first = !BACKWARD && id < quotient(t.columns, repeat);
    const i64 of = first ? column_vector(a, t.first + id * repeat) : 0;
    column_reader in = make_reader(a, t, has);
    const double share = BACKWARD || lo >= hi ? 0 : 1.0 / (hi - lo);
    after_previous();
    if (a.early)
        let_next_start();
    find_coefficients(a, t, in, has);
    before old(a, of, first);
    if (lo < hi)
        sum_tile(a, t, in, lo, hi, has, share);
    else {
        for (u32 c = id; c < t.width; c += blockDim.x * blockDim.y)
            t.records[c] = record{0, 0, 0};
        __syncthreads();
    }
    if (repeat > 1) /* a channel's columns to one record, by a warp: few reads of other blocks are left */
        combine_columns(t, repeat, lo, hi);
    if (a.splits > 1) {
        cluster_arrive();
        cluster_wait();
    }
    for (u32 ch = id; ch < t.columns / repeat; ch += blockDim.x * blockDim.y) {
        const i64 at = column_vector(a, t.first + ch * repeat);
        if (ch != id)
            old = before(a, at, !BACKWARD);
        const record *r = &t.records[ch * repeat];
        combined all(a.splits > 1 ? of_block(&r->first, 0) : r->first);
        if (a.splits == 1)
            all.add(r->first, r->second, r->n);
        for (u32 z = 0; a.splits > 1 && z < a.splits; z += 4) { /* splits are 2, 4, 8 or 16 */
            double first[4], second[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (z + i < a.splits) {
                    first[i] = of_block(&r->first, z + i);
                    second[i] = of_block(&r->second, z + i);
                }
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (z + i < a.splits) {
                    const u32 before = min((z + i) * a.per, (u32)a.rows);
                    all.add(first[i], second[i], (double)repeat * (min(before + a.per, (u32)a.rows) - before));
                }
        }
        coefficients k = {0, 0, 0, 0, 0, 0};
        N inverse;
        if (BACKWARD) {
            inverse = given_inverse(a, at);
            if (j == 0)
                finish_backward(a, at, all.first(a.share), all.second(a.share), inverse);
            k = affine(a, at, given_mean(a, at), inverse);
            slope_of(a, k, inverse, (N)all.first(a.share), (N)all.second(a.share));
        } else {
            N mean;
            finish_forward(a, at, old, all.first(a.share), all.second(a.share), j == 0, mean, inverse);
            k = coefficients{mean, old.scale * inverse, old.bias, 0, 0, 0};
        }
        for (u32 s = 0; s < repeat; s++)
            t.found[ch * repeat + s] = k;
    }
    if (a.splits > 1)
        cluster_arrive();
    __syncthreads();
    let_next_start();
    if (has && !a.sums_only) {
        const column_writer out(a, u);
        coefficients k[V];
#pragma unroll
        for (int i = 0; i < V; i++)
            k[i] = t.found[threadIdx.x * V + i];
#pragma unroll 2
        for (u32 r = lo + threadIdx.y; r < hi; r += blockDim.y)
            out.write(a, k, r, t.kept[(r - lo) * blockDim.x + threadIdx.x],
                      t.kept[((BACKWARD ? a.per : 0) + r - lo) * blockDim.x + threadIdx.x]);
    }
    if (a.splits > 1)
        cluster_wait();
}
#endif

#ifdef KERNEL_column_sums
extern "C" __global__ void __launch_bounds__(256, V < 8 ? 4 : 3) column_sums(CONSTANT arguments a) {
    extern __shared__ uint4 memory[];
    const u32 id = threadIdx.y * blockDim.x + threadIdx.x;
    const tile t = make_tile(memory, a, blockIdx.x);
    const u32 u = t.first + threadIdx.x * V;
    const bool has = u < a.columns;
    const i64 lo = (i64)blockIdx.y * a.per, hi = min(lo + (i64)a.per, a.rows);
    column_reader in = make_reader(a, t, has);
    const double share = BACKWARD ? 0 : 1.0 / (double)(hi - lo);
    after_previous();
    let_next_start();
    find_coefficients(a, t, in, has);
    sum_tile(a, t, in, lo, hi, has, share);
    for (u32 c = id; c < t.columns; c += blockDim.x * blockDim.y)
        ((record *)a.parts)[(i64)blockIdx.y * a.columns + t.first + c] = t.records[c];
}
#endif

#ifdef KERNEL_column_apply
/* Backwards, as the rows that sums were taken of last are still in the cache. */
extern "C" __global__ void __launch_bounds__(256) column_apply(CONSTANT arguments a) {
    enum { TURNS = BACKWARD ? 2 : 4 };
    __shared__ __align__(16) N found[6][32 * V];
    const u32 first = blockIdx.x * blockDim.x * V, u = first + threadIdx.x * V, step = blockDim.y;
    const i64 end = u < a.columns ? min((i64)(blockIdx.y + 1) * a.per, a.rows) : 0;
    i64 r = (i64)blockIdx.y * a.per + threadIdx.y;
    pack x[TURNS], d[TURNS];
    column_reader in = {};
    if (u < a.columns) {
        in.x = (const T *)a.data[AT_X] + column_place(a, AT_X, u);
        in.w = BACKWARD ? (const T *)a.data[AT_W] + column_place(a, AT_W, u) : 0;
        in.y = BACKWARD && FUSED && a.reads_y ? (const T *)a.data[AT_Y] + column_place(a, AT_Y, u) : 0;
    }
#define READ_TURN                                                                                                      \
    _Pragma("unroll") for (int i = 0; i < TURNS; i++) if (r + i * step < end)                                          \
        in.read(a, a.rows - 1 - r - i * step, x[i], d[i])
    u32 n = threadIdx.y * blockDim.x + threadIdx.x;
    i64 of = n < blockDim.x * V && first + n < a.columns ? column_vector(a, first + n) : -1;
    after_previous();
    let_next_start();
    const bool early = !FUSED && a.per <= TURNS * step; /* a single turn; an activation's gradient needs coefficients */
    if (early)
        READ_TURN;
    while (of >= 0) {
        const coefficients k = channel(a, of).found(a);
        found[0][n] = k.mean, found[1][n] = k.a, found[2][n] = k.b;
        if (BACKWARD)
            found[3][n] = k.slope, found[4][n] = k.centre, found[5][n] = k.inverse;
        n += blockDim.x * blockDim.y;
        of = n < blockDim.x * V && first + n < a.columns ? column_vector(a, first + n) : -1;
    }
    __syncthreads();
    if (u >= a.columns)
        return;
#pragma unroll
    for (int i = 0; i < V; i++) {
        const u32 n = threadIdx.x * V + i;
        in.k[i] = BACKWARD ? coefficients{found[0][n], found[1][n], found[2][n], found[3][n], found[4][n], found[5][n]}
                           : coefficients{found[0][n], found[1][n], found[2][n], 0, 0, 0};
    }
    const column_writer out(a, u);
    for (; r < end; r += TURNS * step) {
        if (!early)
            READ_TURN;
#pragma unroll
        for (int i = 0; i < TURNS; i++)
            if (r + i * step < end)
                out.write(a, in.k, a.rows - 1 - r - i * step, x[i], d[i]);
    }
#undef READ_TURN
    if (blockIdx.y == 0 && threadIdx.y == 0) { /* rows behind the last whole superrow, element by element */
#pragma unroll
        for (int i = 0; i < V; i++)
            for (i64 n = u + i; n < a.tail_rows * a.run; n += a.columns) {
                const i64 at = a.rows * a.row[AT_X] + n;
                const N x = D::get(((const T *)a.data[AT_X])[at]);
                if (BACKWARD) {
                    const N y = FUSED && a.reads_y ? D::get(((const T *)a.data[AT_Y])[at]) : (N)0;
                    const N d = gradient_in(a, in.k[i], x, D::get(((const T *)a.data[AT_W])[at]), y);
                    T *to = (T *)a.data[AT_DX] + at;
                    const T out = D::put(gradient(a, in.k[i], x, d, FUSED && a.beta != 0 ? D::get(*to) : (N)0));
                    if (FUSED && a.data[AT_DZ])
                        ((T *)a.data[AT_DZ])[at] = D::put(d);
                    *to = out;
                } else {
                    T *to = (T *)a.data[AT_Y] + at;
                    const N z = FUSED && a.data[AT_W] ? D::get(((const T *)a.data[AT_W])[at]) : (N)0;
                    *to = D::put(result(a, in.k[i], x, z, FUSED && a.beta != 0 ? D::get(*to) : (N)0));
                }
            }
    }
}
#endif

/* ------------------------------------------------------------------ from parts to channels */

#ifdef KERNEL_finish
/* blockDim.x threads, whole warps, have a channel; or, `across`, the lanes of a warp have neighbouring channels, whose
 * records lie side by side, and each warp of the block a share of them. They are combined in the order of threads. */
extern "C" __global__ void __launch_bounds__(256) finish(CONSTANT arguments a, CONSTANT axis_list axes) {
    __shared__ double shared[8][32][2];
    let_next_start(); /* before it waits itself: it is short, and what follows has its blocks ready */
    after_previous();
    const u32 own = a.across ? threadIdx.y : threadIdx.x, threads = a.across ? blockDim.y : blockDim.x;
    const i64 c = a.across ? (i64)blockIdx.x * blockDim.x + threadIdx.x : (i64)blockIdx.x * blockDim.y + threadIdx.y;
    const bool has = c < a.channels;
    i64 base = c * a.splits, step = 1, at = c * a.group_vector;
    u32 lines = 1, repeat = 1;
    if (a.kind == 1) {
        i64 number = c;
        at = 0;
#pragma unroll 1
        for (int i = axes.reduced; i < axes.reduced + axes.kept; i++) {
            const i64 rest = i == axes.reduced + axes.kept - 1 ? 0 : quotient(number, axes.length[i]);
            at += (number - rest * axes.length[i]) * axes.vector[i];
            number = rest;
        }
    } else if (a.kind == 2) {
        const i64 inside = quotient(a.run, a.repeat), group = quotient(c, inside);
        base = group * a.run + (c - group * inside) * a.repeat;
        step = a.columns;
        at = group * a.group_vector + (c - group * inside) * a.vector_step;
        lines = a.superrow;
        repeat = (u32)a.repeat;
    }
    const before old(a, at, !BACKWARD && has && own == 0);
    const record *records = (const record *)a.parts;
    const u32 of_part = lines * repeat;
    const u32 total = a.splits * of_part;
    combined all(has ? records[base].first : 0);
    N inverse = 0, mean = 0;
    if (BACKWARD && has) {
        inverse = given_inverse(a, at);
        mean = given_mean(a, at);
    }
    if (has) {
#pragma unroll 4
        for (u32 i = own; i < total; i += threads) {
            const u32 part = i / of_part, rest = i - part * of_part, line = rest / repeat;
            const record r = records[base + part * step + line * a.run + (rest - line * repeat)];
            all.add(r.first, r.second, r.n);
        }
        /* Elements behind the last whole superrow are parts of their own. */
        for (i64 i = own; i < a.tail_rows * repeat; i += threads) {
            const i64 where = a.rows * a.row[AT_X] + i / repeat * a.run + base + i % repeat;
            const double x = (double)D::get(((const T *)a.data[AT_X])[where]);
            if (BACKWARD) {
                const coefficients k = affine(a, at, mean, inverse);
                const N y = FUSED && a.reads_y ? D::get(((const T *)a.data[AT_Y])[where]) : (N)0;
                const double d = (double)gradient_in(a, k, (N)x, D::get(((const T *)a.data[AT_W])[where]), y);
                all.add(d, d * (x - (double)mean), 1);
            } else
                all.add(x, 0, 1);
        }
    }
    for (int lane = 16; !a.across && lane; lane >>= 1) {
        all.sum += shuffle(all.sum, lane);
        all.square += shuffle(all.square, lane);
    }
    if (a.across) {
        double *mine = shared[threadIdx.y][threadIdx.x];
        mine[0] = all.sum;
        mine[1] = all.square;
        __syncthreads();
        all.sum = all.square = 0;
        for (u32 i = 0; i < threads; i++) {
            all.sum += shared[i][threadIdx.x][0];
            all.square += shared[i][threadIdx.x][1];
        }
    } else if (blockDim.x > 32) {
        double *mine = shared[threadIdx.y][threadIdx.x >> 5];
        if ((threadIdx.x & 31) == 0) {
            mine[0] = all.sum;
            mine[1] = all.square;
        }
        __syncthreads();
        all.sum = all.square = 0;
        for (u32 i = 0; i < blockDim.x >> 5; i++) {
            all.sum += shared[threadIdx.y][i][0];
            all.square += shared[threadIdx.y][i][1];
        }
    }
    if (has && own == 0) {
        if (BACKWARD)
            finish_backward(a, at, all.first(a.share), all.second(a.share), inverse);
        else
            finish_forward(a, at, old, all.first(a.share), all.second(a.share), true, mean, inverse);
    }
}
#endif

#ifdef KERNEL_merge
/* Statistics of all, of as many values in each row of x, its means; alpha times the sum of z is the variance within rows. */
extern "C" __global__ void __launch_bounds__(128) merge(CONSTANT arguments a) {
    after_previous();
    let_next_start();
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= a.channels)
        return;
    const T *x = (const T *)a.data[AT_X] + c * a.group[AT_X], *z = (const T *)a.data[AT_W] + c * a.group[AT_W];
    const double about = (double)D::get(x[0]);
    double sum = 0, square = 0, within = 0;
    for (i64 r = 0; r < a.rows; r++) {
        const double d = (double)D::get(x[r * a.row[AT_X]]) - about;
        sum += d;
        square += d * d;
        within += (double)D::get(z[r * a.row[AT_W]]);
    }
    const double n = (double)a.rows, shift = sum / n;
    const double variance = fmax(square / n - shift * shift, square - square) + a.alpha * within;
    N mean, inverse;
    finish_forward(a, c, before(a, c, true), about + shift, variance / a.share, true, mean, inverse);
    if (a.data[AT_Y])
        ((T *)a.data[AT_Y])[c * a.group[AT_Y]] = D::put((N)variance);
}
#endif

#ifdef KERNEL_elements
/* pbn_operation: 4 y = alpha*x + beta*y, 5 y = alpha, 6 relu, 7 its gradient; dx is at DX, y elsewhere at Y. */
extern "C" __global__ void __launch_bounds__(256) elements(CONSTANT arguments a, CONSTANT axis_list axes) {
    after_previous();
    let_next_start();
    const int to = a.kind == 7 ? AT_DX : AT_Y;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += (i64)gridDim.x * blockDim.x) {
        i64 at[PLACES] = {i * V, i * V, i * V, i * V, i * V};
        if (FORM == 2) {
            i64 number = i;
            for (int p = 0; p < PLACES; p++)
                at[p] = 0;
#pragma unroll 1
            for (int z = 0; z < axes.reduced; z++) {
                const i64 rest = z == axes.reduced - 1 ? 0 : quotient(number, axes.length[z]);
                const i64 index = number - rest * axes.length[z];
                number = rest;
                for (int p = 0; p < PLACES; p++)
                    at[p] += index * axes.step[z][p];
            }
        }
        pack x = {}, d = {}, y = {};
        if (a.kind != 5)
            x = *(const pack *)((const T *)a.data[AT_X] + at[AT_X]);
        if (a.kind == 7)
            d = *(const pack *)((const T *)a.data[AT_W] + at[AT_W]);
        T *out = (T *)a.data[to] + at[to];
        if (a.kind == 4 && a.beta != 0)
            y = *(const pack *)out;
#pragma unroll
        for (int e = 0; e < V; e++) {
            const N v = D::get(x.e[e]);
            y.e[e] = a.kind == 4   ? D::put((N)a.alpha * v + (a.beta != 0 ? (N)a.beta * D::get(y.e[e]) : (N)0))
                     : a.kind == 5 ? D::put((N)a.alpha)
                     : a.kind == 6 ? (v <= 0 ? D::put((N)0) : x.e[e])
                                   : (v > 0 ? d.e[e] : D::put((N)0));
        }
        *(pack *)out = y;
    }
}
#endif
