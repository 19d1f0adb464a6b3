# The calls on addresses.

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
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    cdef TensorDescriptor pd = _descriptor(param_desc, "param_desc", h.table)
    running = _pointers(h, "running_mean", running_mean, "running_variance", running_variance)
    saved = _pointers(h, "saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    values = _arguments.forward_training(
        mode, alpha, beta, xd, yd, pd, exponential_average_factor, epsilon, running[0] != 0
    )
    act = _arguments.activation(activation, activation_low, activation_high, xd.dtype)
    ws = _workspace_pair(h, workspace, workspace_size)
    x, y = h._pointer(x, "x"), h._pointer(y, "y")
    scale, bias = h._pointer(scale, "scale"), h._pointer(bias, "bias")
    with h.lock:
        h._check()
        _forward_training(h, values, xd, x, yd, y, pd, scale, bias, running[0], running[1], saved[0], saved[1], act, ws)


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
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    cdef TensorDescriptor pd = _descriptor(param_desc, "param_desc", h.table)
    values = _arguments.forward_inference(mode, alpha, beta, xd, yd, pd, epsilon)
    act = _arguments.activation(activation, activation_low, activation_high, xd.dtype)
    ws = _workspace_pair(h, workspace, workspace_size)
    x, y = h._pointer(x, "x"), h._pointer(y, "y")
    scale, bias = h._pointer(scale, "scale"), h._pointer(bias, "bias")
    mean = h._pointer(running_mean, "running_mean")
    variance = h._pointer(running_variance, "running_variance")
    with h.lock:
        h._check()
        _forward_inference(h, values, xd, x, yd, y, pd, scale, bias, mean, variance, act, ws)


def batch_normalization_backward(
    handle,
    mode,
    alpha_data,
    beta_data,
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
    alpha_data, beta_data : float
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
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor dyd = _descriptor(dy_desc, "dy_desc", h.table)
    cdef TensorDescriptor dxd = _descriptor(dx_desc, "dx_desc", h.table)
    cdef TensorDescriptor pd = _descriptor(param_desc, "param_desc", h.table)
    saved = _pointers(h, "saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    values = _arguments.backward(mode, alpha_data, beta_data, alpha_param, beta_param, xd, dyd, dxd, pd, epsilon)
    act = _arguments.activation(activation, activation_low, activation_high, xd.dtype)
    bias = h._pointer(bias, "bias", True)
    _arguments.activation_bias(act[0], bias or None)
    ws = _workspace_pair(h, workspace, workspace_size)
    x, dy, dx = h._pointer(x, "x"), h._pointer(dy, "dy"), h._pointer(dx, "dx")
    scale = h._pointer(scale, "scale")
    dscale, dbias = h._pointer(dscale, "dscale"), h._pointer(dbias, "dbias")
    with h.lock:
        h._check()
        _backward(h, values, xd, x, dyd, dy, dxd, dx, pd, scale, bias, dscale, dbias, saved[0], saved[1], act, ws)


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
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    values = _arguments.axpby(a, b, xd, yd)
    ws = _workspace_pair(h, workspace, workspace_size)
    x, y = h._pointer(x, "x"), h._pointer(y, "y")
    with h.lock:
        h._check()
        _axpby(h, values, xd, x, yd, y, ws, False)


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
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    number = _arguments.fill(value, yd)
    y = h._pointer(y, "y")
    with h.lock:
        h._check()
        _fill(h, number, yd, y)


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
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    _arguments.relu(xd, yd)
    x, y = h._pointer(x, "x"), h._pointer(y, "y")
    with h.lock:
        h._check()
        _relu(h, xd, x, yd, y)


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
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor dyd = _descriptor(dy_desc, "dy_desc", h.table)
    cdef TensorDescriptor dxd = _descriptor(dx_desc, "dx_desc", h.table)
    _arguments.relu_backward(xd, dyd, dxd)
    x, dy, dx = h._pointer(x, "x"), h._pointer(dy, "dy"), h._pointer(dx, "dx")
    with h.lock:
        h._check()
        _relu_backward(h, xd, x, dyd, dy, dxd, dx)
