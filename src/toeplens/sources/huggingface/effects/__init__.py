"""Ablation effects of the heads of a Hugging Face model."""
