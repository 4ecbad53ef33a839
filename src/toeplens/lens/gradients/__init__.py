"""Positional gradients: does a positional signal survive the mean over a batch?"""
