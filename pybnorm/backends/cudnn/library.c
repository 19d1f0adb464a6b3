/* Loading cuDNN and its parts, and what its statuses mean. Part of adapter.c. */

/* ---- loading ---------------------------------------------------------------------------------- */

static int missing(pbn_library *lib, const char *symbol) {
    snprintf(lib->message, sizeof lib->message, "symbol %s is missing", symbol);
    return PBN_E_SYMBOL;
}

/* A part's soname; cuDNN 9's have the number of the file from 9 on, so that the next cuDNN finds its own. */
static void part_name(const char *file, const char *soname, char *name, size_t size) {
    const char *base = strrchr(file, '/'), *so = strstr(base != NULL ? base : file, ".so.");
    const long number = so != NULL ? strtol(so + 4, NULL, 10) : 0;
    const size_t stem = strlen(soname) - 1;
    if (soname[stem] == '9' && number > 9 && number < 1000)
        snprintf(name, size, "%.*s%ld", (int)stem, soname, number);
    else
        pbn_copy_text(name, size, soname);
}

/* libcudnn.so is a dispatcher: it opens its parts at first use, and when one is missing it prints and
 * abort()s the process (9.27, 8.9.7). So the parts that this file's calls reach are opened first.
 * The order is the one in which the dispatcher will find them: in the process, beside itself, elsewhere. */
static int open_part(pbn_library *lib, const char *of_9, pbn_library *found) {
    pbn_library part;
    char path[PBN_PATH_MAX], soname[64];
    const char *slash = strrchr(lib->path, '/');
    part_name(lib->path, of_9, soname, sizeof soname);
    int status = pbn_dl_open(&part, soname, 1);
    if (status != PBN_OK && slash != NULL) {
        int length = snprintf(path, sizeof path, "%.*s/%s", (int)(slash - lib->path), lib->path, soname);
        if (length > 0 && (size_t)length < sizeof path)
            status = pbn_dl_open(&part, path, 0);
    }
    if (status != PBN_OK)
        status = pbn_dl_open(&part, soname, 0);
    if (status == PBN_OK) {
        *found = part;
        return PBN_OK;
    }
    snprintf(lib->message, sizeof lib->message,
             "its part %s cannot be opened, and calling cuDNN without it would abort the process: %.*s", soname,
             (int)sizeof lib->message / 2, part.message);
    return PBN_E_LIBRARY;
}

typedef int (*version_check)(void);

static int open_parts(pbn_library *lib) {
    pbn_library part;
    /* The version cannot be asked before the parts are there; these exports tell it apart. */
    static const struct {
        const char *export_name, *part;
    } dispatchers[] = {
        {"cudnnGraphVersionCheck", "libcudnn_graph.so.9"},
        {"cudnnOpsVersionCheck", "libcudnn_ops.so.9"},
        {"cudnnOpsInferVersionCheck", "libcudnn_ops_infer.so.8"},
        {"cudnnOpsTrainVersionCheck", "libcudnn_ops_train.so.8"},
    };
    enum { COUNT = sizeof dispatchers / sizeof dispatchers[0] };
    version_check checks[COUNT];
    char paths[COUNT][PBN_PATH_MAX];
    for (size_t i = 0; i < COUNT; i++) {
        checks[i] = (version_check)pbn_dl_symbol(lib->handle, dispatchers[i].export_name);
        const int status = checks[i] != NULL ? open_part(lib, dispatchers[i].part, &part) : PBN_OK;
        if (status != PBN_OK)
            return status;
        pbn_copy_text(paths[i], sizeof paths[i], checks[i] != NULL ? part.path : "");
    }
    for (size_t i = 0; i < COUNT; i++) { /* once all are open: each asks the others for their versions */
        if (checks[i] == NULL || checks[i]() == 0)
            continue;
        snprintf(lib->message, sizeof lib->message,
                 "%s() says that its parts are of two versions; %.400s is the part that was opened",
                 dispatchers[i].export_name, paths[i]);
        return PBN_E_VERSION;
    }
    return PBN_OK;
}

static int resolve(pbn_library *lib, cudnn_api *table) {
#define PBN_RESOLVE(result, symbol, parameters)                                                                       \
    PBN_DL_PROBE(result, symbol, parameters)                                                                          \
    if (table->symbol == NULL)                                                                                        \
        return missing(lib, #symbol);
    PBN_CUDNN_SYMBOLS(PBN_RESOLVE, PBN_DL_PROBE)
#undef PBN_RESOLVE
    return PBN_OK;
}

static int ask_version(pbn_library *lib, cudnn_api *table) {
    size_t number = table->cudnnGetVersion(); /* 9.27.0 is 92700, 8.9.7 is 8907 */
    size_t unit = number >= 10000 ? 10000 : 1000;
    if (number < 1000000) {
        lib->version[0] = (int32_t)(number / unit);
        lib->version[1] = (int32_t)(number % unit / 100);
        lib->version[2] = (int32_t)(number % 100);
    }
    if (lib->version[0] < 8) {
        snprintf(lib->message, sizeof lib->message,
                 "cudnnGetVersion() returned %zu; this backend speaks cuDNN 8 and later", number);
        return PBN_E_VERSION;
    }
    table->major = lib->version[0] == 8 ? 8 : 9; /* a later one is spoken to as the newest that is known */
    return PBN_OK;
}

static int cudnn_load(const char *file, int no_load, pbn_library *out) {
    cudnn_api fresh = {0}; /* an earlier load stays in force unless this one succeeds */
    int status = pbn_dl_open(out, file, no_load);
    if (status != PBN_OK)
        return pbn_refuse(status, "the cuDNN library cannot be opened");
    status = resolve(out, &fresh);
    if (status == PBN_OK)
        status = open_parts(out);
    if (status == PBN_OK)
        status = ask_version(out, &fresh);
    if (status != PBN_OK) {
        pbn_dl_discard(out);
        return pbn_refuse(status, "the cuDNN library cannot be used");
    }
    api = fresh;
    memcpy(loaded_path, out->path, sizeof loaded_path);
    return PBN_OK;
}

static int cudnn_has_symbol(const char *name) {
    PBN_CUDNN_SYMBOLS(PBN_DL_PRESENT, PBN_DL_PRESENT)
    return -1;
}

/* ---- statuses --------------------------------------------------------------------------------- */

static const char *cudnn_status_name(int status) {
    const char *name = api.cudnnGetErrorString(status);
    return name != NULL ? name : "CUDNN_UNKNOWN_STATUS";
}

/* The class of a status that has one of its own; -1 for others. */
static int own_class(int status) {
#define PBN_CLASS_OF(name, value, family) {value, PBN_CLASS_##family},
    static const struct {
        int status, family;
    } of_8[] = {PBN_CUDNN8_STATUSES(PBN_CLASS_OF)}, of_9[] = {PBN_CUDNN9_STATUSES(PBN_CLASS_OF)};
#undef PBN_CLASS_OF
    for (size_t i = 0; api.major == 8 && i < sizeof of_8 / sizeof of_8[0]; i++)
        if (of_8[i].status == status)
            return of_8[i].family;
    for (size_t i = 0; api.major != 8 && i < sizeof of_9 / sizeof of_9[0]; i++)
        if (of_9[i].status == status)
            return of_9[i].family;
    return -1;
}

static int cudnn_status_class(int status) {
    int family = status == PBN_CUDNN_STATUS_SUCCESS ? PBN_CLASS_SUCCESS : own_class(status);
    if (family < 0 && api.major != 8 && status >= 2000)
        family = own_class(status / 1000 * 1000); /* the vendor's own rule for the family of a status */
    return family < 0 ? PBN_CLASS_INTERNAL : family;
}

static void cudnn_last_error(int status, char *text, size_t size) {
    text[0] = '\0';
    if (status < 0)
        pbn_copy_text(text, size, pbn_reason);
    else if (status > 0 && api.cudnnGetLastErrorString != NULL)
        api.cudnnGetLastErrorString(text, size);
    text[size - 1] = '\0';
}
