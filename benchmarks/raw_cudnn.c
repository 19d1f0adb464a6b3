/* cuDNN's plain batch-norm entry points called from C, for `pybnorm bench device`: what a binding is held against.
 *
 *   cc -O2 raw_cudnn.c -o raw_cudnn -ldl -lm
 *   raw_cudnn LIBCUDNN <commands
 *
 * Prints the device's name as JSON, then reads commands from standard input and answers each with one line of JSON:
 *
 *   time train|infer|backward f32|f16|bf16 nchw|nhwc SETS REPLAYS N C [spatial...]
 *     Device time per call of CUDNN_BATCHNORM_SPATIAL: events around replays of a graph of back-to-back calls, over
 *     SETS sets of tensors in turn; around plain calls where they cannot be captured. "error" is the largest
 *     difference from the same computed in double, over the largest value, of the first and the last channel.
 *   host train|infer|backward BATCHES CALLS
 *     Host microseconds per call of a (2,8,4,4) tensor: median of BATCHES batches of CALLS calls, the device idle
 *     before each.
 *
 * No header of CUDA is needed: cuDNN's prototypes are pybnorm's own, the driver's are below.
 * Exit status: 0 the end of standard input, 1 an error that ends everything, 2 bad arguments, 3 no device.
 */
#define _POSIX_C_SOURCE 200809L
#include "../pybnorm/backends/cudnn/api.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EXIT_USAGE = 2, EXIT_NO_DEVICE = 3 };
enum { MAX_RANK = 8, MAX_SETS = 16, MAX_REPLAYS = 100, MAX_BATCHES = 10000, MAX_MEMORY = 3 * MAX_SETS + 10 };
enum { TRAIN, INFER, BACKWARD };

typedef unsigned long long device_pointer;

#define DRIVER_SYMBOLS(X)                                                        \
    X(cuInit, (unsigned flags))                                                  \
    X(cuDeviceGet, (int *device, int ordinal))                                   \
    X(cuDeviceGetName, (char *name, int size, int device))                       \
    X(cuDevicePrimaryCtxRetain, (void **context, int device))                    \
    X(cuCtxSetCurrent, (void *context))                                          \
    X(cuMemAlloc_v2, (device_pointer *pointer, size_t bytes))                    \
    X(cuMemFree_v2, (device_pointer pointer))                                    \
    X(cuMemcpyHtoD_v2, (device_pointer to, const void *from, size_t bytes))      \
    X(cuMemcpyDtoH_v2, (void *to, device_pointer from, size_t bytes))            \
    X(cuMemcpyDtoD_v2, (device_pointer to, device_pointer from, size_t bytes))   \
    X(cuMemsetD8_v2, (device_pointer to, unsigned char value, size_t bytes))     \
    X(cuStreamCreate, (void **stream, unsigned flags))                           \
    X(cuStreamSynchronize, (void *stream))                                       \
    X(cuEventCreate, (void **event, unsigned flags))                             \
    X(cuEventRecord, (void *event, void *stream))                                \
    X(cuEventElapsedTime, (float *milliseconds, void *start, void *end))         \
    X(cuStreamBeginCapture_v2, (void *stream, int mode))                         \
    X(cuStreamEndCapture, (void *stream, void **graph))                          \
    X(cuGraphInstantiateWithFlags, (void **executable, void *graph, unsigned long long flags)) \
    X(cuGraphLaunch, (void *executable, void *stream))                           \
    X(cuGraphExecDestroy, (void *executable))                                    \
    X(cuGraphDestroy, (void *graph))

#define CUDNN_SYMBOLS(X)                    \
    X(cudnnGetErrorString)                  \
    X(cudnnCreate)                          \
    X(cudnnSetStream)                       \
    X(cudnnCreateTensorDescriptor)          \
    X(cudnnDestroyTensorDescriptor)         \
    X(cudnnSetTensorNdDescriptor)           \
    X(cudnnDeriveBNTensorDescriptor)        \
    X(cudnnBatchNormalizationForwardTraining)  \
    X(cudnnBatchNormalizationForwardInference) \
    X(cudnnBatchNormalizationBackward)

#define DRIVER_POINTER(name, parameters) static int(*name) parameters;
DRIVER_SYMBOLS(DRIVER_POINTER)
#define CUDNN_POINTER(name) static pbn_##name##_fn name;
CUDNN_SYMBOLS(CUDNN_POINTER)

static char failure[400];
static void *stream, *cudnn, *events[MAX_REPLAYS + 1];

/* The driver's status, or cuDNN's, as the reason why the function returns 0. */
#define DRIVER(call) \
    do { int s_ = (call); if (s_) { snprintf(failure, sizeof failure, "%s: CUresult %d", #call, s_); return 0; } } while (0)
#define CUDNN(call) \
    do { int s_ = (call); if (s_) { snprintf(failure, sizeof failure, "%.150s: %s", #call, cudnnGetErrorString(s_)); \
         return 0; } } while (0)

/* One case: its shape, its memory on the device, and the values of x and dy as indices into `value`. */
typedef struct problem {
    int operation, dtype, rank, channels_last, sets;
    size_t itemsize, images, channels, area, elements;
    void *data, *parameters; /* descriptors */
    device_pointer memory[MAX_MEMORY], x[MAX_SETS], dy[MAX_SETS], y[MAX_SETS]; /* backward writes dx into y */
    device_pointer scale, bias, mean, variance, running_mean, running_variance, saved_mean, saved_inv, dscale, dbias;
    int allocations;
    unsigned char *x_values, *dy_values;
    void *staging;
} problem;

static const float SCALE = 1.5f, BIAS = 0.5f, MEAN = 0.25f, VARIANCE = 1.5f;
static const double EPSILON = 1e-5, FACTOR = 0.1;

/* 256 values from -2 to 1.984, exact in float16 and bfloat16. */
static float value(unsigned index) { return ((int)index - 128) / 64.0f; }

static unsigned bits16(float number, int dtype)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (dtype == PBN_CUDNN_DATA_BFLOAT16) return bits >> 16;
    if (number == 0) return 0;
    return (bits >> 16 & 0x8000) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023); /* normal, exact */
}

static double number_at(const void *memory, size_t at, int dtype)
{
    if (dtype == PBN_CUDNN_DATA_FLOAT) return ((const float *)memory)[at];
    unsigned half = ((const uint16_t *)memory)[at];
    if (dtype == PBN_CUDNN_DATA_BFLOAT16) {
        uint32_t bits = (uint32_t)half << 16;
        float number;
        memcpy(&number, &bits, sizeof number);
        return number;
    }
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                : exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return half & 0x8000 ? -size : size;
}

static size_t place(const problem *p, size_t image, size_t channel, size_t at)
{
    return p->channels_last ? (image * p->area + at) * p->channels + channel
                            : (image * p->channels + channel) * p->area + at;
}

static int allocate(problem *p, device_pointer *pointer, size_t bytes)
{
    DRIVER(cuMemAlloc_v2(pointer, bytes));
    p->memory[p->allocations++] = *pointer;
    DRIVER(cuMemsetD8_v2(*pointer, 0xff, bytes)); /* NaN in every type: what is not written is seen */
    return 1;
}

static int vector(problem *p, device_pointer *pointer, float constant)
{
    float *host = p->staging;
    for (size_t i = 0; i < p->channels; i++) host[i] = constant;
    if (!allocate(p, pointer, p->channels * sizeof *host)) return 0;
    DRIVER(cuMemcpyHtoD_v2(*pointer, host, p->channels * sizeof *host));
    return 1;
}

/* Random indices, and their values on the device. */
static int fill(problem *p, device_pointer to, unsigned char *values, uint64_t seed)
{
    float as_float[256];
    uint16_t as_half[256];
    for (unsigned i = 0; i < 256; i++) {
        as_float[i] = value(i);
        as_half[i] = p->itemsize == 2 ? (uint16_t)bits16(value(i), p->dtype) : 0;
    }
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < p->elements; i++) {
        if (i % 4 == 0) state ^= state << 13, state ^= state >> 7, state ^= state << 17; /* xorshift64 (Marsaglia 2003) */
        values[i] = (unsigned char)(state >> (16 + 8 * (i % 4)));
        if (p->itemsize == 4) ((float *)p->staging)[i] = as_float[values[i]];
        else ((uint16_t *)p->staging)[i] = as_half[values[i]];
    }
    DRIVER(cuMemcpyHtoD_v2(to, p->staging, p->elements * p->itemsize));
    return 1;
}

static int call(const problem *p, int operation, int set)
{
    static const float one = 1, zero = 0;
    void *x = (void *)p->x[set], *dy = (void *)p->dy[set], *y = (void *)p->y[set];
    if (operation == TRAIN)
        CUDNN(cudnnBatchNormalizationForwardTraining(
            cudnn, PBN_CUDNN_BATCHNORM_SPATIAL, &one, &zero, p->data, x, p->data, y, p->parameters, (void *)p->scale,
            (void *)p->bias, FACTOR, (void *)p->running_mean, (void *)p->running_variance, EPSILON,
            (void *)p->saved_mean, (void *)p->saved_inv));
    else if (operation == INFER)
        CUDNN(cudnnBatchNormalizationForwardInference(
            cudnn, PBN_CUDNN_BATCHNORM_SPATIAL, &one, &zero, p->data, x, p->data, y, p->parameters, (void *)p->scale,
            (void *)p->bias, (void *)p->mean, (void *)p->variance, EPSILON));
    else
        CUDNN(cudnnBatchNormalizationBackward(
            cudnn, PBN_CUDNN_BATCHNORM_SPATIAL, &one, &zero, &one, &zero, p->data, x, p->data, dy, p->data, y,
            p->parameters, (void *)p->scale, (void *)p->dscale, (void *)p->dbias, EPSILON, (void *)p->saved_mean,
            (void *)p->saved_inv));
    return 1;
}

static int prepare(problem *p, const int *given, int given_rank)
{
    int dims[MAX_RANK], strides[MAX_RANK];
    p->rank = given_rank < 4 ? 4 : given_rank; /* cuDNN's batch norm takes no fewer */
    p->images = (size_t)given[0], p->channels = (size_t)given[1], p->area = 1;
    for (int i = 0; i < p->rank; i++) {
        dims[i] = i < given_rank ? given[i] : 1;
        if (i > 1) p->area *= (size_t)dims[i];
    }
    p->elements = p->images * p->channels * p->area;
    p->itemsize = p->dtype == PBN_CUDNN_DATA_FLOAT ? 4 : 2;
    int step = p->channels_last ? dims[1] : 1;
    for (int i = p->rank - 1; i > 1; i--) strides[i] = step, step *= dims[i];
    strides[1] = p->channels_last ? 1 : (int)p->area;
    strides[0] = (int)(p->channels * p->area);
    CUDNN(cudnnCreateTensorDescriptor(&p->data));
    CUDNN(cudnnCreateTensorDescriptor(&p->parameters));
    CUDNN(cudnnSetTensorNdDescriptor(p->data, p->dtype, p->rank, dims, strides));
    CUDNN(cudnnDeriveBNTensorDescriptor(p->parameters, p->data, PBN_CUDNN_BATCHNORM_SPATIAL));
    size_t bytes = p->elements * p->itemsize, least = p->channels * sizeof(float);
    p->staging = malloc(bytes > least ? bytes : least);
    p->x_values = malloc(p->elements), p->dy_values = malloc(p->elements);
    if (!p->staging || !p->x_values || !p->dy_values) {
        snprintf(failure, sizeof failure, "no host memory");
        return 0;
    }
    for (int set = 0; set < p->sets; set++) { /* the same values in all of them, each at its own place */
        if (!allocate(p, &p->x[set], bytes) || !allocate(p, &p->y[set], bytes)) return 0;
        if (p->operation == BACKWARD && !allocate(p, &p->dy[set], bytes)) return 0;
    }
    if (!fill(p, p->x[0], p->x_values, 1) || (p->operation == BACKWARD && !fill(p, p->dy[0], p->dy_values, 2))) return 0;
    for (int set = 1; set < p->sets; set++) {
        DRIVER(cuMemcpyDtoD_v2(p->x[set], p->x[0], bytes));
        if (p->operation == BACKWARD) DRIVER(cuMemcpyDtoD_v2(p->dy[set], p->dy[0], bytes));
    }
    if (!(vector(p, &p->scale, SCALE) && vector(p, &p->bias, BIAS) && vector(p, &p->mean, MEAN) &&
          vector(p, &p->variance, VARIANCE) && vector(p, &p->running_mean, MEAN) &&
          vector(p, &p->running_variance, VARIANCE) && vector(p, &p->saved_mean, NAN) &&
          vector(p, &p->saved_inv, NAN) && vector(p, &p->dscale, NAN) && vector(p, &p->dbias, NAN)))
        return 0;
    if (p->operation == BACKWARD) { /* its saved statistics; the output is then made unwritten again */
        if (!call(p, TRAIN, 0)) return 0;
        DRIVER(cuStreamSynchronize(stream));
        DRIVER(cuMemsetD8_v2(p->y[0], 0xff, bytes));
    }
    DRIVER(cuStreamSynchronize(NULL)); /* the memsets and copies, which the other stream does not wait for */
    return 1;
}

static void release(problem *p)
{
    cuStreamSynchronize(stream);
    for (int i = 0; i < p->allocations; i++) cuMemFree_v2(p->memory[i]);
    if (p->data) cudnnDestroyTensorDescriptor(p->data);
    if (p->parameters) cudnnDestroyTensorDescriptor(p->parameters);
    free(p->staging), free(p->x_values), free(p->dy_values);
}

/* Largest difference from double over the largest value, in y or dx of two channels. */
static int check(problem *p, double *error)
{
    double worst = 0, largest = 0, count = (double)p->images * (double)p->area;
    DRIVER(cuMemcpyDtoH_v2(p->staging, p->y[0], p->elements * p->itemsize));
    for (size_t channel = 0; channel < p->channels; channel += p->channels > 1 ? p->channels - 1 : 1) {
        double sum = 0, squares = 0, dy_sum = 0, product = 0;
        for (size_t n = 0; n < p->images; n++)
            for (size_t i = 0; i < p->area; i++) {
                double x = value(p->x_values[place(p, n, channel, i)]);
                sum += x, squares += x * x; /* multiples of 2^-12 below 2^53: exact in double */
            }
        double mean = sum / count, variance = squares / count - mean * mean;
        if (p->operation == INFER) mean = MEAN, variance = VARIANCE;
        double inv = 1 / sqrt(variance + EPSILON);
        if (p->operation == BACKWARD)
            for (size_t n = 0; n < p->images; n++)
                for (size_t i = 0; i < p->area; i++) {
                    size_t at = place(p, n, channel, i);
                    double dy = value(p->dy_values[at]);
                    dy_sum += dy, product += dy * (value(p->x_values[at]) - mean) * inv;
                }
        for (size_t n = 0; n < p->images; n++)
            for (size_t i = 0; i < p->area; i++) {
                size_t at = place(p, n, channel, i);
                double normal = (value(p->x_values[at]) - mean) * inv;
                double want = p->operation == BACKWARD
                    ? SCALE * inv * (value(p->dy_values[at]) - dy_sum / count - normal * product / count)
                    : SCALE * normal + BIAS;
                double difference = fabs(number_at(p->staging, at, p->dtype) - want);
                if (!(difference <= worst) && !isnan(worst)) worst = difference; /* NaN too, and it stays */
                if (fabs(want) > largest) largest = fabs(want);
            }
    }
    *error = worst / largest;
    return 1;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The middle; and how far the extremes are apart, relative to it. */
static double median(double *numbers, int count, double *spread)
{
    qsort(numbers, (size_t)count, sizeof *numbers, by_size);
    double middle = count % 2 ? numbers[count / 2] : (numbers[count / 2 - 1] + numbers[count / 2]) / 2;
    *spread = (numbers[count - 1] - numbers[0]) / middle;
    return middle;
}

static int calls_in_turn(const problem *p, int calls)
{
    for (int i = 0; i < calls; i++)
        if (!call(p, p->operation, i % p->sets)) return 0;
    return 1;
}

/* A graph of the calls, or NULL where they cannot be captured; then the stream is as it was. */
static void *captured(const problem *p, int calls)
{
    void *graph = NULL, *executable = NULL;
    if (cuStreamBeginCapture_v2(stream, 1)) return NULL; /* 1: what other threads do is no matter */
    int good = calls_in_turn(p, calls);
    if (cuStreamEndCapture(stream, &graph) || !good || !graph) return NULL;
    if (cuGraphInstantiateWithFlags(&executable, graph, 0)) executable = NULL;
    cuGraphDestroy(graph);
    return executable;
}

static int measure(problem *p, int replays)
{
    float milliseconds;
    double seconds[MAX_REPLAYS], spread, error;
    if (!call(p, p->operation, 0)) return 0;
    DRIVER(cuStreamSynchronize(stream));
    if (!check(p, &error)) return 0;
    if (!calls_in_turn(p, 2 * p->sets)) return 0;
    DRIVER(cuEventRecord(events[0], stream));
    if (!calls_in_turn(p, 2 * p->sets)) return 0;
    DRIVER(cuEventRecord(events[1], stream));
    DRIVER(cuStreamSynchronize(stream));
    DRIVER(cuEventElapsedTime(&milliseconds, events[0], events[1]));
    double once = milliseconds / (2 * p->sets);
    int rounds = (int)(8 / fmax(once, 0.16)) / p->sets, calls = (rounds ? rounds : 1) * p->sets; /* about 8 ms */
    if (calls < 3) calls = 3;
    if (once > 3 && replays > 5) replays = 5;
    if (once > 20 && replays > 3) replays = 3;
    void *graph = captured(p, calls);
    for (int i = 0; i <= replays; i++) {
        if (graph) DRIVER(cuGraphLaunch(graph, stream)); /* one before the first event, which uploads it */
        else if (i > 0 && !calls_in_turn(p, calls)) return 0;
        DRIVER(cuEventRecord(events[i], stream));
    }
    DRIVER(cuStreamSynchronize(stream));
    for (int i = 0; i < replays; i++) {
        DRIVER(cuEventElapsedTime(&milliseconds, events[i], events[i + 1]));
        seconds[i] = milliseconds * 1e-3 / calls;
    }
    if (graph) cuGraphExecDestroy(graph);
    double middle = median(seconds, replays, &spread);
    printf("{\"seconds\": %.9g, \"spread\": %.3g, \"calls\": %d, \"replays\": %d, \"method\": \"%s\", \"error\": ", middle,
           spread, calls, replays, graph ? "graph replay" : "events around calls");
    if (isfinite(error)) printf("%.3g}\n", error);
    else printf("null}\n");
    return 1;
}

static int measure_host(problem *p, int batches, int calls)
{
    static double microseconds[MAX_BATCHES];
    double spread;
    for (int batch = -batches / 5; batch < batches; batch++) { /* the first: until the processor's clock has risen */
        struct timespec start, end;
        clock_gettime(CLOCK_MONOTONIC, &start);
        if (!calls_in_turn(p, calls)) return 0;
        clock_gettime(CLOCK_MONOTONIC, &end);
        DRIVER(cuStreamSynchronize(stream));
        if (batch >= 0)
            microseconds[batch] =
                ((double)(end.tv_sec - start.tv_sec) * 1e6 + (double)(end.tv_nsec - start.tv_nsec) * 1e-3) / calls;
    }
    double middle = median(microseconds, batches, &spread);
    printf("{\"microseconds\": %.4g, \"spread\": %.3g}\n", middle, spread);
    return 1;
}

static int one_of(const char *word, const char *const *words)
{
    for (int i = 0; word && words[i]; i++)
        if (!strcmp(word, words[i])) return i;
    return -1;
}

static int number(char *text, int low, int high)
{
    char *end = NULL;
    long result = text ? strtol(text, &end, 10) : 0;
    return text && *text && !*end && result >= low && result <= high ? (int)result : -1;
}

/* Answers one command; 0 with `failure` set where it could not. */
static int obey(char *line)
{
    static const char *const OPERATIONS[] = {"train", "infer", "backward", NULL};
    static const char *const DTYPES[] = {"f32", "f16", "bf16", NULL}, *const LAYOUTS[] = {"nchw", "nhwc", NULL};
    static const int CODES[] = {PBN_CUDNN_DATA_FLOAT, PBN_CUDNN_DATA_HALF, PBN_CUDNN_DATA_BFLOAT16};
    static const int TINY[] = {2, 8, 4, 4};
    problem p = {.sets = 1, .dtype = PBN_CUDNN_DATA_FLOAT};
    char *save = NULL, *word = strtok_r(line, " \n", &save);
    int dims[MAX_RANK], rank = 0, timing = word && !strcmp(word, "time"), good = 0;
    double elements = 1;
    snprintf(failure, sizeof failure, "not a command");
    if (!timing && (!word || strcmp(word, "host"))) return 0;
    p.operation = one_of(strtok_r(NULL, " \n", &save), OPERATIONS);
    if (p.operation < 0) return 0;
    if (!timing) {
        int batches = number(strtok_r(NULL, " \n", &save), 1, MAX_BATCHES);
        int calls = number(strtok_r(NULL, " \n", &save), 1, 1000);
        if (batches < 0 || calls < 0 || strtok_r(NULL, " \n", &save)) return 0;
        good = prepare(&p, TINY, 4) && measure_host(&p, batches, calls);
        release(&p);
        return good;
    }
    int dtype = one_of(strtok_r(NULL, " \n", &save), DTYPES);
    p.channels_last = one_of(strtok_r(NULL, " \n", &save), LAYOUTS);
    p.sets = number(strtok_r(NULL, " \n", &save), 1, MAX_SETS);
    int replays = number(strtok_r(NULL, " \n", &save), 1, MAX_REPLAYS);
    for (word = strtok_r(NULL, " \n", &save); word; word = strtok_r(NULL, " \n", &save)) {
        if (rank == MAX_RANK || (dims[rank] = number(word, 1, 1 << 30)) < 0) return 0;
        elements *= dims[rank++];
    }
    if (dtype < 0 || p.channels_last < 0 || p.sets < 0 || replays < 0 || rank < 2 || elements >= 2147483647.0) return 0;
    p.dtype = CODES[dtype];
    good = prepare(&p, dims, rank) && measure(&p, replays);
    release(&p);
    return good;
}

/* Why there is nothing to measure on, or NULL. */
static const char *open_device(void)
{
    char name[200] = "";
    void *context, *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int device, status;
    if (!driver) return dlerror();
#define DRIVER_SYMBOL(function, parameters) \
    if (!(*(void **)&function = dlsym(driver, #function))) return "the driver has no " #function;
    DRIVER_SYMBOLS(DRIVER_SYMBOL)
    if ((status = cuInit(0)) || (status = cuDeviceGet(&device, 0)) || (status = cuDeviceGetName(name, 200, device)) ||
        (status = cuDevicePrimaryCtxRetain(&context, device)) || (status = cuCtxSetCurrent(context)) ||
        (status = cuStreamCreate(&stream, 1))) { /* 1: does not wait for the default stream */
        snprintf(failure, sizeof failure, "CUresult %d", status);
        return failure;
    }
    for (int i = 0; i <= MAX_REPLAYS; i++)
        if ((status = cuEventCreate(&events[i], 0))) return "cuEventCreate failed";
    printf("{\"device\": \"%s\"}\n", name);
    return NULL;
}

int main(int count, char **arguments)
{
    char line[400];
    if (count != 2) {
        fprintf(stderr, "usage: %s LIBCUDNN\n", arguments[0]);
        return EXIT_USAGE;
    }
    const char *reason = open_device();
    if (reason) {
        fprintf(stderr, "no CUDA device: %s\n", reason);
        return EXIT_NO_DEVICE;
    }
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return EXIT_FAILURE;
    }
#define CUDNN_SYMBOL(name)                                              \
    if (!(*(void **)&name = dlsym(library, #name))) {                   \
        fprintf(stderr, "%s has no %s\n", arguments[1], #name);         \
        return EXIT_FAILURE;                                            \
    }
    CUDNN_SYMBOLS(CUDNN_SYMBOL)
    int status = cudnnCreate(&cudnn);
    if (!status) status = cudnnSetStream(cudnn, stream);
    if (status) {
        fprintf(stderr, "cudnnCreate: %s\n", cudnnGetErrorString(status));
        return EXIT_FAILURE;
    }
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (!obey(line)) {
            printf("{\"failure\": \"");
            for (const char *c = failure; *c; c++)
                if (*c != '"' && *c != '\\' && *c >= ' ') putchar(*c);
            printf("\"}\n");
        }
        fflush(stdout);
    }
    return EXIT_SUCCESS;
}
