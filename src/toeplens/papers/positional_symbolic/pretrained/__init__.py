"""Pretrained models as a study: claims about heads, frequencies and retrieval, with random-weight baselines."""

from toeplens.papers.positional_symbolic.pretrained.parts import PretrainedPlan
from toeplens.papers.positional_symbolic.pretrained.study import (
    PretrainedStudy,
    examine,
    gather,
    is_pretrained,
    open_record,
)

__all__ = ["PretrainedPlan", "PretrainedStudy", "examine", "gather", "is_pretrained", "open_record"]
