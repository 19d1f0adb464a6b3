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
