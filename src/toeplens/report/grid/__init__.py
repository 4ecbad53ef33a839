"""The page of a grid study."""
