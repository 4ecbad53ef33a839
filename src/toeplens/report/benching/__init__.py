"""The page of a bench."""
