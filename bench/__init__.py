"""Measurements of speed and accuracy."""
