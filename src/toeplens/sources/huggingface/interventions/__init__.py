"""Interventions on the attention of Hugging Face models: rotations, frequencies, biases, weights, outputs."""
