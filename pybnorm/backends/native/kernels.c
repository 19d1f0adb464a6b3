/* Devices and handles of native_cuda, and its kernels: compiled once, kept in a file, launched. Part of gpu.c. */

#include <sys/stat.h>

/* The kernels' source, of this very build; compiled at run time for the device at hand. */
#define EMBEDDED(name, file)                                                                            \
    __asm__(".pushsection .rodata\n" #name ": .incbin \"" file "\"\n.byte 0\n.popsection\n");          \
    extern const char name[] __attribute__((visibility("hidden")));
EMBEDDED(pbn_native_arguments, "pybnorm/backends/native/arguments.h")
EMBEDDED(pbn_native_kernels, "pybnorm/backends/native/kernels.cuh")

static struct {
    int found;
    DRIVER_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} driver; /* written once, by find_driver */

static struct {
    int major, minor;
    NVRTC_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} nvrtc;

static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;
static kernel *kernels; /* of all contexts; only ever longer */
static _Thread_local char detail[PBN_TEXT_MAX]; /* what belongs to the last positive status of this thread */

/* ------------------------------------------------------------------ loading, and what statuses mean */

static int resolve_driver(pbn_library *lib) {
    __typeof__(driver) fresh = {0}, *const table = &fresh;
    DRIVER_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    fresh.found = 1;
    driver = fresh;
    return PBN_OK;
}

static int find_driver(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pbn_library library;
    int status = PBN_OK;
    detail[0] = '\0';
    pthread_mutex_lock(&lock);
    if (!driver.found && (pbn_dl_open(&library, "libcuda.so.1", 0) != PBN_OK || resolve_driver(&library) != PBN_OK)) {
        snprintf(detail, sizeof detail, "the CUDA driver cannot be used: %.900s", library.message);
        status = CU_STUB_LIBRARY;
    }
    if (status == PBN_OK && (status = driver.cuInit(0)) != 0)
        snprintf(detail, sizeof detail, "cuInit finds no device that it can use");
    pthread_mutex_unlock(&lock);
    return status;
}

static int resolve_nvrtc(pbn_library *lib) {
    __typeof__(nvrtc) fresh = {0}, *const table = &fresh;
    NVRTC_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    if (fresh.nvrtcVersion(&fresh.major, &fresh.minor) != 0)
        return PBN_E_VERSION;
    lib->version[0] = fresh.major;
    lib->version[1] = fresh.minor;
    nvrtc = fresh;
    return PBN_OK;
}

static int gpu_load(const char *file, int no_load, pbn_library *out) {
    int status = pbn_dl_open(out, file, no_load);
    if (status == PBN_OK && (status = resolve_nvrtc(out)) != PBN_OK)
        pbn_dl_discard(out);
    return status == PBN_OK ? status : pbn_refuse(status, "the library NVRTC cannot be used");
}

static int gpu_has_symbol(const char *name) {
    if (name == NULL)
        return -1;
#define api nvrtc
    NVRTC_SYMBOLS(PBN_DL_PRESENT, PBN_DL_PRESENT)
#undef api
    return -1;
}

static const char *gpu_status_name(int status) {
    const char *name = NULL;
    if (status >= NVRTC_STATUS)
        return nvrtc.nvrtcGetErrorString != NULL ? nvrtc.nvrtcGetErrorString(status - NVRTC_STATUS) : "an error of NVRTC";
    if (status == CU_STUB_LIBRARY && !driver.found)
        return "CUDA_ERROR_STUB_LIBRARY";
    if (status < 0 || !driver.found || driver.cuGetErrorName(status, &name) != 0 || name == NULL)
        return "not a status of CUDA";
    return name;
}

static int gpu_status_class(int status) {
    switch (status) {
    case PBN_OK:
        return PBN_CLASS_SUCCESS;
    case CU_NOT_INITIALIZED:
    case CU_STUB_LIBRARY:
    case CU_NO_DEVICE:
    case CU_INVALID_DEVICE:
        return PBN_CLASS_NOT_INITIALIZED;
    case CU_OUT_OF_MEMORY:
        return PBN_CLASS_ALLOCATION;
    case CU_INVALID_VALUE:
        return PBN_CLASS_BAD_PARAMETER;
    default:
        return status < 0 || status >= NVRTC_STATUS ? PBN_CLASS_INTERNAL : PBN_CLASS_EXECUTION;
    }
}

static void gpu_last_error(int status, char *text, size_t size) {
    const char *of_driver = NULL;
    if (status < 0)
        pbn_copy_text(text, size, pbn_reason);
    else if (detail[0] != '\0')
        pbn_copy_text(text, size, detail);
    else if (status > 0 && status < NVRTC_STATUS && driver.found && driver.cuGetErrorString(status, &of_driver) == 0)
        pbn_copy_text(text, size, of_driver);
    else
        pbn_copy_text(text, size, NULL);
}

/* Errors that a kernel leaves in its context for good. */
static int gpu_context_lost(int status, char *text, size_t size) {
    const char *name = NULL;
    if (text == NULL || size == 0 || status <= 0 || status >= NVRTC_STATUS || !driver.found)
        return 0;
    if (status != 700 && status != 714 && status != 715 && status != 716 && status != 717 && status != 718 && status != 719 &&
        status != 702 && status != 214)
        return 0;
    driver.cuGetErrorName(status, &name);
    snprintf(text, size,
             "the CUDA context is lost (%s, %d): a kernel of this call or of an earlier one, of whatever library, failed "
             "for good, and nothing more can run on this device in this process",
             name != NULL ? name : "an error of the driver", status);
    return 1;
}

/* ------------------------------------------------------------------ handles */

static int enter(const pbn_handle *handle, int *before) {
    void *current = NULL;
    *before = 0;
    detail[0] = '\0';
    if (handle == NULL)
        return pbn_refuse(PBN_E_ARGUMENT, "the handle is missing");
    if (driver.cuCtxGetCurrent(&current) == 0 && current == handle->context)
        return PBN_OK;
    if (driver.cuCtxPushCurrent_v2(handle->context) != 0)
        return pbn_refuse(PBN_E_DEVICE, pbn_no_place);
    *before = 1;
    return PBN_OK;
}

static void leave(const pbn_handle *handle, int before, int status) {
    void *context;
    (void)handle, (void)status;
    if (before)
        driver.cuCtxPopCurrent_v2(&context);
}

static int ask_device(gpu *g, void *context) {
    int values[5] = {0}, version = 0, status = driver.cuCtxGetDevice(&g->number);
    static const int asked[] = {CU_ATTRIBUTE_MULTIPROCESSORS, CU_ATTRIBUTE_MAJOR, CU_ATTRIBUTE_MINOR,
                                CU_ATTRIBUTE_SHARED_OPTIN, CU_ATTRIBUTE_SHARED_MULTIPROCESSOR};
    for (int i = 0; i < 5 && status == 0; i++)
        status = driver.cuDeviceGetAttribute(&values[i], asked[i], g->number);
    if (status != 0)
        return status;
    g->multiprocessors = values[0];
    g->architecture = 10 * values[1] + values[2];
    g->shared_optin = values[3];
    g->shared_multiprocessor = values[4];
    if (driver.cuCtxGetId == NULL || driver.cuCtxGetId(context, &g->context_id) != 0)
        g->context_id = 0;
    driver.cuDriverGetVersion(&version);
    g->follows = g->architecture >= 90 && driver.cuLaunchKernelEx != NULL && version >= 12040; /* captured since then */
    return PBN_OK;
}

/* Of the current context; without one, of the primary context of device 0, which then is current. */
static int gpu_handle_create(pbn_handle **handle) {
    void *context = NULL;
    gpu found = {0};
    int status = find_driver();
    if (status == 0 && (status = driver.cuCtxGetCurrent(&context)) == 0 && context == NULL &&
        (status = driver.cuDevicePrimaryCtxRetain(&context, 0)) == 0)
        status = driver.cuCtxSetCurrent(context);
    if (status == 0)
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

static int gpu_device_count(void) {
    int count = 0;
    return find_driver() == 0 && driver.cuDeviceGetCount(&count) == 0 ? count : 0;
}

/* Managed and pinned memory is every device's. The driver answers for what it does not know, too: with zeros. */
static int gpu_memory_device(const void *address) {
    int attributes[] = {2, 8, 9}; /* memory type, is managed, device ordinal */
    unsigned type = 0, managed = 0;
    int ordinal = -1;
    void *values[] = {&type, &managed, &ordinal};
    if (!driver.found || driver.cuPointerGetAttributes(3, attributes, values, (uintptr_t)address) != 0 ||
        type != CU_MEMORYTYPE_DEVICE || managed)
        return -1;
    return ordinal;
}

static int gpu_stream_set(pbn_handle *handle, void *stream) {
    handle->stream = stream;
    return PBN_OK;
}

static int gpu_stream_get(pbn_handle *handle, void **stream) {
    *stream = handle->stream;
    return PBN_OK;
}

/* ------------------------------------------------------------------ compiling, and the files of what was compiled */

enum { OPTIONS = 12, OPTION_SIZE = 48 };

typedef struct options {
    char text[OPTIONS][OPTION_SIZE];
    const char *list[OPTIONS];
    int count, binary;
} options;

static void add_option(options *o, const char *format, const char *name, int value) {
    snprintf(o->text[o->count], OPTION_SIZE, format, name, value);
    o->list[o->count] = o->text[o->count];
    o->count++;
}

/* For the device's own architecture where NVRTC knows it; else as text for the newest one before it. */
static int architecture_of(int wanted, int *binary) {
    int archs[64], count = 0, best = 0;
    if (nvrtc.nvrtcGetNumSupportedArchs(&count) != 0 || count > 64 || nvrtc.nvrtcGetSupportedArchs(archs) != 0)
        count = 0;
    for (int i = 0; i < count; i++)
        if (archs[i] <= wanted && archs[i] > best)
            best = archs[i];
    *binary = best == wanted;
    return best != 0 ? best : wanted;
}

static void make_options(options *o, const instance *of, int architecture) {
    char define[OPTION_SIZE];
    memset(o, 0, sizeof *o);
    const int best = architecture_of(architecture, &o->binary);
    add_option(o, "--gpu-architecture=%s_%d", o->binary ? "sm" : "compute", best);
    add_option(o, "%s%d", "--std=c++", 17);
    add_option(o, "%s", "-w", 0);
    snprintf(define, sizeof define, "-DKERNEL_%s", kernel_names[of->name]);
    add_option(o, "%s=%d", define, 1);
    add_option(o, "%s=%d", "-DDTYPE", of->dtype);
    add_option(o, "%s=%d", "-DPARAM", of->param);
    add_option(o, "%s=%d", "-DBACKWARD", of->backward);
    add_option(o, "%s=%d", "-DFUSED", of->fused);
    add_option(o, "%s=%d", "-DFORM", of->form);
    add_option(o, "%s=%d", "-DVECTOR", of->vector);
}

static int compile(const options *o, char **image, size_t *size) {
    const char *const headers[] = {pbn_native_arguments}, *const names[] = {"arguments.h"};
    void *program = NULL;
    size_t length = 0;
    int status = nvrtc.nvrtcCreateProgram(&program, pbn_native_kernels, "kernels.cuh", 1, headers, names);
    *image = NULL;
    if (status == 0)
        status = nvrtc.nvrtcCompileProgram(program, o->count, o->list);
    if (status != 0 && program != NULL && nvrtc.nvrtcGetProgramLogSize(program, &length) == 0 && length > 0) {
        char *log = malloc(length);
        if (log != NULL && nvrtc.nvrtcGetProgramLog(program, log) == 0)
            snprintf(detail, sizeof detail, "%.900s", log);
        free(log);
    }
    if (status == 0)
        status = o->binary ? nvrtc.nvrtcGetCUBINSize(program, size) : nvrtc.nvrtcGetPTXSize(program, size);
    if (status == 0 && (*image = malloc(*size)) == NULL)
        status = 1; /* NVRTC_ERROR_OUT_OF_MEMORY */
    if (status == 0)
        status = o->binary ? nvrtc.nvrtcGetCUBIN(program, *image) : nvrtc.nvrtcGetPTX(program, *image);
    if (program != NULL)
        nvrtc.nvrtcDestroyProgram(&program);
    if (status != 0) {
        free(*image);
        *image = NULL;
        return NVRTC_STATUS + status;
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
    const int version[] = {nvrtc.major, nvrtc.minor};
    uint64_t digest = digest_of(0xcbf29ce484222325u, (const char *)version, sizeof version);
    digest = digest_of(digest, pbn_native_arguments, strlen(pbn_native_arguments));
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

static int make_image(const instance *of, int architecture, char **image, size_t *size) {
    char path[PBN_PATH_MAX];
    options o;
    make_options(&o, of, architecture);
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

/* Blocks that one cluster may have, each with all the shared memory of a multiprocessor: small parts of a GPU have fewer. */
static int64_t clusters_of(const gpu *g, void *function, int64_t shared) {
    if (g->architecture < 90 || driver.cuLaunchKernelEx == NULL || driver.cuOccupancyMaxActiveClusters == NULL)
        return 1;
    driver.cuFuncSetAttribute(function, CU_FUNCTION_ANY_CLUSTER, 1);
    for (unsigned blocks = 16; blocks > 1; blocks /= 2) {
        launch_attribute attribute = {CU_LAUNCH_CLUSTER, 0, {{blocks, 1, 1}}};
        const launch_config config = {{blocks, 1, 1}, {256, 1, 1}, (unsigned)shared, NULL, &attribute, 1};
        int count = 0;
        if (driver.cuOccupancyMaxActiveClusters(&count, function, &config) == 0 && count > 0)
            return blocks;
    }
    return 1;
}

static int load_kernel(const pbn_handle *handle, const instance *of, kernel *fresh) {
    char *image = NULL;
    size_t size = 0;
    void *module = NULL;
    int mode = CU_CAPTURE_RELAXED, fixed = 0, status = make_image(of, handle->device.architecture, &image, &size);
    if (status != PBN_OK)
        return status;
    /* Loading allocates, which a stream that is captured elsewhere would otherwise forbid. */
    if (driver.cuThreadExchangeStreamCaptureMode != NULL)
        driver.cuThreadExchangeStreamCaptureMode(&mode);
    status = driver.cuModuleLoadData(&module, image);
    if (status == 0)
        status = driver.cuModuleGetFunction(&fresh->function, module, kernel_names[of->name]);
    if (status == 0)
        status = driver.cuFuncGetAttribute(&fixed, CU_FUNCTION_STATIC_SHARED, fresh->function);
    fresh->shared_limit = handle->device.shared_optin - fixed;
    fresh->cluster_limit = 1;
    if (status == 0 && (of->name == KERNEL_ROWS || of->name == KERNEL_TILES)) {
        status = driver.cuFuncSetAttribute(fresh->function, CU_FUNCTION_DYNAMIC_SHARED, (int)fresh->shared_limit);
        fresh->cluster_limit = clusters_of(&handle->device, fresh->function, fresh->shared_limit);
    } else if (status == 0 && of->name == KERNEL_COLUMN_SUMS)
        status = driver.cuFuncSetAttribute(fresh->function, CU_FUNCTION_DYNAMIC_SHARED, (int)(fresh->shared_limit < 65536 ? fresh->shared_limit : 65536));
    if (driver.cuThreadExchangeStreamCaptureMode != NULL)
        driver.cuThreadExchangeStreamCaptureMode(&mode);
    free(image);
    return status;
}

static int find_kernel(pbn_handle *handle, instance of, kernel **found) {
    const unsigned key = (unsigned)of.name | (unsigned)of.dtype << 4 | (unsigned)of.param << 6 | (unsigned)of.backward << 8 |
                         (unsigned)of.fused << 9 | (unsigned)of.form << 10 | (unsigned)of.vector << 12;
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

static int run_kernel(const pbn_handle *handle, const kernel *k, const unsigned grid[3], const unsigned block[3],
                      unsigned shared, unsigned cluster, void **parameters) {
    launch_attribute attributes[2];
    launch_config config = {{grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, handle->stream, attributes, 0};
    if (cluster > 1)
        attributes[config.count++] = (launch_attribute){CU_LAUNCH_CLUSTER, 0, {{cluster, 1, 1}}};
    if (handle->device.follows)
        attributes[config.count++] = (launch_attribute){CU_LAUNCH_FOLLOWS, 0, {{1, 0, 0}}};
    if (config.count == 0)
        return driver.cuLaunchKernel(k->function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared,
                                     handle->stream, parameters, NULL);
    return driver.cuLaunchKernelEx(&config, k->function, parameters, NULL);
}
