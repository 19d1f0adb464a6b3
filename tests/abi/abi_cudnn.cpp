// Every constant and prototype that the cuDNN backend declares, against NVIDIA's headers.
#include <cuda.h>
#include <cudnn.h>

#if CUDNN_MAJOR < 9 // it came with cuDNN 9; there is nothing to compare with before
extern "C" void cudnnGetLastErrorString(char *, size_t);
#endif

#include "cudnn/api.h"

#include "abi_same.hpp"

#define SAME_VALUE(name, ...) PBN_ABI_SAME_VALUE(name, PBN_##name);
PBN_CUDNN_CONSTANTS(SAME_VALUE)
PBN_CUDA_LOST(SAME_VALUE)
PBN_CUDA_CONSTANTS(SAME_VALUE)
#if CUDNN_MAJOR >= 9
PBN_CUDNN9_STATUSES(SAME_VALUE)
#else
#define SAME_VALUE_8(name, ...) PBN_ABI_SAME_VALUE(name, PBN_V8_##name);
PBN_CUDNN8_STATUSES(SAME_VALUE_8)
#endif

#define SAME_FUNCTION(result, name, parameters) PBN_ABI_SAME_FUNCTION(name, pbn_##name##_fn);
PBN_CUDNN_SYMBOLS(SAME_FUNCTION, SAME_FUNCTION)
PBN_CUDA_DRIVER_SYMBOLS(SAME_FUNCTION)
