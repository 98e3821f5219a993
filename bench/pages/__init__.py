"""Pages and tables that are made of docstrings and of what bench/results holds."""
