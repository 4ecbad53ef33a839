"""Which rotation frequencies the heads use."""
