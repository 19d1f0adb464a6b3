/* Columns: kernels whose threads have neighbouring channels, and read the rows below one another. */

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

    __device__ __forceinline__ void read(const arguments &a, i64 r, pack &px, pack &pd, pack &py) const {
        px = *(const pack *)(x + r * a.row[AT_X]);
        if (BACKWARD)
            pd = *(const pack *)(w + r * a.row[AT_W]);
        if (BACKWARD && FUSED && a.reads_y)
            py = *(const pack *)(y + r * a.row[AT_Y]);
    }
    /* Where the activation lets dy pass. Only when all loads are on their way: each would be waited for. */
    __device__ __forceinline__ void pass(const arguments &a, const pack &px, pack &pd, const pack &py) const {
        if (!BACKWARD || !FUSED || !a.activation)
            return;
#pragma unroll
        for (int i = 0; i < V; i++)
            pd.e[i] = D::put(gradient_in(a, k[i], D::get(px.e[i]), D::get(pd.e[i]), D::get(py.e[i])));
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
        t.found[c] = affine(a, at, given_mean(a, at), inverse_of(a, at));
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
    T *const dz = FUSED && BACKWARD && has && a.data[AT_DZ] ? (T *)a.data[AT_DZ] + column_place(a, AT_DZ, t.first + threadIdx.x * V) : 0;
#pragma unroll
    for (int i = 0; i < V; i++)
        s[i] = q[i] = s1[i] = q1[i] = 0, about[i] = BACKWARD && has ? in.k[i].mean : (N)0;
    do {
        pack x[BATCH], d[BATCH], y[BATCH];
#pragma unroll
        for (int z = 0; z < BATCH; z++)
            if (has && r + z * step < hi)
                in.read(a, r + z * step, x[z], d[z], y[z]);
        if (first) /* the turn that all threads take */
            near_columns(t, (u32)min(hi - lo, (i64)step), has, x[0], about);
        first = false;
#pragma unroll
        for (int z = 0; z < BATCH; z++)
            if (has && r + z * step < hi) {
                in.pass(a, x[z], d[z], y[z]);
                if (!KEEPS && dz)
                    store(dz + (r + z * step) * a.row[AT_DZ], d[z]);
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
            pack x, d, y;
            in.read(a, r, x, d, y);
            in.pass(a, x, d, y);
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
            inverse = inverse_of(a, at);
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
extern "C" __global__ void __launch_bounds__(256, V < 8 && !(FUSED && BACKWARD) ? 4 : 3) column_sums(CONSTANT arguments a) {
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
    pack x[TURNS], d[TURNS], y[TURNS];
    column_reader in = {};
    if (u < a.columns) {
        in.x = (const T *)a.data[AT_X] + column_place(a, AT_X, u);
        in.w = BACKWARD ? (const T *)a.data[AT_W] + column_place(a, AT_W, u) : 0;
        in.y = BACKWARD && FUSED && a.reads_y ? (const T *)a.data[AT_Y] + column_place(a, AT_Y, u) : 0;
    }
#define READ_TURN                                                                                                      \
    _Pragma("unroll") for (int i = 0; i < TURNS; i++) if (r + i * step < end)                                          \
        in.read(a, a.rows - 1 - r - i * step, x[i], d[i], y[i])
    u32 n = threadIdx.y * blockDim.x + threadIdx.x;
    i64 of = n < blockDim.x * V && first + n < a.columns ? column_vector(a, first + n) : -1;
    after_previous();
    let_next_start();
    const bool early = a.per <= TURNS * step; /* a single turn */
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
            if (r + i * step < end) {
                in.pass(a, x[i], d[i], y[i]);
                out.write(a, in.k, a.rows - 1 - r - i * step, x[i], d[i]);
            }
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
