"""Tables of a study for other programs: what their rows have, and how they are made."""
