/* cuDNN 8 and 9: the state that all files of this folder share, and the backend's table. The one translation unit of
 * the folder: the other files are included below.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <float.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "pybnorm/adapter.h"
#include "pybnorm/dl.h"
#include "api.h"

struct pbn_handle {
    void *vendor;
    int owned;
    void *context; /* CUDA's, of the device that the vendor's handle was made for; NULL if it is not known */
    int device;
};

typedef struct cudnn_api {
    int major; /* 0: nothing loaded */
    PBN_CUDNN_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} cudnn_api;

static cudnn_api api;
static const int dtypes[] = {PBN_CUDNN_DATA_FLOAT, PBN_CUDNN_DATA_DOUBLE, PBN_CUDNN_DATA_HALF, PBN_CUDNN_DATA_BFLOAT16};
static char loaded_path[PBN_PATH_MAX]; /* of the library that `api` is of */

static const char rank2_in_8[] = "cuDNN 8 has no tensor descriptor of rank 2; describe the tensor as (N, C, 1, 1)";
static const char not_mergeable[] =
    "cuDNN computes on rank 4 and 5 only, and the spatial axes of this rank 6 to 8 tensor are not mutually contiguous, "
    "so they cannot be merged into one";

/* cuDNN 9's text stays until someone reads it, whoever's failure it was: another user of the library
 * on this thread may have left one. */
static inline void forget_vendor_text(void) {
    char text[1];
    if (api.cudnnGetLastErrorString != NULL)
        api.cudnnGetLastErrorString(text, sizeof text);
}

#include "library.c"
#include "handles.c"
#include "descriptors.c"
#include "calls.c"
#include "graph.c"
#include "plans.c"

PBN_CALL_THERE(cudnn_forward_training)
PBN_CALL_THERE(cudnn_forward_inference)
PBN_CALL_THERE(cudnn_backward)
PBN_CALL_THERE(cudnn_axpby)
PBN_CALL_THERE(cudnn_fill)
PBN_CALL_THERE(cudnn_relu)
PBN_CALL_THERE(cudnn_relu_backward)
PBN_THERE(cudnn_stream_set, (pbn_handle * handle, void *stream), (handle, stream))
PBN_THERE(cudnn_stream_get, (pbn_handle * handle, void **stream), (handle, stream))
PBN_THERE(cudnn_runtime_error, (pbn_handle * handle, int query, int *recorded), (handle, query, recorded))
PBN_THERE(cudnn_plan_create, (pbn_handle * handle, const pbn_call *call, const char *algorithm, pbn_plan **plan),
          (handle, call, algorithm, plan))
PBN_THERE(cudnn_plan_run, (pbn_handle * handle, pbn_plan *plan, const pbn_call *call), (handle, plan, call))

static int cudnn_plan_create_or_none(pbn_handle *handle, const pbn_call *call, const char *algorithm,
                                     pbn_plan **plan) {
    *plan = NULL;
    return algorithm == NULL ? PBN_OK : cudnn_plan_create_there(handle, call, algorithm, plan);
}

static void cudnn_plan_destroy_there(pbn_plan *plan) {
    int before;
    go_to(plan->context, &before); /* whether or not it is still there */
    cudnn_plan_destroy(plan);
    come_back(before);
}

const pbn_backend pbn_backend_cudnn = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_CUDA,
    .also_reached = {PBN_DEVICE_CUDA_MANAGED},
    .name = "cudnn",
    .label = "cuDNN",
    .search = {.sonames = "libcudnn.so.9 libcudnn.so.8",
               .hint = "pip install nvidia-cudnn-cu13 (or -cu12, as the driver needs), or your distribution's cuDNN 9",
               .pathfinder = "cudnn",
               .distributions = "nvidia-cudnn-cu13 nvidia-cudnn-cu12 nvidia-cudnn-cu11",
               .roots = "CUDNN_PATH CUDA_PATH CUDA_HOME",
               .variables = "CUDNN_ NVIDIA_TF32_OVERRIDE CUDA_FORCE_ CUDA_DISABLE_ CUDA_MODULE_LOADING"},
    PBN_LIBRARY_AND_HANDLES(cudnn_),
    .context_lost = cudnn_context_lost,
    .memory_device = cudnn_memory_device,
    .stream_set = cudnn_stream_set_there,
    .stream_get = cudnn_stream_get_there,
    PBN_TENSORS(cudnn_),
    .workspace_size = cudnn_workspace_size,
    .forward_training = cudnn_forward_training_there,
    .forward_inference = cudnn_forward_inference_there,
    .backward = cudnn_backward_there,
    .axpby = cudnn_axpby_there,
    .fill = cudnn_fill_there,
    .relu = cudnn_relu_there,
    .relu_backward = cudnn_relu_backward_there,
    .algorithms = algorithm_names,
    .numbered = numbered_names,
    .plan_create = cudnn_plan_create_or_none, /* planning saves the entry points nothing */
    .plan_info = cudnn_plan_info,
    .plan_run = cudnn_plan_run_there,
    .plan_destroy = cudnn_plan_destroy_there,
    .runtime_error = cudnn_runtime_error_there,
    .unrepeated = cudnn_unrepeated,
    .has_symbol = cudnn_has_symbol,
};
