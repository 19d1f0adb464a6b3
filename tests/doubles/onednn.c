/* A libdnnl that answers what loading asks, and supports no primitive.
 * DOUBLE_VERSION: major * 1000000 + minor * 1000 + patch; DOUBLE_CPU_RUNTIME: dnnl_version_t's field.
 * DOUBLE_EXPORTS: a symbol more. DOUBLE_RECORDS: it makes primitives too, see onednn_records.h. */
#include <stdio.h>
#include <stdlib.h>
#include DOUBLE_BACKEND

#define DECLARE(result, name, parameters) result name parameters;
DOUBLE_SYMBOLS(DECLARE, DECLARE)

#ifndef DOUBLE_CPU_RUNTIME
#define DOUBLE_CPU_RUNTIME 2 /* OpenMP */
#endif

#ifdef DOUBLE_EXPORTS
void DOUBLE_EXPORTS(void) {}
#endif

enum { success = 0, unimplemented = 3 };

const pbn_dnnl_version *dnnl_version(void) {
    static const pbn_dnnl_version version = {
        DOUBLE_VERSION / 1000000, DOUBLE_VERSION / 1000 % 1000, DOUBLE_VERSION % 1000, "double", DOUBLE_CPU_RUNTIME, 0,
    };
    return &version;
}

#ifdef DOUBLE_RECORDS
#include "onednn_records.h"
#else
static char object; /* what every handle points to */
char double_driver[4096]; /* OpenCL's, as the environment named it when an engine was made */

int dnnl_engine_create(void **engine, int kind, size_t index) {
    const char *driver = getenv("OCL_ICD_FILENAMES");
    snprintf(double_driver, sizeof double_driver, "%s", driver != NULL ? driver : "");
    *engine = &object;
    return success;
}

int dnnl_engine_destroy(void *engine) {
    return engine == &object ? success : unimplemented;
}

int dnnl_memory_desc_create_with_strides(void **desc, int rank, const int64_t *dims, int data_type,
                                         const int64_t *strides) {
    *desc = &object;
    return success;
}

int dnnl_memory_desc_destroy(void *desc) {
    return desc == &object ? success : unimplemented;
}

int dnnl_batch_normalization_forward_primitive_desc_create(void **primitive_desc, void *engine, int prop_kind,
                                                           const void *src, const void *dst, float epsilon,
                                                           unsigned flags, const void *attr) {
    return unimplemented;
}
#endif
