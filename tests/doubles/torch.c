/* A double of PyTorch's stable C interface: the functions of libtorch_cpu, whose tensors it says are of CUDA device 0. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

uintptr_t double_stream = 0x1000;
int double_guards, double_made_guards; /* that are there now, and all */

static void *real(const char *name) {
    void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (found == NULL)
        abort();
    return found;
}

#define FORWARD(name, parameters, arguments) \
    int name parameters {                    \
        int (*function) parameters;          \
        *(void **)&function = real(#name);   \
        return function arguments;           \
    }
FORWARD(aoti_torch_library_init_impl, (const char *s, const char *k, const char *f, uint32_t l, void **m), (s, k, f, l, m))
FORWARD(torch_library_impl, (void *l, const char *n, void *k, uint64_t v), (l, n, k, v))
FORWARD(aoti_torch_delete_library_object, (void *l), (l))
FORWARD(aoti_torch_new_tensor_handle, (void *t, void **m), (t, m))
FORWARD(aoti_torch_new_uninitialized_tensor, (void **m), (m))
FORWARD(aoti_torch_delete_tensor_object, (void *t), (t))
FORWARD(aoti_torch_get_data_ptr, (void *t, void **a), (t, a))
FORWARD(aoti_torch_get_dim, (void *t, int64_t *r), (t, r))
FORWARD(aoti_torch_get_sizes, (void *t, int64_t **s), (t, s))
FORWARD(aoti_torch_get_strides, (void *t, int64_t **s), (t, s))
FORWARD(aoti_torch_get_dtype, (void *t, int32_t *d), (t, d))
FORWARD(aoti_torch_is_defined, (void *t, uint8_t *d), (t, d))
FORWARD(torch_list_size, (void *l, size_t *s), (l, s))
FORWARD(torch_list_get_item, (void *l, size_t i, uint64_t *v), (l, i, v))
FORWARD(torch_delete_list, (void *l), (l))

_Bool aoti_torch_grad_mode_is_enabled(void) {
    _Bool (*function)(void);
    *(void **)&function = real("aoti_torch_grad_mode_is_enabled");
    return function();
}
int aoti_torch_get_device_type(void *tensor, int32_t *type) {
    *type = 1;
    return 0;
}
int aoti_torch_get_device_index(void *tensor, int32_t *index) {
    *index = 0;
    return 0;
}
int aoti_torch_empty_strided(int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t type,
                             int32_t index, void **made) {
    int (*function)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, void **);
    *(void **)&function = real("aoti_torch_empty_strided");
    if (type != 1 || index != 0)
        return 1;
    return function(rank, sizes, strides, dtype, 0, 0, made);
}
int aoti_torch_get_current_cuda_stream(int32_t index, void **stream) {
    *stream = (void *)double_stream;
    return index != 0;
}
int aoti_torch_create_cuda_guard(int32_t index, void **guard) {
    double_guards++, double_made_guards++;
    *guard = &double_guards;
    return index != 0;
}
int aoti_torch_delete_cuda_guard(void *guard) {
    double_guards--;
    return guard != &double_guards;
}
