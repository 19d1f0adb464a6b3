/* The system's dynamic loader: the only file that knows the operating system.
 *
 * Libraries are opened RTLD_NOW | RTLD_LOCAL, so that two near-identical vendor libraries in
 * one process cannot answer for each other, and symbols are looked up on the opened handle only.
 */
#ifndef PYBNORM_DL_H
#define PYBNORM_DL_H

#ifndef _GNU_SOURCE
#error "define _GNU_SOURCE before any include: dlinfo needs it"
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "shim.h"

/* dlopen; what the file's constructors print to standard output goes to standard error, for the first is the caller's:
 * a report may be on its way there. The descriptor is the whole process's, so this is as short as it can be. */
static inline void *pbn_dl_quiet_open(const char *file, int flags) {
    void *handle;
    int error = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3), output;
    if (error < 0) error = open("/dev/null", O_WRONLY | O_CLOEXEC);
    fflush(stdout); /* what is C's and was printed before */
    output = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    if (output >= 0 && error >= 0) dup2(error, STDOUT_FILENO);
    handle = dlopen(file, flags);
    fflush(stdout);
    if (output >= 0) {
        dup2(output, STDOUT_FILENO);
        close(output);
    }
    if (error >= 0) close(error);
    return handle;
}

/* Fills lib->handle and lib->path, or lib->message with the loader's own text. */
static inline int pbn_dl_open(pbn_library *lib, const char *file, int no_load) {
    struct link_map *map = NULL;
    memset(lib, 0, sizeof *lib);
    if (file == NULL || file[0] == '\0') { /* dlopen(NULL) would be the program itself */
        snprintf(lib->message, sizeof lib->message, "no file name");
        return PBN_E_LIBRARY;
    }
    dlerror();
    lib->handle = no_load ? dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)
                          : pbn_dl_quiet_open(file, RTLD_NOW | RTLD_LOCAL);
    if (lib->handle == NULL) {
        const char *text = dlerror();
        /* Under RTLD_NOLOAD the loader's own text says that the file cannot be opened, which nobody tried. */
        snprintf(lib->message, sizeof lib->message, "%s", no_load || !text ? "not loaded in this process" : text);
        return PBN_E_LIBRARY;
    }
    if (dlinfo(lib->handle, RTLD_DI_LINKMAP, &map) == 0 && map != NULL && map->l_name[0] != '\0')
        snprintf(lib->path, sizeof lib->path, "%s", map->l_name);
    else
        snprintf(lib->path, sizeof lib->path, "%s", file);
    return PBN_OK;
}

/* Whether a library of this soname is in the process. */
static inline int pbn_dl_present(const char *soname) {
    void *handle = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
    if (handle != NULL)
        dlclose(handle);
    return handle != NULL;
}

/* Only for a library that turned out to be unusable, before any of its symbols is handed out. */
static inline void pbn_dl_discard(pbn_library *lib) {
    if (lib->handle != NULL)
        dlclose(lib->handle);
    lib->handle = NULL;
}

static inline void *pbn_dl_symbol(void *handle, const char *name) {
    return handle == NULL ? NULL : dlsym(handle, name);
}

/* Resolves one required symbol; the first absent one is named in lib->message. */
static inline int pbn_dl_require(pbn_library *lib, const char *name, void **slot) {
    *slot = pbn_dl_symbol(lib->handle, name);
    if (*slot == NULL) {
        snprintf(lib->message, sizeof lib->message, "symbol %s is missing", name);
        return PBN_E_SYMBOL;
    }
    return PBN_OK;
}

/* What a backend makes of a list of (result, name, parameters), LIST(REQUIRED, OPTIONAL), whose types are pbn_NAME_fn:
 *     struct { LIST(PBN_DL_MEMBER, PBN_DL_MEMBER) } api;           a pointer for each symbol
 *     LIST(PBN_DL_REQUIRE, PBN_DL_PROBE)                           fills `table->NAME` from `lib`, in a function that
 *                                                                  returns a status
 *     LIST(PBN_DL_PRESENT, PBN_DL_PRESENT)                         in has_symbol(name), of `api` */
#define PBN_DL_MEMBER(result, symbol, parameters) pbn_##symbol##_fn symbol;
#define PBN_DL_REQUIRE(result, symbol, parameters)                             \
    {                                                                          \
        void *address;                                                         \
        const int missing = pbn_dl_require(lib, #symbol, &address);            \
        if (missing != PBN_OK)                                                 \
            return missing;                                                    \
        memcpy(&table->symbol, &address, sizeof address);                      \
    }
#define PBN_DL_PROBE(result, symbol, parameters)                               \
    {                                                                          \
        void *const address = pbn_dl_symbol(lib->handle, #symbol);             \
        memcpy(&table->symbol, &address, sizeof address);                      \
    }
#define PBN_DL_PRESENT(result, symbol, parameters)                             \
    if (strcmp(name, #symbol) == 0)                                            \
        return api.symbol != NULL;

#endif
