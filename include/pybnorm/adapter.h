/* Vendor-neutral helpers that every backend file shares: why a call was refused, how a tensor
 * lies in memory, and how its rank is folded to one the vendor computes with.
 */
#ifndef PYBNORM_ADAPTER_H
#define PYBNORM_ADAPTER_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shim.h"

#if defined(__GNUC__)
#define PBN_UNUSED __attribute__((unused))
#else
#define PBN_UNUSED
#endif

/* Why the last negative status on this thread was returned; static storage only. */
static _Thread_local const char *pbn_reason PBN_UNUSED;

static inline int pbn_refuse(int code, const char *reason) {
    pbn_reason = reason;
    return code;
}

static inline void pbn_copy_text(char *text, size_t size, const char *source) {
    if (size > 0)
        snprintf(text, size, "%s", source != NULL ? source : "");
}

/* Every adapter's table has these members: functions of the same names after `prefix`, which may be empty. */
#define PBN_LIBRARY_AND_HANDLES(prefix)                                                                       \
    .load = prefix##load, .status_name = prefix##status_name, .status_class = prefix##status_class,           \
    .last_error = prefix##last_error, .handle_device = prefix##handle_device,                                 \
    .device_count = prefix##device_count, .handle_create = prefix##handle_create,                             \
    .handle_borrow = prefix##handle_borrow, .handle_destroy = prefix##handle_destroy,                         \
    .handle_pointer = prefix##handle_pointer
#define PBN_TENSORS(prefix)                                                                                   \
    .tensor_create = prefix##tensor_create, .tensor_borrow = prefix##tensor_borrow,                           \
    .tensor_set = prefix##tensor_set, .tensor_get = prefix##tensor_get,                                       \
    .tensor_size = prefix##tensor_size, .tensor_destroy = prefix##tensor_destroy,                             \
    .derive = prefix##derive, .capability = prefix##capability

/* A vendor that has devices takes the one that is current on the calling thread, whatever device the handle is of. Its
 * adapter defines, before it uses this,
 *     int enter(const pbn_handle *handle, int *before)               makes the handle's device current if it is not
 *     void leave(const pbn_handle *handle, int before, int status)   gives back the one that was
 * and has NAME_there in its table for each NAME that takes a handle to the device. */
#define PBN_THERE(name, parameters, arguments)       \
    static int name##_there parameters {             \
        int before, status = enter(handle, &before); \
        if (status == PBN_OK) {                      \
            status = name arguments;                 \
            leave(handle, before, status);           \
        }                                            \
        return status;                               \
    }
#define PBN_CALL_THERE(name) PBN_THERE(name, (pbn_handle * handle, const pbn_call *call), (handle, call))

static const char pbn_no_place[] PBN_UNUSED =
    "the handle's device cannot be made current: its context was destroyed or is lost; a new handle is needed";

/* Every backend's own structure of `size` bytes, all zero. */
static inline int pbn_new_handle(size_t size, pbn_handle **handle) {
    *handle = calloc(1, size);
    return *handle != NULL ? PBN_OK : pbn_refuse(PBN_E_MEMORY, "no host memory for a handle");
}

/* `numbers` are the vendor's of the data types, in the order of pbn_dtype. */
static inline int pbn_to_vendor_dtype(const int numbers[4], int dtype, int *number) {
    if (dtype < PBN_FLOAT32 || dtype > PBN_BFLOAT16)
        return pbn_refuse(PBN_E_ARGUMENT, "the dtype is none of float32, float64, float16, bfloat16");
    *number = numbers[dtype];
    return PBN_OK;
}

/* `reason`: of the refusal of any other number. */
static inline int pbn_from_vendor_dtype(const int numbers[4], int number, int *dtype, const char *reason) {
    for (int i = PBN_FLOAT32; i <= PBN_BFLOAT16; i++)
        if (numbers[i] == number) {
            *dtype = i;
            return PBN_OK;
        }
    return pbn_refuse(PBN_E_UNSUPPORTED, reason);
}

static inline size_t pbn_item_size(int dtype) {
    return dtype == PBN_FLOAT64 ? 8 : dtype == PBN_FLOAT32 ? 4 : 2;
}

/* A backend without such a path must refuse the call: dropping z would give a wrong y. */
static inline int pbn_has_residual(const pbn_call *call) {
    return call->z_desc != NULL || call->z != NULL || call->dz_desc != NULL || call->dz != NULL;
}

static inline int64_t pbn_numel(int rank, const int64_t *dims) {
    int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank; i++)
        n *= dims[i];
    return n;
}

/* Elements between the first and the last one, plus one: what the descriptor spans in memory. */
static inline int64_t pbn_span(int rank, const int64_t *dims, const int64_t *strides) {
    int64_t last = 0;
    for (int i = 0; i < rank; i++)
        last += (dims[i] - 1) * strides[i];
    return rank > 0 ? last + 1 : 0;
}

/* Whether the axes named by `order` (outermost first) are packed; axes of length 1 may have any stride. */
static inline int pbn_is_packed(int rank, const int64_t *dims, const int64_t *strides, const int *order) {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; i--) {
        int axis = order[i];
        if (dims[axis] != 1 && strides[axis] != expected)
            return 0;
        expected *= dims[axis];
    }
    return 1;
}

/* Channels-first wins where both hold (C = 1 or no spatial extent): the memory is the same. */
static inline int pbn_layout_of(int rank, const int64_t *dims, const int64_t *strides) {
    int first[PBN_MAX_RANK], last[PBN_MAX_RANK];
    for (int i = 0; i < rank; i++) {
        first[i] = i;
        last[i] = i == 0 ? 0 : i == rank - 1 ? 1 : i + 1;
    }
    if (pbn_is_packed(rank, dims, strides, first))
        return PBN_CHANNELS_FIRST;
    if (pbn_is_packed(rank, dims, strides, last))
        return PBN_CHANNELS_LAST;
    return PBN_STRIDED;
}

static inline void pbn_packed_strides(int rank, const int64_t *dims, int layout, int64_t *strides) {
    int64_t next = 1;
    if (layout == PBN_CHANNELS_LAST && rank > 2) {
        strides[1] = 1;
        next = dims[1];
        for (int i = rank - 1; i >= 2; i--) {
            strides[i] = next;
            next *= dims[i];
        }
        strides[0] = next;
        return;
    }
    for (int i = rank - 1; i >= 0; i--) {
        strides[i] = next;
        next *= dims[i];
    }
}

/* A record of these values, without a vendor's descriptor. */
static inline pbn_tensor pbn_described(int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    pbn_tensor tensor = {.dtype = dtype, .rank = rank, .layout = pbn_layout_of(rank, dims, strides)};
    memcpy(tensor.dims, dims, (size_t)rank * sizeof *dims);
    memcpy(tensor.strides, strides, (size_t)rank * sizeof *strides);
    return tensor;
}

/* `value`, finite and within the range of a 16-bit `dtype`, rounded to it once: to nearest, ties to even. */
static inline double pbn_round(double value, int dtype) {
    /* 11 or 8 significant bits, fewer below the smallest normal number. */
    const int digits = dtype == PBN_FLOAT16 ? 11 : 8, lowest = dtype == PBN_FLOAT16 ? -24 : -133;
    int exponent;
    double unit;
    frexp(value, &exponent);
    unit = ldexp(1.0, exponent - digits > lowest ? exponent - digits : lowest);
    return nearbyint(value / unit) * unit;
}

/* `value`, finite and within the type's range, as an element of `dtype`: to nearest, ties to even. */
static inline void pbn_encode(double value, int dtype, void *element) {
    float narrow = (float)value;
    uint32_t bits;
    if (dtype == PBN_FLOAT64) {
        memcpy(element, &value, sizeof value);
        return;
    }
    if (dtype == PBN_FLOAT32) {
        memcpy(element, &narrow, sizeof narrow);
        return;
    }
    const double rounded = pbn_round(value, dtype);
    if (dtype == PBN_BFLOAT16) {
        narrow = (float)rounded; /* exact: bfloat16 is the upper half of float32 */
        memcpy(&bits, &narrow, sizeof bits);
        bits >>= 16;
    } else {
        const double size = fabs(rounded);
        int exponent;
        frexp(size, &exponent);
        bits = size < 0x1p-14 ? (uint32_t)(size * 0x1p24)
                              : (uint32_t)(exponent + 14) << 10 | ((uint32_t)ldexp(size, 11 - exponent) & 0x3ff);
        if (signbit(value))
            bits |= 0x8000;
    }
    const uint16_t half = (uint16_t)bits;
    memcpy(element, &half, sizeof half);
}

/* The same memory with a rank in [low, high], low >= 4: trailing axes of length 1 are appended,
 * or all spatial axes merge into one, (N, C, S, 1), which is possible exactly when they are
 * mutually contiguous. Batch norm does not distinguish spatial axes from one another.
 * A rank inside the range is copied. Returns PBN_E_UNSUPPORTED when the memory does not merge. */
static inline int pbn_fold(const pbn_tensor *t, int low, int high, int *rank, int64_t *dims, int64_t *strides) {
    if (t->rank <= high) {
        *rank = t->rank < low ? low : t->rank;
        for (int i = 0; i < *rank; i++) {
            dims[i] = i < t->rank ? t->dims[i] : 1;
            /* stride of an axis of length 1 is arbitrary; the C axis' own keeps channels-last recognisable */
            strides[i] = i < t->rank ? t->strides[i] : (t->layout == PBN_CHANNELS_LAST ? t->dims[1] : 1);
        }
        return PBN_OK;
    }
    int64_t size = 1, inner = 0, expected = 0;
    for (int i = t->rank - 1; i >= 2; i--) {
        if (t->dims[i] == 1)
            continue;
        if (inner == 0)
            inner = t->strides[i];
        else if (t->strides[i] != expected)
            return pbn_refuse(PBN_E_UNSUPPORTED, "the spatial axes of this rank are not mutually contiguous, so they "
                                                 "cannot be merged to the rank the vendor takes");
        size *= t->dims[i];
        expected = t->strides[i] * t->dims[i];
    }
    if (inner == 0)
        inner = t->layout == PBN_CHANNELS_LAST ? t->dims[1] : 1;
    *rank = low;
    dims[0] = t->dims[0], strides[0] = t->strides[0];
    dims[1] = t->dims[1], strides[1] = t->strides[1];
    dims[2] = size, strides[2] = inner;
    for (int i = 3; i < low; i++) {
        dims[i] = 1;
        strides[i] = t->layout == PBN_CHANNELS_LAST ? t->dims[1] : 1;
    }
    return PBN_OK;
}

#endif
