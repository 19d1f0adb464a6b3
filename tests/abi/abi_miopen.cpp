// What pybnorm/backends/miopen/api.h says about MIOpen's binary interface, against MIOpen's own header.
#include <hip/hip_runtime_api.h>
#include <miopen/miopen.h>
#include <miopen/version.h>

#include "miopen/api.h"

#include "abi_same.hpp"

#include <cstddef>

#define SAME_PLACE(vendor, ours) \
    static_assert(offsetof(hipPointerAttribute_t, vendor) == offsetof(pbn_hip_pointer, ours), #vendor " lies elsewhere")
static_assert(sizeof(hipPointerAttribute_t) == sizeof(pbn_hip_pointer), "size of hipPointerAttribute_t differs");
SAME_PLACE(device, device);
SAME_PLACE(devicePointer, device_pointer);
SAME_PLACE(hostPointer, host_pointer);
SAME_PLACE(isManaged, managed);
static_assert(offsetof(hipDeviceProp_tR0600, warpSize) == offsetof(pbn_hip_properties, wave_size));
static_assert(offsetof(hipDeviceProp_tR0600, gcnArchName) == offsetof(pbn_hip_properties, architecture));
static_assert(sizeof(hipDeviceProp_tR0600) <= sizeof(pbn_hip_properties));

#define SAME_VALUE(name, value) PBN_ABI_SAME_VALUE(name, PBN_##name);
#define SAME_FUNCTION(result, name, parameters) PBN_ABI_SAME_FUNCTION(name, pbn_##name##_fn);

PBN_MIOPEN_CONSTANTS(SAME_VALUE)
PBN_MIOPEN_SYMBOLS_2_0(SAME_FUNCTION, SAME_FUNCTION)

#if MIOPEN_VERSION_MAJOR > 3 || (MIOPEN_VERSION_MAJOR == 3 && MIOPEN_VERSION_MINOR >= 5)
PBN_MIOPEN_CONSTANTS_3_5(SAME_VALUE)
PBN_MIOPEN_SYMBOLS_3_5(SAME_FUNCTION)
#endif
#ifdef NEWER_HEADER // the version's number does not tell
PBN_MIOPEN_SYMBOLS_NEWER(SAME_FUNCTION)
#endif
