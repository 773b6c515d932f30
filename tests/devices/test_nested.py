"""Tensors are found and changed in every kind of mapping, list and tuple, in any depth."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import TokenClassifierOutput

from openmed_nb.devices.moving import named_tensors, with_tensors

Pair = namedtuple("Pair", "inputs labels")  # noqa: PYI024 - the plain kind, as loaders make it

HOLDERS = {
    "dict": lambda tensor: {"logits": tensor},
    "ordered": lambda tensor: OrderedDict(logits=tensor),
    "encoding": lambda tensor: BatchEncoding({"logits": tensor}),
    "output": lambda tensor: TokenClassifierOutput(logits=tensor),
    "list": lambda tensor: [tensor, "text"],
    "tuple": lambda tensor: (5, tensor),
    "named tuple": lambda tensor: Pair(tensor, None),
    "nested": lambda tensor: [BatchEncoding({"deep": ({"logits": tensor},)})],
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
def test_tensors_are_found(holder):
    """The one tensor of each kind of holder is found."""
    tensor = torch.ones(1)
    assert [found for _, found in named_tensors(holder(tensor))] == [tensor]


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
def test_tensors_are_changed(holder):
    """Each kind of holder comes back as the same kind, with the tensor changed, and is itself left as it was."""
    held = holder(torch.ones(1))
    changed = with_tensors(held, lambda tensor: tensor * 2)
    assert type(changed) is type(held)
    assert [tensor.item() for _, tensor in named_tensors(changed)] == [2.0]
    assert [tensor.item() for _, tensor in named_tensors(held)] == [1.0]


def test_mapping_that_cannot_be_written():
    """A mapping that cannot be written becomes a plain dictionary."""
    assert with_tensors(MappingProxyType({"a": torch.ones(1)}), torch.neg) == {"a": torch.tensor([-1.0])}


@pytest.mark.parametrize("value", [None, "text", 5, [1, (2,)], torch.Size([2]), {}])
def test_value_without_tensors(value):
    """What holds no tensor stays itself."""
    assert list(named_tensors(value)) == []
    assert with_tensors(value, torch.neg) is value


def test_names():
    """Names tell the place, and a tensor alone has none."""
    batch = {"labels": torch.ones(1), "pair": (torch.ones(1), {"deep": torch.ones(1)}), "text": "secret"}
    assert [name for name, _ in named_tensors(batch)] == ["labels", "pair.0", "pair.1.deep"]
    assert [name for name, _ in named_tensors(torch.ones(1))] == [""]
