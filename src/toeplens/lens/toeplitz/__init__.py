"""Toeplitz kernels, which depend only on the offset: spectra, predictors, decay and phases."""
