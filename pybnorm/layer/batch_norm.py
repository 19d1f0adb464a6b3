"""The layer: its constructors and its calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from pybnorm import _arguments
from pybnorm._core import Handle, TensorDescriptor, derive_bn_tensor_descriptor
from pybnorm.devices import Device
from pybnorm.enums import Mode
from pybnorm.errors import ArgumentError
from pybnorm.layer.info import STATISTICS, Info
from pybnorm.layer.staged import StagedLayer


class BatchNorm(StagedLayer):
    """A batch-norm layer with running and saved statistics in the device's memory.

    `per_activation`, `spatial`, `spatial_persistent` and `restore` make layers. A layer owns its four statistics from
    `stage` or `restore` to `close`. It borrows the handle, which must stay open as long as the layer is used. Scale
    and bias belong to the caller. Calls neither allocate nor synchronise; `info`, `stage` and `restore` do both. Use
    a layer from one thread at a time. What is done with calls that have a known defect is the handle's policy;
    `workspace_size` says what they need.

    Examples
    --------
    >>> x, dy = np.float32([[[[1, 2, 3]]]]), np.float32([[[[0, 0, 1]]]])
    >>> y, dx, (dscale, dbias) = np.empty_like(x), np.empty_like(x), np.empty((2, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle, pybnorm.layer.BatchNorm.spatial(handle, epsilon=0) as layer:
    ...     layer.stage(x)
    ...     properties = layer.bias_scale_properties()
    ...     scale = np.ones(properties.dims, np.float32)
    ...     bias = np.zeros(properties.dims, np.float32)
    ...     layer.forward_training(x, scale, bias, y)
    ...     layer.backward(x, dy, scale, dx, dscale, dbias)
    ...     layer.backward_prop(x, dy, scale, dx, dscale, dbias)  # the same, by gocudnn's name
    ...     text = layer.info().to_json()
    >>> layer.close()  # as the end of ``with``
    >>> dx.round(3), dbias
    (array([[[[ 0.204, -0.408,  0.204]]]], dtype=float32), array([1.], dtype=float32))
    """

    @classmethod
    def per_activation(cls, handle: Handle, **options: Any) -> BatchNorm:
        """A layer with statistics of shape (1, C, spatial...), each over N (gocudnn's ``PreStagePerActivation``).

        Parameters
        ----------
        handle : Handle
            Of any backend; borrowed.
        epsilon, exponential_average_factor : float
            For calls that give none. Default 1e-5 and 0.1.
        initial_running_variance : float
            Initial value of the running variance. Default 1; gocudnn's is 0.
        device : Device, optional
            The device that holds the statistics. Default: the CPU. Required on a GPU. There the handle must use its
            stream (``handle.set_stream(device.stream)``), so that copies come after calls.

        Returns
        -------
        BatchNorm

        Raises
        ------
        ArgumentError, ArgumentTypeError

        Examples
        --------
        >>> with pybnorm.Handle("native") as handle, pybnorm.layer.BatchNorm.per_activation(handle) as layer:
        ...     layer.stage(np.ones((2, 3, 4, 5), np.float32))
        ...     layer.bias_scale_properties().dims
        (1, 3, 4, 5)
        """
        return cls(handle, Mode.PER_ACTIVATION, **options)

    @classmethod
    def spatial(cls, handle: Handle, **options: Any) -> BatchNorm:
        """A layer with statistics of shape (1, C, 1...), each over N and space (gocudnn's ``PreStageSpatial``).

        Parameters
        ----------
        handle, epsilon, exponential_average_factor, initial_running_variance, device
            As in `per_activation`.

        Returns
        -------
        BatchNorm

        Examples
        --------
        >>> with pybnorm.Handle("native") as handle, pybnorm.layer.BatchNorm.spatial(handle) as layer:
        ...     layer.stage(np.ones((2, 3, 4, 5), np.float32))
        ...     layer.bias_scale_properties().dims
        (1, 3, 1, 1)
        """
        return cls(handle, Mode.SPATIAL, **options)

    @classmethod
    def spatial_persistent(cls, handle: Handle, **options: Any) -> BatchNorm:
        """A `spatial` layer by cuDNN's persistent kernels (gocudnn's ``PreStageSpatialPersistant``).

        Often faster, with a narrower range of values: large finite x may overflow to NaN or infinity. Other backends
        refuse it when staged.

        Parameters
        ----------
        handle, epsilon, exponential_average_factor, initial_running_variance, device
            As in `per_activation`.

        Returns
        -------
        BatchNorm

        Examples
        --------
        >>> with pybnorm.Handle("native") as handle:
        ...     pybnorm.layer.BatchNorm.spatial_persistent(handle).mode.name
        'SPATIAL_PERSISTENT'
        """
        return cls(handle, Mode.SPATIAL_PERSISTENT, **options)

    @classmethod
    def restore(cls, handle: Handle, info: Info, *, mode: object = None, device: Device | None = None) -> BatchNorm:
        """A staged layer with the state of another layer, also one of another backend or machine.

        Parameters
        ----------
        handle : Handle
            Of any backend; borrowed.
        info : Info
        mode : Mode, optional
            Default: that of `info`. SPATIAL and cuDNN's SPATIAL_PERSISTENT may replace each other: they compute the
            same.
        device : Device, optional
            As in `per_activation`.

        Returns
        -------
        BatchNorm

        Raises
        ------
        ArgumentError, ArgumentTypeError
        UnsupportedError
            The backend has no such mode.

        Notes
        -----
        Vendor symbols: see `pybnorm.derive_bn_tensor_descriptor`. Waits for the copies of the statistics.

        Examples
        --------
        >>> from pybnorm.layer import BatchNorm, Info
        >>> with pybnorm.Handle("native") as handle, BatchNorm.spatial(handle, epsilon=1e-3) as layer:
        ...     layer.stage(np.ones((2, 3, 4, 5), np.float32))
        ...     text = layer.info().to_json()
        >>> with pybnorm.Handle("onednn") as handle, BatchNorm.restore(handle, Info.from_json(text)) as layer:
        ...     layer.info().epsilon
        0.001
        """
        _arguments.instance(info, Info, "info", "an Info")
        chosen = info.mode if mode is None else _arguments.mode(mode)
        if (chosen == Mode.PER_ACTIVATION) != (info.mode == Mode.PER_ACTIVATION):
            raise ArgumentError("mode", chosen, f"a mode of the same mathematics as that of info, {info.mode.name}")
        layer = cls(
            handle,
            chosen,
            epsilon=info.epsilon,
            exponential_average_factor=info.exponential_average_factor,
            device=device,
        )
        # Deriving from the derived shape gives it back, and applies the backend's rules for mode and dtype.
        derived = derive_bn_tensor_descriptor(TensorDescriptor(handle.backend, info.data_type, info.dims), chosen)
        layer._allocate(derived, {name: getattr(info, name) for name in STATISTICS})
        # An inverse standard deviation is 0 only for an infinite variance: all zeros mean that nothing was saved.
        layer._has_saved = bool(np.any(info.saved_inv_variance != 0))
        return layer

    # ------------------------------------------------------------ calls

    def forward_training(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        y: Any,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        exponential_average_factor: float | None = None,
        unbiased: bool = True,
        epsilon: float | None = None,
        workspace: Any = None,
    ) -> None:
        """Normalize by the statistics of the batch; update the running statistics and save the batch's for `backward`.

        ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``,
        ``running = (1 - factor) * running + factor * batch``.

        Parameters
        ----------
        x : array, shape (N, C, spatial...)
            At least two elements per statistic.
        scale, bias : array
            As `bias_scale_properties` says.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        alpha, beta : float
        exponential_average_factor, epsilon : float, optional
            Default: the layer's. A value given becomes the layer's, and part of `info`.
            `pybnorm.miopen.cumulative_average_factor` makes the running statistics a plain average.
        unbiased : bool
            Whether the running variance takes the unbiased variance of the batch.
        workspace : array or (int, int), optional
            As in `Handle.forward_training`.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError

        Notes
        -----
        Source of the formula: Ioffe & Szegedy 2015; ``cudnnBatchNormalizationForwardTraining``.
        Vendor symbols: see `pybnorm.batch_normalization_forward_training`.
        Workspace: `workspace_size` of `Operation.FORWARD_TRAINING`.
        """
        data = self._data(x)
        factor = self._factor
        if exponential_average_factor is not None:
            factor = _arguments.factor(exponential_average_factor)
        added = self._epsilon if epsilon is None else _arguments.epsilon(epsilon)
        self._handle.forward_training(
            data,
            scale,
            bias,
            y,
            mode=self._mode,
            algorithm=self._algorithm,
            alpha=alpha,
            beta=beta,
            epsilon=added,
            exponential_average_factor=factor,
            unbiased=unbiased,
            workspace=workspace,
            **self._state,
        )
        self._epsilon, self._factor, self._has_saved = added, factor, True

    def forward_inference(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        y: Any,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float | None = None,
        workspace: Any = None,
    ) -> None:
        """Normalize by the running statistics.

        ``y = alpha * (scale * (x - running_mean) / sqrt(running_variance + epsilon) + bias) + beta * y``

        Parameters
        ----------
        x : array, shape (N, C, spatial...)
        scale, bias : array
            As `bias_scale_properties` says.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        alpha, beta : float
        epsilon : float, optional
            For this call. Default: the layer's, that of the last forward training.
        workspace : array or (int, int), optional
            As in `Handle.forward_inference`.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError

        Notes
        -----
        Source of the formula: ``cudnnBatchNormalizationForwardInference``.
        Vendor symbols: see `pybnorm.batch_normalization_forward_inference`.
        Workspace: `workspace_size` of `Operation.FORWARD_INFERENCE`.

        Examples
        --------
        >>> x, y = np.float32([[[[1, 2, 3, 4]]]]), np.empty((1, 1, 1, 4), np.float32)
        >>> scale, bias = np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32)
        >>> with pybnorm.Handle("native") as handle, pybnorm.layer.BatchNorm.spatial(handle, epsilon=0) as layer:
        ...     layer.stage(x)
        ...     layer.forward_inference(x, scale, bias, y)
        >>> y  # the running statistics begin as 0 and 1
        array([[[[1., 2., 3., 4.]]]], dtype=float32)
        """
        self._handle.forward_inference(
            self._data(x),
            scale,
            bias,
            self._state["running_mean"],
            self._state["running_variance"],
            y,
            mode=self._mode,
            algorithm=self._algorithm,
            alpha=alpha,
            beta=beta,
            epsilon=self._epsilon if epsilon is None else epsilon,
            workspace=workspace,
        )

    def backward(
        self,
        x: Any,
        dy: Any,
        scale: Any,
        dx: Any,
        dscale: Any,
        dbias: Any,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        alpha_param: float = 1.0,
        beta_param: float = 0.0,
        epsilon: float | None = None,
        workspace: Any = None,
    ) -> None:
        """Gradients of the last `forward_training`, from the statistics it saved.

        With ``xhat = (x - saved_mean) * saved_inv_variance``: ``dbias = sum(dy)``, ``dscale = sum(dy * xhat)``,
        ``dx = scale * saved_inv_variance * (dy - dbias / m - xhat * dscale / m)``; dx is blended by the data pair,
        dscale and dbias by the parameter pair.

        Parameters
        ----------
        x : array
            That of the forward call.
        dy : array, shape and dtype of x
        scale : array
            As `bias_scale_properties` says.
        dx : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        dscale, dbias : array
            As `scale`. Written. Read only if `beta_param` is not 0.
        alpha, beta, alpha_param, beta_param : float
        epsilon : float, optional
            Checked and not used, because the saved statistics hold it already; gocudnn has the argument.
        workspace : array or (int, int), optional
            As in `Handle.backward`.

        Raises
        ------
        ArgumentError
            Also without a forward training since `stage`.
        UnsupportedError, VendorError

        Notes
        -----
        The order is that of `Handle.backward`; gocudnn's ``BackwardProp``, here `backward_prop`, has x, scale, dscale,
        dbias, dx, dy: port it by keywords.
        Source of the formula: Ioffe & Szegedy 2015, section 3; ``cudnnBatchNormalizationBackward``.
        Vendor symbols: see `pybnorm.batch_normalization_backward`.
        Workspace: `workspace_size` of `Operation.BACKWARD`.
        """
        data = self._data(x)
        if not self._has_saved:
            raise ArgumentError("layer", "a layer without saved statistics", "a forward_training before backward")
        self._handle.backward(
            data,
            dy,
            scale,
            dx,
            dscale,
            dbias,
            mode=self._mode,
            algorithm=self._algorithm,
            alpha=alpha,
            beta=beta,
            alpha_param=alpha_param,
            beta_param=beta_param,
            epsilon=self._epsilon if epsilon is None else epsilon,
            saved_mean=self._state["saved_mean"],
            saved_inv_variance=self._state["saved_inv_variance"],
            workspace=workspace,
        )

    backward_prop = backward
