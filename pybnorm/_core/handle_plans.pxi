# A handle's plans and workspace queries; the class itself.

cdef class Handle(_HandleCalls):
    """Handle(backend, *, device=None, stream=None, known_defects=None)\n--\n\nA vendor library's handle: the device and
    stream that calls go to.

    Parameters
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"``, ``"onednn"`` or ``"native"``; its library is loaded if it is not yet.
    device : str, optional
        ``"cpu"``, ``"cuda"`` or ``"rocm"``, where a backend has several: ``Handle("native", device="cuda")`` is
        ``"native_cuda"``.
    stream : int or object with ``__cuda_stream__``, optional
        Stream for the calls; default: the vendor's default stream. For oneDNN a ``dnnl_stream_t``.
    known_defects : str, optional
        What becomes of a call that `pybnorm.known_defects` knows to be wrong, or to fail, with this version of the
        library: ``"warn"``, it is made, with a KnownDefectWarning once for each kind of call; ``"avoid"``, native
        computes it on the same memory and stream, as it does a batch norm that the library does not have, or an
        UnsupportedError says why that cannot be; ``"avoid_all"``, the
        same, also where a result is only less exact than it could be, as one-pass variances are where the mean is large
        against the deviation; ``"error"``, an UnsupportedError; ``"ignore"``, it is made. Default: the environment
        variable PYBNORM_KNOWN_DEFECTS, or ``"warn"``. Algorithm ``"auto"`` and all that is built on it first take an
        algorithm of the library without the defect, whatever is said here.

    Attributes
    ----------
    backend : str
    library : Library
    device : int or None
        Ordinal of the device that was current when the handle was made, where that can be known; of a cuDNN handle that
        somebody else made the device of its stream, if that is not the default one. Its calls go there, whichever
        device is current then, and leave that one current.
    pointer : int
        The vendor's handle (``cudnnHandle_t``, ``miopenHandle_t``, ``dnnl_stream_t``).

    Raises
    ------
    LibraryNotFoundError
        The vendor's library is not on this machine; the message lists every place tried.
    NotInitializedError
        The library is there but finds no device.

    Notes
    -----
    Vendor symbols: ``cudnnCreate``, ``cudnnSetStream``, ``cudnnGetStream``, ``cudnnDestroy``; ``miopenCreate``,
    ``miopenSetStream``, ``miopenGetStream``, ``miopenDestroy``; ``dnnl_engine_create``, ``dnnl_stream_create``.

    Calls through one handle are serialised by a lock. Calls on a device return before they ran: keep the arrays
    alive, and do not read results, until the stream has been synchronised.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3, 4]]])
    >>> y, scale, bias = np.empty_like(x), np.ones(1, np.float32), np.zeros(1, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     handle.forward_training(x, scale, bias, y, epsilon=0)
    >>> y.round(3)
    array([[[-1.342, -0.447,  0.447,  1.342]]], dtype=float32)

    The other calls, without ``with``:

    >>> handle = pybnorm.Handle("native")
    >>> handle.set_stream(0)
    >>> handle.follow_stream(x)  # NumPy has no streams
    False
    >>> dx, (mean, variance, dscale, dbias) = np.empty_like(x), np.float32([[0], [1], [0], [0]])
    >>> handle.forward_inference(x, scale, bias, mean, variance, y, epsilon=0)
    >>> handle.backward(x, y, scale, dx, dscale, dbias)
    >>> handle.fill(-5, dx)  # dx = -5
    >>> handle.axpby(2, x, 1, dx)  # dx = 2 * x + dx
    >>> handle.relu(dx, y)  # y = max(dx, 0)
    >>> handle.relu_backward(dx, x, y)  # y = x where dx > 0
    >>> y
    array([[[0., 0., 3., 4.]]], dtype=float32)
    >>> handle.buffer(x, "x").dims, handle.memory(None), handle.workspace_size("train", handle.descriptor(x))
    ((1, 1, 4), (0, 0), 0)
    >>> handle.close()
    """

    def workspace_size(
        self,
        operation,
        x_desc,
        *,
        mode=Mode.SPATIAL,
        y_desc=None,
        dy_desc=None,
        dx_desc=None,
        alpha=1.0,
        beta=0.0,
        alpha_param=1.0,
        beta_param=0.0,
        epsilon=1e-5,
        running=True,
        saved=True,
        unbiased=True,
        algorithm=None,
        activation=Activation.NONE,
        activation_low=None,
        activation_high=None,
    ):
        """Bytes of workspace that a call needs.

        Parameters
        ----------
        operation : Operation
            One of the three batch-norm calls or `Operation.AXPBY`.
        x_desc : TensorDescriptor
        mode : Mode
        y_desc, dy_desc, dx_desc : TensorDescriptor, optional
            Default: `x_desc`.
        alpha, beta : float
            The data pair of the call.
        alpha_param, beta_param : float
            The parameter pair; backward only.
        epsilon : float
        running, saved : bool
            Whether the call passes running and saved statistics.
        unbiased : bool
            That of the call; forward training's only.
        algorithm : str, optional
            That of the call; not with `Operation.AXPBY`.
        activation, activation_low, activation_high
            Those of the call; a batch-norm call's only.

        Returns
        -------
        int
            0 where the vendor needs none.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in the call itself.
        """
        cdef pbn_call call
        cdef pbn_arguments given
        cdef Plan plan
        self._check()
        op = _arguments.operation(operation)
        if op not in (
            Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD, Operation.AXPBY
        ):
            raise errors.ArgumentError("operation", op, "a batch-norm call or Operation.AXPBY")
        _begin(&call, &given, op)
        _at(self, &given.x, None, x_desc, "x_desc")
        _at(self, &given.y, None, x_desc if y_desc is None else y_desc, "y_desc")
        _at(self, &given.dy, None, x_desc if dy_desc is None else dy_desc, "dy_desc")
        _at(self, &given.dx, None, x_desc if dx_desc is None else dx_desc, "dx_desc")
        _common(self, &call, &given, mode, alpha, beta, epsilon, activation, activation_low, activation_high)
        if op == Operation.AXPBY:
            if call.activation != PBN_ACTIVATION_NONE:
                raise errors.ArgumentError("activation", activation, "'none' with operation 'axpby'")
            if algorithm is not None:
                raise errors.ArgumentError("algorithm", algorithm, "None with operation 'axpby'")
        call.alpha_param, call.beta_param = _number(alpha_param, "alpha_param"), _number(beta_param, "beta_param")
        call.factor = 0.0 if _arguments.boolean(unbiased, "unbiased") else 0.5
        has, looks = _has(running, saved), _looks(op, &given)
        key = (
            "size", _scalar_bytes(&call), has, _named(algorithm),
            *[(<TensorDescriptor>look).key for look in looks.values()],
        )
        plan = self._cached(key)
        if plan is None:
            plan = _plan(self, &call, looks, has, algorithm, None, False, unbiased)
            self._keep(key, plan, _ADDRESSES)
        return plan.workspace_size

    def plan_forward_training(
        self,
        x,
        y=None,
        *,
        mode=Mode.SPATIAL,
        algorithm="auto",
        alpha=1.0,
        beta=0.0,
        epsilon=1e-5,
        exponential_average_factor=0.1,
        unbiased=True,
        running=True,
        saved=True,
        activation=Activation.NONE,
        z=None,
        deterministic=False,
        parameters=None,
    ):
        """Make a forward training call ready: everything but the pointers is validated and fixed now.

        ``y = act(bn(x) + z)`` where an activation, and with it a residual z, is fused; ``y = alpha * bn(x) + beta * y``
        where not.

        Parameters
        ----------
        x, y : TensorDescriptor or array
            What the tensors of the calls will look like; y like x by default. Of an array the alignment counts too:
            later addresses must be no less aligned; for descriptors it is 16 bytes. Parameters aligned to less than
            16 bytes: on cuDNN ``"ex"`` and ``"graph"`` refuse them, and what ``"auto"`` chose of these goes through the
            plain entry point for that call.
        mode : Mode
        algorithm : str or None
            ``"auto"``: of the vendor's algorithms one without known defects that has kernels for the layout; where each
            has one, `known_defects` of the handle decides;
            ``"fast"``: also those whose range is limited (cuDNN's persistent sums in fixed point); a name of
            `algorithms`: that one and nothing else.
            ``"graph:2"`` is the third plan in the order of cuDNN's heuristic. None: the vendor's entry point for the
            mode, as `forward_training` calls it.
        alpha, beta, epsilon, exponential_average_factor, unbiased
            As in `forward_training`.
        running, saved : bool
            Whether the calls pass running and saved statistics.
        activation : Activation
            NONE, or RELU by the vendor's fused kernel. cuDNN: algorithms ``"ex"`` and ``"graph"`` (``"auto"``: the
            first), float32, float16 and bfloat16, packed channels-last tensors, alpha 1 and beta 0, saved statistics,
            and addresses aligned to 16 bytes; ``"ex"`` takes channels in multiples of 4, ``"graph"`` with `z` in
            multiples of 8. A NaN in front of the activation comes out as NaN or as 0. MIOpen: algorithm None, where
            `Capability.ACTIVATION` is set. oneDNN has none.
        z : bool, TensorDescriptor or array, optional
            What the residual looks like, dims and dtype of x; True: like x. Only with an activation.
        deterministic : bool
            Only ways whose bits are those of every equal call: ``"auto"`` and ``"fast"`` choose among these, another
            algorithm is an UnsupportedError that names them. See `Plan.deterministic`.
        parameters : DataType, optional
            Of scale, bias, running statistics, dscale and dbias. Default: float64 for float64 x, else float32. x's own
            of 16 bits where `Capability.OWN_PARAMETERS` is set.

        Returns
        -------
        ForwardTrainingPlan
            Its calls take `z` if planned, and `reserve` where `Plan.reserve_size` is not 0: device memory, aligned to
            64 bytes, that they write and that the calls of `plan_backward` with the same algorithm are given unchanged.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`; UnsupportedError where the algorithm named cannot do it, with the reason.

        Notes
        -----
        Vendor symbols with an activation: ``cudnnBatchNormalizationForwardTrainingEx`` with
        ``CUDNN_BATCHNORM_OPS_BN_ACTIVATION`` or ``_ADD_ACTIVATION``, and its queries of workspace and reserve space.
        Algorithm ``"graph"``: ``cudnnBackendExecute``; the normalization is followed by pointwise operations.

        Examples
        --------
        >>> x, y = np.float32([[[1, 2, 3, 4]]]), np.empty((1, 1, 4), np.float32)
        >>> ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
        >>> with pybnorm.Handle("native") as handle:
        ...     plan = handle.plan_forward_training(x, running=False, saved=False, epsilon=0)
        ...     plan(x, ones, zeros, y)
        >>> y.round(3)
        array([[[-1.342, -0.447,  0.447,  1.342]]], dtype=float32)
        """
        cdef pbn_call call
        _begin(&call, NULL, PBN_OP_FORWARD_TRAINING)
        call.factor = _number(exponential_average_factor, "exponential_average_factor")
        return self._planned(
            &call, {"x": x, "y": y, "z": z}, mode, alpha, beta, epsilon, activation, _has(running, saved, z), algorithm,
            deterministic, parameters, _arguments.boolean(unbiased, "unbiased"),
        )

    cdef Plan _planned(
        self, pbn_call *call, dict tensors, object mode, object alpha, object beta, object epsilon, object activation,
        int has, object algorithm, object deterministic, object parameters, bint unbiased=True,
    ):
        self._check()
        call.deterministic = _arguments.boolean(deterministic, "deterministic")
        _common(self, call, NULL, mode, alpha, beta, epsilon, _arguments.plan_activation(activation), None, None)
        param = None if parameters is None else _arguments.data_type(parameters, "parameters")
        return _plan(self, call, tensors, has, algorithm, param, True, unbiased)

    def plan_forward_inference(
        self, x, y=None, *, mode=Mode.SPATIAL, algorithm="auto", alpha=1.0, beta=0.0, epsilon=1e-5,
        activation=Activation.NONE, z=None, deterministic=False, parameters=None,
    ):
        """Make a forward inference call ready; parameters as in `plan_forward_training`.

        cuDNN fuses RELU and a residual into its pointwise graph: packed channels-last float32, float16 and bfloat16
        with any number of channels, alpha 1 and beta 0. A NaN stays one.

        Returns
        -------
        ForwardInferencePlan
            Its calls take `z` if planned.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `plan_forward_training`.

        Examples
        --------
        >>> x, y = np.float32([[[1, 2, 3, 4]]]), np.empty((1, 1, 4), np.float32)
        >>> ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
        >>> with pybnorm.Handle("native") as handle:
        ...     handle.plan_forward_inference(x, epsilon=0)(x, ones, zeros, ones, 4 * ones, y)
        >>> y
        array([[[0. , 0.5, 1. , 1.5]]], dtype=float32)
        """
        cdef pbn_call call
        _begin(&call, NULL, PBN_OP_FORWARD_INFERENCE)
        return self._planned(
            &call, {"x": x, "y": y, "z": z}, mode, alpha, beta, epsilon, activation, _has(False, False, z), algorithm,
            deterministic, parameters,
        )

    def plan_backward(
        self,
        x,
        dy=None,
        dx=None,
        *,
        mode=Mode.SPATIAL,
        algorithm="auto",
        alpha=1.0,
        beta=0.0,
        alpha_param=1.0,
        beta_param=0.0,
        epsilon=1e-5,
        saved=True,
        running=False,
        activation=Activation.NONE,
        z=None,
        deterministic=False,
        parameters=None,
    ):
        """Make a backward call ready; parameters as in `plan_forward_training`, dy and dx like x by default.

        With an activation, dy is the gradient at its output. `z` says that forward added a residual, and what its
        gradient dz looks like: ``dz = dy where y > 0, else 0``, of which dx, dscale and dbias are made.

        With ``saved=False`` the statistics are those of x and epsilon, which cuDNN has only slow kernels for; its
        ``"graph"`` does not take such a call.

        With ``running=True`` and ``saved=False`` the calls are given a running mean and variance, which are constants:
        ``dx = dy * scale / sqrt(variance + epsilon)``, the gradient of `forward_inference`. `Capability.CONSTANTS` says
        where that is: on native, without an activation.

        Returns
        -------
        BackwardPlan
            With an activation its calls take `bias` and, but for algorithm None, `y`, forward's result and like x; with
            z also `dz`, which is written, and `reserve` as forward left it where `Plan.reserve_size` is not 0.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `plan_forward_training`.

        Notes
        -----
        Vendor symbols with an activation: ``cudnnBatchNormalizationBackwardEx`` and its queries.

        Examples
        --------
        >>> x, dx = np.float32([[[1, 2, 3, 4]]]), np.empty((1, 1, 4), np.float32)
        >>> scale, dscale, dbias = np.ones((3, 1), np.float32)
        >>> with pybnorm.Handle("native") as handle:
        ...     handle.plan_backward(x, saved=False)(x, x, scale, dx, dscale, dbias)
        >>> dbias
        array([10.], dtype=float32)
        """
        cdef pbn_call call
        _begin(&call, NULL, PBN_OP_BACKWARD)
        call.alpha_param, call.beta_param = _number(alpha_param, "alpha_param"), _number(beta_param, "beta_param")
        return self._planned(
            &call, {"x": x, "dy": dy, "dx": dx, "z": z}, mode, alpha, beta, epsilon, activation,
            _has(running, saved, z, PBN_OP_BACKWARD), algorithm, deterministic, parameters,
        )
