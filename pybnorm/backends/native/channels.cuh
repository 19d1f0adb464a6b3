/* From parts' records to channels; statistics of all ranks; calls that are no batch norm, element by element. */

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
        inverse = inverse_of(a, at);
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
