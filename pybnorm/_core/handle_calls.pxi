# A handle's calls on arrays: plans, kept by the handle (`_kept`).

cdef class _HandleCalls(_HandleArrays):
    """The calls on arrays."""

    def forward_training(
        self,
        x,
        scale,
        bias,
        y,
        *,
        mode=Mode.SPATIAL,
        alpha=1.0,
        beta=0.0,
        epsilon=1e-5,
        exponential_average_factor=0.1,
        unbiased=True,
        running_mean=None,
        running_variance=None,
        saved_mean=None,
        saved_inv_variance=None,
        activation=Activation.NONE,
        activation_low=None,
        activation_high=None,
        algorithm=None,
        workspace=None,
    ):
        """Batch norm with the statistics of the batch, on arrays.

        ``y = alpha * act(scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``

        Parameters
        ----------
        x : array, shape (N, C, spatial...), rank 2 to 8
            Logical order N, C, spatial; any layout, given by its strides.
        scale, bias : array
            `derived` shape: (1, C, 1...) or (C,) for the spatial modes, (1, C, spatial...) for per-activation;
            contiguous; float64 for float64 x, else float32, or x's own dtype where `Capability.OWN_PARAMETERS` is set:
            scale's dtype is that of all parameters and running statistics.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0; else it may be x itself where `Capability.IN_PLACE` is set.
        mode : Mode
        alpha, beta : float
            Blending of the result with the prior y.
        epsilon : float
            Added to the variance; finite, not negative.
        exponential_average_factor : float
            ``running = (1 - factor) * running + factor * batch``; from 0 to 1.
        running_mean, running_variance : array, derived shape, optional
            Updated in place; both or none.
        unbiased : bool
            Whether the running variance takes the unbiased variance of the batch, ``m / (m - 1)`` times the biased one,
            as cuDNN, MIOpen and PyTorch do. ONNX, TensorFlow and hipDNN's README take the biased one: False, which adds
            a small call before and one after.
        saved_mean, saved_inv_variance : array, derived shape, optional
            Written; both or none; float64 for float64 x, else float32. The second is
            ``1 / sqrt(biased variance + epsilon)``.
        activation : Activation
            What ``act`` is, in the vendor's own fused kernel. Without `algorithm` refused where
            `Capability.ACTIVATION` is not set; with one, NONE or RELU as in `plan_forward_training`.
        activation_low, activation_high : float, optional
            The bounds that the activation has: high of CLIPPED_RELU, low and high of CLAMP.
        algorithm : str, optional
            Default: the vendor's entry point for the mode, and nothing else. A name as `plan_forward_training` takes
            it. What a kind of call needs is made at its first call and kept by the handle, for the 256 newest kinds.
        workspace : array or (int, int), optional
            Device memory for backends that need some (`workspace_size`). On the CPU the handle keeps its own.

        Raises
        ------
        ArgumentError
            A bad argument; nothing was called and nothing written.
        UnsupportedError
            The backend has no right path for the combination.
        VendorError
            The vendor returned a status other than success.

        Notes
        -----
        Vendor symbols: see `batch_normalization_forward_training`.
        """
        cdef pbn_call call
        cdef pbn_arguments given
        _begin(&call, &given, PBN_OP_FORWARD_TRAINING)
        given.x.object, given.scale.object, given.bias.object = <void *>x, <void *>scale, <void *>bias
        given.y.object = <void *>y
        given.running_mean.object, given.running_variance.object = <void *>running_mean, <void *>running_variance
        given.saved_mean.object, given.saved_inv_variance.object = <void *>saved_mean, <void *>saved_inv_variance
        call.factor = _number(exponential_average_factor, "exponential_average_factor")
        _common(<Handle>self, &call, &given, mode, alpha, beta, epsilon, activation, activation_low, activation_high)
        unbiased = unbiased if type(unbiased) is bool else _arguments.boolean(unbiased, "unbiased")
        _make(<Handle>self, &call, &given, workspace, algorithm, unbiased)

    def forward_inference(
        self,
        x,
        scale,
        bias,
        running_mean,
        running_variance,
        y,
        *,
        mode=Mode.SPATIAL,
        alpha=1.0,
        beta=0.0,
        epsilon=1e-5,
        activation=Activation.NONE,
        activation_low=None,
        activation_high=None,
        algorithm=None,
        workspace=None,
    ):
        """Batch norm with given statistics, on arrays.

        ``y = alpha * act(scale * (x - running_mean) / sqrt(running_variance + epsilon) + bias) + beta * y``

        Parameters
        ----------
        x : array, shape (N, C, spatial...), rank 2 to 8
        scale, bias, running_mean, running_variance : array, derived shape
            As in `forward_training`. `running_variance` is a variance, not an inverse standard deviation; where it is
            below -`epsilon` the result is NaN.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0; else it may be x itself where `Capability.IN_PLACE` is set.
        mode, alpha, beta, epsilon, activation, activation_low, activation_high, algorithm, workspace
            As in `forward_training`.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see `batch_normalization_forward_inference`.
        """
        cdef Plan plan
        cdef pbn_call call
        cdef pbn_arguments given
        _begin(&call, &given, PBN_OP_FORWARD_INFERENCE)
        given.x.object, given.scale.object, given.bias.object = <void *>x, <void *>scale, <void *>bias
        given.running_mean.object, given.running_variance.object = <void *>running_mean, <void *>running_variance
        given.y.object = <void *>y
        _common(<Handle>self, &call, &given, mode, alpha, beta, epsilon, activation, activation_low, activation_high)
        held = []
        try:
            plan = _kept(<Handle>self, &call, &given, held, algorithm)
        except errors.ArgumentError as error:
            if error.argument != "y":
                raise
            order = "the order is x, scale, bias, running_mean, running_variance, y"
            raise type(error)("y", error.value, f"{error.allowed}; {order}") from None
        plan._call(<Handle>self, &given, workspace, None)

    def backward(
        self,
        x,
        dy,
        scale,
        dx,
        dscale,
        dbias,
        *,
        mode=Mode.SPATIAL,
        alpha=1.0,
        beta=0.0,
        alpha_param=1.0,
        beta_param=0.0,
        epsilon=1e-5,
        saved_mean=None,
        saved_inv_variance=None,
        bias=None,
        activation=Activation.NONE,
        activation_low=None,
        activation_high=None,
        y=None,
        algorithm=None,
        workspace=None,
    ):
        """Gradients of `forward_training`, on arrays.

        With ``xhat = (x - mean) * inv`` and sums over the reduced axes of m elements each:
        ``dbias' = sum(dy)``, ``dscale' = sum(dy * xhat)``,
        ``dx' = scale * inv * (dy - dbias' / m - xhat * dscale' / m)``;
        then ``dx = alpha * dx' + beta * dx`` and likewise ``dscale``, ``dbias`` by the parameter pair.
        With an activation the given dy is the gradient at its output, and dy in the formulas is that gradient
        where ``low < scale * xhat + bias <= high`` (RELU: above 0), else 0.

        Parameters
        ----------
        x, dy : array, shape (N, C, spatial...), rank 2 to 8, one dtype
        scale : array, derived shape
        dx : array, shape and dtype of x
            Written. Read only if `beta` is not 0; else it may be dy itself where `Capability.IN_PLACE` is set.
        dscale, dbias : array, derived shape
            Written. Read only if `beta_param` is not 0.
        mode : Mode
        alpha, beta, alpha_param, beta_param : float
        epsilon : float
            Used only without saved statistics.
        saved_mean, saved_inv_variance : array, derived shape, optional
            From `forward_training`, or any values of your own: they are taken as they are. Both or none; without
            them mean and inverse standard deviation are computed from x.
        bias : array, derived shape, optional
            Given with an activation, and only then.
        activation, activation_low, activation_high, algorithm, workspace
            As in `forward_training`.
        y : array, shape and dtype of x, optional
            Forward's result: needed with an activation of a named algorithm, and only then.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see `batch_normalization_backward`.
        """
        cdef pbn_call call
        cdef pbn_arguments given
        _begin(&call, &given, PBN_OP_BACKWARD)
        given.x.object, given.dy.object, given.scale.object = <void *>x, <void *>dy, <void *>scale
        given.dx.object, given.dscale.object, given.dbias.object = <void *>dx, <void *>dscale, <void *>dbias
        given.saved_mean.object, given.saved_inv_variance.object = <void *>saved_mean, <void *>saved_inv_variance
        given.y.object, given.bias.object = <void *>y, <void *>bias
        call.alpha_param, call.beta_param = _number(alpha_param, "alpha_param"), _number(beta_param, "beta_param")
        _common(<Handle>self, &call, &given, mode, alpha, beta, epsilon, activation, activation_low, activation_high)
        if bias is not None or y is not None or call.activation != PBN_ACTIVATION_NONE:
            _arguments.activation_bias(Activation(call.activation), bias)
            _arguments.activation_result(algorithm is not None and call.activation != PBN_ACTIVATION_NONE, y)
        _make(<Handle>self, &call, &given, workspace, algorithm)

    def axpby(self, a, x, b, y, *, workspace=None):
        """``y = a * x + b * y`` elementwise, on arrays of one shape and dtype; each with its own strides.

        The rest is as in the module function `axpby`.
        """
        cdef pbn_call call
        cdef pbn_arguments given
        _begin(&call, &given, PBN_OP_AXPBY)
        given.x.object, given.y.object = <void *>x, <void *>y
        call.alpha, call.beta = _number(a, "a"), _number(b, "b")
        _make(<Handle>self, &call, &given, workspace)

    def fill(self, value, y):
        """``y = value`` everywhere, on an array of any strides; what lies between its elements is not written.

        The rest is as in the module function `fill`.
        """
        cdef pbn_call call
        cdef pbn_arguments given
        _begin(&call, &given, PBN_OP_FILL)
        given.y.object = <void *>y
        call.alpha = value if type(value) is float else _arguments.fill(value, _like(<Handle>self, y, "y", None))
        _make(<Handle>self, &call, &given, None)

    def relu(self, x, y):
        """``y = max(x, 0)`` elementwise, on arrays of one shape and dtype; each with its own strides.

        The rest is as in the module function `relu`.
        """
        cdef pbn_call call
        cdef pbn_arguments given
        _begin(&call, &given, PBN_OP_RELU)
        given.x.object, given.y.object = <void *>x, <void *>y
        _make(<Handle>self, &call, &given, None)

    def relu_backward(self, x, dy, dx):
        """``dx = dy where x > 0, else 0`` elementwise, on arrays of one shape and dtype.

        The rest is as in the module function `relu_backward`.
        """
        cdef pbn_call call
        cdef pbn_arguments given
        _begin(&call, &given, PBN_OP_RELU_BACKWARD)
        given.x.object, given.dy.object, given.dx.object = <void *>x, <void *>dy, <void *>dx
        _make(<Handle>self, &call, &given, None)
