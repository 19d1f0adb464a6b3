/* A double of libamdhip64: "device" memory is the host's, and a copy happens when its stream is waited for. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct copy {
    void *to;
    const void *from;
    size_t bytes;
    struct copy *next;
};
struct stream {
    struct copy *first, **last;
};

/* For the tests: what is alive, and a function that shall fail. */
int double_blocks, double_streams, double_events, double_waits, double_devices = 2, double_current = -1;
char double_failing[64], double_architecture[64];
int double_wave = 32;
int double_status, double_capture_mode, double_freed_in_mode;

static int records;

#define FAIL() \
    if (double_status != 0 && strcmp(__func__, double_failing) == 0) \
        return double_status

int hipRuntimeGetVersion(int *version) {
    *version = 60443484;
    return 0;
}
int hipGetDeviceCount(int *count) {
    FAIL();
    *count = double_devices;
    return 0;
}
int hipSetDevice(int ordinal) {
    FAIL();
    double_current = ordinal;
    return 0;
}
int hipDeviceGetName(char *name, int length, int ordinal) {
    FAIL();
    snprintf(name, (size_t)length, "double %d", ordinal);
    return 0;
}
/* hipDeviceProp_tR0600, of which wave size and architecture are filled in. */
int hipGetDevicePropertiesR0600(char *properties, int ordinal) {
    FAIL();
    memset(properties, 0, 1472);
    memcpy(properties + 308, &double_wave, sizeof double_wave);
    snprintf(properties + 1160, 256, "%s", double_architecture);
    return 0;
}
int hipMalloc(void **out, size_t bytes) {
    FAIL();
    if (bytes == 0)
        abort(); /* HIP answers NULL, which a buffer must not be */
    *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(*out, 0xEE, bytes);
    double_blocks++;
    return 0;
}
int hipThreadExchangeStreamCaptureMode(int *mode) {
    const int before = double_capture_mode;
    double_capture_mode = *mode;
    *mode = before;
    return 0;
}
int hipFree(void *address) {
    double_freed_in_mode = double_capture_mode;
    free(address);
    double_blocks--;
    return 0;
}
int hipStreamCreateWithFlags(void **out, unsigned flags) {
    FAIL();
    struct stream *s = calloc(1, sizeof *s);
    if (flags != 1)
        abort(); /* hipStreamNonBlocking */
    s->last = &s->first;
    *out = s;
    double_streams++;
    return 0;
}
int hipStreamDestroy(void *stream) {
    free(stream);
    double_streams--;
    return 0;
}
int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    FAIL();
    struct stream *s = stream;
    struct copy *c = malloc(sizeof *c);
    if (kind != 1 && kind != 2)
        abort();
    *c = (struct copy){to, from, bytes, NULL};
    *s->last = c;
    s->last = &c->next;
    return 0;
}
int hipStreamSynchronize(void *stream) {
    struct stream *s = stream;
    FAIL();
    while (s->first != NULL) {
        struct copy *c = s->first;
        memcpy(c->to, c->from, c->bytes);
        s->first = c->next;
        free(c);
    }
    s->last = &s->first;
    return 0;
}
int hipDeviceSynchronize(void) {
    FAIL();
    double_waits++;
    return 0;
}
int hipEventCreate(void **out) {
    FAIL();
    *out = calloc(1, sizeof(int)); /* its number */
    double_events++;
    return 0;
}
int hipEventDestroy(void *event) {
    free(event);
    double_events--;
    return 0;
}
int hipEventRecord(void *event, void *stream) {
    FAIL();
    if (stream == NULL)
        abort();
    *(int *)event = ++records;
    return 0;
}
/* 1.5 ms from each record to the next */
int hipEventElapsedTime(float *milliseconds, void *from, void *to) {
    FAIL();
    *milliseconds = 1.5f * (float)(*(int *)to - *(int *)from);
    return 0;
}
const char *hipGetErrorName(int status) {
    return status == 2 ? "hipErrorOutOfMemory" : status == 998 ? NULL : "hipErrorOfTheDouble";
}
const char *hipGetErrorString(int status) {
    return status == 2 ? "out of memory" : status == 998 ? NULL : "the double fails";
}
