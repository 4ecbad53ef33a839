"""What is lost without a head, and whether one head, a few or many carry a skill."""
