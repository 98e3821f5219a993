"""Pallas kernels, one folder per operation. None yet: the engine runs on XLA alone."""
