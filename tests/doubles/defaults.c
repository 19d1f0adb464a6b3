/* Every symbol of one vendor's interface, so that a double can be loaded; calling one that the
 * double's own file does not define ends the process. Compiled by build.py with
 *   DOUBLE_BACKEND  the file of the backend that has the vendor's prototypes
 *   DOUBLE_SYMBOLS  the adapter's list of symbols
 */
#include DOUBLE_BACKEND

#include <stdio.h>
#include <stdlib.h>

static _Noreturn void unexpected(const char *name) {
    fprintf(stderr, "test double: %s was called and is not defined\n", name);
    abort();
}

#define DEFAULT(result, name, parameters) \
    result name parameters;               \
    __attribute__((weak)) result name parameters { unexpected(#name); }
DOUBLE_SYMBOLS(DEFAULT, DEFAULT)
