"""What a model loses without each of its heads."""
