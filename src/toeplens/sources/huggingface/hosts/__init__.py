"""Encodings of ours installed in Hugging Face models; `toeplens.hosts` is how users reach them."""
