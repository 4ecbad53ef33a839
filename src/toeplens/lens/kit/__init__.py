"""What several questions share: traces of attention, sums over visible pairs, replays, intervals."""
