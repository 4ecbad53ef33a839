"""Pretrained models as a study: claims about heads, frequencies and retrieval, with random-weight baselines."""

from toeplens.papers.positional_symbolic.pretrained.parts import Plan
from toeplens.papers.positional_symbolic.pretrained.study import Pretrained, examine, gather, is_pretrained, open_record

__all__ = ["Plan", "Pretrained", "examine", "gather", "is_pretrained", "open_record"]
