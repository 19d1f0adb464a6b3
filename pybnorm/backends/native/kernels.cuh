/* Batch norm on a GPU. One source for CUDA and HIP, compiled at run time: arguments.h, this file (numbers, an element,
 * from sums to coefficients), rows.cuh, columns.cuh and channels.cuh, one after another. gpu.c says which kernel, by these
 * macros:
 *
 *     KERNEL_name   the one kernel that is compiled
 *     DTYPE, PARAM  numbers of pbn_dtype: of the data; of parameters and running statistics
 *     BACKWARD      0, 1, or 2: by running statistics, which are constants
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
typedef type<PARAM == 1> SD; /* of statistics that are saved and of sums that are given */

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
static __device__ __forceinline__ N statistic(const void *vector, i64 i) { return (N)((const SD::element *)vector)[i]; }
static __device__ __forceinline__ void set_parameter(void *vector, i64 i, double value) {
    ((P *)vector)[i] = PD::put((PD::number)value);
}
static __device__ __forceinline__ void set_statistic(void *vector, i64 i, double value) {
    ((SD::element *)vector)[i] = (SD::element)value;
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
    const N v = BACKWARD == 2 ? d * k.a : d * k.a + ((x - k.mean) * k.inverse * k.slope + k.centre);
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
        set_statistic(a.saved_mean, i, mean);
        set_statistic(a.saved_inverse, i, inverse);
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

/* Given: running ones, or those that were saved or are in the workspace. */
static __device__ __forceinline__ N given(const arguments &a, const void *vector, i64 i) {
    return PARAM > 1 && !a.inverse ? parameter(vector, i) : statistic(vector, i);
}

static __device__ __forceinline__ N given_mean(const arguments &a, i64 i) {
    if (a.saved_mean == 0)
        return ((const N *)a.stats)[i];
    return given(a, a.saved_mean, i);
}

static __device__ __forceinline__ N given_inverse(const arguments &a, i64 i) {
    if (a.saved_inverse == 0)
        return ((const N *)a.stats)[a.channels + i];
    return given(a, a.saved_inverse, i);
}

static __device__ __forceinline__ N inverse_of(const arguments &a, i64 i) {
    const N inverse = given_inverse(a, i);
    return BACKWARD == 2 && !a.inverse ? inverse_root((double)inverse + a.epsilon) : inverse;
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
        if (BACKWARD == 1) {
            sum = a.given ? statistic(a.dbias, i) : ((const N *)a.stats)[2 * a.channels + i];
            dot = a.given ? statistic(a.dscale, i) : ((const N *)a.stats)[3 * a.channels + i];
        }
    }
    __device__ __forceinline__ coefficients found(const arguments &a) const {
        const N r = a.inverse ? inverse : inverse_root((double)inverse + a.epsilon);
        coefficients k = {mean, scale * r, bias, 0, 0, 0};
        if (BACKWARD == 1)
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
