/* oneDNN (CPU): everything that is oneDNN and nothing else is.
 *
 * api.h has the vendor's facts, the other files of this folder a subject each; they are compiled as part of this one.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "pybnorm/adapter.h"
#include "pybnorm/dl.h"
#include "pybnorm/shim.h"

#include "api.h"

#define PBN_DNNL_ENUMERATOR(name, number, ...) name = number,
enum { PBN_DNNL_STATUSES(PBN_DNNL_ENUMERATOR) PBN_DNNL_CONSTANTS(PBN_DNNL_ENUMERATOR) };
#undef PBN_DNNL_ENUMERATOR

/* ------------------------------------------------------------------ library */

typedef struct vendor_table {
    PBN_DNNL_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
    unsigned char runs[4][PBN_OP_AXPBY]; /* [dtype][operation]: the library has a primitive for this processor */
    int loses_threads; /* a forked child that needs more than one thread waits for the parent's */
    int sycl;          /* the CPU is a SYCL device, whose kernels read and write host memory in place */
    int lost;          /* this process is forked from one whose SYCL runtime has threads */
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
    if (version->major < 3) {
        snprintf(lib->message, sizeof lib->message, "oneDNN %d.%d.%d; this backend speaks oneDNN 3 and later", version->major,
                 version->minor, version->patch);
        return PBN_E_VERSION;
    }
    if (version->cpu_runtime == DNNL_RUNTIME_NONE) {
        snprintf(lib->message, sizeof lib->message, "oneDNN %d.%d.%d was built without a CPU runtime", version->major,
                 version->minor, version->patch);
        return PBN_E_VERSION;
    }
    table->sycl = (version->cpu_runtime & DNNL_RUNTIME_SYCL) != 0;
    PBN_DNNL_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    /* LLVM's and Intel's OpenMP start anew in a forked child, TBB works with the threads that there are. GCC's waits
     * for those of its parent. Its functions are no symbols of the vendor's and are found among its dependencies. */
    table->loses_threads = version->cpu_runtime == DNNL_RUNTIME_OMP &&
                           pbn_dl_symbol(lib->handle, "__kmpc_fork_call") == NULL;
    PBN_DL_PROBE(, omp_get_max_threads, )
    PBN_DL_PROBE(, omp_set_num_threads, )
    return PBN_OK;
}

#define OCL_ICD "OCL_ICD_FILENAMES"

/* SYCL reaches the CPU through an OpenCL driver, of which OpenCL's loader learns from /etc/OpenCL/vendors or from this
 * variable. PyPI's packages register theirs in neither place: it lies beside oneDNN. Named for as long as SYCL looks
 * for its devices, unless the user has set the variable. */
static int name_driver(const char *library) {
    char driver[PBN_PATH_MAX + 16];
    const char *slash = strrchr(library, '/');
    if (slash == NULL || getenv(OCL_ICD) != NULL)
        return 0;
    snprintf(driver, sizeof driver, "%.*s/libintelocl.so", (int)(slash - library), library);
    FILE *file = fopen(driver, "rb");
    if (file == NULL)
        return 0;
    fclose(file);
    return setenv(OCL_ICD, driver, 0) == 0;
}

static int load(const char *file, int no_load, pbn_library *out) {
    vendor_table table;
    const char *call = "";
    int named = 0;
    int code = pbn_dl_open(out, file, no_load);
    if (code != PBN_OK)
        return code;
    memset(&table, 0, sizeof table);
    code = resolve(out, &table);
    if (code == PBN_OK && table.sycl)
        named = name_driver(out->path);
    if (code == PBN_OK && (code = probe(&table, &call)) != dnnl_success)
        snprintf(out->message, sizeof out->message, "%s failed with status %d%s", call, code,
                 table.sycl ? "; its SYCL runtime finds the CPU by OpenCL's driver libintelocl.so, to be named in "
                              OCL_ICD " where it is not beside oneDNN" : "");
    if (named)
        unsetenv(OCL_ICD);
    if (code != PBN_OK) {
        pbn_dl_discard(out);
        return code;
    }
    api = table;
    loaded = 1;
    return PBN_OK;
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
        api.lost |= api.sycl;
        return;
    }
    openmp_before_fork = loaded || pbn_dl_present("libgomp.so.1"); /* anybody's: its threads are the process' */
    while (creating > 0)
        continue;
}

static int check_fork(void) {
    if (api.lost)
        return pbn_refuse(PBN_E_UNSUPPORTED, "oneDNN's SYCL runtime has no threads in a forked process: start the "
                                             "process with multiprocessing's spawn or forkserver");
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

/* By number: dnnl_status_t has no gaps. */
static const struct {
    const char *name;
    int class;
} statuses[] = {
#define PBN_DNNL_STATUS(name, number, family) [number] = {#name, PBN_CLASS_##family},
    PBN_DNNL_STATUSES(PBN_DNNL_STATUS)
#undef PBN_DNNL_STATUS
};

static int is_known(int status) {
    return status >= 0 && status < (int)(sizeof statuses / sizeof statuses[0]);
}

static const char *status_name(int status) {
    if (is_known(status))
        return statuses[status].name;
    const char *text = status > 0 && loaded && api.dnnl_status2str ? api.dnnl_status2str(status) : NULL;
    return text != NULL ? text : "unknown dnnl_status_t";
}

static int status_class(int status) {
    return is_known(status) ? statuses[status].class : PBN_CLASS_INTERNAL;
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

#include "primitives.c"

/* ------------------------------------------------------------------ handle */

static int handle_create(pbn_handle **out) {
    *out = NULL;
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
    return PBN_OK;
}

static int tensor_destroy(pbn_tensor *t) {
    int status = PBN_OK;
    if (t->owned && t->vendor != NULL)
        status = failed(api.dnnl_memory_desc_destroy(t->vendor), "from dnnl_memory_desc_destroy");
    memset(t, 0, sizeof *t);
    return status;
}

static int tensor_set(pbn_tensor *t, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    pbn_tensor next = pbn_described(dtype, rank, dims, strides); /* the caller's may lie in `t` itself */
    int vendor_dtype, status;
    if ((status = pbn_to_vendor_dtype(dtypes, dtype, &vendor_dtype)) != PBN_OK)
        return status;
    status = failed(api.dnnl_memory_desc_create_with_strides(&next.vendor, rank, dims, vendor_dtype, strides),
                    "from dnnl_memory_desc_create_with_strides");
    if (status == dnnl_invalid_arguments)
        return pbn_refuse(PBN_E_UNSUPPORTED, "oneDNN refuses these strides: ordered by stride, each axis must step "
                                             "over the whole extent (size times stride) of the one before it");
    if (status != dnnl_success)
        return status;
    status = tensor_destroy(t);
    next.compute = next.vendor;
    next.owned = 1;
    *t = next;
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
    return describe(t->vendor, dtype, rank, dims, strides);
}

static int tensor_borrow(void *md, pbn_tensor *t) {
    int dtype = 0, rank = 0;
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    memset(t, 0, sizeof *t);
    int status = describe(md, &dtype, &rank, dims, strides);
    if (status != PBN_OK)
        return status;
    for (int i = 0; i < rank; i++)
        if (dims[i] < 1 || strides[i] < 1)
            return pbn_refuse(PBN_E_UNSUPPORTED, "the memory descriptor has a size or stride that is below 1 or set at "
                                                 "run time");
    *t = pbn_described(dtype, rank, dims, strides);
    t->vendor = t->compute = md;
    return PBN_OK;
}

static int tensor_size(const pbn_tensor *t, size_t *bytes) {
    *bytes = api.dnnl_memory_desc_get_size(t->vendor);
    return PBN_OK;
}

/* ------------------------------------------------------------------ what runs */

static const char *const persistent_reason = "SPATIAL_PERSISTENT is cuDNN's; SPATIAL is the same mathematics";

static int check_mode(int mode) {
    return mode == PBN_SPATIAL_PERSISTENT ? pbn_refuse(PBN_E_UNSUPPORTED, persistent_reason) : PBN_OK;
}

static int check_support(int operation, int mode, int dtype) {
    const int code = check_mode(mode);
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
    int code = PBN_OK;
    if (operation == PBN_OP_DERIVE)
        code = check_mode(mode);
    else if (operation >= PBN_OP_AXPBY)
        bits |= PBN_CAP_HOST_STEPS;
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
    *why = code == PBN_OK ? NULL : pbn_reason;
    return code == PBN_OK ? bits : 0;
}

/* oneDNN has no such call; the neutral rule. */
static int derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    for (int i = 0; i < x->rank; i++)
        dims[i] = i == 1 || (i > 1 && mode == PBN_PER_ACTIVATION) ? x->dims[i] : 1;
    pbn_packed_strides(x->rank, dims, PBN_CHANNELS_FIRST, strides);
    return tensor_set(derived, x->dtype == PBN_FLOAT64 ? PBN_FLOAT64 : PBN_FLOAT32, x->rank, dims, strides);
}

#include "../native/blend.c"
#include "calls.c"
#include "../native/elementwise.c"

const pbn_backend pbn_backend_onednn = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_CPU,
    .also_reached = {PBN_DEVICE_CUDA_HOST, PBN_DEVICE_ROCM_HOST},
    .name = "onednn",
    .label = "oneDNN",
    .search = {.sonames = "libdnnl.so.3",
               .hint = "pip install onednn-cpu-gomp (small) or onednn (newest), or oneDNN 3 of your distribution or "
                       "conda-forge",
               .distributions = "onednn-cpu-gomp onednn-cpu-iomp onednn-cpu-tbb onednn",
               .roots = "DNNLROOT",
               .folders = "{prefix}/lib /usr/lib/*-linux-gnu* /usr/lib64 /usr/lib /usr/local/lib",
               .variables = "ONEDNN_ DNNL_ OMP_ GOMP_ KMP_ SYCL_ ONEAPI_ OCL_ICD_ DPCPP_CPU_ TBB_"},
    PBN_LIBRARY_AND_HANDLES(),
    .stream_set = stream_set,
    .stream_get = stream_get,
    PBN_TENSORS(),
    .workspace_size = workspace_size,
    .forward_training = run_once,
    .forward_inference = run_once,
    .backward = run_once,
    .axpby = axpby,
    .fill = fill,
    .relu = relu,
    .relu_backward = relu,
    .plan_create = plan_create,
    .plan_info = plan_info,
    .plan_run = plan_run,
    .plan_destroy = plan_destroy,
    .unrepeated = unrepeated,
    .has_symbol = has_symbol,
    .at_fork = at_fork,
};
