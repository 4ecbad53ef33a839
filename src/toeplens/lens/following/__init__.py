"""What a head follows: place or content."""
