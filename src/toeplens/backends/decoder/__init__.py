"""The toeplens decoder as a source: traces, replays from a layer, gradients."""
