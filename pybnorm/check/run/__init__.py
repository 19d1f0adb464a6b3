"""A case's run on a library: sessions, guarded memory, worker processes, executors, and saved runs."""
