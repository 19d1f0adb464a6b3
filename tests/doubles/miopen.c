/* A libMIOpen that answers what loading asks. DOUBLE_VERSION: major * 1000000 + minor * 1000 + patch.
 * DOUBLE_COMPUTES: it also computes, see miopen_computes.h. */
#include DOUBLE_BACKEND

#define DECLARE(result, name, parameters) result name parameters;
DOUBLE_SYMBOLS(DECLARE, DECLARE)

int miopenGetVersion(size_t *major, size_t *minor, size_t *patch) {
    *major = DOUBLE_VERSION / 1000000;
    *minor = DOUBLE_VERSION / 1000 % 1000;
    *patch = DOUBLE_VERSION % 1000;
    return 0;
}

const char *miopenGetErrorString(int status) {
    return status == 0 ? "miopenStatusSuccess" : status == 98 ? "\xff\xfe" : status == 99 ? NULL : "miopenStatusDouble";
}

#ifdef DOUBLE_COMPUTES
#include "miopen_computes.h"
#endif
