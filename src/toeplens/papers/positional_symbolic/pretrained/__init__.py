"""Pretrained models as a study: claims about heads, frequencies and retrieval, with random-weight baselines."""

from toeplens.papers.positional_symbolic.pretrained.state import Plan, Pretrained
from toeplens.papers.positional_symbolic.pretrained.study import examine, gather, is_pretrained, judged, open_record

__all__ = ["Plan", "Pretrained", "examine", "gather", "is_pretrained", "judged", "open_record"]
