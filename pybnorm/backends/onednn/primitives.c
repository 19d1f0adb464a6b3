/* oneDNN's primitives: made once for a handle, kept by what they are made for, and run. Part of adapter.c. */

#define VIEW_RANK 5 /* oneDNN 3.2 accepts rank 6 and above, then reads and writes out of bounds */
#define CACHE_SIZE 64
#define MAX_ARGS 9

typedef enum kind { TRAINING, STATISTICS, INFERENCE, BACKWARD, KINDS } kind;

/* What the arguments are, in the order the calls below pass pointers; `tensors` come before the vectors. */
typedef struct recipe {
    int prop;
    unsigned flags;
    int tensors, count;
    int args[MAX_ARGS - 1];
} recipe;

static const recipe recipes[] = {
    [TRAINING] = {dnnl_forward_training, dnnl_use_scale | dnnl_use_shift, 2, 6,
                  {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE, DNNL_ARG_SCALE, DNNL_ARG_SHIFT}},
    [STATISTICS] = {dnnl_forward_training, dnnl_normalization_flags_none, 2, 4,
                    {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE}},
    [INFERENCE] = {dnnl_forward_inference, dnnl_use_global_stats | dnnl_use_scale | dnnl_use_shift, 2, 6,
                   {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE, DNNL_ARG_SCALE, DNNL_ARG_SHIFT}},
    [BACKWARD] = {dnnl_backward, dnnl_use_scale | dnnl_use_shift, 3, 8,
                  {DNNL_ARG_SRC, DNNL_ARG_DIFF_DST, DNNL_ARG_DIFF_SRC, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE,
                   DNNL_ARG_SCALE, DNNL_ARG_DIFF_SCALE, DNNL_ARG_DIFF_SHIFT}},
};

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
    void *tensor, *vector, *attr, *forward, *backward;
} temporaries;

static int primitive_fill(pbn_handle *h, primitive *p, int64_t params, temporaries *t) {
    const view *m = &p->key.memory;
    const recipe *r = &recipes[p->key.kind];
    const int backward = r->prop == dnnl_backward;
    const int64_t one = 1;
    TRY(dnnl_memory_desc_create_with_strides, (&t->tensor, m->rank, m->dims, dtypes[m->dtype], m->strides));
    TRY(dnnl_memory_desc_create_with_strides, (&t->vector, 1, &params, dnnl_f32, &one));
    TRY(dnnl_primitive_attr_create, (&t->attr));
    TRY(dnnl_primitive_attr_set_scratchpad_mode, (t->attr, dnnl_scratchpad_mode_user));
    TRY(dnnl_batch_normalization_forward_primitive_desc_create,
        (&t->forward, h->engine, backward ? dnnl_forward_training : r->prop, t->tensor, t->tensor, p->key.epsilon, r->flags,
         t->attr));
    if (backward)
        TRY(dnnl_batch_normalization_backward_primitive_desc_create,
            (&t->backward, h->engine, r->prop, t->tensor, t->tensor, t->tensor, p->key.epsilon, r->flags, t->forward,
             t->attr));
    const void *desc = backward ? t->backward : t->forward;
    const void *scratchpad = api.dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
    p->scratchpad = scratchpad != NULL ? api.dnnl_memory_desc_get_size(scratchpad) : 0;
    TRY(dnnl_primitive_create, (&p->vendor, desc));
    for (int i = 0; i < r->count + (p->scratchpad > 0); i++) {
        const int last = i == r->count;
        p->args[i].arg = last ? DNNL_ARG_SCRATCHPAD : r->args[i];
        TRY(dnnl_memory_create,
            (&p->args[i].memory, last ? scratchpad : i < r->tensors ? t->tensor : t->vector, h->engine, NULL));
        p->count = i + 1;
    }
    return PBN_OK;
}

/* Where one thread takes as long as two, in elements: measured on an EPYC with oneDNN 3.2. The kernel for channels-first
 * memory is its plain one, eight times slower than the one for channels that lie side by side. */
static int is_small(const view *memory) {
    const int64_t most = memory->strides[1] != 1 ? 1 << 11 : 1 << 15;
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
        wanted.small = is_small(memory);
        const int threads = one_thread(wanted.small);
        int status = primitive_fill(h, &wanted, params, &t);
        all_threads(threads);
        creating--;
        if (t.backward != NULL)
            api.dnnl_primitive_desc_destroy(t.backward);
        if (t.forward != NULL)
            api.dnnl_primitive_desc_destroy(t.forward);
        if (t.attr != NULL)
            api.dnnl_primitive_attr_destroy(t.attr);
        if (t.vector != NULL)
            api.dnnl_memory_desc_destroy(t.vector);
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
