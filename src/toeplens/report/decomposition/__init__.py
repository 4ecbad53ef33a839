"""The page of a run's attention logits taken apart."""
