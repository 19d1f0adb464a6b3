"""Tests the judge: simulated kernels with known bugs must be found, and correct ones must pass."""

__all__ = ["detection", "faults", "simulated"]
