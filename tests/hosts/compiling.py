"""A host compiled whole, in a process of its own: what checks shapes in tests is not compiled."""

from __future__ import annotations

import sys

import torch
from tests.backends.hf.models import INPUTS
from tests.hosts.families import model_with_encoding


def main(name: str) -> None:
    """Without a break in the graph, with padding, the numbers and gradients of the model as it is."""
    model = model_with_encoding(name).train()
    ids = INPUTS["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": False}
    plain = model(**inputs)
    plain.loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)(**inputs)
    compiled.loss.backward()
    torch.testing.assert_close(compiled.logits, plain.logits, rtol=0, atol=1e-4)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-4)


for each in sys.argv[1:]:
    main(each)
    torch._dynamo.reset()
