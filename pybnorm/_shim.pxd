"""include/pybnorm/shim.h as Cython sees it."""

from libc.stdint cimport int32_t, int64_t, uint32_t

cdef extern from "pybnorm/shim.h" nogil:
    enum:
        PBN_CONTRACT
        PBN_MAX_RANK
        PBN_PATH_MAX
        PBN_TEXT_MAX
        PBN_FLOAT32
        PBN_FLOAT64
        PBN_FLOAT16
        PBN_BFLOAT16
        PBN_PER_ACTIVATION
        PBN_SPATIAL
        PBN_SPATIAL_PERSISTENT
        PBN_CHANNELS_FIRST
        PBN_CHANNELS_LAST
        PBN_STRIDED
        PBN_OP_DERIVE
        PBN_OP_FORWARD_TRAINING
        PBN_OP_FORWARD_INFERENCE
        PBN_OP_BACKWARD
        PBN_OP_AXPBY
        PBN_OP_FILL
        PBN_OP_RELU
        PBN_OP_RELU_BACKWARD
        PBN_DEVICE_CPU
        PBN_DEVICE_CUDA
        PBN_DEVICE_CUDA_HOST
        PBN_DEVICE_OPENCL
        PBN_DEVICE_VULKAN
        PBN_DEVICE_METAL
        PBN_DEVICE_VPI
        PBN_DEVICE_ROCM
        PBN_DEVICE_ROCM_HOST
        PBN_DEVICE_EXTENSION
        PBN_DEVICE_CUDA_MANAGED
        PBN_DEVICE_ONEAPI
        PBN_DEVICE_WEBGPU
        PBN_DEVICE_HEXAGON
        PBN_DEVICE_MAIA
        PBN_DEVICE_TRAINIUM
        PBN_CAP_RUNS
        PBN_CAP_BLEND_NATIVE
        PBN_CAP_BLEND_SCRATCH
        PBN_CAP_FOLDED
        PBN_CAP_HOST_STEPS
        PBN_CAP_BLEND_ROUNDS
        PBN_CAP_ACTIVATION
        PBN_CAP_WIDENED
        PBN_CAP_IN_PLACE
        PBN_CAP_INVERSE
        PBN_CAP_HALVES
        PBN_CAP_RESIDUAL
        PBN_CAP_OWN_PARAMETERS
        PBN_CAP_CONSTANTS
        PBN_ACTIVATION_NONE
        PBN_ACTIVATION_RELU
        PBN_ACTIVATION_CLIPPED_RELU
        PBN_ACTIVATION_CLAMP
        PBN_E_UNSUPPORTED
        PBN_E_NOT_LOADED
        PBN_E_SYMBOL
        PBN_E_LIBRARY
        PBN_E_VERSION
        PBN_E_ARGUMENT
        PBN_E_WORKSPACE
        PBN_E_MEMORY
        PBN_E_INTERNAL
        PBN_E_DEVICE
        PBN_CLASS_SUCCESS
        PBN_CLASS_BAD_PARAMETER
        PBN_CLASS_NOT_SUPPORTED
        PBN_CLASS_ALLOCATION
        PBN_CLASS_NOT_INITIALIZED
        PBN_CLASS_EXECUTION
        PBN_CLASS_VERSION
        PBN_CLASS_INTERNAL
        PBN_FORK_BEFORE
        PBN_FORK_CHILD

    struct pbn_handle:
        pass

    struct pbn_tensor:
        int32_t dtype
        int32_t rank
        int64_t *dims
        int64_t *strides
        void *vendor
        void *compute
        int32_t owned
        int32_t layout

    struct pbn_call:
        int32_t operation
        int32_t mode
        double alpha
        double beta
        double alpha_param
        double beta_param
        double factor
        double epsilon
        double share
        int32_t sums_only
        int32_t activation
        double activation_low
        double activation_high
        int32_t deterministic
        const pbn_tensor *x_desc
        const pbn_tensor *y_desc
        const pbn_tensor *dy_desc
        const pbn_tensor *dx_desc
        const pbn_tensor *param_desc
        const pbn_tensor *z_desc
        const pbn_tensor *dz_desc
        const void *x
        const void *dy
        const void *z
        void *y
        void *dx
        void *dz
        const void *scale
        const void *bias
        void *running_mean
        void *running_variance
        int32_t inverse
        void *saved_mean
        void *saved_inv_variance
        void *dscale
        void *dbias
        void *workspace
        size_t workspace_size
        void *reserve
        size_t reserve_size

    struct pbn_plan:
        pass

    struct pbn_library:
        void *handle
        int32_t *version
        char *path
        char *message

    struct pbn_search:
        const char *sonames
        const char *hint
        const char *loaded_names
        const char *pathfinder
        const char *rocm_sdk
        const char *rocm_sdk_needs
        const char *distributions
        const char *roots
        const char *folders
        const char *variables

    struct pbn_backend:
        int32_t contract
        int32_t device_type
        int32_t *also_reached
        const char *name
        const char *label
        pbn_search search
        int (*load)(const char *file, int no_load, pbn_library *out) noexcept nogil
        const char *(*status_name)(int status) noexcept nogil
        int (*status_class)(int status) noexcept nogil
        void (*last_error)(int status, char *text, size_t size) noexcept nogil
        int (*context_lost)(int status, char *text, size_t size) noexcept nogil
        int (*handle_device)(const pbn_handle *handle) noexcept nogil
        int (*device_count)() noexcept nogil
        int (*memory_device)(const void *address) noexcept nogil
        int (*card)(int device, char *text, size_t size) noexcept nogil
        int (*handle_create)(pbn_handle **handle) noexcept nogil
        int (*handle_borrow)(void *vendor, pbn_handle **handle) noexcept nogil
        int (*handle_destroy)(pbn_handle *handle) noexcept nogil
        void *(*handle_pointer)(const pbn_handle *handle) noexcept nogil
        int (*stream_set)(pbn_handle *handle, void *stream) noexcept nogil
        int (*stream_get)(pbn_handle *handle, void **stream) noexcept nogil
        int (*takes_by_time)(const pbn_handle *handle) noexcept nogil
        int (*far_from_zero)(const pbn_handle *handle, const pbn_call *call) noexcept nogil
        int (*tensor_create)(pbn_tensor *tensor) noexcept nogil
        int (*tensor_borrow)(void *vendor, pbn_tensor *tensor) noexcept nogil
        int (*tensor_set)(
            pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides
        ) noexcept nogil
        int (*tensor_get)(
            const pbn_tensor *tensor, int *dtype, int *rank, int64_t *dims, int64_t *strides
        ) noexcept nogil
        int (*tensor_size)(const pbn_tensor *tensor, size_t *bytes) noexcept nogil
        int (*tensor_destroy)(pbn_tensor *tensor) noexcept nogil
        int (*derive)(pbn_tensor *derived, const pbn_tensor *x, int mode) noexcept nogil
        uint32_t (*capability)(
            int operation, int mode, int dtype, int layout, int rank, const char **why
        ) noexcept nogil
        int (*workspace_size)(pbn_handle *handle, const pbn_call *call, size_t *bytes) noexcept nogil
        int (*forward_training)(pbn_handle *handle, const pbn_call *call) noexcept nogil
        int (*forward_inference)(pbn_handle *handle, const pbn_call *call) noexcept nogil
        int (*backward)(pbn_handle *handle, const pbn_call *call) noexcept nogil
        int (*axpby)(pbn_handle *handle, const pbn_call *call) noexcept nogil
        int (*fill)(pbn_handle *handle, const pbn_call *call) noexcept nogil
        int (*relu)(pbn_handle *handle, const pbn_call *call) noexcept nogil
        int (*relu_backward)(pbn_handle *handle, const pbn_call *call) noexcept nogil
        const char *const *algorithms
        const char *const *numbered
        int (*plan_create)(
            pbn_handle *handle, const pbn_call *call, const char *algorithm, pbn_plan **plan
        ) noexcept nogil
        void (*plan_info)(
            const pbn_plan *plan, size_t *workspace, size_t *reserve, const char **algorithm, const char **why
        ) noexcept nogil
        int (*plan_run)(pbn_handle *handle, pbn_plan *plan, const pbn_call *call) noexcept nogil
        void (*plan_destroy)(pbn_plan *plan) noexcept nogil
        int (*runtime_error)(pbn_handle *handle, int query, int *recorded) noexcept nogil
        const char *(*unrepeated)(const pbn_call *call, const char *algorithm) noexcept nogil
        int (*has_symbol)(const char *name) noexcept nogil
        void (*at_fork)(int stage) noexcept nogil
