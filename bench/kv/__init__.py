"""Measuring the latent cache: compiled kernels, their bounds, their times on a GPU."""
