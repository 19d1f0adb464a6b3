/* native on CUDA: the driver and NVRTC, of which only names are known when this is compiled. */
#include "driver.h"

typedef struct launch_attribute {
    int id, pad;
    union {
        unsigned cluster[3];
        int value;
        char size[64];
    } of;
} launch_attribute;

typedef struct launch_config {
    unsigned grid[3], block[3], shared;
    void *stream;
    launch_attribute *attributes;
    unsigned count;
} launch_config;

enum {
    CU_ATTRIBUTE_MULTIPROCESSORS = 16,
    CU_ATTRIBUTE_MAJOR = 75,
    CU_ATTRIBUTE_MINOR = 76,
    CU_ATTRIBUTE_SHARED_MULTIPROCESSOR = 81,
    CU_ATTRIBUTE_SHARED_OPTIN = 97,
    CU_FUNCTION_ANY_CLUSTER = 14,
    CU_LAUNCH_CLUSTER = 4,
    CU_LAUNCH_FOLLOWS = 6, /* programmatic stream serialization */
    CU_MEMORYTYPE_DEVICE = 2
};

#define DRIVER_SYMBOLS(REQUIRED, OPTIONAL)                                                                             \
    REQUIRED(int, cuInit, (unsigned flags))                                                                            \
    REQUIRED(int, cuDriverGetVersion, (int *version))                                                                  \
    REQUIRED(int, cuDeviceGetCount, (int *count))                                                                      \
    REQUIRED(int, cuDeviceGetAttribute, (int *value, int attribute, int device))                                       \
    REQUIRED(int, cuDevicePrimaryCtxRetain, (void **context, int device))                                              \
    REQUIRED(int, cuCtxGetCurrent, (void **context))                                                                   \
    REQUIRED(int, cuCtxSetCurrent, (void *context))                                                                    \
    REQUIRED(int, cuCtxPushCurrent_v2, (void *context))                                                                \
    REQUIRED(int, cuCtxPopCurrent_v2, (void **context))                                                                \
    REQUIRED(int, cuCtxGetDevice, (int *device))                                                                       \
    REQUIRED(int, cuModuleLoadData, (void **module, const void *image))                                                \
    REQUIRED(int, cuModuleGetFunction, (void **function, void *module, const char *name))                              \
    REQUIRED(int, cuFuncSetAttribute, (void *function, int attribute, int value))                                      \
    REQUIRED(int, cuFuncGetAttribute, (int *value, int attribute, void *function))                                     \
    REQUIRED(int, cuLaunchKernel,                                                                                      \
             (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,   \
              unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra))                       \
    REQUIRED(int, cuPointerGetAttributes, (unsigned count, int *attributes, void **values, unsigned long long address))\
    REQUIRED(int, cuGetErrorName, (int error, const char **name))                                                      \
    REQUIRED(int, cuGetErrorString, (int error, const char **text))                                                    \
    REQUIRED(int, cuStreamQuery, (void *stream))                                                                       \
    OPTIONAL(int, cuThreadExchangeStreamCaptureMode, (int *mode))                                                      \
    OPTIONAL(int, cuCtxGetId, (void *context, unsigned long long *id))                                                 \
    OPTIONAL(int, cuLaunchKernelEx, (const launch_config *config, void *function, void **parameters, void **extra))    \
    OPTIONAL(int, cuOccupancyMaxActiveClusters, (int *count, void *function, const launch_config *config))

#define COMPILER_SYMBOLS(REQUIRED, OPTIONAL)                                                                           \
    RTC_SYMBOLS(REQUIRED, nvrtc)                                                                                       \
    REQUIRED(int, nvrtcGetPTXSize, (void *program, size_t *size))                                                      \
    REQUIRED(int, nvrtcGetPTX, (void *program, char *image))                                                           \
    REQUIRED(int, nvrtcGetCUBINSize, (void *program, size_t *size))                                                    \
    REQUIRED(int, nvrtcGetCUBIN, (void *program, char *image))                                                         \
    REQUIRED(int, nvrtcGetNumSupportedArchs, (int *count))                                                             \
    REQUIRED(int, nvrtcGetSupportedArchs, (int *archs))
#define RTC(name) rtc.nvrtc##name
#define DRIVER(name) driver.cu##name
#define RTC_UNUSABLE "the library NVRTC cannot be used"

DRIVER_SYMBOLS(PROTOTYPE, PROTOTYPE)
COMPILER_SYMBOLS(PROTOTYPE, PROTOTYPE)

static struct {
    int found;
    DRIVER_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} driver; /* written once, by find_driver */

static struct {
    int version[3]; /* of the compiler, for the files of what it made */
    COMPILER_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} rtc;

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
        status = GPU_STUB_LIBRARY;
    }
    if (status == PBN_OK && (status = driver.cuInit(0)) != 0)
        snprintf(detail, sizeof detail, "cuInit finds no device that it can use");
    pthread_mutex_unlock(&lock);
    return status;
}

static int resolve_library(pbn_library *lib) {
    __typeof__(rtc) fresh = {0}, *const table = &fresh;
    COMPILER_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    if (fresh.nvrtcVersion(&fresh.version[0], &fresh.version[1]) != 0)
        return PBN_E_VERSION;
    lib->version[0] = fresh.version[0];
    lib->version[1] = fresh.version[1];
    rtc = fresh;
    return PBN_OK;
}

static const char *driver_name(int status) {
    const char *name = NULL;
    if (status == GPU_STUB_LIBRARY && !driver.found)
        return "CUDA_ERROR_STUB_LIBRARY";
    return driver.found && driver.cuGetErrorName(status, &name) == 0 ? name : NULL;
}

static const char *driver_text(int status) {
    const char *text = NULL;
    return driver.found && driver.cuGetErrorString(status, &text) == 0 ? text : NULL;
}

/* Errors that a kernel leaves in its context for good. */
static int gpu_context_lost(int status, char *text, size_t size) {
    const char *name = NULL;
    if (text == NULL || size == 0 || status <= 0 || status >= RTC_STATUS || !driver.found)
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

/* ------------------------------------------------------------------ contexts */

static int current_context(void **context) {
    int status = driver.cuCtxGetCurrent(context);
    if (status == 0 && *context == NULL && (status = driver.cuDevicePrimaryCtxRetain(context, 0)) == 0)
        status = driver.cuCtxSetCurrent(*context);
    return status;
}

static int push_context(void *context, int *before) {
    void *current = NULL;
    *before = 0;
    if (driver.cuCtxGetCurrent(&current) == 0 && current == context)
        return 0;
    *before = 1;
    return driver.cuCtxPushCurrent_v2(context);
}

static void pop_context(int before) {
    void *context;
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

/* ------------------------------------------------------------------ kernels */

/* For the device's own architecture where NVRTC knows it; else as text for the newest one before it. */
static int architecture_of(int wanted, int *binary) {
    int archs[64], count = 0, best = 0;
    if (rtc.nvrtcGetNumSupportedArchs(&count) != 0 || count > 64 || rtc.nvrtcGetSupportedArchs(archs) != 0)
        count = 0;
    for (int i = 0; i < count; i++)
        if (archs[i] <= wanted && archs[i] > best)
            best = archs[i];
    *binary = best == wanted;
    return best != 0 ? best : wanted;
}

static void add_target(options *o, const gpu *g) {
    const int best = architecture_of(g->architecture, &o->binary);
    add_option(o, "--gpu-architecture=%s_%d", o->binary ? "sm" : "compute", best);
}

static int take_image(void *program, int binary, char **image, size_t *size) {
    const int status = binary ? rtc.nvrtcGetCUBINSize(program, size) : rtc.nvrtcGetPTXSize(program, size);
    if (status != 0)
        return status;
    if ((*image = malloc(*size)) == NULL)
        return 1; /* NVRTC_ERROR_OUT_OF_MEMORY */
    return binary ? rtc.nvrtcGetCUBIN(program, *image) : rtc.nvrtcGetPTX(program, *image);
}

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

static int allow_shared(const gpu *g, kernel *k, int clusters) {
    const int status = driver.cuFuncSetAttribute(k->function, GPU_FUNCTION_DYNAMIC_SHARED, (int)k->shared_limit);
    if (clusters)
        k->cluster_limit = clusters_of(g, k->function, k->shared_limit);
    return status;
}

static int start(const gpu *g, void *stream, const launch *l, void **parameters) {
    launch_attribute attributes[2];
    launch_config config = {{l->grid[0], l->grid[1], l->grid[2]}, {l->block[0], l->block[1], l->block[2]}, l->shared, stream, attributes, 0};
    if (l->cluster > 1)
        attributes[config.count++] = (launch_attribute){CU_LAUNCH_CLUSTER, 0, {{l->cluster, 1, 1}}};
    if (g->follows)
        attributes[config.count++] = (launch_attribute){CU_LAUNCH_FOLLOWS, 0, {{1, 0, 0}}};
    if (config.count == 0)
        return driver.cuLaunchKernel(l->of->function, l->grid[0], l->grid[1], l->grid[2], l->block[0], l->block[1],
                                     l->block[2], l->shared, stream, parameters, NULL);
    return driver.cuLaunchKernelEx(&config, l->of->function, parameters, NULL);
}

/* ------------------------------------------------------------------ the backend */

/* The kernels' source: these files, one after another. */
#define SOURCE(file) ".ascii \"#line 1 \\\"" file "\\\"\\n\"\n.incbin \"pybnorm/backends/native/" file "\"\n"
__asm__(".pushsection .rodata\n.globl pbn_native_kernels\n.hidden pbn_native_kernels\npbn_native_kernels:\n"
        SOURCE("arguments.h") SOURCE("kernels.cuh") SOURCE("rows.cuh") SOURCE("columns.cuh") SOURCE("channels.cuh")
        ".byte 0\n.popsection\n");

#include "gpu.c"

const pbn_backend pbn_backend_native_cuda = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_CUDA,
    .also_reached = {PBN_DEVICE_CUDA_MANAGED},
    .name = "native_cuda",
    .label = "native (CUDA)",
    .search = {.sonames = "libnvrtc.so.13 libnvrtc.so.12",
               .hint = "pip install nvidia-cuda-nvrtc (or nvidia-cuda-nvrtc-cu12, as the driver needs), or a CUDA "
                       "toolkit",
               .pathfinder = "nvrtc",
               .distributions = "nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu13 nvidia-cuda-nvrtc-cu12 "
                                "nvidia-cuda-nvrtc-cu11",
               .roots = "CUDA_PATH CUDA_HOME",
               .variables = "NVRTC_ CUDA_FORCE_ CUDA_DISABLE_ CUDA_MODULE_LOADING"},
    .context_lost = gpu_context_lost,
    GPU_TABLE(),
};
