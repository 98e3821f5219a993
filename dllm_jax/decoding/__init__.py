"""The denoising loop and the ways into it."""
