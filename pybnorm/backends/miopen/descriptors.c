/* Tensor descriptors, their rank-4 views, and derived descriptors. Part of adapter.c. */

/* ---------------------------------------------------------------- tensors */

#define VENDOR_RANK 5 /* the most axes of miopenTransformTensor and miopenSetTensor */

static const int dtypes[] = {PBN_miopenFloat, PBN_miopenDouble, PBN_miopenHalf, PBN_miopenBFloat16};

/* MIOpen's descriptors hold C ints. */
static int check_range(int rank, const int64_t *dims, const int64_t *strides) {
    for (int i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a size is outside 1 to 2**31 - 1");
        if (strides[i] < 1 || strides[i] > INT_MAX)
            return pbn_refuse(PBN_E_ARGUMENT, "a stride is outside 1 to 2**31 - 1");
    }
    return PBN_OK;
}

static int set_descriptor(void *desc, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    int vendor_dtype, d[PBN_MAX_RANK], s[PBN_MAX_RANK];
    int status = pbn_to_vendor_dtype(dtypes, dtype, &vendor_dtype);
    if (status == PBN_OK)
        status = check_range(rank, dims, strides);
    if (status != PBN_OK)
        return status;
    for (int i = 0; i < rank; i++) {
        d[i] = (int)dims[i];
        s[i] = (int)strides[i];
    }
    return api.miopenSetTensorDescriptor(desc, vendor_dtype, rank, d, s);
}

/* What the vendor says a descriptor holds; rank 0 (and dtype untouched) for one that was never set. */
static int get_descriptor(void *desc, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    int vendor_dtype = 0, d[PBN_MAX_RANK], s[PBN_MAX_RANK];
    int status = api.miopenGetTensorDescriptorSize(desc, rank); /* despite its name, the rank */
    if (status != PBN_miopenStatusSuccess || *rank == 0)
        return status;
    if (*rank < 0 || *rank > PBN_MAX_RANK) /* the getter below writes that many numbers unasked */
        return pbn_refuse(PBN_E_UNSUPPORTED, "the descriptor's rank is above 8");
    status = api.miopenGetTensorDescriptor(desc, &vendor_dtype, d, s);
    if (status != PBN_miopenStatusSuccess)
        return status;
    for (int i = 0; i < *rank; i++) {
        dims[i] = d[i];
        strides[i] = s[i];
    }
    return pbn_from_vendor_dtype(dtypes, vendor_dtype, dtype,
                                 "the descriptor's miopenDataType_t is none of miopenFloat, miopenDouble, miopenHalf, "
                                 "miopenBFloat16");
}

/* The same elements with rank 4, which is the one rank all of MIOpen's batch-norm paths take:
 * (N, C, 1, 1), (N, C, L, 1), (N, C, H, W), and (N, C, D*H*W, 1) for higher ranks. */
static void view_4d(int rank, const int64_t *dims, int64_t *view) {
    view[0] = dims[0];
    view[1] = rank > 1 ? dims[1] : 1;
    view[2] = 1;
    view[3] = rank == 4 ? dims[3] : 1;
    for (int i = 2; i < (rank == 4 ? 3 : rank); i++)
        view[2] *= dims[i];
}

static int new_view_4d(void **desc, int dtype, int rank, const int64_t *dims, int layout) {
    int64_t view[4], strides[4];
    int status;
    view_4d(rank, dims, view);
    pbn_packed_strides(4, view, layout, strides);
    *desc = NULL;
    status = api.miopenCreateTensorDescriptor(desc);
    if (status == PBN_miopenStatusSuccess)
        status = set_descriptor(*desc, dtype, 4, view, strides);
    if (status != PBN_OK && *desc != NULL) {
        api.miopenDestroyTensorDescriptor(*desc);
        *desc = NULL;
    }
    return status;
}

static int tensor_create(pbn_tensor *tensor) {
    int status;
    memset(tensor, 0, sizeof *tensor);
    status = api.miopenCreateTensorDescriptor(&tensor->vendor);
    tensor->owned = status == PBN_miopenStatusSuccess;
    return status;
}

/* Writes down what `vendor` holds, or will, with a rank-4 view of it. Strided tensors and those of 2**31 elements or more
 * get none: no call takes them. */
static int describe(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    pbn_tensor next = pbn_described(dtype, rank, dims, strides);
    int status = PBN_OK;
    next.vendor = tensor->vendor;
    next.owned = tensor->owned;
    if (rank > 0 && next.layout != PBN_STRIDED && pbn_numel(rank, dims) <= INT_MAX)
        status = new_view_4d(&next.compute, dtype, rank, dims, next.layout);
    if (status == PBN_OK)
        *tensor = next;
    return status;
}

static int tensor_borrow(void *vendor, pbn_tensor *tensor) {
    int dtype = 0, rank = 0, status;
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
    memset(tensor, 0, sizeof *tensor);
    status = get_descriptor(vendor, &dtype, &rank, dims, strides);
    if (status == PBN_OK)
        status = describe(tensor, dtype, rank, dims, strides);
    tensor->vendor = status == PBN_OK ? vendor : NULL;
    return status;
}

static int tensor_set(pbn_tensor *tensor, int dtype, int rank, const int64_t *dims, const int64_t *strides) {
    const pbn_tensor before = *tensor;
    int status = describe(tensor, dtype, rank, dims, strides);
    if (status != PBN_OK)
        return status;
    /* MIOpen leaves a descriptor as it was when it refuses new values, so nothing is half set. */
    status = set_descriptor(tensor->vendor, dtype, rank, dims, strides);
    void *const old = status == PBN_OK ? before.compute : tensor->compute;
    if (status != PBN_OK)
        *tensor = before;
    if (old != NULL)
        api.miopenDestroyTensorDescriptor(old);
    return status;
}

static int tensor_get(const pbn_tensor *tensor, int *dtype, int *rank, int64_t *dims, int64_t *strides) {
    return get_descriptor(tensor->vendor, dtype, rank, dims, strides);
}

static int tensor_size(const pbn_tensor *tensor, size_t *bytes) {
    return api.miopenGetTensorNumBytes(tensor->vendor, bytes);
}

static int tensor_destroy(pbn_tensor *tensor) {
    int status = PBN_OK;
    if (tensor->compute != NULL)
        status = api.miopenDestroyTensorDescriptor(tensor->compute);
    if (tensor->vendor != NULL && tensor->owned) {
        int second = api.miopenDestroyTensorDescriptor(tensor->vendor);
        status = status != PBN_OK ? status : second;
    }
    memset(tensor, 0, sizeof *tensor);
    return status;
}

/* ---------------------------------------------------------------- derive */

static int vendor_mode(int mode) {
    return mode == PBN_SPATIAL ? PBN_miopenBNSpatial : PBN_miopenBNPerActivation;
}

static void parameter_dims(const pbn_tensor *x, int mode, int64_t *dims) {
    for (int i = 0; i < x->rank; i++)
        dims[i] = i == 1 || (i > 1 && mode == PBN_PER_ACTIVATION) ? x->dims[i] : 1;
}

/* MIOpen writes out of bounds when it derives from a rank below 4 and refuses ranks above 5, so it
 * is asked about the rank-4 view, and its answer is compared with the rule for it. */
static int derive(pbn_tensor *derived, const pbn_tensor *x, int mode) {
    void *x_view = NULL, *answer = NULL;
    int dtype = -1, rank = 0, status;
    int64_t dims[PBN_MAX_RANK], strides[PBN_MAX_RANK], wanted[PBN_MAX_RANK], view[4];
    parameter_dims(x, mode, wanted);
    view_4d(x->rank, wanted, view);

    status = new_view_4d(&x_view, x->dtype, x->rank, x->dims, PBN_CHANNELS_FIRST);
    if (status != PBN_OK)
        return status;
    status = api.miopenCreateTensorDescriptor(&answer);
    if (status == PBN_miopenStatusSuccess) {
        status = api.miopenDeriveBNTensorDescriptor(answer, x_view, vendor_mode(mode));
        if (status == PBN_miopenStatusSuccess)
            status = get_descriptor(answer, &dtype, &rank, dims, strides);
        api.miopenDestroyTensorDescriptor(answer);
    }
    api.miopenDestroyTensorDescriptor(x_view);
    if (status != PBN_OK)
        return status;
    if (rank != 4 || dtype != PBN_FLOAT32 || memcmp(dims, view, sizeof view) != 0)
        return pbn_refuse(PBN_E_INTERNAL, "miopenDeriveBNTensorDescriptor gave other sizes than (1, C, 1, 1) or "
                                          "(1, C, H, W), or another type than float32");
    pbn_packed_strides(x->rank, wanted, PBN_CHANNELS_FIRST, strides);
    return tensor_set(derived, dtype, x->rank, wanted, strides);
}
