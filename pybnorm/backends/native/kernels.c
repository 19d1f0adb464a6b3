/* Handles of a GPU, and their kernels: compiled once, kept in a file, loaded. Part of gpu.c. */

#include <sys/stat.h>

/* The kernels' source, of this very build; compiled at run time for the device at hand. cuda.c has it in it. */
extern const char pbn_native_kernels[] __attribute__((visibility("hidden")));

static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
static kernel *kernels; /* of all contexts; only ever longer */

/* ------------------------------------------------------------------ loading, and what statuses mean */

static int gpu_load(const char *file, int no_load, pbn_library *out) {
    int status = pbn_dl_open(out, file, no_load);
    if (status == PBN_OK && (status = resolve_library(out)) != PBN_OK)
        pbn_dl_discard(out);
    return status == PBN_OK ? status : pbn_refuse(status, RTC_UNUSABLE);
}

static int gpu_has_symbol(const char *name) {
    if (name == NULL)
        return -1;
#define api rtc
#ifdef LIBRARY_SYMBOLS
    LIBRARY_SYMBOLS(PBN_DL_PRESENT, PBN_DL_PRESENT)
#endif
    COMPILER_SYMBOLS(PBN_DL_PRESENT, PBN_DL_PRESENT)
#undef api
    return -1;
}

static const char *gpu_status_name(int status) {
    if (status >= RTC_STATUS)
        return RTC(GetErrorString) != NULL ? RTC(GetErrorString)(status - RTC_STATUS) : "an error of the compiler";
    const char *name = status < 0 ? NULL : driver_name(status);
    return name != NULL ? name : "not a status of the driver";
}

static int gpu_status_class(int status) {
    switch (status) {
    case PBN_OK:
        return PBN_CLASS_SUCCESS;
    case GPU_NOT_INITIALIZED:
    case GPU_STUB_LIBRARY:
    case GPU_NO_DEVICE:
    case GPU_INVALID_DEVICE:
        return PBN_CLASS_NOT_INITIALIZED;
    case GPU_OUT_OF_MEMORY:
        return PBN_CLASS_ALLOCATION;
    case GPU_INVALID_VALUE:
        return PBN_CLASS_BAD_PARAMETER;
    default:
        return status < 0 || status >= RTC_STATUS ? PBN_CLASS_INTERNAL : PBN_CLASS_EXECUTION;
    }
}

static void gpu_last_error(int status, char *text, size_t size) {
    pbn_copy_text(text, size, status < 0 ? pbn_reason
                              : detail[0] != '\0' ? detail
                              : status > 0 && status < RTC_STATUS ? driver_text(status) : NULL);
}

/* ------------------------------------------------------------------ handles */

static int enter(const pbn_handle *handle, int *before) {
    detail[0] = '\0';
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "the handle is missing");
    return push_context(handle->context, before) == 0 ? PBN_OK : pbn_refuse(PBN_E_DEVICE, pbn_no_place);
}

static void leave(const pbn_handle *handle, int before, int status) {
    (void)handle, (void)status;
    pop_context(before);
}

/* Of the current context; without one, of the primary context of device 0, which then is current. */
static int gpu_handle_create(pbn_handle **handle) {
    void *context = NULL;
    gpu found = {0};
    int status = find_driver();
    if (status == 0 && (status = current_context(&context)) == 0)
        status = ask_device(&found, context);
    if (status != 0)
        return status;
    status = pbn_new_handle(sizeof **handle, handle);
    if (status == PBN_OK) {
        (*handle)->context = context;
        (*handle)->device = found;
        (*handle)->pointer = *handle;
    }
    return status;
}

static int gpu_handle_borrow(void *pointer, pbn_handle **handle) {
    const int status = gpu_handle_create(handle);
    if (status == PBN_OK)
        (*handle)->pointer = pointer;
    return status;
}

static int gpu_handle_destroy(pbn_handle *handle) {
    free(handle);
    return PBN_OK;
}

static void *gpu_handle_pointer(const pbn_handle *handle) { return handle->pointer; }
static int gpu_handle_device(const pbn_handle *handle) { return handle != NULL ? handle->device.number : -1; }

static int gpu_stream_set(pbn_handle *handle, void *stream) {
    handle->stream = stream;
    return PBN_OK;
}

static int gpu_stream_get(pbn_handle *handle, void **stream) {
    *stream = handle->stream;
    return PBN_OK;
}

/* ------------------------------------------------------------------ compiling, and the files of what was compiled */

static void make_options(options *o, const instance *of, const gpu *g) {
    memset(o, 0, sizeof *o);
    add_target(o, g);
    add_option(o, "%s%d", "--std=c++", 17);
    add_option(o, "%s", "-w", 0);
    add_option(o, "-DKERNEL_%s=%d", kernel_names[of->name], 1);
    add_option(o, "%s=%d", "-DDTYPE", of->dtype);
    add_option(o, "%s=%d", "-DPARAM", of->param);
    add_option(o, "%s=%d", "-DBACKWARD", of->backward);
    add_option(o, "%s=%d", "-DFUSED", of->fused);
    add_option(o, "%s=%d", "-DFORM", of->form);
    add_option(o, "%s=%d", "-DVECTOR", of->vector);
}

static int compile(const options *o, char **image, size_t *size) {
    void *program = NULL;
    size_t length = 0;
    int status = RTC(CreateProgram)(&program, pbn_native_kernels, "kernels.cuh", 0, NULL, NULL);
    *image = NULL;
    if (status == 0)
        status = RTC(CompileProgram)(program, o->count, o->list);
    if (status != 0 && program != NULL && RTC(GetProgramLogSize)(program, &length) == 0 && length > 0) {
        char *log = malloc(length);
        if (log != NULL && RTC(GetProgramLog)(program, log) == 0)
            snprintf(detail, sizeof detail, "%.900s", log);
        free(log);
    }
    if (status == 0)
        status = take_image(program, o->binary, image, size);
    if (program != NULL)
        RTC(DestroyProgram)(&program);
    if (status != 0) {
        free(*image);
        *image = NULL;
        return RTC_STATUS + status;
    }
    return PBN_OK;
}

/* At the head of a file of ours. `digest` is of the sources, the options and the compiler's version. */
typedef struct kept_header {
    char magic[8];
    uint64_t digest, size, sum;
} kept_header;
static const char kept_magic[8] = "PBNKERN";

static uint64_t digest_of(uint64_t digest, const char *bytes, size_t size) { /* FNV-1a */
    for (size_t i = 0; i < size; i++)
        digest = (digest ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return digest;
}

static uint64_t digest_of_options(const options *o) {
    uint64_t digest = digest_of(0xcbf29ce484222325u, (const char *)rtc.version, sizeof rtc.version);
    digest = digest_of(digest, pbn_native_kernels, strlen(pbn_native_kernels));
    for (int i = 0; i < o->count; i++)
        digest = digest_of(digest, o->list[i], strlen(o->list[i]) + 1);
    return digest;
}

/* The user's cache folder, made where it is not there; 0 where there is none. */
static int kept_folder(char *path, size_t size) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length;
    if (cache != NULL && cache[0] == '/')
        length = snprintf(path, size, "%s", cache);
    else if (home != NULL && home[0] == '/')
        length = snprintf(path, size, "%s/.cache", home);
    else
        return 0;
    if (length < 0 || (size_t)length + 64 > size)
        return 0;
    mkdir(path, 0700);
    strcat(path, "/pybnorm");
    mkdir(path, 0700);
    return 1;
}

/* A file that is whole, this user's and nobody else's to write. */
static char *read_kept(const char *path, uint64_t digest, size_t *size) {
    kept_header head;
    struct stat about;
    char *image = NULL;
    FILE *file = fopen(path, "rbe");
    if (file == NULL)
        return NULL;
    if (fstat(fileno(file), &about) == 0 && about.st_uid == geteuid() && (about.st_mode & 022) == 0 &&
        fread(&head, sizeof head, 1, file) == 1 && memcmp(head.magic, kept_magic, sizeof kept_magic) == 0 &&
        head.digest == digest && head.size == (uint64_t)about.st_size - sizeof head && (image = malloc(head.size)) != NULL &&
        (fread(image, 1, head.size, file) != head.size || digest_of(0, image, head.size) != head.sum)) {
        free(image);
        image = NULL;
    }
    fclose(file);
    *size = image != NULL ? head.size : 0;
    return image;
}

/* Beside its place and then moved there, whole or not at all; a file that is not ours is left as it is. */
static void write_kept(const char *path, uint64_t digest, const char *image, size_t size) {
    kept_header head = {{0}, digest, size, digest_of(0, image, size)};
    char beside[PBN_PATH_MAX + 32], magic[sizeof kept_magic];
    FILE *file = fopen(path, "rbe");
    memcpy(head.magic, kept_magic, sizeof kept_magic);
    if (file != NULL) {
        const int ours = fread(magic, sizeof magic, 1, file) == 1 && memcmp(magic, kept_magic, sizeof magic) == 0;
        fclose(file);
        if (!ours)
            return;
    }
    snprintf(beside, sizeof beside, "%s.%ld.%p", path, (long)getpid(), (const void *)&head);
    const int opened = open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (opened < 0 || (file = fdopen(opened, "wb")) == NULL) {
        if (opened >= 0)
            close(opened);
        return;
    }
    const int written = fwrite(&head, sizeof head, 1, file) == 1 && fwrite(image, 1, size, file) == size;
    if (fclose(file) != 0 || !written || rename(beside, path) != 0)
        remove(beside);
}

static int make_image(const instance *of, const gpu *g, char **image, size_t *size) {
    char path[PBN_PATH_MAX];
    options o;
    make_options(&o, of, g);
    const uint64_t digest = digest_of_options(&o);
    const int keeps = kept_folder(path, sizeof path);
    if (keeps) {
        const size_t length = strlen(path);
        snprintf(path + length, sizeof path - length, "/kernel-%016llx", (unsigned long long)digest);
        if ((*image = read_kept(path, digest, size)) != NULL)
            return PBN_OK;
    }
    const int status = compile(&o, image, size);
    if (status == PBN_OK && keeps)
        write_kept(path, digest, *image, *size);
    return status;
}

/* ------------------------------------------------------------------ kernels of a context */

static int load_kernel(const pbn_handle *handle, const instance *of, kernel *fresh) {
    const gpu *g = &handle->device;
    char *image = NULL;
    size_t size = 0;
    void *module = NULL;
    int mode = GPU_CAPTURE_RELAXED, fixed = 0, status = make_image(of, g, &image, &size);
    if (status != PBN_OK)
        return status;
    /* Loading allocates, which a stream that is captured elsewhere would otherwise forbid. */
    if (DRIVER(ThreadExchangeStreamCaptureMode) != NULL)
        DRIVER(ThreadExchangeStreamCaptureMode)(&mode);
    status = DRIVER(ModuleLoadData)(&module, image);
    if (status == 0)
        status = DRIVER(ModuleGetFunction)(&fresh->function, module, kernel_names[of->name]);
    if (status == 0)
        status = DRIVER(FuncGetAttribute)(&fixed, GPU_FUNCTION_STATIC_SHARED, fresh->function);
    fresh->shared_limit = g->shared_optin - fixed;
    fresh->cluster_limit = 1;
    if (of->name == KERNEL_COLUMN_SUMS && fresh->shared_limit > 65536)
        fresh->shared_limit = 65536;
    if (status == 0 && (of->name == KERNEL_ROWS || of->name == KERNEL_TILES || of->name == KERNEL_COLUMN_SUMS))
        status = allow_shared(g, fresh, of->name != KERNEL_COLUMN_SUMS);
    if (DRIVER(ThreadExchangeStreamCaptureMode) != NULL)
        DRIVER(ThreadExchangeStreamCaptureMode)(&mode);
    free(image);
    return status;
}

static int find_kernel(pbn_handle *handle, instance of, kernel **found) {
    const unsigned key = (unsigned)of.name | (unsigned)of.dtype << 4 | (unsigned)of.param << 6 | (unsigned)of.backward << 8 |
                         (unsigned)of.fused << 10 | (unsigned)of.form << 11 | (unsigned)of.vector << 13;
    kernel **cached = &handle->found[(key * 0x9e3779b1u) >> 26];
    int status = PBN_OK;
    if (*cached != NULL && (*cached)->key == key) {
        *found = *cached;
        return PBN_OK;
    }
    pthread_mutex_lock(&kernels_lock);
    kernel *k = kernels;
    while (k != NULL && (k->key != key || k->context != handle->context || k->context_id != handle->device.context_id))
        k = k->next;
    if (k == NULL) {
        k = calloc(1, sizeof *k);
        status = k == NULL ? pbn_refuse(PBN_E_MEMORY, "no host memory for a kernel") : load_kernel(handle, &of, k);
        if (status == PBN_OK) {
            k->key = key;
            k->context = handle->context;
            k->context_id = handle->device.context_id;
            k->next = kernels;
            kernels = k;
        } else {
            free(k);
            k = NULL;
        }
    }
    pthread_mutex_unlock(&kernels_lock);
    *cached = *found = k;
    return status;
}
