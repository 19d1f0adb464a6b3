/* The contract between pybnorm's Cython core and its vendor files.
 *
 * Neutral enums, descriptors, one call record and the table of function pointers that every
 * backend fills. No vendor type, number or header appears here. Calls take neutral arguments
 * that pybnorm/_arguments.py has already checked; a backend only refuses what its own vendor
 * cannot do right. All functions may be called without the GIL.
 *
 * Status convention: 0 success, > 0 the vendor's own number unchanged, < 0 one of pbn_error.
 */
#ifndef PYBNORM_SHIM_H
#define PYBNORM_SHIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The backend list. Adding a vendor adds one line here and one C file, or one folder with an adapter.c, that defines
 * `const pbn_backend pbn_backend_<name>`. A backend of another distribution exports such a table from a shared library
 * and names that library with an entry point of the group pybnorm.backends; see examples/loop_backend. */
#define PBN_BACKENDS(X) \
    X(cudnn)            \
    X(miopen)           \
    X(onednn)           \
    X(native)           \
    X(native_cuda)      \
    X(native_rocm)      \
    /* the next one goes here */

#define PBN_MAX_RANK 8
#define PBN_PATH_MAX 4096
#define PBN_TEXT_MAX 1024

typedef enum pbn_dtype {
    PBN_FLOAT32 = 0,
    PBN_FLOAT64 = 1,
    PBN_FLOAT16 = 2,
    PBN_BFLOAT16 = 3
} pbn_dtype;

typedef enum pbn_mode {
    PBN_PER_ACTIVATION = 0,     /* parameters (1, C, D...), reduced over N */
    PBN_SPATIAL = 1,            /* parameters (1, C, 1...), reduced over N and the spatial axes */
    PBN_SPATIAL_PERSISTENT = 2  /* the same mathematics as SPATIAL, other kernels */
} pbn_mode;

/* How a tensor lies in memory. Axis 0 is N and axis 1 is C whatever the layout. */
typedef enum pbn_layout {
    PBN_CHANNELS_FIRST = 0, /* packed NC, NCL, NCHW, NCDHW, ... */
    PBN_CHANNELS_LAST = 1,  /* packed NLC, NHWC, NDHWC, ... */
    PBN_STRIDED = 2         /* any other non-overlapping strides */
} pbn_layout;

typedef enum pbn_operation {
    PBN_OP_DERIVE = 0,
    PBN_OP_FORWARD_TRAINING = 1,
    PBN_OP_FORWARD_INFERENCE = 2,
    PBN_OP_BACKWARD = 3,
    PBN_OP_AXPBY = 4, /* y = a*x + b*y, elementwise */
    PBN_OP_FILL = 5,  /* y = a everywhere */
    PBN_OP_RELU = 6,  /* y = max(x, 0) */
    PBN_OP_RELU_BACKWARD = 7 /* dx = dy where x > 0, else 0 */
} pbn_operation;

/* Kinds of device and of memory, by DLPack's numbers; 0 is none. */
typedef enum pbn_device {
    PBN_DEVICE_CPU = 1,
    PBN_DEVICE_CUDA = 2,
    PBN_DEVICE_CUDA_HOST = 3, /* pinned host memory */
    PBN_DEVICE_ROCM = 10,
    PBN_DEVICE_ROCM_HOST = 11, /* pinned host memory */
    PBN_DEVICE_CUDA_MANAGED = 13
} pbn_device;

/* What batch norm's result passes before it is blended. */
typedef enum pbn_activation {
    PBN_ACTIVATION_NONE = 0,
    PBN_ACTIVATION_RELU = 1,         /* max(x, 0) */
    PBN_ACTIVATION_CLIPPED_RELU = 2, /* min(max(x, 0), high), high > 0 */
    PBN_ACTIVATION_CLAMP = 3         /* min(max(x, low), high), low < high */
} pbn_activation;

/* What the capability query answers; 0 means the combination is refused. */
typedef enum pbn_capability {
    PBN_CAP_RUNS = 1,          /* the combination executes */
    PBN_CAP_BLEND_NATIVE = 2,  /* the vendor applies alpha and beta itself */
    PBN_CAP_BLEND_SCRATCH = 4, /* alpha/beta other than 1/0 through the caller's workspace */
    PBN_CAP_FOLDED = 8,        /* the adapter hands the vendor another rank or view of the same memory */
    PBN_CAP_HOST_STEPS = 16,   /* part of the result is computed by the adapter in C on the CPU */
    PBN_CAP_BLEND_ROUNDS = 32, /* a blended result is rounded to x's type more than once */
    PBN_CAP_ACTIVATION = 64,   /* the loaded library computes it with a fused activation, and right */
    PBN_CAP_WIDENED = 128,     /* 16-bit data are computed in float32, of which results are rounded once */
    PBN_CAP_IN_PLACE = 256,    /* with beta 0 y may be x, and dx may be dy, but where the table of defects says so */
    PBN_CAP_INVERSE = 512,     /* inference takes 1/sqrt(variance + epsilon) too, by `inverse` of the call */
    PBN_CAP_HALVES = 1024,     /* plans make the halves of a synchronized batch norm: `sums_only` and `share` of the call */
    PBN_CAP_RESIDUAL = 2048,   /* some plan takes z, and backward dz; the core refuses them elsewhere */
    PBN_CAP_OWN_PARAMETERS = 4096, /* parameters may be of x's own dtype of 16 bits; the core refuses them elsewhere */
    PBN_CAP_CONSTANTS = 8192   /* backward takes running statistics as constants; the core refuses them elsewhere */
} pbn_capability;

/* When an error that kernels record on the device is read. */
typedef enum pbn_query {
    PBN_QUERY_RAW = 0,         /* now, whether or not the kernels have run */
    PBN_QUERY_NONBLOCKING = 1, /* now, if the handle's stream has nothing left to do */
    PBN_QUERY_BLOCKING = 2     /* after all work of the handle's stream */
} pbn_query;

typedef enum pbn_fork {
    PBN_FORK_BEFORE = 0,
    PBN_FORK_CHILD = 1 /* after it, in the child */
} pbn_fork;

typedef enum pbn_error {
    PBN_OK = 0,
    PBN_E_UNSUPPORTED = -1, /* the vendor has no right path for this; last_error says why */
    PBN_E_NOT_LOADED = -2,  /* the backend's library has not been loaded */
    PBN_E_SYMBOL = -3,      /* the library lacks a symbol; message names it */
    PBN_E_LIBRARY = -4,     /* the file cannot be opened as a library; message has the loader's text */
    PBN_E_VERSION = -5,     /* the library answers, but is a version this backend does not speak */
    PBN_E_ARGUMENT = -6,    /* a bad argument reached the shim (validation above should have caught it) */
    PBN_E_WORKSPACE = -7,   /* workspace missing or too small */
    PBN_E_MEMORY = -8,      /* host memory for a descriptor or handle could not be had */
    PBN_E_INTERNAL = -9,    /* the adapter's own invariant failed */
    PBN_E_DEVICE = -10      /* the handle's device cannot be made current */
} pbn_error;

/* Families of vendor statuses; the core maps them to Python exception classes. */
typedef enum pbn_status_class {
    PBN_CLASS_SUCCESS = 0,
    PBN_CLASS_BAD_PARAMETER = 1,
    PBN_CLASS_NOT_SUPPORTED = 2,
    PBN_CLASS_ALLOCATION = 3,
    PBN_CLASS_NOT_INITIALIZED = 4, /* no device, no driver, library parts missing */
    PBN_CLASS_EXECUTION = 5,
    PBN_CLASS_VERSION = 6,         /* library parts of different versions */
    PBN_CLASS_INTERNAL = 7
} pbn_status_class;

/* A tensor's shape and memory order, with the vendor's descriptor for it.
 * rank 0: created but not set. Only the backend touches `vendor`, `compute` and `owned`. */
typedef struct pbn_tensor {
    int32_t dtype;
    int32_t rank;
    int64_t dims[PBN_MAX_RANK];
    int64_t strides[PBN_MAX_RANK];
    void *vendor;   /* the vendor's descriptor of exactly these dims and strides */
    void *compute;  /* the descriptor the compute calls take (folded rank); may equal `vendor` */
    int32_t owned;  /* 0: `vendor` belongs to someone else and is never destroyed here */
    int32_t layout; /* pbn_layout, kept beside dims so that calls need not classify again */
} pbn_tensor;

typedef struct pbn_handle pbn_handle; /* each backend's own */

/* One batch-norm or elementwise call. Unused pointers are NULL. The core has checked what does not depend on the vendor:
 * the library is loaded and `capability` takes the call; handles, descriptors and pointers that a call needs are there,
 * pairs are whole, addresses aligned to their elements; data tensors have x's dims and dtype; workspace and reserve are
 * large enough; scalars are in range. Backends check the rest.
 *
 * forward training   y = alpha*bn(x) + beta*y; running and saved pairs both or none
 * forward inference  y = alpha*(scale*(x-running_mean)/sqrt(running_variance+epsilon)+bias) + beta*y
 * backward           dx = alpha*dx' + beta*dx; dscale, dbias blended by alpha_param, beta_param;
 *                    saved pair both (epsilon unused, any values honoured) or none (recomputed from x)
 * axpby              y = alpha*x + beta*y (x, y: same dims and dtype, each with its own strides)
 * fill               y = alpha, rounded to y's dtype; no workspace; between strides nothing is written
 * relu               y = x where x > 0, else 0 (x, y: same dims and dtype); no scalars, no workspace
 * relu backward      dx = dy where x > 0, else 0; x is the input of relu, or its output: the sign is all that
 *                    is read of it. A NaN of x stays one in relu and gives 0 in its gradient (MIOpen multiplies by
 *                    the mask instead: 0 times what is not finite is NaN).
 *
 * With an activation, read act(bn(x)) for bn(x) above: it comes first, alpha and beta blend its result. In backward
 * dy is the gradient at the activation's output and passes where low < bn(x) <= high (RELU: 0 < bn(x)); bn(x) is made
 * again from x, the statistics, scale and bias, so that bias is required then, and only then. A call whose backend
 * lacks PBN_CAP_ACTIVATION is refused.
 *
 * By a plan, where the backend's plan_create takes it, the activation may follow a sum: y = act(bn(x) + z), z like x.
 * z_desc says so in the forward calls, dz_desc in backward, which then writes dz = dy where the activation lets it
 * pass, else 0. Backward of a plan with an activation reads y, the forward's result, as well. `reserve` is device
 * memory of the size that plan_info tells: forward training writes it, and its backward is given it unchanged. The
 * core refuses z and dz where PBN_CAP_RESIDUAL is not set, as it does every tensor that a backend does not know.
 *
 * The halves of a synchronized batch norm, by plans where PBN_CAP_HALVES is set. With `sums_only` forward training
 * writes its statistics and no y, and with factor 1 does not read the running ones; backward dscale and dbias and no dx;
 * y_desc and dx_desc are there all the same, alpha is 1 and beta 0. With `share` too, 1 over a number n of values,
 * forward training merges the statistics of as many values in each row of x, which has their means: z has variances that
 * it adds alpha times, and y takes the merged one, both described as x is; scale, bias and beta are not read; the saved
 * pair is written. Backward's other half: with `share`, 1 over the number of values that the sums are of (at each run another, if need be), dbias has sum(dy) and dscale
 * sum(dy*(x - saved_mean)). Both are read, and, with r = saved_inv_variance,
 * dx = scale*r*(dy - share*dbias - share*dscale*r^2*(x - saved_mean)). alpha is 1 and beta 0.
 *
 * beta = 0 (beta_param = 0) never reads the prior value. Parameters are contiguous vectors of
 * `param`'s dtype in C (spatial) or C,D,H,W (per-activation) order whatever x's layout. That dtype is what `derive`
 * says, or, where PBN_CAP_OWN_PARAMETERS is set, x's own of 16 bits. Then scale, bias, running statistics, dscale and
 * dbias have it; statistics that are saved, or given as 1/sqrt(variance + epsilon), and sums that are given are
 * float32 still. */
typedef struct pbn_call {
    int32_t operation;
    int32_t mode;
    double alpha, beta;
    double alpha_param, beta_param;
    double factor;  /* running = (1-factor)*running + factor*batch; batch variance is unbiased */
    double epsilon;
    double share;   /* 0, or of sums that are given, or of statistics that are merged */
    int32_t sums_only;
    int32_t activation;                      /* pbn_activation; of the three batch-norm calls */
    double activation_low, activation_high;  /* read where the activation has them */
    int32_t deterministic;                   /* plan_create: only ways that `unrepeated` has nothing against */
    const pbn_tensor *x_desc, *y_desc, *dy_desc, *dx_desc, *param_desc;
    const pbn_tensor *z_desc, *dz_desc;
    const void *x, *dy, *z;
    void *y, *dx, *dz; /* y: read only in backward */
    const void *scale, *bias;
    void *running_mean, *running_variance; /* inference reads them only, as does backward, in place of saved ones */
    int32_t inverse; /* inference: running_variance has 1/sqrt(variance + epsilon) itself; where PBN_CAP_INVERSE is set */
    void *saved_mean, *saved_inv_variance; /* 1/sqrt(biased variance + epsilon); backward reads them only */
    void *dscale, *dbias;
    void *workspace; /* aligned to 64 bytes */
    size_t workspace_size;
    void *reserve;
    size_t reserve_size;
} pbn_call;

/* A call made ready: descriptors, scalars, algorithm and workspace are fixed, only pointers change. Each backend's
 * own; used by one thread at a time. */
typedef struct pbn_plan pbn_plan;

typedef struct pbn_library {
    void *handle;                /* from the system loader; never closed once symbols are out */
    int32_t version[3];
    char path[PBN_PATH_MAX];     /* resolved path of what is mapped */
    char message[PBN_TEXT_MAX];  /* on failure: the loader's text, the symbol's name, the version seen */
} pbn_library;

/* Where the vendor's library may be. Each text is a list of words separated by spaces; NULL is an empty one. */
typedef struct pbn_search {
    const char *sonames;        /* best first, with their versions; none where the backend needs no other library */
    const char *hint;           /* one sentence: how to install it */
    const char *loaded_names;   /* asked for in the process only, where nothing new can be picked up by them */
    const char *pathfinder;     /* name that cuda.pathfinder knows it by */
    const char *rocm_sdk;       /* name that rocm_sdk knows it by */
    const char *rocm_sdk_needs; /* what it links to, by rocm_sdk's names */
    const char *distributions;  /* Python distributions that carry the file */
    const char *roots;          /* environment variables that name an installation's root */
    const char *folders;        /* glob patterns; {prefix} is this Python's */
    const char *variables;      /* beginnings of the names of environment variables that change what it computes */
} pbn_search;

/* Grows with every change of the structures in this file. */
#define PBN_CONTRACT 5

typedef struct pbn_backend {
    int32_t contract;        /* PBN_CONTRACT, of this file as the backend was compiled with it */
    int32_t device_type;     /* pbn_device: whose pointers the calls take */
    int32_t also_reached[3]; /* other types whose memory the calls reach; 0 for none */
    const char *name;        /* "cudnn": the word users type; a C identifier in lower case */
    const char *label;       /* "cuDNN": the vendor's spelling */
    pbn_search search;

    /* Opens `file` (a path or a bare soname), resolves every symbol on that handle and asks the version. A backend that
     * needs no other library is given its own file, and has only to fill `out`.
     * no_load != 0: only if it is already in the process. Not thread-safe; the core holds a lock. */
    int (*load)(const char *file, int no_load, pbn_library *out);

    const char *(*status_name)(int status);  /* "CUDNN_STATUS_BAD_PARAM"; static storage, never NULL */
    int (*status_class)(int status);
    /* Text about the last non-zero status on this thread: the vendor's (status > 0) or the
     * adapter's reason (status < 0). Always terminates `text`; empty when there is none. */
    void (*last_error)(int status, char *text, size_t size);

    /* 1, and why in `text`, where the failure `status` comes of a device context that is lost, so that nothing more can
     * run on it in this process; else 0. Asks the driver: only after a failure. NULL where that cannot be known. */
    int (*context_lost)(int status, char *text, size_t size);

    /* Calls go to the handle's device, whichever is current on the calling thread, and leave that one current: all that
     * are given a handle, and plan_destroy. NULL where there are no devices: memory_device.
     * memory_device: the one whose memory this is; -1 where every device reaches it, or the driver does not know it. */
    int (*handle_device)(const pbn_handle *handle); /* the ordinal; -1 where it cannot be known */
    int (*device_count)(void);                      /* 0 where it cannot be known */
    int (*memory_device)(const void *address);
    /* 1, and the architecture of a device and what its kernels depend on, such as "gfx1100, wave size 32"; 0 where that
     * is not known. NULL where a failed call says all there is to say. */
    int (*card)(int device, char *text, size_t size);

    int (*handle_create)(pbn_handle **handle); /* of the device that is current */
    int (*handle_borrow)(void *vendor, pbn_handle **handle); /* wraps, never destroys, a vendor handle */
    int (*handle_destroy)(pbn_handle *handle);
    void *(*handle_pointer)(const pbn_handle *handle);
    int (*stream_set)(pbn_handle *handle, void *stream);
    int (*stream_get)(pbn_handle *handle, void **stream);
    /* Whether this handle takes kernels by their times; what files or variables say is pybnorm.defects'. NULL: never. */
    int (*takes_by_time)(const pbn_handle *handle);
    /* 1 where the saved statistics of a spatial training call show a mean so far from 0 that its variance lost digits: it
     * waits for the call, but on a stream that is captured. NULL where the variance is taken from centred values. */
    int (*far_from_zero)(const pbn_handle *handle, const pbn_call *call);

    int (*tensor_create)(pbn_tensor *tensor); /* zeroes the record, then asks the vendor */
    int (*tensor_borrow)(void *vendor, pbn_tensor *tensor); /* reads a foreign descriptor into the record */
    int (*tensor_set)(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides);
    /* What the vendor says of its own descriptor. */
    int (*tensor_get)(const pbn_tensor *tensor, int *dtype, int *rank, int64_t *dims, int64_t *strides);
    int (*tensor_size)(const pbn_tensor *tensor, size_t *bytes);
    int (*tensor_destroy)(pbn_tensor *tensor); /* safe on a zeroed record; zeroes it */

    /* Sets `derived` (created) to the parameter descriptor of x in `mode`: same rank as x, packed. */
    int (*derive)(pbn_tensor *derived, const pbn_tensor *x, int mode);

    /* Bits of pbn_capability for x in `layout`, or 0 and the reason (static storage) in *why. */
    uint32_t (*capability)(int operation, int mode, int dtype, int layout, int rank, const char **why);

    /* Reads no memory: of the pointers in `call` only whether the statistics are NULL matters. */
    int (*workspace_size)(pbn_handle *handle, const pbn_call *call, size_t *bytes);
    int (*forward_training)(pbn_handle *handle, const pbn_call *call);
    int (*forward_inference)(pbn_handle *handle, const pbn_call *call);
    int (*backward)(pbn_handle *handle, const pbn_call *call);
    int (*axpby)(pbn_handle *handle, const pbn_call *call);
    int (*fill)(pbn_handle *handle, const pbn_call *call);
    int (*relu)(pbn_handle *handle, const pbn_call *call);
    int (*relu_backward)(pbn_handle *handle, const pbn_call *call);

    /* Plans of the batch-norm calls; NULL where the backend prepares none.
     * `algorithms`: the names plan_create takes beside "auto" and "fast", NULL-terminated. NULL where the backend has one
     *   way for every call: every plan then is of that way.
     * `numbered`: those of them that also take ":" and a digit, the number of a plan; likewise, or NULL.
     * plan_create: `algorithm` NULL is the entry point; no plan (*plan NULL, status 0) where planning saves it nothing.
     *   `call` has the descriptors, which outlive the plan, and the scalars; of its pointers only whether
     * the statistics are NULL matters, and the data pointers' alignment where they are not NULL (else 16 is assumed).
     * plan_info: bytes of workspace and of reserve; what "auto" chose and why, in storage of the plan.
     * plan_run: `call` as at creation, with pointers and workspace. */
    const char *const *algorithms;
    const char *const *numbered;
    int (*plan_create)(pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan);
    void (*plan_info)(const pbn_plan *plan, size_t *workspace, size_t *reserve, const char **algorithm,
                      const char **why);
    int (*plan_run)(pbn_handle *handle, pbn_plan *plan, const pbn_call *call);
    void (*plan_destroy)(pbn_plan *plan);
    /* Why the bits of `call` are not known to repeat at every equal call, in a sentence that names what does; NULL where
     * they do. `algorithm`: a name of plan_info, NULL for the entry point. NULL where nothing is known. */
    const char *(*unrepeated)(const pbn_call *call, const char *algorithm);

    /* The status that kernels of earlier calls recorded on the device, which the vendor then clears; `query` is a
     * pbn_query. NULL where kernels record none. */
    int (*runtime_error)(pbn_handle *handle, int query, int *recorded);

    /* Optional symbols by name, for reports: 1 present, 0 absent, -1 not one this backend knows. */
    int (*has_symbol)(const char *name);

    /* `stage` is a pbn_fork; called without the GIL, before a fork for as long as it takes. NULL: nothing to do. */
    void (*at_fork)(int stage);
} pbn_backend;

#define PBN_DECLARE(name) extern const pbn_backend pbn_backend_##name;
PBN_BACKENDS(PBN_DECLARE)
#undef PBN_DECLARE

#ifdef __cplusplus
}
#endif
#endif
