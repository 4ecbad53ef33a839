"""What studies share: cells, results, claims and verdicts, and the life of a study's directory."""
