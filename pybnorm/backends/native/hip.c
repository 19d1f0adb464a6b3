/* native on ROCm: the HIP runtime and hipRTC, of which only names are known when this is compiled.
 *
 * The library that is searched for is the runtime, which must be the process's one: two do not know each other's
 * memory. The compiler is the one that lies beside it; up to ROCm 6 the runtime has it, too. HIP has no contexts: the
 * device's number plus one stands for a context. HIP has no clusters, and no launch begins before the previous one ends.
 */
#include "driver.h"

enum { HIP_MULTIPROCESSORS = 63, HIP_SHARED_BLOCK = 74, HIP_SHARED_MULTIPROCESSOR = 10002 }; /* of hipDeviceAttribute_t */

/* hipPointerAttribute_t; the numbers of `type` changed with ROCm 6. */
struct hip_pointer {
    int type, device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
};

/* hipDeviceProp_tR0600, which HIP may lengthen. */
struct hip_properties {
    char before[1160], architecture[256], behind[4096];
};

#define LIBRARY_SYMBOLS(REQUIRED, OPTIONAL)                                                                            \
    REQUIRED(int, hipInit, (unsigned flags))                                                                           \
    REQUIRED(int, hipRuntimeGetVersion, (int *version))                                                                \
    REQUIRED(int, hipGetDeviceCount, (int *count))                                                                     \
    REQUIRED(int, hipGetDevice, (int *device))                                                                         \
    REQUIRED(int, hipSetDevice, (int device))                                                                          \
    REQUIRED(int, hipDeviceGetAttribute, (int *value, int attribute, int device))                                      \
    REQUIRED(int, hipGetDevicePropertiesR0600, (struct hip_properties * properties, int device))                       \
    REQUIRED(int, hipModuleLoadData, (void **module, const void *image))                                               \
    REQUIRED(int, hipModuleGetFunction, (void **function, void *module, const char *name))                             \
    REQUIRED(int, hipFuncGetAttribute, (int *value, int attribute, void *function))                                    \
    REQUIRED(int, hipModuleLaunchKernel,                                                                               \
             (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,   \
              unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra))                       \
    REQUIRED(int, hipPointerGetAttributes, (struct hip_pointer * attributes, const void *address))                     \
    REQUIRED(int, hipGetLastError, (void))                                                                             \
    REQUIRED(const char *, hipGetErrorName, (int error))                                                               \
    REQUIRED(const char *, hipGetErrorString, (int error))                                                             \
    OPTIONAL(int, hipThreadExchangeStreamCaptureMode, (int *mode))
#define COMPILER_SYMBOLS(REQUIRED, OPTIONAL)                                                                           \
    RTC_SYMBOLS(REQUIRED, hiprtc)                                                                                      \
    REQUIRED(int, hiprtcGetCodeSize, (void *program, size_t *size))                                                    \
    REQUIRED(int, hiprtcGetCode, (void *program, char *image))
#define RTC(name) rtc.hiprtc##name
#define DRIVER(name) rtc.hip##name
#define RTC_UNUSABLE "the HIP runtime, or its compiler hipRTC, cannot be used"

LIBRARY_SYMBOLS(PROTOTYPE, PROTOTYPE)
COMPILER_SYMBOLS(PROTOTYPE, PROTOTYPE)

static struct {
    int version[3]; /* of the compiler, and HIP's, for the files of what it made */
    LIBRARY_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
    COMPILER_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} rtc; /* written once, by gpu_load */

static int resolve_runtime(pbn_library *lib, __typeof__(rtc) *table) {
    LIBRARY_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    return PBN_OK;
}

static int resolve_compiler(pbn_library *lib, __typeof__(rtc) *table) {
    COMPILER_SYMBOLS(PBN_DL_REQUIRE, PBN_DL_PROBE)
    return PBN_OK;
}

/* libhiprtc of the same number in the same folder: of the same ROCm. */
static int open_beside(const pbn_library *runtime, pbn_library *compiler) {
    const char *name = strrchr(runtime->path, '/'), *number = strstr(name != NULL ? name : runtime->path, ".so");
    char file[PBN_PATH_MAX + 16];
    snprintf(file, sizeof file, "%.*slibhiprtc%s", name != NULL ? (int)(name + 1 - runtime->path) : 0, runtime->path,
             number != NULL ? number : ".so");
    return pbn_dl_open(compiler, file, 0);
}

static int resolve_library(pbn_library *lib) {
    __typeof__(rtc) fresh = {0};
    pbn_library compiler;
    int number = 0, status = resolve_runtime(lib, &fresh);
    if (status != PBN_OK)
        return status;
    if (resolve_compiler(lib, &fresh) != PBN_OK &&
        (open_beside(lib, &compiler) != PBN_OK || resolve_compiler(&compiler, &fresh) != PBN_OK)) {
        snprintf(lib->message, sizeof lib->message, "hipRTC is not beside it: %.900s", compiler.message);
        return PBN_E_LIBRARY;
    }
    if (fresh.hipRuntimeGetVersion(&number) != 0 || fresh.hiprtcVersion(&fresh.version[0], &fresh.version[1]) != 0)
        return PBN_E_VERSION;
    fresh.version[2] = number;
    lib->version[0] = number / 10000000;
    lib->version[1] = number / 100000 % 100;
    lib->version[2] = number % 100000;
    rtc = fresh;
    return PBN_OK;
}

static int find_driver(void) {
    detail[0] = '\0';
    return rtc.hipInit(0);
}

static const char *driver_name(int status) {
    return rtc.hipGetErrorName != NULL ? rtc.hipGetErrorName(status) : NULL;
}

static const char *driver_text(int status) {
    return rtc.hipGetErrorString != NULL ? rtc.hipGetErrorString(status) : NULL;
}

/* ------------------------------------------------------------------ devices */

static int current_context(void **context) {
    int device = 0;
    const int status = rtc.hipGetDevice(&device);
    *context = (void *)((uintptr_t)device + 1);
    return status;
}

static int push_context(void *context, int *before) {
    void *current = NULL;
    *before = 0;
    if (current_context(&current) == 0 && current == context)
        return 0;
    *before = (int)(uintptr_t)current;
    return rtc.hipSetDevice((int)(uintptr_t)context - 1);
}

static void pop_context(int before) {
    if (before > 0)
        rtc.hipSetDevice(before - 1);
}

static int ask_device(gpu *g, void *context) {
    struct hip_properties found;
    int values[3] = {0}, status = 0;
    static const int asked[] = {HIP_MULTIPROCESSORS, HIP_SHARED_BLOCK, HIP_SHARED_MULTIPROCESSOR};
    memset(&found, 0, sizeof found);
    g->number = (int)(uintptr_t)context - 1;
    for (int i = 0; i < 3 && status == 0; i++)
        status = rtc.hipDeviceGetAttribute(&values[i], asked[i], g->number);
    if (status == 0)
        status = rtc.hipGetDevicePropertiesR0600(&found, g->number);
    snprintf(g->target, sizeof g->target, "%.39s", found.architecture);
    g->multiprocessors = values[0];
    g->shared_optin = values[1];
    g->shared_multiprocessor = values[2];
    return status;
}

static int gpu_device_count(void) {
    int count = 0;
    return rtc.hipGetDeviceCount != NULL && rtc.hipGetDeviceCount(&count) == 0 ? count : 0;
}

/* As MIOpen's adapter: pinned memory has an address on the host, too; an unknown address is an error, taken away. */
static int gpu_memory_device(const void *address) {
    struct hip_pointer found = {0};
    if (rtc.hipPointerGetAttributes == NULL || rtc.hipPointerGetAttributes(&found, address) != 0) {
        if (rtc.hipGetLastError != NULL)
            rtc.hipGetLastError();
        return -1;
    }
    return found.managed || found.host_pointer != NULL ? -1 : found.device;
}

/* ------------------------------------------------------------------ kernels */

static void add_target(options *o, const gpu *g) { add_option(o, "--gpu-architecture=%s", g->target, 0); }

static int take_image(void *program, int binary, char **image, size_t *size) {
    const int status = rtc.hiprtcGetCodeSize(program, size);
    (void)binary;
    if (status != 0)
        return status;
    return (*image = malloc(*size)) != NULL ? rtc.hiprtcGetCode(program, *image) : 1; /* HIPRTC_ERROR_OUT_OF_MEMORY */
}

static int allow_shared(const gpu *g, kernel *k, int clusters) { /* all of it is allowed */
    (void)g, (void)k, (void)clusters;
    return 0;
}

static int start(const gpu *g, void *stream, const launch *l, void **parameters) {
    (void)g;
    return rtc.hipModuleLaunchKernel(l->of->function, l->grid[0], l->grid[1], l->grid[2], l->block[0], l->block[1],
                                     l->block[2], l->shared, stream, parameters, NULL);
}

/* ------------------------------------------------------------------ the backend */

#include "gpu.c"

const pbn_backend pbn_backend_native_rocm = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_ROCM,
    .name = "native_rocm",
    .label = "native (ROCm)",
    .search = {.sonames = "libamdhip64.so.7",
               .hint = "install ROCm's HIP runtime and hipRTC (package hip-runtime-amd, Debian and Ubuntu: "
                       "libamdhip64-6 and libhiprtc6), or AMD's rocm wheels",
               .loaded_names = "libamdhip64.so",
               .rocm_sdk = "amdhip64",
               .rocm_sdk_needs = "amd_comgr hiprtc",
               .roots = "ROCM_PATH ROCM_HOME HIP_PATH",
               .folders = "/opt/rocm/core*/lib /opt/rocm/lib /opt/rocm-*/lib",
               .variables = "HSA_ HIP_ AMD_ ROCM_"},
    GPU_TABLE(),
};
