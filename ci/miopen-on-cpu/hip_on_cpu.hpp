// HIP C++ for one CPU thread, as far as libMIOpen's kernels and native's need it. hipstub.sh puts this in front of a kernel's source;
// hipcpu.c loads the result and calls `run`. A work group's items are coroutines: each runs until its next barrier, and
// one that has ended is waited for by none, as on an AMD GPU (in OpenCL, all items must come to a barrier).
#pragma once
#define __HIP__ 1

using uint = unsigned;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
using size_t = decltype(sizeof 0);
namespace __hip_internal { // the sources take these names from here
using uint8_t = unsigned char;
using int8_t = signed char;
using uint16_t = unsigned short;
using int16_t = short;
using uint32_t = unsigned;
using int32_t = int;
using uint64_t = unsigned long;
using int64_t = long;
} // namespace __hip_internal
using half = _Float16;
using __half = _Float16;

// As on an AMD GPU, a vector may lie at any address that is good for one of its elements.
#define HIPCPU_VECTOR(type, n, bytes) typedef type type##n __attribute__((ext_vector_type(n), aligned(bytes)));
#define HIPCPU_VECTORS(type, bytes) HIPCPU_VECTOR(type, 2, bytes) HIPCPU_VECTOR(type, 3, bytes) HIPCPU_VECTOR(type, 4, bytes)
HIPCPU_VECTORS(float, 4) HIPCPU_VECTORS(double, 8) HIPCPU_VECTORS(int, 4) HIPCPU_VECTORS(uint, 4)
HIPCPU_VECTORS(short, 2) HIPCPU_VECTORS(ushort, 2) HIPCPU_VECTORS(char, 1) HIPCPU_VECTORS(uchar, 1)
HIPCPU_VECTORS(long, 8) HIPCPU_VECTORS(ulong, 8) HIPCPU_VECTORS(half, 2)
#define HIPCPU_MAKE(type)                                                                           \
    inline type##2 make_##type##2(type a, type b) { return type##2{a, b}; }                         \
    inline type##4 make_##type##4(type a, type b, type c, type d) { return type##4{a, b, c, d}; }
HIPCPU_MAKE(float) HIPCPU_MAKE(ushort) HIPCPU_MAKE(int) HIPCPU_MAKE(uint)

#define __device__
#define __host__
#define __constant__ const
#define __global__ hipcpu_kernel_mark
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("hipcpu_lds")))

#define HIPCPU_1(name, suffix)                                                  \
    inline float name(float a) { return __builtin_##suffix##f(a); }             \
    inline double name(double a) { return __builtin_##suffix(a); }              \
    inline half name(half a) { return (half)__builtin_##suffix##f((float)a); }
#define HIPCPU_2(name, suffix)                                                                             \
    inline float name(float a, float b) { return __builtin_##suffix##f(a, b); }                            \
    inline double name(double a, double b) { return __builtin_##suffix(a, b); }                            \
    inline half name(half a, half b) { return (half)__builtin_##suffix##f((float)a, (float)b); }
HIPCPU_1(sqrt, sqrt) HIPCPU_1(exp, exp) HIPCPU_1(log, log) HIPCPU_1(log1p, log1p) HIPCPU_1(tanh, tanh) HIPCPU_1(fabs, fabs)
HIPCPU_1(floor, floor) HIPCPU_1(ceil, ceil)
HIPCPU_2(pow, pow) HIPCPU_2(fmax, fmax) HIPCPU_2(fmin, fmin) HIPCPU_2(max, fmax) HIPCPU_2(min, fmin)
inline float rsqrt(float a) { return 1.0f / __builtin_sqrtf(a); }
inline double rsqrt(double a) { return 1.0 / __builtin_sqrt(a); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline half fma(half a, half b, half c) { return (half)__builtin_fmaf((float)a, (float)b, (float)c); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline float sqrtf(float a) { return __builtin_sqrtf(a); }
inline uint __float_as_uint(float f) { return __builtin_bit_cast(uint, f); }
inline float __uint_as_float(uint n) { return __builtin_bit_cast(float, n); }

extern "C" {
int _setjmp(void **) __attribute__((returns_twice));
void _longjmp(void **, int) __attribute__((noreturn));
void *memset(void *, int, size_t);
extern char __start_hipcpu_lds __attribute__((weak, visibility("hidden")));
extern char __stop_hipcpu_lds __attribute__((weak, visibility("hidden")));
extern char hipcpu_lds_end[4096] __attribute__((visibility("hidden"))); // the page after it, see lds_end.c
}

namespace hipcpu {

struct index {
    uint x, y, z;
};
inline index thread, block, block_size, grid_size, full_size, total;

enum wait { NONE, WAVE, GROUP }; // for all items of 32 lanes, or of the group, that have not ended
struct item {
    void *state[64]; // a jmp_buf is smaller
    index at;
    bool started, ended;
    wait waits;
    uint turn, ors;  // shuffles, and calls of __syncthreads_or
    uint lane[2][2]; // given to a shuffle, in turn: an item is at most one shuffle ahead of its wave
};
inline item items[1024];
inline item *current;
inline size_t count; // items of the group
inline void *back[64];
inline int any[3]; // of __syncthreads_or, in turn: the last, which some may read yet, this one, and the next, which is 0
inline char *dynamic; // local memory whose size the launch gives

// The item's turn ends.
__attribute__((noinline)) inline void pause(wait what) {
    current->waits = what;
    if (_setjmp(current->state) == 0)
        _longjmp(back, 1);
    thread = current->at;
}

// Those go on for whom all that they wait for have come; false where none can: some lanes of a wave wait at a barrier, or
// took another branch, where others shuffle.
inline bool release() {
    bool whole = true, some = false;
    for (size_t wave = 0; wave < count; wave += 32) {
        const size_t end = wave + 32 < count ? wave + 32 : count;
        bool all = true;
        for (size_t i = wave; i < end; i++) {
            all = all && (items[i].ended || items[i].waits == WAVE);
            whole = whole && (items[i].ended || items[i].waits == GROUP);
        }
        for (size_t i = wave; i < end && all; i++) {
            some = some || !items[i].ended;
            items[i].waits = NONE;
        }
    }
    for (size_t i = 0; i < count && whole; i++)
        items[i].waits = NONE;
    return some || whole;
}

struct argument {
    size_t size, alignment;
    int is_pointer;
};

// What hipcpu.c knows a kernel by: the same structures are there.
struct kernel {
    size_t count;
    const argument *arguments;
    // global, local: work items. begin: starts a function on a stack, and does not return. dynamic: local memory of `bytes`.
    // 0 where local memory was left, -1 where lanes of a wave part ways at a shuffle.
    int (*run)(void *const *values, const size_t global[3], const size_t local[3], void *const *stacks,
               void (*begin)(void *stack, void (*function)()), char *dynamic, size_t bytes);
    size_t (*lds)(); // bytes of local memory, of all kernels of one source
    char *lds_end;   // a page that may be made unreadable, or the end of nothing
};

// LLVM's types
using ir_ptr = void *;
using ir_float = float;
using ir_double = double;
using ir_half = half;
using ir_i8 = char;
using ir_i16 = short;
using ir_i32 = int;
using ir_i64 = long;

template <class T>
struct is_pointer {
    static constexpr int value = 0;
};
template <class T>
struct is_pointer<T *> {
    static constexpr int value = 1;
};
template <class T>
struct plain {
    using type = T;
};
template <class T>
struct plain<const T> {
    using type = T;
};
template <size_t... I>
struct indices {};
template <size_t N, size_t... I>
struct make_indices : make_indices<N - 1, N - 1, I...> {};
template <size_t... I>
struct make_indices<0, I...> {
    using type = indices<I...>;
};

inline void (*body)();
inline void *const *body_values;

inline void item_main() {
    for (;;) {
        thread = current->at;
        body();
        current->ended = true;
        pause(NONE);
    }
}

template <auto F, class... A, size_t... I>
inline void call(void (*)(A...), indices<I...>) {
    F(*(typename plain<A>::type *)body_values[I]...);
}

inline size_t lds_bytes() {
    return &__start_hipcpu_lds != nullptr ? (size_t)(&__stop_hipcpu_lds - &__start_hipcpu_lds) : 0;
}

// Between local memory and the page at its end: bytes that no kernel may change. They are NaN as what it did not write is.
inline size_t lds_slack() {
    return &__start_hipcpu_lds != nullptr && hipcpu_lds_end >= &__stop_hipcpu_lds && hipcpu_lds_end - &__stop_hipcpu_lds < 4096
               ? (size_t)(hipcpu_lds_end - &__stop_hipcpu_lds)
               : 0;
}

inline void lds_fill() {
    if (lds_bytes() > 0)
        memset(&__start_hipcpu_lds, 0xFF, lds_bytes() + lds_slack());
}

inline bool lds_kept() {
    for (size_t i = 0, n = lds_slack(); i < n; i++)
        if ((unsigned char)(&__stop_hipcpu_lds)[i] != 0xFF)
            return false;
    return true;
}

template <auto F>
struct work;
template <class... A, void (*F)(A...)>
struct work<F> {
    static constexpr argument arguments[sizeof...(A) + 1] = {
        {sizeof(A), alignof(A), is_pointer<typename plain<A>::type>::value}..., {0, 0, 0}};

    static void one() { call<F>(F, typename make_indices<sizeof...(A)>::type{}); }

    static int run(void *const *values, const size_t global[3], const size_t local[3], void *const *stacks,
                   void (*begin)(void *, void (*)()), char *memory, size_t bytes) {
        size_t groups[3], g[3], room = local[0] * local[1] * local[2];
        for (int d = 0; d < 3; d++)
            groups[d] = (global[d] + local[d] - 1) / local[d];
        grid_size = {(uint)groups[0], (uint)groups[1], (uint)groups[2]};
        full_size = {(uint)local[0], (uint)local[1], (uint)local[2]};
        total = {(uint)global[0], (uint)global[1], (uint)global[2]};
        body = one;
        body_values = values;
        dynamic = memory;
        for (size_t i = 0; i < room; i++)
            items[i].started = false;
        for (g[2] = 0; g[2] < groups[2]; g[2]++)
            for (g[1] = 0; g[1] < groups[1]; g[1]++)
                for (g[0] = 0; g[0] < groups[0]; g[0]++) {
                    uint size[3];
                    for (int d = 0; d < 3; d++) { // the last group may be partly filled
                        size_t rest = global[d] - g[d] * local[d];
                        size[d] = (uint)(rest < local[d] ? rest : local[d]);
                    }
                    block = {(uint)g[0], (uint)g[1], (uint)g[2]};
                    block_size = {size[0], size[1], size[2]};
                    size_t live;
                    count = 0;
                    for (uint z = 0; z < size[2]; z++)
                        for (uint y = 0; y < size[1]; y++)
                            for (uint x = 0; x < size[0]; x++) {
                                items[count].at = {x, y, z};
                                items[count].waits = NONE;
                                items[count].turn = items[count].ors = 0;
                                items[count++].ended = false;
                            }
                    lds_fill();
                    memset(dynamic, 0xFF, bytes);
                    any[0] = any[1] = any[2] = 0;
                    do {
                        live = 0;
                        for (size_t i = 0; i < count; i++) {
                            live += !items[i].ended;
                            if (items[i].ended || items[i].waits != NONE)
                                continue;
                            current = &items[i];
                            if (_setjmp(back) == 0) {
                                if (current->started)
                                    _longjmp(current->state, 1);
                                current->started = true;
                                begin(stacks[i], item_main);
                            }
                        }
                        if (live > 0 && !release())
                            return -1;
                    } while (live > 0);
                    if (!lds_kept())
                        return 0;
                }
        return 1;
    }
};

template <auto F>
constexpr kernel describe() {
    return {sizeof work<F>::arguments / sizeof(argument) - 1, work<F>::arguments, work<F>::run, lds_bytes, hipcpu_lds_end};
}

} // namespace hipcpu

// What ocl_on_cpu.h calls.
extern "C" inline __attribute__((used)) size_t hipcpu_index(uint what, uint d) {
    using namespace hipcpu;
    const index *const values[] = {&thread, &block, &block_size, &grid_size, nullptr, &total};
    auto at = [d](const index &i) -> size_t { return d == 0 ? i.x : d == 1 ? i.y : i.z; };
    return what == 4 ? at(block) * at(full_size) + at(thread) : at(*values[what]);
}
extern "C" inline __attribute__((used)) void hipcpu_barrier() { hipcpu::pause(hipcpu::GROUP); }

#define threadIdx hipcpu::thread
#define blockIdx hipcpu::block
#define blockDim hipcpu::block_size
#define gridDim hipcpu::grid_size
inline void __syncthreads() { hipcpu::pause(hipcpu::GROUP); }
inline int __syncthreads_or(int predicate) {
    using namespace hipcpu;
    const uint turn = current->ors++;
    any[turn % 3] |= predicate != 0;
    any[(turn + 1) % 3] = 0;
    pause(GROUP);
    return any[turn % 3];
}

// Of 32 lanes at most, all of which come to it. Of a lane that is not there or has ended the value is NaN.
template <class T>
inline T __shfl_xor(T value, int mask, int width) {
    using namespace hipcpu;
    static_assert(sizeof(T) <= sizeof items->lane[0], "a word or two");
    item *own = current;
    const size_t number = (size_t)(own - items), other = number ^ (size_t)mask;
    const uint turn = own->turn++ & 1;
    __builtin_memcpy(own->lane[turn], &value, sizeof value);
    pause(WAVE);
    if (width > 32 || other / (size_t)width != number / (size_t)width || other >= count || items[other].ended)
        memset(&value, 0xFF, sizeof value);
    else
        __builtin_memcpy(&value, items[other].lane[turn], sizeof value);
    return value;
}
