"""Heights and widths that the trained part of a model reads of its frozen part: kept as features are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["as_rows", "from_rows", "sizes_in"]


def sizes_in(graph: Graph) -> set[Node]:
    """Values made of heights and widths of maps alone: the same for any batch of pictures of one size."""
    found: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if _is_read(node) or (node.op == "call_function" and inputs and found.issuperset(inputs)):
            found.add(node)
    return found


def _is_read(node: Node) -> bool:
    """Whether a node takes heights and widths from the shape of a map: the last two numbers of four."""
    name, args = getattr(node.target, "__name__", node.target), node.args
    if name == "size" and node.op == "call_method":
        return len(args) == 2 and _is_of_map(args[1])
    return name == "getitem" and len(args) == 2 and _is_shape(args[0]) and _is_of_map(args[1])


def _is_shape(value: Any) -> bool:
    if not isinstance(value, Node):
        return False
    if value.op == "call_method":
        return value.target == "size" and len(value.args) == 1
    return value.target is getattr and value.args[1] == "shape"


def _is_of_map(index: Any) -> bool:
    if isinstance(index, slice):
        return index.start in (2, 3, -1, -2)
    return index in (2, 3, -1, -2)


def as_rows(size: Any, count: int) -> Tensor | None:
    """The numbers once per picture, if that is what they are.

    >>> as_rows((5, 7), 2)
    tensor([[5, 7],
            [5, 7]])
    >>> from_rows(as_rows((5, 7), 2)), from_rows(as_rows(3, 2))
    (torch.Size([5, 7]), 3)
    """
    numbers = size if isinstance(size, (tuple, list)) else [size]
    if not all(type(number) is int for number in numbers):
        return None
    return torch.tensor(size).repeat(count, *[1] * isinstance(size, (tuple, list)))


def from_rows(rows: Tensor) -> Any:
    numbers = rows[0].tolist()
    return torch.Size(numbers) if isinstance(numbers, list) else numbers
