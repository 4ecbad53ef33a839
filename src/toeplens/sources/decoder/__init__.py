"""Our own decoder as a source: traced, replayed from a layer, differentiated."""
