"""Public entry points of generation, and the host work around the engine."""
