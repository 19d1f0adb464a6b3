/* What native takes from a GPU's driver and its run-time compiler, and how a kernel is named. cuda.c and hip.c are the
 * two drivers: each defines the functions below over the symbols that it loads, and includes gpu.c, which knows no
 * difference. */
#ifndef PYBNORM_NATIVE_DRIVER_H
#define PYBNORM_NATIVE_DRIVER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>

#include "pybnorm/adapter.h"
#include "pybnorm/dl.h"

#include "arguments.h"
#include "descriptors.h"
#include "problem.h"

/* Of NVRTC and of hipRTC, which differ in their names' beginning. */
#define RTC_SYMBOLS(REQUIRED, of)                                                                                      \
    REQUIRED(int, of##Version, (int *major, int *minor))                                                               \
    REQUIRED(const char *, of##GetErrorString, (int status))                                                           \
    REQUIRED(int, of##CreateProgram,                                                                                   \
             (void **program, const char *source, const char *name, int count, const char *const *headers,             \
              const char *const *names))                                                                               \
    REQUIRED(int, of##CompileProgram, (void *program, int count, const char *const *options))                          \
    REQUIRED(int, of##DestroyProgram, (void **program))                                                                \
    REQUIRED(int, of##GetProgramLogSize, (void *program, size_t *size))                                                \
    REQUIRED(int, of##GetProgramLog, (void *program, char *text))

#define PROTOTYPE(result, name, parameters) typedef result(*pbn_##name##_fn) parameters;

/* The same numbers in CUDA and HIP. */
enum {
    GPU_INVALID_VALUE = 1,
    GPU_OUT_OF_MEMORY = 2,
    GPU_NOT_INITIALIZED = 3,
    GPU_STUB_LIBRARY = 34,
    GPU_NO_DEVICE = 100,
    GPU_INVALID_DEVICE = 101,
    GPU_FUNCTION_STATIC_SHARED = 1,
    GPU_FUNCTION_DYNAMIC_SHARED = 8,
    GPU_CAPTURE_RELAXED = 2,
    RTC_STATUS = 10000 /* added to the compiler's own numbers */
};

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

enum { OPTIONS = 12, OPTION_SIZE = 64 };

typedef struct options {
    char text[OPTIONS][OPTION_SIZE];
    const char *list[OPTIONS];
    int count, binary;
} options;

typedef struct gpu {
    int number, architecture; /* of CUDA: 90 is compute capability 9.0 */
    char target[40];          /* of HIP: "gfx90a:sramecc+:xnack-" */
    int64_t multiprocessors, shared_optin, shared_multiprocessor;
    unsigned long long context_id;
    int follows; /* whether a launch may begin before the one in front has ended */
} gpu;

/* One of a call's launches. */
typedef struct launch {
    kernel *of;
    unsigned grid[3], block[3], shared, cluster;
    int stage;
} launch;

static _Thread_local char detail[PBN_TEXT_MAX]; /* what belongs to the last positive status of this thread */

/* What a driver defines, beside DRIVER(name) and RTC(name), its symbols of that name after a prefix. A status is 0, its
 * own number, or RTC_STATUS and the compiler's. */
static int find_driver(void);                              /* makes it ready; `detail` says why it is not */
static const char *driver_name(int status);                /* of a number of its own; or NULL */
static const char *driver_text(int status);
static int current_context(void **context);                /* the thread's own; without one, device 0's, made current */
static int ask_device(gpu *g, void *context);              /* of the context, which is current */
static int push_context(void *context, int *before);       /* makes it current; *before is 0 where it is already */
static void pop_context(int before);
static void add_target(options *o, const gpu *g);          /* for which architecture a kernel is compiled */
static int take_image(void *program, int binary, char **image, size_t *size);
static int allow_shared(const gpu *g, kernel *k, int clusters); /* up to its limits, which it may lower */
static int start(const gpu *g, void *stream, const launch *l, void **parameters);

static inline void add_option(options *o, const char *format, const char *name, int value) {
    snprintf(o->text[o->count], OPTION_SIZE, format, name, value);
    o->list[o->count] = o->text[o->count];
    o->count++;
}

#endif
