"""Which nodes of a traced model can run as one: convolution, fixed norm, residual sum, activation."""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node

from .methods import Exact, Method
from .modules import AdaptedLayer
from .ops.fused import HARDSWISH, NONE, RELU, SILU, Activation, activation_of, bounded

__all__ = ["NO_NORM", "Chain", "find_chains", "is_sum", "only_reader", "why_alone", "why_no_norm"]

NO_NORM = "no batch norm reads it alone"
ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
FUNCTIONS: dict[Any, Activation] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, "relu", "relu_"), RELU),
    **{F.relu6: bounded(0.0, 6.0), F.silu: SILU, F.hardswish: HARDSWISH},
}


@dataclass(frozen=True)
class Chain:
    """Nodes that run as one, when ``starts`` is reached; the result is the value of the last."""

    conv: Node
    norm: Node | None
    add: Node | None
    activation: Node | None
    kind: Activation

    @property
    def nodes(self) -> list[Node]:
        return [n for n in (self.conv, self.norm, self.add, self.activation) if n is not None]

    @property
    def starts(self) -> Node:
        return self.add or self.conv  # the other term of a sum may be made after the convolution


def find_chains(
    graph: Graph, modules: dict[str, Any], frozen: set[Node], apart: AbstractSet[Node]
) -> list[Chain]:
    """All chains; of two convolutions whose results are added, one runs with the sum."""
    found: list[Chain] = []
    for node in graph.nodes:
        chain = _chain(node, modules, apart if node in apart else frozen)
        if chain is not None:
            taken = chain.add is not None and any(chain.add is other.add for other in found)
            found.append(Chain(chain.conv, chain.norm, None, None, NONE) if taken else chain)
    return found


def _chain(conv: Node, modules: dict[str, Any], frozen: AbstractSet[Node]) -> Chain | None:
    """The chain that begins with this node, if it is a convolution that can be fused."""
    module = modules[str(conv.target)] if conv.op == "call_module" else None
    if why_alone(module) or not (conv in frozen or hasattr(module, "gradfilter_method")):
        return None
    if len(conv.args) != 1 or conv.kwargs:
        return None
    norm = None if why_no_norm(conv, modules, frozen) else only_reader(conv)
    last = norm or conv
    add = _sum_behind(last, conv, frozen)
    last = add or last
    activation = only_reader(last)
    kind = None if activation is None else _activation(activation, modules)
    if kind is None:
        return Chain(conv, norm, add, None, NONE)
    return Chain(conv, norm, add, activation, kind)


def why_alone(module: Any) -> str:
    """Why a convolution is not one that can be fused; nothing if it is."""
    kind = getattr(module, "gradfilter_base", type(module))
    if kind is not nn.Conv2d:
        return f"a {kind.__name__}; only nn.Conv2d itself is fused"
    if not getattr(module, "gradfilter_method", Exact()).forward_is_exact:
        return "its method has a forward of its own"
    if isinstance(module, AdaptedLayer):
        return "its method adds to its output"
    if module.padding_mode != "zeros":
        return f"padding_mode is {module.padding_mode!r}"
    return f"padding={module.padding!r}" if isinstance(module.padding, str) else ""


def why_no_norm(node: Node, modules: dict[str, Any], frozen: AbstractSet[Node]) -> str:
    """Why there is no norm behind a convolution that can be folded into it; nothing if there is one."""
    behind, conv = only_reader(node), modules[str(node.target)]
    norm: Any = modules[str(behind.target)] if behind is not None and behind.op == "call_module" else None
    if getattr(norm, "gradfilter_base", type(norm)) is not nn.BatchNorm2d:
        return NO_NORM
    if norm.training or norm.running_var is None:
        return "its norm uses batch statistics"
    if behind in frozen or not any(p is not None and p.requires_grad for p in (norm.weight, norm.bias)):
        return ""
    method: Method | None = getattr(conv, "gradfilter_method", None)
    if method is not None and conv.weight.requires_grad and method.weight_gradient_tells_scale(conv):
        return ""
    return "its norm trains, and the weight's gradient does not tell that of the norm's scale"


def only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _sum_behind(last: Node, conv: Node, frozen: AbstractSet[Node]) -> Node | None:
    """The residual sum that reads the chain so far; oneDNN adds it on the way where nothing has gradients."""
    add = only_reader(last)
    if add is None or add not in frozen or not is_sum(add):
        return None
    terms = [term for term in add.args if isinstance(term, Node)]
    x = conv.args[0]
    # The convolution now runs later, so its input must be nobody else's, who might write to it.
    alone = isinstance(x, Node) and len(x.users) == 1
    return add if alone and len(set(terms)) == len(add.args) == 2 else None


def _activation(node: Node, modules: dict[str, Any]) -> Activation | None:
    if node.op == "call_module":
        return activation_of(modules[node.target])  # type: ignore[index]
    plain = len(node.args) == 1 and set(node.kwargs) <= {"inplace"}
    return FUNCTIONS.get(node.target) if plain else None


def is_sum(node: Node) -> bool:
    """Whether a node is the plain sum of two things."""
    return (
        node.op in ("call_function", "call_method")
        and node.target in ADD
        and not node.kwargs
        and len(node.args) == 2
    )
