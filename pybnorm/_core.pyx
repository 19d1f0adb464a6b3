# cython: language_level=3, freethreading_compatible=True, embedsignature=True, embedsignature.format=python
"""Handles, tensor descriptors and the batch-norm calls of the vendor libraries.

The only compiled module. It sees ``include/pybnorm/shim.h``, never a vendor header. A call validates once
(`pybnorm._arguments`), releases the GIL, goes through the backend's table of functions and raises only if the
status is not 0. Nothing on that path prints, synchronises or allocates device memory.
"""

cimport cython
from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetInterrupt
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.math cimport copysign
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset, strlen

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() nogil

from pybnorm._shim cimport *

import atexit
import collections
import importlib.metadata
import inspect
import os
import sys
import threading
import warnings
import weakref

from pybnorm import _arguments, _arrays, _find, defects, errors
from pybnorm.enums import Activation, Capability, DataType, Layout, Mode, Operation

cdef extern from *:
    """
    #include "pybnorm/shim.h"
    #define PBN_ADDRESS(name) &pbn_backend_##name,
    static const pbn_backend *const pbn_backends[] = { PBN_BACKENDS(PBN_ADDRESS) };
    enum { PBN_BACKEND_COUNT = sizeof pbn_backends / sizeof pbn_backends[0] };
    """
    const pbn_backend *pbn_backends[]
    enum:
        PBN_BACKEND_COUNT

cdef extern from "pybnorm/dl.h" nogil:
    int pbn_dl_open(pbn_library *library, const char *file, int no_load)
    void *pbn_dl_symbol(void *handle, const char *name)
    void pbn_dl_discard(pbn_library *library)

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **pointer, size_t alignment, size_t size)

__all__ = [
    "BackwardPlan",
    "Cache",
    "CallList",
    "ForwardInferencePlan",
    "ForwardTrainingPlan",
    "Handle",
    "Library",
    "Plan",
    "Tensor",
    "TensorDescriptor",
    "algorithms",
    "allow_in_place",
    "axpby",
    "backends",
    "batch_normalization_backward",
    "batch_normalization_forward_inference",
    "batch_normalization_forward_training",
    "bound",
    "cache",
    "capability",
    "current_stream",
    "defects_of",
    "derive_bn_tensor_descriptor",
    "describe",
    "device_types",
    "fill",
    "has_symbol",
    "install_torch_kernels",
    "load",
    "loaded",
    "look",
    "numbered_algorithms",
    "refuse_addresses",
    "relu",
    "relu_backward",
    "remove_torch_kernels",
    "search_spec",
    "tell_of_defects",
    "tensors",
    "way_of",
]

cdef dict _DEVICE_NAMES = {  # by DLPack's numbers
    1: "CPU", 2: "CUDA", 3: "CUDA pinned host", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI", 10: "ROCm",
    11: "ROCm pinned host", 12: "extension device", 13: "CUDA managed", 14: "oneAPI", 15: "WebGPU", 16: "Hexagon",
    17: "MAIA", 18: "Trainium",
}
cdef Py_ssize_t _DESCRIPTOR_CACHE = 64
cdef Py_ssize_t _PLAN_CACHE = 256  # more than the kinds of call of a large network
cdef size_t _WORKSPACE_ALIGNMENT = _arguments.ALIGNMENT
cdef int _forks = 0  # how many lie between the process that loaded this module and this one
cdef bint _exiting = False

include "_core/libraries.pxi"
include "_core/failures.pxi"
include "_core/descriptors.pxi"
include "_core/calls.pxi"
include "_core/exchange.pxi"
include "_core/cache.pxi"
include "_core/lock.pxi"
include "_core/handle.pxi"
include "_core/handle_arrays.pxi"
include "_core/known_defects.pxi"
include "_core/handle_calls.pxi"
include "_core/handle_plans.pxi"
include "_core/call_lists.pxi"
include "_core/entry_points.pxi"
include "_core/algorithms.pxi"
include "_core/plans.pxi"
include "_core/plan_kinds.pxi"
include "_core/inner.pxi"
include "_core/torch_kernels.pxi"
