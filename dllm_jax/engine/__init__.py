"""The denoising loop: one jitted program over a canvas, a cache and a sampler."""
