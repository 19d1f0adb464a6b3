/* Beside a double that is compiled with -finstrument-functions: a line "function device" for each entry into one of its
 * exported functions, device being the one that is current on the thread. DOUBLE_PLACE: the function that says it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define HIDDEN __attribute__((no_instrument_function, visibility("hidden"))) /* the C library has hooks of these names */

char double_places[1 << 16];

__attribute__((no_instrument_function)) static int current(void) {
    static int (*ask)(int *);
    int device = -1;
    if (ask == NULL) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        *(void **)&ask = dlsym(driver != NULL ? driver : RTLD_DEFAULT, DOUBLE_PLACE);
    }
    return ask != NULL && ask(&device) == 0 ? device : -1;
}

HIDDEN void __cyg_profile_func_enter(void *function, void *site) {
    const size_t used = strlen(double_places);
    Dl_info found;
    if (dladdr(function, &found) != 0 && found.dli_saddr == function && strncmp(found.dli_sname, "hip", 3) != 0)
        snprintf(double_places + used, sizeof double_places - used, "%s %d\n", found.dli_sname, current());
}
HIDDEN void __cyg_profile_func_exit(void *function, void *site) {}
