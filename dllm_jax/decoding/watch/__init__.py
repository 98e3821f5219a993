"""Pictures of a recorded generation: a grid for terminals, a page for browsers and notebooks."""
