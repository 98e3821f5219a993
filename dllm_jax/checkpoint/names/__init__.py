"""Tensor names of Hugging Face checkpoints: the table, and each family's."""
