"""Decomposition of logits: content, position, and their interaction."""
