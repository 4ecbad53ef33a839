"""What a checkpoint lacks of a model, or has beyond it: refused where it is of the attention that ran."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from toeplens.ground import InputError
from toeplens.sources.huggingface.watch import attention_modules

_TOLD = 3  # names of weights that are told
_NAMED = re.compile("(Attention|Attn|MLA)$")  # a class that is an attention and not a layer around one


class Lacking:
    """The weights that a checkpoint and a model do not share, and the attention modules they may lie in.

    Arguments
        missing    of the model, not in the checkpoint: they are random
        left_over  of the checkpoint, without a place in the model
    """

    def __init__(self, model: nn.Module, missing: Sequence[str], left_over: Sequence[str]) -> None:
        self.prefix = f"{getattr(model, 'base_model_prefix', '') or '?'}."
        self.wrapped = [
            name for module, name in attention_modules(model).items() if _NAMED.search(type(module).__name__) and name
        ]
        self.missing, self.left_over = missing, left_over

    def check(self, module: str) -> None:
        """Refuse weights that are missing, or left over, in this attention that ran, or in an attention around it.

        Layers count as alike: what is left over of a layer that the model does not have is of its attention too.

        Arguments
            module  its name; its class may follow
        """
        inner = module.split(" (")[0]
        around = [name for name in self.wrapped if inner.startswith(f"{name}.")]
        starts = [f"{name}." for name in (inner, *around)]
        lost = [key for key in self.missing if key.startswith(tuple(starts))]
        if lost:
            raise InputError(
                f"model: the checkpoint lacks weights of the attention: {_listed(lost)}; they would be random."
            )
        alike = {self._alike(start) for start in starts}
        extra = [key for key in self.left_over if any(self._alike(key).startswith(start) for start in alike)]
        if extra:
            raise InputError(
                f"model: the checkpoint has weights of the attention that the model of its configuration does not: "
                f"{_listed(extra)}; is the configuration another model's?"
            )

    def _alike(self, name: str) -> str:
        return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name.removeprefix(self.prefix))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")
