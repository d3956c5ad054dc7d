"""Heights and widths that the trained part of a model reads of its frozen part: kept as features are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["Measured", "as_rows", "from_rows", "sizes_in"]


def sizes_in(graph: Graph) -> dict[Node, list[Node]]:
    """Values made of heights and widths of maps alone, each with these maps.

    They are the same for any batch of pictures of one size, if the maps have the batch first.
    """
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        inputs, read = node.all_input_nodes, _measured(node)
        if read is not None:
            found[node] = [read]
        elif node.op == "call_function" and inputs and found.keys() >= set(inputs):
            found[node] = [each for value in inputs for each in found[value]]
    return found


def _measured(node: Node) -> Node | None:
    """The map of which a node takes height and width, if that is what it does."""
    name, args = getattr(node.target, "__name__", node.target), node.args
    if len(args) != 2 or len(node.all_input_nodes) != 1 or not _is_of_map(args[1]):
        return None
    if node.op == "call_method" and name == "size":
        read = args[0]
    else:
        read = _shown(args[0]) if name == "getitem" else None
    return read if isinstance(read, Node) else None


def _shown(value: Any) -> Any:
    """The map whose whole shape a value is."""
    if not isinstance(value, Node):
        return None
    is_method = value.op == "call_method" and value.target == "size" and len(value.args) == 1
    return value.args[0] if is_method or (value.target is getattr and value.args[1] == "shape") else None


def _is_of_map(index: Any) -> bool:
    if isinstance(index, slice):
        return index.start in (2, 3, -1, -2) and index.step in (None, 1)
    return index in (2, 3, -1, -2)


class Measured(dict[Node, Any]):
    """Values that note of some maps how many pictures they have; 0 if these do not come first."""

    def __init__(self, maps: set[Node], values: dict[Node, Any]) -> None:
        super().__init__()
        self.maps, self.pictures = maps, set[int]()
        for node, value in values.items():
            self[node] = value

    def __setitem__(self, node: Node, value: Any) -> None:
        if node in self.maps:
            self.pictures.add(len(value) if value.dim() > 2 else 0)
        super().__setitem__(node, value)


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
