"""The graph of a module, by torch.fx, and which of its nodes are frozen."""

from __future__ import annotations

import operator
import threading
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy, Tracer

from .aliasing import why_unsafe
from .errors import GradFilterError
from .modules import LAYERS, NORMS, RegionModule

__all__ = ["frozen_nodes", "prefix_nodes", "trace_module", "why_untraceable"]


class _Proxy(Proxy):
    """Takes ``x += y`` for what it is; torch.fx's own takes it for ``x = x + y``."""

    def __iadd__(self, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class _Tracer(Tracer):
    """Every layer and norm is a leaf, subclasses with a forward of their own too."""

    proxy_buffer_attributes = True  # else what is computed with a buffer would be read once, for good

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, (*LAYERS, *NORMS)) or super().is_leaf_module(module, name)

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)


_tracing = threading.RLock()  # torch.fx patches nn.Module for the whole process while it traces


def trace_module(module: nn.Module) -> Graph:
    """The module's graph, read off its own class's forward: ours takes any arguments, which says nothing."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise GradFilterError("a part of it is compiled by torch.jit")
    base: Any = type(module)
    while issubclass(base, RegionModule):
        base = base.gradfilter_base
    shell = base.__new__(base)
    shell.__dict__ = dict(module.__dict__)  # what tracing or a forward sets goes there
    inside = [part.__dict__ for part in module.modules() if part is not module]
    inside += [held for p in module.modules() for held in (p._parameters, p._buffers, p._modules)]
    before = [dict(names) for names in inside]
    with _tracing, torch.no_grad():  # inside, modules run as their own classes do
        try:
            graph = _Tracer().trace(shell)
        finally:
            changed = [names for names, known in zip(inside, before, strict=True) if not _same(names, known)]
            for names, known in zip(inside, before, strict=True):
                names.clear()
                names.update(known)
    if changed or not _same(shell.__dict__, module.__dict__):
        raise GradFilterError("its forward sets attributes, or computes with its own tensors alone")
    modules = dict(module.named_modules())
    _drop_identities(graph, modules)
    if any(str(node.target).startswith("*") for node in graph.nodes if node.op == "placeholder"):
        raise GradFilterError("its forward takes any number of arguments")
    if why := why_unsafe(graph, modules):
        raise GradFilterError(why)
    return graph


def _drop_identities(graph: Graph, modules: dict[str, Any]) -> None:
    """Modules that pass a value on hide what comes next from what comes before."""
    for node in list(graph.nodes):
        module = modules[str(node.target)] if node.op == "call_module" else None
        is_plain = getattr(module, "gradfilter_base", type(module)) is nn.Identity
        if is_plain and "forward" not in vars(module) and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def why_untraceable(module: nn.Module) -> str:
    try:
        trace_module(module)
    except Exception as error:  # whatever a user's forward does with a stand-in for a tensor
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def prefix_nodes(graph: Graph, modules: dict[str, Any]) -> set[Node]:
    """What is frozen while the model trains: int8 changes its values, so the same ones in evaluation."""
    with torch.enable_grad():
        return frozen_nodes(graph, modules, set())


def frozen_nodes(graph: Graph, modules: dict[str, Any], moving: set[Node]) -> set[Node]:
    """The nodes whose value needs no gradient."""
    moving = set(moving)
    for node in graph.nodes:
        trains = torch.is_grad_enabled() and _trains(node, modules)
        if trains or any(n in moving for n in node.all_input_nodes):
            moving.add(node)
    return {node for node in graph.nodes if node not in moving and node.op not in ("placeholder", "output")}


def _trains(node: Node, modules: dict[str, Any]) -> bool:
    if node.op == "call_module":
        return any(p.requires_grad for p in modules[node.target].parameters())  # type: ignore[index]
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return bool(getattr(getattr(modules[owner], name), "requires_grad", False))
    return False
