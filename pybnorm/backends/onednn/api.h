/* oneDNN's C API as it has been since 3.0: numbers, structures and prototypes, and nothing of ours.
 * Readable as C and as C++: tests/abi compares it with the vendor's headers, and the test doubles are made from it.
 */
#ifndef PYBNORM_ONEDNN_API_H
#define PYBNORM_ONEDNN_API_H

#include <stddef.h>
#include <stdint.h>

/* C(vendor's name, number, class of ours): all of dnnl_status_t. */
#define PBN_DNNL_STATUSES(C) \
    C(dnnl_success, 0, SUCCESS) C(dnnl_out_of_memory, 1, ALLOCATION) C(dnnl_invalid_arguments, 2, BAD_PARAMETER) \
    C(dnnl_unimplemented, 3, NOT_SUPPORTED) C(dnnl_last_impl_reached, 4, NOT_SUPPORTED) \
    C(dnnl_runtime_error, 5, EXECUTION) C(dnnl_not_required, 6, INTERNAL) C(dnnl_invalid_graph, 7, BAD_PARAMETER) \
    C(dnnl_invalid_graph_op, 8, BAD_PARAMETER) C(dnnl_invalid_shape, 9, BAD_PARAMETER) \
    C(dnnl_invalid_data_type, 10, BAD_PARAMETER)

/* C(vendor's name, number) */
#define PBN_DNNL_CONSTANTS(C) \
    C(dnnl_f16, 1) C(dnnl_bf16, 2) C(dnnl_f32, 3) C(dnnl_f64, 7) C(dnnl_blocked, 2) C(dnnl_cpu, 1) \
    C(dnnl_stream_default_flags, 1) C(dnnl_forward_training, 64) C(dnnl_forward_inference, 96) C(dnnl_backward, 128) \
    C(dnnl_normalization_flags_none, 0) C(dnnl_use_global_stats, 1) C(dnnl_use_scale, 2) C(dnnl_use_shift, 4) \
    C(dnnl_scratchpad_mode_user, 1) C(dnnl_query_scratchpad_md, 136) C(dnnl_query_strides, 14) \
    C(dnnl_query_ndims_s32, 256) C(dnnl_query_dims, 257) C(dnnl_query_data_type, 258) \
    C(dnnl_query_submemory_offset_s64, 259) C(dnnl_query_padded_dims, 260) C(dnnl_query_format_kind, 262) \
    C(dnnl_query_inner_nblks_s32, 263) C(DNNL_MAX_NDIMS, 12) C(DNNL_RUNTIME_NONE, 0) C(DNNL_RUNTIME_OMP, 2) \
    C(DNNL_RUNTIME_SYCL, 512) C(DNNL_ARG_SRC, 1) C(DNNL_ARG_DST, 17) C(DNNL_ARG_MEAN, 49) C(DNNL_ARG_VARIANCE, 50) \
    C(DNNL_ARG_SCALE, 51) C(DNNL_ARG_SHIFT, 52) C(DNNL_ARG_SCRATCHPAD, 80) C(DNNL_ARG_DIFF_SRC, 129) \
    C(DNNL_ARG_DIFF_DST, 145) C(DNNL_ARG_DIFF_SCALE, 255) C(DNNL_ARG_DIFF_SHIFT, 256)

typedef struct pbn_dnnl_version { /* dnnl_version_t */
    int major, minor, patch;
    const char *hash;
    unsigned cpu_runtime, gpu_runtime;
} pbn_dnnl_version;

typedef struct pbn_dnnl_exec_arg { /* dnnl_exec_arg_t */
    int arg;
    void *memory;
} pbn_dnnl_exec_arg;

/* (result, name, (parameters)): enums are int, opaque handles void *. */
#define PBN_DNNL_SYMBOLS(REQUIRED, OPTIONAL) \
    REQUIRED(const pbn_dnnl_version *, dnnl_version, (void)) \
    REQUIRED(int, dnnl_engine_create, (void **engine, int kind, size_t index)) \
    REQUIRED(int, dnnl_engine_destroy, (void *engine)) \
    REQUIRED(int, dnnl_engine_get_kind, (void *engine, int *kind)) \
    REQUIRED(int, dnnl_stream_create, (void **stream, void *engine, unsigned flags)) \
    REQUIRED(int, dnnl_stream_destroy, (void *stream)) \
    REQUIRED(int, dnnl_stream_get_engine, (const void *stream, void **engine)) \
    REQUIRED(int, dnnl_stream_wait, (void *stream)) \
    REQUIRED(int, dnnl_memory_create, (void **memory, const void *desc, void *engine, void *data)) \
    REQUIRED(int, dnnl_memory_destroy, (void *memory)) \
    REQUIRED(int, dnnl_memory_set_data_handle, (void *memory, void *data)) \
    REQUIRED(int, dnnl_memory_desc_create_with_strides, \
             (void **desc, int rank, const int64_t *dims, int data_type, const int64_t *strides)) \
    REQUIRED(int, dnnl_memory_desc_destroy, (void *desc)) \
    REQUIRED(int, dnnl_memory_desc_query, (const void *desc, int what, void *result)) \
    REQUIRED(size_t, dnnl_memory_desc_get_size, (const void *desc)) \
    REQUIRED(int, dnnl_primitive_attr_create, (void **attr)) \
    REQUIRED(int, dnnl_primitive_attr_destroy, (void *attr)) \
    REQUIRED(int, dnnl_primitive_attr_set_scratchpad_mode, (void *attr, int mode)) \
    REQUIRED(int, dnnl_batch_normalization_forward_primitive_desc_create, \
             (void **primitive_desc, void *engine, int prop_kind, const void *src, const void *dst, float epsilon, \
              unsigned flags, const void *attr)) \
    REQUIRED(int, dnnl_batch_normalization_backward_primitive_desc_create, \
             (void **primitive_desc, void *engine, int prop_kind, const void *diff_src, const void *diff_dst, \
              const void *src, float epsilon, unsigned flags, const void *forward_hint, const void *attr)) \
    REQUIRED(const void *, dnnl_primitive_desc_query_md, (const void *primitive_desc, int what, int index)) \
    REQUIRED(int, dnnl_primitive_desc_destroy, (void *primitive_desc)) \
    REQUIRED(int, dnnl_primitive_create, (void **primitive, const void *primitive_desc)) \
    REQUIRED(int, dnnl_primitive_execute, \
             (const void *primitive, void *stream, int count, const pbn_dnnl_exec_arg *args)) \
    REQUIRED(int, dnnl_primitive_destroy, (void *primitive)) \
    OPTIONAL(const char *, dnnl_status2str, (int status))

#define PBN_DNNL_TYPEDEF(result, name, parameters) typedef result(*pbn_##name##_fn) parameters;
PBN_DNNL_SYMBOLS(PBN_DNNL_TYPEDEF, PBN_DNNL_TYPEDEF)
#undef PBN_DNNL_TYPEDEF

#endif
