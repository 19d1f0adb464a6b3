# The one cache: of a handle's plans and descriptors, and of what modules above make ready for it.

@cython.auto_pickle(False)
cdef class Cache(dict):
    """A dictionary that keeps the newest of what was made.

    Threads may share one: what a lookup misses is made again.
    """

    def keep(self, key, value, Py_ssize_t most):
        """Keep a value; the oldest of more than `most` go. A key without a hash is not kept."""
        try:
            self[key] = value
        except Exception:  # raised by the key, or by what is compared with it
            return
        while len(self) > most:
            try:
                self.pop(next(iter(self)), None)
            except (RuntimeError, StopIteration):  # another thread has changed it
                pass
