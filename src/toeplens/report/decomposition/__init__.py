"""The page of a run's decomposed attention logits."""
