"""What is known of a paper stands in its room: its study, labels, claims and pages.

Here goes what would not be there if a paper had never been written; nothing below this floor imports from it.
"""
