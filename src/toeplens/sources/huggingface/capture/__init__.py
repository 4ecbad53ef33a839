"""A pass whose attention is taken apart, call by call, and proved on its own input."""
