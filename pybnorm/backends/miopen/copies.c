/* Copies between strides. Part of adapter.c.
 *
 * miopenTransformTensor copies between any strides, but:
 *  - its kernels compile for float32 and float16 only, and it reads float16 tensors' factors as float32 here and as
 *    float16 there: so elements of 16 bits go as float16, whatever they are, with factors 1 and 0, which moves bits;
 *  - it takes two neighbouring axes for one where the outer stride divided by the inner one, rounded down, is the inner
 *    length: of 3 steps of 2 in rows of 7 it drops the gap. miopenSetTensor does the same. Innermost axes first, no
 *    quotient is above 1, at the price of scattered access. */

typedef struct axis {
    int64_t size, from, to; /* strides in elements */
} axis;

/* The axes of more than one element, outermost of `to` first, those merged that are one in both. */
static int merged_axes(const pbn_tensor *from, const pbn_tensor *to, axis *axes) {
    int n = 0, merged = 0;
    for (int i = 0; i < to->rank; i++) {
        int k = n;
        if (to->dims[i] == 1)
            continue;
        for (; k > 0 && axes[k - 1].to < to->strides[i]; k--)
            axes[k] = axes[k - 1];
        axes[k] = (axis){to->dims[i], from->strides[i], to->strides[i]};
        n++;
    }
    for (int i = 0; i < n; i++) {
        axis *last = &axes[merged - 1];
        if (merged > 0 && last->from == axes[i].size * axes[i].from && last->to == axes[i].size * axes[i].to)
            *last = (axis){last->size * axes[i].size, axes[i].from, axes[i].to};
        else
            axes[merged++] = axes[i];
    }
    return merged;
}

static int misread(const axis *axes, int n) {
    for (int i = 1; i < n; i++)
        if (axes[i - 1].from / axes[i].from == axes[i].size && axes[i - 1].to / axes[i].to == axes[i].size)
            return 1;
    return 0;
}

static int new_strided(void **desc, int vendor_dtype, const axis *axes, int n, int target) {
    int dims[VENDOR_RANK] = {1}, strides[VENDOR_RANK] = {1};
    const int reversed = misread(axes, n);
    int status;
    for (int i = 0; i < n; i++) {
        const axis *a = &axes[reversed ? n - 1 - i : i];
        dims[i] = (int)a->size;
        strides[i] = (int)(target ? a->to : a->from);
    }
    *desc = NULL;
    status = api.miopenCreateTensorDescriptor(desc);
    if (status == PBN_miopenStatusSuccess)
        status = api.miopenSetTensorDescriptor(*desc, vendor_dtype, n > 0 ? n : 1, dims, strides);
    return status;
}

/* One call of the vendor for VENDOR_RANK axes; `value` is what to fill with, or NULL: a copy. */
static int move(pbn_handle *handle, int dtype, axis *axes, int n, const char *from, char *to, const void *value) {
    const float one = 1, zero = 0;
    const size_t item = pbn_item_size(dtype);
    void *source = NULL, *target = NULL;
    int status = PBN_OK;
    if (n > VENDOR_RANK) {
        int least = 0;
        axis cut;
        for (int i = 1; i < n; i++)
            least = axes[i].size < axes[least].size ? i : least;
        cut = axes[least];
        memmove(axes + least, axes + least + 1, (size_t)(n - 1 - least) * sizeof *axes);
        for (int64_t i = 0; i < cut.size && status == PBN_OK; i++) {
            axis rest[PBN_MAX_RANK];
            memcpy(rest, axes, (size_t)(n - 1) * sizeof *axes);
            status = move(handle, dtype, rest, n - 1, value != NULL ? NULL : from + (size_t)(i * cut.from) * item,
                          to + (size_t)(i * cut.to) * item, value);
        }
        return status;
    }
    const int number = value == NULL && dtype == PBN_BFLOAT16 ? PBN_miopenHalf : dtypes[dtype];
    status = new_strided(&target, number, axes, n, 1);
    if (status == PBN_miopenStatusSuccess && value == NULL)
        status = new_strided(&source, number, axes, n, 0);
    if (status == PBN_miopenStatusSuccess)
        status = value != NULL ? api.miopenSetTensor(handle->vendor, target, to, value)
                               : api.miopenTransformTensor(handle->vendor, &one, source, from, &zero, target, to);
    if (source != NULL)
        api.miopenDestroyTensorDescriptor(source);
    if (target != NULL)
        api.miopenDestroyTensorDescriptor(target);
    return status;
}

static int copy(pbn_handle *handle, const pbn_tensor *from, const void *source, const pbn_tensor *to, void *target) {
    axis axes[PBN_MAX_RANK];
    const int n = merged_axes(from, to, axes);
    return move(handle, to->dtype, axes, n, source, target, NULL);
}
