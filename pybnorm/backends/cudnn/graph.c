/* Graphs: operations compiled by cuDNN 9's backend API, and the batch norms among them. Part of adapter.c. */

static const char no_graph[] = "this cuDNN library lacks the backend (graph) API, or it is not cuDNN 9";
static const char no_graph_part[] =
    "a part of cuDNN that its graph API needs cannot be opened, and calling it without would abort the process";
static const char less_aligned[] = "a tensor's address is less aligned than those the plan was made for";
static const char no_graph_plan[] = "cuDNN has no engine for this graph on this device";

/* Numbers that a plan's graph reads. */
enum { VALUE_EPSILON, VALUE_FACTOR, VALUE_ZERO, VALUES };
enum { BITS = -1 }; /* in place of a pbn_dtype */

/* What a graph's tensor is bound to when it runs: a pointer of the call, a scalar on the host, or workspace. */
#define SLOT(member) SLOT_##member,
enum slot {
    SLOT_VIRTUAL,
    DATA_MEMBERS(SLOT) PARAM_MEMBERS(SLOT)
    SLOT_MASK, /* where ReLU let through, a bit for each element in memory order: the reserve */
    SLOT_VALUE, /* the first of the numbers on the host */
    SLOT_SCRATCH = SLOT_VALUE + VALUES, /* two vectors in the plan's part of the workspace */
    SLOT_COUNT = SLOT_SCRATCH + 2
};
#undef SLOT

enum { GRAPH_KEPT = 128, GRAPH_OPS = 16, GRAPH_TENSORS = 32, GRAPH_CONFIGS = 16 };

typedef struct graph {
    int status; /* the first failure; builders do nothing after it */
    int kept_count, op_count, tensor_count;
    void *kept[GRAPH_KEPT]; /* every descriptor made, to be destroyed in reverse order */
    void *ops[GRAPH_OPS];
    int64_t uids[GRAPH_TENSORS];
    int slots[GRAPH_TENSORS];
    void *plan;
    int64_t workspace;
    void *pack;                       /* the variant pack of the last run, good for the same pointers */
    void *bound[GRAPH_TENSORS + 1];   /* those pointers and the workspace */
} graph;

/* A finalized variant pack takes no new pointers (9.19), so each set of them needs one of its own. */
static void graph_drop_pack(graph *g) {
    if (g->pack != NULL)
        api.cudnnBackendDestroyDescriptor(g->pack);
    g->pack = NULL;
}

static void graph_drop(graph *g) {
    graph_drop_pack(g);
    while (g->kept_count > 0)
        api.cudnnBackendDestroyDescriptor(g->kept[--g->kept_count]);
    g->plan = NULL;
}

static void *graph_create(graph *g, int type) {
    void *desc = NULL;
    if (g->status == PBN_OK && g->kept_count == GRAPH_KEPT)
        g->status = pbn_refuse(PBN_E_INTERNAL, "a graph of more descriptors than this file makes room for");
    if (g->status != PBN_OK)
        return NULL;
    g->status = api.cudnnBackendCreateDescriptor(type, &desc);
    if (g->status != PBN_CUDNN_STATUS_SUCCESS)
        return NULL;
    g->kept[g->kept_count++] = desc;
    return desc;
}

static void graph_set(graph *g, void *desc, int attribute, int type, int64_t count, const void *values) {
    if (g->status == PBN_OK)
        g->status = api.cudnnBackendSetAttribute(desc, attribute, type, count, values);
}

static void graph_set_int(graph *g, void *desc, int attribute, int type, int value) {
    graph_set(g, desc, attribute, type, 1, &value);
}

static void graph_set_desc(graph *g, void *desc, int attribute, void *value) {
    graph_set(g, desc, attribute, PBN_CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void graph_finish(graph *g, void *desc) {
    if (g->status == PBN_OK)
        g->status = api.cudnnBackendFinalize(desc);
}

static void *graph_tensor(graph *g, int slot, int dtype, int rank, const int64_t *dims, const int64_t *strides,
                          int64_t alignment) {
    int vendor_dtype = 0;
    const bool yes = true;
    int64_t uid = g->tensor_count + 1;
    void *desc = graph_create(g, PBN_CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    if (g->status == PBN_OK && g->tensor_count == GRAPH_TENSORS)
        g->status = pbn_refuse(PBN_E_INTERNAL, "a graph of more tensors than this file makes room for");
    if (dtype == BITS)
        vendor_dtype = PBN_CUDNN_DATA_BOOLEAN;
    else if (g->status == PBN_OK)
        g->status = pbn_to_vendor_dtype(dtypes, dtype, &vendor_dtype);
    if (g->status != PBN_OK)
        return NULL;
    graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_UNIQUE_ID, PBN_CUDNN_TYPE_INT64, 1, &uid);
    graph_set_int(g, desc, PBN_CUDNN_ATTR_TENSOR_DATA_TYPE, PBN_CUDNN_TYPE_DATA_TYPE, vendor_dtype);
    graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_DIMENSIONS, PBN_CUDNN_TYPE_INT64, rank, dims);
    graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_STRIDES, PBN_CUDNN_TYPE_INT64, rank, strides);
    graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, PBN_CUDNN_TYPE_INT64, 1, &alignment);
    if (slot == SLOT_VIRTUAL)
        graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_IS_VIRTUAL, PBN_CUDNN_TYPE_BOOLEAN, 1, &yes);
    else if (slot >= SLOT_VALUE && slot < SLOT_SCRATCH)
        graph_set(g, desc, PBN_CUDNN_ATTR_TENSOR_IS_BY_VALUE, PBN_CUDNN_TYPE_BOOLEAN, 1, &yes);
    graph_finish(g, desc);
    g->uids[g->tensor_count] = uid;
    g->slots[g->tensor_count++] = slot;
    return desc;
}

static void graph_add(graph *g, void *op) {
    graph_finish(g, op);
    if (g->status == PBN_OK && g->op_count == GRAPH_OPS)
        g->status = pbn_refuse(PBN_E_INTERNAL, "a graph of more operations than this file makes room for");
    if (g->status == PBN_OK)
        g->ops[g->op_count++] = op;
}

static void *pointwise_operation(graph *g, int mode) {
    void *how = graph_create(g, PBN_CUDNN_BACKEND_POINTWISE_DESCRIPTOR), *op;
    graph_set_int(g, how, PBN_CUDNN_ATTR_POINTWISE_MODE, PBN_CUDNN_TYPE_POINTWISE_MODE, mode);
    graph_set_int(g, how, PBN_CUDNN_ATTR_POINTWISE_MATH_PREC, PBN_CUDNN_TYPE_DATA_TYPE, PBN_CUDNN_DATA_FLOAT);
    if (mode == PBN_CUDNN_POINTWISE_RELU_FWD || mode == PBN_CUDNN_POINTWISE_RELU_BWD)
        graph_set_int(g, how, PBN_CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, PBN_CUDNN_TYPE_NAN_PROPOGATION,
                      PBN_CUDNN_PROPAGATE_NAN);
    graph_finish(g, how);
    op = graph_create(g, PBN_CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    return op;
}

/* out = a (mode) b, computed in float32. */
static void graph_pointwise(graph *g, int mode, void *a, void *b, void *out) {
    void *op = pointwise_operation(g, mode);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a);
    if (b != NULL)
        graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out);
    graph_add(g, op);
}

/* out = dy where x > 0, else 0. */
static void graph_relu_backward(graph *g, void *x, void *dy, void *out) {
    void *op = pointwise_operation(g, PBN_CUDNN_POINTWISE_RELU_BWD);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_DYDESC, dy);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_POINTWISE_DXDESC, out);
    graph_add(g, op);
}

/* Tries the engine configurations of one heuristic mode in its order; the `skip`-th that compiles is taken. */
static int graph_try_plans(graph *g, void *vendor_handle, void *operations, int heuristic, int *skip) {
    void *heuristics, *configs[GRAPH_CONFIGS];
    int64_t count = 0, ignored;
    int first = g->kept_count, taken = 0;
    heuristics = graph_create(g, PBN_CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    graph_set_desc(g, heuristics, PBN_CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations);
    graph_set_int(g, heuristics, PBN_CUDNN_ATTR_ENGINEHEUR_MODE, PBN_CUDNN_TYPE_HEUR_MODE, heuristic);
    graph_finish(g, heuristics);
    if (g->status != PBN_OK)
        return 0;
    for (int i = 0; i < GRAPH_CONFIGS; i++)
        configs[i] = graph_create(g, PBN_CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->status == PBN_OK)
        g->status = api.cudnnBackendGetAttribute(heuristics, PBN_CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                 PBN_CUDNN_TYPE_BACKEND_DESCRIPTOR, GRAPH_CONFIGS, &count, configs);
    /* The count is the vendor's; only so many descriptors were there to be filled. */
    for (int i = 0; g->status == PBN_OK && i < GRAPH_CONFIGS && i < count && !taken; i++) {
        void *plan = graph_create(g, PBN_CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        graph_set(g, plan, PBN_CUDNN_ATTR_EXECUTION_PLAN_HANDLE, PBN_CUDNN_TYPE_HANDLE, 1, &vendor_handle);
        graph_set_desc(g, plan, PBN_CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
        if (g->status != PBN_OK)
            break;
        if (api.cudnnBackendFinalize(plan) != PBN_CUDNN_STATUS_SUCCESS || (*skip)-- > 0) {
            api.cudnnBackendDestroyDescriptor(g->kept[--g->kept_count]);
            continue;
        }
        g->status = api.cudnnBackendGetAttribute(plan, PBN_CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                                 PBN_CUDNN_TYPE_INT64, 1, &ignored, &g->workspace);
        g->plan = plan;
        taken = 1;
    }
    if (!taken) /* room for the next mode */
        while (g->kept_count > first)
            api.cudnnBackendDestroyDescriptor(g->kept[--g->kept_count]);
    return taken;
}

static int graph_build(graph *g, void *vendor_handle, int skip) {
    static const int heuristics[] = {PBN_CUDNN_HEUR_MODE_A, PBN_CUDNN_HEUR_MODE_FALLBACK};
    void *operations = graph_create(g, PBN_CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph_set(g, operations, PBN_CUDNN_ATTR_OPERATIONGRAPH_OPS, PBN_CUDNN_TYPE_BACKEND_DESCRIPTOR, g->op_count, g->ops);
    graph_set(g, operations, PBN_CUDNN_ATTR_OPERATIONGRAPH_HANDLE, PBN_CUDNN_TYPE_HANDLE, 1, &vendor_handle);
    graph_finish(g, operations);
    for (int i = 0; g->status == PBN_OK && i < 2; i++) {
        if (graph_try_plans(g, vendor_handle, operations, heuristics[i], &skip))
            return g->status;
        if (g->status != PBN_OK && cudnn_status_class(g->status) == PBN_CLASS_NOT_SUPPORTED)
            g->status = PBN_OK; /* this mode has nothing; the next may */
    }
    return g->status != PBN_OK ? g->status : pbn_refuse(PBN_E_UNSUPPORTED, no_graph_plan);
}

static int graph_run(graph *g, void *vendor_handle, void *const *slots, void *workspace) {
    void *pointers[GRAPH_TENSORS + 1], *pack = NULL;
    int64_t uids[GRAPH_TENSORS];
    int count = 0, status;
    for (int i = 0; i < g->tensor_count; i++)
        if (g->slots[i] != SLOT_VIRTUAL) {
            uids[count] = g->uids[i];
            pointers[count++] = slots[g->slots[i]];
        }
    pointers[count] = workspace;
    if (g->pack == NULL || memcmp(pointers, g->bound, (size_t)(count + 1) * sizeof *pointers) != 0) {
        graph_drop_pack(g);
        status = api.cudnnBackendCreateDescriptor(PBN_CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
        if (status != PBN_OK)
            return status;
        status = api.cudnnBackendSetAttribute(pack, PBN_CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, PBN_CUDNN_TYPE_INT64, count,
                                              uids);
        if (status == PBN_OK)
            status = api.cudnnBackendSetAttribute(pack, PBN_CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                                                  PBN_CUDNN_TYPE_VOID_PTR, count, pointers);
        if (status == PBN_OK)
            status = api.cudnnBackendSetAttribute(pack, PBN_CUDNN_ATTR_VARIANT_PACK_WORKSPACE, PBN_CUDNN_TYPE_VOID_PTR,
                                                  1, &workspace);
        if (status == PBN_OK)
            status = api.cudnnBackendFinalize(pack);
        if (status != PBN_OK) {
            api.cudnnBackendDestroyDescriptor(pack);
            return status;
        }
        g->pack = pack;
        memcpy(g->bound, pointers, sizeof pointers);
    }
    return api.cudnnBackendExecute(vendor_handle, g->plan, g->pack);
}

static int graph_ready(void) {
    static const char *const parts[] = {"libcudnn_heuristic.so.9", "libcudnn_engines_precompiled.so.9",
                                        "libcudnn_engines_runtime_compiled.so.9"};
    static atomic_int opened;
    pbn_library part, here;
    if (api.major != 9 || api.cudnnBackendCreateDescriptor == NULL || api.cudnnBackendDestroyDescriptor == NULL ||
        api.cudnnBackendSetAttribute == NULL || api.cudnnBackendGetAttribute == NULL ||
        api.cudnnBackendFinalize == NULL || api.cudnnBackendExecute == NULL)
        return pbn_refuse(PBN_E_SYMBOL, no_graph);
    if (atomic_load(&opened))
        return PBN_OK;
    memcpy(here.path, loaded_path, sizeof here.path);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (open_part(&here, parts[i], &part) != PBN_OK)
            return pbn_refuse(PBN_E_LIBRARY, no_graph_part);
    atomic_store(&opened, 1);
    return PBN_OK;
}

/* The plain entry point's inference takes up to PLAIN_ROWS images. */
enum { PLAN_ALIGNMENT = 256, PLAIN_ROWS = 65535, PLAN_NAME = 24 };

struct pbn_plan {
    int kind; /* index into algorithm_names */
    char name[PLAN_NAME];
    const char *why;
    void *context; /* the handle's */
    int mode; /* pbn_mode of a plain or Ex call */
    size_t workspace;
    size_t reserve;                 /* with an activation: bytes that backward is given as forward left them */
    void *activation;               /* and the vendor's descriptor of it */
    int fused;                      /* made for calls with an activation */
    int any;                        /* chosen by "auto" or "fast" */
    size_t scratch;                 /* bytes in front of the vendor's own part of it */
    size_t offsets[SLOT_COUNT];
    float values[VALUES];           /* read by the graph from the host */
    int64_t alignment;
    graph graph;
    pbn_tensor one, packed;         /* of ex with an activation: (1, C, 1, 1), and every data tensor */
};

static const char *const algorithm_names[] = {"plain", "spatial", "persistent", "ex", "graph", "pointwise", NULL};
enum { PLAIN, SPATIAL, PERSISTENT, EX, GRAPH, POINTWISE };
static const char *const numbered_names[] = {"graph", "pointwise", NULL};

static size_t rounded(size_t bytes) {
    return (bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT * PLAN_ALIGNMENT;
}

/* Channels-last in memory: also where channels-first means the same, as for (N, C) and (N, C, 1, 1). */
static int is_channels_last_memory(const pbn_tensor *t) {
    int order[PBN_MAX_RANK];
    for (int i = 0; i < t->rank; i++)
        order[i] = i == 0 ? 0 : i == t->rank - 1 ? 1 : i + 1;
    return pbn_is_packed(t->rank, t->dims, t->strides, order);
}

static int all_channels_last(const pbn_call *call) {
    return every(call, is_channels_last_memory);
}

static int is_channels_first(const pbn_tensor *t) {
    return t->layout == PBN_CHANNELS_FIRST;
}

static int blends(const pbn_call *call) {
    return call->alpha != 1 || call->beta != 0 ||
           (call->operation == PBN_OP_BACKWARD && (call->alpha_param != 1 || call->beta_param != 0));
}

/* dims and channels-last strides of x at rank 4 or 5, and of a parameter beside it. */
typedef struct view {
    int rank;
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int64_t param_dims[PBN_MAX_RANK], param_strides[PBN_MAX_RANK];
    int64_t one[PBN_MAX_RANK];
} view;

static int make_view(const pbn_tensor *x, view *v) {
    int status = pbn_fold(x, 4, 5, &v->rank, v->dims, v->strides);
    if (status != PBN_OK)
        return status;
    pbn_packed_strides(v->rank, v->dims, is_channels_last_memory(x) ? PBN_CHANNELS_LAST : PBN_CHANNELS_FIRST,
                       v->strides);
    for (int i = 0; i < v->rank; i++)
        v->param_dims[i] = v->one[i] = 1;
    v->param_dims[1] = v->dims[1];
    pbn_packed_strides(v->rank, v->param_dims, PBN_CHANNELS_LAST, v->param_strides);
    return PBN_OK;
}

static void *param_tensor(graph *g, int slot, const view *v) {
    return graph_tensor(g, slot, PBN_FLOAT32, v->rank, v->param_dims, v->param_strides, 4);
}

static void *scalar_tensor(graph *g, int slot, const view *v) {
    return graph_tensor(g, slot, PBN_FLOAT32, v->rank, v->one, v->one, 4);
}

static void *data_tensor(const pbn_plan *p, graph *g, int slot, int dtype, const view *v) {
    return graph_tensor(g, slot, dtype, v->rank, v->dims, v->strides, slot == SLOT_VIRTUAL ? 16 : p->alignment);
}

/* y = relu(shown + z), z if asked for. Backward finds out from x where ReLU let through. With z it cannot, so training
 * writes that down. */
static void add_activation(pbn_plan *p, graph *g, const pbn_call *call, const view *v, void *shown, void *y) {
    if (residual(call) != NULL) {
        void *total = data_tensor(p, g, SLOT_VIRTUAL, PBN_FLOAT32, v);
        graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, shown, data_tensor(p, g, SLOT_z, call->x_desc->dtype, v), total);
        shown = total;
    }
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RELU_FWD, shown, NULL, y);
    if (residual(call) != NULL && call->operation == PBN_OP_FORWARD_TRAINING)
        graph_pointwise(g, PBN_CUDNN_POINTWISE_CMP_GT, y, scalar_tensor(g, SLOT_VALUE + VALUE_ZERO, v),
                        data_tensor(p, g, SLOT_MASK, BITS, v));
}

static void *norm_operation(graph *g, int phase) {
    void *op = graph_create(g, PBN_CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR);
    graph_set_int(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_MODE, PBN_CUDNN_TYPE_NORM_MODE, PBN_CUDNN_BATCH_NORM);
    graph_set_int(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, PBN_CUDNN_TYPE_NORM_FWD_PHASE, phase);
    return op;
}

/* What a backward's operations share: cuDNN has kernels for tensors that are the same, not for equal ones. */
typedef struct backward_tensors {
    void *x, *scale, *mean, *inverse;
} backward_tensors;

/* The gradient of what ReLU is applied to, made of dy. With a residual it is dz. */
static void *drop_activation(pbn_plan *p, graph *g, const pbn_call *call, const view *v, const backward_tensors *t,
                             void *dy) {
    const int dtype = call->x_desc->dtype;
    void *masked = data_tensor(p, g, residual(call) != NULL ? SLOT_dz : SLOT_VIRTUAL, dtype, v), *op, *y;
    if (residual(call) != NULL) {
        graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, dy, data_tensor(p, g, SLOT_MASK, BITS, v), masked);
        return masked;
    }
    y = data_tensor(p, g, SLOT_VIRTUAL, PBN_FLOAT32, v);
    op = norm_operation(g, PBN_CUDNN_NORM_FWD_INFERENCE);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, t->x);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC, t->mean);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC, t->inverse);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, t->scale);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, param_tensor(g, SLOT_bias, v));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, y);
    graph_add(g, op);
    graph_relu_backward(g, y, dy, masked);
    return masked;
}

/* NORM_FORWARD in its training phase. It writes mean and inverse standard deviation; where the caller does not
 * want them, they go to the workspace. Running statistics are updated in place (checked on an H200, 9.19). */
static int build_norm_forward(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graph;
    view v;
    int status = make_view(call->x_desc, &v), dtype = call->x_desc->dtype;
    const int saved = call->saved_mean != NULL;
    void *op, *mean, *variance, *shown, *y;
    if (status != PBN_OK)
        return status;
    y = data_tensor(p, g, SLOT_y, dtype, &v);
    shown = fuses(call) ? data_tensor(p, g, SLOT_VIRTUAL, PBN_FLOAT32, &v) : y;
    op = norm_operation(g, PBN_CUDNN_NORM_FWD_TRAINING);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, data_tensor(p, g, SLOT_x, dtype, &v));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, shown);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, param_tensor(g, SLOT_scale, &v));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, param_tensor(g, SLOT_bias, &v));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC,
                   scalar_tensor(g, SLOT_VALUE + VALUE_EPSILON, &v));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC,
                   param_tensor(g, saved ? SLOT_saved_mean : SLOT_SCRATCH, &v));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC,
                   param_tensor(g, saved ? SLOT_saved_inv_variance : SLOT_SCRATCH + 1, &v));
    if (!saved) {
        p->offsets[SLOT_SCRATCH + 1] = rounded((size_t)v.dims[1] * sizeof(float));
        p->scratch = 2 * p->offsets[SLOT_SCRATCH + 1];
    }
    if (call->running_mean != NULL) {
        graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC,
                       scalar_tensor(g, SLOT_VALUE + VALUE_FACTOR, &v));
        mean = param_tensor(g, SLOT_running_mean, &v);
        variance = param_tensor(g, SLOT_running_variance, &v);
        graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC, mean);
        graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC, variance);
        graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC,
                       param_tensor(g, SLOT_running_mean, &v));
        graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC,
                       param_tensor(g, SLOT_running_variance, &v));
    }
    graph_add(g, op);
    if (fuses(call))
        add_activation(p, g, call, &v, shown, y);
    return graph_build(g, vendor_handle, skip);
}

static int build_norm_backward(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graph;
    view v;
    int status = make_view(call->x_desc, &v), dtype = call->x_desc->dtype;
    backward_tensors t;
    void *op, *dy;
    if (status != PBN_OK)
        return status;
    t.x = data_tensor(p, g, SLOT_x, dtype, &v);
    t.scale = param_tensor(g, SLOT_scale, &v);
    t.mean = param_tensor(g, SLOT_saved_mean, &v);
    t.inverse = param_tensor(g, SLOT_saved_inv_variance, &v);
    dy = data_tensor(p, g, SLOT_dy, dtype, &v);
    if (fuses(call))
        dy = drop_activation(p, g, call, &v, &t, dy);
    op = graph_create(g, PBN_CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR);
    graph_set_int(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_MODE, PBN_CUDNN_TYPE_NORM_MODE, PBN_CUDNN_BATCH_NORM);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_XDESC, t.x);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC, dy);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC, data_tensor(p, g, SLOT_dx, dtype, &v));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC, t.scale);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC, t.mean);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC, t.inverse);
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC, param_tensor(g, SLOT_dscale, &v));
    graph_set_desc(g, op, PBN_CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC, param_tensor(g, SLOT_dbias, &v));
    graph_add(g, op);
    return graph_build(g, vendor_handle, skip);
}

/* y = ((x - mean) * rsqrt(variance + epsilon)) * scale + bias in one kernel. x - mean first, where the plain entry
 * point's channels-last kernel folds to a*x + b, which loses the digits that a large mean cancels. + z and relu follow in
 * the same kernel if asked for. */
static int build_pointwise(pbn_plan *p, const pbn_call *call, void *vendor_handle, int skip) {
    graph *g = &p->graph;
    view v;
    int status = make_view(call->x_desc, &v), dtype = call->x_desc->dtype;
    void *x, *shifted, *sum, *root, *normal, *scaled, *shown, *y;
    if (status != PBN_OK)
        return status;
    x = data_tensor(p, g, SLOT_x, dtype, &v);
    y = data_tensor(p, g, SLOT_y, dtype, &v);
    shifted = data_tensor(p, g, SLOT_VIRTUAL, PBN_FLOAT32, &v);
    normal = data_tensor(p, g, SLOT_VIRTUAL, PBN_FLOAT32, &v);
    scaled = data_tensor(p, g, SLOT_VIRTUAL, PBN_FLOAT32, &v);
    sum = param_tensor(g, SLOT_VIRTUAL, &v);
    root = param_tensor(g, SLOT_VIRTUAL, &v);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, param_tensor(g, SLOT_running_variance, &v),
                    scalar_tensor(g, SLOT_VALUE + VALUE_EPSILON, &v), sum);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_RSQRT, sum, NULL, root);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_SUB, x, param_tensor(g, SLOT_running_mean, &v), shifted);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, shifted, root, normal);
    graph_pointwise(g, PBN_CUDNN_POINTWISE_MUL, normal, param_tensor(g, SLOT_scale, &v), scaled);
    shown = fuses(call) ? data_tensor(p, g, SLOT_VIRTUAL, PBN_FLOAT32, &v) : y;
    graph_pointwise(g, PBN_CUDNN_POINTWISE_ADD, scaled, param_tensor(g, SLOT_bias, &v), shown);
    if (fuses(call))
        add_activation(p, g, call, &v, shown, y);
    return graph_build(g, vendor_handle, skip);
}

static uintptr_t param_bits(const pbn_call *call) {
    return 0 PARAM_MEMBERS(OR_BITS);
}

/* The largest power of two up to 16 that divides every data address; 16 where none is known yet. */
static int64_t common_alignment(const pbn_call *call) {
    const uintptr_t all = data_bits(call) | 16;
    return (int64_t)(all & (~all + 1));
}

/* The norm graphs' kernels load several elements at once whatever alignment their tensors are declared with: data at
 * 4 bytes lost the context (9.19, H200). Ex without an activation is known to do with 8 bytes of the data; what its
 * kernels, and the fused ones, want of parameters is not known, so 16 is caution. The plain entry point's kernels, the
 * pointwise graph's take any element's address (the same). */
enum { WIDE_ALIGNMENT = 16 };
static const char graph_alignment[] = "the norm graphs' kernels load several elements at once: tensors and parameters "
                                      "must be 16-byte aligned, or the CUDA context would be lost";

/* What the graphs' slots stand for in this call. */
static void bind(pbn_plan *p, const pbn_call *call, void **slots) {
#define BIND(member) slots[SLOT_##member] = (void *)(uintptr_t)call->member;
    memset(slots, 0, SLOT_COUNT * sizeof *slots);
    DATA_MEMBERS(BIND) PARAM_MEMBERS(BIND)
#undef BIND
    slots[SLOT_MASK] = call->reserve;
    for (int i = SLOT_VALUE; i < SLOT_SCRATCH; i++)
        slots[i] = &p->values[i - SLOT_VALUE];
    for (int i = SLOT_SCRATCH; call->workspace != NULL && i < SLOT_COUNT; i++)
        slots[i] = (char *)call->workspace + p->offsets[i];
}

static int run_graph(pbn_handle *handle, pbn_plan *p, const pbn_call *call) {
    char *workspace = call->workspace;
    void *slots[SLOT_COUNT];
    if ((data_bits(call) & (uintptr_t)(p->alignment - 1)) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, less_aligned);
    if (p->kind == GRAPH && (param_bits(call) & (WIDE_ALIGNMENT - 1)) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, graph_alignment);
    bind(p, call, slots);
    return graph_run(&p->graph, handle->vendor, slots, workspace != NULL ? workspace + p->scratch : NULL);
}
