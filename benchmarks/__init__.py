"""Measurements: the reference against NumPy, the backends against the memory roofline."""
