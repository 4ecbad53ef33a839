"""What a grid study's page says of language models."""
