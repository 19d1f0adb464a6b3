// Every constant, structure and prototype that the oneDNN backend declares, against oneDNN's headers.
#include <cstddef>

#include <oneapi/dnnl/dnnl.h>
#include <oneapi/dnnl/dnnl_debug.h>

#include "onednn/api.h"

#include "abi_same.hpp"

// Not PBN_ABI_SAME_VALUE: some names are macros, which it would print as their numbers.
#define SAME_VALUE(name, number, ...) \
    static_assert(static_cast<long long>(name) == number, "value of " #name " differs");
PBN_DNNL_STATUSES(SAME_VALUE)
PBN_DNNL_CONSTANTS(SAME_VALUE)

#define SAME_FUNCTION(result, name, parameters) PBN_ABI_SAME_FUNCTION(name, pbn_##name##_fn);
PBN_DNNL_SYMBOLS(SAME_FUNCTION, SAME_FUNCTION)

// These two cross the border as memory, which the prototypes do not show.
#define SAME_MEMBER(vendor, ours, member)                                                                        \
    static_assert(offsetof(vendor, member) == offsetof(ours, member) &&                                          \
                      pbn_abi::same_type<decltype(vendor::member), decltype(ours::member)>(),                    \
                  "member " #member " of " #vendor " differs");
static_assert(sizeof(dnnl_version_t) == sizeof(pbn_dnnl_version), "size of dnnl_version_t differs");
SAME_MEMBER(dnnl_version_t, pbn_dnnl_version, major)
SAME_MEMBER(dnnl_version_t, pbn_dnnl_version, minor)
SAME_MEMBER(dnnl_version_t, pbn_dnnl_version, patch)
SAME_MEMBER(dnnl_version_t, pbn_dnnl_version, hash)
SAME_MEMBER(dnnl_version_t, pbn_dnnl_version, cpu_runtime)
SAME_MEMBER(dnnl_version_t, pbn_dnnl_version, gpu_runtime)
static_assert(sizeof(dnnl_exec_arg_t) == sizeof(pbn_dnnl_exec_arg), "size of dnnl_exec_arg_t differs");
SAME_MEMBER(dnnl_exec_arg_t, pbn_dnnl_exec_arg, arg)
SAME_MEMBER(dnnl_exec_arg_t, pbn_dnnl_exec_arg, memory)

static_assert(sizeof(dnnl_dim_t) == sizeof(int64_t), "dnnl_dim_t is not 64 bits");
