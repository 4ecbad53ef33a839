"""Position in the residual stream."""
