"""Parts that several policies share, and parts of large ones."""
