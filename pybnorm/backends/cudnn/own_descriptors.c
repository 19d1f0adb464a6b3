/* Tensor descriptors for an installation without libcudnn_ops, which has cuDNN's own. Part of adapter.c.
 *
 * Graphs take dims and strides, and the rest of this backend describes tensors by descriptors all the same: these take
 * the place of the vendor's functions, with the parameters and the rules of those. No call of the vendor's sees one. */

typedef struct own_tensor {
    int dtype, rank, dims[PBN_MAX_RANK], strides[PBN_MAX_RANK];
} own_tensor;

static int own_create(void **desc) {
    *desc = calloc(1, sizeof(own_tensor));
    return *desc != NULL ? PBN_CUDNN_STATUS_SUCCESS : PBN_CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED;
}

static int own_destroy(void *desc) {
    free(desc);
    return PBN_CUDNN_STATUS_SUCCESS;
}

/* The caller has held them against check_extent. */
static int own_set(void *desc, int dtype, int rank, const int *dims, const int *strides) {
    own_tensor *t = desc;
    t->dtype = dtype;
    t->rank = rank;
    memcpy(t->dims, dims, (size_t)rank * sizeof *dims);
    memcpy(t->strides, strides, (size_t)rank * sizeof *strides);
    return PBN_CUDNN_STATUS_SUCCESS;
}

static int own_get(const void *desc, int requested, int *dtype, int *rank, int *dims, int *strides) {
    const own_tensor *t = desc;
    const int count = requested < t->rank ? requested : t->rank;
    *dtype = t->dtype;
    *rank = t->rank;
    memcpy(dims, t->dims, (size_t)count * sizeof *dims);
    memcpy(strides, t->strides, (size_t)count * sizeof *strides);
    return PBN_CUDNN_STATUS_SUCCESS;
}

static int own_size(const void *desc, size_t *bytes) {
    const own_tensor *t = desc;
    size_t last = 0;
    int dtype, status = pbn_from_vendor_dtype(dtypes, t->dtype, &dtype, "a descriptor's type is unknown");
    if (status != PBN_OK || t->rank == 0)
        return PBN_CUDNN_STATUS_BAD_PARAM;
    for (int i = 0; i < t->rank; i++)
        last += (size_t)(t->dims[i] - 1) * (size_t)t->strides[i];
    *bytes = (last + 1) * pbn_item_size(dtype);
    return PBN_CUDNN_STATUS_SUCCESS;
}

static int own_derive(void *derived, const void *x, int mode) {
    const own_tensor from = *(const own_tensor *)x; /* both may be the same one */
    own_tensor *t = derived;
    int step = 1;
    *t = from;
    t->dtype = from.dtype == PBN_CUDNN_DATA_DOUBLE ? PBN_CUDNN_DATA_DOUBLE : PBN_CUDNN_DATA_FLOAT;
    for (int i = from.rank - 1; i >= 0; i--) {
        t->dims[i] = i == 1 || (i > 1 && mode == PBN_CUDNN_BATCHNORM_PER_ACTIVATION) ? from.dims[i] : 1;
        t->strides[i] = step;
        step *= t->dims[i];
    }
    return PBN_CUDNN_STATUS_SUCCESS;
}

/* Leaves what graphs need: whatever libcudnn_ops has is not there, also where a dispatcher has a function of its name,
 * which would end the process. */
static void use_graphs_only(cudnn_api *table) {
    table->graphs_only = 1;
#define PBN_NOT_THERE(name) table->name = NULL;
    PBN_CUDNN_OPS(PBN_NOT_THERE)
#undef PBN_NOT_THERE
    table->cudnnCreateTensorDescriptor = own_create;
    table->cudnnDestroyTensorDescriptor = own_destroy;
    table->cudnnSetTensorNdDescriptor = own_set;
    table->cudnnGetTensorNdDescriptor = own_get;
    table->cudnnGetTensorSizeInBytes = own_size;
    table->cudnnDeriveBNTensorDescriptor = own_derive;
}
