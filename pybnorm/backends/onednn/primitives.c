/* oneDNN's primitives: made once for a handle, kept by what they are made for, and run. Part of adapter.c. */

#define VIEW_RANK 5 /* oneDNN 3.2 accepts rank 6 and above, then reads and writes out of bounds */
#define CACHE_SIZE 64
#define MAX_ARGS 9
#define MAX_POST_OPS 4

typedef enum kind {
    TRAINING,
    STATISTICS,
    INFERENCE,
    BACKWARD,
    ROW_STATISTICS,
    ROW_SUMS,
    COLUMN_SUMS,
    ROW_SUMS_OF_DY,
    COLUMN_SUMS_OF_DY,
    GRADIENT_SUMS,
    WIDENED,
    CENTRED,
    TIMES,
    SQUARES,
    APPLY,
    PRODUCT,
    GRADIENT,
    ADDED,
    SHIFTED,
    KINDS
} kind;
typedef enum family { BATCH_NORMALIZATION, LAYER_NORMALIZATION, REDUCTION, MATMUL, REORDER, BINARY } family;

/* The second operand of a binary post-operation. */
#define POST_OP(i) (DNNL_ARG_ATTR_MULTIPLE_POST_OP_BASE * ((i) + 1) | DNNL_ARG_SRC_1)
#define BIT(i) (1u << (i))

/* What the arguments are, in the order the calls below pass pointers; `tensors` come before the vectors. */
typedef struct recipe {
    family family;
    int prop; /* or the algorithm */
    unsigned flags;
    int tensors, count;
    int args[MAX_ARGS - 1];
    int post_ops[MAX_POST_OPS + 1]; /* algorithms, 0 after the last; negative where the operand is a tensor */
    unsigned other;                 /* the tensors that are not the memory itself: float32, or the ones of a sum */
} recipe;

#define BACKWARD_RECIPE                                                                                   \
    {BATCH_NORMALIZATION, dnnl_backward, dnnl_use_scale | dnnl_use_shift, 3, 8,                           \
     {DNNL_ARG_SRC, DNNL_ARG_DIFF_DST, DNNL_ARG_DIFF_SRC, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE,               \
      DNNL_ARG_SCALE, DNNL_ARG_DIFF_SCALE, DNNL_ARG_DIFF_SHIFT}, {0}, 0}
#define SUM INT_MAX /* as an algorithm: the destination as it was is added */
#define ROW_SUMS_RECIPE {REDUCTION, dnnl_reduction_sum, 0, 1, 2, {DNNL_ARG_SRC, DNNL_ARG_DST}, {0}, 0}
#define COLUMN_SUMS_RECIPE {MATMUL, 0, 0, 2, 3, {DNNL_ARG_WEIGHTS, DNNL_ARG_SRC, DNNL_ARG_DST}, {0}, BIT(1)}

static const recipe recipes[] = {
    [TRAINING] = {BATCH_NORMALIZATION, dnnl_forward_training, dnnl_use_scale | dnnl_use_shift, 2, 6,
                  {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE, DNNL_ARG_SCALE, DNNL_ARG_SHIFT},
                  {0}, 0},
    [STATISTICS] = {BATCH_NORMALIZATION, dnnl_forward_training, dnnl_normalization_flags_none, 2, 4,
                    {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE}, {0}, 0},
    [INFERENCE] = {BATCH_NORMALIZATION, dnnl_forward_inference,
                   dnnl_use_global_stats | dnnl_use_scale | dnnl_use_shift, 2, 6,
                   {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE, DNNL_ARG_SCALE, DNNL_ARG_SHIFT},
                   {0}, 0},
    [BACKWARD] = BACKWARD_RECIPE,
    [GRADIENT_SUMS] = BACKWARD_RECIPE, /* of columns; their dx is not wanted */
    /* Mean and biased variance of each row; the data normalized, too. */
    [ROW_STATISTICS] = {LAYER_NORMALIZATION, dnnl_forward_training, dnnl_normalization_flags_none, 2, 4,
                        {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE}, {0}, 0},
    [ROW_SUMS] = ROW_SUMS_RECIPE,
    [COLUMN_SUMS] = COLUMN_SUMS_RECIPE,
    [ROW_SUMS_OF_DY] = ROW_SUMS_RECIPE,
    [COLUMN_SUMS_OF_DY] = COLUMN_SUMS_RECIPE,
    /* 16-bit data in float32 */
    [WIDENED] = {REORDER, 0, 0, 2, 2, {DNNL_ARG_SRC, DNNL_ARG_DST}, {0}, BIT(1)},
    /* (x - u)/sqrt(v) in float32, with a u and a v for each row */
    [CENTRED] = {LAYER_NORMALIZATION, dnnl_forward_inference, dnnl_use_global_stats, 2, 4,
                 {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE}, {0}, BIT(1)},
    /* d*dy, of d in float32, in float32 */
    [TIMES] = {BINARY, dnnl_binary_mul, 0, 3, 3, {DNNL_ARG_SRC, DNNL_ARG_SRC_1, DNNL_ARG_DST}, {0}, BIT(0) | BIT(2)},
    /* (x - u)^2 */
    [SQUARES] = {BINARY, dnnl_binary_sub, 0, 2, 3, {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_SRC_1}, {dnnl_eltwise_square},
                 0},
    /* (x - u)*v + w, with a vector element for each channel */
    [APPLY] = {BINARY, dnnl_binary_sub, 0, 2, 5,
               {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_SRC_1, POST_OP(0), POST_OP(1)},
               {dnnl_binary_mul, dnnl_binary_add}, 0},
    /* (x - u)*dy, of x in float32, in float32 */
    [PRODUCT] = {BINARY, dnnl_binary_sub, 0, 3, 4, {DNNL_ARG_SRC, POST_OP(0), DNNL_ARG_DST, DNNL_ARG_SRC_1},
                 {-dnnl_binary_mul}, BIT(0) | BIT(2)},
    /* (((x - u)*v + w) + dy)*t */
    [GRADIENT] = {BINARY, dnnl_binary_sub, 0, 3, 7,
                  {DNNL_ARG_SRC, POST_OP(2), DNNL_ARG_DST, DNNL_ARG_SRC_1, POST_OP(0), POST_OP(1), POST_OP(3)},
                  {dnnl_binary_mul, dnnl_binary_add, -dnnl_binary_add, dnnl_binary_mul}, 0},
    /* d*v added to what is there, in float32 */
    [ADDED] = {BINARY, dnnl_binary_mul, 0, 2, 3, {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_SRC_1}, {SUM}, 0},
    /* d + w */
    [SHIFTED] = {BINARY, dnnl_binary_add, 0, 2, 3, {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_SRC_1}, {0}, 0},
};
#undef BACKWARD_RECIPE
#undef ROW_SUMS_RECIPE
#undef COLUMN_SUMS_RECIPE

/* The memory a primitive computes on. All tensors of one primitive share it: oneDNN has no kernel for
 * x and y of different strides. Compared bytewise, so unused entries are zero. */
typedef struct view {
    int32_t dtype, rank;
    int64_t dims[VIEW_RANK], strides[VIEW_RANK];
} view;

typedef struct primitive {
    struct {
        int32_t kind;
        float epsilon; /* oneDNN takes no double */
        view memory;
    } key;
    void *vendor;
    int small; /* made for one thread, and run by one */
    int count;
    pbn_dnnl_exec_arg args[MAX_ARGS];
    size_t scratchpad;
    uint64_t made, last_use; /* by the handle's count; 0 in an empty place */
} primitive;

struct pbn_handle {
    void *engine, *stream;         /* in use; the engine is the stream's */
    void *own_engine, *own_stream; /* NULL in a borrowed handle */
    uint64_t calls;
    int primitives;
    primitive *latest;
    primitive cache[CACHE_SIZE];
};

static void primitive_clear(primitive *p) {
    for (int i = 0; i < p->count; i++)
        api.dnnl_memory_destroy(p->args[i].memory);
    if (p->vendor != NULL)
        api.dnnl_primitive_destroy(p->vendor);
    memset(p, 0, sizeof *p);
}

static void cache_clear(pbn_handle *h) {
    for (int i = 0; i < h->primitives; i++)
        primitive_clear(&h->cache[i]);
    h->primitives = 0;
    h->latest = NULL;
}

/* What creation needs for its own duration only. */
typedef struct temporaries {
    void *tensor, *other, *vector, *attr, *post_ops, *forward, *backward;
} temporaries;

/* A vector of `params` elements as the primitive takes it. */
static int vector_desc(const primitive *p, int64_t params, void **desc) {
    const int64_t channel[] = {1, params, 1}, row[] = {params, 1}, steps[] = {params, 1, 1};
    switch (recipes[p->key.kind].family) {
    case BINARY:
        TRY(dnnl_memory_desc_create_with_strides, (desc, p->key.memory.rank, channel, dnnl_f32, steps));
        return PBN_OK;
    case REDUCTION:
        TRY(dnnl_memory_desc_create_with_strides, (desc, 2, row, dnnl_f32, steps + 1));
        return PBN_OK;
    case MATMUL:
        TRY(dnnl_memory_desc_create_with_strides, (desc, 2, channel, dnnl_f32, steps));
        return PBN_OK;
    default:
        TRY(dnnl_memory_desc_create_with_strides, (desc, 1, &params, dnnl_f32, steps + 1));
        return PBN_OK;
    }
}

/* The memory in float32; for a sum of columns the row of ones that its matrix is multiplied by. */
static int other_desc(const primitive *p, void **desc) {
    const view *m = &p->key.memory;
    const int64_t ones[] = {1, m->dims[0]}, steps[] = {m->dims[0], 1};
    if (recipes[p->key.kind].family == MATMUL)
        TRY(dnnl_memory_desc_create_with_strides, (desc, 2, ones, dtypes[m->dtype], steps));
    else
        TRY(dnnl_memory_desc_create_with_strides, (desc, m->rank, m->dims, dnnl_f32, m->strides));
    return PBN_OK;
}

static int post_ops_fill(const int *algorithms, temporaries *t) {
    TRY(dnnl_post_ops_create, (&t->post_ops));
    for (; *algorithms != 0; algorithms++)
        if (*algorithms == dnnl_eltwise_square)
            TRY(dnnl_post_ops_append_eltwise, (t->post_ops, *algorithms, 0, 0));
        else if (*algorithms == SUM)
            TRY(dnnl_post_ops_append_sum, (t->post_ops, 1, 0, dnnl_data_type_undef));
        else
            TRY(dnnl_post_ops_append_binary,
                (t->post_ops, abs(*algorithms), *algorithms < 0 ? t->tensor : t->vector));
    TRY(dnnl_primitive_attr_set_post_ops, (t->attr, t->post_ops));
    return PBN_OK;
}

static int primitive_fill(pbn_handle *h, primitive *p, int64_t params, temporaries *t) {
    const view *m = &p->key.memory;
    const int k = p->key.kind, what = recipes[k].prop;
    const int backward = recipes[k].family == BATCH_NORMALIZATION && what == dnnl_backward;
    const float epsilon = p->key.epsilon;
    int code = PBN_OK;
    TRY(dnnl_memory_desc_create_with_strides, (&t->tensor, m->rank, m->dims, dtypes[m->dtype], m->strides));
    if ((code = vector_desc(p, params, &t->vector)) != PBN_OK || (code = other_desc(p, &t->other)) != PBN_OK)
        return code;
    TRY(dnnl_primitive_attr_create, (&t->attr));
    TRY(dnnl_primitive_attr_set_scratchpad_mode, (t->attr, dnnl_scratchpad_mode_user));
    switch (recipes[k].family) {
    case LAYER_NORMALIZATION:
        TRY(dnnl_layer_normalization_forward_primitive_desc_create,
            (&t->forward, h->engine, what, t->tensor, recipes[k].other != 0 ? t->other : t->tensor, t->vector, epsilon,
             recipes[k].flags, t->attr));
        break;
    case REDUCTION:
        TRY(dnnl_reduction_primitive_desc_create,
            (&t->forward, h->engine, what, t->tensor, t->vector, 0, 0, t->attr));
        break;
    case BINARY:
        if ((code = post_ops_fill(recipes[k].post_ops, t)) != PBN_OK)
            return code;
        TRY(dnnl_binary_primitive_desc_create,
            (&t->forward, h->engine, what, recipes[k].other & BIT(0) ? t->other : t->tensor,
             recipes[k].count > recipes[k].tensors ? t->vector : t->tensor,
             recipes[k].other & BIT(2) ? t->other : t->tensor, t->attr));
        break;
    case MATMUL:
        TRY(dnnl_matmul_primitive_desc_create,
            (&t->forward, h->engine, t->other, t->tensor, NULL, t->vector, t->attr));
        break;
    case REORDER:
        TRY(dnnl_reorder_primitive_desc_create, (&t->forward, t->tensor, h->engine, t->other, h->engine, t->attr));
        break;
    case BATCH_NORMALIZATION:
        TRY(dnnl_batch_normalization_forward_primitive_desc_create,
            (&t->forward, h->engine, backward ? dnnl_forward_training : what, t->tensor, t->tensor, epsilon,
             recipes[k].flags, t->attr));
        if (backward)
            TRY(dnnl_batch_normalization_backward_primitive_desc_create,
                (&t->backward, h->engine, what, t->tensor, t->tensor, t->tensor, epsilon, recipes[k].flags,
                 t->forward, t->attr));
    }
    const void *desc = backward ? t->backward : t->forward;
    const void *scratchpad = api.dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
    p->scratchpad = scratchpad != NULL ? api.dnnl_memory_desc_get_size(scratchpad) : 0;
    TRY(dnnl_primitive_create, (&p->vendor, desc));
    for (int i = 0; i < recipes[k].count + (p->scratchpad > 0); i++) {
        int last = i == recipes[k].count;
        p->args[i].arg = last ? DNNL_ARG_SCRATCHPAD : recipes[k].args[i];
        TRY(dnnl_memory_create, (&p->args[i].memory,
                                 last                          ? scratchpad
                                 : i >= recipes[k].tensors     ? t->vector
                                 : recipes[k].other & BIT(i)   ? t->other
                                                               : t->tensor, h->engine, NULL));
        p->count = i + 1;
    }
    return PBN_OK;
}

/* Where one thread takes as long as two, in elements: measured on an EPYC with oneDNN 3.2. The kernel for channels-first
 * memory is its plain one, eight times slower than the one for channels that lie side by side. */
static int is_small(kind k, const view *memory) {
    const int plain = recipes[k].family == BATCH_NORMALIZATION && memory->strides[1] != 1;
    const int64_t most = plain ? 1 << 11 : 1 << 15;
    return pbn_numel(memory->rank, memory->dims) <= most;
}

static int primitive_get(pbn_handle *h, kind k, float epsilon, const view *memory, int64_t params, primitive **out) {
    primitive wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.key.kind = k;
    wanted.key.epsilon = epsilon;
    wanted.key.memory = *memory;
    primitive *p = h->latest, *oldest = h->cache;
    if (p == NULL || memcmp(&p->key, &wanted.key, sizeof p->key) != 0) {
        p = NULL;
        for (int i = 0; i < h->primitives && p == NULL; i++) {
            primitive *c = &h->cache[i];
            if (memcmp(&c->key, &wanted.key, sizeof c->key) == 0)
                p = c;
            else if (c->last_use < oldest->last_use)
                oldest = c;
        }
    }
    if (p == NULL) {
        temporaries t = {0};
        creating++;
        wanted.small = is_small(k, memory);
        const int threads = one_thread(wanted.small);
        int status = primitive_fill(h, &wanted, params, &t);
        all_threads(threads);
        creating--;
        if (t.backward != NULL)
            api.dnnl_primitive_desc_destroy(t.backward);
        if (t.forward != NULL)
            api.dnnl_primitive_desc_destroy(t.forward);
        if (t.post_ops != NULL)
            api.dnnl_post_ops_destroy(t.post_ops);
        if (t.attr != NULL)
            api.dnnl_primitive_attr_destroy(t.attr);
        if (t.vector != NULL)
            api.dnnl_memory_desc_destroy(t.vector);
        if (t.other != NULL)
            api.dnnl_memory_desc_destroy(t.other);
        if (t.tensor != NULL)
            api.dnnl_memory_desc_destroy(t.tensor);
        if (status != PBN_OK) {
            primitive_clear(&wanted);
            return status;
        }
        if (h->primitives < CACHE_SIZE)
            p = &h->cache[h->primitives++];
        else
            primitive_clear(p = oldest);
        *p = wanted;
        p->made = ++h->calls;
    }
    p->last_use = ++h->calls;
    *out = h->latest = p;
    return PBN_OK;
}

static int primitive_run(pbn_handle *h, primitive *p, const void *const *pointers, void *scratchpad) {
    const int count = recipes[p->key.kind].count;
    for (int i = 0; i < p->count; i++)
        TRY(dnnl_memory_set_data_handle, (p->args[i].memory, i < count ? (void *)(uintptr_t)pointers[i] : scratchpad));
    const int threads = one_thread(p->small);
    int status = failed(api.dnnl_primitive_execute(p->vendor, h->stream, p->count, p->args),
                        "from dnnl_primitive_execute");
    all_threads(threads);
    if (status != dnnl_success)
        return status;
    /* OpenMP, TBB and sequential builds are done already; an asynchronous thread pool and SYCL wait here. */
    TRY(dnnl_stream_wait, (h->stream));
    return PBN_OK;
}
