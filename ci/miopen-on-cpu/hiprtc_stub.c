/* A stand-in for libhiprtc.so.6 and .7, which compile HIP C++: here hipstub.sh does, for the CPU. */
#define _GNU_SOURCE
#include "compile_stub.h"

enum { SUCCESS = 0, OUT_OF_MEMORY = 1, INVALID_INPUT = 3, INVALID_PROGRAM = 4, COMPILATION = 6 };

struct program {
    size_t count; /* the source and its headers */
    char **names;
    struct bytes *files;
    struct bytes code, log;
};

API const char *hiprtcGetErrorString(int status);
API int hiprtcVersion(int *major, int *minor);
API int hiprtcCreateProgram(struct program **out, const char *source, const char *name, int headers_count,
                            const char *const *headers, const char *const *names);
API int hiprtcDestroyProgram(struct program **program);
API int hiprtcCompileProgram(struct program *p, int count, char *const *options);
API int hiprtcGetProgramLogSize(struct program *p, size_t *size);
API int hiprtcGetProgramLog(struct program *p, char *log);
API int hiprtcGetCodeSize(struct program *p, size_t *size);
API int hiprtcGetCode(struct program *p, char *code);

const char *hiprtcGetErrorString(int status) {
    switch (status) {
    case SUCCESS:
        return "HIPRTC_SUCCESS";
    case OUT_OF_MEMORY:
        return "HIPRTC_ERROR_OUT_OF_MEMORY";
    case INVALID_INPUT:
        return "HIPRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM:
        return "HIPRTC_ERROR_INVALID_PROGRAM";
    case COMPILATION:
        return "HIPRTC_ERROR_COMPILATION";
    default:
        return "HIPRTC_ERROR_INTERNAL_ERROR";
    }
}

int hiprtcVersion(int *major, int *minor) {
    if (major == NULL || minor == NULL)
        return INVALID_INPUT;
    *major = MAJOR;
    *minor = MINOR;
    return SUCCESS;
}

int hiprtcDestroyProgram(struct program **program) {
    if (program == NULL || *program == NULL)
        return INVALID_INPUT;
    struct program *p = *program;
    for (size_t i = 0; i < p->count; i++) {
        if (p->names != NULL)
            free(p->names[i]);
        if (p->files != NULL)
            free(p->files[i].data);
    }
    free(p->names);
    free(p->files);
    free(p->code.data);
    free(p->log.data);
    free(p);
    *program = NULL;
    return SUCCESS;
}

int hiprtcCreateProgram(struct program **out, const char *source, const char *name, int headers_count,
                        const char *const *headers, const char *const *names) {
    if (out == NULL || source == NULL || headers_count < 0 ||
        (headers_count > 0 && (headers == NULL || names == NULL)))
        return INVALID_INPUT;
    struct program *p = calloc(1, sizeof *p);
    *out = p;
    if (p == NULL)
        return OUT_OF_MEMORY;
    p->count = 1 + (size_t)headers_count;
    p->names = calloc(p->count, sizeof *p->names);
    p->files = calloc(p->count, sizeof *p->files);
    int good = p->names != NULL && p->files != NULL;
    for (size_t i = 0; i < p->count && good; i++) {
        const char *text = i == 0 ? source : headers[i - 1];
        p->names[i] = strdup(i > 0 ? names[i - 1] : name != NULL ? name : "source.cpp");
        p->files[i] = copy_bytes(text, strlen(text));
        good = p->names[i] != NULL && p->files[i].data != NULL;
    }
    if (!good)
        hiprtcDestroyProgram(out);
    return good ? SUCCESS : OUT_OF_MEMORY;
}

int hiprtcCompileProgram(struct program *p, int count, char *const *options) {
    if (p == NULL || count < 0 || (count > 0 && options == NULL))
        return INVALID_INPUT;
    free(p->code.data);
    free(p->log.data);
    p->code = compile(FOLDER "hipstub.sh", p->count, (const char *const *)p->names, p->files, (size_t)count, options,
                      &p->log);
    return p->code.data != NULL ? SUCCESS : COMPILATION;
}

int hiprtcGetProgramLogSize(struct program *p, size_t *size) {
    if (p == NULL || size == NULL)
        return INVALID_INPUT;
    *size = p->log.size + 1;
    return SUCCESS;
}

int hiprtcGetProgramLog(struct program *p, char *log) {
    if (p == NULL || log == NULL)
        return INVALID_INPUT;
    memcpy(log, p->log.data != NULL ? p->log.data : "", p->log.size + 1);
    return SUCCESS;
}

int hiprtcGetCodeSize(struct program *p, size_t *size) {
    if (p == NULL || size == NULL || p->code.data == NULL)
        return p == NULL || p->code.data == NULL ? INVALID_PROGRAM : INVALID_INPUT;
    *size = p->code.size;
    return SUCCESS;
}

int hiprtcGetCode(struct program *p, char *code) {
    if (p == NULL || code == NULL || p->code.data == NULL)
        return p == NULL || p->code.data == NULL ? INVALID_PROGRAM : INVALID_INPUT;
    memcpy(code, p->code.data, p->code.size);
    return SUCCESS;
}
