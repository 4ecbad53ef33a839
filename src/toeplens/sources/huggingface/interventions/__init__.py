"""Attention of Hugging Face models changed where it is wished: rotations, frequencies, biases, weights, outputs."""
