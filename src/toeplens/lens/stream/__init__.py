"""What layers carry: position in the residual stream."""
