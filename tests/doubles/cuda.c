/* A double of libcuda: contexts, one for each device, that are current by thread, and memory that belongs to a device. */
#include <stdint.h>

enum { DEVICES = 3, DEPTH = 8 };

int driver_devices = DEVICES;
int driver_switches, driver_questions; /* pushes and pops; questions about memory */
int driver_gone[DEVICES];              /* contexts that are destroyed */
int driver_lost[DEVICES];              /* what asking in a context answers */
int driver_stream, driver_asked;       /* what a stream answers; how often either was asked */
/* From, to, device; type as CUmemorytype, whether managed. What lies in none of them is unknown to the driver. */
unsigned long long driver_memory[8][5];

static char contexts[DEVICES];
static _Thread_local void *stack[DEPTH];
static _Thread_local int depth; /* how many lie below the current one */

static int ordinal(void *context) { return (int)((char *)context - contexts); }

int cuCtxGetCurrent(void **context) {
    *context = stack[depth];
    return 0;
}
int cuCtxSetCurrent(void *context) {
    stack[depth] = context;
    return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    if (driver_gone[ordinal(context)])
        return 709; /* CUDA_ERROR_CONTEXT_IS_DESTROYED */
    driver_switches++;
    stack[++depth] = context;
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    driver_switches++;
    *context = stack[depth];
    stack[depth--] = 0;
    return 0;
}
int cuCtxGetDevice(int *device) {
    if (stack[depth] == 0)
        return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    *device = ordinal(stack[depth]);
    return 0;
}
int cuStreamGetCtx(void *stream, void **context) { /* streams 0x1000, 0x2000, ... are of device 0, 1, ... */
    *context = &contexts[(uintptr_t)stream / 0x1000 - 1];
    return 0;
}
int cuDeviceGetCount(int *count) {
    *count = driver_devices;
    return 0;
}
int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, unsigned long long address) {
    const unsigned long long *found = 0;
    driver_questions++;
    for (int i = 0; i < 8; i++)
        if (driver_memory[i][0] <= address && address < driver_memory[i][1])
            found = driver_memory[i];
    for (unsigned i = 0; i < count; i++) {
        if (attributes[i] == 2) /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
            *(unsigned *)values[i] = found ? (unsigned)found[3] : 0;
        else if (attributes[i] == 8) /* CU_POINTER_ATTRIBUTE_IS_MANAGED */
            *(unsigned char *)values[i] = found ? (unsigned char)found[4] : 0;
        else if (attributes[i] == 9) /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */
            *(int *)values[i] = found ? (int)found[2] : -2;
        else
            return 1;
    }
    return 0;
}
int cuMemGetInfo_v2(unsigned long *unused, unsigned long *total) {
    int device;
    const int status = cuCtxGetDevice(&device);
    driver_asked++;
    return status ? status : driver_lost[device];
}
int cuStreamQuery(void *stream) {
    driver_asked++;
    return driver_stream;
}
int cuGetErrorName(int error, const char **name) {
    *name = "CUDA_ERROR_OF_THE_TEST";
    return 0;
}

/* For the tests: the device that is current, -1 for none; and making one current. */
int driver_current(void) {
    int device;
    return cuCtxGetDevice(&device) == 0 ? device : -1;
}
void driver_go(int device) { stack[depth] = device < 0 ? 0 : &contexts[device]; }

#ifdef DOUBLE_LAUNCHES /* what native needs beside that: kernels that do nothing but note their stream */
void *driver_streams[64];
int driver_launches;
int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int *version) {
    *version = 12000;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 8 : attribute == 76 ? 0 : attribute == 16 ? 108 : 1 << 17; /* an A100's, or nearly */
    return device >= DEVICES;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts[device];
    return 0;
}
int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return image == 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)name;
    return module == 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return function == 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = 0;
    return function == 0;
}
int cuLaunchKernel(void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    driver_streams[driver_launches++ % 64] = stream;
    return function == 0;
}
int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }
#endif
