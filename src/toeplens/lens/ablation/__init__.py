"""Head ablation: the effect of each head, and whether one head, a few or many carry a skill."""
