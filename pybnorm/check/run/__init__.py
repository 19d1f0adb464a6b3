"""How a case is run on a library: sessions, guarded memory, worker processes, executors, and what is saved."""
