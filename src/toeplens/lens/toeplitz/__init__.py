"""What depends on the offset alone: spectra, predictors, decay and phases of Toeplitz kernels."""
