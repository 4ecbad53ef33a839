"""Which frequencies of a rotation heads use."""
