"""Shared code of studies: cells, results, claims, verdicts, and study directories."""
