"""Shared tools: attention traces, sums over visible pairs, replays, intervals."""
