/* MIOpen (ROCm): the state that all files of this folder share, and the backend's table. The one translation unit of the
 * folder: the other files are included below.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "pybnorm/adapter.h"
#include "pybnorm/dl.h"
#include "api.h"

typedef struct symbols {
    PBN_MIOPEN_SYMBOLS(PBN_DL_MEMBER, PBN_DL_MEMBER)
} symbols;

static symbols api; /* all zero until load has succeeded */
static int loaded;  /* its version, 100 * major + minor */

#include "library.c"
#include "descriptors.c"
#include "copies.c"
#include "calls.c"

PBN_CALL_THERE(forward_training)
PBN_CALL_THERE(forward_inference)
PBN_CALL_THERE(backward)
PBN_CALL_THERE(axpby)
PBN_CALL_THERE(fill)
PBN_CALL_THERE(relu)
PBN_THERE(stream_set, (pbn_handle * handle, void *stream), (handle, stream))
PBN_THERE(stream_get, (pbn_handle * handle, void **stream), (handle, stream))
PBN_THERE(takes_by_time, (const pbn_handle *handle), (handle))
PBN_THERE(far_from_zero, (const pbn_handle *handle, const pbn_call *call), (handle, call))

const pbn_backend pbn_backend_miopen = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_ROCM,
    .name = "miopen",
    .label = "MIOpen",
    .search = {.sonames = "libMIOpen.so.1",
               .hint = "install ROCm's MIOpen (package miopen-hip, Debian and Ubuntu: libmiopen1), or AMD's "
                       "rocm[libraries] wheels",
               .loaded_names = "libMIOpen.so", /* carried, and linked to, by PyTorch's ROCm wheels */
               .rocm_sdk = "miopen",
               .rocm_sdk_needs = "amdhip64 amd_comgr hiprtc roctx64 hipblas hipblaslt hiprand",
               .roots = "ROCM_PATH ROCM_HOME HIP_PATH",
               .folders = "/opt/rocm/core*/lib /opt/rocm/lib /opt/rocm-*/lib",
               .variables = "MIOPEN_ HSA_ HIP_ AMD_ ROCM_"},
    PBN_LIBRARY_AND_HANDLES(),
    .memory_device = memory_device,
    .card = card,
    .stream_set = stream_set_there,
    .stream_get = stream_get_there,
    .takes_by_time = takes_by_time_there,
    .far_from_zero = far_from_zero_there,
    PBN_TENSORS(),
    .workspace_size = workspace_size,
    .forward_training = forward_training_there,
    .forward_inference = forward_inference_there,
    .backward = backward_there,
    .axpby = axpby_there,
    .fill = fill_there,
    .relu = relu_there,
    .relu_backward = relu_there,
    .has_symbol = has_symbol,
};
