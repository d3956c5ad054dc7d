"""A traced model as a list of steps, which run in order and let go of what nobody reads any more.

A step is one node, a chain that runs as a ``FusedConv``, or the chains of an ``InvertedResidual``.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .chains import NO_NORM, Chain, find_chains, is_sum, only_reader, why_alone, why_no_norm
from .geometry import ConvGeometry
from .inverted import Block, find_blocks
from .methods import Exact, Method
from .modules import CONVOLUTIONS, AdaptedLayer
from .ops.fused import NONE, FusedConv, with_norm
from .ops.inverted_residual import InvertedResidual
from .ops.layer import Call, Followers, run_layer
from .ops.linear import linear

__all__ = ["Known", "Step", "Values", "describe", "make_steps", "run_steps"]

Values = dict[Node, Any]
Known = dict[Any, Any]  # fused layers, by the modules they are made of


@dataclass
class Step:
    """One thing to do: ``run`` with the values of ``args`` and ``kwargs`` makes the value of ``node``."""

    node: Node
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fused: FusedConv | None = None
    done: list[Node] = field(default_factory=list)  # values that nobody reads after this step

    @property
    def reads(self) -> list[Node]:
        found: list[Node] = []
        map_arg((self.args, self.kwargs), lambda node: found.append(node))
        return found


def make_steps(
    graph: Graph, modules: dict[str, Any], frozen: set[Node], apart: AbstractSet[Node], known: Known
) -> list[Step]:
    """What to do, in order; the nodes in ``frozen`` need no gradient, and come first.

    apart: those of them that come before the others, run with none of the others, and not in blocks.
    known: the fused layers of other ways to call the same modules, whose packed weights are used here too.
    """
    chains = find_chains(graph, modules, frozen, apart)
    found = find_blocks([chain for chain in chains if chain.conv not in apart], modules, frozen)
    blocks = {block.project.starts: block for block in found}
    in_blocks = {chain.conv for block in blocks.values() for chain in block.chains.values()}
    starts = {chain.starts: chain for chain in chains if chain.conv not in in_blocks}
    inside = {node for chain in chains for node in chain.nodes}
    made: dict[Node, Step] = {}
    for node in graph.nodes:
        if node in blocks:
            step = _block_step(blocks[node], modules, frozen, known)
        elif node in starts:
            step = _fused_step(starts[node], modules, frozen, known)
        elif node in inside or node.op in ("placeholder", "output"):
            continue
        else:
            step = _plain_step(node, modules, made, frozen)
        made[step.node] = step
    steps = sorted(made.values(), key=lambda step: (step.node not in apart, step.node not in frozen))
    _note_last_reads(steps, graph, frozen)
    return steps


def describe(
    graph: Graph,
    modules: dict[str, Any],
    frozen: set[Node],
    apart: AbstractSet[Node] = frozenset(),
    in_int8: Container[str] = (),
) -> list[list[str]]:
    """Of every convolution: its name, what runs with it, and why no more does.

    in_int8: the names of values that convolutions of ``apart`` read in int8.
    """
    chains = find_chains(graph, modules, frozen, apart)
    alone = [chain for chain in chains if chain.conv in frozen and chain.conv not in apart]
    made, blocks = [], find_blocks(alone, modules, frozen)
    by_conv = {chain.conv: chain for chain in chains}
    roles = {chain.conv: role for block in blocks for role, chain in block.chains.items()}
    for node in graph.nodes:
        module = modules[str(node.target)] if node.op == "call_module" else None
        if not isinstance(module, CONVOLUTIONS):
            continue
        chain = by_conv.get(node)
        if chain is None:
            made.append(
                [str(node.target), "conv", why_alone(module) or "trains without a method of gf.apply_"]
            )
            continue
        parts = {"norm": chain.norm, "sum": chain.add, chain.kind.name: chain.activation}
        begins = f"inverted residual: {roles[node]}" if node in roles else "conv"
        if node in apart and getattr(node.args[0], "name", None) in in_int8:
            begins = "int8 conv"
        how = " + ".join([begins, *(name for name, part in parts.items() if part is not None)])
        why = why_no_norm(node, modules, apart if node in apart else frozen)
        made.append([str(node.target), how, "" if why == NO_NORM else why])
    return made


def _fused_step(chain: Chain, modules: dict[str, Any], frozen: set[Node], known: Known) -> Step:
    conv, kind = modules[chain.conv.target], chain.kind  # type: ignore[index]
    norm = None if chain.norm is None else modules[chain.norm.target]  # type: ignore[index]
    fused = _known_or_new(known, (conv, norm, kind.name, kind.numbers), lambda: FusedConv(conv, norm, kind))
    last, x = chain.nodes[-1], chain.conv.args[0]
    if chain.add is not None:
        summed = chain.norm or chain.conv
        other = next(term for term in chain.add.args if term is not summed)
        return Step(last, partial(_frozen_sum, fused), (x, other), {}, fused)
    if chain.conv in frozen:
        return Step(last, fused.frozen, (x,), {}, fused)
    run = None if kind.is_gate else kind.run_
    if fused.norm_trains:
        run_fused = partial(_run_with_norm, fused, Followers(None, None, run, kind.slope))
    else:
        followers = Followers(fused.norm, None, run, kind.slope)
        run_fused = partial(_run_layer, fused, followers, replace(followers, finish=fused.finish))
    return Step(last, partial(_trained, fused, run_fused), (x,), {}, fused)


def _known_or_new(known: Known, key: Any, make: Callable[[], Any]) -> Any:
    if key not in known:
        known[key] = make()
    return known[key]


def _block_step(block: Block, modules: dict[str, Any], frozen: set[Node], known: Known) -> Step:
    steps = {role: _fused_step(chain, modules, frozen, known) for role, chain in block.chains.items()}
    stages: dict[str, Any] = {role: step.fused for role, step in steps.items()}
    first, *_, last = steps.values()
    one_by_one = partial(_one_by_one, [step.run for step in steps.values()])
    parts = (stages.get("expand"), stages["depthwise"], stages["project"])
    is_frozen = block.project.conv in frozen
    trains = tuple(stage is not None and stage.norm_trains for stage in parts)  # decides how each runs alone
    key = (*parts, trains, is_frozen, block.project.add is not None)  # a sum is part of frozen ones only
    run = _known_or_new(known, key, lambda: InvertedResidual(*parts, one_by_one))
    return Step(last.node, run, (*first.args, *last.args[1:]), {}, stages["project"])


def _one_by_one(stages: list[Callable[..., Tensor]], x: Tensor, *other: Tensor) -> Tensor:
    *before, last = stages
    for stage in before:
        x = stage(x)
    return last(x, *other)


def _frozen_sum(fused: FusedConv, x: Tensor, other: Tensor) -> Tensor:
    if x.dim() == 4 and tuple(other.shape) == fused.geometry(x).y_shape and other.dtype == x.dtype:
        return fused.frozen(x, other)
    alone = FusedConv(fused.conv, fused.norm)
    return fused.activation.run_(alone.frozen(x) + other)


def _trained(fused: FusedConv, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """As one autograd node, with the layer's method."""
    conv: Any = fused.conv
    with torch._C.DisableTorchFunction():  # the region has no part in what happens inside
        wanted = any(t is not None and t.requires_grad for t in (x, conv.weight, conv.bias))
        if not (wanted and torch.is_grad_enabled()):  # a test leaves alone what a method remembers
            return fused.frozen(x)
        if x.dim() == 4:
            return run(x)
    y = conv(x) if fused.norm is None else fused.norm(conv(x))  # without a batch
    return fused.activation.run_(y)


def _run_layer(fused: FusedConv, followers: Followers, finishing: Followers, x: Tensor) -> Tensor:
    conv: Any = fused.conv
    call = _call(fused, fused.trained, followers, x)
    method: Any = call.method
    patches = call.geometry.output_grid(method.patches(call.geometry)).patches
    if 1 < prod(patches) < 256 and method.forward.__func__ is Method.forward and fused.finishes(x):
        call = replace(call, forward=fused.unfinished, followers=finishing)
    return run_layer(x, conv.weight, conv.bias, call)


def _run_with_norm(fused: FusedConv, followers: Followers, x: Tensor) -> Tensor:
    """The norm trains too: autograd takes the gradient of the folded weight apart."""
    conv: Any = fused.conv
    scale, shift = fused.factors(conv.weight.dtype)
    weight, bias = with_norm(conv.weight, conv.bias, scale, shift)
    made_of = conv.weight, scale.detach().view(-1, 1, 1, 1)
    call = replace(_call(fused, fused.trained_folded, followers, x), made_of=made_of)
    return run_layer(x, weight, bias, call)


def _call(fused: FusedConv, forward: Callable[..., Tensor], followers: Followers, x: Tensor) -> Call:
    conv: Any = fused.conv
    geometry = fused.geometry(x)
    method: Method = conv.gradfilter_method
    method = Exact() if method.refuses(geometry) else method
    return Call(forward, geometry, method, conv.gradfilter_memory, followers=followers)


def _plain_step(node: Node, modules: dict[str, Any], made: dict[Node, Step], frozen: set[Node]) -> Step:
    target: Any = node.target
    if node.op == "call_module":
        module = modules[target]
        if getattr(module, "gradfilter_base", type(module)) is nn.Linear and not node.kwargs:
            module = partial(_run_linear, module)
        return Step(node, module, node.args, node.kwargs)
    if node.op == "get_attr":
        return Step(node, partial(_attribute, modules[""], target), (), {})
    if node.op == "call_method":
        return Step(node, partial(_method, target), node.args, node.kwargs)
    if is_sum(node) and node not in frozen:
        for mine, other in (node.args, node.args[::-1]):
            if isinstance(mine, Node) and mine not in frozen and _is_free(made.get(mine)):
                return Step(node, _add_to, (mine, other), {})
    return Step(node, target, node.args, node.kwargs)


def _run_linear(layer: Any, x: Tensor) -> Any:
    """A linear layer of plain features, if it has no method for such."""
    if _is_plain_linear(layer, x):
        method: Method = getattr(layer, "gradfilter_method", Exact())
        if isinstance(method, Exact) or method.refuses(
            ConvGeometry.pointwise(tuple(x.shape), len(layer.weight))
        ):
            with torch._C.DisableTorchFunction():
                return linear(x, layer.weight, layer.bias)
    return layer(x)


def _is_plain_linear(layer: Any, x: Tensor) -> bool:
    """Whether it is a product of matrices, and nothing has been put in its place."""
    weight, bias = layer.weight, layer.bias
    return (
        type(x) is Tensor
        and x.dim() == 2
        and x.shape[1:] == weight.shape[1:]
        and type(weight) in (Tensor, nn.Parameter)
        and (bias is None or type(bias) in (Tensor, nn.Parameter))
        and not isinstance(layer, AdaptedLayer)
        and "forward" not in layer.__dict__
        and forward_ad._current_level < 0  # torch's own has derivatives forwards too
    )


def _is_free(step: Step | None) -> bool:
    """Whether nobody else reads a step's result, nor any backward, so that it may be written to."""
    return bool(step and step.fused and step.fused.activation is NONE and len(step.node.users) == 1)


def _add_to(mine: Any, other: Any) -> Any:
    if isinstance(other, Tensor) and mine.shape == other.shape and mine.dtype == other.dtype:
        mine += other
        return mine
    return mine + other


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _method(name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)


def run_steps(steps: list[Step], values: Values) -> None:
    """Take the steps: their values are added to ``values``, and those that nobody reads any more removed."""
    for step in steps:
        args = [values[a] if isinstance(a, Node) else map_arg(a, values.__getitem__) for a in step.args]
        kwargs = step.kwargs and map_arg(step.kwargs, values.__getitem__)
        values[step.node] = step.run(*args, **kwargs)
        del args
        for node in step.done:
            del values[node]


def _note_last_reads(steps: list[Step], graph: Graph, frozen: set[Node]) -> None:
    output = next(iter(reversed(graph.nodes)))
    by_node = {step.node: step for step in steps}
    last: dict[Node, Step | None] = {}
    for step in steps:
        last.update(dict.fromkeys(step.reads, step))
    last.update(dict.fromkeys(output.all_input_nodes))
    for node, end in last.items():
        if end is None:
            continue
        # A gate behind a residual sum looks at the sum's gated term (ops/join.py), which must still be there.
        waits = is_sum(end.node) and end.node not in frozen
        reader = only_reader(end.node) if waits else None
        (by_node.get(reader, end) if reader else end).done.append(node)
