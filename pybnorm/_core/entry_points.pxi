# The calls on addresses: plans with algorithm None, kept by their handle.

cdef int _at(Handle handle, pbn_argument *argument, object address, object descriptor, str name) except -1:
    _descriptor(descriptor, name, handle.table)
    argument.object, argument.like = <void *>address, <void *>descriptor
    return 0


cdef object _workspace_at(Handle handle, object address, object size):
    if type(address) is int and type(size) is int:
        if address:
            return address, size
        if not size:
            return None
    return _workspace_pair(handle, address, size)


def batch_normalization_forward_training(
    handle,
    mode,
    alpha,
    beta,
    x_desc,
    x,
    y_desc,
    y,
    param_desc,
    scale,
    bias,
    exponential_average_factor,
    running_mean,
    running_variance,
    epsilon,
    saved_mean,
    saved_inv_variance,
    *,
    activation=Activation.NONE,
    activation_low=None,
    activation_high=None,
    workspace=0,
    workspace_size=0,
):
    """The vendor's forward training call on addresses, in the vendors' argument order.

    Parameters
    ----------
    handle : Handle
    mode : Mode
    alpha, beta : float
        Host-side; put into the scalar type this vendor reads.
    x_desc, y_desc, param_desc : TensorDescriptor
        Of the handle's backend; `param_desc` as `derive_bn_tensor_descriptor` gives it.
    x, y, scale, bias : int
        Addresses in the backend's memory.
    exponential_average_factor : float
        From 0 to 1.
    running_mean, running_variance : int or None
        Updated in place; both or none.
    epsilon : float
    saved_mean, saved_inv_variance : int or None
        Written; both or none.
    activation, activation_low, activation_high
        As in `Handle.forward_training`.
    workspace, workspace_size : int
        Address and bytes, at least `Handle.workspace_size`, aligned to 64.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError
        As in `Handle.forward_training`, which has the formula.

    Notes
    -----
    Vendor symbols: ``cudnnBatchNormalizationForwardTraining``; ``miopenBatchNormalizationForwardTraining_V2`` or,
    where it is missing, ``miopenBatchNormalizationForwardTraining``, with an activation
    ``miopenBatchNormForwardTrainingActivation``; ``dnnl_primitive_execute`` of a batch normalization forward primitive.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3]]])
    >>> y, (scale, bias, mean, variance) = np.empty_like(x), np.ones((4, 1), np.float32)
    >>> data = pybnorm.TensorDescriptor("onednn", "f32", x.shape)
    >>> derived = pybnorm.derive_bn_tensor_descriptor(data, "spatial")
    >>> workspace = pybnorm.devices.device_for(1).empty_bytes(2048)
    >>> scale_at, bias_at, mean_at, variance_at = (a.ctypes.data for a in (scale, bias, mean, variance))
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.batch_normalization_forward_training(
    ...         handle, "spatial", 1, 0, data, x.ctypes.data, data, y.ctypes.data, derived, scale_at, bias_at,
    ...         0.5, mean_at, variance_at, 0, None, None, workspace=workspace.pointer, workspace_size=2048,
    ...     )
    >>> y.round(3), mean, variance
    (array([[[-0.225,  1.   ,  2.225]]], dtype=float32), array([1.5], dtype=float32), array([1.], dtype=float32))
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor param
    cdef pbn_call call
    cdef pbn_arguments given
    _begin(&call, &given, PBN_OP_FORWARD_TRAINING)
    _at(h, &given.x, x, x_desc, "x_desc")
    _at(h, &given.y, y, y_desc, "y_desc")
    given.scale.object, given.bias.object = <void *>scale, <void *>bias
    given.running_mean.object, given.running_variance.object = <void *>running_mean, <void *>running_variance
    given.saved_mean.object, given.saved_inv_variance.object = <void *>saved_mean, <void *>saved_inv_variance
    call.factor = _number(exponential_average_factor, "exponential_average_factor")
    param = _descriptor(param_desc, "param_desc", h.table)
    _common(h, &call, &given, mode, alpha, beta, epsilon, activation, activation_low, activation_high)
    _make(h, &call, &given, _workspace_at(h, workspace, workspace_size), None, True, param)


def batch_normalization_forward_inference(
    handle,
    mode,
    alpha,
    beta,
    x_desc,
    x,
    y_desc,
    y,
    param_desc,
    scale,
    bias,
    running_mean,
    running_variance,
    epsilon,
    *,
    activation=Activation.NONE,
    activation_low=None,
    activation_high=None,
    workspace=0,
    workspace_size=0,
):
    """The vendor's forward inference call on addresses, in the vendors' argument order.

    Parameters
    ----------
    handle, mode, alpha, beta, x_desc, x, y_desc, y, param_desc, scale, bias, epsilon, activation, activation_low, \
activation_high, workspace, workspace_size
        As in `batch_normalization_forward_training`.
    running_mean, running_variance : int
        Addresses of the given statistics; required.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError
        As in `Handle.forward_inference`, which has the formula.

    Notes
    -----
    Vendor symbols: ``cudnnBatchNormalizationForwardInference``; ``miopenBatchNormalizationForwardInference_V2`` or,
    where it is missing, ``miopenBatchNormalizationForwardInference``, with an activation
    ``miopenBatchNormForwardInferenceActivation``; ``dnnl_primitive_execute`` of a batch normalization forward primitive
    with global statistics.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3]]])
    >>> y, (scale, bias, mean, variance) = np.empty_like(x), np.ones((4, 1), np.float32)
    >>> data = pybnorm.TensorDescriptor("onednn", "f32", x.shape)
    >>> derived = pybnorm.derive_bn_tensor_descriptor(data, "spatial")
    >>> at = [a.ctypes.data for a in (scale, bias, mean, variance)]
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.batch_normalization_forward_inference(
    ...         handle, "spatial", 1, 0, data, x.ctypes.data, data, y.ctypes.data, derived, *at, 0
    ...     )
    >>> y
    array([[[1., 2., 3.]]], dtype=float32)
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor param
    cdef pbn_call call
    cdef pbn_arguments given
    _begin(&call, &given, PBN_OP_FORWARD_INFERENCE)
    _at(h, &given.x, x, x_desc, "x_desc")
    _at(h, &given.y, y, y_desc, "y_desc")
    given.scale.object, given.bias.object = <void *>scale, <void *>bias
    given.running_mean.object, given.running_variance.object = <void *>running_mean, <void *>running_variance
    param = _descriptor(param_desc, "param_desc", h.table)
    _common(h, &call, &given, mode, alpha, beta, epsilon, activation, activation_low, activation_high)
    _make(h, &call, &given, _workspace_at(h, workspace, workspace_size), None, True, param)


def batch_normalization_backward(
    handle,
    mode,
    alpha,
    beta,
    alpha_param,
    beta_param,
    x_desc,
    x,
    dy_desc,
    dy,
    dx_desc,
    dx,
    param_desc,
    scale,
    dscale,
    dbias,
    epsilon,
    saved_mean,
    saved_inv_variance,
    *,
    bias=None,
    activation=Activation.NONE,
    activation_low=None,
    activation_high=None,
    workspace=0,
    workspace_size=0,
):
    """The vendor's backward call on addresses, in the vendors' argument order.

    Parameters
    ----------
    handle, mode, param_desc, scale, epsilon, activation, activation_low, activation_high, workspace, workspace_size
        As in `batch_normalization_forward_training`.
    alpha, beta : float
        Blend dx.
    alpha_param, beta_param : float
        Blend dscale and dbias.
    x_desc, dy_desc, dx_desc : TensorDescriptor
    x, dy, dx, dscale, dbias : int
        Addresses; all required.
    saved_mean, saved_inv_variance : int or None
        Both, taken as they are, or none: recomputed from x and epsilon.
    bias : int or None
        Given with an activation, and only then.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError
        As in `Handle.backward`, which has the formula.

    Notes
    -----
    Vendor symbols: ``cudnnBatchNormalizationBackward``; ``miopenBatchNormalizationBackward_V2`` or, where it is
    missing, ``miopenBatchNormalizationBackward``, with an activation ``miopenBatchNormBackwardActivation``;
    ``dnnl_primitive_execute`` of a batch normalization backward primitive.

    Examples
    --------
    >>> x, dy = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]])
    >>> dx, (scale, dscale, dbias) = np.empty_like(x), np.ones((3, 1), np.float32)
    >>> data = pybnorm.TensorDescriptor("onednn", "f32", x.shape)
    >>> derived = pybnorm.derive_bn_tensor_descriptor(data, "spatial")
    >>> workspace = pybnorm.devices.device_for(1).empty_bytes(2048)
    >>> at = [a.ctypes.data for a in (x, dy, dx, scale, dscale, dbias)]
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.batch_normalization_backward(
    ...         handle, "spatial", 1, 0, 1, 0, data, at[0], data, at[1], data, at[2], derived, *at[3:], 0, 0, 0,
    ...         workspace=workspace.pointer, workspace_size=2048,
    ...     )
    >>> dx.round(3), dscale.round(3), dbias
    (array([[[ 0.204, -0.408,  0.204]]], dtype=float32), array([1.225], dtype=float32), array([1.], dtype=float32))
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor param
    cdef pbn_call call
    cdef pbn_arguments given
    _begin(&call, &given, PBN_OP_BACKWARD)
    _at(h, &given.x, x, x_desc, "x_desc")
    _at(h, &given.dy, dy, dy_desc, "dy_desc")
    _at(h, &given.dx, dx, dx_desc, "dx_desc")
    if bias is not None:
        bias = h._pointer(bias, "bias", True) or None
    given.scale.object, given.bias.object = <void *>scale, <void *>bias
    given.dscale.object, given.dbias.object = <void *>dscale, <void *>dbias
    given.saved_mean.object, given.saved_inv_variance.object = <void *>saved_mean, <void *>saved_inv_variance
    call.alpha_param, call.beta_param = _number(alpha_param, "alpha_param"), _number(beta_param, "beta_param")
    param = _descriptor(param_desc, "param_desc", h.table)
    _common(h, &call, &given, mode, alpha, beta, epsilon, activation, activation_low, activation_high)
    if bias is not None or call.activation != PBN_ACTIVATION_NONE:
        _arguments.activation_bias(Activation(call.activation), bias)
    _make(h, &call, &given, _workspace_at(h, workspace, workspace_size), None, True, param)


def axpby(handle, a, x_desc, x, b, y_desc, y, *, workspace=0, workspace_size=0):
    """``y = a * x + b * y`` elementwise on addresses; with ``b = 0`` the prior y is not read.

    Parameters
    ----------
    handle : Handle
    a, b : float
    x_desc, y_desc : TensorDescriptor
        Same dims and dtype; each with its own strides.
    x, y : int
        Addresses.
    workspace, workspace_size : int

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: ``cudnnTransformTensor``; ``miopenOpTensor``; for oneDNN plain C in the adapter.

    Examples
    --------
    >>> x, y = np.float32([1, 2, 3]), np.float32([10, 10, 10])
    >>> desc = pybnorm.TensorDescriptor("onednn", "f32", (1, 3))
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.axpby(handle, 2, desc, x.ctypes.data, 0.5, desc, y.ctypes.data)
    >>> y
    array([ 7.,  9., 11.], dtype=float32)
    """
    cdef Handle h = _handle(handle)
    cdef pbn_call call
    cdef pbn_arguments given
    _begin(&call, &given, PBN_OP_AXPBY)
    _at(h, &given.x, x, x_desc, "x_desc")
    _at(h, &given.y, y, y_desc, "y_desc")
    call.alpha, call.beta = _number(a, "a"), _number(b, "b")
    _make(h, &call, &given, _workspace_at(h, workspace, workspace_size))


def fill(handle, value, y_desc, y):
    """``y = value`` everywhere, on an address; what lies between the elements is not written.

    Parameters
    ----------
    handle : Handle
    value : float
        Finite and in the range of y's dtype, to which it is rounded.
    y_desc : TensorDescriptor
    y : int
        Address.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: ``cudnnSetTensor``; ``miopenSetTensor``; for oneDNN plain C in the adapter.

    Examples
    --------
    >>> y = np.empty(3, np.float32)
    >>> desc = pybnorm.TensorDescriptor("onednn", "f32", (1, 3))
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.fill(handle, 0.5, desc, y.ctypes.data)
    >>> y
    array([0.5, 0.5, 0.5], dtype=float32)
    """
    cdef Handle h = _handle(handle)
    cdef pbn_call call
    cdef pbn_arguments given
    _begin(&call, &given, PBN_OP_FILL)
    _at(h, &given.y, y, y_desc, "y_desc")
    call.alpha = value if type(value) is float else _arguments.fill(value, y_desc)
    _make(h, &call, &given, None)


def relu(handle, x_desc, x, y_desc, y):
    """``y = max(x, 0)`` elementwise, on addresses.

    Parameters
    ----------
    handle : Handle
    x_desc, y_desc : TensorDescriptor
        Same dims and dtype; each with its own strides.
    x, y : int
        Addresses.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: ``cudnnActivationForward``; ``miopenActivationForward`` (float32 and float16, packed, x and y in
    one layout); for oneDNN plain C in the adapter. A NaN stays one; MIOpen makes a NaN of minus infinity too.

    Examples
    --------
    >>> x, y = np.float32([-1, 0, 2]), np.empty(3, np.float32)
    >>> desc = pybnorm.TensorDescriptor("onednn", "f32", (1, 3))
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.relu(handle, desc, x.ctypes.data, desc, y.ctypes.data)
    >>> y
    array([0., 0., 2.], dtype=float32)
    """
    cdef Handle h = _handle(handle)
    cdef pbn_call call
    cdef pbn_arguments given
    _begin(&call, &given, PBN_OP_RELU)
    _at(h, &given.x, x, x_desc, "x_desc")
    _at(h, &given.y, y, y_desc, "y_desc")
    _make(h, &call, &given, None)


def relu_backward(handle, x_desc, x, dy_desc, dy, dx_desc, dx):
    """``dx = dy where x > 0, else 0`` elementwise, on addresses.

    Parameters
    ----------
    handle : Handle
    x_desc, dy_desc, dx_desc : TensorDescriptor
        Same dims and dtype; each with its own strides.
    x : int
        Address of the input of `relu`, or of its output: only the sign is read.
    dy, dx : int
        Addresses.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: ``cudnnActivationBackward`` (x, dy and dx of the same strides); ``miopenActivationBackward``
    (float32 and float16, packed, all in one layout); for oneDNN plain C in the adapter. Where x is not above 0, a dy
    that is not finite gives NaN on MIOpen.

    Examples
    --------
    >>> x, dy, dx = np.float32([-1, 0, 2]), np.float32([5, 6, 7]), np.empty(3, np.float32)
    >>> desc = pybnorm.TensorDescriptor("onednn", "f32", (1, 3))
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.relu_backward(handle, desc, x.ctypes.data, desc, dy.ctypes.data, desc, dx.ctypes.data)
    >>> dx
    array([0., 0., 7.], dtype=float32)
    """
    cdef Handle h = _handle(handle)
    cdef pbn_call call
    cdef pbn_arguments given
    _begin(&call, &given, PBN_OP_RELU_BACKWARD)
    _at(h, &given.x, x, x_desc, "x_desc")
    _at(h, &given.dy, dy, dy_desc, "dy_desc")
    _at(h, &given.dx, dx, dx_desc, "dx_desc")
    _make(h, &call, &given, None)
