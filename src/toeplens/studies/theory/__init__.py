"""The papers' mathematics as experiments: each statement as it stands, and as it should stand, judged on numbers."""
