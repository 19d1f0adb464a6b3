"""The device that a handle computes on: one per backend for the whole run, with a stream that outlives every handle."""

import functools

from pybnorm import devices


@functools.cache
def _device(device_type, ordinal):
    return devices.device_for(device_type, ordinal)


def device_of(handle):
    """The handle's device; its stream becomes the handle's."""
    device = _device(handle.library.device_type, handle.device or 0)
    if device.stream:
        handle.set_stream(device.stream)
    return device
