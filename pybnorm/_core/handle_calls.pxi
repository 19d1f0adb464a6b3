# A handle's calls on arrays: plans, kept by the handle.
#
# The key of such a plan is all that decides it: the operation, the algorithm, the key of each data tensor (`describe`:
# device, dtype, shape, strides, alignment), mode and scalars, which statistics are there, the activation. Parameters
# are not part of it: their shape and dtype follow from x and the mode, and every call checks them. The values of arrays
# and their addresses are not, either: a plan is run on any.

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
            contiguous; float64 for float64 x, else float32.
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
            Written; both or none. The second is ``1 / sqrt(biased variance + epsilon)``.
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
        cdef Plan plan
        cdef pbn_arguments arguments
        self._check()
        memset(&arguments, 0, sizeof(arguments))
        has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
        has_saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
        x_kind, x = self._kind(x, "x", False, &arguments.x.address)
        y_kind, y = self._kind(y, "y", True, &arguments.y.address)
        mode, algorithm = _mode(mode), _named(algorithm)
        alpha, beta = self._scalar(alpha, "alpha", x), self._scalar(beta, "beta", x)
        epsilon = epsilon if type(epsilon) is float else _arguments.epsilon(epsilon)
        factor = _arguments.factor(exponential_average_factor)
        act = self._activation(activation, activation_low, activation_high, x)
        unbiased = unbiased if type(unbiased) is bool else _arguments.boolean(unbiased, "unbiased")
        key = (
            PBN_OP_FORWARD_TRAINING, algorithm, x_kind, y_kind, mode, _keyed(alpha), _keyed(beta), _keyed(epsilon),
            _keyed(factor), has_running, has_saved, act, unbiased,
        )
        plan = self._cached(key)
        if plan is None:
            values = {
                "mode": mode, "alpha": alpha, "beta": beta, "epsilon": epsilon, "exponential_average_factor": factor
            }
            plan = self._keep(
                key,
                _plan(
                    <Handle>self, PBN_OP_FORWARD_TRAINING, {"x": x, "y": y}, values, _has(has_running, has_saved), act,
                    algorithm, None, True, unbiased,
                ),
                _ARRAYS,
            )
        arguments.x.object, arguments.scale.object, arguments.bias.object = <void *>x, <void *>scale, <void *>bias
        arguments.y.object = <void *>y
        arguments.running_mean.object = <void *>running_mean
        arguments.running_variance.object = <void *>running_variance
        arguments.saved_mean.object = <void *>saved_mean
        arguments.saved_inv_variance.object = <void *>saved_inv_variance
        plan._call(<Handle>self, &arguments, workspace, None)

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
        cdef pbn_arguments arguments
        self._check()
        memset(&arguments, 0, sizeof(arguments))
        x_kind, x = self._kind(x, "x", False, &arguments.x.address)
        try:
            y_kind, y = self._kind(y, "y", True, &arguments.y.address)
            mode, algorithm = _mode(mode), _named(algorithm)
            alpha, beta = self._scalar(alpha, "alpha", x), self._scalar(beta, "beta", x)
            epsilon = epsilon if type(epsilon) is float else _arguments.epsilon(epsilon)
            act = self._activation(activation, activation_low, activation_high, x)
            key = (
                PBN_OP_FORWARD_INFERENCE, algorithm, x_kind, y_kind, mode, _keyed(alpha), _keyed(beta), _keyed(epsilon),
                act,
            )
            plan = self._cached(key)
            if plan is None:
                values = {"mode": mode, "alpha": alpha, "beta": beta, "epsilon": epsilon}
                plan = self._keep(
                    key,
                    _plan(<Handle>self, PBN_OP_FORWARD_INFERENCE, {"x": x, "y": y}, values, 0, act, algorithm),
                    _ARRAYS,
                )
        except errors.ArgumentError as error:
            if error.argument != "y":
                raise
            order = "the order is x, scale, bias, running_mean, running_variance, y"
            raise type(error)("y", error.value, f"{error.allowed}; {order}") from None
        arguments.x.object, arguments.scale.object, arguments.bias.object = <void *>x, <void *>scale, <void *>bias
        arguments.running_mean.object = <void *>running_mean
        arguments.running_variance.object = <void *>running_variance
        arguments.y.object = <void *>y
        plan._call(<Handle>self, &arguments, workspace, None)

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
        cdef Plan plan
        cdef pbn_arguments arguments
        self._check()
        memset(&arguments, 0, sizeof(arguments))
        has_saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
        x_kind, x = self._kind(x, "x", False, &arguments.x.address)
        dy_kind, dy = self._kind(dy, "dy", False, &arguments.dy.address)
        dx_kind, dx = self._kind(dx, "dx", True, &arguments.dx.address)
        mode, algorithm = _mode(mode), _named(algorithm)
        alpha, beta = self._scalar(alpha, "alpha", x), self._scalar(beta, "beta", x)
        alpha_param = self._scalar(alpha_param, "alpha_param", x)
        beta_param = self._scalar(beta_param, "beta_param", x)
        epsilon = epsilon if type(epsilon) is float else _arguments.epsilon(epsilon)
        act = self._activation(activation, activation_low, activation_high, x)
        _arguments.activation_bias(act[0], bias)
        key = (
            PBN_OP_BACKWARD, algorithm, x_kind, dy_kind, dx_kind, mode, _keyed(alpha), _keyed(beta),
            _keyed(alpha_param), _keyed(beta_param), _keyed(epsilon), has_saved, act,
        )
        plan = self._cached(key)
        if plan is None:
            values = {
                "mode": mode, "alpha": alpha, "beta": beta, "alpha_param": alpha_param,
                "beta_param": beta_param, "epsilon": epsilon,
            }
            plan = self._keep(
                key,
                _plan(
                    <Handle>self, PBN_OP_BACKWARD, {"x": x, "dy": dy, "dx": dx}, values, _has(False, has_saved), act,
                    algorithm,
                ),
                _ARRAYS,
            )
        _arguments.activation_result(algorithm is not None and act[0] != Activation.NONE, y)
        arguments.x.object, arguments.dy.object, arguments.scale.object = <void *>x, <void *>dy, <void *>scale
        arguments.dx.object, arguments.dscale.object, arguments.dbias.object = <void *>dx, <void *>dscale, <void *>dbias
        arguments.saved_mean.object = <void *>saved_mean
        arguments.saved_inv_variance.object = <void *>saved_inv_variance
        arguments.y.object = <void *>y
        arguments.bias.object = <void *>bias
        plan._call(<Handle>self, &arguments, workspace, None)

    def axpby(self, a, x, b, y, *, workspace=None):
        """``y = a * x + b * y`` elementwise, on arrays of one shape and dtype; each with its own strides.

        With ``b = 0`` the prior y is not read. Vendor symbols: see the module function `axpby`.
        """
        cdef Plan plan
        cdef pbn_arguments arguments
        self._check()
        memset(&arguments, 0, sizeof(arguments))
        x_kind, x = self._kind(x, "x", False, &arguments.x.address)
        y_kind, y = self._kind(y, "y", True, &arguments.y.address)
        a, b = self._scalar(a, "a", x), self._scalar(b, "b", x)
        key = PBN_OP_AXPBY, x_kind, y_kind, _keyed(a), _keyed(b)
        plan = self._cached(key)
        if plan is None:
            plan = self._elementwise(key, PBN_OP_AXPBY, {"x": x, "y": y}, {"a": a, "b": b})
        arguments.x.object, arguments.y.object = <void *>x, <void *>y
        plan._call(<Handle>self, &arguments, workspace, None)

    cdef Plan _elementwise(self, tuple key, int operation, dict arrays, dict values):
        plan = _plan(<Handle>self, operation, arrays, values, 0, _NO_ACTIVATION, None)
        return self._keep(key, plan, _ARRAYS)

    def fill(self, value, y):
        """``y = value`` everywhere, on an array of any strides; what lies between its elements is not written.

        Parameters
        ----------
        value : float
            Finite and in the range of y's dtype, to which it is rounded.
        y : array, rank 2 to 8
            Written.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see the module function `fill`.
        """
        cdef Plan plan
        cdef pbn_arguments arguments
        self._check()
        memset(&arguments, 0, sizeof(arguments))
        y_kind, y = self._kind(y, "y", True, &arguments.y.address)
        if type(value) is not float:
            value = _arguments.fill(value, self._data(y, "y", True))
        key = PBN_OP_FILL, y_kind, _keyed(value)
        plan = self._cached(key)
        if plan is None:
            plan = self._elementwise(key, PBN_OP_FILL, {"y": y}, {"value": value})
        arguments.y.object = <void *>y
        plan._call(<Handle>self, &arguments, None, None)

    def relu(self, x, y):
        """``y = max(x, 0)`` elementwise, on arrays of one shape and dtype; each with its own strides.

        Parameters
        ----------
        x : array, rank 2 to 8
        y : array, shape and dtype of x
            Written.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see the module function `relu`.
        """
        cdef Plan plan
        cdef pbn_arguments arguments
        self._check()
        memset(&arguments, 0, sizeof(arguments))
        x_kind, x = self._kind(x, "x", False, &arguments.x.address)
        y_kind, y = self._kind(y, "y", True, &arguments.y.address)
        key = PBN_OP_RELU, x_kind, y_kind
        plan = self._cached(key)
        if plan is None:
            plan = self._elementwise(key, PBN_OP_RELU, {"x": x, "y": y}, {})
        arguments.x.object, arguments.y.object = <void *>x, <void *>y
        plan._call(<Handle>self, &arguments, None, None)

    def relu_backward(self, x, dy, dx):
        """``dx = dy where x > 0, else 0`` elementwise, on arrays of one shape and dtype.

        Parameters
        ----------
        x : array, rank 2 to 8
            The input of `relu`, or its output: only the sign is read.
        dy, dx : array, shape and dtype of x
            dx is written.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see the module function `relu_backward`.
        """
        cdef Plan plan
        cdef pbn_arguments arguments
        self._check()
        memset(&arguments, 0, sizeof(arguments))
        x_kind, x = self._kind(x, "x", False, &arguments.x.address)
        dy_kind, dy = self._kind(dy, "dy", False, &arguments.dy.address)
        dx_kind, dx = self._kind(dx, "dx", True, &arguments.dx.address)
        key = PBN_OP_RELU_BACKWARD, x_kind, dy_kind, dx_kind
        plan = self._cached(key)
        if plan is None:
            plan = self._elementwise(key, PBN_OP_RELU_BACKWARD, {"x": x, "dy": dy, "dx": dx}, {})
        arguments.x.object, arguments.dy.object, arguments.dx.object = <void *>x, <void *>dy, <void *>dx
        plan._call(<Handle>self, &arguments, None, None)
