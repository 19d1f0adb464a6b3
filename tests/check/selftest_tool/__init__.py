"""The judge's power, for its developers: some hundred bugs, 33 honest styles of kernels, sums of up to 10^6 terms.

    PYTHONPATH=tests/check python -m selftest_tool [--whole]

`pybnorm selftest` is the part that users run.
"""
