/* hipcpu: a stand-in for the HIP runtime (libamdhip64.so.6) that computes on the CPU through OpenCL (PoCL).
 *
 * It offers the part of the HIP host interface that libMIOpen.so.1 links to, and what a binding needs for memory,
 * streams and events. Every function does what HIP documents or returns an error; what is absent is absent.
 *
 * A "code object" is a text made by clstub.sh, the stand-in for the compiler that MIOpen starts:
 *     HIPCPU-OCL 1 <bytes of options> <bytes of source>\n<options>\n<source>
 * or, of HIP C++ and of OpenCL C with HIPCPU_NATIVE, a shared object for this processor made by hipstub.sh:
 *     HIPCPU-ELF 1 <bytes of options> <bytes of object>\n<options>\n<object>
 *
 * How it works
 * - A stream is a list of operations. One worker thread, "the device", takes any operation whose predecessors are
 *   done: those before it in its stream, and those its deps name (events waited for; the legacy null stream against
 *   blocking streams). Only this thread computes or copies, so OpenCL sees one caller.
 * - With HIPCPU_LAZY the worker takes only operations that a host thread waits for or asks about, and what these
 *   depend on. A result that is read without waiting is then always the old one.
 * - With HIPCPU_SEED it takes, beside these, what chance says, in an order of the streams that chance says: work on
 *   streams that nothing orders comes in any order.
 * - Device memory is two mappings: an address range that the host cannot touch, which is what the caller is given,
 *   and the bytes themselves elsewhere, between unreadable pages. Addresses are translated when work is submitted.
 *   A host that touches device memory, and a kernel that leaves a block, end with a message as on a real machine.
 * - Streams, events, modules and blocks belong to the device that was the thread's own when they were made. What HIP
 *   documents to fail between devices does, and a kernel that is given another device's memory, as none is a peer.
 */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#define __HIP_PLATFORM_AMD__ 1
#include <CL/cl.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <hip/hip_runtime_api.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#ifndef VERSION
#define VERSION 60443484 /* of ROCm 6.4.3 */
#endif
#define MAX_BLOCK 1024   /* work items of a work group, as on every AMD GPU */
#define MOST_DEVICES 8
#define LDS 65536        /* bytes of local memory that a work group may have, as on every AMD GPU but MI350 */

/* ---------------------------------------------------------------- state */

struct dep {
    struct stream *stream;
    uint64_t seq;
};

enum kind { NOTHING, COPY, FILL, RELEASE, LAUNCH, MARK };

struct op {
    struct op *next;
    uint64_t seq;
    enum kind kind;
    size_t deps_count;
    struct dep *deps;
    char *to;
    const char *from;
    size_t bytes;
    unsigned char value;
    struct block *block;   /* RELEASE */
    struct event *event;   /* MARK */
    struct kernel *kernel; /* LAUNCH */
    char *arguments;
    size_t global[3], local[3], shared;
};

/* Holds a reference each: the handle, every dep, every event recorded in it. */
struct stream {
    struct stream *next;
    struct op *first, **last;
    uint64_t submitted, wanted, done; /* numbers of operations */
    size_t references;
    int device;
    int blocking; /* orders itself against the null stream */
};

struct event {
    struct event *next;
    struct stream *stream; /* of the last record, or NULL */
    uint64_t seq;
    size_t references;
    int device, timed, has_time;
    double time;
};

struct argument {
    size_t size, offset; /* offset in the packed arguments, as the AMD kernel ABI has it */
    int is_pointer;
};

/* A kernel of HIP C++, as hip_on_cpu.hpp describes it. */
struct native {
    size_t count;
    const struct {
        size_t size, alignment;
        int is_pointer;
    } *arguments;
    int (*run)(void *const *values, const size_t global[3], const size_t local[3], void *const *stacks,
               void (*begin)(void *stack, void (*function)(void)), char *dynamic, size_t bytes);
    size_t (*lds)(void);
    char *lds_end;
};

struct kernel {
    struct kernel *next;
    struct module *module;
    cl_kernel cl; /* or NULL, with: */
    const struct native *native;
    struct kernel *twin; /* of an OpenCL kernel: the same as machine code, for launches that PoCL cannot run */
    void *object;        /* a twin's own */
    char *name;
    size_t count, bytes;
    size_t required[3]; /* reqd_work_group_size, or zeros */
    struct argument *arguments;
};

struct module {
    struct module *next;
    int device;
    cl_program program; /* or NULL, with: */
    void *object;       /* of dlopen */
    char *options, *source; /* of an OpenCL program, for twins */
    struct kernel *kernels;
    char *variant; /* -DMIO_BN_VARIANT, for the trace */
};

struct block {
    char *user, *real;           /* what the caller holds, where the bytes are; the same for host memory */
    char *user_base, *real_base; /* the mappings, a page before and after included */
    size_t size, mapped;
    int host, device;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pid_t home; /* the process that has the worker thread */
static int ready, verbose, wait_always, lazy, guard_before, devices = 1;
static uint64_t seed; /* not 0: chance decides what runs before it is waited for, and which stream is next */
static size_t alignment = 256, page, capacity = (size_t)4 << 30;
static const char *architecture = "gfx1100", *more_options = "", *failing = "";
static cl_device_id device;
static cl_context context;
static cl_command_queue queue; /* the worker's */
static int has_half;
static pthread_t worker_thread;

/* Everything below is read and written under this lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, progress = PTHREAD_COND_INITIALIZER;
static int stopping;
static hipError_t failures[MOST_DEVICES]; /* of asynchronous work; they stay, as on a GPU */
static struct stream null_streams[MOST_DEVICES];
static struct stream *streams; /* without the null streams */
static struct event *events;
static struct module *modules;
static struct block **blocks; /* by user address */
static size_t blocks_count, blocks_room, in_use[MOST_DEVICES];
static size_t launches, builds;
static char *trace;
static size_t trace_length, trace_room;

static _Thread_local hipError_t last_error;
static _Thread_local int current; /* device */

static hipError_t set(hipError_t e) {
    if (e != hipSuccess && e != hipErrorNotReady)
        last_error = e;
    return e;
}

__attribute__((format(printf, 1, 2))) static void complain(const char *format, ...) {
    char text[2048];
    va_list a;
    va_start(a, format);
    vsnprintf(text, sizeof text, format, a);
    va_end(a);
    fprintf(stderr, "[hipcpu] %s\n", text); /* one call, so that threads do not mix */
}
#define SAY(...)                   \
    do {                           \
        if (verbose)               \
            complain(__VA_ARGS__); \
    } while (0)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---------------------------------------------------------------- the worker */

/* Under the lock. Recursion is as deep as there are streams: an operation only depends on earlier ones. */
static void want(struct stream *s, uint64_t seq) {
    uint64_t before = s->wanted;
    if (seq <= before)
        return;
    s->wanted = seq;
    for (struct op *o = s->first; o != NULL && o->seq <= seq; o = o->next)
        if (o->seq > before)
            for (size_t i = 0; i < o->deps_count; i++)
                want(o->deps[i].stream, o->deps[i].seq);
}

static void release_stream(struct stream *s) {
    if (--s->references == 0) /* never the null stream, which holds one of its own */
        free(s);
}

static void release_event(struct event *e) {
    if (--e->references == 0) {
        if (e->stream != NULL)
            release_stream(e->stream);
        free(e);
    }
}

static void free_op(struct op *o) {
    for (size_t i = 0; i < o->deps_count; i++)
        release_stream(o->deps[i].stream);
    if (o->event != NULL)
        release_event(o->event);
    free(o->deps);
    free(o->arguments);
    free(o);
}

static void unmap(struct block *b) {
    if (b->user_base != b->real_base)
        munmap(b->user_base, b->mapped);
    munmap(b->real_base, b->mapped);
    free(b);
}

/* The work items of a native kernel's group are coroutines, each on a stack of its own above an unreadable page. */
#define STACK ((size_t)64 << 10)
static void *stacks[MAX_BLOCK];
static char *dynamic_end; /* of LDS bytes of local memory whose size a launch gives; then an unreadable page */
static char *lds_guard; /* of the kernel that runs: the page after its local memory, for the message about a fault */
static size_t lds_size;

static int make_stacks(void) {
    if (stacks[0] != NULL)
        return 1;
    char *p = mmap(NULL, MAX_BLOCK * STACK + LDS + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return 0;
    dynamic_end = p + MAX_BLOCK * STACK + LDS;
    mprotect(dynamic_end, page, PROT_NONE);
    for (size_t i = 0; i < MAX_BLOCK; i++) {
        stacks[i] = p + i * STACK;
        mprotect(stacks[i], page, PROT_NONE);
    }
    return 1;
}

static void begin_on(void *stack, void (*function)(void)) {
    ucontext_t c;
    getcontext(&c);
    c.uc_stack.ss_sp = (char *)stack + page;
    c.uc_stack.ss_size = STACK - page;
    c.uc_link = NULL; /* the function does not return */
    makecontext(&c, function, 0);
    setcontext(&c);
}

static hipError_t run_native(const struct op *o) {
    const struct kernel *k = o->kernel;
    void **values = calloc(k->count > 0 ? k->count : 1, sizeof *values);
    if (values == NULL || !make_stacks()) {
        free(values);
        return hipErrorOutOfMemory;
    }
    for (size_t i = 0; i < k->count; i++)
        values[i] = o->arguments + k->arguments[i].offset;
    lds_guard = k->native->lds_end;
    lds_size = k->native->lds();
    const size_t dynamic = (o->shared + 15) / 16 * 16;
    if (dynamic > 0) {
        lds_guard = dynamic_end;
        lds_size = o->shared;
    }
    int kept = k->native->run(values, o->global, o->local, stacks, begin_on, dynamic_end - dynamic, dynamic);
    lds_guard = NULL;
    free(values);
    if (kept == 1)
        return hipSuccess;
    if (kept < 0)
        complain("kernel %s: lanes of a wave part ways at a shuffle", k->name);
    else
        complain("kernel %s wrote past the end of its %zu bytes of local memory", k->name, lds_size);
    return hipErrorLaunchFailure;
}

static hipError_t run_kernel(const struct op *o) {
    struct kernel *k = o->kernel;
    double start = now();
    if (strcmp(k->name, failing) == 0) {
        complain("kernel %s fails, as HIPCPU_FAIL_KERNEL asks", k->name);
        return hipErrorLaunchFailure;
    }
    if (k->native != NULL)
        return run_native(o);
    for (size_t i = 0; i < k->count; i++) {
        const struct argument *a = &k->arguments[i];
        const char *value = o->arguments + a->offset;
        void *pointer;
        cl_int e;
        if (a->is_pointer) {
            memcpy(&pointer, value, sizeof pointer);
            e = clSetKernelArgSVMPointer(k->cl, (cl_uint)i, pointer);
        } else {
            e = clSetKernelArg(k->cl, (cl_uint)i, a->size, value);
        }
        if (e != CL_SUCCESS) {
            complain("kernel %s, argument %zu: clSetKernelArg returned %d", k->name, i, e);
            return hipErrorLaunchFailure;
        }
    }
    cl_int e = clEnqueueNDRangeKernel(queue, k->cl, 3, NULL, o->global, o->local, 0, NULL, NULL);
    if (e == CL_SUCCESS)
        e = clFinish(queue);
    if (e != CL_SUCCESS) {
        complain("kernel %s: OpenCL returned %d", k->name, e);
        return hipErrorLaunchFailure;
    }
    SAY("ran %s, %zu x %zu x %zu in groups of %zu x %zu x %zu, %.3f ms", k->name, o->global[0], o->global[1],
        o->global[2], o->local[0], o->local[1], o->local[2], (now() - start) * 1e3);
    return hipSuccess;
}

/* Under the lock: a number below n (splitmix64). */
static uint64_t chance(uint64_t n) {
    uint64_t z = seed += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (z ^ (z >> 31)) % n;
}

static int runnable(const struct stream *s) {
    const struct op *o = s->first;
    if (o == NULL || o->seq > s->wanted)
        return 0;
    for (size_t i = 0; i < o->deps_count; i++)
        if (o->deps[i].stream->done < o->deps[i].seq)
            return 0;
    return 1;
}

static void *worker(void *unused) {
    pthread_mutex_lock(&lock);
    for (;;) {
        struct stream *s = NULL;
        uint64_t choices = 0;
        for (int i = 0; i < devices && (s == NULL || seed != 0); i++)
            if (runnable(&null_streams[i]) && (seed == 0 || chance(++choices) == 0))
                s = &null_streams[i];
        for (struct stream *t = streams; t != NULL && (s == NULL || seed != 0); t = t->next)
            if (runnable(t) && (seed == 0 || chance(++choices) == 0))
                s = t;
        if (stopping)
            break;
        if (s == NULL) {
            pthread_cond_wait(&work, &lock);
            continue;
        }
        struct op *o = s->first;
        hipError_t result = hipSuccess;
        pthread_mutex_unlock(&lock); /* the operation stays first in its stream: nobody else takes it */
        if (o->kind == COPY)
            memmove(o->to, o->from, o->bytes);
        else if (o->kind == FILL)
            memset(o->to, o->value, o->bytes);
        else if (o->kind == LAUNCH)
            result = run_kernel(o);
        else if (o->kind == RELEASE)
            unmap(o->block);
        double time = now();
        pthread_mutex_lock(&lock);
        if (result != hipSuccess && failures[s->device] == hipSuccess)
            failures[s->device] = result;
        if (o->kind == RELEASE)
            in_use[s->device] -= o->bytes;
        if (o->kind == MARK && o->event->stream == s && o->event->seq == o->seq) { /* not recorded again since */
            o->event->time = time;
            o->event->has_time = 1;
        }
        s->first = o->next;
        if (s->first == NULL)
            s->last = &s->first;
        s->done = o->seq;
        free_op(o);
        pthread_cond_broadcast(&progress);
    }
    pthread_mutex_unlock(&lock);
    return unused;
}

/* Before OpenCL's own destructors, which would pull it away from under the worker. */
static void stop(void) {
    if (getpid() != home)
        return;
    pthread_mutex_lock(&lock);
    stopping = 1;
    pthread_cond_broadcast(&work);
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&lock);
    pthread_join(worker_thread, NULL);
}

/* ---------------------------------------------------------------- start */

static int flag(const char *name) {
    const char *value = getenv(name);
    return value != NULL && *value != '\0' && strcmp(value, "0") != 0;
}

static void start(void) {
    const char *value;
    verbose = flag("HIPCPU_VERBOSE");
    wait_always = flag("HIPCPU_SYNC");
    lazy = flag("HIPCPU_LAZY");
    guard_before = flag("HIPCPU_BEFORE");
    if ((value = getenv("HIPCPU_SEED")) != NULL && (seed = strtoull(value, NULL, 10)) != 0)
        lazy = 1;
    page = (size_t)sysconf(_SC_PAGESIZE);
    home = getpid();
    if ((value = getenv("HIPCPU_ARCH")) != NULL && *value != '\0')
        architecture = value;
    if ((value = getenv("HIPCPU_BUILD_OPTIONS")) != NULL)
        more_options = value;
    if ((value = getenv("HIPCPU_FAIL_KERNEL")) != NULL)
        failing = value;
    if ((value = getenv("HIPCPU_ALIGN")) != NULL && *value != '\0') {
        char *end;
        unsigned long n = strtoul(value, &end, 10);
        if (*end != '\0' || n == 0 || n > page || (n & (n - 1)) != 0) {
            complain("HIPCPU_ALIGN=%s: a power of two from 1 to %zu is needed; no device", value, page);
            return;
        }
        alignment = n;
    }
    if ((value = getenv("HIPCPU_MEMORY_MIB")) != NULL && *value != '\0') {
        char *end;
        unsigned long n = strtoul(value, &end, 10);
        if (*end != '\0' || n == 0 || n > SIZE_MAX >> 20) {
            complain("HIPCPU_MEMORY_MIB=%s: a number from 1 is needed; no device", value);
            return;
        }
        capacity = (size_t)n << 20;
    }
    if ((value = getenv("HIPCPU_DEVICES")) != NULL && *value != '\0') {
        char *end;
        unsigned long n = strtoul(value, &end, 10);
        if (*end != '\0' || n == 0 || n > MOST_DEVICES) {
            complain("HIPCPU_DEVICES=%s: a number from 1 to %d is needed; no device", value, MOST_DEVICES);
            return;
        }
        devices = (int)n;
    }
    if (flag("HIPCPU_NO_DEVICE"))
        return;
    /* PoCL's default way of running work items lets LLVM read a few elements past a masked edge. This one reads
     * what the kernel reads, so that the unreadable page catches only the kernel's own mistakes. */
    setenv("POCL_WORK_GROUP_METHOD", "cbs", 0);
    cl_platform_id platform;
    cl_uint n = 0;
    if (clGetPlatformIDs(1, &platform, &n) != CL_SUCCESS || n == 0) {
        complain("no OpenCL platform; no device");
        return;
    }
    if (clGetDeviceIDs(platform, CL_DEVICE_TYPE_CPU, 1, &device, &n) != CL_SUCCESS || n == 0) {
        complain("no OpenCL device of type CPU; no device");
        return;
    }
    cl_device_svm_capabilities svm = 0;
    clGetDeviceInfo(device, CL_DEVICE_SVM_CAPABILITIES, sizeof svm, &svm, NULL);
    if ((svm & CL_DEVICE_SVM_FINE_GRAIN_SYSTEM) == 0) {
        complain("the OpenCL device cannot use plain memory; no device");
        return;
    }
    size_t length = 0;
    char *extensions;
    if (clGetDeviceInfo(device, CL_DEVICE_EXTENSIONS, 0, NULL, &length) != CL_SUCCESS ||
        (extensions = calloc(1, length + 1)) == NULL)
        return;
    clGetDeviceInfo(device, CL_DEVICE_EXTENSIONS, length, extensions, NULL);
    has_half = strstr(extensions, "cl_khr_fp16") != NULL;
    free(extensions);
    cl_int e;
    context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
    if (e == CL_SUCCESS)
        queue = clCreateCommandQueueWithProperties(context, device, NULL, &e);
    if (e != CL_SUCCESS) {
        complain("OpenCL context and queue: %d; no device", e);
        return;
    }
    for (int i = 0; i < devices; i++) {
        struct stream *s = &null_streams[i];
        s->last = &s->first;
        s->references = s->blocking = 1;
        s->device = i;
        s->wanted = lazy ? 0 : UINT64_MAX;
    }
    /* Signals are for the program's own threads. Faults are not blocked. */
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    sigdelset(&all, SIGABRT);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&worker_thread, NULL, worker, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        complain("no thread: %s; no device", strerror(failed));
        return;
    }
    atexit(stop);
    ready = 1;
}

static hipError_t usable(void) {
    pthread_once(&once, start);
    if (!ready)
        return hipErrorNoDevice;
    if (getpid() != home) /* a forked child has no worker and no PoCL threads: it would wait for ever */
        return hipErrorNotInitialized;
    return hipSuccess;
}
#define USABLE()                     \
    do {                             \
        hipError_t e_ = usable();    \
        if (e_ != hipSuccess)        \
            return set(e_);          \
    } while (0)
#define REQUIRE(condition, error)    \
    do {                             \
        if (!(condition))            \
            return set(error);       \
    } while (0)

/* ---------------------------------------------------------------- submitting and waiting */

/* Under the lock; NULL for a handle that is no stream. */
static struct stream *find_stream(hipStream_t handle) {
    if (handle == NULL)
        return &null_streams[current];
    for (struct stream *s = streams; s != NULL; s = s->next)
        if (s == (struct stream *)handle)
            return s;
    return NULL;
}

static int add_dep(struct op *o, struct stream *s, uint64_t seq) {
    if (s->done >= seq)
        return 1;
    struct dep *grown = realloc(o->deps, (o->deps_count + 1) * sizeof *grown);
    if (grown == NULL)
        return 0;
    o->deps = grown;
    grown[o->deps_count].stream = s;
    grown[o->deps_count++].seq = seq;
    s->references++;
    return 1;
}

/* Under the lock. Takes the operation over, also on failure. all: wait for streams that do not block, too. */
static hipError_t submit(struct stream *s, struct op *o, int all) {
    int good = 1;
    struct stream *null_stream = &null_streams[s->device];
    if (s == null_stream) {
        for (struct stream *t = streams; t != NULL; t = t->next)
            if (t->device == s->device && (t->blocking || all))
                good = good && add_dep(o, t, t->submitted);
    } else if (s->blocking) {
        good = add_dep(o, null_stream, null_stream->submitted);
    }
    if (!good || stopping) {
        free_op(o);
        return good ? hipErrorDeinitialized : hipErrorOutOfMemory;
    }
    o->seq = ++s->submitted;
    o->next = NULL;
    *s->last = o;
    s->last = &o->next;
    if (seed != 0 && chance(4) == 0)
        want(s, o->seq);
    pthread_cond_signal(&work);
    return hipSuccess;
}

/* Under the lock, which is given away meanwhile; the caller holds a reference if the stream may go. */
static hipError_t wait_for(struct stream *s, uint64_t seq) {
    want(s, seq);
    pthread_cond_signal(&work);
    while (s->done < seq && !stopping)
        pthread_cond_wait(&progress, &lock);
    return s->done < seq ? hipErrorDeinitialized : failures[s->device];
}

/* Under the lock. */
static hipError_t wait_for_last(struct stream *s) {
    s->references++; /* the lock is given away: it may be destroyed */
    hipError_t e = wait_for(s, s->submitted);
    release_stream(s);
    return e;
}

/* Under the lock: submit, and wait if asked to. */
static hipError_t submit_and_wait(struct stream *s, struct op *o, int wait, int all) {
    hipError_t e = submit(s, o, all);
    return e == hipSuccess && (wait || wait_always) ? wait_for_last(s) : e;
}

static struct op *new_op(enum kind kind) {
    struct op *o = calloc(1, sizeof *o);
    if (o != NULL)
        o->kind = kind;
    return o;
}

/* Without the lock: wait for a device's null stream and blocking streams, or for everything of it. */
static hipError_t wait_null(int of, int all) {
    struct op *o = new_op(NOTHING);
    if (o == NULL)
        return hipErrorOutOfMemory;
    pthread_mutex_lock(&lock);
    hipError_t e = submit_and_wait(&null_streams[of], o, 1, all);
    pthread_mutex_unlock(&lock);
    return e;
}

/* ---------------------------------------------------------------- device */

API hipError_t hipInit(unsigned flags) {
    REQUIRE(flags == 0, hipErrorInvalidValue);
    USABLE();
    return hipSuccess;
}

API hipError_t hipGetDeviceCount(int *count) {
    REQUIRE(count != NULL, hipErrorInvalidValue);
    *count = 0;
    USABLE();
    *count = devices;
    return hipSuccess;
}

API hipError_t hipGetDevice(int *ordinal) {
    REQUIRE(ordinal != NULL, hipErrorInvalidValue);
    USABLE();
    *ordinal = current;
    return hipSuccess;
}

API hipError_t hipSetDevice(int ordinal) {
    USABLE();
    REQUIRE(ordinal >= 0 && ordinal < devices, hipErrorInvalidDevice);
    current = ordinal;
    return hipSuccess;
}

API hipError_t hipRuntimeGetVersion(int *version) {
    REQUIRE(version != NULL, hipErrorInvalidValue);
    *version = VERSION;
    return hipSuccess;
}

API hipError_t hipDriverGetVersion(int *version) {
    return hipRuntimeGetVersion(version);
}

static const char device_name[] = "hipcpu (OpenCL on the CPU)";

API hipError_t hipDeviceGetName(char *name, int length, hipDevice_t ordinal) {
    USABLE();
    REQUIRE(ordinal >= 0 && ordinal < devices, hipErrorInvalidDevice);
    REQUIRE(name != NULL && length > 0, hipErrorInvalidValue);
    snprintf(name, (size_t)length, "%s", device_name);
    return hipSuccess;
}

API hipError_t hipDeviceTotalMem(size_t *bytes, hipDevice_t ordinal) {
    USABLE();
    REQUIRE(ordinal >= 0 && ordinal < devices, hipErrorInvalidDevice);
    REQUIRE(bytes != NULL, hipErrorInvalidValue);
    *bytes = capacity;
    return hipSuccess;
}

API hipError_t hipMemGetInfo(size_t *unused, size_t *total) {
    USABLE();
    REQUIRE(unused != NULL && total != NULL, hipErrorInvalidValue);
    pthread_mutex_lock(&lock);
    *unused = capacity - in_use[current];
    pthread_mutex_unlock(&lock);
    *total = capacity;
    return hipSuccess;
}

/* The numbers are those of a gfx1100 (Radeon RX 7900 XTX; HIP counts its pairs of compute units), and for gfx9 those of a
 * gfx906 (Radeon VII): MIOpen chooses its solvers by them. */
API hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600 *p, int ordinal) {
    USABLE();
    REQUIRE(p != NULL, hipErrorInvalidValue);
    REQUIRE(ordinal >= 0 && ordinal < devices, hipErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    const int gfx9 = strncmp(architecture, "gfx9", 4) == 0;
    snprintf(p->name, sizeof p->name, "%s", device_name);
    snprintf(p->gcnArchName, sizeof p->gcnArchName, "%s", architecture);
    p->totalGlobalMem = capacity;
    p->sharedMemPerBlock = p->maxSharedMemoryPerMultiProcessor = LDS;
    p->regsPerBlock = 65536;
    p->warpSize = gfx9 ? 64 : 32;
    p->maxThreadsPerBlock = MAX_BLOCK;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = p->maxThreadsDim[2] = MAX_BLOCK;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65536;
    p->clockRate = gfx9 ? 1800000 : 2500000;
    p->totalConstMem = 2147483647;
    p->major = gfx9 ? 9 : 11;
    p->multiProcessorCount = gfx9 ? 60 : 48;
    p->maxThreadsPerMultiProcessor = gfx9 ? 2560 : 2048;
    p->concurrentKernels = 1;
    p->memoryClockRate = gfx9 ? 1000000 : 1249000;
    p->memoryBusWidth = gfx9 ? 4096 : 384;
    p->l2CacheSize = gfx9 ? 4 << 20 : 6 << 20;
    p->canMapHostMemory = 1;
    p->unifiedAddressing = 1;
    return hipSuccess;
}

API hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t attribute, int ordinal) {
    hipDeviceProp_tR0600 p;
    REQUIRE(value != NULL, hipErrorInvalidValue);
    hipError_t e = hipGetDevicePropertiesR0600(&p, ordinal);
    if (e != hipSuccess)
        return e;
    switch (attribute) {
    case hipDeviceAttributeMultiprocessorCount:
        *value = p.multiProcessorCount;
        break;
    case hipDeviceAttributeWarpSize:
        *value = p.warpSize;
        break;
    case hipDeviceAttributeMaxThreadsPerBlock:
        *value = p.maxThreadsPerBlock;
        break;
    case hipDeviceAttributeMaxBlockDimX:
        *value = p.maxThreadsDim[0];
        break;
    case hipDeviceAttributeMaxBlockDimY:
        *value = p.maxThreadsDim[1];
        break;
    case hipDeviceAttributeMaxBlockDimZ:
        *value = p.maxThreadsDim[2];
        break;
    case hipDeviceAttributeMaxGridDimX:
        *value = p.maxGridSize[0];
        break;
    case hipDeviceAttributeMaxGridDimY:
        *value = p.maxGridSize[1];
        break;
    case hipDeviceAttributeMaxGridDimZ:
        *value = p.maxGridSize[2];
        break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
        *value = (int)p.sharedMemPerBlock;
        break;
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor:
        *value = (int)p.maxSharedMemoryPerMultiProcessor;
        break;
    case hipDeviceAttributeMaxThreadsPerMultiProcessor:
        *value = p.maxThreadsPerMultiProcessor;
        break;
    case hipDeviceAttributeClockRate:
        *value = p.clockRate;
        break;
    case hipDeviceAttributeMemoryClockRate:
        *value = p.memoryClockRate;
        break;
    case hipDeviceAttributeMemoryBusWidth:
        *value = p.memoryBusWidth;
        break;
    case hipDeviceAttributeL2CacheSize:
        *value = p.l2CacheSize;
        break;
    case hipDeviceAttributeComputeCapabilityMajor:
        *value = p.major;
        break;
    case hipDeviceAttributeComputeCapabilityMinor:
        *value = p.minor;
        break;
    case hipDeviceAttributeCooperativeLaunch:
    case hipDeviceAttributeManagedMemory:
        *value = 0;
        break;
    default:
        complain("hipDeviceGetAttribute: attribute %d is not known here", (int)attribute);
        return set(hipErrorInvalidValue);
    }
    return hipSuccess;
}

API hipError_t hipDeviceSynchronize(void) {
    USABLE();
    return set(wait_null(current, 1));
}

/* ---------------------------------------------------------------- errors */

#define ERRORS(E)                                                              \
    E(hipSuccess, "no error")                                                  \
    E(hipErrorInvalidValue, "invalid argument")                                \
    E(hipErrorOutOfMemory, "out of memory")                                    \
    E(hipErrorNotInitialized, "initialization error")                          \
    E(hipErrorDeinitialized, "driver shutting down")                           \
    E(hipErrorInvalidConfiguration, "invalid configuration argument")          \
    E(hipErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")     \
    E(hipErrorNoDevice, "no ROCm-capable device is detected")                  \
    E(hipErrorInvalidDevice, "invalid device ordinal")                         \
    E(hipErrorInvalidImage, "device kernel image is invalid")                  \
    E(hipErrorFileNotFound, "file not found")                                  \
    E(hipErrorInvalidHandle, "invalid resource handle")                        \
    E(hipErrorNotFound, "named symbol not found")                              \
    E(hipErrorNotReady, "device not ready")                                    \
    E(hipErrorIllegalAddress, "an illegal memory access was encountered")      \
    E(hipErrorLaunchFailure, "unspecified launch failure")                     \
    E(hipErrorNotSupported, "operation not supported")

API const char *hipGetErrorName(hipError_t error) {
    switch (error) {
#define NAME(name, text) \
    case name:           \
        return #name;
        ERRORS(NAME)
#undef NAME
    default:
        return "hipErrorUnknown";
    }
}

API const char *hipGetErrorString(hipError_t error) {
    switch (error) {
#define TEXT(name, text) \
    case name:           \
        return text;
        ERRORS(TEXT)
#undef TEXT
    default:
        return "unknown error";
    }
}

API hipError_t hipGetLastError(void) {
    hipError_t e = last_error;
    last_error = hipSuccess;
    return e;
}

API hipError_t hipPeekAtLastError(void) {
    return last_error;
}

/* ---------------------------------------------------------------- streams */

API hipError_t hipStreamCreateWithFlags(hipStream_t *handle, unsigned flags) {
    REQUIRE(handle != NULL, hipErrorInvalidValue);
    *handle = NULL;
    REQUIRE(flags == hipStreamDefault || flags == hipStreamNonBlocking, hipErrorInvalidValue);
    USABLE();
    struct stream *s = calloc(1, sizeof *s);
    REQUIRE(s != NULL, hipErrorOutOfMemory);
    s->last = &s->first;
    s->references = 1;
    s->device = current;
    s->blocking = flags != hipStreamNonBlocking;
    s->wanted = lazy ? 0 : UINT64_MAX;
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    *handle = (hipStream_t)s;
    return hipSuccess;
}

API hipError_t hipStreamCreate(hipStream_t *handle) {
    return hipStreamCreateWithFlags(handle, hipStreamDefault);
}

API hipError_t hipStreamDestroy(hipStream_t handle) {
    USABLE();
    REQUIRE(handle != NULL, hipErrorInvalidHandle);
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    hipError_t e = s == NULL ? hipErrorInvalidHandle : hipSuccess;
    if (s != NULL) {
        s->references++;
        e = wait_for(s, s->submitted);
        struct stream **p = &streams;
        while (*p != NULL && *p != s)
            p = &(*p)->next;
        if (*p == NULL) { /* another thread destroyed it meanwhile */
            e = hipErrorInvalidHandle;
        } else if (s->first == NULL) {
            *p = s->next;
            release_stream(s);
        } /* else: the process is ending, or another thread submitted meanwhile; it stays */
        release_stream(s);
    }
    pthread_mutex_unlock(&lock);
    return set(e);
}

API hipError_t hipStreamSynchronize(hipStream_t handle) {
    USABLE();
    if (handle == NULL)
        return set(wait_null(current, 0));
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    hipError_t e = hipErrorInvalidHandle;
    if (s != NULL)
        e = wait_for_last(s);
    pthread_mutex_unlock(&lock);
    return set(e);
}

API hipError_t hipStreamQuery(hipStream_t handle) {
    USABLE();
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(handle);
    hipError_t e = hipErrorInvalidHandle;
    if (s != NULL) {
        int busy = s->done < s->submitted;
        want(s, s->submitted);
        if (s == &null_streams[s->device]) /* its next operation would wait for these, too */
            for (struct stream *t = streams; t != NULL; t = t->next)
                if (t->blocking && t->device == s->device) {
                    want(t, t->submitted);
                    busy = busy || t->done < t->submitted;
                }
        pthread_cond_signal(&work);
        e = failures[s->device] != hipSuccess ? failures[s->device] : busy ? hipErrorNotReady : hipSuccess;
    }
    pthread_mutex_unlock(&lock);
    return set(e);
}

/* ---------------------------------------------------------------- events */

static struct event *find_event(hipEvent_t handle) {
    for (struct event *e = events; e != NULL; e = e->next)
        if (e == (struct event *)handle)
            return e;
    return NULL;
}

API hipError_t hipEventCreateWithFlags(hipEvent_t *handle, unsigned flags) {
    REQUIRE(handle != NULL, hipErrorInvalidValue);
    *handle = NULL;
    /* The others ask for kinds of waiting and of cache flushes that make no difference here. */
    const unsigned known = hipEventBlockingSync | hipEventDisableTiming | hipEventReleaseToDevice |
                           hipEventReleaseToSystem | hipEventDisableSystemFence;
    REQUIRE((flags & ~known) == 0, (flags & hipEventInterprocess) ? hipErrorNotSupported : hipErrorInvalidValue);
    USABLE();
    struct event *e = calloc(1, sizeof *e);
    REQUIRE(e != NULL, hipErrorOutOfMemory);
    e->device = current;
    e->timed = (flags & hipEventDisableTiming) == 0;
    e->references = 1;
    pthread_mutex_lock(&lock);
    e->next = events;
    events = e;
    pthread_mutex_unlock(&lock);
    *handle = (hipEvent_t)e;
    return hipSuccess;
}

API hipError_t hipEventCreate(hipEvent_t *handle) {
    return hipEventCreateWithFlags(handle, hipEventDefault);
}

API hipError_t hipEventDestroy(hipEvent_t handle) {
    USABLE();
    pthread_mutex_lock(&lock);
    struct event **p = &events;
    while (*p != NULL && *p != (struct event *)handle)
        p = &(*p)->next;
    hipError_t result = *p == NULL ? hipErrorInvalidHandle : hipSuccess;
    if (*p != NULL) {
        struct event *e = *p;
        *p = e->next;
        release_event(e); /* a mark that has not run yet holds another reference */
    }
    pthread_mutex_unlock(&lock);
    return set(result);
}

/* Under the lock. */
static hipError_t record(struct event *e, struct stream *s) {
    struct op *o = new_op(MARK);
    if (o == NULL)
        return hipErrorOutOfMemory;
    o->event = e;
    e->references++;
    hipError_t result = submit(s, o, 0);
    if (result != hipSuccess)
        return result;
    if (e->stream != NULL)
        release_stream(e->stream);
    e->stream = s;
    s->references++;
    e->seq = s->submitted;
    e->has_time = 0;
    return hipSuccess;
}

API hipError_t hipEventRecord(hipEvent_t handle, hipStream_t stream) {
    USABLE();
    pthread_mutex_lock(&lock);
    struct event *e = find_event(handle);
    struct stream *s = find_stream(stream);
    hipError_t result = e == NULL || s == NULL || e->device != s->device ? hipErrorInvalidHandle : record(e, s);
    pthread_mutex_unlock(&lock);
    return set(result);
}

API hipError_t hipEventSynchronize(hipEvent_t handle) {
    USABLE();
    pthread_mutex_lock(&lock);
    struct event *e = find_event(handle);
    hipError_t result = e == NULL ? hipErrorInvalidHandle : hipSuccess;
    if (e != NULL && e->stream != NULL) {
        struct stream *s = e->stream;
        s->references++;
        result = wait_for(s, e->seq);
        release_stream(s);
    }
    pthread_mutex_unlock(&lock);
    return set(result);
}

API hipError_t hipEventQuery(hipEvent_t handle) {
    USABLE();
    pthread_mutex_lock(&lock);
    struct event *e = find_event(handle);
    hipError_t result = e == NULL ? hipErrorInvalidHandle : hipSuccess;
    if (e != NULL && e->stream != NULL) {
        want(e->stream, e->seq);
        pthread_cond_signal(&work);
        result = e->stream->done >= e->seq ? failures[e->device] : hipErrorNotReady;
    }
    pthread_mutex_unlock(&lock);
    return set(result);
}

API hipError_t hipEventElapsedTime(float *milliseconds, hipEvent_t from, hipEvent_t to) {
    USABLE();
    REQUIRE(milliseconds != NULL, hipErrorInvalidValue);
    pthread_mutex_lock(&lock);
    struct event *a = find_event(from), *b = find_event(to);
    hipError_t result = hipSuccess;
    if (a == NULL || b == NULL || !a->timed || !b->timed || a->stream == NULL || b->stream == NULL ||
        a->device != b->device)
        result = hipErrorInvalidHandle;
    else if (!a->has_time || !b->has_time)
        result = hipErrorNotReady;
    else
        *milliseconds = (float)((b->time - a->time) * 1e3);
    pthread_mutex_unlock(&lock);
    return set(result);
}

API hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t handle, unsigned flags) {
    USABLE();
    REQUIRE(flags == 0, hipErrorInvalidValue);
    struct op *o = new_op(NOTHING);
    REQUIRE(o != NULL, hipErrorOutOfMemory);
    pthread_mutex_lock(&lock);
    struct event *e = find_event(handle);
    struct stream *s = find_stream(stream);
    hipError_t result;
    if (e == NULL || s == NULL) {
        free_op(o);
        result = hipErrorInvalidHandle;
    } else if (e->stream == NULL) { /* never recorded: nothing to wait for */
        free_op(o);
        result = hipSuccess;
    } else if (!add_dep(o, e->stream, e->seq)) {
        free_op(o);
        result = hipErrorOutOfMemory;
    } else {
        result = submit_and_wait(s, o, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return set(result);
}

/* ---------------------------------------------------------------- memory */

/* Under the lock: index of the first block at or after an address. */
static size_t place_of(const char *address) {
    size_t low = 0, high = blocks_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (blocks[middle]->user < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Under the lock: the block that an address is in, or NULL. */
static struct block *find_block(const void *address) {
    const char *p = address;
    size_t i = place_of(p);
    if (i < blocks_count && blocks[i]->user == p)
        return blocks[i];
    if (i > 0 && p < blocks[i - 1]->user + blocks[i - 1]->size)
        return blocks[i - 1];
    return NULL;
}

static void put_number(char *text, size_t room, size_t *length, size_t number) {
    char digits[24];
    size_t n = 0;
    do
        digits[n++] = (char)('0' + number % 10);
    while ((number /= 10) != 0);
    while (n > 0 && *length < room)
        text[(*length)++] = digits[--n];
}

static void put_text(char *text, size_t room, size_t *length, const char *more) {
    while (*more != '\0' && *length < room)
        text[(*length)++] = *more++;
}

/* Says which block was left, then lets the fault happen again under the old handler. Nothing here allocates. */
static struct sigaction old_action;

static void on_fault(int number, siginfo_t *info, void *unused) {
    (void)unused;
    const char *address = info->si_addr;
    char text[200];
    size_t length = 0;
    int locked = 0;
    /* The faulting thread does not hold the lock (nothing touches the caller's memory under it), another may. */
    for (int i = 0; i < 1000 && !locked; i++) {
        locked = pthread_mutex_trylock(&lock) == 0;
        if (!locked)
            sched_yield();
    }
    for (size_t i = 0; locked && i < blocks_count; i++) {
        const struct block *b = blocks[i];
        int in_user = address >= b->user_base && address < b->user_base + b->mapped;
        int in_real = address >= b->real_base && address < b->real_base + b->mapped;
        const char *begin = in_real ? b->real : b->user;
        if (!in_user && !in_real)
            continue;
        put_text(text, sizeof text, &length, in_real ? "[hipcpu] access " : "[hipcpu] access by the host ");
        if (address < begin) {
            put_number(text, sizeof text, &length, (size_t)(begin - address));
            put_text(text, sizeof text, &length, " bytes before");
        } else {
            put_text(text, sizeof text, &length, "at offset ");
            put_number(text, sizeof text, &length, (size_t)(address - begin));
            put_text(text, sizeof text, &length, " of");
        }
        put_text(text, sizeof text, &length, b->host ? " a host block of " : " a device block of ");
        put_number(text, sizeof text, &length, b->size);
        put_text(text, sizeof text, &length, " bytes\n");
        if (write(STDERR_FILENO, text, length) < 0) {
            /* nothing is left to say it with */
        }
        break;
    }
    if (lds_guard != NULL && address >= lds_guard && address < lds_guard + page) {
        put_text(text, sizeof text, &length, "[hipcpu] access past the end of a kernel's ");
        put_number(text, sizeof text, &length, lds_size);
        put_text(text, sizeof text, &length, " bytes of local memory\n");
        if (write(STDERR_FILENO, text, length) < 0) {
            /* nothing is left to say it with */
        }
    }
    if (locked)
        pthread_mutex_unlock(&lock);
    sigaction(number, &old_action, NULL);
    if (info->si_code <= 0) /* sent, not a fault: it does not come again by itself */
        raise(number);
}

static void install_handler(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_action);
}

static char *map(size_t bytes, int protection) {
    char *p = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static struct block *new_block(size_t size, int host) {
    if (size > capacity)
        return NULL;
    size_t body = (size + page - 1) / page * page;
    struct block *b = calloc(1, sizeof *b);
    if (b == NULL)
        return NULL;
    b->size = size;
    b->mapped = body + 2 * page;
    b->host = host;
    b->real_base = map(b->mapped, PROT_NONE);
    b->user_base = host ? b->real_base : map(b->mapped, PROT_NONE);
    if (b->real_base == NULL || b->user_base == NULL ||
        mprotect(b->real_base + page, body, PROT_READ | PROT_WRITE) != 0) {
        if (b->real_base != NULL)
            munmap(b->real_base, b->mapped);
        if (b->user_base != NULL && !host)
            munmap(b->user_base, b->mapped);
        free(b);
        return NULL;
    }
    /* The block ends at the unreadable page, up to its alignment: 256 like hipMalloc's, or HIPCPU_ALIGN; or it begins
     * behind the other one. */
    size_t slack = guard_before ? 0 : (body - size) & ~(alignment - 1);
    b->real = b->real_base + page + slack;
    b->user = b->user_base + page + slack;
    if (!host)
        memset(b->real_base + page, 0xFF, body); /* NaN in f16, bf16, f32 and f64: what was not written shows */
    return b;
}

/* Under the lock. */
static int add_block(struct block *b) {
    if (blocks_count == blocks_room) {
        size_t room = blocks_room == 0 ? 64 : 2 * blocks_room;
        struct block **grown = realloc(blocks, room * sizeof *grown);
        if (grown == NULL)
            return 0;
        blocks = grown;
        blocks_room = room;
    }
    size_t i = place_of(b->user);
    memmove(blocks + i + 1, blocks + i, (blocks_count - i) * sizeof *blocks);
    blocks[i] = b;
    blocks_count++;
    return 1;
}

/* Under the lock: takes a block out of the table by the address that its owner holds. */
static struct block *take_block(const void *address, int host) {
    size_t i = place_of(address);
    if (i == blocks_count || blocks[i]->user != (const char *)address || blocks[i]->host != host)
        return NULL;
    struct block *b = blocks[i];
    memmove(blocks + i, blocks + i + 1, (blocks_count - i - 1) * sizeof *blocks);
    blocks_count--;
    return b;
}

static hipError_t allocate(void **out, size_t size, int host, int of) {
    static pthread_once_t handler = PTHREAD_ONCE_INIT;
    REQUIRE(out != NULL, hipErrorInvalidValue);
    *out = NULL;
    USABLE();
    if (size == 0)
        return hipSuccess;
    if (!flag("HIPCPU_NO_SEGV"))
        pthread_once(&handler, install_handler);
    struct block *b = new_block(size, host);
    REQUIRE(b != NULL, hipErrorOutOfMemory);
    b->device = of;
    pthread_mutex_lock(&lock);
    int good = size <= capacity - in_use[of] && add_block(b);
    if (good) {
        in_use[of] += size;
        *out = b->user;
    }
    pthread_mutex_unlock(&lock);
    if (!good)
        unmap(b);
    return set(good ? hipSuccess : hipErrorOutOfMemory);
}

API hipError_t hipMalloc(void **out, size_t size) {
    return allocate(out, size, 0, current);
}

API hipError_t hipHostMalloc(void **out, size_t size, unsigned flags) {
    const unsigned known = hipHostMallocPortable | hipHostMallocMapped | hipHostMallocWriteCombined |
                           hipHostMallocCoherent | hipHostMallocNonCoherent | hipHostMallocNumaUser;
    REQUIRE((flags & ~known) == 0, hipErrorInvalidValue);
    return allocate(out, size, 1, current);
}

static hipError_t release(void *address, int host) {
    USABLE();
    if (address == NULL)
        return hipSuccess;
    pthread_mutex_lock(&lock);
    struct block *b = find_block(address);
    const int of = b != NULL ? b->device : current;
    pthread_mutex_unlock(&lock);
    hipError_t e = hipSuccess;
    for (int i = 0; i < devices; i++) /* freeing waits for the whole device; any may use the host's memory */
        if (host || i == of) {
            hipError_t waited = wait_null(i, 1);
            if (waited == hipErrorDeinitialized || waited == hipErrorOutOfMemory)
                return set(waited);
            e = e == hipSuccess ? waited : e;
        }
    pthread_mutex_lock(&lock);
    b = take_block(address, host);
    if (b != NULL)
        in_use[of] -= b->size;
    pthread_mutex_unlock(&lock);
    REQUIRE(b != NULL, hipErrorInvalidValue);
    unmap(b);
    return set(e);
}

API hipError_t hipFree(void *address) {
    return release(address, 0);
}

API hipError_t hipHostFree(void *address) {
    return release(address, 1);
}

API hipError_t hipMallocAsync(void **out, size_t size, hipStream_t stream) {
    USABLE();
    pthread_mutex_lock(&lock);
    const struct stream *s = find_stream(stream);
    const int of = s != NULL ? s->device : -1;
    pthread_mutex_unlock(&lock);
    REQUIRE(of >= 0, hipErrorInvalidHandle);
    return allocate(out, size, 0, of);
}

API hipError_t hipFreeAsync(void *address, hipStream_t stream) {
    USABLE();
    REQUIRE(address != NULL, hipErrorInvalidValue);
    struct op *o = new_op(RELEASE);
    REQUIRE(o != NULL, hipErrorOutOfMemory);
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(stream);
    hipError_t e = s == NULL ? hipErrorInvalidHandle : hipSuccess;
    const struct block *found = find_block(address);
    if (e == hipSuccess && (found == NULL || found->device != s->device || (o->block = take_block(address, 0)) == NULL))
        e = hipErrorInvalidValue;
    if (e == hipSuccess) {
        struct block *b = o->block;
        o->bytes = b->size;
        e = submit(s, o, 0);
        if (e != hipSuccess)
            add_block(b); /* there is room: it was just taken out */
        else if (wait_always)
            e = wait_for_last(s);
    } else {
        free_op(o);
    }
    pthread_mutex_unlock(&lock);
    return set(e);
}

API hipError_t hipMemPtrGetInfo(void *address, size_t *size) {
    USABLE();
    REQUIRE(address != NULL && size != NULL, hipErrorInvalidValue);
    pthread_mutex_lock(&lock);
    struct block *b = find_block(address);
    *size = b != NULL ? b->size : 0;
    pthread_mutex_unlock(&lock);
    return set(b != NULL ? hipSuccess : hipErrorInvalidValue);
}

API hipError_t hipPointerGetAttributes(hipPointerAttribute_t *attributes, const void *address) {
    USABLE();
    REQUIRE(attributes != NULL && address != NULL, hipErrorInvalidValue);
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&lock);
    struct block *b = find_block(address);
    int host = b != NULL && b->host;
    attributes->device = b != NULL ? b->device : 0;
    pthread_mutex_unlock(&lock);
    REQUIRE(b != NULL, hipErrorInvalidValue);
    attributes->type = host ? hipMemoryTypeHost : hipMemoryTypeDevice;
    memcpy(&attributes->devicePointer, &address, sizeof address);
    if (host)
        memcpy(&attributes->hostPointer, &address, sizeof address);
    return hipSuccess;
}

/* Under the lock: where the bytes of a range are. HIP's memory must hold the range; other memory is the host's. */
static hipError_t translate(const void *address, size_t bytes, int want_device, int want_host, const char **real,
                            int *pageable) {
    struct block *b = find_block(address);
    *real = address;
    *pageable = b == NULL;
    if (b == NULL)
        return want_device ? hipErrorInvalidValue : hipSuccess;
    if (want_host && !b->host)
        return hipErrorInvalidValue;
    size_t offset = (size_t)((const char *)address - b->user);
    if (bytes > b->size - offset)
        return hipErrorInvalidValue;
    *real = b->real + offset;
    return hipSuccess;
}

static hipError_t copy(void *to, const void *from, size_t bytes, hipMemcpyKind kind, hipStream_t stream, int wait) {
    USABLE();
    int to_device = kind == hipMemcpyHostToDevice || kind == hipMemcpyDeviceToDevice;
    int from_device = kind == hipMemcpyDeviceToHost || kind == hipMemcpyDeviceToDevice;
    int to_host = kind == hipMemcpyDeviceToHost || kind == hipMemcpyHostToHost;
    int from_host = kind == hipMemcpyHostToDevice || kind == hipMemcpyHostToHost;
    REQUIRE(to_device || to_host || kind == hipMemcpyDefault, hipErrorInvalidMemcpyDirection);
    if (bytes == 0)
        return hipSuccess;
    REQUIRE(to != NULL && from != NULL, hipErrorInvalidValue);
    struct op *o = new_op(COPY);
    REQUIRE(o != NULL, hipErrorOutOfMemory);
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(stream);
    const char *target = NULL;
    int pageable_to = 0, pageable_from = 0;
    hipError_t e = s == NULL ? hipErrorInvalidHandle : hipSuccess;
    if (e == hipSuccess)
        e = translate(to, bytes, to_device, to_host, &target, &pageable_to);
    if (e == hipSuccess)
        e = translate(from, bytes, from_device, from_host, &o->from, &pageable_from);
    if (e == hipSuccess) {
        memcpy(&o->to, &target, sizeof o->to);
        o->bytes = bytes;
        /* HIP documents that copies of host memory that is not pinned are synchronous. */
        e = submit_and_wait(s, o, wait || pageable_to || pageable_from, 0);
    } else {
        free_op(o);
    }
    pthread_mutex_unlock(&lock);
    return set(e);
}

API hipError_t hipMemcpy(void *to, const void *from, size_t bytes, hipMemcpyKind kind) {
    return copy(to, from, bytes, kind, NULL, 1);
}

API hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, hipMemcpyKind kind, hipStream_t stream) {
    return copy(to, from, bytes, kind, stream, 0);
}

API hipError_t hipMemcpyWithStream(void *to, const void *from, size_t bytes, hipMemcpyKind kind, hipStream_t stream) {
    return copy(to, from, bytes, kind, stream, 1);
}

static hipError_t fill(void *to, int value, size_t bytes, hipStream_t stream, int wait) {
    USABLE();
    if (bytes == 0)
        return hipSuccess;
    REQUIRE(to != NULL, hipErrorInvalidValue);
    struct op *o = new_op(FILL);
    REQUIRE(o != NULL, hipErrorOutOfMemory);
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(stream);
    const char *target = NULL;
    int pageable;
    hipError_t e = s == NULL ? hipErrorInvalidHandle : translate(to, bytes, 1, 0, &target, &pageable);
    if (e == hipSuccess) {
        memcpy(&o->to, &target, sizeof o->to);
        o->value = (unsigned char)value;
        o->bytes = bytes;
        e = submit_and_wait(s, o, wait, 0);
    } else {
        free_op(o);
    }
    pthread_mutex_unlock(&lock);
    return set(e);
}

API hipError_t hipMemset(void *to, int value, size_t bytes) {
    return fill(to, value, bytes, NULL, 1);
}

API hipError_t hipMemsetAsync(void *to, int value, size_t bytes, hipStream_t stream) {
    return fill(to, value, bytes, stream, 0);
}

/* ---------------------------------------------------------------- modules */

/* For an OpenCL device without cl_khr_fp16 (PoCL on most x86): half is clang's _Float16, which is kept in 16 bits
 * and computed in 32. */
static const char prelude_half[] =
    "#define half _Float16\n"
    "typedef _Float16 hipcpu_half2 __attribute__((ext_vector_type(2), aligned(2)));\n"
    "typedef _Float16 hipcpu_half4 __attribute__((ext_vector_type(4), aligned(2)));\n"
    "typedef _Float16 hipcpu_half8 __attribute__((ext_vector_type(8), aligned(2)));\n"
    "#define _Float162 hipcpu_half2\n#define _Float164 hipcpu_half4\n#define _Float168 hipcpu_half8\n"
    "#define half2 hipcpu_half2\n#define half4 hipcpu_half4\n#define half8 hipcpu_half8\n"
    /* Each in float, rounded once: as exact as the OpenCL builtin must be, or better. */
    "#define HIPCPU_F static inline half __attribute__((overloadable))\n"
    "HIPCPU_F mad(half a, half b, half c) { return (half)((float)a * (float)b + (float)c); }\n"
    "HIPCPU_F fma(half a, half b, half c) { return (half)fma((float)a, (float)b, (float)c); }\n"
    "#define HIPCPU_F1(f) HIPCPU_F f(half a) { return (half)f((float)a); }\n"
    "#define HIPCPU_F2(f) HIPCPU_F f(half a, half b) { return (half)f((float)a, (float)b); }\n"
    "HIPCPU_F1(rsqrt) HIPCPU_F1(sqrt) HIPCPU_F1(fabs) HIPCPU_F1(exp) HIPCPU_F1(log) HIPCPU_F1(tanh)\n"
    "HIPCPU_F2(pow) HIPCPU_F2(fmin) HIPCPU_F2(fmax)\n";

/* An AMD GPU reads a float4 from any address that is good for a float, and some kernels do; an x86 vector load would
 * fault. So those types get the smaller alignment, as the kernel's own source sees them. */
static const char prelude_align[] =
    "typedef float hipcpu_float2 __attribute__((ext_vector_type(2), aligned(4)));\n"
    "typedef float hipcpu_float4 __attribute__((ext_vector_type(4), aligned(4)));\n"
    "typedef float hipcpu_float8 __attribute__((ext_vector_type(8), aligned(4)));\n"
    "typedef ushort hipcpu_ushort2 __attribute__((ext_vector_type(2), aligned(2)));\n"
    "typedef ushort hipcpu_ushort4 __attribute__((ext_vector_type(4), aligned(2)));\n"
    "typedef ushort hipcpu_ushort8 __attribute__((ext_vector_type(8), aligned(2)));\n"
    "#define float2 hipcpu_float2\n#define float4 hipcpu_float4\n#define float8 hipcpu_float8\n"
    "#define ushort2 hipcpu_ushort2\n#define ushort4 hipcpu_ushort4\n#define ushort8 hipcpu_ushort8\n"
    "#line 1\n";

static void free_kernel(struct kernel *k) {
    if (k == NULL)
        return;
    if (k->cl != NULL)
        clReleaseKernel(k->cl);
    if (k->object != NULL)
        dlclose(k->object);
    free_kernel(k->twin);
    free(k->arguments);
    free(k->name);
    free(k);
}

static void free_module(struct module *m) {
    for (struct kernel *k = m->kernels, *next; k != NULL; k = next) {
        next = k->next;
        free_kernel(k);
    }
    if (m->program != NULL)
        clReleaseProgram(m->program);
    if (m->object != NULL)
        dlclose(m->object);
    free(m->options);
    free(m->source);
    free(m->variant);
    free(m);
}

static void print_build_log(cl_program program, cl_int error, const char *options) {
    size_t length = 0;
    char *log = NULL;
    if (clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, 0, NULL, &length) == CL_SUCCESS &&
        (log = calloc(1, length + 1)) != NULL)
        clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, length, log, NULL);
    fprintf(stderr, "[hipcpu] OpenCL program: error %d with%s\n%s\n", error, options, log != NULL ? log : "");
    free(log);
}

/* Reads a decimal number that ends with the given character; the header's only syntax. */
static const char *read_number(const char *p, char end, size_t *number) {
    size_t n = 0;
    if (*p < '0' || *p > '9')
        return NULL;
    for (; *p >= '0' && *p <= '9'; p++) {
        if (n > (SIZE_MAX >> 8))
            return NULL;
        n = 10 * n + (size_t)(*p - '0');
    }
    *number = n;
    return *p == end ? p + 1 : NULL;
}

static hipError_t keep(hipModule_t *out, struct module *m) {
    m->device = current;
    pthread_mutex_lock(&lock);
    m->next = modules;
    modules = m;
    builds++;
    pthread_mutex_unlock(&lock);
    *out = (hipModule_t)m;
    return hipSuccess;
}

/* What follows a magic number, or NULL. Byte by byte: a foreign image may be shorter. */
static const char *after(const char *magic, const char *data, size_t limit) {
    size_t i = 0;
    for (; magic[i] != '\0'; i++)
        if (i >= limit || data[i] != magic[i])
            return NULL;
    return data + i;
}

/* A shared object for this processor, or NULL. */
static void *open_object(const char *object, size_t size) {
    void *opened = NULL;
    char path[] = "/tmp/hipcpu.XXXXXX";
    int file = mkstemp(path);
    size_t written = 0;
    for (ssize_t n; file >= 0 && written < size; written += (size_t)n)
        if ((n = write(file, object + written, size - written)) < 0)
            break;
    if (file >= 0 && written == size && (opened = dlopen(path, RTLD_NOW | RTLD_LOCAL)) == NULL)
        complain("%s", dlerror());
    if (file >= 0) {
        close(file);
        unlink(path);
    }
    return opened;
}

/* limit: bytes at data, or SIZE_MAX where the caller cannot say (an image in memory states its own size). */
static hipError_t load(hipModule_t *out, const char *data, size_t limit) {
    size_t options_length = 0, source_length = 0;
    const char *p = after("HIPCPU-ELF 1 ", data, limit);
    const int native = p != NULL;
    if (!native)
        p = after("HIPCPU-OCL 1 ", data, limit);
    REQUIRE(p != NULL, hipErrorInvalidImage);
    p = read_number(p, ' ', &options_length);
    if (p != NULL)
        p = read_number(p, '\n', &source_length);
    REQUIRE(p != NULL, hipErrorInvalidImage);
    size_t left = limit == SIZE_MAX ? SIZE_MAX : limit - (size_t)(p - data);
    REQUIRE(options_length < left && source_length <= left - options_length - 1, hipErrorInvalidImage);
    REQUIRE(p[options_length] == '\n', hipErrorInvalidImage);

    size_t room = options_length + strlen(more_options) + 32;
    char *options = malloc(room);
    struct module *m = calloc(1, sizeof *m);
    if (options == NULL || m == NULL) {
        free(options);
        free(m);
        return set(hipErrorOutOfMemory);
    }
    int n = snprintf(options, room, " -cl-kernel-arg-info %s ", more_options);
    memcpy(options + n, p, options_length);
    options[(size_t)n + options_length] = '\0';
    const char *variant = strstr(options, "-DMIO_BN_VARIANT=");
    if (variant != NULL) {
        variant += strlen("-DMIO_BN_VARIANT=");
        m->variant = strndup(variant, strspn(variant, "0123456789"));
    }
    if (native) {
        free(options);
        m->object = open_object(p + options_length + 1, source_length);
        if (m->object != NULL)
            return keep(out, m);
        free_module(m);
        return set(hipErrorInvalidImage);
    }
    m->options = strndup(p, options_length);
    m->source = strndup(p + options_length + 1, source_length);
    const char *texts[3] = {has_half ? "" : prelude_half, prelude_align, p + options_length + 1};
    size_t lengths[3] = {strlen(texts[0]), strlen(texts[1]), source_length};
    cl_int e;
    double begun = now();
    m->program = clCreateProgramWithSource(context, 3, texts, lengths, &e);
    if (e == CL_SUCCESS) {
        e = clBuildProgram(m->program, 1, &device, options, NULL, NULL);
        if (e != CL_SUCCESS)
            print_build_log(m->program, e, options);
    }
    if (e == CL_SUCCESS)
        SAY("built in %.3f s:%s", now() - begun, options);
    free(options);
    if (e != CL_SUCCESS) {
        free_module(m);
        return set(hipErrorInvalidImage);
    }
    return keep(out, m);
}

API hipError_t hipModuleLoadData(hipModule_t *out, const void *image) {
    REQUIRE(out != NULL && image != NULL, hipErrorInvalidValue);
    *out = NULL;
    USABLE();
    return load(out, image, SIZE_MAX);
}

API hipError_t hipModuleLoad(hipModule_t *out, const char *path) {
    REQUIRE(out != NULL && path != NULL, hipErrorInvalidValue);
    *out = NULL;
    USABLE();
    FILE *file = fopen(path, "rb");
    REQUIRE(file != NULL, hipErrorFileNotFound);
    char *bytes = NULL;
    size_t size = 0, room = 0;
    hipError_t e = hipSuccess;
    do {
        if (size == room) {
            char *grown = realloc(bytes, room = room == 0 ? 65536 : 2 * room);
            if (grown == NULL) {
                e = hipErrorOutOfMemory;
                break;
            }
            bytes = grown;
        }
        size += fread(bytes + size, 1, room - size, file);
    } while (!feof(file) && !ferror(file));
    if (e == hipSuccess && ferror(file))
        e = hipErrorFileNotFound;
    fclose(file);
    e = e == hipSuccess ? load(out, bytes, size) : set(e);
    free(bytes);
    return e;
}

/* Under the lock. */
static struct module **find_module(hipModule_t handle) {
    struct module **p = &modules;
    while (*p != NULL && *p != (struct module *)handle)
        p = &(*p)->next;
    return p;
}

API hipError_t hipModuleUnload(hipModule_t handle) {
    USABLE();
    pthread_mutex_lock(&lock);
    const struct module *found = *find_module(handle);
    const int of = found != NULL ? found->device : current;
    pthread_mutex_unlock(&lock);
    hipError_t e = wait_null(of, 1); /* its kernels may be waiting to run */
    if (e == hipErrorDeinitialized || e == hipErrorOutOfMemory)
        return set(e);
    pthread_mutex_lock(&lock);
    struct module **p = find_module(handle), *m = *p;
    if (m != NULL)
        *p = m->next;
    pthread_mutex_unlock(&lock);
    REQUIRE(m != NULL, hipErrorInvalidHandle);
    free_module(m);
    return set(e);
}

/* Bytes of an OpenCL C type by its name, 0 where unknown. */
static size_t type_size(const char *name) {
    static const struct {
        const char *name;
        size_t size;
    } scalars[] = {
        {"unsigned char", 1}, {"unsigned short", 2}, {"unsigned int", 4}, {"unsigned long", 8}, {"char", 1},
        {"uchar", 1},         {"short", 2},          {"ushort", 2},       {"half", 2},          {"_Float16", 2},
        {"int", 4},           {"uint", 4},           {"float", 4},        {"long", 8},          {"ulong", 8},
        {"double", 8},        {"size_t", 8},
    };
    static const struct {
        const char *suffix;
        size_t count;
    } vectors[] = {{"", 1}, {"2", 2}, {"3", 4}, {"4", 4}, {"8", 8}, {"16", 16}};
    for (size_t i = 0; i < sizeof scalars / sizeof *scalars; i++) {
        size_t length = strlen(scalars[i].name);
        if (strncmp(name, scalars[i].name, length) != 0)
            continue;
        for (size_t j = 0; j < sizeof vectors / sizeof *vectors; j++)
            if (strcmp(name + length, vectors[j].suffix) == 0)
                return scalars[i].size * vectors[j].count;
    }
    return 0;
}

/* What an argument is; 0 where this stand-in cannot pass it. */
static int describe_argument(struct kernel *k, cl_uint i) {
    struct argument *a = &k->arguments[i];
    cl_kernel_arg_address_qualifier space = 0;
    size_t length = 0;
    char *type = NULL;
    if (clGetKernelArgInfo(k->cl, i, CL_KERNEL_ARG_ADDRESS_QUALIFIER, sizeof space, &space, NULL) == CL_SUCCESS &&
        clGetKernelArgInfo(k->cl, i, CL_KERNEL_ARG_TYPE_NAME, 0, NULL, &length) == CL_SUCCESS &&
        (type = calloc(1, length + 1)) != NULL &&
        clGetKernelArgInfo(k->cl, i, CL_KERNEL_ARG_TYPE_NAME, length, type, NULL) == CL_SUCCESS) {
        a->is_pointer = space == CL_KERNEL_ARG_ADDRESS_GLOBAL || space == CL_KERNEL_ARG_ADDRESS_CONSTANT;
        a->size = a->is_pointer ? sizeof(void *) : space == CL_KERNEL_ARG_ADDRESS_PRIVATE ? type_size(type) : 0;
    }
    if (a->size == 0)
        complain("kernel %s, argument %u: type %s is not known here", k->name, i, type != NULL ? type : "?");
    else
        SAY("kernel %s, argument %u: %s%s, %zu bytes", k->name, i, type, a->is_pointer ? " (pointer)" : "", a->size);
    free(type);
    if (a->size == 0)
        return 0;
    a->offset = (k->bytes + a->size - 1) / a->size * a->size;
    k->bytes = a->offset + a->size;
    return 1;
}

/* AMD's compiler refuses such a kernel. */
static hipError_t too_much_lds(const char *name, size_t bytes) {
    complain("kernel %s: %zu bytes of local memory, the device has %d", name, bytes, LDS);
    return hipErrorOutOfMemory;
}

/* Under the lock. */
static hipError_t native_kernel(struct kernel *k, const struct module *m, const char *name) {
    char *symbol = NULL;
    if (asprintf(&symbol, "hipcpu_kernel_%s", name) < 0)
        return hipErrorOutOfMemory;
    k->native = dlsym(m->object, symbol);
    free(symbol);
    if (k->native == NULL)
        return hipErrorNotFound;
    if (k->native->lds() > LDS)
        return too_much_lds(name, k->native->lds());
    if (k->native->lds() > 0)
        mprotect(k->native->lds_end, page, PROT_NONE);
    k->count = k->native->count;
    k->name = strdup(name);
    k->arguments = calloc(k->count > 0 ? k->count : 1, sizeof *k->arguments);
    if (k->name == NULL || k->arguments == NULL)
        return hipErrorOutOfMemory;
    for (size_t i = 0; i < k->count; i++) {
        struct argument *a = &k->arguments[i];
        size_t alignment_of = k->native->arguments[i].alignment;
        a->size = k->native->arguments[i].size;
        a->is_pointer = k->native->arguments[i].is_pointer;
        a->offset = (k->bytes + alignment_of - 1) / alignment_of * alignment_of;
        k->bytes = a->offset + a->size;
    }
    return hipSuccess;
}

/* Under the lock. */
static hipError_t cl_kernel_of(struct kernel *k, const struct module *m, const char *name) {
    cl_int e;
    cl_uint count = 0;
    k->cl = clCreateKernel(m->program, name, &e);
    if (e != CL_SUCCESS) {
        k->cl = NULL;
        return hipErrorNotFound;
    }
    clGetKernelInfo(k->cl, CL_KERNEL_NUM_ARGS, sizeof count, &count, NULL);
    k->count = count;
    k->name = strdup(name);
    k->arguments = calloc(count > 0 ? count : 1, sizeof *k->arguments);
    if (k->name == NULL || k->arguments == NULL)
        return hipErrorOutOfMemory;
    if (clGetKernelWorkGroupInfo(k->cl, device, CL_KERNEL_COMPILE_WORK_GROUP_SIZE, sizeof k->required, k->required,
                                 NULL) != CL_SUCCESS)
        return hipErrorNotSupported;
    cl_ulong local_bytes = 0;
    clGetKernelWorkGroupInfo(k->cl, device, CL_KERNEL_LOCAL_MEM_SIZE, sizeof local_bytes, &local_bytes, NULL);
    if (local_bytes > LDS)
        return too_much_lds(name, local_bytes);
    for (cl_uint i = 0; i < count; i++)
        if (!describe_argument(k, i))
            return hipErrorNotSupported;
    return hipSuccess;
}

API hipError_t hipModuleGetFunction(hipFunction_t *out, hipModule_t handle, const char *name) {
    REQUIRE(out != NULL && name != NULL, hipErrorInvalidValue);
    *out = NULL;
    USABLE();
    pthread_mutex_lock(&lock);
    struct module *m = *find_module(handle);
    struct kernel *k = NULL;
    hipError_t result = m == NULL ? hipErrorInvalidHandle : hipSuccess;
    if (m != NULL)
        for (k = m->kernels; k != NULL && strcmp(k->name, name) != 0; k = k->next) {
        }
    if (result == hipSuccess && k == NULL) {
        k = calloc(1, sizeof *k);
        result = k == NULL ? hipErrorOutOfMemory : m->object != NULL ? native_kernel(k, m, name) : cl_kernel_of(k, m, name);
        if (result == hipSuccess) {
            k->module = m;
            k->next = m->kernels;
            m->kernels = k;
        } else {
            free_kernel(k);
        }
    }
    if (result == hipSuccess)
        *out = (hipFunction_t)k;
    pthread_mutex_unlock(&lock);
    return set(result);
}

/* Under the lock. */
static struct kernel *find_kernel(hipFunction_t handle) {
    for (struct module *m = modules; m != NULL; m = m->next)
        for (struct kernel *k = m->kernels; k != NULL; k = k->next)
            if (k == (struct kernel *)handle)
                return k;
    return NULL;
}

API hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute attribute, hipFunction_t handle) {
    REQUIRE(value != NULL && attribute == HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, hipErrorInvalidValue);
    USABLE();
    pthread_mutex_lock(&lock);
    const struct kernel *k = find_kernel(handle);
    const int known = k != NULL && k->native != NULL;
    if (known)
        *value = (int)k->native->lds();
    pthread_mutex_unlock(&lock);
    return set(known ? hipSuccess : k == NULL ? hipErrorInvalidHandle : hipErrorNotSupported);
}

/* Runs hipstub.sh on an OpenCL program; whether it made a file of that name. */
static int make_native(const struct module *m, const char *source, const char *made) {
    const char *arguments[512] = {"hipstub.sh"};
    size_t count = 1;
    char *options = m->options != NULL ? strdup(m->options) : NULL, *rest = options, *word;
    FILE *f = fopen(source, "wb");
    int status = -1, good = f != NULL && options != NULL && m->source != NULL && fputs(m->source, f) >= 0;
    pid_t child;
    if (f != NULL && fclose(f) != 0)
        good = 0;
    while (good && count < 508 && (word = strtok_r(rest, " ", &rest)) != NULL)
        arguments[count++] = word;
    arguments[count++] = "-o";
    arguments[count++] = made;
    arguments[count++] = source;
    if (good && posix_spawn(&child, "/opt/stand-ins/hipstub.sh", NULL, NULL, (char *const *)(uintptr_t)arguments, environ) == 0)
        waitpid(child, &status, 0);
    free(options);
    return status == 0;
}

/* Under the lock: an OpenCL kernel as machine code, made when first needed; NULL where it cannot be. */
static struct kernel *twin_of(struct kernel *k) {
    char folder[] = "/tmp/hipcpu-twin.XXXXXX", *source = NULL, *made = NULL;
    struct module m = {0};
    size_t size = 0, options = 0;
    if (k->twin != NULL || mkdtemp(folder) == NULL)
        return k->twin;
    if (asprintf(&source, "%s/kernel.cl", folder) < 0 || asprintf(&made, "%s/kernel", folder) < 0)
        return NULL;
    int file = make_native(k->module, source, made) ? open(made, O_RDONLY | O_CLOEXEC) : -1;
    off_t length = file >= 0 ? lseek(file, 0, SEEK_END) : -1;
    char *image = length > 0 ? mmap(NULL, (size_t)length + 1, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    if (image != MAP_FAILED) {
        const char *p = after("HIPCPU-ELF 1 ", image, (size_t)length);
        if (p != NULL && (p = read_number(p, ' ', &options)) != NULL && (p = read_number(p, '\n', &size)) != NULL)
            m.object = open_object(p + options + 1, size);
        munmap(image, (size_t)length + 1);
    }
    if (file >= 0)
        close(file);
    unlink(source);
    unlink(made);
    rmdir(folder);
    free(source);
    free(made);
    struct kernel *twin = m.object != NULL ? calloc(1, sizeof *twin) : NULL;
    if (twin == NULL)
        return NULL;
    twin->object = m.object;
    twin->module = k->module;
    if (native_kernel(twin, &m, k->name) != hipSuccess || twin->count != k->count || twin->bytes != k->bytes) {
        free_kernel(twin);
        return NULL;
    }
    SAY("kernel %s as machine code, for a partly filled group", k->name);
    return k->twin = twin;
}

/* ---------------------------------------------------------------- launches */

/* Under the lock: one line in the trace; memory that cannot be had only costs the line. */
static void note_launch(const struct kernel *k, const struct op *o) {
    const size_t limit = 1 << 20;
    char *line = NULL;
    int n = asprintf(&line, "%s variant=%s grid=%zux%zux%zu block=%zux%zux%zu\n", k->name,
                     k->module->variant != NULL ? k->module->variant : "", o->global[0], o->global[1], o->global[2],
                     o->local[0], o->local[1], o->local[2]);
    launches++;
    if (n < 0)
        return;
    size_t length = (size_t)n;
    if (trace_length + length + 1 > trace_room && trace_room < limit) {
        size_t room = trace_room == 0 ? 4096 : 2 * trace_room;
        char *grown = length < room / 2 ? realloc(trace, room) : NULL;
        if (grown != NULL) {
            trace = grown;
            trace_room = room;
        }
    }
    if (trace_length + length + 1 <= trace_room) {
        memcpy(trace + trace_length, line, length + 1);
        trace_length += length;
    }
    free(line);
}

/* The packed arguments of HIP's "extra" list. */
static hipError_t read_extra(void **extra, const char **buffer, size_t *bytes) {
    *buffer = NULL;
    *bytes = 0;
    for (; *extra != HIP_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == HIP_LAUNCH_PARAM_BUFFER_POINTER)
            *buffer = extra[1];
        else if (*extra == HIP_LAUNCH_PARAM_BUFFER_SIZE && extra[1] != NULL)
            memcpy(bytes, extra[1], sizeof *bytes);
        else
            return hipErrorInvalidValue;
    }
    return *buffer != NULL || *bytes == 0 ? hipSuccess : hipErrorInvalidValue;
}

/* Under the lock: of a structure, whose members are not known here, each word that is an address in HIP's memory. */
static void translate_words(char *bytes, size_t size) {
    for (size_t at = 0; at + sizeof(void *) <= size; at += sizeof(void *)) {
        const char *word, *real;
        int pageable;
        memcpy(&word, bytes + at, sizeof word);
        if (word != NULL && translate(word, 1, 1, 0, &real, &pageable) == hipSuccess)
            memcpy(bytes + at, &real, sizeof real);
    }
}

/* Under the lock: the arguments, with device addresses translated. */
static hipError_t copy_arguments(struct op *o, const struct kernel *k, void **params, void **extra) {
    const int of = k->module->device;
    const char *buffer = NULL;
    size_t bytes = 0;
    if ((params != NULL && extra != NULL) || (params == NULL && extra == NULL && k->count > 0))
        return hipErrorInvalidValue;
    if (extra != NULL) {
        hipError_t e = read_extra(extra, &buffer, &bytes);
        if (e != hipSuccess)
            return e;
        if (bytes < k->bytes)
            return hipErrorInvalidValue;
    }
    o->arguments = calloc(1, k->bytes > 0 ? k->bytes : 1);
    if (o->arguments == NULL)
        return hipErrorOutOfMemory;
    for (size_t i = 0; i < k->count; i++) {
        const struct argument *a = &k->arguments[i];
        const char *value = params != NULL ? params[i] : buffer + a->offset;
        if (value == NULL)
            return hipErrorInvalidValue;
        memcpy(o->arguments + a->offset, value, a->size);
        const char *pointer = NULL, *real;
        int pageable;
        if (!a->is_pointer && k->native != NULL && a->size > sizeof pointer) {
            translate_words(o->arguments + a->offset, a->size);
            continue;
        }
        if (!a->is_pointer)
            continue;
        memcpy(&pointer, value, sizeof pointer);
        if (pointer == NULL)
            continue;
        if (translate(pointer, 1, 1, 0, &real, &pageable) != hipSuccess) {
            complain("kernel %s, argument %zu: %p is no device memory", k->name, i, (const void *)pointer);
            return hipErrorIllegalAddress;
        }
        const struct block *b = find_block(pointer);
        if (!b->host && b->device != of) {
            complain("kernel %s, argument %zu: memory of device %d on device %d", k->name, i, b->device, of);
            return hipErrorIllegalAddress;
        }
        memcpy(o->arguments + a->offset, &real, sizeof real);
    }
    return hipSuccess;
}

static hipError_t launch(hipFunction_t function, const size_t global[3], const size_t local[3], size_t shared,
                         hipStream_t stream, void **params, void **extra, hipEvent_t before, hipEvent_t after) {
    USABLE();
    size_t group = 1;
    for (int i = 0; i < 3; i++) {
        REQUIRE(global[i] > 0 && local[i] > 0 && global[i] <= UINT32_MAX, hipErrorInvalidConfiguration);
        REQUIRE(local[i] <= MAX_BLOCK && (group *= local[i]) <= MAX_BLOCK, hipErrorInvalidConfiguration);
    }
    struct op *o = new_op(LAUNCH);
    REQUIRE(o != NULL, hipErrorOutOfMemory);
    pthread_mutex_lock(&lock);
    struct stream *s = find_stream(stream);
    struct kernel *k = find_kernel(function);
    struct event *begin = before != NULL ? find_event(before) : NULL;
    struct event *end = after != NULL ? find_event(after) : NULL;
    hipError_t e = hipSuccess;
    int partly = 0; /* whether the last group is: PoCL has none */
    if (s == NULL || k == NULL || (before != NULL && begin == NULL) || (after != NULL && end == NULL))
        e = hipErrorInvalidHandle;
    else if (s->device != current || k->module->device != current || (begin != NULL && begin->device != current) ||
             (end != NULL && end->device != current))
        e = hipErrorInvalidHandle;
    o->shared = shared;
    if (e == hipSuccess && shared > 0 && k->native == NULL) /* OpenCL kernels have no dynamic local memory of this kind */
        e = hipErrorNotSupported;
    else if (e == hipSuccess && shared > 0 && shared + k->native->lds() > LDS)
        e = hipErrorInvalidValue;
    for (int i = 0; i < 3 && e == hipSuccess; i++) {
        o->global[i] = global[i];
        o->local[i] = global[i] < local[i] ? global[i] : local[i]; /* a grid of one, partly filled, group */
        partly = partly || o->global[i] % o->local[i] != 0;
        if (k->required[0] != 0 && k->required[i] != o->local[i])
            e = hipErrorInvalidConfiguration;
    }
    if (e == hipSuccess && partly && k->native == NULL && (k = twin_of(k)) == NULL)
        e = hipErrorInvalidConfiguration;
    if (e == hipSuccess)
        e = copy_arguments(o, k, params, extra);
    if (e == hipSuccess && begin != NULL)
        e = record(begin, s);
    if (e == hipSuccess) {
        o->kernel = k;
        note_launch(k, o);
        e = submit(s, o, 0);
    } else {
        free_op(o);
    }
    if (e == hipSuccess && end != NULL)
        e = record(end, s);
    if (e == hipSuccess && wait_always)
        e = wait_for_last(s);
    pthread_mutex_unlock(&lock);
    return set(e);
}

/* The grid is in work items here, in groups in the next one. */
API hipError_t hipExtModuleLaunchKernel(hipFunction_t function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t lx,
                                        uint32_t ly, uint32_t lz, size_t shared, hipStream_t stream, void **params,
                                        void **extra, hipEvent_t before, hipEvent_t after, uint32_t flags) {
    const size_t global[3] = {gx, gy, gz}, local[3] = {lx, ly, lz};
    (void)flags; /* permits another order, asks for none */
    return launch(function, global, local, shared, stream, params, extra, before, after);
}

API hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz, unsigned lx,
                                     unsigned ly, unsigned lz, unsigned shared, hipStream_t stream, void **params,
                                     void **extra) {
    const size_t global[3] = {(size_t)gx * lx, (size_t)gy * ly, (size_t)gz * lz}, local[3] = {lx, ly, lz};
    return launch(function, global, local, shared, stream, params, extra, NULL, NULL);
}

/* Groups that wait for each other are more than OpenCL promises; one group alone is an ordinary launch. */
API hipError_t hipModuleLaunchCooperativeKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz,
                                                unsigned lx, unsigned ly, unsigned lz, unsigned shared,
                                                hipStream_t stream, void **params) {
    REQUIRE(gx == 1 && gy == 1 && gz == 1, hipErrorNotSupported);
    return hipModuleLaunchKernel(function, gx, gy, gz, lx, ly, lz, shared, stream, params, NULL);
}

/* ---------------------------------------------------------------- for tests */

/* The launches since the last call that fetched them, a line each. Returns the bytes needed, the end's 0 included;
 * where they are more than size, nothing is fetched. After a mebibyte lines are dropped. */
API size_t hipcpuTrace(char *buffer, size_t size) {
    pthread_mutex_lock(&lock);
    size_t needed = trace_length + 1;
    if (buffer != NULL && needed <= size) {
        if (trace_length > 0)
            memcpy(buffer, trace, trace_length);
        buffer[trace_length] = '\0';
        trace_length = 0;
    }
    pthread_mutex_unlock(&lock);
    return needed;
}

API void hipcpuCounters(size_t *launched, size_t *built, size_t *bytes) {
    pthread_mutex_lock(&lock);
    *launched = launches;
    *built = builds;
    *bytes = 0;
    for (int i = 0; i < devices; i++)
        *bytes += in_use[i];
    pthread_mutex_unlock(&lock);
}
