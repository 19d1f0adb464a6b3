/* native: batch norm by kernels of our own, for every mode, layout and dtype of the API, without a vendor's library.
 *
 * This file has what a backend must answer; problem.h how a call's tensors are folded; cpu.c and kernels.inc compute.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pybnorm/adapter.h"

#include "descriptors.h"
#include "problem.h"
#include "threads.h"

/* ------------------------------------------------------------------ the library is this module */

static void choose_kernels(void);

static int load(const char *file, int no_load, pbn_library *out) {
    (void)no_load;
    memset(out, 0, sizeof *out);
    out->version[1] = 1; /* of the package */
    pbn_copy_text(out->path, sizeof out->path, file);
    find_openmp();
    choose_kernels();
    return PBN_OK;
}

static const char *status_name(int status) {
    (void)status;
    return "not a status of native";
}

static int status_class(int status) { return status == PBN_OK ? PBN_CLASS_SUCCESS : PBN_CLASS_INTERNAL; }

static void last_error(int status, char *text, size_t size) {
    pbn_copy_text(text, size, status < 0 ? pbn_reason : NULL);
}

static int has_symbol(const char *name) {
    (void)name;
    return -1;
}

/* ------------------------------------------------------------------ handles hold nothing of a vendor's */

struct pbn_handle {
    void *pointer;
};

static int handle_borrow(void *pointer, pbn_handle **handle) {
    const int status = pbn_new_handle(sizeof **handle, handle);
    if (status == PBN_OK)
        (*handle)->pointer = pointer;
    return status;
}

static int handle_create(pbn_handle **handle) {
    const int status = handle_borrow(NULL, handle);
    if (status == PBN_OK)
        (*handle)->pointer = *handle;
    return status;
}

static int handle_destroy(pbn_handle *handle) {
    free(handle);
    return PBN_OK;
}

static void *handle_pointer(const pbn_handle *handle) { return handle->pointer; }

static int handle_device(const pbn_handle *handle) {
    (void)handle;
    return 0;
}

static int device_count(void) { return 1; }

static int stream_set(pbn_handle *handle, void *stream) {
    (void)handle;
    return stream == NULL ? PBN_OK : pbn_refuse(PBN_E_UNSUPPORTED, "a CPU has no streams");
}

static int stream_get(pbn_handle *handle, void **stream) {
    (void)handle;
    *stream = NULL;
    return PBN_OK;
}

/* ------------------------------------------------------------------ what runs */

#include "blend.c"
#include "cpu.c"
#include "elementwise.c"

const pbn_backend pbn_backend_native = {
    .contract = PBN_CONTRACT,
    .device_type = PBN_DEVICE_CPU,
    .also_reached = {PBN_DEVICE_CUDA_HOST, PBN_DEVICE_ROCM_HOST},
    .name = "native",
    .label = "native",
    .search = {.variables = "OMP_ GOMP_ KMP_"},
    PBN_LIBRARY_AND_HANDLES(),
    .stream_set = stream_set,
    .stream_get = stream_get,
    PBN_TENSORS(),
    .workspace_size = workspace_size,
    .forward_training = compute,
    .forward_inference = compute,
    .backward = compute,
    .axpby = axpby,
    .fill = fill,
    .relu = relu,
    .relu_backward = relu,
    .algorithms = algorithm_names,
    .plan_create = plan_create,
    .plan_info = plan_info,
    .plan_run = plan_run,
    .plan_destroy = plan_destroy,
    .unrepeated = unrepeated,
    .has_symbol = has_symbol,
    .at_fork = threads_at_fork,
};
