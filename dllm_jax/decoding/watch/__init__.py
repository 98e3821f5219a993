"""What a recorded generation looks like: a grid for terminals, a page for browsers and notebooks."""
