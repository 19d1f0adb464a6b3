/* The library, its statuses, and handles: each call runs where its handle was made. Part of adapter.c. */

/* ---------------------------------------------------------------- the library */

static int resolve(pbn_library *lib, symbols *table) {
    PBN_MIOPEN_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    return PBN_OK;
}

static int load(const char *file, int no_load, pbn_library *lib) {
    symbols found;
    size_t version[3] = {0, 0, 0};
    int status = pbn_dl_open(lib, file, no_load);
    if (status != PBN_OK)
        return status;
    status = resolve(lib, &found);
    if (status == PBN_OK) {
        int answer = found.miopenGetVersion(&version[0], &version[1], &version[2]);
        if (answer != PBN_miopenStatusSuccess) {
            snprintf(lib->message, sizeof lib->message, "miopenGetVersion returned %d", answer);
            status = PBN_E_VERSION;
        } else if (version[0] < 2) {
            snprintf(lib->message, sizeof lib->message, "MIOpen %zu.%zu.%zu; this backend speaks 2 and later", version[0],
                     version[1], version[2]);
            status = PBN_E_VERSION;
        }
    }
    if (status != PBN_OK) {
        pbn_dl_discard(lib);
        return status;
    }
    for (int i = 0; i < 3; i++)
        lib->version[i] = (int32_t)version[i];
    loaded = (int)(100 * version[0] + version[1]);
    api = found;
    return PBN_OK;
}

static int has_symbol(const char *name) {
    PBN_MIOPEN_SYMBOLS(PBN_DL_PRESENT, PBN_DL_PRESENT)
    return -1;
}

static int current_device(void) {
    int ordinal;
    return api.hipGetDevice != NULL && api.hipGetDevice(&ordinal) == 0 ? ordinal : -1;
}

static int device_count(void) {
    int count;
    return api.hipGetDeviceCount != NULL && api.hipGetDeviceCount(&count) == 0 ? count : 0;
}

/* Pinned memory has an address on the host, too. What HIP does not know is an error, which the thread keeps: nobody who
 * asks for his own last error is to find it. */
static int memory_device(const void *address) {
    struct pbn_hip_pointer found = {0};
    if (api.hipPointerGetAttributes == NULL)
        return -1;
    if (api.hipPointerGetAttributes(&found, address) != 0) {
        if (api.hipGetLastError != NULL)
            api.hipGetLastError();
        return -1;
    }
    return found.managed || found.host_pointer != NULL ? -1 : found.device;
}

static int card(int device, char *text, size_t size) {
    struct pbn_hip_properties found = {.wave_size = 0};
    if (api.hipGetDevicePropertiesR0600 == NULL || api.hipGetDevicePropertiesR0600(&found, device) != 0 ||
        strncmp(found.architecture, "gfx", 3) != 0)
        return 0;
    snprintf(text, size, "%.*s, wave size %d", (int)strcspn(found.architecture, ":"), found.architecture,
             found.wave_size);
    return 1;
}

static int no_device(void) {
    int ordinal;
    return api.hipGetDevice != NULL && api.hipGetDevice(&ordinal) != 0;
}

/* ---------------------------------------------------------------- statuses */

/* miopenCreate answers a missing device with UnknownError, which says nothing; HIP does say it. */
static _Thread_local int created_without_device;

static const char *status_name(int status) {
    const char *name = api.miopenGetErrorString(status);
    return name != NULL ? name : "unknown miopenStatus_t";
}

/* MIOpen writes its explanation to stderr and keeps no text, so `text` is only what the number means. */
typedef struct meaning {
    int class;
    const char *text;
} meaning;

static meaning meaning_of(int status) {
    static const meaning statuses[] = {
        [PBN_miopenStatusSuccess] = {PBN_CLASS_SUCCESS, ""},
        [PBN_miopenStatusNotInitialized] = {PBN_CLASS_NOT_INITIALIZED, "an object was not initialized"},
        [PBN_miopenStatusInvalidValue] = {PBN_CLASS_BAD_PARAMETER, "a value is invalid"},
        [PBN_miopenStatusBadParm] = {PBN_CLASS_BAD_PARAMETER, "MIOpen rejected a parameter"},
        [PBN_miopenStatusAllocFailed] = {PBN_CLASS_ALLOCATION, "an allocation failed"},
        [PBN_miopenStatusInternalError] = {PBN_CLASS_INTERNAL, "MIOpen failed, for example while building a kernel"},
        [PBN_miopenStatusNotImplemented] = {PBN_CLASS_NOT_SUPPORTED, "no solver of this MIOpen build takes the problem"},
        [PBN_miopenStatusUnknownError] = {PBN_CLASS_INTERNAL, "an error without a number of its own"},
        [PBN_miopenStatusUnsupportedOp] = {PBN_CLASS_NOT_SUPPORTED, "the operation is not supported"},
        /* no error to MIOpen, but nothing was computed */
        [PBN_miopenStatusGpuOperationsSkipped] = {PBN_CLASS_EXECUTION,
                                                  "the GPU operations were skipped; no result was computed"},
        [PBN_miopenStatusVersionMismatch] = {PBN_CLASS_VERSION, "binary data of another MIOpen version"},
    };
    if (status == PBN_miopenStatusUnknownError && created_without_device)
        return (meaning){PBN_CLASS_NOT_INITIALIZED, "HIP has no device"};
    if (status < 0 || status >= (int)(sizeof statuses / sizeof statuses[0]))
        return (meaning){PBN_CLASS_INTERNAL, ""};
    return statuses[status];
}

static int status_class(int status) {
    return meaning_of(status).class;
}

static void last_error(int status, char *text, size_t size) {
    pbn_copy_text(text, size, status < 0 ? pbn_reason : meaning_of(status).text);
}

/* ---------------------------------------------------------------- handles */

struct pbn_handle {
    void *vendor;
    int owned;
    int device; /* -1 if it is not known */
};

static int enter(const pbn_handle *handle, int *before) {
    const int current = handle->device >= 0 && api.hipSetDevice != NULL ? current_device() : -1;
    *before = -1;
    if (current < 0 || current == handle->device)
        return PBN_OK;
    if (api.hipSetDevice(handle->device) != 0)
        return pbn_refuse(PBN_E_DEVICE, pbn_no_place);
    *before = current;
    return PBN_OK;
}

static void leave(const pbn_handle *handle, int before, int status) {
    (void)handle;
    (void)status;
    if (before >= 0)
        api.hipSetDevice(before);
}

static int handle_device(const pbn_handle *handle) {
    return handle->device;
}

static int make_handle(void *vendor, int owned, pbn_handle **handle) {
    if (pbn_new_handle(sizeof **handle, handle) != PBN_OK)
        return PBN_E_MEMORY;
    (*handle)->vendor = vendor;
    (*handle)->owned = owned;
    (*handle)->device = current_device();
    return PBN_OK;
}

static int handle_create(pbn_handle **handle) {
    void *vendor = NULL;
    int status = api.miopenCreate(&vendor);
    created_without_device = status == PBN_miopenStatusUnknownError && no_device();
    if (status != PBN_miopenStatusSuccess)
        return status;
    status = make_handle(vendor, 1, handle);
    if (status != PBN_OK)
        api.miopenDestroy(vendor);
    return status;
}

static int handle_borrow(void *vendor, pbn_handle **handle) {
    return make_handle(vendor, 0, handle);
}

static int handle_destroy(pbn_handle *handle) {
    int status = PBN_OK;
    if (handle->owned) {
        int before;
        enter(handle, &before); /* whether or not its context is still there */
        status = api.miopenDestroy(handle->vendor);
        leave(handle, before, status);
    }
    free(handle);
    return status;
}

static void *handle_pointer(const pbn_handle *handle) {
    return handle->vendor;
}

static int stream_set(pbn_handle *handle, void *stream) {
    return api.miopenSetStream(handle->vendor, stream);
}

static int stream_get(pbn_handle *handle, void **stream) {
    return api.miopenGetStream(handle->vendor, stream);
}

static int takes_by_time(const pbn_handle *handle) {
    int policy = PBN_miopenTuningPolicyNone;
    return api.miopenGetTuningPolicy != NULL &&
           api.miopenGetTuningPolicy(handle->vendor, &policy) == PBN_miopenStatusSuccess &&
           policy != PBN_miopenTuningPolicyNone && policy != PBN_miopenTuningPolicyDbClean;
}

/* E[x^2] - mean^2 is off by 2^-24 of mean^2: by a sixteenth of the variance where that is 2^20 times smaller. */
static int far_from_zero(const pbn_handle *handle, const pbn_call *call) {
    enum { to_host = 2 };
    void *stream = NULL;
    int capturing = 0, far = 0;
    size_t count = 1;
    for (int i = 0; i < call->param_desc->rank; i++)
        count *= (size_t)call->param_desc->dims[i];
    if (api.hipStreamIsCapturing == NULL || api.hipMemcpyAsync == NULL || api.hipStreamSynchronize == NULL ||
        call->param_desc->dtype != PBN_FLOAT32 || api.miopenGetStream(handle->vendor, &stream) != 0 ||
        api.hipStreamIsCapturing(stream, &capturing) != 0 || capturing)
        return 0;
    float *mean = calloc(count, 2 * sizeof *mean);
    if (mean != NULL && api.hipMemcpyAsync(mean, call->saved_mean, count * sizeof *mean, to_host, stream) == 0 &&
        api.hipMemcpyAsync(mean + count, call->saved_inv_variance, count * sizeof *mean, to_host, stream) == 0 &&
        api.hipStreamSynchronize(stream) == 0)
        for (size_t i = 0; i < count; i++)
            far |= fabsf(mean[i] * mean[count + i]) >= 0x1p10f;
    free(mean);
    return far;
}
