/* Tests of hipcpu, through HIP's interface only. Without an argument it runs every case below, each in a process of
 * its own (a case that must crash, or that needs other variables, cannot share one); with one, that case. */
#define _GNU_SOURCE
#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Its header, hip_ext.h, is for C++ only. */
hipError_t hipExtModuleLaunchKernel(hipFunction_t function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t lx,
                                    uint32_t ly, uint32_t lz, size_t shared, hipStream_t stream, void **params,
                                    void **extra, hipEvent_t before, hipEvent_t after, uint32_t flags);
size_t hipcpuTrace(char *buffer, size_t size);
void hipcpuCounters(size_t *launched, size_t *built, size_t *bytes);

/* OpenCL's own: neither leaks nor races of it are ours to report. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) {
    return "leak:libpocl\nleak:libLLVM\nleak:libclang\nleak:libOpenCL\nleak:libhwloc\nleak:libltdl\n";
}
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void) {
    return "called_from_lib:libpocl.so\ncalled_from_lib:libOpenCL.so\ncalled_from_lib:libLLVM\nrace:libpocl\n"
           "mutex:libpocl\ndeadlock:libpocl\nthread:libpocl\nrace:libLLVM\nrace:libclang\n";
}

static _Atomic int failures;

static void check(int good, const char *text, int line) {
    if (good)
        return;
    failures++;
    fprintf(stderr, "test_hipcpu.c:%d: not so: %s\n", line, text);
}
#define CHECK(condition) check((condition) ? 1 : 0, #condition, __LINE__)

static void expect(hipError_t got, hipError_t wanted, const char *text, int line) {
    if (got == wanted)
        return;
    failures++;
    fprintf(stderr, "test_hipcpu.c:%d: %s returned %s, expected %s\n", line, text, hipGetErrorName(got),
            hipGetErrorName(wanted));
}
#define EXPECT(error, call) expect((call), (error), #call, __LINE__)
#define GOOD(call) EXPECT(hipSuccess, call)

static void *device_memory(size_t size) {
    void *p = NULL;
    GOOD(hipMalloc(&p, size));
    return p;
}

static void *host_memory(size_t size) {
    void *p = NULL;
    GOOD(hipHostMalloc(&p, size, hipHostMallocDefault));
    return p;
}

static hipModule_t module_of(const char *options, const char *source) {
    hipModule_t module = NULL;
    char *image = NULL;
    if (asprintf(&image, "HIPCPU-OCL 1 %zu %zu\n%s\n%s", strlen(options), strlen(source), options, source) < 0)
        abort();
    GOOD(hipModuleLoadData(&module, image));
    free(image);
    return module;
}

static hipFunction_t function_of(hipModule_t module, const char *name) {
    hipFunction_t f = NULL;
    GOOD(hipModuleGetFunction(&f, module, name));
    return f;
}

static const char kernels[] =
    "kernel void add(global float *y, global const float *x, float a, int n)\n"
    "{ int i = get_global_id(0); if (i < n) y[i] += a * x[i]; }\n"
    "kernel void at(global float *y, int i) { y[i] = 1; }\n"
    "kernel void slow(global int *y, int n)\n"
    "{ int v = y[0]; for (int i = 0; i < n; i++) v = v * 1664525 + 1013904223; y[0] = v; }\n"
    "kernel void sizes(global ulong *y, char a, ushort b, half c, int d, float e, long f, double g, global int *z)\n"
    "{ y[0] = a; y[1] = b; y[2] = (ulong)(float)c; y[3] = d; y[4] = (ulong)e; y[5] = f; y[6] = (ulong)g;\n"
    "  y[7] = z == 0; }\n"
    "kernel void unaligned(global float *y, global const float *x)\n"
    "{ *(global float4 *)y = *(global const float4 *)(x + 1); }\n"
    "kernel void half_functions(global half *y) { half x = y[0];\n"
    "  y[1] = exp(x); y[2] = log(x); y[3] = tanh(x); y[4] = pow(x, x);\n"
    "  y[5] = fmin(x, (half)1); y[6] = fmax(x, (half)1);\n"
    "  y[7] = sqrt(x); y[8] = rsqrt(x); y[9] = fabs(-x); y[10] = mad(x, x, x); y[11] = fma(x, x, x); }\n"
    "kernel void halves(global half *y, int n) { for (int i = 0; i < n; i++) y[i] = (half)((float)y[i] * 0.1f); }\n"
    "kernel __attribute__((reqd_work_group_size(64, 1, 1))) void of64(global float *y) { y[get_global_id(0)] = 2; }\n"
    "typedef struct { int a; } own;\nkernel void of_own(global int *y, own x) { y[0] = x.a; }\n"
    "kernel void local_argument(global float *y, local float *z) { z[0] = 1; y[0] = z[0]; }\n"
    "kernel void groups(global int *y) { local int sum[256]; int i = get_local_id(0); sum[i] = i;\n"
    "  barrier(CLK_LOCAL_MEM_FENCE);\n"
    "  for (int s = 128; s > 0; s >>= 1) { if (i < s) sum[i] += sum[i + s]; barrier(CLK_LOCAL_MEM_FENCE); }\n"
    "  if (i == 0) y[get_group_id(0)] = sum[0]; }\n";

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
#define NATIVE
#endif

static hipError_t run(hipFunction_t f, unsigned count, unsigned group, hipStream_t stream, void **params) {
    return hipExtModuleLaunchKernel(f, count, 1, 1, group, 1, 1, 0, stream, params, NULL, NULL, NULL, 0);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---------------------------------------------------------------- cases */

static void memory(void) {
    static const size_t sizes[] = {1, 3, 4, 255, 256, 257, 4095, 4096, 4097, 1 << 20};
    size_t unused, total, before, size;
    GOOD(hipMemGetInfo(&before, &total));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        unsigned char *p = device_memory(sizes[i]), *copy = malloc(sizes[i]);
        CHECK((uintptr_t)p % 256 == 0);
        memset(copy, 0, sizes[i]);
        GOOD(hipMemcpy(copy, p, sizes[i], hipMemcpyDeviceToHost));
        size_t nans = 0;
        for (size_t j = 0; j < sizes[i]; j++)
            nans += copy[j] == 0xFF;
        CHECK(nans == sizes[i]); /* new memory is NaN */
        GOOD(hipMemGetInfo(&unused, &total));
        CHECK(before - unused == sizes[i]);
        GOOD(hipMemPtrGetInfo(p, &size));
        CHECK(size == sizes[i]);
        GOOD(hipMemPtrGetInfo(p + sizes[i] - 1, &size));
        CHECK(size == sizes[i]);
        EXPECT(hipErrorInvalidValue, hipMemPtrGetInfo(p + sizes[i], &size));
        if (sizes[i] > 1)
            EXPECT(hipErrorInvalidValue, hipFree(p + 1));
        EXPECT(hipErrorInvalidValue, hipHostFree(p));
        GOOD(hipFree(p));
        EXPECT(hipErrorInvalidValue, hipFree(p));
        free(copy);
    }
    GOOD(hipMemGetInfo(&unused, &total));
    CHECK(unused == before);

    void *p = &p;
    GOOD(hipMalloc(&p, 0));
    CHECK(p == NULL);
    GOOD(hipFree(NULL));
    EXPECT(hipErrorInvalidValue, hipMalloc(NULL, 4));
    EXPECT(hipErrorOutOfMemory, hipMalloc(&p, total + 1));
    CHECK(p == NULL);
    EXPECT(hipErrorOutOfMemory, hipMalloc(&p, SIZE_MAX));
    EXPECT(hipErrorInvalidValue, hipHostMalloc(&p, 4, 0x12340000));

    hipPointerAttribute_t a;
    float *d = device_memory(64), *h = host_memory(64);
    h[15] = 3; /* the host's to use */
    GOOD(hipPointerGetAttributes(&a, d + 1));
    CHECK(a.type == hipMemoryTypeDevice && a.devicePointer == d + 1 && a.hostPointer == NULL && a.device == 0);
    GOOD(hipPointerGetAttributes(&a, h));
    CHECK(a.type == hipMemoryTypeHost && a.hostPointer == h);
    EXPECT(hipErrorInvalidValue, hipPointerGetAttributes(&a, &a));
    EXPECT(hipErrorInvalidValue, hipFree(h));
    GOOD(hipHostFree(h));
    GOOD(hipFree(d));
}

static void out_of_memory(void) { /* HIPCPU_MEMORY_MIB=2 */
    void *a = device_memory(1 << 20), *b = NULL, *c = NULL;
    size_t unused, total;
    GOOD(hipMalloc(&b, 1 << 20));
    EXPECT(hipErrorOutOfMemory, hipMalloc(&c, 1));
    CHECK(c == NULL);
    GOOD(hipMemGetInfo(&unused, &total));
    CHECK(unused == 0 && total == 2 << 20);
    GOOD(hipFree(a));
    GOOD(hipMalloc(&c, 1 << 20));
    GOOD(hipFreeAsync(c, NULL));
    GOOD(hipDeviceSynchronize());
    GOOD(hipMemGetInfo(&unused, &total));
    CHECK(unused == 1 << 20);
    GOOD(hipFree(b));
}

static void copies(void) {
    int x[100], y[100];
    for (int i = 0; i < 100; i++)
        x[i] = i;
    int *d = device_memory(sizeof x), *e = device_memory(sizeof x), *h = host_memory(sizeof x);
    GOOD(hipMemcpy(d, x, sizeof x, hipMemcpyHostToDevice));
    GOOD(hipMemcpy(e, d, sizeof x, hipMemcpyDeviceToDevice));
    GOOD(hipMemcpy(y, e, sizeof x, hipMemcpyDefault));
    CHECK(memcmp(x, y, sizeof x) == 0);
    GOOD(hipMemcpy(h, d + 50, 50 * sizeof *d, hipMemcpyDeviceToHost));
    CHECK(h[0] == 50 && h[49] == 99);
    GOOD(hipMemcpy(y, x, 4, hipMemcpyHostToHost));
    GOOD(hipMemcpyWithStream(d + 10, h, 40, hipMemcpyHostToDevice, NULL));
    GOOD(hipMemcpy(y, d, sizeof x, hipMemcpyDeviceToHost));
    CHECK(y[9] == 9 && y[10] == 50 && y[19] == 59 && y[20] == 20);

    EXPECT(hipErrorInvalidValue, hipMemcpy(d, x, sizeof x + 1, hipMemcpyHostToDevice));
    EXPECT(hipErrorInvalidValue, hipMemcpy(d + 1, x, sizeof x, hipMemcpyHostToDevice));
    EXPECT(hipErrorInvalidValue, hipMemcpy(y, d + 99, 8, hipMemcpyDeviceToHost));
    EXPECT(hipErrorInvalidValue, hipMemcpy(y, x, 4, hipMemcpyHostToDevice));
    EXPECT(hipErrorInvalidValue, hipMemcpy(y, x, 4, hipMemcpyDeviceToHost));
    EXPECT(hipErrorInvalidValue, hipMemcpy(d, x, 4, hipMemcpyDeviceToHost));
    EXPECT(hipErrorInvalidMemcpyDirection, hipMemcpy(d, x, 4, (hipMemcpyKind)77));
    EXPECT(hipErrorInvalidValue, hipMemcpy(NULL, x, 4, hipMemcpyDefault));
    EXPECT(hipErrorInvalidValue, hipMemcpy(d, NULL, 4, hipMemcpyHostToDevice));
    EXPECT(hipErrorInvalidHandle, hipMemcpyAsync(d, x, 4, hipMemcpyHostToDevice, (hipStream_t)x));
    GOOD(hipMemcpy(NULL, NULL, 0, hipMemcpyDefault));

    GOOD(hipMemset(d + 1, 0x11, 8));
    GOOD(hipMemcpy(y, d, 16, hipMemcpyDeviceToHost));
    CHECK(y[0] == 0 && y[1] == 0x11111111 && y[2] == 0x11111111 && y[3] == 3);
    EXPECT(hipErrorInvalidValue, hipMemset(d + 1, 0, sizeof x));
    EXPECT(hipErrorInvalidValue, hipMemset(x, 0, 4));
    EXPECT(hipErrorInvalidValue, hipMemset(NULL, 0, 4));
    GOOD(hipFree(d));
    EXPECT(hipErrorInvalidValue, hipMemcpy(d, x, 4, hipMemcpyHostToDevice));
    GOOD(hipFree(e));
    GOOD(hipHostFree(h));
}

static void streams(void) {
    hipStream_t s = NULL, t = NULL;
    int *h = host_memory(4000);
    GOOD(hipStreamCreate(&s));
    GOOD(hipStreamCreateWithFlags(&t, hipStreamNonBlocking));
    EXPECT(hipErrorInvalidValue, hipStreamCreateWithFlags(&t, 8));
    CHECK(t == NULL);
    GOOD(hipStreamCreateWithFlags(&t, hipStreamNonBlocking));
    EXPECT(hipErrorInvalidValue, hipStreamCreate(NULL));
    for (int i = 1; i <= 200; i++) /* in order */
        GOOD(hipMemsetAsync(h, i, 4000, s));
    GOOD(hipStreamSynchronize(s));
    CHECK(h[0] == (int)0xC8C8C8C8 && h[999] == (int)0xC8C8C8C8);
    GOOD(hipStreamQuery(s));
    GOOD(hipStreamQuery(NULL));
    GOOD(hipStreamDestroy(s));
    EXPECT(hipErrorInvalidHandle, hipStreamDestroy(s));
    EXPECT(hipErrorInvalidHandle, hipStreamSynchronize(s));
    EXPECT(hipErrorInvalidHandle, hipStreamQuery(s));
    EXPECT(hipErrorInvalidHandle, hipStreamDestroy(NULL));
    EXPECT(hipErrorInvalidHandle, hipMemsetAsync(h, 0, 4, s));
    EXPECT(hipErrorInvalidHandle, hipMallocAsync((void **)&s, 4, s));
    GOOD(hipStreamDestroy(t));
    GOOD(hipHostFree(h));
}

static void events(void) {
    hipEvent_t a, b, plain;
    float ms = -1;
    int x = 1, *d = device_memory(4);
    hipFunction_t slow = function_of(module_of("", kernels), "slow");
    int n = 20000000;
    void *params[] = {&d, &n};
    GOOD(hipMemcpy(d, &x, 4, hipMemcpyHostToDevice));
    GOOD(hipEventCreate(&a));
    GOOD(hipEventCreateWithFlags(&b, hipEventBlockingSync));
    GOOD(hipEventCreateWithFlags(&plain, hipEventDisableTiming));
    hipEvent_t bad = a;
    EXPECT(hipErrorInvalidValue, hipEventCreateWithFlags(&bad, 0x40));
    CHECK(bad == NULL);
    EXPECT(hipErrorNotSupported, hipEventCreateWithFlags(&bad, hipEventInterprocess | hipEventDisableTiming));
    GOOD(hipEventQuery(a)); /* never recorded: done */
    GOOD(hipEventSynchronize(a));
    EXPECT(hipErrorInvalidHandle, hipEventElapsedTime(&ms, a, b));
    GOOD(run(slow, 1, 1, NULL, params)); /* builds what PoCL builds late */
    GOOD(hipDeviceSynchronize());
    double start = now();
    GOOD(hipEventRecord(a, NULL));
    GOOD(run(slow, 1, 1, NULL, params));
    GOOD(hipEventRecord(b, NULL));
    EXPECT(hipErrorNotReady, hipEventQuery(b));
    EXPECT(hipErrorNotReady, hipStreamQuery(NULL));
    EXPECT(hipErrorNotReady, hipEventElapsedTime(&ms, a, b));
    GOOD(hipEventSynchronize(b));
    double wall = (now() - start) * 1e3;
    GOOD(hipEventQuery(b));
    GOOD(hipEventElapsedTime(&ms, a, b));
    CHECK(ms > 0.5 * wall && ms <= wall);
    CHECK(wall > 5);
    GOOD(hipEventElapsedTime(&ms, b, a));
    CHECK(ms < 0);
    EXPECT(hipErrorInvalidValue, hipEventElapsedTime(NULL, a, b));
    GOOD(hipEventRecord(plain, NULL));
    GOOD(hipEventSynchronize(plain));
    EXPECT(hipErrorInvalidHandle, hipEventElapsedTime(&ms, a, plain));

    /* of a launch */
    GOOD(hipExtModuleLaunchKernel(slow, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL, a, b, 0));
    GOOD(hipEventSynchronize(b));
    GOOD(hipEventElapsedTime(&ms, a, b));
    CHECK(ms > 0.2 * wall && ms < 5 * wall);

    /* destroyed, and recorded again, while marks wait */
    GOOD(run(slow, 1, 1, NULL, params));
    GOOD(hipEventRecord(a, NULL));
    GOOD(hipEventRecord(a, NULL));
    GOOD(hipEventRecord(b, NULL));
    GOOD(hipEventDestroy(b));
    EXPECT(hipErrorInvalidHandle, hipEventDestroy(b));
    EXPECT(hipErrorInvalidHandle, hipEventRecord(b, NULL));
    EXPECT(hipErrorInvalidHandle, hipEventSynchronize(b));
    EXPECT(hipErrorInvalidHandle, hipEventQuery(b));
    EXPECT(hipErrorInvalidHandle, hipStreamWaitEvent(NULL, b, 0));
    EXPECT(hipErrorInvalidHandle, hipEventRecord(a, (hipStream_t)&x));
    EXPECT(hipErrorInvalidValue, hipStreamWaitEvent(NULL, a, 1));
    GOOD(hipEventSynchronize(a));
    GOOD(hipEventDestroy(a));
    GOOD(hipEventDestroy(plain));
    GOOD(hipFree(d));
}

static void modules(void) {
    hipModule_t m = module_of(" -DUNUSED=1 -DMIO_BN_VARIANT=2", kernels), n = NULL;
    hipFunction_t f = function_of(m, "add"), g = NULL;
    CHECK(f == function_of(m, "add"));
    EXPECT(hipErrorNotFound, hipModuleGetFunction(&g, m, "absent"));
    CHECK(g == NULL);
    EXPECT(hipErrorNotSupported, hipModuleGetFunction(&g, m, "local_argument"));
    EXPECT(hipErrorNotSupported, hipModuleGetFunction(&g, m, "of_own"));
    EXPECT(hipErrorInvalidHandle, hipModuleGetFunction(&g, (hipModule_t)&m, "add"));
    EXPECT(hipErrorInvalidValue, hipModuleGetFunction(NULL, m, "add"));

    static const char *const bad[] = {
        "",
        "\177ELF\2\1\1",
        "HIPCPU-OCL 2 0 0\n\n",
        "HIPCPU-OCL 1 0\n\n",
        "HIPCPU-OCL 1 -1 0\n\n",
        "HIPCPU-OCL 1 99999999999999999999999999 0\n\n",
        "HIPCPU-OCL 1 2 0\nab",
        "HIPCPU-OCL 1 0 20\n\nkernel void broken( {",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        n = m;
        EXPECT(hipErrorInvalidImage, hipModuleLoadData(&n, bad[i]));
        CHECK(n == NULL);
    }
    char path[] = "/tmp/test_hipcpu.XXXXXX";
    int fd = mkstemp(path);
    static const char more[] = "HIPCPU-OCL 1 0 200000\n\nkernel void f(void) {}"; /* states more than there is */
    CHECK(write(fd, more, sizeof more - 1) == sizeof more - 1);
    EXPECT(hipErrorInvalidImage, hipModuleLoad(&n, path));
    CHECK(lseek(fd, 0, SEEK_SET) == 0 && ftruncate(fd, 0) == 0);
    static const char cut[] = "HIPCPU-OCL 1 0 22\n\nkernel void f(void) {}"; /* and a byte more */
    CHECK(write(fd, cut, sizeof cut - 2) == sizeof cut - 2);
    EXPECT(hipErrorInvalidImage, hipModuleLoad(&n, path));
    CHECK(write(fd, "}", 1) == 1);
    GOOD(hipModuleLoad(&n, path));
    function_of(n, "f");
    GOOD(hipModuleUnload(n));
    EXPECT(hipErrorInvalidHandle, hipModuleUnload(n));
    EXPECT(hipErrorInvalidHandle, hipModuleUnload(NULL));
    close(fd);
    unlink(path);
    EXPECT(hipErrorFileNotFound, hipModuleLoad(&n, path));
    EXPECT(hipErrorInvalidValue, hipModuleLoadData(NULL, ""));
    EXPECT(hipErrorInvalidValue, hipModuleLoadData(&n, NULL));

    /* arguments by "params" and by "extra" */
    float x[1000], y[1000], a = 2;
    int count = 1000;
    for (int i = 0; i < 1000; i++)
        x[i] = (float)i;
    float *dx = device_memory(sizeof x), *dy = device_memory(sizeof x);
    GOOD(hipMemcpy(dx, x, sizeof x, hipMemcpyHostToDevice));
    GOOD(hipMemset(dy, 0, sizeof x));
    void *params[] = {&dy, &dx, &a, &count};
    GOOD(run(f, 1024, 256, NULL, params));
    struct {
        float *y, *x;
        float a;
        int n;
    } packed = {dy, dx, 3, 500};
    size_t size = sizeof packed;
    void *extra[] = {HIP_LAUNCH_PARAM_BUFFER_POINTER, &packed, HIP_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     HIP_LAUNCH_PARAM_END};
    GOOD(hipModuleLaunchKernel(f, 4, 1, 1, 256, 1, 1, 0, NULL, NULL, extra));
    GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost));
    int right = 0;
    for (int i = 0; i < 1000; i++)
        right += y[i] == (i < 500 ? 5.0f : 2.0f) * (float)i;
    CHECK(right == 1000);
    size_t launched, built, bytes;
    hipcpuCounters(&launched, &built, &bytes);
    CHECK(launched == 2 && built == 2 && bytes == 2 * sizeof x);
    char text[1000];
    size_t needed = hipcpuTrace(NULL, 0);
    CHECK(hipcpuTrace(text, needed - 1) == needed);
    CHECK(hipcpuTrace(text, sizeof text) == needed && strlen(text) == needed - 1);
    CHECK(strcmp(text, "add variant=2 grid=1024x1x1 block=256x1x1\nadd variant=2 grid=1024x1x1 block=256x1x1\n") == 0);
    CHECK(hipcpuTrace(text, sizeof text) == 1 && text[0] == '\0');

    /* refused launches */
    size--;
    EXPECT(hipErrorInvalidValue, hipModuleLaunchKernel(f, 4, 1, 1, 256, 1, 1, 0, NULL, NULL, extra));
    EXPECT(hipErrorInvalidValue, hipModuleLaunchKernel(f, 4, 1, 1, 256, 1, 1, 0, NULL, params, extra));
    EXPECT(hipErrorInvalidValue, hipModuleLaunchKernel(f, 4, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL));
    void *odd[] = {&count, &count, HIP_LAUNCH_PARAM_END};
    EXPECT(hipErrorInvalidValue, hipModuleLaunchKernel(f, 4, 1, 1, 256, 1, 1, 0, NULL, NULL, odd));
    void *holes[] = {&dy, &dx, NULL, &count};
    EXPECT(hipErrorInvalidValue, run(f, 256, 256, NULL, holes));
    EXPECT(hipErrorInvalidConfiguration, run(f, 0, 256, NULL, params));
    EXPECT(hipErrorInvalidConfiguration, run(f, 256, 0, NULL, params));
    EXPECT(hipErrorInvalidConfiguration, run(f, 2048, 2048, NULL, params));
    EXPECT(hipErrorInvalidConfiguration,
           hipExtModuleLaunchKernel(f, 64, 64, 64, 64, 64, 64, 0, NULL, params, NULL, NULL, NULL, 0));
    EXPECT(hipErrorInvalidConfiguration, hipModuleLaunchKernel(f, UINT32_MAX, 1, 1, 256, 1, 1, 0, NULL, params, NULL));
    EXPECT(hipErrorNotSupported, hipModuleLaunchKernel(f, 4, 1, 1, 256, 1, 1, 64, NULL, params, NULL));
    EXPECT(hipErrorInvalidHandle, run((hipFunction_t)&m, 256, 256, NULL, params));
    EXPECT(hipErrorInvalidHandle, run(f, 256, 256, (hipStream_t)&m, params));
    float *on_host = x;
    void *wrong[] = {&on_host, &dx, &a, &count};
    EXPECT(hipErrorIllegalAddress, run(f, 256, 256, NULL, wrong));
    hipcpuCounters(&launched, &built, &bytes);
    CHECK(launched == 2);

    /* kinds of arguments */
    signed char c = 7;
    uint16_t s = 65535, half_of_three = 0x4200;
    int64_t l = (int64_t)1 << 40;
    double d = 9e15;
    void *none = NULL;
    uint64_t got[8], *out = device_memory(sizeof got);
    int minus = 5;
    void *kinds[] = {&out, &c, &s, &half_of_three, &minus, &a, &l, &d, &none};
    GOOD(run(function_of(m, "sizes"), 1, 1, NULL, kinds));
    GOOD(hipMemcpy(got, out, sizeof got, hipMemcpyDeviceToHost));
    CHECK(got[0] == 7 && got[1] == 65535 && got[2] == 3 && got[3] == 5 && got[4] == 2);
    CHECK(got[5] == (uint64_t)1 << 40 && got[6] == 9000000000000000 && got[7] == 1);

    void *two[] = {&dy, &dx};
    GOOD(run(function_of(m, "unaligned"), 1, 1, NULL, two)); /* a float4 at an address good for a float */
    GOOD(hipMemcpy(y, dy, 16, hipMemcpyDeviceToHost));
    CHECK(y[0] == 1 && y[3] == 4);

    uint16_t h[3] = {0x3C00, 0x4900, 0x7BFF}, *dh = device_memory(sizeof h); /* 1, 10, 65504 */
    int three = 3;
    void *of_halves[] = {&dh, &three};
    GOOD(hipMemcpy(dh, h, sizeof h, hipMemcpyHostToDevice));
    GOOD(run(function_of(m, "halves"), 1, 1, NULL, of_halves));
    GOOD(hipMemcpy(h, dh, sizeof h, hipMemcpyDeviceToHost));
    CHECK(h[0] == 0x2E66 && h[1] == 0x3C00 && h[2] == 0x6E66); /* 0.1, 1, 6550.4, to the nearest half */

    uint16_t v[12] = {0x4200}, *dv = device_memory(sizeof v); /* of 3: the results are the nearest halves */
    static const uint16_t nearest[12] = {0x4200, 0x4D05, 0x3C65, 0x3BF6, 0x4EC0, 0x3C00,
                                         0x4200, 0x3EEE, 0x389E, 0x4200, 0x4A00, 0x4A00};
    void *of_functions[] = {&dv};
    GOOD(hipMemcpy(dv, v, 2, hipMemcpyHostToDevice));
    GOOD(run(function_of(m, "half_functions"), 1, 1, NULL, of_functions));
    GOOD(hipMemcpy(v, dv, sizeof v, hipMemcpyDeviceToHost));
    for (int i = 0; i < 12; i++)
        if (v[i] != nearest[i])
            fprintf(stderr, "half function %d: got %#x, expected %#x\n", i, v[i], nearest[i]);
    CHECK(memcmp(v, nearest, sizeof v) == 0);
    GOOD(hipFree(dv));

    void *one[] = {&dy};
    hipFunction_t of64 = function_of(m, "of64"), groups = function_of(m, "groups");
    EXPECT(hipErrorInvalidConfiguration, run(of64, 128, 128, NULL, one));
    GOOD(run(of64, 128, 64, NULL, one));
    GOOD(hipModuleLaunchKernel(groups, 10, 1, 1, 256, 1, 1, 0, NULL, one, NULL));
    int sums[10];
    GOOD(hipMemcpy(sums, dy, sizeof sums, hipMemcpyDeviceToHost));
    for (int i = 0; i < 10; i++)
        CHECK(sums[i] == 255 * 128);
    GOOD(hipModuleLaunchCooperativeKernel(groups, 1, 1, 1, 256, 1, 1, 0, NULL, one));
    EXPECT(hipErrorNotSupported, hipModuleLaunchCooperativeKernel(groups, 2, 1, 1, 256, 1, 1, 0, NULL, one));

    /* a grid smaller than its group runs as one partly filled group */
    GOOD(hipMemset(dy, 0, sizeof y));
    count = 10;
    GOOD(run(f, 10, 256, NULL, params));
    GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost));
    CHECK(y[9] == 18 && y[10] == 0);
#ifdef NATIVE
    /* a last group that is partly filled; twice, for it is compiled at the first */
    for (int i = 0; i < 2; i++) {
        GOOD(hipMemset(dy, 0, sizeof y));
        count = 1 << 30; /* the kernel has no other limit than the grid */
        GOOD(run(f, 600, 256, NULL, params));
        GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost));
        CHECK(y[599] == 2 * 599 && y[600] == 0);
    }
#endif

    /* unloading waits for what was launched; then the function is no more */
    GOOD(run(f, 256, 256, NULL, params));
    GOOD(hipModuleUnload(m));
    EXPECT(hipErrorInvalidHandle, run(f, 256, 256, NULL, params));
    GOOD(hipFree(dx));
    GOOD(hipFree(dy));
    GOOD(hipFree(dh));
    GOOD(hipFree(out));
}

static void long_trace(void) { /* it is cut, never written past its end */
    hipFunction_t f = function_of(module_of("", kernels), "at");
    float *d = device_memory(4);
    int zero = 0;
    void *params[] = {&d, &zero};
    for (int i = 0; i < 40000; i++)
        GOOD(run(f, 1, 1, NULL, params));
    size_t needed = hipcpuTrace(NULL, 0), launched, built, bytes;
    char *text = malloc(needed);
    CHECK(needed > 1000000 && needed <= (1 << 20));
    CHECK(hipcpuTrace(text, needed) == needed && strlen(text) == needed - 1);
    free(text);
    hipcpuCounters(&launched, &built, &bytes);
    CHECK(launched == 40000);
    GOOD(hipFree(d));
}

/* HIPCPU_LAZY=1: nothing has run that nobody waited for */
static void lazy(void) {
    unsigned char *h = host_memory(16), *g = host_memory(16);
    hipStream_t blocking, s, t;
    hipEvent_t e;
    GOOD(hipStreamCreate(&blocking));
    GOOD(hipStreamCreateWithFlags(&s, hipStreamNonBlocking));
    GOOD(hipStreamCreateWithFlags(&t, hipStreamNonBlocking));
    GOOD(hipEventCreateWithFlags(&e, hipEventDisableTiming));
    h[0] = g[0] = 1;
    GOOD(hipMemsetAsync(h, 2, 16, s));
    usleep(20000);
    CHECK(h[0] == 1);
    EXPECT(hipErrorNotReady, hipStreamQuery(s)); /* asking starts it */
    for (int i = 0; i < 1000 && hipStreamQuery(s) != hipSuccess; i++)
        usleep(1000);
    CHECK(h[0] == 2);

    /* the null stream waits for blocking streams, not for the others; waiting for one runs only that */
    GOOD(hipMemsetAsync(h, 3, 16, s));
    GOOD(hipMemsetAsync(g, 3, 16, blocking));
    GOOD(hipStreamSynchronize(NULL));
    CHECK(h[0] == 2 && g[0] == 3);
    unsigned char seen;
    GOOD(hipMemcpy(&seen, h, 1, hipMemcpyDefault));
    CHECK(seen == 2); /* hipMemcpy without waiting for s: the old value */
    GOOD(hipStreamSynchronize(t));
    CHECK(h[0] == 2);
    GOOD(hipStreamSynchronize(s));
    CHECK(h[0] == 3);
    GOOD(hipMemsetAsync(h, 33, 16, NULL));
    GOOD(hipMemsetAsync(g, 33, 16, blocking)); /* behind the null stream */
    CHECK(h[0] == 3);
    GOOD(hipStreamSynchronize(blocking));
    CHECK(h[0] == 33 && g[0] == 33);

    /* an event makes t wait for s, up to the event and no further */
    GOOD(hipMemsetAsync(h, 4, 16, s));
    GOOD(hipEventRecord(e, s));
    GOOD(hipMemsetAsync(h, 5, 16, s));
    GOOD(hipStreamWaitEvent(t, e, 0));
    GOOD(hipMemcpyAsync(g, h, 16, hipMemcpyDefault, t));
    usleep(20000);
    CHECK(h[0] == 33 && g[0] == 33);
    GOOD(hipStreamSynchronize(t));
    CHECK(g[0] == 4 && h[0] == 4);
    GOOD(hipEventSynchronize(e));
    CHECK(h[0] == 4);
    GOOD(hipDeviceSynchronize());
    CHECK(h[0] == 5);

    /* an event recorded again counts from its last record */
    hipEvent_t timed;
    float ms;
    GOOD(hipEventCreate(&timed));
    GOOD(hipEventRecord(timed, s));
    GOOD(hipEventRecord(timed, t));
    GOOD(hipStreamSynchronize(s));
    EXPECT(hipErrorNotReady, hipEventElapsedTime(&ms, timed, timed));
    GOOD(hipStreamSynchronize(t));
    GOOD(hipEventElapsedTime(&ms, timed, timed));
    CHECK(ms == 0);
    GOOD(hipEventRecord(timed, s));
    GOOD(hipEventRecord(e, s));
    GOOD(hipEventRecord(timed, s));
    GOOD(hipEventSynchronize(e));
    EXPECT(hipErrorNotReady, hipEventElapsedTime(&ms, timed, timed));

    /* long chains between streams */
    h[0] = 0;
    for (int i = 0; i < 3000; i++) {
        GOOD(hipMemsetAsync(h, i % 251, 16, i % 2 ? s : t));
        GOOD(hipEventRecord(e, i % 2 ? s : t));
        GOOD(hipStreamWaitEvent(i % 2 ? t : s, e, 0));
    }
    CHECK(h[0] == 0);
    GOOD(hipStreamSynchronize(s));
    CHECK(h[0] == 2999 % 251);

    /* copies of memory that is not pinned are synchronous; freeing waits; destroying a stream waits */
    GOOD(hipMemsetAsync(h, 6, 16, s));
    GOOD(hipMemcpyAsync(&seen, h, 1, hipMemcpyDefault, s));
    CHECK(seen == 6);
    float *d = device_memory(16);
    GOOD(hipMemsetAsync(h, 7, 16, s));
    GOOD(hipFreeAsync(d, s));
    EXPECT(hipErrorInvalidValue, hipMemcpy(&seen, d, 1, hipMemcpyDeviceToHost));
    CHECK(h[0] == 6);
    d = device_memory(16);
    GOOD(hipFree(d));
    CHECK(h[0] == 7);
    GOOD(hipMemsetAsync(h, 8, 16, s));
    GOOD(hipEventRecord(e, s));
    GOOD(hipStreamDestroy(s));
    CHECK(h[0] == 8);
    GOOD(hipEventSynchronize(e)); /* the stream is gone, the event is not */

    /* work that nobody waited for does not keep the process from ending */
    GOOD(hipMemsetAsync(h, 9, 16, t));
}

static void synchronous(void) { /* HIPCPU_SYNC=1, also with HIPCPU_LAZY=1 */
    unsigned char *h = host_memory(16);
    hipStream_t s;
    GOOD(hipStreamCreateWithFlags(&s, hipStreamNonBlocking));
    GOOD(hipMemsetAsync(h, 2, 16, s));
    CHECK(h[0] == 2);
    float *d = device_memory(16);
    GOOD(hipFreeAsync(d, s));
    GOOD(hipHostFree(h));
}

static void *one_thread(void *shared) {
    hipStream_t s = NULL;
    hipModule_t m = module_of("", kernels);
    hipFunction_t own = function_of(m, "add"), common = *(hipFunction_t *)shared;
    float x[300], y[300], a = 1;
    int n = 300;
    GOOD(hipStreamCreateWithFlags(&s, hipStreamNonBlocking));
    for (int round = 0; round < 30; round++) {
        float *dx = device_memory(sizeof x), *dy = device_memory(sizeof y);
        hipEvent_t e = NULL;
        for (int i = 0; i < 300; i++)
            x[i] = (float)(i + round);
        GOOD(hipMemcpyAsync(dx, x, sizeof x, hipMemcpyHostToDevice, s));
        GOOD(hipMemsetAsync(dy, 0, sizeof y, s));
        void *params[] = {&dy, &dx, &a, &n};
        GOOD(run(own, 300, 300, s, params));
        GOOD(run(common, 300, 300, s, params)); /* one kernel, many threads */
        GOOD(hipEventCreate(&e));
        GOOD(hipEventRecord(e, s));
        GOOD(hipStreamWaitEvent(NULL, e, 0));
        GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost)); /* on the null stream */
        GOOD(hipEventDestroy(e));
        int right = 0;
        for (int i = 0; i < 300; i++)
            right += y[i] == 2 * x[i];
        CHECK(right == 300);
        size_t unused, total;
        GOOD(hipMemGetInfo(&unused, &total));
        CHECK(unused <= total - sizeof x - sizeof y);
        GOOD(hipFreeAsync(dx, s));
        GOOD(hipFree(dy));
    }
    GOOD(hipStreamDestroy(s));
    GOOD(hipModuleUnload(m));
    return NULL;
}

static void threads(void) {
    enum { COUNT = 8 };
    pthread_t ids[COUNT];
    hipModule_t m = module_of("", kernels);
    hipFunction_t f = function_of(m, "add");
    for (int i = 0; i < COUNT; i++)
        CHECK(pthread_create(&ids[i], NULL, one_thread, &f) == 0);
    for (int i = 0; i < COUNT; i++)
        pthread_join(ids[i], NULL);
    size_t launched, built, bytes;
    GOOD(hipDeviceSynchronize());
    hipcpuCounters(&launched, &built, &bytes);
    CHECK(launched == COUNT * 60 && built == COUNT + 1 && bytes == 0);
}

static void no_device(void) { /* HIPCPU_NO_DEVICE=1 */
    int n = 7;
    void *p = &n;
    hipStream_t s;
    hipEvent_t e;
    hipModule_t m;
    hipDeviceProp_tR0600 properties;
    EXPECT(hipErrorNoDevice, hipInit(0));
    EXPECT(hipErrorNoDevice, hipGetDeviceCount(&n));
    CHECK(n == 0);
    EXPECT(hipErrorNoDevice, hipGetDevice(&n));
    EXPECT(hipErrorNoDevice, hipSetDevice(0));
    EXPECT(hipErrorNoDevice, hipMalloc(&p, 4));
    CHECK(p == NULL);
    EXPECT(hipErrorNoDevice, hipStreamCreate(&s));
    EXPECT(hipErrorNoDevice, hipEventCreate(&e));
    EXPECT(hipErrorNoDevice, hipModuleLoadData(&m, ""));
    EXPECT(hipErrorNoDevice, hipDeviceSynchronize());
    EXPECT(hipErrorNoDevice, hipGetDevicePropertiesR0600(&properties, 0));
    GOOD(hipRuntimeGetVersion(&n));
    CHECK(n / 10000000 == 6);
}

static void device(void) {
    int n = 0, major = 0;
    size_t total;
    char name[8];
    hipDeviceProp_tR0600 p;
    GOOD(hipInit(0));
    EXPECT(hipErrorInvalidValue, hipInit(1));
    GOOD(hipGetDeviceCount(&n));
    CHECK(n == 1);
    GOOD(hipGetDevice(&n));
    CHECK(n == 0);
    GOOD(hipSetDevice(0));
    EXPECT(hipErrorInvalidDevice, hipSetDevice(1));
    EXPECT(hipErrorInvalidDevice, hipSetDevice(-1));
    GOOD(hipGetDevicePropertiesR0600(&p, 0));
    CHECK(strcmp(p.gcnArchName, "gfx1030") == 0 && p.warpSize == 32); /* HIPCPU_ARCH */
    EXPECT(hipErrorInvalidDevice, hipGetDevicePropertiesR0600(&p, 1));
    EXPECT(hipErrorInvalidValue, hipGetDevicePropertiesR0600(NULL, 0));
    GOOD(hipDeviceGetAttribute(&major, hipDeviceAttributeComputeCapabilityMajor, 0));
    CHECK(major == p.major);
    EXPECT(hipErrorInvalidValue, hipDeviceGetAttribute(&major, (hipDeviceAttribute_t)123456, 0));
    GOOD(hipDeviceTotalMem(&total, 0));
    CHECK(total == p.totalGlobalMem);
    GOOD(hipDeviceGetName(name, sizeof name, 0));
    CHECK(strcmp(name, "hipcpu ") == 0); /* cut to the room given */
    EXPECT(hipErrorInvalidValue, hipDeviceGetName(name, 0, 0));

    (void)hipGetLastError();
    CHECK(hipPeekAtLastError() == hipSuccess);
    EXPECT(hipErrorInvalidDevice, hipSetDevice(3));
    GOOD(hipSetDevice(0));
    CHECK(hipPeekAtLastError() == hipErrorInvalidDevice && hipGetLastError() == hipErrorInvalidDevice);
    CHECK(hipGetLastError() == hipSuccess);
    CHECK(strcmp(hipGetErrorName(hipErrorNotReady), "hipErrorNotReady") == 0);
    CHECK(strcmp(hipGetErrorString(hipErrorOutOfMemory), "out of memory") == 0);
    CHECK(strcmp(hipGetErrorName((hipError_t)4242), "hipErrorUnknown") == 0);
}

static void *on_another_thread(void *device) {
    GOOD(hipGetDevice(device));
    return NULL;
}

static void two_devices(void) { /* HIPCPU_DEVICES=2 */
    int n = 0, *of[2];
    const int ones[2] = {1, 1};
    int got[2];
    size_t before, unused, total;
    hipStream_t streams[2];
    hipEvent_t events[2], later;
    hipFunction_t slow[2];
    hipPointerAttribute_t attributes;
    GOOD(hipGetDeviceCount(&n));
    CHECK(n == 2);
    for (int i = 0; i < 2; i++) {
        GOOD(hipSetDevice(i));
        GOOD(hipGetDevice(&n));
        CHECK(n == i);
        GOOD(hipMemGetInfo(&before, &total));
        of[i] = device_memory(sizeof ones);
        GOOD(hipMemGetInfo(&unused, &total));
        CHECK(before == total && unused == total - sizeof ones); /* of this device alone */
        GOOD(hipPointerGetAttributes(&attributes, of[i]));
        CHECK(attributes.device == i);
        GOOD(hipStreamCreateWithFlags(&streams[i], hipStreamNonBlocking));
        GOOD(hipEventCreate(&events[i]));
        slow[i] = function_of(module_of("", kernels), "slow");
        GOOD(hipMemcpy(of[i], ones, sizeof ones, hipMemcpyHostToDevice));
    }
    EXPECT(hipErrorInvalidDevice, hipSetDevice(2));
    EXPECT(hipErrorInvalidDevice, hipDeviceGetName((char[8]){0}, 8, 2));
    n = 5; /* another thread has the first device */
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, on_another_thread, &n) == 0);
    pthread_join(thread, NULL);
    CHECK(n == 0);

    int steps = 1;
    void *own[] = {&of[1], &steps}, *foreign[] = {&of[0], &steps};
    GOOD(run(slow[1], 1, 1, streams[1], own));
    GOOD(run(slow[1], 1, 1, NULL, own)); /* the null stream is that of the device */
    EXPECT(hipErrorIllegalAddress, run(slow[1], 1, 1, streams[1], foreign));
    EXPECT(hipErrorInvalidHandle, run(slow[0], 1, 1, streams[1], own));
    EXPECT(hipErrorInvalidHandle, run(slow[1], 1, 1, streams[0], own));
    EXPECT(hipErrorInvalidHandle, run(slow[0], 1, 1, streams[0], foreign)); /* all of one, which is not current */
    GOOD(hipDeviceSynchronize());
    GOOD(hipMemcpy(got, of[1], sizeof got, hipMemcpyDeviceToHost));
    CHECK(got[0] == (int)((1664525u + 1013904223u) * 1664525u + 1013904223u) && got[1] == 1);
    GOOD(hipMemcpy(got, of[0], sizeof got, hipMemcpyDeviceToHost));
    CHECK(got[0] == 1);

    EXPECT(hipErrorInvalidHandle, hipEventRecord(events[0], streams[1]));
    EXPECT(hipErrorInvalidHandle, hipEventRecord(events[0], NULL));
    GOOD(hipEventRecord(events[1], NULL));
    GOOD(hipEventRecord(events[0], streams[0])); /* of the same device, whichever is current */
    GOOD(hipStreamWaitEvent(streams[1], events[0], 0));
    GOOD(hipStreamSynchronize(streams[1]));
    GOOD(hipEventSynchronize(events[0]));
    GOOD(hipEventSynchronize(events[1]));
    float ms;
    EXPECT(hipErrorInvalidHandle, hipEventElapsedTime(&ms, events[0], events[1]));
    GOOD(hipEventCreate(&later));
    GOOD(hipEventRecord(later, NULL));
    GOOD(hipEventSynchronize(later));
    GOOD(hipEventElapsedTime(&ms, events[1], later));

    /* A null stream waits for its own device's blocking streams only, and so does hipDeviceSynchronize. */
    GOOD(hipSetDevice(0));
    hipEvent_t ran;
    GOOD(hipEventCreate(&ran));
    steps = 40000000;
    GOOD(run(slow[0], 1, 1, NULL, foreign));
    GOOD(hipEventRecord(ran, NULL));
    GOOD(hipSetDevice(1));
    const char *lazy = getenv("HIPCPU_LAZY");
    if (lazy != NULL) {
        GOOD(hipMemsetAsync(of[1], 0, 4, NULL));
        GOOD(hipDeviceSynchronize());
        EXPECT(hipErrorNotReady, hipEventQuery(ran));
    }
    GOOD(hipFree(of[0])); /* waits for the device that the memory is of */
    GOOD(hipEventQuery(ran));
    EXPECT(hipErrorInvalidValue, hipFreeAsync(of[1], streams[0]));
    GOOD(hipFreeAsync(of[1], streams[1]));
    void *p;
    GOOD(hipMallocAsync(&p, 4, streams[0])); /* of the stream's device */
    GOOD(hipPointerGetAttributes(&attributes, p));
    CHECK(attributes.device == 0);
    GOOD(hipFree(p));
    GOOD(hipDeviceSynchronize());
    GOOD(hipMemGetInfo(&unused, &total));
    CHECK(unused == total);
}

static void failing_on_one_device(void) { /* HIPCPU_DEVICES=2 HIPCPU_FAIL_KERNEL=of64 */
    float *y = device_memory(256);
    void *params[] = {&y};
    GOOD(run(function_of(module_of("", kernels), "of64"), 64, 64, NULL, params));
    EXPECT(hipErrorLaunchFailure, hipDeviceSynchronize());
    GOOD(hipSetDevice(1));
    GOOD(hipDeviceSynchronize());
    GOOD(hipSetDevice(0));
    EXPECT(hipErrorLaunchFailure, hipDeviceSynchronize());
}

static void refused_variable(void) { /* HIPCPU_ALIGN=12, HIPCPU_DEVICES=9 */
    void *p;
    EXPECT(hipErrorNoDevice, hipMalloc(&p, 4));
}

static void after_fork(void) {
    int status;
    void *p = device_memory(4);
    pid_t child = fork();
    if (child == 0)
        _exit(hipMalloc(&p, 4) == hipErrorNotInitialized && hipFree(p) == hipErrorNotInitialized ? 0 : 1);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    GOOD(hipFree(p));
}

static void failing_kernel(void) { /* HIPCPU_FAIL_KERNEL=of64: the error comes with the next wait, and stays */
    hipModule_t m = module_of("", kernels);
    float *d = device_memory(4 * 64), x = 0;
    void *params[] = {&d};
    GOOD(hipMemcpy(&x, d, 4, hipMemcpyDeviceToHost));
    GOOD(run(function_of(m, "of64"), 64, 64, NULL, params));
    EXPECT(hipErrorLaunchFailure, hipDeviceSynchronize());
    EXPECT(hipErrorLaunchFailure, hipStreamSynchronize(NULL));
    EXPECT(hipErrorLaunchFailure, hipStreamQuery(NULL));
    EXPECT(hipErrorLaunchFailure, hipMemcpy(&x, d, 4, hipMemcpyDeviceToHost));
    EXPECT(hipErrorLaunchFailure, hipModuleUnload(m));
    EXPECT(hipErrorLaunchFailure, hipFree(d));
    size_t launched, built, bytes;
    hipcpuCounters(&launched, &built, &bytes);
    CHECK(bytes == 0); /* freed all the same */
}

/* ---------------------------------------------------------------- machine code; no sanitizer knows its coroutines */

#ifdef NATIVE

static const char opencl[] =
    "kernel void returns(global float *y, int n) { local float sum[64]; int i = get_local_id(0);\n"
    "  if (i >= n) return;\n" /* before a barrier: as on an AMD GPU, the others do not wait for it */
    "  sum[i] = i; barrier(CLK_LOCAL_MEM_FENCE); float r = 0; for (int j = 0; j < n; j++) r += sum[j]; y[i] = r; }\n"
    "kernel void partly(global float *y) { y[get_global_id(0)] = get_local_size(0) + 1000 * get_group_id(0); }\n"
    "kernel void unwritten(global float *y) { local float sum[64]; int i = get_local_id(0);\n"
    "  if (i < 32) sum[i] = i; barrier(CLK_LOCAL_MEM_FENCE); y[i] = sum[i]; }\n"
    "kernel void past(global float *y, int i) { local float sum[64]; sum[get_local_id(0)] = y[0];\n"
    "  local float *p = sum; p[i] = 1; barrier(CLK_LOCAL_MEM_FENCE); y[0] = sum[0]; }\n"
    "kernel void sizes(global ulong *y, char a, ushort b, half c, int d, float e, long f, double g, global int *z)\n"
    "{ y[0] = a; y[1] = b; y[2] = (ulong)(float)c; y[3] = d; y[4] = (ulong)e; y[5] = f; y[6] = (ulong)g;\n"
    "  y[7] = z == 0; }\n"
    "kernel void vectors(global float *y) { float4 a = *(global float4 *)(y + 1); *(global float4 *)(y + 1) = mad(a, a, rsqrt(a)); }\n";
static const char greedy[] = "kernel void greedy(global float *y) { local float sum[16385]; sum[(int)y[0]] = 1;\n"
                             "  barrier(CLK_LOCAL_MEM_FENCE); y[0] = sum[(int)y[1]]; }\n";
static const char hip[] =
    "template <class T> __device__ T twice(T a) { return a + a; }\n"
    "extern \"C\" __global__ void __launch_bounds__(8 * 8) reduce(const float *__restrict x, float *y, unsigned n, bool more)\n"
    "{ __shared__ float sum[64]; sum[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x]; __syncthreads();\n"
    "  for (unsigned s = 32; s > 0; s >>= 1) { if (threadIdx.x < s) sum[threadIdx.x] += sum[threadIdx.x + s];\n"
    "  __syncthreads(); } if (threadIdx.x == 0 && blockIdx.x < n) y[blockIdx.x] = more ? twice(sum[0]) : fma(2.0f, sum[0], 0.0f); }\n";

static const char waves_source[] = /* waves take different numbers of turns; a structure holds an address */
    "struct both { float *y; int n; };\n"
    "extern \"C\" __global__ void waves(both b) { extern __shared__ uint4 memory[]; float *kept = (float *)memory;\n"
    "  const int id = threadIdx.y * blockDim.x + threadIdx.x; double v = id; float w = id;\n"
    "  for (int i = 0; i <= id >> 5; i++) for (int lane = 16; lane; lane >>= 1) v += __shfl_xor(v, lane, 32);\n"
    "  w = __shfl_xor(w, 1, 32);\n"
    "  kept[id] = (float)v; __syncthreads(); b.y[id] = kept[id ^ 32]; b.y[128 + id] = w;\n"
    "  int any = 0; for (int i = 0; i < 10; i++) any |= __syncthreads_or(id == b.n && (i == 2 || i == 9)) << i;\n"
    "  b.y[256 + id] = any; }\n"
    "extern \"C\" __global__ void part_ways(float *y)\n"
    "{ float v = threadIdx.x; if (threadIdx.x & 1) v = __shfl_xor(v, 1, 32); __syncthreads(); y[threadIdx.x] = v; }\n"
    "extern \"C\" __global__ void behind(float *y) { extern __shared__ uint4 memory[]; memory[16].x = 1; __syncthreads(); }\n";

static hipModule_t native_of(const char *source, const char *suffix) {
    char name[64], command[256];
    hipModule_t module = NULL;
    snprintf(name, sizeof name, "/tmp/native-%ld%s", (long)getpid(), suffix);
    FILE *f = fopen(name, "w");
    CHECK(f != NULL && fputs(source, f) >= 0 && fclose(f) == 0);
    snprintf(command, sizeof command, "/opt/stand-ins/hipstub.sh -DMIO_BN_VARIANT=3 -o %s.out %s", name, name);
    CHECK(system(command) == 0);
    snprintf(command, sizeof command, "%s.out", name);
    GOOD(hipModuleLoad(&module, command));
    unlink(name);
    unlink(command);
    return module;
}

static void native(void) {
    hipModule_t cl = native_of(opencl, ".cl"), h = native_of(hip, ".cpp");
    static float y[1024], x[640];
    float *dy = device_memory(sizeof y), *dx = device_memory(sizeof x);
    int n = 40;
    void *two[] = {&dy, &n}, *one[] = {&dy};
    GOOD(run(function_of(cl, "returns"), 64, 64, NULL, two));
    GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost));
    CHECK(y[0] == 780 && y[39] == 780 && y[40] != y[40]); /* 0 + ... + 39 */

    GOOD(run(function_of(cl, "partly"), 1000, 256, NULL, one));
    GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost));
    CHECK(y[0] == 256 && y[767] == 2256 && y[768] == 3232 && y[999] == 3232 && y[1000] != y[1000]);

    GOOD(run(function_of(cl, "unwritten"), 64, 64, NULL, one)); /* local memory is NaN at first, in each group */
    GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost));
    CHECK(y[31] == 31 && y[32] != y[32]);

    unsigned long sizes[8];
    unsigned long *ds = device_memory(sizeof sizes);
    char a = 1;
    unsigned short b = 2, c = 0x4200; /* 3 */
    int d = 4;
    float e = 5;
    long f = 6;
    double g = 7;
    int *z = NULL;
    void *of_sizes[] = {&ds, &a, &b, &c, &d, &e, &f, &g, &z};
    GOOD(run(function_of(cl, "sizes"), 1, 1, NULL, of_sizes));
    GOOD(hipMemcpy(sizes, ds, sizeof sizes, hipMemcpyDeviceToHost));
    for (unsigned long i = 0; i < 7; i++)
        CHECK(sizes[i] == i + 1);
    CHECK(sizes[7] == 1);

    const float four[] = {0, 1, 4, 16, 0.25f};
    GOOD(hipMemcpy(dy, four, sizeof four, hipMemcpyHostToDevice));
    GOOD(run(function_of(cl, "vectors"), 1, 1, NULL, one)); /* not aligned */
    GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost));
    CHECK(y[1] == 2 && y[2] == 16.5f && y[3] == 256.25f && y[4] == 2.0625f);

    for (int i = 0; i < 640; i++)
        x[i] = (float)i;
    GOOD(hipMemcpy(dx, x, sizeof x, hipMemcpyHostToDevice));
    unsigned groups = 10;
    for (char more = 0; more < 2; more++) {
        void *params[] = {&dx, &dy, &groups, &more};
        GOOD(run(function_of(h, "reduce"), 640, 64, NULL, params));
        GOOD(hipMemcpy(y, dy, sizeof y, hipMemcpyDeviceToHost));
        CHECK(y[0] == 4032 && y[9] == 2 * (64 * 9 * 64 + 2016));
    }
    char text[1000];
    CHECK(hipcpuTrace(text, sizeof text) < sizeof text && strstr(text, "reduce variant=3 grid=640x1x1 block=64x1x1\n") != NULL);
    hipFunction_t none;
    EXPECT(hipErrorNotFound, hipModuleGetFunction(&none, h, "absent"));
    GOOD(hipModuleUnload(cl));
    GOOD(hipModuleUnload(h));
    GOOD(hipFree(dx));
    GOOD(hipFree(dy));
}

static void waves(void) {
    hipModule_t m = native_of(waves_source, ".cpp");
    static float y[384];
    struct {
        float *y;
        int n;
    } both = {device_memory(sizeof y), 77};
    void *params[] = {&both};
    hipFunction_t f = function_of(m, "waves");
    int fixed = -1;
    GOOD(hipFuncGetAttribute(&fixed, HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f));
    CHECK(fixed == 0);
    GOOD(hipModuleLaunchKernel(f, 1, 1, 1, 64, 2, 1, 512, NULL, params, NULL));
    GOOD(hipMemcpy(y, both.y, sizeof y, hipMemcpyDeviceToHost));
    CHECK(y[32] == 496 && y[0] == 1520 * 32 && y[96] == 2544 * 1024 && y[64] == 3568 * 32768.0f);
    CHECK(y[128] == 1 && y[129] == 0 && y[255] == 126);
    CHECK(y[256] == 516 && y[383] == 516);
    EXPECT(hipErrorInvalidValue, hipModuleLaunchKernel(f, 1, 1, 1, 64, 2, 1, 65537, NULL, params, NULL));
}

static void parting_ways(void) {
    float *d = device_memory(256);
    void *params[] = {&d};
    GOOD(run(function_of(native_of(waves_source, ".cpp"), "part_ways"), 64, 64, NULL, params));
    EXPECT(hipErrorLaunchFailure, hipDeviceSynchronize());
}

static void behind_memory_of_the_launch(void) {
    float *d = device_memory(256);
    void *params[] = {&d};
    GOOD(hipModuleLaunchKernel(function_of(native_of(waves_source, ".cpp"), "behind"), 1, 1, 1, 1, 1, 1, 256, NULL, params, NULL));
    hipDeviceSynchronize();
    _exit(42);
}

static void too_much_local_memory(void) {
    hipFunction_t f;
    EXPECT(hipErrorOutOfMemory, hipModuleGetFunction(&f, module_of("", greedy), "greedy"));
    EXPECT(hipErrorOutOfMemory, hipModuleGetFunction(&f, native_of(greedy, ".cl"), "greedy"));
}

static void behind_local_memory(int index) {
    hipFunction_t f = function_of(native_of(opencl, ".cl"), "past");
    float *d = device_memory(4);
    void *params[] = {&d, &index};
    GOOD(hipMemset(d, 0, 4));
    GOOD(run(f, 1, 1, NULL, params));
    EXPECT(hipErrorLaunchFailure, hipDeviceSynchronize());
}
static void a_little_behind_local_memory(void) {
    behind_local_memory(200); /* there are three such arrays, one behind the other */
}
static void far_behind_local_memory(void) {
    behind_local_memory(1200);
    _exit(42);
}
#endif

/* Work that nothing orders comes in any order, and what is ordered in its own. */
static void any_order(void) { /* HIPCPU_SEED */
    hipModule_t m = module_of("", "kernel void next(global int *count, global int *y) { y[0] = count[0]++; }\n");
    hipFunction_t f = function_of(m, "next");
    hipStream_t s[8];
    int *count = device_memory(4), *y = device_memory(4 * 16), got[16], sorted = 1;
    for (int i = 0; i < 8; i++)
        GOOD(hipStreamCreateWithFlags(&s[i], hipStreamNonBlocking));
    GOOD(hipMemset(count, 0, 4));
    for (int i = 0; i < 16; i++) {
        int *at = y + i;
        void *params[] = {&count, &at};
        GOOD(run(f, 1, 1, s[i % 8], params));
    }
    GOOD(hipDeviceSynchronize());
    GOOD(hipMemcpy(got, y, sizeof got, hipMemcpyDeviceToHost));
    for (int i = 0; i < 8; i++)
        CHECK(got[i] < got[i + 8]);
    for (int i = 1; i < 16; i++)
        sorted = sorted && got[i - 1] < got[i];
    CHECK(!sorted);
}

/* ---------------------------------------------------------------- cases that must end with a fault */

static void write_at(size_t size, int index) {
    hipFunction_t f = function_of(module_of("", kernels), "at");
    float *d = device_memory(size);
    void *params[] = {&d, &index};
    GOOD(run(f, 1, 1, NULL, params));
    GOOD(hipDeviceSynchronize());
    _exit(42); /* it lived */
}
static void kernel_past_the_end(void) {
    write_at(12, 3);
}
static void kernel_before_the_beginning(void) {
    write_at(4096, -1);
}
static void kernel_before_a_small_block(void) {
    write_at(12, -1);
}
static void host_reads_device_memory(void) {
    volatile float *d = device_memory(12);
    _exit(d[1] == 0 ? 42 : 43);
}
static void host_past_a_host_block(void) {
    volatile char *h = host_memory(12);
    h[12] = 1;
    _exit(42);
}
static void fault_elsewhere(void) { /* not ours: no message, the same end */
    device_memory(4);
    volatile int *volatile wild = (volatile int *)(uintptr_t)64;
    _exit(*wild == 0 ? 42 : 42);
}
static void signal_sent(void) {
    device_memory(4);
    raise(SIGSEGV);
    _exit(42);
}

struct test {
    const char *name;
    void (*function)(void);
    const char *variables[3];
    const char *message; /* of a fault that must happen */
};

static const struct test cases[] = {
    {"device", device, {"HIPCPU_ARCH=gfx1030"}, NULL},
    {"memory", memory, {NULL}, NULL},
    {"out of memory", out_of_memory, {"HIPCPU_MEMORY_MIB=2"}, NULL},
    {"copies", copies, {NULL}, NULL},
    {"copies, lazy", copies, {"HIPCPU_LAZY=1"}, NULL},
    {"streams", streams, {NULL}, NULL},
    {"streams, lazy", streams, {"HIPCPU_LAZY=1"}, NULL},
    {"events", events, {NULL}, NULL},
    {"events, lazy", events, {"HIPCPU_LAZY=1"}, NULL},
    {"modules", modules, {NULL}, NULL},
    {"modules, lazy", modules, {"HIPCPU_LAZY=1"}, NULL},
    {"modules, verbose", modules, {"HIPCPU_VERBOSE=1"}, NULL},
    {"long trace", long_trace, {NULL}, NULL},
    {"lazy", lazy, {"HIPCPU_LAZY=1"}, NULL},
    {"synchronous", synchronous, {"HIPCPU_SYNC=1"}, NULL},
    {"synchronous, lazy", synchronous, {"HIPCPU_SYNC=1", "HIPCPU_LAZY=1"}, NULL},
    {"threads", threads, {NULL}, NULL},
    {"threads, lazy", threads, {"HIPCPU_LAZY=1"}, NULL},
    {"no device", no_device, {"HIPCPU_NO_DEVICE=1"}, NULL},
    {"bad alignment", refused_variable, {"HIPCPU_ALIGN=12"}, NULL},
    {"too many devices", refused_variable, {"HIPCPU_DEVICES=9"}, NULL},
    {"two devices", two_devices, {"HIPCPU_DEVICES=2"}, NULL},
    {"two devices, lazy", two_devices, {"HIPCPU_DEVICES=2", "HIPCPU_LAZY=1"}, NULL},
    {"failing on one device", failing_on_one_device, {"HIPCPU_DEVICES=2", "HIPCPU_FAIL_KERNEL=of64"}, NULL},
    {"after fork", after_fork, {NULL}, NULL},
    {"failing kernel", failing_kernel, {"HIPCPU_FAIL_KERNEL=of64"}, NULL},
    {"kernel past the end", kernel_past_the_end, {"HIPCPU_ALIGN=4"},
     "access at offset 12 of a device block of 12 bytes"},
    {"kernel before the beginning", kernel_before_the_beginning, {NULL},
     "access 4 bytes before a device block of 4096 bytes"},
    {"kernel before a small block", kernel_before_a_small_block, {"HIPCPU_BEFORE=1"},
     "access 4 bytes before a device block of 12 bytes"},
#ifdef NATIVE
    {"native", native, {NULL}, NULL},
    {"native, lazy", native, {"HIPCPU_LAZY=1"}, NULL},
    {"waves", waves, {NULL}, NULL},
    {"lanes part ways", parting_ways, {NULL}, NULL},
    {"behind local memory of the launch", behind_memory_of_the_launch, {NULL}, "access past the end of a kernel's 256 bytes of local memory"},
    {"too much local memory", too_much_local_memory, {NULL}, NULL},
    {"a little behind local memory", a_little_behind_local_memory, {NULL}, NULL},
    {"far behind local memory", far_behind_local_memory, {NULL}, "access past the end of a kernel's 768 bytes of local memory"},
#endif
    {"any order", any_order, {"HIPCPU_SEED=1"}, NULL},
    {"streams, any order", streams, {"HIPCPU_SEED=2"}, NULL},
    {"events, any order", events, {"HIPCPU_SEED=3"}, NULL},
    {"threads, any order", threads, {"HIPCPU_SEED=4"}, NULL},
    {"host reads device memory", host_reads_device_memory, {NULL},
     "access by the host at offset 4 of a device block of 12 bytes"},
    {"host past a host block", host_past_a_host_block, {"HIPCPU_ALIGN=4"},
     "access at offset 12 of a host block of 12 bytes"},
    {"fault elsewhere", fault_elsewhere, {NULL}, ""},
    {"signal sent", signal_sent, {NULL}, ""},
};

static int run_case(const struct test *t, const char *self) {
    char text[65536];
    size_t length = 0;
    ssize_t n;
    int out[2], status;
    if (pipe(out) != 0)
        abort();
    pid_t child = fork();
    if (child == 0) {
        dup2(out[1], STDERR_FILENO);
        close(out[0]);
        close(out[1]);
        for (int i = 0; i < 3 && t->variables[i] != NULL; i++)
            putenv((char *)(uintptr_t)t->variables[i]);
        execl(self, self, t->name, (char *)NULL);
        _exit(127);
    }
    close(out[1]);
    while ((n = read(out[0], text + length, sizeof text - 1 - length)) > 0) {
        length += (size_t)n;
        if (length == sizeof text - 1)
            length /= 2; /* keep the beginning; a pipe must be read to its end */
    }
    close(out[0]);
    text[length] = '\0';
    waitpid(child, &status, 0);
    int good;
    if (t->message == NULL) /* exit status 0, so no sanitizer had anything to say either */
        good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    else /* the fault's own signal, or a sanitizer's exit status in its place */
        good = (WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV
                                    : WEXITSTATUS(status) != 42 && WEXITSTATUS(status) != 0) &&
               strstr(text, t->message) != NULL && (t->message[0] != '\0' || strstr(text, "[hipcpu] access") == NULL);
    printf("%s: %s\n", good ? "passed" : "FAILED", t->name);
    if (!good)
        printf("wait status %#x, its stderr:\n%s\n", (unsigned)status, text);
    fflush(stdout);
    return good;
}

int main(int argc, char **argv) {
    size_t count = sizeof cases / sizeof *cases, failed = 0;
    if (argc > 1) {
        for (size_t i = 0; i < count; i++)
            if (strcmp(cases[i].name, argv[1]) == 0) {
                cases[i].function();
                return failures ? 1 : 0;
            }
        fprintf(stderr, "no case %s\n", argv[1]);
        return 2;
    }
    for (size_t i = 0; i < count; i++)
        failed += !run_case(&cases[i], "/proc/self/exe");
    printf("%zu cases, %zu failed\n", count, failed);
    return failed ? 1 : 0;
}
