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
#include <link.h>
#include <stdio.h>
#include <string.h>

#include "shim.h"

/* Fills lib->handle and lib->path, or lib->message with the loader's own text. */
static inline int pbn_dl_open(pbn_library *lib, const char *file, int no_load) {
    struct link_map *map = NULL;
    memset(lib, 0, sizeof *lib);
    if (file == NULL || file[0] == '\0') { /* dlopen(NULL) would be the program itself */
        snprintf(lib->message, sizeof lib->message, "no file name");
        return PBN_E_LIBRARY;
    }
    dlerror();
    lib->handle = dlopen(file, RTLD_NOW | RTLD_LOCAL | (no_load ? RTLD_NOLOAD : 0));
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

#endif
