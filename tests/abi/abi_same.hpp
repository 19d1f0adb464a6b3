// Compares a prototype declared by a backend file with the one in the vendor's own header.
//
// The two never use the same type names (opaque pointers are void *, enums are int in our
// declarations), so what is compared is what the calling convention sees: the number of
// parameters and, for each one and for the result, its kind and width.
//
//     PBN_ABI_SAME_VALUE(CUDNN_DATA_FLOAT, PBN_CUDNN_DATA_FLOAT);
//     PBN_ABI_SAME_FUNCTION(cudnnCreate, pbn_cudnnCreate_fn);   // function, pointer-to-function type
#ifndef PYBNORM_TESTS_ABI_SAME_HPP
#define PYBNORM_TESTS_ABI_SAME_HPP

#include <type_traits>

namespace pbn_abi {

template <class V, class O> constexpr bool same_type();

template <class T> constexpr bool is_integer_like() { return std::is_integral_v<T> || std::is_enum_v<T>; }
template <class T> constexpr bool is_scalar_like() { return is_integer_like<T>() || std::is_floating_point_v<T>; }

// An enum's signedness is the compiler's choice (C says int, g++ says unsigned int for one
// without negative members), so it counts only between two plain integers.
template <class V, class O> constexpr bool same_integer() {
    if constexpr (std::is_enum_v<V> || std::is_enum_v<O>)
        return sizeof(V) == sizeof(O);
    else
        return sizeof(V) == sizeof(O) && std::is_signed_v<V> == std::is_signed_v<O> &&
               std::is_same_v<V, bool> == std::is_same_v<O, bool>;
}

// Behind a pointer: void and opaque structs answer for anything that is not a known scalar of
// the other side; known scalars and pointers must agree (const int * is not const int64_t *).
template <class V, class O> constexpr bool same_pointee() {
    if constexpr (std::is_void_v<V> || std::is_void_v<O>)
        return true;
    else if constexpr (is_scalar_like<V>() || is_scalar_like<O>() || std::is_pointer_v<V> || std::is_pointer_v<O>)
        return same_type<V, O>();
    else
        return true;
}

template <class V0, class O0> constexpr bool same_type() {
    using V = std::remove_cv_t<V0>;
    using O = std::remove_cv_t<O0>;
    if constexpr (std::is_void_v<V> || std::is_void_v<O>)
        return std::is_void_v<V> && std::is_void_v<O>;
    else if constexpr (std::is_pointer_v<V> && std::is_pointer_v<O>)
        return same_pointee<std::remove_cv_t<std::remove_pointer_t<V>>, std::remove_cv_t<std::remove_pointer_t<O>>>();
    else if constexpr (is_integer_like<V>() && is_integer_like<O>())
        return same_integer<V, O>();
    else if constexpr (std::is_floating_point_v<V> && std::is_floating_point_v<O>)
        return std::is_same_v<V, O>;
    else
        return false;
}

enum : int { same = 0, other_result = -1, other_arity = -2, not_a_function = -3 };

template <class V, class O> struct compare {
    static constexpr int first_difference() { return not_a_function; }
};

template <class VR, class... VA, class OR, class... OA> struct compare<VR(VA...), OR(OA...)> {
    // 0 when equal, the 1-based number of the first parameter that differs, or one of the names above.
    static constexpr int first_difference() {
        if constexpr (sizeof...(VA) != sizeof...(OA)) {
            return other_arity;
        } else {
            if (!same_type<VR, OR>())
                return other_result;
            int number = 0, found = 0;
            ((number++, found == 0 && !same_type<VA, OA>() ? void(found = number) : void()), ...);
            return found;
        }
    }
};

template <class F> struct plain { using type = F; };
template <class R, class... A> struct plain<R(A...) noexcept> { using type = R(A...); };
template <class F> using plain_t = typename plain<std::remove_pointer_t<std::remove_cv_t<F>>>::type;

template <class V, class O> constexpr int first_difference() {
    return compare<plain_t<V>, plain_t<O>>::first_difference();
}

} // namespace pbn_abi

#define PBN_ABI_SAME_VALUE(vendor, ours) \
    static_assert(static_cast<long long>(vendor) == static_cast<long long>(ours), "value of " #vendor " differs")

// Written as a comparison: compilers then print its two sides, hence which parameter differs.
#define PBN_ABI_SAME_FUNCTION(vendor, ours)                                            \
    static_assert((pbn_abi::first_difference<decltype(&vendor), ours>()) == pbn_abi::same, \
                  "prototype of " #vendor " differs: parameter number, -1 result, -2 arity, -3 not a function")

#endif
