/* A CUDA driver with one device whose memory is the host's and whose work is done at once, as far as raw_cudnn.c asks.
 * A capture records nothing, so that its graph cannot be made and plain calls are measured. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long pointer;

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "a host", (size_t)size); return device; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return device; }
int cuCtxSetCurrent(void *context) { return !context; }
int cuMemAlloc_v2(pointer *to, size_t bytes) { *to = (pointer)malloc(bytes); return *to ? 0 : 2; }
int cuMemFree_v2(pointer memory) { free((void *)memory); return 0; }
int cuMemcpyHtoD_v2(pointer to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *to, pointer from, size_t bytes) { memcpy(to, (void *)from, bytes); return 0; }
int cuMemcpyDtoD_v2(pointer to, pointer from, size_t bytes) { memcpy((void *)to, (void *)from, bytes); return 0; }
int cuMemsetD8_v2(pointer to, unsigned char value, size_t bytes) { memset((void *)to, value, bytes); return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = stream; return flags != 1; }
int cuStreamSynchronize(void *stream) { (void)stream; return 0; }
int cuEventCreate(void **event, unsigned flags) { *event = malloc(sizeof(struct timespec)); return (int)flags; }
int cuEventRecord(void *event, void *stream) { (void)stream; return clock_gettime(CLOCK_MONOTONIC, event); }
int cuEventElapsedTime(float *milliseconds, void *start, void *end)
{
    struct timespec *a = start, *b = end;
    *milliseconds = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) * 1e-6);
    return 0;
}
int cuStreamBeginCapture_v2(void *stream, int mode) { (void)stream; return mode != 1; }
int cuStreamEndCapture(void *stream, void **graph) { (void)stream; *graph = NULL; return 0; }
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags)
{
    *executable = graph;
    return 1 + (int)flags;
}
int cuGraphLaunch(void *executable, void *stream) { (void)executable, (void)stream; return 1; }
int cuGraphExecDestroy(void *executable) { (void)executable; return 1; }
int cuGraphDestroy(void *graph) { (void)graph; return 1; }
