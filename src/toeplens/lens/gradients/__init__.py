"""What gradients say of position: does a positional signal survive the mean over a batch?"""
