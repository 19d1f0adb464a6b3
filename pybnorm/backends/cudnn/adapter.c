/* cuDNN 8 and 9: loading, handles, descriptors and the imperative ("legacy") calls. The one translation unit of this
 * folder: tensors.c, graph.c, matrix.c and plans.c are included below.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <float.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "pybnorm/adapter.h"
#include "pybnorm/dl.h"
#include "api.h"
#include "rules.h"

struct pbn_handle {
    void *vendor;
    int owned;
    void *context; /* CUDA's, of the device that the vendor's handle was made for; NULL if it is not known */
    int device;
    char device_name[96];
    const struct rule_table *rules;
};

typedef struct cudnn_api {
    int major; /* 0: nothing loaded */
    int graphs_only; /* an installation without libcudnn_ops */
    PBN_CUDNN_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} cudnn_api;

static cudnn_api api;
static const int dtypes[] = {PBN_CUDNN_DATA_FLOAT, PBN_CUDNN_DATA_DOUBLE, PBN_CUDNN_DATA_HALF, PBN_CUDNN_DATA_BFLOAT16};
static char loaded_path[PBN_PATH_MAX]; /* of the library that `api` is of */

static const char no_handle[] = "the handle is missing";
static const char no_tensor[] = "a tensor descriptor is missing or was never set";
static const char no_pointer[] = "a required pointer is missing";
static const char not_loaded[] = "the cuDNN library has not been loaded";
static const char bad_mode[] = "the mode is none of PER_ACTIVATION, SPATIAL, SPATIAL_PERSISTENT";
static const char bad_rank[] = "the rank is outside 2 to 8";
static const char no_ops[] =
    "this cuDNN installation has libcudnn_graph and not libcudnn_ops, where cuDNN's batch-norm calls are: it has graphs "
    "only (algorithms auto, graph, and for inference pointwise), which take packed float32, float16 and bfloat16 tensors "
    "of the spatial modes, in inference channels-last ones, with alpha 1 and beta 0";
static const char rank2_in_8[] = "cuDNN 8 has no tensor descriptor of rank 2; describe the tensor as (N, C, 1, 1)";
static const char not_mergeable[] =
    "cuDNN computes on rank 4 and 5 only, and the spatial axes of this rank 6 to 8 tensor are not mutually contiguous, "
    "so they cannot be merged into one";

/* cuDNN 9's text stays until someone reads it, whoever's failure it was: another user of the library
 * on this thread may have left one. */
static inline void forget_vendor_text(void) {
    char text[1];
    if (api.cudnnGetLastErrorString != NULL)
        api.cudnnGetLastErrorString(text, sizeof text);
}

/* ---- loading ---------------------------------------------------------------------------------- */

static int missing(pbn_library *lib, const char *symbol) {
    snprintf(lib->message, sizeof lib->message, "symbol %s is missing", symbol);
    return PBN_E_SYMBOL;
}

static void take_from_ops(const pbn_library *lib, cudnn_api *table) {
#define PBN_TAKE(symbol) PBN_DL_PROBE(, symbol, )
    PBN_CUDNN_OPS(PBN_TAKE)
#undef PBN_TAKE
}

#include "tensors.c"

/* libcudnn.so is a dispatcher: it opens its parts at first use, and when one is missing it prints and
 * abort()s the process (9.27, 8.9.7). So the parts that this file's calls reach are opened first.
 * The order is the one in which the dispatcher will find them: in the process, beside itself, elsewhere. */
static int open_part(pbn_library *lib, const char *soname, int elsewhere, pbn_library *found) {
    pbn_library part;
    char path[PBN_PATH_MAX];
    const char *slash = strrchr(lib->path, '/');
    int status = pbn_dl_open(&part, soname, 1);
    if (status != PBN_OK && slash != NULL) {
        int length = snprintf(path, sizeof path, "%.*s/%s", (int)(slash - lib->path), lib->path, soname);
        if (length > 0 && (size_t)length < sizeof path)
            status = pbn_dl_open(&part, path, 0);
    }
    if (status != PBN_OK && elsewhere)
        status = pbn_dl_open(&part, soname, 0);
    if (status == PBN_OK) {
        *found = part;
        return PBN_OK;
    }
    snprintf(lib->message, sizeof lib->message,
             "its part %s cannot be opened, and calling cuDNN without it would abort the process: %.*s", soname,
             (int)sizeof lib->message / 2, part.message);
    return PBN_E_LIBRARY;
}

/* `table` has only graphs afterwards where cuDNN 9's libcudnn_ops is not there. */
static int open_parts(pbn_library *lib, cudnn_api *table) {
    pbn_library part;
    /* The version cannot be asked before the parts are there; these exports tell it apart. */
    static const struct {
        const char *export_name, *parts[2];
    } dispatchers[] = {
        {"cudnnGraphVersionCheck", {"libcudnn_graph.so.9", "libcudnn_ops.so.9"}},
        {"cudnnOpsTrainVersionCheck", {"libcudnn_ops_infer.so.8", "libcudnn_ops_train.so.8"}},
    };
    for (size_t i = 0; i < sizeof dispatchers / sizeof dispatchers[0]; i++) {
        if (pbn_dl_symbol(lib->handle, dispatchers[i].export_name) == NULL)
            continue;
        for (int number = 0; number < 2; number++) {
            /* Another installation's libcudnn_ops is none for a libcudnn_graph that was found without a dispatcher. */
            const int elsewhere = table->cudnnCreateTensorDescriptor != NULL;
            int status = open_part(lib, dispatchers[i].parts[number], elsewhere, &part);
            if (status == PBN_OK)
                continue;
            if (i != 0 || number != 1 || table->cudnnBackendExecute == NULL)
                return status;
            use_graphs_only(table);
            return PBN_OK;
        }
        if (i == 0 && table->cudnnCreateTensorDescriptor == NULL)
            take_from_ops(&part, table); /* the file is libcudnn_graph itself */
    }
    return PBN_OK;
}

static int is_of_ops(const char *name) {
#define PBN_SAME(symbol) || strcmp(name, #symbol) == 0
    return 0 PBN_CUDNN_OPS(PBN_SAME);
#undef PBN_SAME
}

/* What is missing of libcudnn_ops may be so for good, which `require_ops` says once the parts are open. */
static int resolve(pbn_library *lib, cudnn_api *table) {
#define PBN_RESOLVE(result, symbol, parameters)                                                                       \
    PBN_DL_PROBE(result, symbol, parameters)                                                                          \
    if (table->symbol == NULL && !is_of_ops(#symbol))                                                                 \
        return missing(lib, #symbol);
    PBN_CUDNN_SYMBOLS(PBN_RESOLVE, PBN_DL_PROBE)
#undef PBN_RESOLVE
    return PBN_OK;
}

static int require_ops(pbn_library *lib, const cudnn_api *table) {
#define PBN_NEEDED(result, symbol, parameters)                                                                        \
    if (table->symbol == NULL)                                                                                        \
        return missing(lib, #symbol);
#define PBN_PASSED(result, symbol, parameters)
    if (!table->graphs_only) {
        PBN_CUDNN_SYMBOLS(PBN_NEEDED, PBN_PASSED)
    }
#undef PBN_NEEDED
#undef PBN_PASSED
    return PBN_OK;
}

static int ask_version(pbn_library *lib, cudnn_api *table) {
    size_t number = table->cudnnGetVersion(); /* 9.27.0 is 92700, 8.9.7 is 8907 */
    size_t unit = number >= 10000 ? 10000 : 1000;
    if (number < 1000000) {
        lib->version[0] = (int32_t)(number / unit);
        lib->version[1] = (int32_t)(number % unit / 100);
        lib->version[2] = (int32_t)(number % 100);
    }
    if (lib->version[0] != 8 && lib->version[0] != 9) {
        snprintf(lib->message, sizeof lib->message,
                 "cudnnGetVersion() returned %zu; cuDNN 8 and cuDNN 9 are the versions this backend speaks", number);
        return PBN_E_VERSION;
    }
    table->major = lib->version[0];
    return PBN_OK;
}

static int cudnn_load(const char *file, int no_load, pbn_library *out) {
    cudnn_api fresh = {0}; /* an earlier load stays in force unless this one succeeds */
    if (out == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "no record for the library");
    int status = pbn_dl_open(out, file, no_load);
    if (status != PBN_OK)
        return pbn_refuse(status, "the cuDNN library cannot be opened");
    status = resolve(out, &fresh);
    if (status == PBN_OK)
        status = open_parts(out, &fresh);
    if (status == PBN_OK)
        status = require_ops(out, &fresh);
    if (status == PBN_OK)
        status = ask_version(out, &fresh);
    if (status != PBN_OK) {
        pbn_dl_discard(out);
        return pbn_refuse(status, "the cuDNN library cannot be used");
    }
    api = fresh;
    memcpy(loaded_path, out->path, sizeof loaded_path);
    return PBN_OK;
}

static int cudnn_has_symbol(const char *name) {
    if (name == NULL)
        return -1;
    if (api.graphs_only && is_of_ops(name))
        return 0;
    PBN_CUDNN_SYMBOLS(PBN_DL_PRESENT, PBN_DL_PRESENT)
    return -1;
}

/* ---- statuses --------------------------------------------------------------------------------- */

static const char *cudnn_status_name(int status) {
    const char *name;
    if (status < 0)
        return "not a cuDNN status";
    if (api.major == 0)
        return "cuDNN is not loaded";
    name = api.cudnnGetErrorString(status);
    return name != NULL ? name : "CUDNN_UNKNOWN_STATUS";
}

static int status_class_8(int status) {
    switch (status) {
    case PBN_V8_CUDNN_STATUS_NOT_INITIALIZED:
    case PBN_V8_CUDNN_STATUS_LICENSE_ERROR:
    case PBN_V8_CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING:
        return PBN_CLASS_NOT_INITIALIZED;
    case PBN_V8_CUDNN_STATUS_ALLOC_FAILED:
        return PBN_CLASS_ALLOCATION;
    case PBN_V8_CUDNN_STATUS_BAD_PARAM:
    case PBN_V8_CUDNN_STATUS_INVALID_VALUE:
        return PBN_CLASS_BAD_PARAMETER;
    case PBN_V8_CUDNN_STATUS_ARCH_MISMATCH:
    case PBN_V8_CUDNN_STATUS_NOT_SUPPORTED:
        return PBN_CLASS_NOT_SUPPORTED;
    case PBN_V8_CUDNN_STATUS_EXECUTION_FAILED:
    case PBN_V8_CUDNN_STATUS_RUNTIME_IN_PROGRESS:
    case PBN_V8_CUDNN_STATUS_RUNTIME_FP_OVERFLOW:
        return PBN_CLASS_EXECUTION;
    case PBN_V8_CUDNN_STATUS_VERSION_MISMATCH:
        return PBN_CLASS_VERSION;
    case PBN_V8_CUDNN_STATUS_INTERNAL_ERROR:
    case PBN_V8_CUDNN_STATUS_MAPPING_ERROR:
    default:
        return PBN_CLASS_INTERNAL;
    }
}

static int status_class_9(int status) {
    switch (status) {
    case PBN_CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH:
    case PBN_CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH:
        return PBN_CLASS_VERSION;
    case PBN_CUDNN_STATUS_NOT_INITIALIZED:
    case PBN_CUDNN_STATUS_LICENSE_ERROR:
    case PBN_CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED:
    /* Numbered as "not supported", but it is the installation that is broken, not the request. */
    case PBN_CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER:
    case PBN_CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDART:
    case PBN_CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING:
    case PBN_CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE:
        return PBN_CLASS_NOT_INITIALIZED;
    case PBN_CUDNN_STATUS_DEPRECATED:
        return PBN_CLASS_NOT_SUPPORTED;
    case PBN_CUDNN_STATUS_RUNTIME_IN_PROGRESS:
    case PBN_CUDNN_STATUS_RUNTIME_FP_OVERFLOW:
        return PBN_CLASS_EXECUTION;
    case PBN_CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED:
    case PBN_CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED:
        return PBN_CLASS_ALLOCATION;
    default:
        break;
    }
    switch (status / 1000 * 1000) { /* the vendor's own rule for the family of a status */
    case PBN_CUDNN_STATUS_BAD_PARAM:
        return PBN_CLASS_BAD_PARAMETER;
    case PBN_CUDNN_STATUS_NOT_SUPPORTED:
        return PBN_CLASS_NOT_SUPPORTED;
    case PBN_CUDNN_STATUS_EXECUTION_FAILED:
        return PBN_CLASS_EXECUTION;
    case PBN_CUDNN_STATUS_INTERNAL_ERROR:
    default:
        return PBN_CLASS_INTERNAL;
    }
}

static int cudnn_status_class(int status) {
    if (status == PBN_CUDNN_STATUS_SUCCESS)
        return PBN_CLASS_SUCCESS;
    if (status < 0)
        return PBN_CLASS_INTERNAL;
    return api.major == 8 ? status_class_8(status) : status_class_9(status);
}

static void cudnn_last_error(int status, char *text, size_t size) {
    if (text == NULL || size == 0)
        return;
    text[0] = '\0';
    if (status < 0)
        pbn_copy_text(text, size, pbn_reason);
    else if (status > 0 && api.cudnnGetLastErrorString != NULL)
        api.cudnnGetLastErrorString(text, size);
    text[size - 1] = '\0';
}

/* ---- device, handle, stream --------------------------------------------------------------------- */

static struct driver {
    int found;
    PBN_CUDA_DRIVER_SYMBOLS(PBN_DL_MEMBER)
} driver; /* written once, by find_driver; whoever has a handle may read it */

/* The driver, if it is in the process: cuDNN, or whoever has a context, has loaded it. It may come later. */
static int find_driver(void) {
    static atomic_flag taken = ATOMIC_FLAG_INIT;
    struct driver *const table = &driver;
    pbn_library library, *const lib = &library;
    int found;
    while (atomic_flag_test_and_set(&taken))
        ; /* another thread is looking for it */
    if (!driver.found && pbn_dl_open(lib, "libcuda.so.1", 1) == PBN_OK) {
        PBN_CUDA_DRIVER_SYMBOLS(PBN_DL_PROBE)
        driver.found = 1;
    }
    found = driver.found;
    atomic_flag_clear(&taken);
    return found;
}

/* The context of the last call that the vendor refused, on this thread. */
static _Thread_local void *failed_in;

/* A context pushed on the thread's stack is also the CUDA runtime's. */
static int go_to(void *context, int *before) {
    void *current = NULL;
    *before = 0;
    if (context == NULL || (driver.cuCtxGetCurrent(&current) == 0 && current == context))
        return PBN_OK;
    if (driver.cuCtxPushCurrent_v2(context) != 0)
        return pbn_refuse(PBN_E_DEVICE, pbn_no_place);
    *before = 1;
    return PBN_OK;
}

static void come_back(int before) {
    void *context;
    if (before)
        driver.cuCtxPopCurrent_v2(&context);
}

static int enter(const pbn_handle *handle, int *before) {
    return go_to(handle != NULL ? handle->context : NULL, before);
}

static void leave(const pbn_handle *handle, int before, int status) {
    if (status > 0)
        failed_in = handle->context;
    come_back(before);
}

static int is_lost(int result) {
#define PBN_LOST(name, value) || result == PBN_##name
    return 0 PBN_CUDA_LOST(PBN_LOST);
#undef PBN_LOST
}

/* A kernel that fails for good takes its context with it; cuDNN then answers every call with EXECUTION_FAILED or
 * INTERNAL_ERROR, and its text does not say which error that was. These driver calls neither wait nor launch anything;
 * the second asks the thread's own default stream, which does not touch a capture of another one. */
static int cudnn_context_lost(int status, char *text, size_t size) {
    void *const per_thread_stream = (void *)(uintptr_t)2; /* CU_STREAM_PER_THREAD */
    const char *name = NULL;
    size_t unused, total;
    int before, result = 0;
    if (text == NULL || size == 0 || status <= 0)
        return 0;
    text[0] = '\0';
    switch (cudnn_status_class(status)) {
    case PBN_CLASS_EXECUTION:
    case PBN_CLASS_INTERNAL:
    case PBN_CLASS_ALLOCATION:
    case PBN_CLASS_NOT_INITIALIZED:
        break;
    default:
        return 0;
    }
    if (!find_driver() || go_to(failed_in, &before) != PBN_OK)
        return 0;
    if (driver.cuMemGetInfo_v2 != NULL)
        result = driver.cuMemGetInfo_v2(&unused, &total);
    if (!is_lost(result) && driver.cuStreamQuery != NULL)
        result = driver.cuStreamQuery(per_thread_stream);
    come_back(before);
    if (!is_lost(result))
        return 0;
    if (driver.cuGetErrorName == NULL || driver.cuGetErrorName(result, &name) != 0 || name == NULL)
        name = "an error of the driver";
    snprintf(text, size,
             "the CUDA context is lost (%s, %d): a kernel of this call or of an earlier one, of whatever library, "
             "failed for good, and nothing more can run on this device in this process",
             name, result);
    return 1;
}

static int cudnn_handle_device(const pbn_handle *handle) {
    return handle != NULL ? handle->device : -1;
}

static int cudnn_device_count(void) {
    int count = 0;
    return find_driver() && driver.cuDeviceGetCount != NULL && driver.cuDeviceGetCount(&count) == 0 ? count : 0;
}

/* Managed and pinned memory is every device's. The driver answers for what it does not know, too: with zeros. */
static int cudnn_memory_device(const void *address) {
    int attributes[] = {PBN_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, PBN_CU_POINTER_ATTRIBUTE_IS_MANAGED,
                        PBN_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    unsigned type = 0, managed = 0;
    int ordinal = -1;
    void *values[] = {&type, &managed, &ordinal};
    if (!driver.found || driver.cuPointerGetAttributes == NULL ||
        driver.cuPointerGetAttributes(3, attributes, values, (uintptr_t)address) != 0 ||
        type != PBN_CU_MEMORYTYPE_DEVICE || managed)
        return -1;
    return ordinal;
}

/* Where a handle is: of one made by somebody else its stream says it, unless that is the default one. */
static void place(pbn_handle *handle) {
    void *stream = NULL;
    int before;
    handle->context = NULL;
    handle->device = -1;
    handle->device_name[0] = '\0';
    handle->rules = rule_tables;
    if (!find_driver() || driver.cuCtxGetDevice == NULL)
        return;
    if (driver.cuCtxGetCurrent != NULL && driver.cuCtxPushCurrent_v2 != NULL && driver.cuCtxPopCurrent_v2 != NULL) {
        if (!handle->owned && driver.cuStreamGetCtx != NULL && api.cudnnGetStream(handle->vendor, &stream) == 0 &&
            stream != NULL && driver.cuStreamGetCtx(stream, &handle->context) != 0)
            handle->context = NULL;
        if (handle->context == NULL && driver.cuCtxGetCurrent(&handle->context) != 0)
            handle->context = NULL;
    }
    if (go_to(handle->context, &before) != PBN_OK)
        return;
    if (driver.cuCtxGetDevice(&handle->device) != 0)
        handle->device = -1;
    come_back(before);
    if (handle->device < 0 || driver.cuDeviceGetName == NULL ||
        driver.cuDeviceGetName(handle->device_name, sizeof handle->device_name, handle->device) != 0)
        handle->device_name[0] = '\0';
    for (size_t i = 0; i < sizeof rule_tables / sizeof rule_tables[0]; i++)
        if (strcmp(handle->device_name, rule_tables[i].device) == 0)
            handle->rules = &rule_tables[i];
}

static int make_handle(void *vendor, int owned, pbn_handle **handle) {
    if (pbn_new_handle(sizeof **handle, handle) != PBN_OK)
        return PBN_E_MEMORY;
    (*handle)->vendor = vendor;
    (*handle)->owned = owned;
    place(*handle);
    return PBN_OK;
}

static int cudnn_handle_create(pbn_handle **handle) {
    void *vendor = NULL;
    int status;
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    *handle = NULL;
    if (api.major == 0)
        return pbn_refuse(PBN_E_NOT_LOADED, not_loaded);
    failed_in = NULL;
    forget_vendor_text();
    status = api.cudnnCreate(&vendor);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    status = make_handle(vendor, 1, handle);
    if (status != PBN_OK)
        api.cudnnDestroy(vendor);
    return status;
}

static int cudnn_handle_borrow(void *vendor, pbn_handle **handle) {
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    *handle = NULL;
    if (api.major == 0)
        return pbn_refuse(PBN_E_NOT_LOADED, not_loaded);
    if (vendor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    return make_handle(vendor, 0, handle);
}

static int cudnn_handle_destroy(pbn_handle *handle) {
    int before, status = PBN_OK;
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (handle->owned) {
        enter(handle, &before); /* whether or not its context is still there */
        forget_vendor_text();
        status = api.cudnnDestroy(handle->vendor);
        leave(handle, before, status);
    }
    free(handle); /* whatever cuDNN says: after a lost context it can only refuse */
    return status;
}

static void *cudnn_handle_pointer(const pbn_handle *handle) {
    return handle != NULL ? handle->vendor : NULL;
}

static int cudnn_stream_set(pbn_handle *handle, void *stream) {
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    forget_vendor_text();
    return api.cudnnSetStream(handle->vendor, stream);
}

static int cudnn_stream_get(pbn_handle *handle, void **stream) {
    if (handle == NULL || stream == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    forget_vendor_text();
    return api.cudnnGetStream(handle->vendor, stream);
}

/* What kernels of the handle's calls have recorded on the device: of batch norm those of the persistent mode record an
 * overflow of their fixed-point sums. cuDNN holds one such record per handle and clears it with the query. */
static int cudnn_runtime_error(pbn_handle *handle, int query, int *recorded) {
    int mode;
    if (handle == NULL || recorded == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    *recorded = PBN_CUDNN_STATUS_SUCCESS;
    switch (query) {
    case PBN_QUERY_RAW:
        mode = PBN_CUDNN_ERRQUERY_RAWCODE;
        break;
    case PBN_QUERY_NONBLOCKING:
        mode = PBN_CUDNN_ERRQUERY_NONBLOCKING;
        break;
    case PBN_QUERY_BLOCKING:
        mode = PBN_CUDNN_ERRQUERY_BLOCKING;
        break;
    default:
        return pbn_refuse(PBN_E_ARGUMENT, "the query is none of raw, nonblocking, blocking");
    }
    if (api.cudnnQueryRuntimeError == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, "this cuDNN library lacks the symbol cudnnQueryRuntimeError");
    forget_vendor_text();
    return api.cudnnQueryRuntimeError(handle->vendor, recorded, mode, NULL);
}

/* ---- tensors ------------------------------------------------------------------------------------ */

/* What may reach cudnnSetTensorNdDescriptor. It answers an offset of 2^31 - 1 with NOT_SUPPORTED but leaves
 * the descriptor set, and calls with such a one read and write out of bounds; negative strides it accepts. */
static int check_extent(int rank, const int64_t *dims, const int64_t *strides) {
    int64_t last = 0;
    if (rank < 2 || rank > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_ARGUMENT, bad_rank);
    if (rank == 2 && api.major == 8)
        return pbn_refuse(PBN_E_UNSUPPORTED, rank2_in_8);
    for (int i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a dim is outside 1 to 2^31 - 1, the range of cuDNN's int");
        if (strides[i] < (dims[i] == 1 ? 0 : 1) || strides[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a stride is outside 1 to 2^31 - 1, the range of cuDNN's int "
                                              "(0 is allowed where the dim is 1)");
    }
    for (int i = 0; i < rank; i++) { /* each product is below 2^62 and the sum so far below 2^31 */
        last += (dims[i] - 1) * strides[i];
        if (last >= INT_MAX)
            return pbn_refuse(PBN_E_UNSUPPORTED, "the last element lies 2^31 - 1 elements or more after the first; "
                                                 "cuDNN addresses elements with 32 bits");
    }
    return PBN_OK;
}

static int set_vendor(void *vendor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    int narrow_dims[PBN_MAX_RANK], narrow_strides[PBN_MAX_RANK], vendor_dtype = 0;
    int status = check_extent(rank, dims, strides);
    if (status == PBN_OK)
        status = pbn_to_vendor_dtype(dtypes, dtype, &vendor_dtype);
    if (status != PBN_OK)
        return status;
    for (int i = 0; i < rank; i++) {
        narrow_dims[i] = (int)dims[i];
        narrow_strides[i] = (int)strides[i];
    }
    return api.cudnnSetTensorNdDescriptor(vendor, vendor_dtype, rank, narrow_dims, narrow_strides);
}

static int get_vendor(const void *vendor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    int narrow_dims[PBN_MAX_RANK], narrow_strides[PBN_MAX_RANK], vendor_dtype = -1, vendor_rank = -1;
    int status = api.cudnnGetTensorNdDescriptor(vendor, PBN_MAX_RANK, &vendor_dtype, &vendor_rank, narrow_dims,
                                                narrow_strides);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    if (vendor_rank < 0 || vendor_rank > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_INTERNAL, "cuDNN reports a tensor descriptor of a rank above its own maximum of 8");
    for (int i = 0; i < vendor_rank; i++) {
        dims[i] = narrow_dims[i];
        strides[i] = narrow_strides[i];
    }
    *rank = vendor_rank;
    return pbn_from_vendor_dtype(dtypes, vendor_dtype, dtype,
                                 "the descriptor's cudnnDataType_t is none of CUDNN_DATA_FLOAT, _DOUBLE, _HALF, "
                                 "_BFLOAT16");
}

/* The descriptor for the compute calls of `t` (its vendor descriptor need not be set yet): its own, one of the
 * folded rank, or NULL where the memory does not fold; the descriptor calls work there all the same. */
static int make_compute(const pbn_tensor *t, void **compute) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int rank, status;
    *compute = t->vendor;
    if (t->rank == 4 || t->rank == 5)
        return PBN_OK;
    *compute = NULL;
    status = pbn_fold(t, 4, 5, &rank, dims, strides);
    if (status != PBN_OK)
        return status == PBN_E_UNSUPPORTED ? PBN_OK : status;
    status = api.cudnnCreateTensorDescriptor(compute);
    if (status != PBN_CUDNN_STATUS_SUCCESS) {
        *compute = NULL;
        return status;
    }
    status = set_vendor(*compute, t->dtype, rank, dims, strides);
    if (status != PBN_OK) {
        api.cudnnDestroyTensorDescriptor(*compute);
        *compute = NULL;
    }
    return status;
}

static void drop_compute(pbn_tensor *t) {
    if (t->compute != NULL && t->compute != t->vendor)
        api.cudnnDestroyTensorDescriptor(t->compute);
    t->compute = NULL;
}

static void unset(pbn_tensor *t) {
    drop_compute(t);
    t->dtype = t->rank = t->layout = 0;
    memset(t->dims, 0, sizeof t->dims);
    memset(t->strides, 0, sizeof t->strides);
}

/* A record of these values beside t's vendor descriptor, with a compute descriptor of its own. */
static int describe(const pbn_tensor *t, int dtype, int rank, const int64_t *dims, const int64_t *strides,
                    pbn_tensor *next) {
    memset(next, 0, sizeof *next);
    next->vendor = t->vendor;
    next->owned = t->owned;
    next->dtype = dtype;
    next->rank = rank;
    memcpy(next->dims, dims, (size_t)rank * sizeof *dims);
    memcpy(next->strides, strides, (size_t)rank * sizeof *strides);
    next->layout = pbn_layout_of(rank, dims, strides);
    return make_compute(next, &next->compute);
}

static void replace(pbn_tensor *t, const pbn_tensor *next) {
    drop_compute(t);
    *t = *next;
}

/* Takes over what t's vendor descriptor holds; t is unset where that is nothing this backend can use. */
static int adopt(pbn_tensor *t) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    pbn_tensor next;
    int dtype = 0, rank = 0;
    int status = get_vendor(t->vendor, &dtype, &rank, dims, strides);
    if (status == PBN_OK && rank != 0) {
        status = check_extent(rank, dims, strides);
        if (status == PBN_E_ARGUMENT) /* not the caller's argument here, but a foreign descriptor's content */
            status = PBN_E_UNSUPPORTED;
        if (status == PBN_OK)
            status = describe(t, dtype, rank, dims, strides, &next);
    }
    if (status != PBN_OK || rank == 0)
        unset(t);
    else
        replace(t, &next);
    return status;
}

/* After a refusal by cuDNN: the record stays if the vendor descriptor is still what it says. */
static void unset_if_changed(pbn_tensor *t) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int dtype, rank;
    if (get_vendor(t->vendor, &dtype, &rank, dims, strides) != PBN_OK || dtype != t->dtype || rank != t->rank ||
        memcmp(dims, t->dims, (size_t)rank * sizeof *dims) != 0 ||
        memcmp(strides, t->strides, (size_t)rank * sizeof *strides) != 0)
        unset(t);
}

static int check_created(const pbn_tensor *t) {
    if (api.major == 0)
        return pbn_refuse(PBN_E_NOT_LOADED, not_loaded);
    if (t == NULL || t->vendor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    return PBN_OK;
}

static int cudnn_tensor_create(pbn_tensor *tensor) {
    int status;
    if (tensor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    memset(tensor, 0, sizeof *tensor);
    if (api.major == 0)
        return pbn_refuse(PBN_E_NOT_LOADED, not_loaded);
    forget_vendor_text();
    status = api.cudnnCreateTensorDescriptor(&tensor->vendor);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        tensor->vendor = NULL;
    else
        tensor->owned = 1;
    return status;
}

static int cudnn_tensor_borrow(void *vendor, pbn_tensor *tensor) {
    int status;
    if (tensor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (api.graphs_only)
        return pbn_refuse(PBN_E_UNSUPPORTED, no_ops);
    memset(tensor, 0, sizeof *tensor);
    tensor->vendor = vendor;
    status = check_created(tensor);
    if (status == PBN_OK) {
        forget_vendor_text();
        status = adopt(tensor);
    }
    if (status != PBN_OK)
        memset(tensor, 0, sizeof *tensor);
    return status;
}

static int cudnn_tensor_set(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    pbn_tensor next;
    int vendor_dtype, status = check_created(tensor);
    if (status != PBN_OK)
        return status;
    if (dims == NULL || strides == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    status = check_extent(rank, dims, strides);
    if (status == PBN_OK)
        status = pbn_to_vendor_dtype(dtypes, dtype, &vendor_dtype);
    if (status != PBN_OK)
        return status;
    forget_vendor_text();
    /* The compute descriptor first, on the side, so that a failure leaves both as they were. */
    status = describe(tensor, dtype, rank, dims, strides, &next);
    if (status != PBN_OK)
        return status;
    status = set_vendor(tensor->vendor, dtype, rank, dims, strides);
    if (status != PBN_OK) {
        drop_compute(&next);
        unset_if_changed(tensor);
        return status;
    }
    replace(tensor, &next);
    return PBN_OK;
}

static int cudnn_tensor_get(const pbn_tensor *tensor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    int status = check_created(tensor);
    if (status != PBN_OK)
        return status;
    if (dtype == NULL || rank == NULL || dims == NULL || strides == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    forget_vendor_text();
    return get_vendor(tensor->vendor, dtype, rank, dims, strides);
}

static int cudnn_tensor_size(const pbn_tensor *tensor, size_t *bytes) {
    int status = check_created(tensor);
    if (status != PBN_OK)
        return status;
    if (bytes == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    forget_vendor_text();
    return api.cudnnGetTensorSizeInBytes(tensor->vendor, bytes);
}

static int cudnn_tensor_destroy(pbn_tensor *tensor) {
    int status = PBN_OK;
    if (tensor == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (tensor->vendor != NULL) {
        forget_vendor_text();
        drop_compute(tensor);
        if (tensor->owned)
            status = api.cudnnDestroyTensorDescriptor(tensor->vendor);
    }
    memset(tensor, 0, sizeof *tensor);
    return status;
}

static int to_vendor_mode(int mode, int *vendor) {
    switch (mode) {
    case PBN_PER_ACTIVATION:
        *vendor = PBN_CUDNN_BATCHNORM_PER_ACTIVATION;
        return PBN_OK;
    case PBN_SPATIAL:
        *vendor = PBN_CUDNN_BATCHNORM_SPATIAL;
        return PBN_OK;
    case PBN_SPATIAL_PERSISTENT:
        *vendor = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT;
        return PBN_OK;
    default:
        return pbn_refuse(PBN_E_ARGUMENT, bad_mode);
    }
}

static int cudnn_derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    int vendor_mode, status = check_created(derived);
    if (status == PBN_OK)
        status = check_created(x);
    if (status == PBN_OK)
        status = to_vendor_mode(mode, &vendor_mode);
    if (status != PBN_OK)
        return status;
    if (x->rank == 0)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    forget_vendor_text();
    status = api.cudnnDeriveBNTensorDescriptor(derived->vendor, x->vendor, vendor_mode);
    if (status != PBN_CUDNN_STATUS_SUCCESS) {
        unset_if_changed(derived);
        return status;
    }
    return adopt(derived);
}

/* ---- what runs ---------------------------------------------------------------------------------- */

/* y = a*x + b*y for tensors of the same dims with strides of their own. cudnnTransformTensor is the call that
 * documents exactly this, layouts differing included; x and y must not overlap there. cudnnAddTensor has the same
 * arguments and documents C = alpha*A + beta*C with A broadcast, so equal dims are a special case of it, but no
 * differing layouts. cudnnOpTensor would need a descriptor of its own. That every dtype runs and that beta = 0
 * leaves y unread (the vendor's general rule for blending) is documented, not measured: if a device shows
 * otherwise, this table is what changes. */
typedef enum axpby_call { AXPBY_TRANSFORM, AXPBY_ADD } axpby_call;

static const axpby_call axpby_by_dtype[] = {
    [PBN_FLOAT32] = AXPBY_TRANSFORM,
    [PBN_FLOAT64] = AXPBY_TRANSFORM,
    [PBN_FLOAT16] = AXPBY_TRANSFORM,
    [PBN_BFLOAT16] = AXPBY_TRANSFORM,
};

static pbn_cudnnTransformTensor_fn axpby_function(int dtype) {
    switch (axpby_by_dtype[dtype]) {
    case AXPBY_TRANSFORM:
        return api.cudnnTransformTensor;
    case AXPBY_ADD:
        return api.cudnnAddTensor;
    default:
        return NULL;
    }
}

static const char no_relu[] = "this cuDNN library lacks the symbols of cudnnActivationForward and -Backward";
static const char no_fill[] = "this cuDNN library lacks the symbol cudnnSetTensor";
static const char no_fused[] = "cuDNN's plain batch-norm calls have no fused activation and no residual; its plans have";
static const char no_axpby[] = "this cuDNN library lacks the symbol that y = a*x + b*y goes through";

static int has_activation(void) {
    return api.cudnnCreateActivationDescriptor != NULL && api.cudnnSetActivationDescriptor != NULL &&
           api.cudnnDestroyActivationDescriptor != NULL && api.cudnnActivationForward != NULL &&
           api.cudnnActivationBackward != NULL;
}

static uint32_t cudnn_capability(int operation, int mode, int dtype, int layout, int rank, const char **why) {
    const char *ignored;
    int number;
    if (why == NULL)
        why = &ignored;
    *why = NULL;
    if (rank < 2 || rank > PBN_MAX_RANK) {
        *why = bad_rank;
    } else if (rank == 2 && api.major == 8) {
        *why = rank2_in_8;
    } else if (pbn_to_vendor_dtype(dtypes, dtype, &number) != PBN_OK) {
        *why = pbn_reason;
    } else if (layout != PBN_CHANNELS_FIRST && layout != PBN_CHANNELS_LAST && layout != PBN_STRIDED) {
        *why = "the layout is none of CHANNELS_FIRST, CHANNELS_LAST, STRIDED";
    } else if (operation != PBN_OP_AXPBY && operation != PBN_OP_FILL && operation != PBN_OP_RELU &&
               operation != PBN_OP_RELU_BACKWARD && to_vendor_mode(mode, &number) != PBN_OK) {
        *why = bad_mode;
    } else {
        switch (operation) {
        case PBN_OP_DERIVE:
            return PBN_CAP_RUNS;
        case PBN_OP_AXPBY:
            if (api.major != 0 && axpby_function(dtype) == NULL) {
                *why = no_axpby;
                return 0;
            }
            break;
        case PBN_OP_FILL:
            if (api.major != 0 && api.cudnnSetTensor == NULL) {
                *why = no_fill;
                return 0;
            }
            return PBN_CAP_RUNS | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
        case PBN_OP_RELU:
        case PBN_OP_RELU_BACKWARD:
            if (api.major != 0 && !has_activation()) {
                *why = no_relu;
                return 0;
            }
            return PBN_CAP_RUNS | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
        case PBN_OP_FORWARD_TRAINING:
        case PBN_OP_FORWARD_INFERENCE:
        case PBN_OP_BACKWARD:
            if (!api.graphs_only)
                break;
            if (mode == PBN_PER_ACTIVATION || dtype == PBN_FLOAT64 || layout == PBN_STRIDED ||
                (operation == PBN_OP_FORWARD_INFERENCE && layout != PBN_CHANNELS_LAST)) {
                *why = no_ops;
                return 0;
            }
            return PBN_CAP_RUNS | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
        default:
            *why = "the operation is unknown";
            return 0;
        }
        return PBN_CAP_RUNS | PBN_CAP_BLEND_NATIVE | (rank == 4 || rank == 5 ? 0u : (uint32_t)PBN_CAP_FOLDED);
    }
    return 0;
}

static int fuses(const pbn_call *call) {
    return call->activation != PBN_ACTIVATION_NONE || pbn_has_residual(call);
}

static int cudnn_workspace_size(pbn_handle *handle, const pbn_call *call, size_t *bytes) {
    if (handle == NULL || call == NULL || bytes == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, handle == NULL ? no_handle : no_pointer);
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    if (api.graphs_only)
        return pbn_refuse(PBN_E_UNSUPPORTED, no_ops);
    *bytes = 0; /* cuDNN blends by itself, and the plain entry points take no workspace */
    return PBN_OK;
}

/* ---- calls -------------------------------------------------------------------------------------- */

/* alpha and beta point to a double when x is float64 and to a float otherwise; cuDNN cannot be told which. */
typedef union scalar {
    float narrow;
    double wide;
} scalar;

static int to_scalar(double value, int dtype, scalar *out) {
    if (dtype == PBN_FLOAT64) {
        out->wide = value;
        return PBN_OK;
    }
    if (!(value >= -FLT_MAX && value <= FLT_MAX))
        return pbn_refuse(PBN_E_ARGUMENT, "a blending factor is outside the range of the float32 that cuDNN reads");
    out->narrow = (float)value;
    return PBN_OK;
}

static int to_compute(const pbn_tensor *t, void **desc) {
    if (t == NULL || t->rank == 0)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (t->compute == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, not_mergeable);
    *desc = t->compute;
    return PBN_OK;
}

static inline uintptr_t bits(const void *pointer) {
    return (uintptr_t)pointer;
}

/* A misaligned access is no status in cuDNN: it is reported by the next synchronisation and the CUDA context
 * is lost. The 16-bit batch-norm kernels load pairs of elements, except where every tensor is channels-last;
 * cudnnTransformTensor, cudnnSetTensor and the activation calls take any element address
 * (tried on an H200 with cuDNN 9.19).
 * `data` and `params` are the call's addresses or-ed together. */
static int check_alignment(int dtype, int any_element, uintptr_t data, uintptr_t params) {
    uintptr_t element = pbn_item_size(dtype);
    uintptr_t param = dtype == PBN_FLOAT64 ? 8 : 4;
    if ((data & (element - 1)) != 0 || (params & (param - 1)) != 0)
        return pbn_refuse(PBN_E_ARGUMENT, "a pointer is not aligned to its element size");
    if (element == 2 && !any_element && (data & 3) != 0)
        return pbn_refuse(PBN_E_UNSUPPORTED, "known defect cudnn-misaligned: float16 and bfloat16 tensors that are not "
                                             "channels-last must be 4-byte aligned: cuDNN's kernels would lose the "
                                             "CUDA context");
    return PBN_OK;
}

static int is_channels_last(const pbn_tensor *t) {
    return t != NULL && t->layout == PBN_CHANNELS_LAST;
}

static int check_pair(const void *first, const void *second) {
    if ((first == NULL) != (second == NULL))
        return pbn_refuse(PBN_E_ARGUMENT, "of a pair of statistics one pointer is given and the other is missing");
    return PBN_OK;
}

/* What cuDNN's batch-norm calls take from one of ours; the other data tensors are the call's own. */
typedef struct batch_norm {
    void *x_desc, *param_desc;
    int mode;
    scalar alpha, beta;
} batch_norm;

/* Checks what the three have in common. `there`: whether every pointer that may not be NULL is given; `any_element`:
 * whether every tensor is channels-last; `data` and `params` as for check_alignment. */
static int to_batch_norm(const pbn_handle *handle, const pbn_call *call, int there, int any_element, uintptr_t data,
                         uintptr_t params, batch_norm *out) {
    int status;
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (!there)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (fuses(call))
        return pbn_refuse(PBN_E_UNSUPPORTED, no_fused);
    if (api.graphs_only)
        return pbn_refuse(PBN_E_UNSUPPORTED, no_ops);
    if ((status = to_vendor_mode(call->mode, &out->mode)) != PBN_OK ||
        (status = to_compute(call->x_desc, &out->x_desc)) != PBN_OK ||
        (status = to_compute(call->param_desc, &out->param_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha, call->x_desc->dtype, &out->alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, call->x_desc->dtype, &out->beta)) != PBN_OK ||
        (status = check_pair(call->running_mean, call->running_variance)) != PBN_OK ||
        (status = check_pair(call->saved_mean, call->saved_inv_variance)) != PBN_OK)
        return status;
    return check_alignment(call->x_desc->dtype, any_element, data, params);
}

static int cudnn_forward_training(pbn_handle *handle, const pbn_call *call) {
    batch_norm n;
    void *y_desc;
    int status = to_batch_norm(
        handle, call, call->x != NULL && call->y != NULL && call->scale != NULL && call->bias != NULL,
        is_channels_last(call->x_desc) && is_channels_last(call->y_desc), bits(call->x) | bits(call->y),
        bits(call->scale) | bits(call->bias) | bits(call->running_mean) | bits(call->running_variance) |
            bits(call->saved_mean) | bits(call->saved_inv_variance),
        &n);
    if (status != PBN_OK || (status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationForwardTraining(
        handle->vendor, n.mode, &n.alpha, &n.beta, n.x_desc, call->x, y_desc, call->y, n.param_desc, call->scale,
        call->bias, call->factor, call->running_mean, call->running_variance, call->epsilon, call->saved_mean,
        call->saved_inv_variance);
}

static int cudnn_forward_inference(pbn_handle *handle, const pbn_call *call) {
    batch_norm n;
    void *y_desc;
    int status = to_batch_norm(
        handle, call,
        call->x != NULL && call->y != NULL && call->scale != NULL && call->bias != NULL &&
            call->running_mean != NULL && call->running_variance != NULL,
        is_channels_last(call->x_desc) && is_channels_last(call->y_desc), bits(call->x) | bits(call->y),
        bits(call->scale) | bits(call->bias) | bits(call->running_mean) | bits(call->running_variance), &n);
    if (status != PBN_OK || (status = to_compute(call->y_desc, &y_desc)) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationForwardInference(
        handle->vendor, n.mode, &n.alpha, &n.beta, n.x_desc, call->x, y_desc, call->y, n.param_desc, call->scale,
        call->bias, call->running_mean, call->running_variance, call->epsilon);
}

static int cudnn_backward(pbn_handle *handle, const pbn_call *call) {
    batch_norm n;
    scalar alpha_param, beta_param;
    void *dy_desc, *dx_desc;
    int status = to_batch_norm(
        handle, call,
        call->x != NULL && call->dy != NULL && call->dx != NULL && call->scale != NULL && call->dscale != NULL &&
            call->dbias != NULL,
        is_channels_last(call->x_desc) && is_channels_last(call->dy_desc) && is_channels_last(call->dx_desc),
        bits(call->x) | bits(call->dy) | bits(call->dx),
        bits(call->scale) | bits(call->dscale) | bits(call->dbias) | bits(call->saved_mean) |
            bits(call->saved_inv_variance),
        &n);
    if (status != PBN_OK || (status = to_compute(call->dy_desc, &dy_desc)) != PBN_OK ||
        (status = to_compute(call->dx_desc, &dx_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha_param, call->x_desc->dtype, &alpha_param)) != PBN_OK ||
        (status = to_scalar(call->beta_param, call->x_desc->dtype, &beta_param)) != PBN_OK)
        return status;
    forget_vendor_text();
    return api.cudnnBatchNormalizationBackward(
        handle->vendor, n.mode, &n.alpha, &n.beta, &alpha_param, &beta_param, n.x_desc, call->x, dy_desc, call->dy,
        dx_desc, call->dx, n.param_desc, call->scale, call->dscale, call->dbias, call->epsilon, call->saved_mean,
        call->saved_inv_variance);
}

static int cudnn_axpby(pbn_handle *handle, const pbn_call *call) {
    pbn_cudnnTransformTensor_fn function;
    scalar alpha, beta;
    void *x_desc, *y_desc;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = to_scalar(call->alpha, call->x_desc->dtype, &alpha)) != PBN_OK ||
        (status = to_scalar(call->beta, call->x_desc->dtype, &beta)) != PBN_OK ||
        /* which of these kernels load pairs is unknown, so all of them are held to it */
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->y), 0)) != PBN_OK)
        return status;
    function = axpby_function(call->x_desc->dtype);
    if (function == NULL)
        return pbn_refuse(PBN_E_SYMBOL, no_axpby);
    forget_vendor_text();
    return function(handle->vendor, &alpha, x_desc, call->x, &beta, y_desc, call->y);
}

/* cudnnSetTensor reads a float for 16-bit tensors, not the tensor's own type as documented: seen on an H200 with
 * cuDNN 9.19, where the bits of a half gave zeros. Rounded here, so that the vendor's own conversion is exact. */
static int cudnn_fill(pbn_handle *handle, const pbn_call *call) {
    void *y_desc;
    double wide;
    float narrow;
    int status, is_double;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = check_alignment(call->y_desc->dtype, 1, bits(call->y), 0)) != PBN_OK)
        return status;
    if (api.cudnnSetTensor == NULL)
        return pbn_refuse(PBN_E_SYMBOL, no_fill);
    is_double = call->y_desc->dtype == PBN_FLOAT64;
    wide = call->alpha;
    narrow = (float)(call->y_desc->dtype == PBN_FLOAT32 || is_double ? wide : pbn_round(wide, call->y_desc->dtype));
    forget_vendor_text();
    return api.cudnnSetTensor(handle->vendor, y_desc, call->y, is_double ? (void *)&wide : (void *)&narrow);
}

/* The descriptor is host memory that a call reads before it returns. */
static int new_relu(void **activation) {
    int status;
    if (!has_activation())
        return pbn_refuse(PBN_E_SYMBOL, no_relu);
    status = api.cudnnCreateActivationDescriptor(activation);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    status = api.cudnnSetActivationDescriptor(*activation, PBN_CUDNN_ACTIVATION_RELU, PBN_CUDNN_PROPAGATE_NAN, 0.0);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        api.cudnnDestroyActivationDescriptor(*activation);
    return status;
}

static int cudnn_relu(pbn_handle *handle, const pbn_call *call) {
    scalar one, zero;
    void *x_desc, *y_desc, *activation;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->y == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if ((status = to_compute(call->x_desc, &x_desc)) != PBN_OK ||
        (status = to_compute(call->y_desc, &y_desc)) != PBN_OK ||
        (status = to_scalar(1, call->x_desc->dtype, &one)) != PBN_OK ||
        (status = to_scalar(0, call->x_desc->dtype, &zero)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->y), 0)) != PBN_OK)
        return status;
    forget_vendor_text();
    status = new_relu(&activation);
    if (status != PBN_OK)
        return status;
    status = api.cudnnActivationForward(handle->vendor, activation, &one, x_desc, call->x, &zero, y_desc, call->y);
    api.cudnnDestroyActivationDescriptor(activation);
    return status;
}

/* Axes of length 1 have no place in memory, but cuDNN compares their strides too. */
static int same_strides(const pbn_tensor *a, const pbn_tensor *b) {
    if (a->rank != b->rank)
        return 0;
    for (int i = 0; i < a->rank; i++)
        if (a->dims[i] != b->dims[i] || (a->dims[i] > 1 && a->strides[i] != b->strides[i]))
            return 0;
    return 1;
}

/* cudnnActivationBackward wants the activation's output too; its sign is that of x, so x is passed. It takes
 * y and dy of the same strides and x and dx of the same strides only (9.19), which makes that one for all. */
static int cudnn_relu_backward(pbn_handle *handle, const pbn_call *call) {
    scalar one, zero;
    void *desc, *activation;
    int status;
    if (handle == NULL || call == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_handle);
    if (call->x == NULL || call->dy == NULL || call->dx == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_pointer);
    if (call->x_desc == NULL || call->dy_desc == NULL || call->dx_desc == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, no_tensor);
    if (!same_strides(call->x_desc, call->dy_desc) || !same_strides(call->x_desc, call->dx_desc))
        return pbn_refuse(PBN_E_UNSUPPORTED, "cudnnActivationBackward takes x, dy and dx of the same strides only");
    if ((status = to_compute(call->x_desc, &desc)) != PBN_OK ||
        (status = to_scalar(1, call->x_desc->dtype, &one)) != PBN_OK ||
        (status = to_scalar(0, call->x_desc->dtype, &zero)) != PBN_OK ||
        (status = check_alignment(call->x_desc->dtype, 1, bits(call->x) | bits(call->dy) | bits(call->dx), 0)) !=
            PBN_OK)
        return status;
    forget_vendor_text();
    status = new_relu(&activation);
    if (status != PBN_OK)
        return status;
    status = api.cudnnActivationBackward(handle->vendor, activation, &one, desc, call->x, desc, call->dy, desc, call->x,
                                         &zero, desc, call->dx);
    api.cudnnDestroyActivationDescriptor(activation);
    return status;
}

#include "graph.c"
#include "matrix.c"
#include "plans.c"

PBN_CALL_THERE(cudnn_forward_training)
PBN_CALL_THERE(cudnn_forward_inference)
PBN_CALL_THERE(cudnn_backward)
PBN_CALL_THERE(cudnn_axpby)
PBN_CALL_THERE(cudnn_fill)
PBN_CALL_THERE(cudnn_relu)
PBN_CALL_THERE(cudnn_relu_backward)
PBN_THERE(cudnn_stream_set, (pbn_handle * handle, void *stream), (handle, stream))
PBN_THERE(cudnn_stream_get, (pbn_handle * handle, void **stream), (handle, stream))
PBN_THERE(cudnn_runtime_error, (pbn_handle * handle, int query, int *recorded), (handle, query, recorded))
PBN_THERE(cudnn_plan_create, (pbn_handle * handle, const pbn_call *call, const char *algorithm, pbn_plan **plan),
          (handle, call, algorithm, plan))
PBN_THERE(cudnn_plan_run, (pbn_handle * handle, pbn_plan *plan, const pbn_call *call), (handle, plan, call))

static int cudnn_plan_create_or_none(pbn_handle *handle, const pbn_call *call, const char *algorithm,
                                     pbn_plan **plan) {
    *plan = NULL;
    return algorithm == NULL ? PBN_OK : cudnn_plan_create_there(handle, call, algorithm, plan);
}

static void cudnn_plan_destroy_there(pbn_plan *plan) {
    int before;
    go_to(plan != NULL ? plan->context : NULL, &before); /* whether or not it is still there */
    cudnn_plan_destroy(plan);
    come_back(before);
}

const pbn_backend pbn_backend_cudnn = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_CUDA,
    .also_reached = {PBN_DEVICE_CUDA_MANAGED},
    .name = "cudnn",
    .label = "cuDNN",
    .search = {.sonames = "libcudnn.so.9 libcudnn.so.8 libcudnn_graph.so.9",
               .hint = "pip install nvidia-cudnn-cu13 (or -cu12, as the driver needs), or your distribution's cuDNN 9",
               .pathfinder = "cudnn",
               .distributions = "nvidia-cudnn-cu13 nvidia-cudnn-cu12 nvidia-cudnn-cu11",
               .roots = "CUDNN_PATH CUDA_PATH CUDA_HOME",
               .variables = "CUDNN_ NVIDIA_TF32_OVERRIDE CUDA_FORCE_ CUDA_DISABLE_ CUDA_MODULE_LOADING"},
    .load = cudnn_load,
    .status_name = cudnn_status_name,
    .status_class = cudnn_status_class,
    .last_error = cudnn_last_error,
    .context_lost = cudnn_context_lost,
    .handle_device = cudnn_handle_device,
    .device_count = cudnn_device_count,
    .memory_device = cudnn_memory_device,
    .handle_create = cudnn_handle_create,
    .handle_borrow = cudnn_handle_borrow,
    .handle_destroy = cudnn_handle_destroy,
    .handle_pointer = cudnn_handle_pointer,
    .stream_set = cudnn_stream_set_there,
    .stream_get = cudnn_stream_get_there,
    .tensor_create = cudnn_tensor_create,
    .tensor_borrow = cudnn_tensor_borrow,
    .tensor_set = cudnn_tensor_set,
    .tensor_get = cudnn_tensor_get,
    .tensor_size = cudnn_tensor_size,
    .tensor_destroy = cudnn_tensor_destroy,
    .derive = cudnn_derive,
    .capability = cudnn_capability,
    .workspace_size = cudnn_workspace_size,
    .forward_training = cudnn_forward_training_there,
    .forward_inference = cudnn_forward_inference_there,
    .backward = cudnn_backward_there,
    .axpby = cudnn_axpby_there,
    .fill = cudnn_fill_there,
    .relu = cudnn_relu_there,
    .relu_backward = cudnn_relu_backward_there,
    .algorithms = algorithm_names,
    .numbered = numbered_names,
    .plan_create = cudnn_plan_create_or_none, /* planning saves the entry points nothing */
    .plan_info = cudnn_plan_info,
    .plan_run = cudnn_plan_run_there,
    .plan_destroy = cudnn_plan_destroy_there,
    .runtime_error = cudnn_runtime_error_there,
    .plan_candidate = cudnn_plan_candidate,
    .has_symbol = cudnn_has_symbol,
};
