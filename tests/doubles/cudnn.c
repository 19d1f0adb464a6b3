/* A libcudnn that answers what loading asks. DOUBLE_VERSION: cudnnGetVersion()'s number.
 * DOUBLE_RECORDS: it also has descriptors and batch-norm calls, see cudnn_records.h; DOUBLE_COMPUTES: and they compute,
 * see cudnn_computes.h. */
#include DOUBLE_BACKEND

#define DECLARE(result, name, parameters) result name parameters;
DOUBLE_SYMBOLS(DECLARE, DECLARE)

size_t cudnnGetVersion(void) { return DOUBLE_VERSION; }

const char *cudnnGetErrorString(int status) { return status == 0 ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_DOUBLE"; }

#ifdef DOUBLE_MISMATCH /* a dispatcher, and what it says of the versions of its parts */
int cudnnGraphVersionCheck(void) { return 0; }
int cudnnOpsVersionCheck(void) { return DOUBLE_MISMATCH; }
#endif
#ifdef DOUBLE_RECORDS
#include "cudnn_records.h"
#endif
#ifdef DOUBLE_COMPUTES
#include "cudnn_computes.h"
#endif
#ifdef DOUBLE_STREAMS /* handles that remember their stream, and how often it was set */
static void *the_stream;
int double_sets;

int cudnnCreate(void **handle) {
    static int it;
    *handle = &it;
    return 0;
}

void cudnnGetLastErrorString(char *text, size_t size) {
    if (size != 0)
        *text = 0;
}

int cudnnDestroy(void *handle) { return handle == NULL; }

int cudnnSetStream(void *handle, void *stream) {
    the_stream = stream;
    ++double_sets;
    return 0;
}

int cudnnGetStream(void *handle, void **stream) {
    *stream = the_stream;
    return 0;
}
#endif
