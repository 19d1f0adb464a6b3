// The comparer itself: what it must accept, and the number it must give for each kind of difference.
#include <cstddef>
#include <cstdint>

#include "abi_same.hpp"

extern "C" {
typedef enum { VENDOR_A = 0, VENDOR_B = 1 } vendor_enum;
struct vendor_object;
typedef struct vendor_object *vendor_handle;
vendor_enum vendor_call(vendor_handle, vendor_enum, const int[], size_t, double, vendor_handle *, vendor_enum *);
void vendor_text(char *, size_t) noexcept;
const char *vendor_name(vendor_enum);
}

using pbn_abi::not_a_function;
using pbn_abi::other_arity;
using pbn_abi::other_result;

PBN_ABI_SAME_VALUE(VENDOR_B, 1);
PBN_ABI_SAME_FUNCTION(vendor_call, int (*)(void *, int, const int *, size_t, double, void **, int *));
PBN_ABI_SAME_FUNCTION(vendor_text, void (*)(char *, size_t));
PBN_ABI_SAME_FUNCTION(vendor_name, const char *(*)(int));

template <class Ours>
constexpr int difference() { return pbn_abi::first_difference<decltype(&vendor_call), Ours>(); }

static_assert(difference<int (*)(int, int, const int *, size_t, double, void **, int *)>() == 1);
static_assert(difference<int (*)(void *, int64_t, const int *, size_t, double, void **, int *)>() == 2);
static_assert(difference<int (*)(void *, double, const int *, size_t, double, void **, int *)>() == 2);
static_assert(difference<int (*)(void *, int, const int64_t *, size_t, double, void **, int *)>() == 3);
static_assert(difference<int (*)(void *, int, const float *, size_t, double, void **, int *)>() == 3);
static_assert(difference<int (*)(void *, int, const int *, int64_t, double, void **, int *)>() == 4);
static_assert(difference<int (*)(void *, int, const int *, unsigned, double, void **, int *)>() == 4);
static_assert(difference<int (*)(void *, int, const int *, size_t, float, void **, int *)>() == 5);
static_assert(difference<int (*)(void *, int, const int *, size_t, double *, void **, int *)>() == 5);
static_assert(difference<int (*)(void *, int, const int *, size_t, double, int *, int *)>() == 6);
static_assert(difference<int (*)(void *, int, const int *, size_t, double, void **, size_t *)>() == 7);
static_assert(difference<void (*)(void *, int, const int *, size_t, double, void **, int *)>() == other_result);
static_assert(difference<size_t (*)(void *, int, const int *, size_t, double, void **, int *)>() == other_result);
static_assert(difference<int (*)(void *, int, const int *, size_t, double, void **)>() == other_arity);
static_assert(difference<int *>() == not_a_function);

#ifdef MUST_FAIL
PBN_ABI_SAME_VALUE(VENDOR_B, 2);
PBN_ABI_SAME_FUNCTION(vendor_call, int (*)(void *, int, const int *, size_t, float, void **, int *));
#endif
