/* oneDNN (CPU): everything that is oneDNN and nothing else is.
 *
 * The first part holds the vendor's facts alone: numbers, structures and prototypes as oneDNN's
 * C API has them since 3.0. tests/abi compares it with the real headers and the test doubles are
 * generated from it, so it must stay readable by C++; PBN_PROTOTYPES_ONLY stops after it.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>

/* C(vendor's name, number) */
#define PBN_DNNL_CONSTANTS(C)            \
    C(dnnl_success, 0)                   \
    C(dnnl_out_of_memory, 1)             \
    C(dnnl_invalid_arguments, 2)         \
    C(dnnl_unimplemented, 3)             \
    C(dnnl_last_impl_reached, 4)         \
    C(dnnl_runtime_error, 5)             \
    C(dnnl_not_required, 6)              \
    C(dnnl_invalid_graph, 7)             \
    C(dnnl_invalid_graph_op, 8)          \
    C(dnnl_invalid_shape, 9)             \
    C(dnnl_invalid_data_type, 10)        \
    C(dnnl_f16, 1)                       \
    C(dnnl_bf16, 2)                      \
    C(dnnl_f32, 3)                       \
    C(dnnl_f64, 7)                       \
    C(dnnl_blocked, 2)                   \
    C(dnnl_cpu, 1)                       \
    C(dnnl_stream_default_flags, 1)      \
    C(dnnl_forward_training, 64)         \
    C(dnnl_forward_inference, 96)        \
    C(dnnl_backward, 128)                \
    C(dnnl_normalization_flags_none, 0)  \
    C(dnnl_use_global_stats, 1)          \
    C(dnnl_use_scale, 2)                 \
    C(dnnl_use_shift, 4)                 \
    C(dnnl_scratchpad_mode_user, 1)      \
    C(dnnl_query_scratchpad_md, 136)     \
    C(dnnl_query_strides, 14)            \
    C(dnnl_query_ndims_s32, 256)         \
    C(dnnl_query_dims, 257)              \
    C(dnnl_query_data_type, 258)         \
    C(dnnl_query_submemory_offset_s64, 259) \
    C(dnnl_query_padded_dims, 260)       \
    C(dnnl_query_format_kind, 262)       \
    C(dnnl_query_inner_nblks_s32, 263)   \
    C(DNNL_MAX_NDIMS, 12)                \
    C(DNNL_RUNTIME_NONE, 0)              \
    C(DNNL_RUNTIME_OMP, 2)               \
    C(DNNL_RUNTIME_SYCL, 512)            \
    C(dnnl_binary_add, 131056)           \
    C(dnnl_binary_mul, 131057)           \
    C(dnnl_binary_sub, 131061)           \
    C(dnnl_reduction_sum, 196596)        \
    C(DNNL_ARG_SRC, 1)                   \
    C(DNNL_ARG_SRC_1, 2)                 \
    C(DNNL_ARG_DST, 17)                  \
    C(DNNL_ARG_MEAN, 49)                 \
    C(DNNL_ARG_VARIANCE, 50)             \
    C(DNNL_ARG_SCALE, 51)                \
    C(DNNL_ARG_SHIFT, 52)                \
    C(DNNL_ARG_SCRATCHPAD, 80)           \
    C(DNNL_ARG_DIFF_SRC, 129)            \
    C(DNNL_ARG_DIFF_DST, 145)            \
    C(DNNL_ARG_DIFF_SCALE, 255)          \
    C(DNNL_ARG_DIFF_SHIFT, 256)          \
    C(DNNL_ARG_ATTR_MULTIPLE_POST_OP_BASE, 32768)

typedef struct pbn_dnnl_version { /* dnnl_version_t */
    int major, minor, patch;
    const char *hash;
    unsigned cpu_runtime, gpu_runtime;
} pbn_dnnl_version;

typedef struct pbn_dnnl_exec_arg { /* dnnl_exec_arg_t */
    int arg;
    void *memory;
} pbn_dnnl_exec_arg;

/* (result, name, (parameters)): enums are int, opaque handles void *. */
#define PBN_DNNL_SYMBOLS(REQUIRED, OPTIONAL)                                                                        \
    REQUIRED(const pbn_dnnl_version *, dnnl_version, (void))                                                        \
    REQUIRED(int, dnnl_engine_create, (void **engine, int kind, size_t index))                                      \
    REQUIRED(int, dnnl_engine_destroy, (void *engine))                                                              \
    REQUIRED(int, dnnl_engine_get_kind, (void *engine, int *kind))                                                  \
    REQUIRED(int, dnnl_stream_create, (void **stream, void *engine, unsigned flags))                                \
    REQUIRED(int, dnnl_stream_destroy, (void *stream))                                                              \
    REQUIRED(int, dnnl_stream_get_engine, (const void *stream, void **engine))                                      \
    REQUIRED(int, dnnl_stream_wait, (void *stream))                                                                 \
    REQUIRED(int, dnnl_memory_create, (void **memory, const void *desc, void *engine, void *data))                  \
    REQUIRED(int, dnnl_memory_destroy, (void *memory))                                                              \
    REQUIRED(int, dnnl_memory_set_data_handle, (void *memory, void *data))                                          \
    REQUIRED(int, dnnl_memory_desc_create_with_strides,                                                             \
             (void **desc, int rank, const int64_t *dims, int data_type, const int64_t *strides))                   \
    REQUIRED(int, dnnl_memory_desc_destroy, (void *desc))                                                           \
    REQUIRED(int, dnnl_memory_desc_query, (const void *desc, int what, void *result))                               \
    REQUIRED(size_t, dnnl_memory_desc_get_size, (const void *desc))                                                 \
    REQUIRED(int, dnnl_primitive_attr_create, (void **attr))                                                        \
    REQUIRED(int, dnnl_primitive_attr_destroy, (void *attr))                                                        \
    REQUIRED(int, dnnl_primitive_attr_set_scratchpad_mode, (void *attr, int mode))                                  \
    REQUIRED(int, dnnl_batch_normalization_forward_primitive_desc_create,                                           \
             (void **primitive_desc, void *engine, int prop_kind, const void *src, const void *dst, float epsilon,  \
              unsigned flags, const void *attr))                                                                    \
    REQUIRED(int, dnnl_batch_normalization_backward_primitive_desc_create,                                          \
             (void **primitive_desc, void *engine, int prop_kind, const void *diff_src, const void *diff_dst,       \
              const void *src, float epsilon, unsigned flags, const void *forward_hint, const void *attr))          \
    REQUIRED(const void *, dnnl_primitive_desc_query_md, (const void *primitive_desc, int what, int index))         \
    REQUIRED(int, dnnl_primitive_desc_destroy, (void *primitive_desc))                                              \
    REQUIRED(int, dnnl_primitive_create, (void **primitive, const void *primitive_desc))                            \
    REQUIRED(int, dnnl_primitive_execute,                                                                           \
             (const void *primitive, void *stream, int count, const pbn_dnnl_exec_arg *args))                       \
    REQUIRED(int, dnnl_primitive_destroy, (void *primitive))                                                        \
    OPTIONAL(const char *, dnnl_status2str, (int status))                                                           \
    OPTIONAL(int, dnnl_layer_normalization_forward_primitive_desc_create,                                           \
             (void **primitive_desc, void *engine, int prop_kind, const void *src, const void *dst,                 \
              const void *statistics, float epsilon, unsigned flags, const void *attr))                             \
    OPTIONAL(int, dnnl_reduction_primitive_desc_create,                                                             \
             (void **primitive_desc, void *engine, int algorithm, const void *src, const void *dst, float p,        \
              float epsilon, const void *attr))                                                                     \
    OPTIONAL(int, dnnl_binary_primitive_desc_create,                                                                \
             (void **primitive_desc, void *engine, int algorithm, const void *src0, const void *src1,               \
              const void *dst, const void *attr))                                                                   \
    OPTIONAL(int, dnnl_post_ops_create, (void **post_ops))                                                          \
    OPTIONAL(int, dnnl_post_ops_append_binary, (void *post_ops, int algorithm, const void *src1))                   \
    OPTIONAL(int, dnnl_post_ops_destroy, (void *post_ops))                                                          \
    OPTIONAL(int, dnnl_primitive_attr_set_post_ops, (void *attr, const void *post_ops))

#define PBN_DNNL_TYPEDEF(result, name, parameters) typedef result(*pbn_##name##_fn) parameters;
PBN_DNNL_SYMBOLS(PBN_DNNL_TYPEDEF, PBN_DNNL_TYPEDEF)
#undef PBN_DNNL_TYPEDEF

#ifndef PBN_PROTOTYPES_ONLY

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "pybnorm/adapter.h"
#include "pybnorm/dl.h"
#include "pybnorm/shim.h"

#define PBN_DNNL_ENUMERATOR(name, number) name = number,
enum { PBN_DNNL_CONSTANTS(PBN_DNNL_ENUMERATOR) };
#undef PBN_DNNL_ENUMERATOR

/* ------------------------------------------------------------------ library */

typedef struct vendor_table {
    PBN_DNNL_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
    unsigned char runs[4][PBN_OP_AXPBY]; /* [dtype][operation]: the library has a primitive for this processor */
    int loses_threads; /* a forked child that needs more than one thread waits for the parent's */
    int (*omp_get_max_threads)(void);
    void (*omp_set_num_threads)(int);
} vendor_table;

static vendor_table api;
static int loaded;

static int failed(int status, const char *call) {
    if (status != dnnl_success)
        pbn_reason = call;
    return status;
}

/* A vendor call whose failure leaves the function at once. */
#define TRY(name, arguments)                                    \
    do {                                                        \
        int status_ = failed(api.name arguments, "from " #name); \
        if (status_ != dnnl_success)                            \
            return status_;                                     \
    } while (0)

static const int dtypes[] = {dnnl_f32, dnnl_f64, dnnl_f16, dnnl_bf16};

/* Asks for each primitive once: the answer depends on the instruction set, not only on the version. */
static int probe(vendor_table *v, const char **call) {
    static const int kinds[] = {PBN_FLOAT32, PBN_FLOAT16, PBN_BFLOAT16};
    static const int64_t dims[] = {2, 16, 2, 2}, strides[] = {64, 4, 2, 1};
    const unsigned affine = dnnl_use_scale | dnnl_use_shift;
    void *engine = NULL;
    int status = v->dnnl_engine_create(&engine, dnnl_cpu, 0);
    *call = "dnnl_engine_create";
    for (size_t i = 0; status == dnnl_success && i < sizeof kinds / sizeof *kinds; i++) {
        unsigned char *row = v->runs[kinds[i]];
        void *md = NULL, *train = NULL, *infer = NULL, *back = NULL;
        *call = "dnnl_memory_desc_create_with_strides";
        status = v->dnnl_memory_desc_create_with_strides(&md, 4, dims, dtypes[kinds[i]], strides);
        if (status != dnnl_success)
            break;
        row[PBN_OP_FORWARD_TRAINING] = v->dnnl_batch_normalization_forward_primitive_desc_create(
                                           &train, engine, dnnl_forward_training, md, md, 0, affine, NULL) == 0;
        row[PBN_OP_FORWARD_INFERENCE] =
            v->dnnl_batch_normalization_forward_primitive_desc_create(
                &infer, engine, dnnl_forward_inference, md, md, 0, affine | dnnl_use_global_stats, NULL) == 0;
        if (row[PBN_OP_FORWARD_TRAINING])
            row[PBN_OP_BACKWARD] = v->dnnl_batch_normalization_backward_primitive_desc_create(
                                       &back, engine, dnnl_backward, md, md, md, 0, affine, train, NULL) == 0;
        if (back != NULL)
            v->dnnl_primitive_desc_destroy(back);
        if (infer != NULL)
            v->dnnl_primitive_desc_destroy(infer);
        if (train != NULL)
            v->dnnl_primitive_desc_destroy(train);
        v->dnnl_memory_desc_destroy(md);
    }
    if (engine != NULL)
        v->dnnl_engine_destroy(engine);
    return status;
}

static int resolve(pbn_library *lib, vendor_table *table) {
    /* The version before the rest: an older library lacks symbols only because it is older. */
    PBN_DL_REQUIRE(, dnnl_version, )
    const pbn_dnnl_version *version = table->dnnl_version();
    if (version == NULL) {
        snprintf(lib->message, sizeof lib->message, "dnnl_version returned NULL");
        return PBN_E_VERSION;
    }
    lib->version[0] = version->major;
    lib->version[1] = version->minor;
    lib->version[2] = version->patch;
    if (version->major != 3) {
        snprintf(lib->message, sizeof lib->message, "oneDNN %d.%d.%d; this backend speaks oneDNN 3", version->major,
                 version->minor, version->patch);
        return PBN_E_VERSION;
    }
    if (version->cpu_runtime == DNNL_RUNTIME_NONE || (version->cpu_runtime & DNNL_RUNTIME_SYCL) != 0) {
        snprintf(lib->message, sizeof lib->message,
                 "oneDNN %d.%d.%d was built %s; a native CPU runtime (OpenMP, TBB, sequential, thread pool) is needed",
                 version->major, version->minor, version->patch,
                 version->cpu_runtime == DNNL_RUNTIME_NONE ? "without a CPU runtime" : "with the SYCL CPU runtime");
        return PBN_E_VERSION;
    }
    PBN_DNNL_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    /* LLVM's and Intel's OpenMP start anew in a forked child, TBB works with the threads that there are. GCC's waits
     * for those of its parent. Its functions are no symbols of the vendor's and are found among its dependencies. */
    table->loses_threads = version->cpu_runtime == DNNL_RUNTIME_OMP &&
                           pbn_dl_symbol(lib->handle, "__kmpc_fork_call") == NULL;
    PBN_DL_PROBE(, omp_get_max_threads, )
    PBN_DL_PROBE(, omp_set_num_threads, )
    return PBN_OK;
}

static int load(const char *file, int no_load, pbn_library *out) {
    vendor_table table;
    const char *call = "";
    int code = pbn_dl_open(out, file, no_load);
    if (code != PBN_OK)
        return code;
    memset(&table, 0, sizeof table);
    code = resolve(out, &table);
    if (code == PBN_OK && (code = probe(&table, &call)) != dnnl_success)
        snprintf(out->message, sizeof out->message, "%s failed with status %d", call, code);
    if (code != PBN_OK) {
        pbn_dl_discard(out);
        return code;
    }
    api = table;
    loaded = 1;
    return PBN_OK;
}

static int not_loaded(void) {
    return pbn_refuse(PBN_E_NOT_LOADED, "oneDNN has not been loaded");
}

/* ------------------------------------------------------------------ forked children
 *
 * In a child of a process that may have used GCC's OpenMP every primitive is made for one thread, and runs in the
 * calling one. oneDNN takes their number from OpenMP when a primitive is made and when it runs. */

static int openmp_before_fork; /* the process that forks has an OpenMP library */
static int in_forked_child;    /* of such a process */
static atomic_int creating;    /* threads inside oneDNN where it takes locks, which a child would find taken */

static void at_fork(int stage) {
    if (stage == PBN_FORK_CHILD) {
        creating = 0;
        in_forked_child |= openmp_before_fork;
        return;
    }
    openmp_before_fork = loaded || pbn_dl_present("libgomp.so.1"); /* anybody's: its threads are the process' */
    while (creating > 0)
        continue;
}

static int check_fork(void) {
    if (in_forked_child && api.loses_threads &&
        (api.omp_get_max_threads == NULL || api.omp_set_num_threads == NULL))
        return pbn_refuse(PBN_E_UNSUPPORTED, "this oneDNN would wait in a forked process for OpenMP threads that only "
                                             "the parent has: start the process with multiprocessing's spawn or "
                                             "forkserver");
    return PBN_OK;
}

/* A small problem runs in the calling thread too: waking the others takes longer than they save, and milliseconds where
 * the processor is busy. What `all_threads` puts back; 0 where nothing had to change. */
static int one_thread(int small) {
    int threads = 0;
    if ((small || (in_forked_child && api.loses_threads)) && api.omp_get_max_threads != NULL &&
        api.omp_set_num_threads != NULL && (threads = api.omp_get_max_threads()) != 1)
        api.omp_set_num_threads(1);
    return threads != 1 ? threads : 0;
}

static void all_threads(int threads) {
    if (threads != 0)
        api.omp_set_num_threads(threads);
}

static const char *status_name(int status) {
#define NAME(name) \
    case name: return #name;
    switch (status) {
        NAME(dnnl_success)
        NAME(dnnl_out_of_memory)
        NAME(dnnl_invalid_arguments)
        NAME(dnnl_unimplemented)
        NAME(dnnl_last_impl_reached)
        NAME(dnnl_runtime_error)
        NAME(dnnl_not_required)
        NAME(dnnl_invalid_graph)
        NAME(dnnl_invalid_graph_op)
        NAME(dnnl_invalid_shape)
        NAME(dnnl_invalid_data_type)
    }
#undef NAME
    const char *text = status > 0 && loaded && api.dnnl_status2str ? api.dnnl_status2str(status) : NULL;
    return text != NULL ? text : "unknown dnnl_status_t";
}

static int status_class(int status) {
    switch (status) {
    case dnnl_success: return PBN_CLASS_SUCCESS;
    case dnnl_out_of_memory: return PBN_CLASS_ALLOCATION;
    case dnnl_invalid_arguments:
    case dnnl_invalid_graph:
    case dnnl_invalid_graph_op:
    case dnnl_invalid_shape:
    case dnnl_invalid_data_type: return PBN_CLASS_BAD_PARAMETER;
    case dnnl_unimplemented:
    case dnnl_last_impl_reached: return PBN_CLASS_NOT_SUPPORTED;
    case dnnl_runtime_error: return PBN_CLASS_EXECUTION;
    default: return PBN_CLASS_INTERNAL;
    }
}

/* oneDNN keeps no error text; for its statuses the name of the failing call is all there is. */
static void last_error(int status, char *text, size_t size) {
    pbn_copy_text(text, size, status != PBN_OK ? pbn_reason : NULL);
}

static int handle_device(const pbn_handle *handle) {
    (void)handle;
    return 0;
}

static int device_count(void) {
    return 1;
}

static int has_symbol(const char *name) {
    PBN_DNNL_SYMBOLS(PBN_DL_PRESENT, PBN_DL_PRESENT)
    return -1;
}

/* ------------------------------------------------------------------ primitives, created once per handle */

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
    APPLY,
    PRODUCT,
    GRADIENT,
    KINDS
} kind;
typedef enum family { BATCH_NORMALIZATION, LAYER_NORMALIZATION, REDUCTION, BINARY } family;

/* The second operand of a binary post-operation. */
#define POST_OP(i) (DNNL_ARG_ATTR_MULTIPLE_POST_OP_BASE * ((i) + 1) | DNNL_ARG_SRC_1)

/* What the arguments are, in the order the calls below pass pointers; `tensors` come before the vectors. */
static const struct {
    family family;
    int prop; /* or the algorithm */
    unsigned flags;
    int tensors, count;
    int args[MAX_ARGS - 1];
    int post_ops[MAX_POST_OPS + 1]; /* algorithms, 0 after the last; negative where the operand is a tensor */
} recipes[] = {
    [TRAINING] = {BATCH_NORMALIZATION, dnnl_forward_training, dnnl_use_scale | dnnl_use_shift, 2, 6,
                  {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE, DNNL_ARG_SCALE, DNNL_ARG_SHIFT}, {0}},
    [STATISTICS] = {BATCH_NORMALIZATION, dnnl_forward_training, dnnl_normalization_flags_none, 2, 4,
                    {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE}, {0}},
    [INFERENCE] = {BATCH_NORMALIZATION, dnnl_forward_inference,
                   dnnl_use_global_stats | dnnl_use_scale | dnnl_use_shift, 2, 6,
                   {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE, DNNL_ARG_SCALE, DNNL_ARG_SHIFT}, {0}},
    [BACKWARD] = {BATCH_NORMALIZATION, dnnl_backward, dnnl_use_scale | dnnl_use_shift, 3, 8,
                  {DNNL_ARG_SRC, DNNL_ARG_DIFF_DST, DNNL_ARG_DIFF_SRC, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE,
                   DNNL_ARG_SCALE, DNNL_ARG_DIFF_SCALE, DNNL_ARG_DIFF_SHIFT}, {0}},
    /* Mean and biased variance of each row; the rows normalized, too. */
    [ROW_STATISTICS] = {LAYER_NORMALIZATION, dnnl_forward_training, dnnl_normalization_flags_none, 2, 4,
                        {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_MEAN, DNNL_ARG_VARIANCE}, {0}},
    [ROW_SUMS] = {REDUCTION, dnnl_reduction_sum, 0, 1, 2, {DNNL_ARG_SRC, DNNL_ARG_DST}, {0}},
    /* (x - u)*v + w, with a vector element for each channel */
    [APPLY] = {BINARY, dnnl_binary_sub, 0, 2, 5,
               {DNNL_ARG_SRC, DNNL_ARG_DST, DNNL_ARG_SRC_1, POST_OP(0), POST_OP(1)},
               {dnnl_binary_mul, dnnl_binary_add}},
    /* (x - u)*dy */
    [PRODUCT] = {BINARY, dnnl_binary_sub, 0, 3, 4, {DNNL_ARG_SRC, POST_OP(0), DNNL_ARG_DST, DNNL_ARG_SRC_1},
                 {-dnnl_binary_mul}},
    /* (((x - u)*v + w) + dy)*t */
    [GRADIENT] = {BINARY, dnnl_binary_sub, 0, 3, 7,
                  {DNNL_ARG_SRC, POST_OP(2), DNNL_ARG_DST, DNNL_ARG_SRC_1, POST_OP(0), POST_OP(1), POST_OP(3)},
                  {dnnl_binary_mul, dnnl_binary_add, -dnnl_binary_add, dnnl_binary_mul}},
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
    void *tensor, *vector, *attr, *post_ops, *forward, *backward;
} temporaries;

/* A vector of `params` elements as the primitive takes it. */
static int vector_desc(const primitive *p, int64_t params, void **desc) {
    const int64_t channel[] = {1, params, 1}, row[] = {params, 1}, steps[] = {params, 1, 1};
    switch (recipes[p->key.kind].family) {
    case BINARY:
        TRY(dnnl_memory_desc_create_with_strides, (desc, 3, channel, dnnl_f32, steps));
        return PBN_OK;
    case REDUCTION:
        TRY(dnnl_memory_desc_create_with_strides, (desc, 2, row, dnnl_f32, steps + 1));
        return PBN_OK;
    default:
        TRY(dnnl_memory_desc_create_with_strides, (desc, 1, &params, dnnl_f32, steps + 1));
        return PBN_OK;
    }
}

static int post_ops_fill(const int *algorithms, temporaries *t) {
    TRY(dnnl_post_ops_create, (&t->post_ops));
    for (; *algorithms != 0; algorithms++)
        TRY(dnnl_post_ops_append_binary,
            (t->post_ops, abs(*algorithms), *algorithms < 0 ? t->tensor : t->vector));
    TRY(dnnl_primitive_attr_set_post_ops, (t->attr, t->post_ops));
    return PBN_OK;
}

static int primitive_fill(pbn_handle *h, primitive *p, int64_t params, temporaries *t) {
    const view *m = &p->key.memory;
    const int k = p->key.kind, backward = k == BACKWARD, what = recipes[k].prop;
    const float epsilon = p->key.epsilon;
    int code = PBN_OK;
    TRY(dnnl_memory_desc_create_with_strides, (&t->tensor, m->rank, m->dims, dtypes[m->dtype], m->strides));
    if ((code = vector_desc(p, params, &t->vector)) != PBN_OK)
        return code;
    TRY(dnnl_primitive_attr_create, (&t->attr));
    TRY(dnnl_primitive_attr_set_scratchpad_mode, (t->attr, dnnl_scratchpad_mode_user));
    switch (recipes[k].family) {
    case LAYER_NORMALIZATION:
        TRY(dnnl_layer_normalization_forward_primitive_desc_create,
            (&t->forward, h->engine, what, t->tensor, t->tensor, t->vector, epsilon, recipes[k].flags, t->attr));
        break;
    case REDUCTION:
        TRY(dnnl_reduction_primitive_desc_create,
            (&t->forward, h->engine, what, t->tensor, t->vector, 0, 0, t->attr));
        break;
    case BINARY:
        if ((code = post_ops_fill(recipes[k].post_ops, t)) != PBN_OK)
            return code;
        TRY(dnnl_binary_primitive_desc_create,
            (&t->forward, h->engine, what, t->tensor, t->vector, t->tensor, t->attr));
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
                                 last ? scratchpad : i < recipes[k].tensors ? t->tensor : t->vector, h->engine, NULL));
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
    /* OpenMP, TBB and sequential builds are done already; only an asynchronous thread pool waits here. */
    TRY(dnnl_stream_wait, (h->stream));
    return PBN_OK;
}

/* ------------------------------------------------------------------ handle */

static int handle_create(pbn_handle **out) {
    *out = NULL;
    if (!loaded)
        return not_loaded();
    int status = check_fork();
    if (status != PBN_OK)
        return status;
    pbn_handle *h;
    status = pbn_new_handle(sizeof *h, &h);
    if (status != PBN_OK)
        return status;
    status = failed(api.dnnl_engine_create(&h->own_engine, dnnl_cpu, 0), "from dnnl_engine_create");
    if (status == dnnl_success) {
        status = failed(api.dnnl_stream_create(&h->own_stream, h->own_engine, dnnl_stream_default_flags),
                        "from dnnl_stream_create");
        if (status != dnnl_success)
            api.dnnl_engine_destroy(h->own_engine);
    }
    if (status != dnnl_success) {
        free(h);
        return status;
    }
    h->engine = h->own_engine;
    h->stream = h->own_stream;
    *out = h;
    return PBN_OK;
}

/* Primitives and memory objects belong to one engine, so a stream of another engine empties the cache. */
static int stream_set(pbn_handle *h, void *stream) {
    void *engine = h->own_engine;
    int engine_kind = dnnl_cpu;
    if (stream == NULL) {
        if (h->own_stream == NULL)
            return pbn_refuse(PBN_E_ARGUMENT, "a borrowed oneDNN handle has no stream of its own to return to");
        stream = h->own_stream;
    } else {
        TRY(dnnl_stream_get_engine, (stream, &engine));
        TRY(dnnl_engine_get_kind, (engine, &engine_kind));
        if (engine_kind != dnnl_cpu)
            return pbn_refuse(PBN_E_UNSUPPORTED, "the stream's engine is not a CPU engine");
    }
    if (engine != h->engine)
        cache_clear(h);
    h->engine = engine;
    h->stream = stream;
    return PBN_OK;
}

static int handle_borrow(void *stream, pbn_handle **out) {
    *out = NULL;
    if (!loaded)
        return not_loaded();
    if (stream == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "dnnl_stream_t is NULL");
    int status = check_fork();
    if (status != PBN_OK)
        return status;
    pbn_handle *h;
    status = pbn_new_handle(sizeof *h, &h);
    if (status != PBN_OK)
        return status;
    status = stream_set(h, stream);
    if (status != PBN_OK) {
        free(h);
        return status;
    }
    *out = h;
    return PBN_OK;
}

static int handle_destroy(pbn_handle *h) {
    int status = PBN_OK;
    if (h == NULL)
        return PBN_OK;
    cache_clear(h);
    if (h->own_stream != NULL)
        status = failed(api.dnnl_stream_destroy(h->own_stream), "from dnnl_stream_destroy");
    if (h->own_engine != NULL) {
        int second = failed(api.dnnl_engine_destroy(h->own_engine), "from dnnl_engine_destroy");
        status = status != PBN_OK ? status : second;
    }
    free(h);
    return status;
}

static void *handle_pointer(const pbn_handle *h) {
    return h->stream;
}

static int stream_get(pbn_handle *h, void **stream) {
    *stream = h->stream;
    return PBN_OK;
}

/* ------------------------------------------------------------------ tensor descriptors */

static int tensor_create(pbn_tensor *t) {
    memset(t, 0, sizeof *t); /* oneDNN's descriptors are made with their contents, in tensor_set */
    return loaded ? PBN_OK : not_loaded();
}

static int tensor_destroy(pbn_tensor *t) {
    int status = PBN_OK;
    if (t->owned && t->vendor != NULL)
        status = failed(api.dnnl_memory_desc_destroy(t->vendor), "from dnnl_memory_desc_destroy");
    memset(t, 0, sizeof *t);
    return status;
}

static int tensor_set(pbn_tensor *t, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    int64_t kept_dims[PBN_MAX_RANK], kept_strides[PBN_MAX_RANK]; /* the caller's may lie in `t` itself */
    void *md = NULL;
    int vendor_dtype, status;
    if (!loaded)
        return not_loaded();
    if ((status = pbn_to_vendor_dtype(dtypes, dtype, &vendor_dtype)) != PBN_OK)
        return status;
    if (rank < 2 || rank > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_ARGUMENT, "the rank must be 2 to 8");
    for (int i = 0; i < rank; i++) {
        if (dims[i] < 1 || strides[i] < 1)
            return pbn_refuse(PBN_E_ARGUMENT, "dims and strides must be positive");
        kept_dims[i] = dims[i];
        kept_strides[i] = strides[i];
    }
    status = failed(api.dnnl_memory_desc_create_with_strides(&md, rank, dims, vendor_dtype, strides),
                    "from dnnl_memory_desc_create_with_strides");
    if (status == dnnl_invalid_arguments)
        return pbn_refuse(PBN_E_UNSUPPORTED, "oneDNN refuses these strides: ordered by stride, each axis must step "
                                             "over the whole extent (size times stride) of the one before it");
    if (status != dnnl_success)
        return status;
    status = tensor_destroy(t);
    t->dtype = dtype;
    t->rank = rank;
    memcpy(t->dims, kept_dims, sizeof *kept_dims * (size_t)rank);
    memcpy(t->strides, kept_strides, sizeof *kept_strides * (size_t)rank);
    t->vendor = t->compute = md;
    t->owned = 1;
    t->layout = pbn_layout_of(rank, t->dims, t->strides);
    return status;
}

static int describe(const void *md, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    int format = 0, blocks = 0, vendor_type = 0, n = 0;
    int64_t offset = 0;
    const int64_t *d = NULL, *s = NULL, *padded = NULL;
    TRY(dnnl_memory_desc_query, (md, dnnl_query_format_kind, &format));
    if (format != dnnl_blocked)
        return pbn_refuse(PBN_E_UNSUPPORTED, "the memory descriptor has no strides (its format kind is not blocked)");
    TRY(dnnl_memory_desc_query, (md, dnnl_query_inner_nblks_s32, &blocks));
    TRY(dnnl_memory_desc_query, (md, dnnl_query_submemory_offset_s64, &offset));
    TRY(dnnl_memory_desc_query, (md, dnnl_query_ndims_s32, &n));
    TRY(dnnl_memory_desc_query, (md, dnnl_query_data_type, &vendor_type));
    TRY(dnnl_memory_desc_query, (md, dnnl_query_dims, (void *)&d));
    TRY(dnnl_memory_desc_query, (md, dnnl_query_padded_dims, (void *)&padded));
    TRY(dnnl_memory_desc_query, (md, dnnl_query_strides, (void *)&s));
    if (blocks != 0 || offset != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, "memory descriptors with inner blocks or an offset are not plain strides");
    if (n < 1 || n > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_UNSUPPORTED, "the memory descriptor's rank is not 1 to 8");
    if (pbn_from_vendor_dtype(dtypes, vendor_type, dtype,
                              "the memory descriptor's data type is not f32, f64, f16 or bf16") != PBN_OK)
        return PBN_E_UNSUPPORTED;
    for (int i = 0; i < n; i++) {
        if (padded[i] != d[i])
            return pbn_refuse(PBN_E_UNSUPPORTED, "the memory descriptor is padded");
        dims[i] = d[i];
        strides[i] = s[i];
    }
    *rank = n;
    return PBN_OK;
}

static int tensor_get(const pbn_tensor *t, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    if (t->vendor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "the tensor descriptor has not been set");
    return describe(t->vendor, dtype, rank, dims, strides);
}

static int tensor_borrow(void *md, pbn_tensor *t) {
    int dtype = 0, rank = 0;
    memset(t, 0, sizeof *t);
    if (!loaded)
        return not_loaded();
    if (md == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "dnnl_memory_desc_t is NULL");
    int status = describe(md, &dtype, &rank, t->dims, t->strides);
    for (int i = 0; status == PBN_OK && i < rank; i++)
        if (t->dims[i] < 1 || t->strides[i] < 1)
            status = pbn_refuse(PBN_E_UNSUPPORTED, "the memory descriptor has a size or stride that is below 1 or set "
                                                   "at run time");
    if (status != PBN_OK) {
        memset(t, 0, sizeof *t);
        return status;
    }
    t->dtype = dtype;
    t->rank = rank;
    t->vendor = t->compute = md;
    t->layout = pbn_layout_of(rank, t->dims, t->strides);
    return PBN_OK;
}

static int tensor_size(const pbn_tensor *t, size_t *bytes) {
    if (t->vendor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "the tensor descriptor has not been set");
    *bytes = api.dnnl_memory_desc_get_size(t->vendor);
    return PBN_OK;
}

/* ------------------------------------------------------------------ what runs */

static const char *const persistent_reason = "SPATIAL_PERSISTENT is cuDNN's; SPATIAL is the same mathematics";

static int check_mode(int mode) {
    if (mode == PBN_SPATIAL || mode == PBN_PER_ACTIVATION)
        return PBN_OK;
    if (mode == PBN_SPATIAL_PERSISTENT)
        return pbn_refuse(PBN_E_UNSUPPORTED, persistent_reason);
    return pbn_refuse(PBN_E_ARGUMENT, "unknown mode");
}

static int check_support(int operation, int mode, int dtype) {
    int number, code = check_mode(mode);
    if (code == PBN_OK)
        code = pbn_to_vendor_dtype(dtypes, dtype, &number);
    if (code != PBN_OK)
        return code;
    if (dtype == PBN_FLOAT64)
        return pbn_refuse(PBN_E_UNSUPPORTED, "oneDNN's CPU batch normalization has no float64");
    if (!api.runs[PBN_FLOAT32][operation])
        return pbn_refuse(PBN_E_UNSUPPORTED, "this oneDNN has no float32 batch normalization");
    return PBN_OK;
}

static uint32_t capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    uint32_t bits = PBN_CAP_RUNS;
    int number, code = PBN_OK;
    if (!loaded)
        code = not_loaded();
    else if (rank < 2 || rank > PBN_MAX_RANK)
        code = pbn_refuse(PBN_E_ARGUMENT, "the rank must be 2 to 8");
    else if (operation == PBN_OP_DERIVE)
        code = check_mode(mode);
    else if (pbn_to_vendor_dtype(dtypes, dtype, &number) != PBN_OK)
        code = PBN_E_ARGUMENT;
    else if (operation == PBN_OP_AXPBY || operation == PBN_OP_FILL || operation == PBN_OP_RELU ||
             operation == PBN_OP_RELU_BACKWARD)
        bits |= PBN_CAP_HOST_STEPS;
    else if (operation < PBN_OP_DERIVE || operation > PBN_OP_RELU_BACKWARD)
        code = pbn_refuse(PBN_E_ARGUMENT, "unknown operation");
    else if ((code = check_support(operation, mode, dtype)) == PBN_OK) {
        const int per_activation = mode == PBN_PER_ACTIVATION, folded = rank > (per_activation ? 2 : VIEW_RANK);
        bits |= PBN_CAP_BLEND_SCRATCH;
        if (folded)
            bits |= PBN_CAP_FOLDED;
        if (!api.runs[dtype][operation])
            bits |= PBN_CAP_WIDENED | PBN_CAP_HOST_STEPS;
        /* Statistics change form (variance, inverse standard deviation, running average) on either side of the
         * training and backward primitives. Inference is the vendor's alone unless memory is rearranged. */
        if (operation != PBN_OP_FORWARD_INFERENCE || (per_activation && layout != PBN_CHANNELS_FIRST) ||
            (folded && layout == PBN_STRIDED))
            bits |= PBN_CAP_HOST_STEPS;
    }
    if (why != NULL)
        *why = code == PBN_OK ? NULL : pbn_reason;
    return code == PBN_OK ? bits : 0;
}

/* oneDNN has no such call; the neutral rule. */
static int derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    if (!loaded)
        return not_loaded();
    int code = check_mode(mode);
    if (code != PBN_OK)
        return code;
    if (x->rank < 2)
        return pbn_refuse(PBN_E_ARGUMENT, "the tensor descriptor of x has not been set");
    for (int i = 0; i < x->rank; i++)
        dims[i] = i == 1 || (i > 1 && mode == PBN_PER_ACTIVATION) ? x->dims[i] : 1;
    pbn_packed_strides(x->rank, dims, PBN_CHANNELS_FIRST, strides);
    return tensor_set(derived, x->dtype == PBN_FLOAT64 ? PBN_FLOAT64 : PBN_FLOAT32, x->rank, dims, strides);
}

/* ------------------------------------------------------------------ y = a*x + b*y in C */

static inline float bits_to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t float_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float from_f32(float f) { return f; }
static inline float to_f32(double d) { return (float)d; }
static inline double from_f64(double d) { return d; }
static inline double to_f64(double d) { return d; }
static inline float from_bf16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

/* The float next to d towards zero, its last bit set if d lies beyond: rounding that to 16 bits gives
 * what rounding d itself would, where rounding twice to nearest does not always. */
static inline uint32_t sticky_float_bits(double d) {
    const float f = (float)d;
    return (float_to_bits(f) - (fabs((double)f) > fabs(d))) | (fabs((double)f) != fabs(d));
}

/* The nearest number of 16 bits, of a float's bits. Choices without branches, so that compilers vectorise them. */
static inline uint16_t bf16_of(uint32_t bits) {
    uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest);
}

static inline uint16_t f16_of(uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    /* Below 2^-14: adding 1/2 leaves the multiple of 2^-24 in the low bits, rounded. */
    uint32_t small = float_to_bits(bits_to_float(size) + 0.5f) - 0x3f000000u;
    uint32_t finite = size < 0x38800000u ? small : normal;
    uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u; /* NaN; 2^16 and above */
    return (uint16_t)(sign | (size >= 0x47800000u ? large : finite));
}

static inline uint16_t to_bf16(double d) { return bf16_of(sticky_float_bits(d)); }
static inline uint16_t to_f16(double d) { return f16_of(sticky_float_bits(d)); }

static inline float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, size = h & 0x7fffu;
    uint32_t normal = (size << 13) + (size >= 0x7c00u ? 0x70000000u : 0x38000000u);
    uint32_t small = float_to_bits((float)(int32_t)size * 0x1p-24f); /* subnormals are multiples of 2^-24 */
    return bits_to_float(sign | (size < 0x400u ? small : normal));
}

/* Unit strides apart so that the compiler vectorises them; b = 0 apart so that y is not read. */
#define ROW(name, X, from_x, Y, from_y, to_y)                                                                       \
    static void name(const void *xv, int64_t sx, void *yv, int64_t sy, int64_t n, double a, double b) {             \
        const X *x = (const X *)xv;                                                                                 \
        Y *y = (Y *)yv;                                                                                             \
        if (sx == 1 && sy == 1) {                                                                                   \
            if (b == 0)                                                                                             \
                for (int64_t i = 0; i < n; i++)                                                                     \
                    y[i] = to_y(a * from_x(x[i]));                                                                  \
            else                                                                                                    \
                for (int64_t i = 0; i < n; i++)                                                                     \
                    y[i] = to_y(a * from_x(x[i]) + b * from_y(y[i]));                                               \
        } else if (b == 0)                                                                                          \
            for (int64_t i = 0; i < n; i++)                                                                         \
                y[i * sy] = to_y(a * from_x(x[i * sx]));                                                            \
        else                                                                                                        \
            for (int64_t i = 0; i < n; i++)                                                                         \
                y[i * sy] = to_y(a * from_x(x[i * sx]) + b * from_y(y[i * sy]));                                    \
    }

ROW(row_f32, float, from_f32, float, from_f32, to_f32)
ROW(row_f64, double, from_f64, double, from_f64, to_f64)
ROW(row_f16, uint16_t, from_f16, uint16_t, from_f16, to_f16)
ROW(row_bf16, uint16_t, from_bf16, uint16_t, from_bf16, to_bf16)
ROW(row_f32_to_f16, float, from_f32, uint16_t, from_f16, to_f16)
ROW(row_f32_to_bf16, float, from_f32, uint16_t, from_bf16, to_bf16)
#undef ROW

/* y = x in another type. */
#define CONVERSION(name, X, Y, value)                                                      \
    static void name(const void *xv, int64_t sx, void *yv, int64_t sy, int64_t n) {        \
        const X *restrict x = (const X *)xv;                                               \
        Y *restrict y = (Y *)yv;                                                           \
        if (sx == 1 && sy == 1)                                                            \
            for (int64_t i = 0; i < n; i++)                                                \
                y[i] = value(x[i]);                                                        \
        else                                                                               \
            for (int64_t i = 0; i < n; i++)                                                \
                y[i * sy] = value(x[i * sx]);                                              \
    }
#define F16_OF_FLOAT(f) f16_of(float_to_bits(f))
#define BF16_OF_FLOAT(f) bf16_of(float_to_bits(f))
CONVERSION(f16_to_f32, uint16_t, float, from_f16)
CONVERSION(bf16_to_f32, uint16_t, float, from_bf16)
CONVERSION(f32_to_f16, float, uint16_t, F16_OF_FLOAT)
CONVERSION(f32_to_bf16, float, uint16_t, BF16_OF_FLOAT)
#undef CONVERSION

typedef void (*row_function)(const void *, int64_t, void *, int64_t, int64_t, double, double);
typedef void (*conversion)(const void *, int64_t, void *, int64_t, int64_t);

/* What is blended has the type of the result, or is of float32. */
static row_function row_of(int from, int to) {
    if (from == to)
        return from == PBN_FLOAT32 ? row_f32 : from == PBN_FLOAT64 ? row_f64 : from == PBN_FLOAT16 ? row_f16 : row_bf16;
    return to == PBN_FLOAT16 ? row_f32_to_f16 : row_f32_to_bf16;
}

static conversion conversion_of(int from, int to) {
    if (to == PBN_FLOAT32)
        return from == PBN_FLOAT16 ? f16_to_f32 : bf16_to_f32;
    return to == PBN_FLOAT16 ? f32_to_f16 : f32_to_bf16;
}

/* Elementwise over `rank` axes; neighbouring axes that are contiguous in both memories become one. */
static void blend(int rank, const int64_t *dims, int x_dtype, const void *x, const int64_t *x_strides, double a,
                  int y_dtype, void *y, const int64_t *y_strides, double b) {
    int64_t n[PBN_MAX_RANK], sx[PBN_MAX_RANK], sy[PBN_MAX_RANK], at[PBN_MAX_RANK] = {0};
    int order[PBN_MAX_RANK], axes = 0, merged = 0;
    for (int i = 0; i < rank; i++) { /* innermost first, by y's stride */
        if (dims[i] == 1)
            continue;
        int j = axes++;
        for (; j > 0 && y_strides[order[j - 1]] > y_strides[i]; j--)
            order[j] = order[j - 1];
        order[j] = i;
    }
    for (int i = 0; i < axes; i++) {
        int axis = order[i], below = merged - 1;
        if (merged > 0 && x_strides[axis] == sx[below] * n[below] && y_strides[axis] == sy[below] * n[below]) {
            n[below] *= dims[axis];
            continue;
        }
        n[merged] = dims[axis];
        sx[merged] = x_strides[axis];
        sy[merged] = y_strides[axis];
        merged++;
    }
    if (merged == 0) {
        n[0] = sx[0] = sy[0] = 1;
        merged = 1;
    }
    const row_function row = row_of(x_dtype, y_dtype);
    const conversion convert = a == 1 && b == 0 && x_dtype != y_dtype ? conversion_of(x_dtype, y_dtype) : NULL;
    const int64_t x_item = (int64_t)pbn_item_size(x_dtype), y_item = (int64_t)pbn_item_size(y_dtype);
    const int plain = a == 1 && b == 0 && x_dtype == y_dtype && sx[0] == 1 && sy[0] == 1;
    const char *px = (const char *)x;
    char *py = (char *)y;
    for (;;) {
        if (plain)
            memmove(py, px, (size_t)(n[0] * y_item));
        else if (convert != NULL)
            convert(px, sx[0], py, sy[0], n[0]);
        else
            row(px, sx[0], py, sy[0], n[0], a, b);
        int i = 1;
        for (; i < merged; i++) {
            px += sx[i] * x_item;
            py += sy[i] * y_item;
            if (++at[i] < n[i])
                break;
            px -= sx[i] * n[i] * x_item;
            py -= sy[i] * n[i] * y_item;
            at[i] = 0;
        }
        if (i == merged)
            return;
    }
}

/* ------------------------------------------------------------------ the plan of one call */

#define NOWHERE SIZE_MAX
#define ALIGNMENT 64

/* How one call reaches the primitive, a function of the call's descriptors, scalars and of which
 * statistics pointers are given. Offsets lie in the caller's workspace; NOWHERE means not needed.
 *
 * One memory order serves all tensors of the primitive, x's own where that is possible. A tensor in
 * another order is copied; a result in another order, or to be blended, is computed in the workspace,
 * in place of the copied input if there is one. 16-bit data that are blended, or that oneDNN has no
 * kernel for, are computed in float32, so that the result is rounded to 16 bits once. */
typedef struct part {
    view memory;
    int64_t order[PBN_MAX_RANK]; /* strides, in x's rank, of the memory the primitive sees */
    int64_t count;               /* elements of x */
    int64_t params;              /* statistics */
    /* Parameter (c, s) is element c*positions + s for the caller and s*channels + c for the primitive;
     * positions is 1 unless per-activation parameters follow a channels-last x. */
    int64_t channels, positions;
    int recompute;               /* backward without saved statistics */
    size_t x, dy, result, statistics_y;
    size_t scale, bias, mean, variance, dscale, dbias;
    int rows;                    /* by rows, where no tensor is written over one that is still to be read */
    size_t row_mean, row_variance, factor, offset;
    size_t scratchpad, total;
    primitive *steps[KINDS]; /* NULL where none is needed */
    uint64_t made[KINDS];    /* others may have taken their places since */
} part;

/* A call, in blocks of channels where copies in float32 of all its data would be large. */
typedef struct plan {
    int rows;      /* as its parts */
    int64_t block; /* channels of all blocks but the last, which may have fewer */
    int last;      /* index of the last block's part */
    part parts[2];
    size_t total; /* bytes of workspace */
} plan;

static size_t reserve(part *p, size_t bytes) {
    size_t offset = p->total;
    p->total += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return offset;
}

static int matches(const pbn_tensor *t, const int64_t *order) {
    for (int i = 0; i < t->rank; i++)
        if (t->dims[i] != 1 && t->strides[i] != order[i])
            return 0;
    return 1;
}

static int check_tensor(const pbn_tensor *t, const pbn_tensor *x) {
    if (t == NULL || t->rank != x->rank || t->dtype != x->dtype ||
        memcmp(t->dims, x->dims, sizeof *x->dims * (size_t)x->rank) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, "the tensors of one call must agree in shape and data type");
    return PBN_OK;
}

/* Chooses the memory order and the view of it that the primitive takes. */
static void choose_memory(part *p, const pbn_call *call, int one_order, int widen) {
    const pbn_tensor *x = call->x_desc;
    const int per_activation = call->mode == PBN_PER_ACTIVATION;
    int64_t c = x->dims[1], s = p->count / x->dims[0] / c;
    int64_t *d = p->memory.dims, *t = p->memory.strides;
    const int last = x->layout == PBN_CHANNELS_LAST;
    const int strided = x->layout == PBN_STRIDED && one_order && !per_activation && x->rank <= VIEW_RANK;
    p->memory.dtype = widen ? PBN_FLOAT32 : x->dtype;
    p->channels = p->params = per_activation ? c * s : c;
    p->positions = 1;
    if (strided) /* oneDNN does not look at the stride of an axis of length 1 */
        memcpy(p->order, x->strides, sizeof *p->order * (size_t)x->rank);
    else
        pbn_packed_strides(x->rank, x->dims, last ? PBN_CHANNELS_LAST : PBN_CHANNELS_FIRST, p->order);
    if (per_activation) {
        p->memory.rank = 2;
        d[0] = x->dims[0], t[0] = c * s;
        d[1] = c * s, t[1] = 1;
        if (last) {
            p->channels = c;
            p->positions = s;
        }
    } else if (x->rank <= VIEW_RANK) {
        p->memory.rank = x->rank;
        memcpy(d, x->dims, sizeof *d * (size_t)x->rank);
        memcpy(t, p->order, sizeof *t * (size_t)x->rank);
    } else {
        p->memory.rank = 3;
        d[0] = x->dims[0], t[0] = c * s;
        d[1] = c, t[1] = last ? 1 : s;
        d[2] = s, t[2] = last ? c : 1;
    }
}

static int is_blended(const pbn_call *call) {
    return call->alpha != 1 || call->beta != 0;
}

/* Whether 16-bit data are computed in float32. */
static int widened(const pbn_call *call, int rows) {
    const int dtype = call->x_desc->dtype;
    return dtype != PBN_FLOAT32 && (rows || is_blended(call) || !api.runs[dtype][call->operation]);
}

/* Why a call cannot be computed by rows, the channels of each image: oneDNN's batch normalization has vector kernels for
 * channels that lie side by side, and a plain one for channels-first memory. Its layer normalization, reduction and
 * binary primitives have vector kernels for that memory too. */
static const char *no_rows(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    if (api.dnnl_layer_normalization_forward_primitive_desc_create == NULL ||
        api.dnnl_reduction_primitive_desc_create == NULL || api.dnnl_binary_primitive_desc_create == NULL ||
        api.dnnl_post_ops_create == NULL || api.dnnl_post_ops_append_binary == NULL ||
        api.dnnl_post_ops_destroy == NULL || api.dnnl_primitive_attr_set_post_ops == NULL)
        return "this oneDNN lacks its layer normalization, reduction or binary primitive";
    if (call->mode != PBN_SPATIAL)
        return "rows are of the spatial mode";
    if (x->layout != PBN_CHANNELS_FIRST || x->rank == 2)
        return "rows are of packed channels-first memory";
    return NULL;
}

/* Measured on an EPYC with oneDNN 3.2. By rows 16-bit data are converted by the calling thread alone: four times faster
 * than the plain kernel on one thread, and so not on many. */
static int faster_by_rows(const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    if (x->dtype != PBN_FLOAT32 && !widened(call, 0) && (api.omp_get_max_threads == NULL || api.omp_get_max_threads() > 4))
        return 0;
    return pbn_numel(x->rank - 2, x->dims + 2) >= (call->operation == PBN_OP_BACKWARD ? 32 : 16);
}

static int step(pbn_handle *h, part *p, kind k, float epsilon, const view *memory, int64_t params) {
    int code = primitive_get(h, k, epsilon, memory, params, &p->steps[k]);
    if (code != PBN_OK)
        return code;
    p->made[k] = p->steps[k]->made;
    if (p->steps[k]->scratchpad > p->scratchpad)
        p->scratchpad = p->steps[k]->scratchpad;
    return PBN_OK;
}

/* The primitives of a call by rows. */
static int row_steps(pbn_handle *h, const pbn_call *call, part *p) {
    const int64_t images = call->x_desc->dims[0], rows = images * p->params, s = p->count / rows;
    const view row = {PBN_FLOAT32, 2, {rows, s}, {s, 1}};
    const view image = {PBN_FLOAT32, 3, {images, p->params, s}, {p->params * s, s, 1}};
    int code = PBN_OK;
    if (call->operation == PBN_OP_FORWARD_TRAINING || p->recompute)
        code = step(h, p, ROW_STATISTICS, 0, &row, rows);
    if (call->operation != PBN_OP_BACKWARD)
        return code == PBN_OK ? step(h, p, APPLY, 0, &image, p->params) : code;
    if (code == PBN_OK)
        code = step(h, p, PRODUCT, 0, &image, p->params);
    if (code == PBN_OK)
        code = step(h, p, ROW_SUMS, 0, &row, rows);
    return code == PBN_OK ? step(h, p, GRADIENT, 0, &image, p->params) : code;
}

static int plan_part(pbn_handle *h, const pbn_call *call, int rows, part *p) {
    const int backward = call->operation == PBN_OP_BACKWARD, inference = call->operation == PBN_OP_FORWARD_INFERENCE;
    const pbn_tensor *x = call->x_desc, *out = backward ? call->dx_desc : call->y_desc;
    int code = check_support(call->operation, call->mode, x->dtype);
    if (code == PBN_OK && call->activation != PBN_ACTIVATION_NONE)
        code = pbn_refuse(PBN_E_UNSUPPORTED, "oneDNN's fused ReLU is not used: its backward wants the forward's "
                                             "workspace, which no other library here has");
    if (code == PBN_OK && pbn_has_residual(call))
        code = pbn_refuse(PBN_E_UNSUPPORTED, "oneDNN's fused sum and ReLU is not used, as its fused ReLU is not");
    if (code == PBN_OK)
        code = check_tensor(out, x);
    if (code == PBN_OK && backward)
        code = check_tensor(call->dy_desc, x);
    if (code != PBN_OK)
        return code;

    memset(p, 0, sizeof *p);
    p->x = p->dy = p->result = p->statistics_y = NOWHERE;
    p->scale = p->bias = p->mean = p->variance = p->dscale = p->dbias = p->scratchpad = NOWHERE;
    p->count = pbn_numel(x->rank, x->dims);
    p->recompute = backward && call->saved_mean == NULL;
    p->rows = rows;
    p->row_mean = p->row_variance = p->factor = p->offset = NOWHERE;
    const int widen = widened(call, rows), copied = widen || is_blended(call);
    const int one_order = !copied && !p->recompute && matches(out, x->strides) &&
                          (!backward || matches(call->dy_desc, x->strides));
    choose_memory(p, call, one_order, widen);
    if (call->param_desc == NULL || call->param_desc->dtype != PBN_FLOAT32 ||
        pbn_numel(call->param_desc->rank, call->param_desc->dims) != p->params)
        return pbn_refuse(PBN_E_ARGUMENT, "param_desc must be float32 with one element per statistic");

    /* Tensors. The result is known to be copied to its place whenever it has an offset here. */
    const size_t tensor = (size_t)p->count * pbn_item_size(p->memory.dtype);
    const int permuted = p->positions > 1, direct = !copied && matches(out, p->order);
    if (widen || !matches(x, p->order))
        p->x = reserve(p, tensor);
    if (backward && (widen || !matches(call->dy_desc, p->order)))
        p->dy = reserve(p, tensor);
    if (!direct) {
        p->result = rows && !inference ? NOWHERE : backward ? p->dy : p->x; /* rows need x and dy to the end */
        if (p->result == NOWHERE) {
            p->result = reserve(p, tensor);
            p->statistics_y = p->result;
        }
    }
    if (p->recompute && p->statistics_y == NOWHERE)
        p->statistics_y = reserve(p, tensor);

    /* Vectors. Backward always changes their form: signs, variance, blending. */
    const size_t vector = (size_t)p->params * sizeof(float);
    if (backward || permuted)
        p->scale = reserve(p, vector);
    if (!backward && permuted)
        p->bias = reserve(p, vector);
    if (permuted || p->recompute || (!backward && !inference && call->saved_mean == NULL))
        p->mean = reserve(p, vector);
    if (permuted || backward || (!inference && call->saved_inv_variance == NULL))
        p->variance = reserve(p, vector);
    if (backward) {
        p->dscale = reserve(p, vector);
        p->dbias = reserve(p, vector);
    }

    if (rows) {
        const size_t row_vector = vector * (size_t)x->dims[0];
        p->factor = reserve(p, vector);
        p->offset = reserve(p, vector);
        p->row_mean = reserve(p, row_vector);
        p->row_variance = reserve(p, row_vector);
    }

    /* With saved statistics the variance is made from the inverse standard deviation, epsilon included. */
    const float epsilon = backward && !p->recompute ? 0.0f : (float)call->epsilon;
    p->scratchpad = 0;
    code = step(h, p, backward ? BACKWARD : inference ? INFERENCE : TRAINING, epsilon, &p->memory, p->params);
    if (code == PBN_OK && p->recompute)
        code = step(h, p, STATISTICS, 0.0f, &p->memory, p->params);
    if (code == PBN_OK && rows)
        code = row_steps(h, call, p);
    p->scratchpad = p->scratchpad > 0 ? reserve(p, p->scratchpad) : NOWHERE;
    return code;
}

#define BLOCK_ELEMENTS ((int64_t)1 << 18) /* 1 MiB in float32: cache memory, and work for every thread */
#define BLOCK_CHANNELS 16                 /* of channels-last data: what one vector holds */

/* The call for `count` channels from `first` on. */
typedef struct block_call {
    pbn_call call;
    pbn_tensor x, y, dy, dx, param;
} block_call;

static void block_of(const pbn_call *whole, int64_t first, int64_t count, block_call *b) {
    const pbn_tensor *const from[] = {whole->x_desc, whole->y_desc, whole->dy_desc, whole->dx_desc,
                                      whole->param_desc};
    pbn_tensor *const to[] = {&b->x, &b->y, &b->dy, &b->dx, &b->param};
    const pbn_tensor **const in_call[] = {&b->call.x_desc, &b->call.y_desc, &b->call.dy_desc, &b->call.dx_desc,
                                          &b->call.param_desc};
    size_t offsets[5] = {0};
    b->call = *whole;
    for (int i = 0; i < 5; i++) {
        if (from[i] == NULL)
            continue;
        *to[i] = *from[i];
        to[i]->dims[1] = count;
        *in_call[i] = to[i];
        offsets[i] = (size_t)(first * from[i]->strides[1]) * pbn_item_size(from[i]->dtype);
    }
#define PBN_MOVE(member, type, i)       \
    if (b->call.member != NULL)         \
        b->call.member = (type)b->call.member + offsets[i];
    PBN_MOVE(x, const char *, 0)
    PBN_MOVE(y, char *, 1)
    PBN_MOVE(dy, const char *, 2)
    PBN_MOVE(dx, char *, 3)
    PBN_MOVE(scale, const char *, 4)
    PBN_MOVE(bias, const char *, 4)
    PBN_MOVE(running_mean, char *, 4)
    PBN_MOVE(running_variance, char *, 4)
    PBN_MOVE(saved_mean, char *, 4)
    PBN_MOVE(saved_inv_variance, char *, 4)
    PBN_MOVE(dscale, char *, 4)
    PBN_MOVE(dbias, char *, 4)
#undef PBN_MOVE
}

/* Channels of a block; all of them where no copies are made in float32. */
static int64_t block_channels(const pbn_call *call, int rows) {
    const pbn_tensor *x = call->x_desc;
    if (!widened(call, rows))
        return x->dims[1];
    const int64_t channels = x->dims[1], m = pbn_numel(x->rank, x->dims) / channels;
    const int64_t least = x->layout == PBN_CHANNELS_LAST ? BLOCK_CHANNELS : 1;
    const int64_t block = BLOCK_ELEMENTS / m / least * least;
    return block < least ? (least < channels ? least : channels) : block < channels ? block : channels;
}

static int plan_call(pbn_handle *h, const pbn_call *call, int rows, plan *p) {
    if (h == NULL || call->x_desc == NULL || call->x_desc->rank < 2 || call->x_desc->rank > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_ARGUMENT, "no handle, or the tensor descriptor of x has not been set");
    const int64_t channels = call->x_desc->dims[1], rest = channels % (p->block = block_channels(call, rows));
    p->rows = rows;
    p->last = rest != 0;
    if (p->block == channels) {
        int code = plan_part(h, call, rows, &p->parts[0]);
        p->total = p->parts[0].total;
        return code;
    }
    block_call b;
    block_of(call, 0, p->block, &b);
    int code = plan_part(h, &b.call, rows, &p->parts[0]);
    p->total = p->parts[0].total;
    if (code == PBN_OK && p->last) {
        block_of(call, channels - rest, rest, &b);
        code = plan_part(h, &b.call, rows, &p->parts[1]);
        if (p->parts[1].total > p->total)
            p->total = p->parts[1].total;
    }
    return code;
}

/* The workspace, or NULL where none is needed. */
static int claim(size_t total, const pbn_call *call, char **base) {
    *base = total > 0 ? (char *)call->workspace : NULL;
    if (total > 0 && (*base == NULL || (uintptr_t)*base % ALIGNMENT != 0 || call->workspace_size < total))
        return pbn_refuse(PBN_E_WORKSPACE, "the workspace is missing, smaller than the workspace query's answer or not "
                                           "aligned to 64 bytes");
    return PBN_OK;
}

static int workspace_size(pbn_handle *h, const pbn_call *call, size_t *bytes) {
    plan p;
    *bytes = 0;
    if (!loaded)
        return not_loaded();
    if (call->operation == PBN_OP_AXPBY || call->operation == PBN_OP_DERIVE)
        return PBN_OK;
    if (call->operation < PBN_OP_DERIVE || call->operation > PBN_OP_AXPBY)
        return pbn_refuse(PBN_E_ARGUMENT, "unknown operation");
    int code = plan_call(h, call, 0, &p);
    if (code == PBN_OK)
        *bytes = p.total;
    return code;
}

static void *place(char *base, size_t offset) {
    return offset == NOWHERE ? NULL : base + offset;
}

/* The caller's tensor as the primitive reads it. */
static const void *tensor_in(const part *p, const pbn_tensor *t, const void *data, void *copy) {
    if (copy == NULL)
        return data;
    blend(t->rank, t->dims, t->dtype, data, t->strides, 1, p->memory.dtype, copy, p->order, 0);
    return copy;
}

static void tensor_out(const part *p, const pbn_tensor *t, const void *result, void *data, double alpha, double beta) {
    if (result != NULL)
        blend(t->rank, t->dims, p->memory.dtype, result, p->order, alpha, t->dtype, data, t->strides, beta);
}

/* For each parameter its index for the caller, u, and for the primitive, v. */
#define EACH_PARAMETER(p, u, v)                                                     \
    for (int64_t c_ = 0, u = 0; c_ < (p)->channels; c_++)                           \
        for (int64_t s_ = 0, v = c_; s_ < (p)->positions; s_++, u++, v += (p)->channels)

static const float *vector_in(const part *p, const void *data, float *copy) {
    const float *from = (const float *)data;
    if (copy == NULL)
        return from;
    EACH_PARAMETER(p, u, v)
        copy[v] = from[u];
    return copy;
}

/* ------------------------------------------------------------------ the calls */

/* Mean and biased variance of each channel, from those of its rows. */
static void merge_rows(const part *p, int64_t images, const float *row_mean, const float *row_variance, float *mean,
                       float *variance) {
    for (int64_t c = 0; c < p->params; c++) {
        double sum = 0, squares = 0;
        for (int64_t i = c; i < images * p->params; i += p->params)
            sum += row_mean[i];
        const double middle = sum / (double)images;
        for (int64_t i = c; i < images * p->params; i += p->params)
            squares += row_variance[i] + (row_mean[i] - middle) * (row_mean[i] - middle);
        mean[c] = (float)middle;
        variance[c] = (float)(squares / (double)images);
    }
}

/* y = (x - mean)*scale/sqrt(variance + epsilon) + bias in one pass. */
static int apply(pbn_handle *h, const part *p, char *base, const void *x, void *y, const float *mean,
                 const float *variance, const void *scale, const void *bias, double epsilon) {
    float *factor = place(base, p->factor);
    for (int64_t c = 0; c < p->params; c++)
        factor[c] = (float)(((const float *)scale)[c] / sqrt(variance[c] + epsilon));
    const void *pointers[] = {x, y, mean, factor, bias};
    return primitive_run(h, p->steps[APPLY], pointers, place(base, p->scratchpad));
}

static int train_rows(pbn_handle *h, const part *p, const pbn_call *call, char *base, const void *const *given) {
    float *row_mean = place(base, p->row_mean), *row_variance = place(base, p->row_variance);
    const void *rows[] = {given[0], given[1], row_mean, row_variance};
    int code = primitive_run(h, p->steps[ROW_STATISTICS], rows, place(base, p->scratchpad));
    if (code != PBN_OK)
        return code;
    float *mean = (float *)(uintptr_t)given[2], *variance = (float *)(uintptr_t)given[3];
    merge_rows(p, call->x_desc->dims[0], row_mean, row_variance, mean, variance);
    return apply(h, p, base, given[0], (void *)(uintptr_t)given[1], mean, variance, given[4], given[5], call->epsilon);
}

static int run_forward_training(pbn_handle *h, const part *p, const pbn_call *call) {
    char *base;
    int code = claim(p->total, call, &base);
    if (code != PBN_OK)
        return code;
    const int64_t m = p->count / p->params;
    if (call->x == NULL || call->y == NULL || call->scale == NULL || call->bias == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "x, y, scale and bias must not be NULL");
    if ((call->running_mean == NULL) != (call->running_variance == NULL) ||
        (call->saved_mean == NULL) != (call->saved_inv_variance == NULL))
        return pbn_refuse(PBN_E_ARGUMENT, "running and saved statistics come in pairs");
    if (call->running_mean != NULL && m == 1)
        return pbn_refuse(PBN_E_ARGUMENT, "one element per statistic has no unbiased variance");

    void *result = place(base, p->result);
    float *mean = p->mean != NOWHERE ? place(base, p->mean) : call->saved_mean;
    float *variance = p->variance != NOWHERE ? place(base, p->variance) : call->saved_inv_variance;
    const void *pointers[] = {tensor_in(p, call->x_desc, call->x, place(base, p->x)),
                              result != NULL ? result : call->y,
                              mean,
                              variance,
                              vector_in(p, call->scale, place(base, p->scale)),
                              vector_in(p, call->bias, place(base, p->bias))};
    code = p->rows && pointers[0] != pointers[1]
               ? train_rows(h, p, call, base, pointers)
               : primitive_run(h, p->steps[TRAINING], pointers, place(base, p->scratchpad));
    if (code != PBN_OK)
        return code;

    if (call->running_mean != NULL) {
        float *running_mean = call->running_mean, *running_variance = call->running_variance;
        const double keep = 1 - call->factor, unbiased = (double)m / (double)(m - 1);
        EACH_PARAMETER(p, u, v) { /* what is replaced whole may be memory that nobody set */
            const double old_mean = keep == 0 ? 0 : keep * running_mean[u];
            const double old_variance = keep == 0 ? 0 : keep * running_variance[u];
            running_mean[u] = (float)(old_mean + call->factor * mean[v]);
            running_variance[u] = (float)(old_variance + call->factor * unbiased * variance[v]);
        }
    }
    if (call->saved_mean != NULL) {
        float *saved_mean = call->saved_mean, *saved_inv_variance = call->saved_inv_variance;
        EACH_PARAMETER(p, u, v) {
            saved_mean[u] = mean[v];
            saved_inv_variance[u] = (float)(1 / sqrt(variance[v] + call->epsilon));
        }
    }
    tensor_out(p, call->y_desc, result, call->y, call->alpha, call->beta);
    return PBN_OK;
}

static int run_forward_inference(pbn_handle *h, const part *p, const pbn_call *call) {
    char *base;
    int code = claim(p->total, call, &base);
    if (code != PBN_OK)
        return code;
    if (call->x == NULL || call->y == NULL || call->scale == NULL || call->bias == NULL ||
        call->running_mean == NULL || call->running_variance == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "x, y, scale, bias, running_mean and running_variance must not be NULL");

    void *result = place(base, p->result);
    const void *pointers[] = {tensor_in(p, call->x_desc, call->x, place(base, p->x)),
                              result != NULL ? result : call->y,
                              vector_in(p, call->running_mean, place(base, p->mean)),
                              vector_in(p, call->running_variance, place(base, p->variance)),
                              vector_in(p, call->scale, place(base, p->scale)),
                              vector_in(p, call->bias, place(base, p->bias))};
    code = p->rows ? apply(h, p, base, pointers[0], (void *)(uintptr_t)pointers[1], pointers[2], pointers[3],
                           pointers[4], pointers[5], call->epsilon)
                   : primitive_run(h, p->steps[INFERENCE], pointers, place(base, p->scratchpad));
    if (code == PBN_OK)
        tensor_out(p, call->y_desc, result, call->y, call->alpha, call->beta);
    return code;
}

/* oneDNN takes a variance. 1/iv^2 with epsilon = 0 gives any iv back: 0 from an infinite variance,
 * infinity from a zero one, and a negative iv as |iv| with scale and dscale negated, because dx is
 * scale*iv*(...) around a product of two iv. */
static float variance_of(double iv) {
    return (float)(1 / (iv * iv));
}

static int check_saved(const float *inv_variance, int64_t params) {
    for (int64_t i = 0; i < params; i++)
        if (!isnormal(variance_of(inv_variance[i])) && isfinite(inv_variance[i]) && inv_variance[i] != 0)
            return pbn_refuse(PBN_E_UNSUPPORTED, "a finite saved_inv_variance beyond about 1e-19 to 1e19 has no "
                                                 "float32 variance, which is what oneDNN takes");
    return PBN_OK;
}

static void variance_from_saved(const part *p, const float *inv_variance, float *variance, float *scale) {
    EACH_PARAMETER(p, u, v) {
        variance[v] = variance_of(inv_variance[u]);
        if (inv_variance[u] < 0)
            scale[v] = -scale[v];
    }
}

static void gradient_out(const part *p, const float *from, void *data, const float *inv_variance, double alpha,
                         double beta) {
    float *to = (float *)data;
    if (to == NULL)
        return;
    EACH_PARAMETER(p, u, v) {
        const double sign = inv_variance != NULL && inv_variance[u] < 0 ? -1 : 1;
        to[u] = (float)(beta == 0 ? sign * alpha * from[v] : sign * alpha * from[v] + beta * to[u]);
    }
}

static double row_sum(const part *p, int64_t images, const float *rows, int64_t c) {
    double sum = 0;
    for (int64_t i = c; i < images * p->params; i += p->params)
        sum += rows[i];
    return sum;
}

/* With d = x - mean, r = 1/sqrt(variance + epsilon), m elements a channel: dbias = sum dy, dscale = r * sum d*dy,
 * dx = scale*r * (dy - dbias/m - d * r*dscale/m). */
static int backward_rows(pbn_handle *h, const part *p, const pbn_call *call, char *base, const void *x, const void *dy,
                         void *dx, const float *mean, const float *variance, float *dscale, float *dbias) {
    const int64_t images = call->x_desc->dims[0];
    const double m = (double)(p->count / p->params);
    float *sums = place(base, p->row_mean), *products = place(base, p->row_variance);
    float *slope = place(base, p->variance), *offset = place(base, p->offset), *factor = place(base, p->factor);
    void *scratchpad = place(base, p->scratchpad);
    const void *product[] = {x, dy, dx, mean}, *of_dy[] = {dy, sums}, *of_product[] = {dx, products};
    int code = primitive_run(h, p->steps[PRODUCT], product, scratchpad);
    if (code == PBN_OK)
        code = primitive_run(h, p->steps[ROW_SUMS], of_product, scratchpad);
    if (code == PBN_OK)
        code = primitive_run(h, p->steps[ROW_SUMS], of_dy, scratchpad);
    if (code != PBN_OK)
        return code;
    for (int64_t c = 0; c < p->params; c++) {
        const double r = call->saved_mean != NULL ? ((const float *)call->saved_inv_variance)[c]
                                                  : 1 / sqrt(variance[c] + call->epsilon);
        const double sum = row_sum(p, images, sums, c), dot = row_sum(p, images, products, c);
        dbias[c] = (float)sum;
        dscale[c] = (float)(r * dot);
        factor[c] = (float)(((const float *)call->scale)[c] * r);
        offset[c] = (float)(-sum / m);
        slope[c] = (float)(-r * r * dot / m); /* over the variance, which is not needed any more */
    }
    const void *gradient[] = {x, dy, dx, mean, slope, offset, factor};
    return primitive_run(h, p->steps[GRADIENT], gradient, scratchpad);
}

static int run_backward(pbn_handle *h, const part *p, const pbn_call *call) {
    char *base;
    int code = claim(p->total, call, &base);
    if (code != PBN_OK)
        return code;
    if (call->x == NULL || call->dy == NULL || call->dx == NULL || call->scale == NULL || call->dscale == NULL ||
        call->dbias == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "x, dy, dx, scale, dscale and dbias must not be NULL");
    if ((call->saved_mean == NULL) != (call->saved_inv_variance == NULL))
        return pbn_refuse(PBN_E_ARGUMENT, "saved statistics come in pairs");

    float *scale = place(base, p->scale), *variance = place(base, p->variance), *own_mean = place(base, p->mean);
    float *dscale = place(base, p->dscale), *dbias = place(base, p->dbias);
    void *result = place(base, p->result), *scratchpad = place(base, p->scratchpad);
    const void *x = tensor_in(p, call->x_desc, call->x, place(base, p->x));
    const void *dy = tensor_in(p, call->dy_desc, call->dy, place(base, p->dy));
    if (result == NULL)
        result = call->dx;
    const int by_rows = p->rows && result != x && result != dy;
    const float *mean = own_mean, *inv_variance = call->saved_inv_variance;
    if (p->recompute) {
        void *y = place(base, p->statistics_y);
        if (by_rows) {
            float *row_mean = place(base, p->row_mean), *row_variance = place(base, p->row_variance);
            const void *rows[] = {x, y, row_mean, row_variance};
            code = primitive_run(h, p->steps[ROW_STATISTICS], rows, scratchpad);
            if (code == PBN_OK)
                merge_rows(p, call->x_desc->dims[0], row_mean, row_variance, own_mean, variance);
        } else {
            const void *pointers[] = {x, y, mean, variance};
            code = primitive_run(h, p->steps[STATISTICS], pointers, scratchpad);
        }
    } else {
        code = check_saved(inv_variance, p->params);
        mean = vector_in(p, call->saved_mean, own_mean);
    }
    if (code == PBN_OK && by_rows) {
        code = backward_rows(h, p, call, base, x, dy, result, mean, variance, dscale, dbias);
        inv_variance = NULL; /* its sign is in dscale */
    } else if (code == PBN_OK) {
        vector_in(p, call->scale, scale);
        if (!p->recompute)
            variance_from_saved(p, inv_variance, variance, scale);
        const void *pointers[] = {x, dy, result, mean, variance, scale, dscale, dbias};
        code = primitive_run(h, p->steps[BACKWARD], pointers, scratchpad);
    }
    if (code != PBN_OK)
        return code;
    gradient_out(p, dscale, call->dscale, inv_variance, call->alpha_param, call->beta_param);
    gradient_out(p, dbias, call->dbias, NULL, call->alpha_param, call->beta_param);
    tensor_out(p, call->dx_desc, place(base, p->result), call->dx, call->alpha, call->beta);
    return PBN_OK;
}

static int run_part(pbn_handle *h, const part *p, const pbn_call *call) {
    return call->operation == PBN_OP_BACKWARD            ? run_backward(h, p, call)
           : call->operation == PBN_OP_FORWARD_INFERENCE ? run_forward_inference(h, p, call)
                                                         : run_forward_training(h, p, call);
}

static int run_plan(pbn_handle *h, const plan *p, const pbn_call *call) {
    const int64_t channels = call->x_desc->dims[1];
    if (p->block == channels)
        return run_part(h, &p->parts[0], call);
    /* What a later block would refuse is refused before the first one writes. */
    char *base;
    int code = claim(p->total, call, &base);
    if (code == PBN_OK && call->operation == PBN_OP_BACKWARD && call->saved_inv_variance != NULL)
        code = check_saved(call->saved_inv_variance, channels / p->block * p->parts[0].params +
                                                         (p->last ? p->parts[1].params : 0));
    for (int64_t first = 0; first < channels && code == PBN_OK; first += p->block) {
        const int64_t left = channels - first;
        block_call b;
        block_of(call, first, left < p->block ? left : p->block, &b);
        code = run_part(h, &p->parts[left < p->block ? p->last : 0], &b.call);
    }
    return code;
}

/* Planned for this call alone. */
static int run_once(pbn_handle *h, const pbn_call *call) {
    plan p;
    int code = loaded ? plan_call(h, call, 0, &p) : not_loaded();
    return code == PBN_OK ? run_plan(h, &p, call) : code;
}

/* ------------------------------------------------------------------ plans: planned once */

struct pbn_plan {
    plan p;
    const char *why;
};

static const char *const algorithm_names[] = {"plain", "rows", NULL};

static int plan_create(pbn_handle *h, const pbn_call *call, const char *algorithm, pbn_plan **out) {
    const int by_name = algorithm != NULL && strcmp(algorithm, "rows") == 0;
    const int may = by_name || (algorithm != NULL && strcmp(algorithm, "plain") != 0);
    *out = NULL;
    if (!loaded)
        return not_loaded();
    const char *refusal = no_rows(call);
    if (by_name && refusal != NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, refusal);
    pbn_plan *made = malloc(sizeof *made);
    if (made == NULL)
        return pbn_refuse(PBN_E_MEMORY, "no memory for the plan");
    const int rows = by_name || (may && refusal == NULL && faster_by_rows(call));
    made->why = rows              ? "vector kernels over channels-first memory"
                : !may            ? "the entry point, and nothing else"
                : refusal != NULL ? refusal
                                  : "rows of so few elements are slower";
    int code = plan_call(h, call, rows, &made->p);
    if (code > 0 && rows && !by_name) { /* a primitive that this oneDNN lacks */
        made->why = "this oneDNN has no kernel by rows";
        code = plan_call(h, call, 0, &made->p);
    }
    if (code == PBN_OK)
        *out = made;
    else
        free(made);
    return code;
}

static const char *plan_candidate(const pbn_call *call, int fast, int index) {
    (void)fast;
    return index == 0 ? "plain" : index == 1 && no_rows(call) == NULL ? "rows" : NULL;
}

static void plan_info(const pbn_plan *made, size_t *workspace, size_t *reserve_bytes, const char **algorithm,
                      const char **why) {
    *workspace = made->p.total;
    *reserve_bytes = 0;
    *algorithm = algorithm_names[made->p.rows];
    *why = made->why;
}

/* Primitives belong to the handle, which drops them for newer ones and with its engine. */
static int part_is_made(pbn_handle *h, part *p) {
    int made = 1;
    h->calls++;
    for (int i = 0; i < KINDS; i++)
        if (p->steps[i] != NULL) {
            p->steps[i]->last_use = h->calls;
            made &= p->steps[i]->made == p->made[i];
        }
    return made;
}

static int plan_run(pbn_handle *h, pbn_plan *made, const pbn_call *call) {
    plan *p = &made->p;
    if (!part_is_made(h, &p->parts[0]) || (p->last && !part_is_made(h, &p->parts[1]))) {
        plan again;
        int code = plan_call(h, call, p->rows, &again);
        if (code != PBN_OK)
            return code;
        *p = again;
    }
    return run_plan(h, p, call);
}

static void plan_destroy(pbn_plan *made) {
    free(made);
}

static int axpby(pbn_handle *h, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc, *y = call->y_desc;
    (void)h;
    if (!loaded)
        return not_loaded();
    if (x == NULL || call->x == NULL || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "x and y must not be NULL");
    int code = check_tensor(y, x);
    if (code == PBN_OK)
        blend(x->rank, x->dims, x->dtype, call->x, x->strides, call->alpha, y->dtype, call->y, y->strides, call->beta);
    return code;
}

/* oneDNN has no such call. The elements of the innermost axis are written in turn, the other axes counted through. */
static int fill(pbn_handle *h, const pbn_call *call) {
    const pbn_tensor *y = call->y_desc;
    int64_t dims[PBN_MAX_RANK], steps[PBN_MAX_RANK], at[PBN_MAX_RANK] = {0};
    double value; /* room for any of the types */
    int rank = 0, i;
    (void)h;
    if (!loaded)
        return not_loaded();
    if (y == NULL || y->rank == 0 || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "y must not be NULL");
    const size_t item = pbn_item_size(y->dtype);
    pbn_encode(call->alpha, y->dtype, &value);
    for (i = y->rank - 1; i >= 0; i--) { /* innermost first; axes that continue one another become one */
        if (y->dims[i] == 1)
            continue;
        if (rank > 0 && y->strides[i] == steps[rank - 1] * dims[rank - 1]) {
            dims[rank - 1] *= y->dims[i];
        } else {
            dims[rank] = y->dims[i];
            steps[rank++] = y->strides[i];
        }
    }
    if (rank == 0) {
        dims[0] = steps[0] = 1;
        rank = 1;
    }
    char *to = (char *)call->y;
    do {
        for (int64_t k = 0; k < dims[0]; k++)
            memcpy(to + (size_t)(k * steps[0]) * item, &value, item);
        for (i = 1; i < rank; i++) {
            to += (size_t)steps[i] * item;
            if (++at[i] < dims[i])
                break;
            to -= (size_t)(steps[i] * dims[i]) * item;
            at[i] = 0;
        }
    } while (i < rank);
    return PBN_OK;
}

/* ------------------------------------------------------------------ y = max(x, 0) and its gradient in C */

/* Forward without dy: a NaN stays. Backward: dy where x > 0. */
#define RELU_ROW(name, T, from_x)                                                                                   \
    static void name(const void *xv, int64_t sx, const void *dyv, int64_t sdy, void *outv, int64_t so, int64_t n) { \
        const T *x = (const T *)xv, *dy = (const T *)dyv;                                                           \
        T *out = (T *)outv;                                                                                         \
        if (dy == NULL)                                                                                             \
            for (int64_t i = 0; i < n; i++)                                                                         \
                out[i * so] = from_x(x[i * sx]) <= 0 ? (T)0 : x[i * sx];                                            \
        else                                                                                                        \
            for (int64_t i = 0; i < n; i++)                                                                         \
                out[i * so] = from_x(x[i * sx]) > 0 ? dy[i * sdy] : (T)0;                                           \
    }

RELU_ROW(relu_row_f32, float, from_f32)
RELU_ROW(relu_row_f64, double, from_f64)
RELU_ROW(relu_row_f16, uint16_t, from_f16)
RELU_ROW(relu_row_bf16, uint16_t, from_bf16)
#undef RELU_ROW

/* Rows of one axis, the longest that is contiguous to itself in all three memories; `dy` may be NULL. */
static void relu_rows(const pbn_tensor *x, const void *xv, const pbn_tensor *dy, const void *dyv, const pbn_tensor *out,
                      void *outv) {
    void (*const row)(const void *, int64_t, const void *, int64_t, void *, int64_t, int64_t) =
        x->dtype == PBN_FLOAT32   ? relu_row_f32
        : x->dtype == PBN_FLOAT64 ? relu_row_f64
        : x->dtype == PBN_FLOAT16 ? relu_row_f16
                                  : relu_row_bf16;
    const int64_t item = (int64_t)pbn_item_size(x->dtype), *sd = dyv != NULL ? dy->strides : x->strides;
    int64_t n[PBN_MAX_RANK], s[PBN_MAX_RANK][3], at[PBN_MAX_RANK] = {0};
    int order[PBN_MAX_RANK], axes = 0, merged = 0;
    for (int i = 0; i < out->rank; i++) { /* innermost first, by the output's stride */
        if (out->dims[i] == 1)
            continue;
        int j = axes++;
        for (; j > 0 && out->strides[order[j - 1]] > out->strides[i]; j--)
            order[j] = order[j - 1];
        order[j] = i;
    }
    for (int i = 0; i < axes; i++) {
        const int axis = order[i], below = merged - 1;
        const int64_t steps[] = {x->strides[axis], sd[axis], out->strides[axis]};
        if (merged > 0 && steps[0] == s[below][0] * n[below] && steps[1] == s[below][1] * n[below] &&
            steps[2] == s[below][2] * n[below]) {
            n[below] *= out->dims[axis];
            continue;
        }
        n[merged] = out->dims[axis];
        memcpy(s[merged++], steps, sizeof steps);
    }
    if (merged == 0) {
        n[0] = s[0][0] = s[0][1] = s[0][2] = 1;
        merged = 1;
    }
    const char *px = (const char *)xv, *pd = (const char *)dyv;
    char *po = (char *)outv;
    int i;
    do {
        row(px, s[0][0], pd, s[0][1], po, s[0][2], n[0]);
        for (i = 1; i < merged; i++) {
            const int64_t turns = ++at[i] < n[i] ? 1 : 1 - n[i]; /* one on, or back to the axis' start */
            px += turns * s[i][0] * item;
            if (pd != NULL)
                pd += turns * s[i][1] * item;
            po += turns * s[i][2] * item;
            if (turns == 1)
                break;
            at[i] = 0;
        }
    } while (i < merged);
}

static int relu(pbn_handle *h, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    (void)h;
    if (!loaded)
        return not_loaded();
    if (x == NULL || call->x == NULL || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "x and y must not be NULL");
    int code = check_tensor(call->y_desc, x);
    if (code == PBN_OK)
        relu_rows(x, call->x, NULL, NULL, call->y_desc, call->y);
    return code;
}

static int relu_backward(pbn_handle *h, const pbn_call *call) {
    const pbn_tensor *x = call->x_desc;
    (void)h;
    if (!loaded)
        return not_loaded();
    if (x == NULL || call->x == NULL || call->dy == NULL || call->dx == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "x, dy and dx must not be NULL");
    int code = check_tensor(call->dy_desc, x);
    if (code == PBN_OK)
        code = check_tensor(call->dx_desc, x);
    if (code == PBN_OK)
        relu_rows(x, call->x, call->dy_desc, call->dy, call->dx_desc, call->dx);
    return code;
}

const pbn_backend pbn_backend_onednn = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_CPU,
    .also_reached = {PBN_DEVICE_CUDA_HOST, PBN_DEVICE_ROCM_HOST},
    .name = "onednn",
    .label = "oneDNN",
    .search = {.sonames = "libdnnl.so.3",
               .hint = "pip install onednn-cpu-gomp, or oneDNN 3 with a CPU runtime of your distribution or "
                       "conda-forge",
               .distributions = "onednn-cpu-gomp onednn-cpu-iomp onednn-cpu-tbb",
               .roots = "DNNLROOT",
               .folders = "{prefix}/lib",
               .variables = "ONEDNN_ DNNL_ OMP_ GOMP_ KMP_"},
    .load = load,
    .status_name = status_name,
    .status_class = status_class,
    .last_error = last_error,
    .handle_device = handle_device,
    .device_count = device_count,
    .handle_create = handle_create,
    .handle_borrow = handle_borrow,
    .handle_destroy = handle_destroy,
    .handle_pointer = handle_pointer,
    .stream_set = stream_set,
    .stream_get = stream_get,
    .tensor_create = tensor_create,
    .tensor_borrow = tensor_borrow,
    .tensor_set = tensor_set,
    .tensor_get = tensor_get,
    .tensor_size = tensor_size,
    .tensor_destroy = tensor_destroy,
    .derive = derive,
    .capability = capability,
    .workspace_size = workspace_size,
    .forward_training = run_once,
    .forward_inference = run_once,
    .backward = run_once,
    .axpby = axpby,
    .fill = fill,
    .relu = relu,
    .relu_backward = relu_backward,
    .algorithms = algorithm_names,
    .plan_create = plan_create,
    .plan_info = plan_info,
    .plan_run = plan_run,
    .plan_destroy = plan_destroy,
    .plan_candidate = plan_candidate,
    .has_symbol = has_symbol,
    .at_fork = at_fork,
};

#endif /* PBN_PROTOTYPES_ONLY */
