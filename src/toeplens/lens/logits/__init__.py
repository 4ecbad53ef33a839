"""What a logit is made of: content, position, and where the two work together."""
