/* What is used of the CUDA driver and of NVRTC, declared by hand; and how a kernel is named. */
#ifndef PYBNORM_NATIVE_DRIVER_H
#define PYBNORM_NATIVE_DRIVER_H

#include <stddef.h>

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
    CU_NOT_INITIALIZED = 3,
    CU_STUB_LIBRARY = 34,
    CU_NO_DEVICE = 100,
    CU_INVALID_DEVICE = 101,
    CU_OUT_OF_MEMORY = 2,
    CU_INVALID_VALUE = 1,
    CU_ATTRIBUTE_MULTIPROCESSORS = 16,
    CU_ATTRIBUTE_MAJOR = 75,
    CU_ATTRIBUTE_MINOR = 76,
    CU_ATTRIBUTE_SHARED_MULTIPROCESSOR = 81,
    CU_ATTRIBUTE_SHARED_OPTIN = 97,
    CU_FUNCTION_STATIC_SHARED = 1,
    CU_FUNCTION_DYNAMIC_SHARED = 8,
    CU_FUNCTION_ANY_CLUSTER = 14,
    CU_LAUNCH_CLUSTER = 4,
    CU_LAUNCH_FOLLOWS = 6, /* programmatic stream serialization */
    CU_CAPTURE_RELAXED = 2,
    CU_MEMORYTYPE_DEVICE = 2,
    NVRTC_STATUS = 10000 /* added to NVRTC's own numbers */
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

#define NVRTC_SYMBOLS(REQUIRED, OPTIONAL)                                                                              \
    REQUIRED(int, nvrtcVersion, (int *major, int *minor))                                                              \
    REQUIRED(const char *, nvrtcGetErrorString, (int status))                                                          \
    REQUIRED(int, nvrtcCreateProgram,                                                                                  \
             (void **program, const char *source, const char *name, int count, const char *const *headers,             \
              const char *const *names))                                                                               \
    REQUIRED(int, nvrtcCompileProgram, (void *program, int count, const char *const *options))                         \
    REQUIRED(int, nvrtcDestroyProgram, (void **program))                                                               \
    REQUIRED(int, nvrtcGetPTXSize, (void *program, size_t *size))                                                      \
    REQUIRED(int, nvrtcGetPTX, (void *program, char *image))                                                           \
    REQUIRED(int, nvrtcGetProgramLogSize, (void *program, size_t *size))                                               \
    REQUIRED(int, nvrtcGetProgramLog, (void *program, char *text))                                                     \
    REQUIRED(int, nvrtcGetCUBINSize, (void *program, size_t *size))                                                    \
    REQUIRED(int, nvrtcGetCUBIN, (void *program, char *image))                                                         \
    REQUIRED(int, nvrtcGetNumSupportedArchs, (int *count))                                                             \
    REQUIRED(int, nvrtcGetSupportedArchs, (int *archs))

#define PROTOTYPE(result, name, parameters) typedef result(*pbn_##name##_fn) parameters;
DRIVER_SYMBOLS(PROTOTYPE, PROTOTYPE)
NVRTC_SYMBOLS(PROTOTYPE, PROTOTYPE)
#undef PROTOTYPE

/* In the order of kernel_names. */
enum kernel_name {
    KERNEL_ROWS,
    KERNEL_ROW_SUMS,
    KERNEL_ROW_APPLY,
    KERNEL_ANY_APPLY,
    KERNEL_TILES,
    KERNEL_COLUMN_SUMS,
    KERNEL_COLUMN_APPLY,
    KERNEL_FINISH,
    KERNEL_MERGE,
    KERNEL_ELEMENTS
};
static const char *const kernel_names[] = {"rows",        "row_sums",     "row_apply", "any_apply", "tiles",
                                           "column_sums", "column_apply", "finish",    "merge",     "elements"};

/* What the kernels' source is compiled with: kernels.cuh says what each is. */
typedef struct instance {
    enum kernel_name name;
    int dtype, param, backward, fused, form, vector;
} instance;

typedef struct kernel {
    struct kernel *next;
    void *context, *function;
    unsigned long long context_id;
    unsigned key;
    int64_t shared_limit, cluster_limit; /* bytes of shared memory at launch; blocks of a cluster */
} kernel;

typedef struct gpu {
    int number, architecture; /* 90 is compute capability 9.0 */
    int64_t multiprocessors, shared_optin, shared_multiprocessor;
    unsigned long long context_id;
    int follows; /* whether a launch may begin before the one in front has ended */
} gpu;

#endif
