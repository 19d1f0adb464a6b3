/* A stand-in for libamd_comgr.so.3, the compiler library of ROCm 7: of what libMIOpen.so.1 asks for, "compile OpenCL" is
 * clstub.sh, and the steps after it pass its output on. Every other action answers "invalid argument". */
#define _GNU_SOURCE
#include "compile_stub.h"

enum { SUCCESS = 0, ERROR = 1, INVALID_ARGUMENT = 2, OUT_OF_RESOURCES = 3 };
enum { SOURCE = 0x1, LOG = 0x5, BITCODE = 0x6, RELOCATABLE = 0x7, EXECUTABLE = 0x8 };
enum { ADD_HEADERS = 0x1, CODEGEN = 0x4, LINK = 0x7, COMPILE = 0xC };
enum { OPENCL_1_2 = 1, OPENCL_2_0 = 2 };

typedef struct {
    uint64_t handle;
} handle;

struct data {
    int kind, references;
    char *name;
    struct bytes bytes;
};

struct set {
    size_t count;
    struct data **items;
};

struct action {
    int language;
    size_t count;
    char **options;
};

#define DATA(h) ((struct data *)(uintptr_t)(h).handle)
#define SET(h) ((struct set *)(uintptr_t)(h).handle)
#define ACTION(h) ((struct action *)(uintptr_t)(h).handle)

API int amd_comgr_status_string(int status, const char **text);
API void amd_comgr_get_version(size_t *major, size_t *minor);
API int amd_comgr_create_data(int kind, handle *out);
API int amd_comgr_release_data(handle h);
API int amd_comgr_set_data(handle h, size_t size, const char *bytes);
API int amd_comgr_set_data_name(handle h, const char *name);
API int amd_comgr_get_data(handle h, size_t *size, char *bytes);
API int amd_comgr_create_data_set(handle *out);
API int amd_comgr_destroy_data_set(handle h);
API int amd_comgr_data_set_add(handle set, handle h);
API int amd_comgr_action_data_count(handle set, int kind, size_t *count);
API int amd_comgr_action_data_get_data(handle set, int kind, size_t index, handle *out);
API int amd_comgr_create_action_info(handle *out);
API int amd_comgr_destroy_action_info(handle h);
API int amd_comgr_action_info_set_isa_name(handle h, const char *name);
API int amd_comgr_action_info_set_language(handle h, int language);
API int amd_comgr_action_info_set_logging(handle h, _Bool logging);
API int amd_comgr_action_info_set_option_list(handle h, const char *options[], size_t count);
API int amd_comgr_do_action(int kind, handle info, handle input, handle output);

int amd_comgr_status_string(int status, const char **text) {
    static const char *const texts[] = {"SUCCESS", "ERROR", "INVALID_ARGUMENT", "OUT_OF_RESOURCES"};
    if (text == NULL || status < 0 || status > 3)
        return INVALID_ARGUMENT;
    *text = texts[status];
    return SUCCESS;
}

void amd_comgr_get_version(size_t *major, size_t *minor) {
    *major = 3;
    *minor = 0;
}

int amd_comgr_create_data(int kind, handle *out) {
    struct data *d = calloc(1, sizeof *d);
    if (out == NULL || d == NULL) {
        free(d);
        return out == NULL ? INVALID_ARGUMENT : OUT_OF_RESOURCES;
    }
    d->kind = kind;
    d->references = 1;
    out->handle = (uintptr_t)d;
    return SUCCESS;
}

int amd_comgr_release_data(handle h) {
    struct data *d = DATA(h);
    if (d == NULL)
        return INVALID_ARGUMENT;
    if (--d->references == 0) {
        free(d->name);
        free(d->bytes.data);
        free(d);
    }
    return SUCCESS;
}

int amd_comgr_set_data(handle h, size_t size, const char *bytes) {
    struct data *d = DATA(h);
    if (d == NULL || bytes == NULL)
        return INVALID_ARGUMENT;
    free(d->bytes.data);
    d->bytes = copy_bytes(bytes, size);
    return d->bytes.data != NULL ? SUCCESS : OUT_OF_RESOURCES;
}

int amd_comgr_set_data_name(handle h, const char *name) {
    struct data *d = DATA(h);
    if (d == NULL || name == NULL)
        return INVALID_ARGUMENT;
    free(d->name);
    d->name = strdup(name);
    return d->name != NULL ? SUCCESS : OUT_OF_RESOURCES;
}

int amd_comgr_get_data(handle h, size_t *size, char *bytes) {
    const struct data *d = DATA(h);
    if (d == NULL || size == NULL)
        return INVALID_ARGUMENT;
    if (bytes != NULL && *size > 0)
        memcpy(bytes, d->bytes.data, *size < d->bytes.size ? *size : d->bytes.size);
    if (bytes == NULL)
        *size = d->bytes.size;
    return SUCCESS;
}

int amd_comgr_create_data_set(handle *out) {
    struct set *s = calloc(1, sizeof *s);
    if (out == NULL || s == NULL) {
        free(s);
        return out == NULL ? INVALID_ARGUMENT : OUT_OF_RESOURCES;
    }
    out->handle = (uintptr_t)s;
    return SUCCESS;
}

int amd_comgr_destroy_data_set(handle h) {
    struct set *s = SET(h);
    if (s == NULL)
        return INVALID_ARGUMENT;
    for (size_t i = 0; i < s->count; i++)
        amd_comgr_release_data((handle){(uintptr_t)s->items[i]});
    free(s->items);
    free(s);
    return SUCCESS;
}

int amd_comgr_data_set_add(handle set, handle h) {
    struct set *s = SET(set);
    if (s == NULL || DATA(h) == NULL)
        return INVALID_ARGUMENT;
    struct data **grown = realloc(s->items, (s->count + 1) * sizeof *grown);
    if (grown == NULL)
        return OUT_OF_RESOURCES;
    s->items = grown;
    s->items[s->count++] = DATA(h);
    DATA(h)->references++;
    return SUCCESS;
}

static int add(handle set, int kind, const char *name, const char *bytes, size_t size) {
    handle h;
    int status = amd_comgr_create_data(kind, &h);
    if (status != SUCCESS)
        return status;
    status = amd_comgr_set_data(h, size, bytes);
    if (status == SUCCESS)
        status = amd_comgr_set_data_name(h, name);
    if (status == SUCCESS)
        status = amd_comgr_data_set_add(set, h);
    amd_comgr_release_data(h);
    return status;
}

int amd_comgr_action_data_count(handle set, int kind, size_t *count) {
    const struct set *s = SET(set);
    if (s == NULL || count == NULL)
        return INVALID_ARGUMENT;
    *count = 0;
    for (size_t i = 0; i < s->count; i++)
        *count += s->items[i]->kind == kind;
    return SUCCESS;
}

int amd_comgr_action_data_get_data(handle set, int kind, size_t index, handle *out) {
    const struct set *s = SET(set);
    if (s == NULL || out == NULL)
        return INVALID_ARGUMENT;
    for (size_t i = 0; i < s->count; i++)
        if (s->items[i]->kind == kind && index-- == 0) {
            s->items[i]->references++;
            out->handle = (uintptr_t)s->items[i];
            return SUCCESS;
        }
    return INVALID_ARGUMENT;
}

int amd_comgr_create_action_info(handle *out) {
    struct action *a = calloc(1, sizeof *a);
    if (out == NULL || a == NULL) {
        free(a);
        return out == NULL ? INVALID_ARGUMENT : OUT_OF_RESOURCES;
    }
    out->handle = (uintptr_t)a;
    return SUCCESS;
}

static void clear_options(struct action *a) {
    for (size_t i = 0; i < a->count; i++)
        free(a->options[i]);
    free(a->options);
    a->options = NULL;
    a->count = 0;
}

int amd_comgr_destroy_action_info(handle h) {
    if (ACTION(h) == NULL)
        return INVALID_ARGUMENT;
    clear_options(ACTION(h));
    free(ACTION(h));
    return SUCCESS;
}

int amd_comgr_action_info_set_isa_name(handle h, const char *name) {
    return ACTION(h) != NULL && name != NULL ? SUCCESS : INVALID_ARGUMENT;
}

int amd_comgr_action_info_set_language(handle h, int language) {
    if (ACTION(h) == NULL)
        return INVALID_ARGUMENT;
    ACTION(h)->language = language;
    return SUCCESS;
}

int amd_comgr_action_info_set_logging(handle h, _Bool logging) {
    (void)logging; /* the log of a failure is always there */
    return ACTION(h) != NULL ? SUCCESS : INVALID_ARGUMENT;
}

int amd_comgr_action_info_set_option_list(handle h, const char *options[], size_t count) {
    struct action *a = ACTION(h);
    if (a == NULL || (options == NULL && count > 0))
        return INVALID_ARGUMENT;
    clear_options(a);
    a->options = calloc(count > 0 ? count : 1, sizeof *a->options);
    for (; a->options != NULL && a->count < count; a->count++)
        if ((a->options[a->count] = strdup(options[a->count])) == NULL)
            break;
    return a->options != NULL && a->count == count ? SUCCESS : OUT_OF_RESOURCES;
}

int amd_comgr_do_action(int kind, handle info, handle input, handle output) {
    const struct action *a = ACTION(info);
    const struct set *from = SET(input);
    if (a == NULL || from == NULL || SET(output) == NULL)
        return INVALID_ARGUMENT;
    static const struct {
        int kind, takes, gives;
    } steps[] = {{ADD_HEADERS, SOURCE, SOURCE}, {COMPILE, SOURCE, BITCODE}, {CODEGEN, BITCODE, RELOCATABLE}, {LINK, RELOCATABLE, EXECUTABLE}};
    int takes = 0, gives = 0;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (steps[i].kind == kind) {
            takes = steps[i].takes;
            gives = steps[i].gives;
        }
    if (takes == 0 || (kind == COMPILE && a->language != OPENCL_1_2 && a->language != OPENCL_2_0))
        return INVALID_ARGUMENT;
    for (size_t i = 0; i < from->count; i++) {
        const struct data *d = from->items[i];
        int status;
        if (d->kind != takes)
            continue;
        if (kind != COMPILE) {
            status = add(output, gives, d->name != NULL ? d->name : "code", d->bytes.data, d->bytes.size);
        } else {
            const char *name = d->name != NULL ? d->name : "source.cl";
            struct bytes log, made = compile(FOLDER "clstub.sh", 1, &name, &d->bytes, a->count, a->options, &log);
            status = made.data != NULL ? add(output, gives, "code", made.data, made.size) : ERROR;
            if (log.size > 0)
                add(output, LOG, "log", log.data, log.size);
            free(log.data);
            free(made.data);
        }
        if (status != SUCCESS)
            return status;
    }
    return SUCCESS;
}
