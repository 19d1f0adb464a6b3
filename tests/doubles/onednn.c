/* A libdnnl that answers what loading asks, keeps the rules of oneDNN's objects and computes nothing.
 * DOUBLE_VERSION: major * 1000000 + minor * 1000 + patch; DOUBLE_CPU_RUNTIME: dnnl_version_t's field.
 * DOUBLE_EXPORTS: a symbol more.
 *
 * double_live counts objects that exist, double_primitives those primitives that were made. The call that comes when
 * double_fails_in has been counted down to 0 returns double_status. Everything of one execution is of one engine.
 * What engines and memory descriptors say of themselves: double_kind, -_format, -_blocks, -_offset, -_padding.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include DOUBLE_BACKEND

#define DECLARE(result, name, parameters) result name parameters;
DOUBLE_SYMBOLS(DECLARE, DECLARE)

#ifndef DOUBLE_CPU_RUNTIME
#define DOUBLE_CPU_RUNTIME 2 /* OpenMP */
#endif

#ifdef DOUBLE_EXPORTS
void DOUBLE_EXPORTS(void) {}
#endif

enum { success = 0 };

const pbn_dnnl_version *dnnl_version(void) {
    static const pbn_dnnl_version version = {
        DOUBLE_VERSION / 1000000, DOUBLE_VERSION / 1000 % 1000, DOUBLE_VERSION % 1000, "double", DOUBLE_CPU_RUNTIME, 0,
    };
    return &version;
}

struct object {
    struct object *engine;
    int rank, dtype;
    int64_t dims[12], strides[12];
};

int double_live, double_primitives, double_fails_in, double_status;
char double_driver[4096]; /* OpenCL's, as the environment named it when an engine was made */
int double_kind = 1, double_format = 2, double_blocks, double_offset, double_padding; /* cpu, blocked */

static int made(void **object, const void *engine) {
    if (double_fails_in > 0 && --double_fails_in == 0)
        return double_status;
    struct object *o = calloc(1, sizeof *o);
    o->engine = (struct object *)(uintptr_t)engine;
    *object = o;
    double_live++;
    return success;
}
static int gone(void *object) {
    if (object == NULL)
        abort();
    free(object);
    double_live--;
    return success;
}
static int counted(void) {
    return double_fails_in > 0 && --double_fails_in == 0 ? double_status : success;
}

const char *dnnl_status2str(int status) {
    return status == 98 ? "\xff\xfe" : NULL;
}
int dnnl_engine_create(void **engine, int kind, size_t index) {
    const char *driver = getenv("OCL_ICD_FILENAMES");
    snprintf(double_driver, sizeof double_driver, "%s", driver != NULL ? driver : "");
    return made(engine, NULL);
}
int dnnl_engine_destroy(void *engine) { return gone(engine); }
int dnnl_engine_get_kind(void *engine, int *kind) {
    *kind = double_kind;
    return counted();
}
int dnnl_stream_create(void **stream, void *engine, unsigned flags) { return made(stream, engine); }
int dnnl_stream_destroy(void *stream) { return gone(stream); }
int dnnl_stream_get_engine(const void *stream, void **engine) {
    *engine = ((const struct object *)stream)->engine;
    return counted();
}
int dnnl_stream_wait(void *stream) { return counted(); }

int dnnl_memory_desc_create_with_strides(void **desc, int rank, const int64_t *dims, int data_type,
                                         const int64_t *strides) {
    int status = made(desc, NULL);
    if (status != success)
        return status;
    struct object *md = *desc;
    md->rank = rank, md->dtype = data_type;
    memcpy(md->dims, dims, sizeof *dims * (size_t)rank);
    memcpy(md->strides, strides, sizeof *strides * (size_t)rank);
    return success;
}
int dnnl_memory_desc_destroy(void *desc) { return gone(desc); }
int dnnl_memory_desc_query(const void *desc, int what, void *result) {
    const struct object *md = desc;
    switch (what) {
    case 262: *(int *)result = double_format; break;
    case 263: *(int *)result = double_blocks; break;
    case 259: *(int64_t *)result = double_offset; break;
    case 256: *(int *)result = md->rank; break;
    case 258: *(int *)result = md->dtype; break;
    case 257: *(const int64_t **)result = md->dims; break;
    case 260: *(const int64_t **)result = md->dims + double_padding; break; /* another axis' */
    case 14: *(const int64_t **)result = md->strides; break;
    default: abort();
    }
    return success;
}
size_t dnnl_memory_desc_get_size(const void *desc) { return 4096; }
int dnnl_memory_create(void **memory, const void *desc, void *engine, void *data) { return made(memory, engine); }
int dnnl_memory_destroy(void *memory) { return gone(memory); }
int dnnl_memory_set_data_handle(void *memory, void *data) { return counted(); }

int dnnl_primitive_attr_create(void **attr) { return made(attr, NULL); }
int dnnl_primitive_attr_destroy(void *attr) { return gone(attr); }
int dnnl_primitive_attr_set_scratchpad_mode(void *attr, int mode) { return counted(); }
int dnnl_batch_normalization_forward_primitive_desc_create(void **primitive_desc, void *engine, int prop_kind,
                                                           const void *src, const void *dst, float epsilon,
                                                           unsigned flags, const void *attr) {
    return made(primitive_desc, engine);
}
int dnnl_batch_normalization_backward_primitive_desc_create(void **primitive_desc, void *engine, int prop_kind,
                                                            const void *diff_src, const void *diff_dst,
                                                            const void *src, float epsilon, unsigned flags,
                                                            const void *forward_hint, const void *attr) {
    return made(primitive_desc, engine);
}
const void *dnnl_primitive_desc_query_md(const void *primitive_desc, int what, int index) {
    static const struct object scratchpad;
    return &scratchpad;
}
int dnnl_primitive_desc_destroy(void *primitive_desc) { return gone(primitive_desc); }
int dnnl_primitive_create(void **primitive, const void *primitive_desc) {
    double_primitives++;
    return made(primitive, ((const struct object *)primitive_desc)->engine);
}
int dnnl_primitive_execute(const void *primitive, void *stream, int count, const pbn_dnnl_exec_arg *args) {
    const struct object *engine = ((const struct object *)primitive)->engine;
    if (((struct object *)stream)->engine != engine)
        return 5; /* dnnl_runtime_error */
    for (int i = 0; i < count; i++)
        if (((struct object *)args[i].memory)->engine != engine)
            return 5;
    return counted();
}
int dnnl_primitive_destroy(void *primitive) { return gone(primitive); }
