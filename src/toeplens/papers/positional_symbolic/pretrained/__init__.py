"""Pretrained models as a study: claims about heads, frequencies and retrieval, beside models that know nothing."""

from toeplens.papers.positional_symbolic.pretrained.state import Plan, Pretrained
from toeplens.papers.positional_symbolic.pretrained.study import examine, gather, is_pretrained, judged, open_record

__all__ = ["Plan", "Pretrained", "examine", "gather", "is_pretrained", "judged", "open_record"]
