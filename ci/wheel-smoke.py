"""What an installed wheel must do without any vendor's library: load, compute the reference, refuse by name."""

import numpy as np

import pybnorm
from pybnorm import reference

x = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
y = reference.forward_training(x, np.ones(3), np.zeros(3)).y
assert abs(y.mean()) < 1e-12, y.mean()
assert abs(y.var() - 1) < 1e-5, y.var()
for backend in pybnorm.backends():
    try:
        pybnorm.load(backend)
    except pybnorm.LibraryError as error:
        if "lib" not in str(error):
            raise
print(f"pybnorm {pybnorm.__version__} of {pybnorm.__file__}: its extension loads, the reference computes")
