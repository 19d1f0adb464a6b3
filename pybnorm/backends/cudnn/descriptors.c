/* Tensor descriptors: what reaches the vendor, folding to rank 4 and 5, derived descriptors. Part of adapter.c. */

/* What may reach cudnnSetTensorNdDescriptor. It answers an offset of 2^31 - 1 with NOT_SUPPORTED but leaves
 * the descriptor set, and calls with such a one read and write out of bounds; negative strides it accepts. */
static int check_extent(int rank, const int64_t *dims, const int64_t *strides) {
    int64_t last = 0;
    if (rank < 2 || rank > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_ARGUMENT, "the rank is outside 2 to 8");
    if (rank == 2 && api.major == 8)
        return pbn_refuse(PBN_E_UNSUPPORTED, rank2_in_8);
    for (int i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a dim is outside 1 to 2^31 - 1, the range of cuDNN's int");
        if (strides[i] < (dims[i] == 1 ? 0 : 1) || strides[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a stride is outside 1 to 2^31 - 1, the range of cuDNN's int "
                                              "(0 is allowed where the dim is 1)");
    }
    for (int i = 0; i < rank; i++) { /* each product is below 2^62 and the sum so far below 2^31 */
        last += (dims[i] - 1) * strides[i];
        if (last >= INT_MAX)
            return pbn_refuse(PBN_E_UNSUPPORTED, "the last element lies 2^31 - 1 elements or more after the first; "
                                                 "cuDNN addresses elements with 32 bits");
    }
    return PBN_OK;
}

static int set_vendor(void *vendor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    int narrow_dims[PBN_MAX_RANK], narrow_strides[PBN_MAX_RANK], vendor_dtype = 0;
    int status = check_extent(rank, dims, strides);
    if (status == PBN_OK)
        status = pbn_to_vendor_dtype(dtypes, dtype, &vendor_dtype);
    if (status != PBN_OK)
        return status;
    for (int i = 0; i < rank; i++) {
        narrow_dims[i] = (int)dims[i];
        narrow_strides[i] = (int)strides[i];
    }
    return api.cudnnSetTensorNdDescriptor(vendor, vendor_dtype, rank, narrow_dims, narrow_strides);
}

static int get_vendor(const void *vendor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    int narrow_dims[PBN_MAX_RANK], narrow_strides[PBN_MAX_RANK], vendor_dtype = -1, vendor_rank = -1;
    int status = api.cudnnGetTensorNdDescriptor(vendor, PBN_MAX_RANK, &vendor_dtype, &vendor_rank, narrow_dims,
                                                narrow_strides);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        return status;
    if (vendor_rank < 0 || vendor_rank > PBN_MAX_RANK)
        return pbn_refuse(PBN_E_INTERNAL, "cuDNN reports a tensor descriptor of a rank above its own maximum of 8");
    for (int i = 0; i < vendor_rank; i++) {
        dims[i] = narrow_dims[i];
        strides[i] = narrow_strides[i];
    }
    *rank = vendor_rank;
    return pbn_from_vendor_dtype(dtypes, vendor_dtype, dtype,
                                 "the descriptor's cudnnDataType_t is none of CUDNN_DATA_FLOAT, _DOUBLE, _HALF, "
                                 "_BFLOAT16");
}

/* The descriptor for the compute calls of `t` (its vendor descriptor need not be set yet): its own, one of the
 * folded rank, or NULL where the memory does not fold; the descriptor calls work there all the same. */
static int make_compute(const pbn_tensor *t, void **compute) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int rank, status;
    *compute = t->vendor;
    if (t->rank == 4 || t->rank == 5)
        return PBN_OK;
    *compute = NULL;
    status = pbn_fold(t, 4, 5, &rank, dims, strides);
    if (status != PBN_OK)
        return status == PBN_E_UNSUPPORTED ? PBN_OK : status;
    status = api.cudnnCreateTensorDescriptor(compute);
    if (status != PBN_CUDNN_STATUS_SUCCESS) {
        *compute = NULL;
        return status;
    }
    status = set_vendor(*compute, t->dtype, rank, dims, strides);
    if (status != PBN_OK) {
        api.cudnnDestroyTensorDescriptor(*compute);
        *compute = NULL;
    }
    return status;
}

static void drop_compute(pbn_tensor *t) {
    if (t->compute != NULL && t->compute != t->vendor)
        api.cudnnDestroyTensorDescriptor(t->compute);
    t->compute = NULL;
}

static void unset(pbn_tensor *t) {
    drop_compute(t);
    t->dtype = t->rank = t->layout = 0;
    memset(t->dims, 0, sizeof t->dims);
    memset(t->strides, 0, sizeof t->strides);
}

/* A record of these values beside t's vendor descriptor, with a compute descriptor of its own. */
static int describe(const pbn_tensor *t, int dtype, int rank, const int64_t *dims, const int64_t *strides,
                    pbn_tensor *next) {
    *next = pbn_described(dtype, rank, dims, strides);
    next->vendor = t->vendor;
    next->owned = t->owned;
    return make_compute(next, &next->compute);
}

/* Takes over what t's vendor descriptor holds; t is unset where that is nothing this backend can use. */
static int adopt(pbn_tensor *t) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    pbn_tensor next;
    int dtype = 0, rank = 0;
    int status = get_vendor(t->vendor, &dtype, &rank, dims, strides);
    if (status == PBN_OK && rank != 0) {
        status = check_extent(rank, dims, strides);
        if (status == PBN_E_ARGUMENT) /* not the caller's argument here, but a foreign descriptor's content */
            status = PBN_E_UNSUPPORTED;
        if (status == PBN_OK)
            status = describe(t, dtype, rank, dims, strides, &next);
    }
    if (status != PBN_OK || rank == 0) {
        unset(t);
        return status;
    }
    drop_compute(t);
    *t = next;
    return PBN_OK;
}

/* After a refusal by cuDNN: the record stays if the vendor descriptor is still what it says. */
static void unset_if_changed(pbn_tensor *t) {
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    int dtype, rank;
    if (get_vendor(t->vendor, &dtype, &rank, dims, strides) != PBN_OK || dtype != t->dtype || rank != t->rank ||
        memcmp(dims, t->dims, (size_t)rank * sizeof *dims) != 0 ||
        memcmp(strides, t->strides, (size_t)rank * sizeof *strides) != 0)
        unset(t);
}

static int cudnn_tensor_create(pbn_tensor *tensor) {
    int status;
    memset(tensor, 0, sizeof *tensor);
    forget_vendor_text();
    status = api.cudnnCreateTensorDescriptor(&tensor->vendor);
    if (status != PBN_CUDNN_STATUS_SUCCESS)
        tensor->vendor = NULL;
    else
        tensor->owned = 1;
    return status;
}

static int cudnn_tensor_borrow(void *vendor, pbn_tensor *tensor) {
    int status;
    memset(tensor, 0, sizeof *tensor);
    tensor->vendor = vendor;
    forget_vendor_text();
    status = adopt(tensor);
    if (status != PBN_OK)
        memset(tensor, 0, sizeof *tensor);
    return status;
}

static int cudnn_tensor_set(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    pbn_tensor next;
    int status = check_extent(rank, dims, strides);
    if (status != PBN_OK)
        return status;
    forget_vendor_text();
    /* The compute descriptor first, on the side, so that a failure leaves both as they were. */
    status = describe(tensor, dtype, rank, dims, strides, &next);
    if (status != PBN_OK)
        return status;
    status = set_vendor(tensor->vendor, dtype, rank, dims, strides);
    if (status != PBN_OK) {
        drop_compute(&next);
        unset_if_changed(tensor);
        return status;
    }
    drop_compute(tensor);
    *tensor = next;
    return PBN_OK;
}

static int cudnn_tensor_get(const pbn_tensor *tensor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    forget_vendor_text();
    return get_vendor(tensor->vendor, dtype, rank, dims, strides);
}

static int cudnn_tensor_size(const pbn_tensor *tensor, size_t *bytes) {
    forget_vendor_text();
    return api.cudnnGetTensorSizeInBytes(tensor->vendor, bytes);
}

static int cudnn_tensor_destroy(pbn_tensor *tensor) {
    int status = PBN_OK;
    if (tensor->vendor != NULL) {
        forget_vendor_text();
        drop_compute(tensor);
        if (tensor->owned)
            status = api.cudnnDestroyTensorDescriptor(tensor->vendor);
    }
    memset(tensor, 0, sizeof *tensor);
    return status;
}

static const int modes[] = {[PBN_PER_ACTIVATION] = PBN_CUDNN_BATCHNORM_PER_ACTIVATION,
                            [PBN_SPATIAL] = PBN_CUDNN_BATCHNORM_SPATIAL,
                            [PBN_SPATIAL_PERSISTENT] = PBN_CUDNN_BATCHNORM_SPATIAL_PERSISTENT};

static int cudnn_derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    int status;
    forget_vendor_text();
    status = api.cudnnDeriveBNTensorDescriptor(derived->vendor, x->vendor, modes[mode]);
    if (status != PBN_CUDNN_STATUS_SUCCESS) {
        unset_if_changed(derived);
        return status;
    }
    return adopt(derived);
}
