"""One folder per paper: its study, labels, claims and pages.

Only code that is specific to a paper belongs here; no lower layer imports it.
"""
