"""Whether nodes of a traced model may run in another order, or as others: who writes to what others read."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node

from .modules import LAYERS, NORMS

__all__ = ["why_unsafe"]

IN_PLACE = {
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "setitem",
    "relu_",
    "add_",
    "mul_",
    "hardtanh_",
    "leaky_relu_",
}
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
ACTIVATIONS = (nn.ReLU, nn.Hardtanh, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.GELU)
# modules whose result is new, or written over a value we follow
FRESH = (*LAYERS, *NORMS, *POOLS, *ACTIVATIONS)
FRESH_FUNCTIONS = {
    operator.add,
    operator.sub,
    operator.mul,
    torch.add,
    torch.mul,
    torch.cat,
    torch.relu,
    F.relu,
}
FRESH_METHODS = {"sum", "mean"}


def why_unsafe(graph: Graph, modules: dict[str, Any]) -> str:
    """Why steps must not run in another order, or as others: something is written to that others may read."""
    for node in graph.nodes:
        target = _written(node, modules)
        while target is not None:
            if len(target.users) > 1 or _may_be_a_view(target, modules):
                return f"{node.name} writes in place to {target.name}, which others may read"
            target = _written(target, modules)
    return ""


def _written(node: Node, modules: dict[str, Any]) -> Node | None:
    """What a node writes to, if it works in place."""
    name, first = str(node.target), next(iter(node.args), None)
    if node.op == "call_module":
        in_place = getattr(modules[name], "inplace", False)
    elif node.op == "call_method":
        in_place = name.endswith("_") and not name.endswith("__")
    else:
        in_place = getattr(node.target, "__name__", "") in IN_PLACE or node.kwargs.get("inplace", False)
    return first if in_place and isinstance(first, Node) else None


def _may_be_a_view(node: Node, modules: dict[str, Any]) -> bool:
    """Whether a value may share memory with another one."""
    if node.op == "call_module":
        return not isinstance(modules[str(node.target)], FRESH)
    if node.op == "call_function":
        return node.target not in FRESH_FUNCTIONS and _written(node, modules) is None
    return node.op != "call_method" or (node.target not in FRESH_METHODS and _written(node, modules) is None)
