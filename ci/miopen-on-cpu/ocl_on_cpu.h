/* OpenCL C for one CPU thread, as far as libMIOpen's kernels need it: its functions, over hip_on_cpu.hpp's coroutines. */
size_t hipcpu_index(uint what, uint dimension);
void hipcpu_barrier(void);
#define get_local_id(d) hipcpu_index(0, d)
#define get_group_id(d) hipcpu_index(1, d)
#define get_local_size(d) hipcpu_index(2, d)
#define get_num_groups(d) hipcpu_index(3, d)
#define get_global_id(d) hipcpu_index(4, d)
#define get_global_size(d) hipcpu_index(5, d)
#define barrier(flags) hipcpu_barrier()
#define mem_fence(flags) ((void)0)

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
/* An AMD GPU reads a float4 from any address that is good for a float. */
#define HIPCPU_VECTOR(type, name, n, bytes) typedef type hipcpu_##name##n __attribute__((ext_vector_type(n), aligned(bytes)));
HIPCPU_VECTOR(float, float, 2, 4) HIPCPU_VECTOR(float, float, 4, 4) HIPCPU_VECTOR(float, float, 8, 4)
HIPCPU_VECTOR(half, half, 2, 2) HIPCPU_VECTOR(half, half, 4, 2) HIPCPU_VECTOR(half, half, 8, 2)
HIPCPU_VECTOR(ushort, ushort, 2, 2) HIPCPU_VECTOR(ushort, ushort, 4, 2) HIPCPU_VECTOR(ushort, ushort, 8, 2)
#define float2 hipcpu_float2
#define float4 hipcpu_float4
#define float8 hipcpu_float8
#define half2 hipcpu_half2
#define half4 hipcpu_half4
#define half8 hipcpu_half8
#define _Float162 hipcpu_half2
#define _Float164 hipcpu_half4
#define _Float168 hipcpu_half8
#define ushort2 hipcpu_ushort2
#define ushort4 hipcpu_ushort4
#define ushort8 hipcpu_ushort8

#define HIPCPU_F static inline __attribute__((overloadable))
#define HIPCPU_SCALAR_1(type, wide, name, builtin) \
    HIPCPU_F type name(type a) { return (type)__builtin_##builtin((wide)a); }
#define HIPCPU_SCALAR_2(type, wide, name, builtin) \
    HIPCPU_F type name(type a, type b) { return (type)__builtin_##builtin((wide)a, (wide)b); }
#define HIPCPU_FLOATS_1(name) \
    HIPCPU_SCALAR_1(float, float, name, name##f) HIPCPU_SCALAR_1(double, double, name, name) HIPCPU_SCALAR_1(half, float, name, name##f)
#define HIPCPU_FLOATS_2(name) \
    HIPCPU_SCALAR_2(float, float, name, name##f) HIPCPU_SCALAR_2(double, double, name, name) HIPCPU_SCALAR_2(half, float, name, name##f)
HIPCPU_FLOATS_1(sqrt) HIPCPU_FLOATS_1(fabs) HIPCPU_FLOATS_1(exp) HIPCPU_FLOATS_1(log) HIPCPU_FLOATS_1(log1p) HIPCPU_FLOATS_1(tanh)
HIPCPU_FLOATS_2(pow) HIPCPU_FLOATS_2(fmax) HIPCPU_FLOATS_2(fmin)
HIPCPU_F float rsqrt(float a) { return 1.0f / __builtin_sqrtf(a); }
HIPCPU_F double rsqrt(double a) { return 1.0 / __builtin_sqrt(a); }
HIPCPU_F half rsqrt(half a) { return (half)(1.0f / __builtin_sqrtf((float)a)); }
HIPCPU_F float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HIPCPU_F double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
HIPCPU_F half fma(half a, half b, half c) { return (half)__builtin_fmaf((float)a, (float)b, (float)c); }
/* As AMD's compiler does it: fused. */
HIPCPU_F float mad(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HIPCPU_F double mad(double a, double b, double c) { return __builtin_fma(a, b, c); }
HIPCPU_F half mad(half a, half b, half c) { return (half)__builtin_fmaf((float)a, (float)b, (float)c); }
/* With a NaN undefined in OpenCL: by its formula, b where a < b, else a. */
HIPCPU_F float max(float a, float b) { return a < b ? b : a; }
HIPCPU_F float min(float a, float b) { return b < a ? b : a; }
HIPCPU_F double max(double a, double b) { return a < b ? b : a; }
HIPCPU_F double min(double a, double b) { return b < a ? b : a; }
HIPCPU_F half max(half a, half b) { return a < b ? b : a; }
HIPCPU_F half min(half a, half b) { return b < a ? b : a; }
HIPCPU_F int max(int a, int b) { return a > b ? a : b; }
HIPCPU_F int min(int a, int b) { return a < b ? a : b; }
HIPCPU_F uint max(uint a, uint b) { return a > b ? a : b; }
HIPCPU_F uint min(uint a, uint b) { return a < b ? a : b; }

/* The same of each element of a vector. */
#define HIPCPU_EACH(type, n)                                                                          \
    HIPCPU_EACH_1(type##n, n, rsqrt) HIPCPU_EACH_1(type##n, n, sqrt) HIPCPU_EACH_1(type##n, n, fabs)  \
    HIPCPU_EACH_1(type##n, n, exp) HIPCPU_EACH_1(type##n, n, log) HIPCPU_EACH_1(type##n, n, tanh)     \
    HIPCPU_EACH_2(type##n, n, max) HIPCPU_EACH_2(type##n, n, min) HIPCPU_EACH_2(type##n, n, pow)      \
    HIPCPU_EACH_2(type##n, n, fmax) HIPCPU_EACH_2(type##n, n, fmin)                                   \
    HIPCPU_EACH_3(type##n, type##n, type##n, n, a[i], b[i], c[i])                                     \
    HIPCPU_EACH_3(type, type##n, type##n, n, a, b[i], c[i])                                           \
    HIPCPU_EACH_3(type##n, type, type##n, n, a[i], b, c[i])
#define HIPCPU_EACH_1(type, n, f)  \
    HIPCPU_F type f(type a) {      \
        type r;                    \
        for (int i = 0; i < n; i++) \
            r[i] = f(a[i]);        \
        return r;                  \
    }
#define HIPCPU_EACH_2(type, n, f)     \
    HIPCPU_F type f(type a, type b) { \
        type r;                       \
        for (int i = 0; i < n; i++)   \
            r[i] = f(a[i], b[i]);     \
        return r;                     \
    }
#define HIPCPU_EACH_3(A, B, C, n, x, y, z) \
    HIPCPU_F C mad(A a, B b, C c) {        \
        C r;                               \
        for (int i = 0; i < n; i++)        \
            r[i] = mad(x, y, z);           \
        return r;                          \
    }
HIPCPU_EACH(float, 2) HIPCPU_EACH(float, 4)
