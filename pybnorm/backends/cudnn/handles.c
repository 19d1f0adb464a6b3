/* Devices, handles and streams: each call runs where its handle was made. Part of adapter.c. */

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
    return go_to(handle->context, before);
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
    const int class = cudnn_status_class(status);
    text[0] = '\0';
    if (class != PBN_CLASS_EXECUTION && class != PBN_CLASS_INTERNAL && class != PBN_CLASS_ALLOCATION &&
        class != PBN_CLASS_NOT_INITIALIZED)
        return 0;
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
    return handle->device;
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
    return make_handle(vendor, 0, handle);
}

static int cudnn_handle_destroy(pbn_handle *handle) {
    int before, status = PBN_OK;
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
    return handle->vendor;
}

static int cudnn_stream_set(pbn_handle *handle, void *stream) {
    forget_vendor_text();
    return api.cudnnSetStream(handle->vendor, stream);
}

static int cudnn_stream_get(pbn_handle *handle, void **stream) {
    forget_vendor_text();
    return api.cudnnGetStream(handle->vendor, stream);
}

/* What kernels of the handle's calls have recorded on the device: of batch norm those of the persistent mode record an
 * overflow of their fixed-point sums. cuDNN holds one such record per handle and clears it with the query. */
static int cudnn_runtime_error(pbn_handle *handle, int query, int *recorded) {
    static const int modes[] = {[PBN_QUERY_RAW] = PBN_CUDNN_ERRQUERY_RAWCODE,
                                [PBN_QUERY_NONBLOCKING] = PBN_CUDNN_ERRQUERY_NONBLOCKING,
                                [PBN_QUERY_BLOCKING] = PBN_CUDNN_ERRQUERY_BLOCKING};
    *recorded = PBN_CUDNN_STATUS_SUCCESS;
    if (api.cudnnQueryRuntimeError == NULL)
        return pbn_refuse(PBN_E_UNSUPPORTED, "this cuDNN library lacks the symbol cudnnQueryRuntimeError");
    forget_vendor_text();
    return api.cudnnQueryRuntimeError(handle->vendor, recorded, modes[query], NULL);
}
