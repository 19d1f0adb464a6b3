/* cuDNN 8's statuses as its documentation and header number them, written down because its package is too large to
 * install for them: tests/abi holds this against that header where one is found. Everything else that the double uses is
 * the same in cuDNN 8 and 9. */
#define CUDNN8_STATUSES(C)                           \
    C(CUDNN_STATUS_SUCCESS, 0)                       \
    C(CUDNN_STATUS_NOT_INITIALIZED, 1)               \
    C(CUDNN_STATUS_ALLOC_FAILED, 2)                  \
    C(CUDNN_STATUS_BAD_PARAM, 3)                     \
    C(CUDNN_STATUS_INTERNAL_ERROR, 4)                \
    C(CUDNN_STATUS_INVALID_VALUE, 5)                 \
    C(CUDNN_STATUS_ARCH_MISMATCH, 6)                 \
    C(CUDNN_STATUS_MAPPING_ERROR, 7)                 \
    C(CUDNN_STATUS_EXECUTION_FAILED, 8)              \
    C(CUDNN_STATUS_NOT_SUPPORTED, 9)                 \
    C(CUDNN_STATUS_LICENSE_ERROR, 10)                \
    C(CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING, 11) \
    C(CUDNN_STATUS_RUNTIME_IN_PROGRESS, 12)          \
    C(CUDNN_STATUS_RUNTIME_FP_OVERFLOW, 13)          \
    C(CUDNN_STATUS_VERSION_MISMATCH, 14)
