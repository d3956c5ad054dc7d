"""Every operator between layers against exact autograd seen through patches, on thousands of networks.

With P for "replace every pixel by the mean of its patch", an operator behind filtered layers must hand on
P_in(vjp(P_out(g))), and its own parameters must get vjp(P_out(g)), vjp being torch's exact gradient of the plain
operator. Linear operators along the axes of a map take g as it is. GRADFILTER_CASES says how many cases are drawn.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.coarse import CoarseGradient
from operators import FAMILIES, Net, OperatorCase, Patches, as_it_is, averaged, make_case

CASES = int(os.environ.get("GRADFILTER_CASES", "3000"))
CHUNKS = 20
TOLERANCE = 1e-10


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Maps of a few pixels are slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- running and comparing


@dataclass
class Seen:
    """What one forward and backward showed: tensors by their place in the network, and their gradients."""

    y: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    coarse: set[str] = field(default_factory=set)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    fallbacks: Counter[str] = field(default_factory=Counter)


def prepare(case: OperatorCase, net: Net, method: gf.Method | None = None) -> Net:
    """Give every layer of the network its method."""
    method = method or gf.GradientFilter(patch=case.patch_option)
    gf.apply_(net, method, norm=case.operator.norm)
    for parameter in net.owner.parameters():
        if case.operator.norm == "fixed":
            parameter.requires_grad_(case.trains)
    return net


def gradient_like(case: OperatorCase, y: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(case.seed + 2)
    return torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype)


def run(case: OperatorCase, net: Net, dtype: torch.dtype = torch.float64) -> Seen:
    """Forward and backward, looking at every tensor on the way."""
    seen = Seen(torch.empty(0))

    def look(name: str, tensor: Tensor) -> None:
        seen.values[name] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: note(name, gradient))

    def note(name: str, gradient: Tensor) -> None:
        if isinstance(gradient, CoarseGradient):
            seen.coarse.add(name)
            gradient = gradient.dense()
        seen.gradients[name] = gradient.detach().clone()

    net.look = look
    torch.manual_seed(case.seed)
    y = net(case.image(dtype))
    with gf.count_fallbacks() as seen.fallbacks:
        y.backward(gradient_like(case, y))
    seen.y = y.detach()
    seen.parameters = {name: p.grad for name, p in net.owner.named_parameters() if p.grad is not None}
    return seen


def plain(case: OperatorCase, dtype: torch.dtype = torch.float64) -> Net:
    """The same network without gradfilter, in the mode that gradfilter runs it in."""
    net = case.net(dtype)
    for norm in net.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and case.operator.norm != "batch":
            norm.eval()
    return net


def expected(case: OperatorCase, seen: Seen) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """Gradients of the operator's maps and parameters, from the values of its maps and what arrived behind it."""
    maps = [seen.values[f"map{i}"].double() for i in range(case.operator.inputs)]
    arrived = seen.gradients["made"].double()
    if case.lands is not None:
        arrived = averaged(arrived, case.lands)
    owner = plain(case).owner
    parameters = {name: p for name, p in owner.named_parameters() if name in seen.parameters}
    if case.operator.gradients is not None:
        given = {name: parameter.detach() for name, parameter in owner.named_parameters()}
        made: Sequence[Tensor | None] = case.operator.gradients(
            maps[0], arrived, case.patches, given, list(parameters)
        )
    else:
        leaves = [x.requires_grad_() for x in maps]
        torch.manual_seed(case.seed)
        # A mask is drawn in the order of memory; elsewhere the usual order is the safest for torch's kernels.
        z = owner(*(x.clone() if case.family == "dropout" else x.contiguous() * 1 for x in leaves))
        made = torch.autograd.grad(z, [*leaves, *parameters.values()], arrived, allow_unused=True)
    means = [
        None if gradient is None else averaged(gradient, patches)
        for gradient, patches in zip(made, case.all_patches, strict=False)
    ]
    return means, dict(zip(parameters, made[len(maps) :], strict=True))


def before_the_operator(case: OperatorCase, seen: Seen) -> list[Tensor | None]:
    """What the layers get through the linear step before the operator: the exact gradient, then patch means."""
    layers = [seen.values[f"layer{i}"].double().requires_grad_() for i in range(1 + case.two_layers)]
    maps = case.net().prepare(*layers)
    arrived = [seen.gradients.get(f"map{i}") for i in range(len(maps))]
    pairs = [(x, g.double()) for x, g in zip(maps, arrived, strict=True) if g is not None]
    made = torch.autograd.grad([x for x, _ in pairs], layers, [g for _, g in pairs], allow_unused=True)
    return [
        None if g is None else averaged(g, patches) for g, patches in zip(made, case.layer_patches, strict=True)
    ]


def difference(name: str, got: Tensor | None, want: Tensor | None, tolerance: float) -> list[str]:
    """What is wrong, if max|difference| <= tolerance * (1 + max|expected|) is not true."""
    if got is None or want is None:
        return [] if got is want else [f"{name} is {'missing' if got is None else 'there without a reason'}"]
    if got.shape != want.shape:
        return [f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"]
    if got.numel() == 0:
        return []
    error, bound = (got.double() - want).abs().max(), tolerance * (1 + want.abs().max())
    return [] if error <= bound else [f"{name} is off by {error:.3g}, allowed {bound:.3g}"]


def gradient_problems(case: OperatorCase, seen: Seen, tolerance: float = TOLERANCE) -> list[str]:
    """What is wrong with the gradients of the operator's maps, of its parameters and of the layers before it."""
    maps, parameters = expected(case, seen)
    layers = before_the_operator(case, seen)
    wrong = []
    for kind, wanted, all_patches in (("map", maps, case.all_patches), ("layer", layers, case.layer_patches)):
        for i, (want, patches) in enumerate(zip(wanted, all_patches, strict=True)):
            got = seen.gradients.get(f"{kind}{i}")
            means = None if got is None else averaged(got.double(), patches)
            wrong += difference(f"gradient of {kind} {i}", means, want, tolerance)
    for name, want in parameters.items():
        wrong += difference(f"gradient of {name}", seen.parameters[name], want, tolerance)
    if case.operator.coarse and max(case.shared_patches) > 1 and "map0" not in seen.coarse:
        wrong.append("the gradient of map 0 is dense")
    return wrong


def problems(case: OperatorCase) -> list[str]:
    """Everything that is wrong with the library on this case."""
    net = prepare(case, case.net())
    seen = run(case, net)
    wrong = gradient_problems(case, seen)
    twin = plain(case)
    torch.manual_seed(case.seed)
    if not torch.equal(seen.y, twin(case.image())):
        wrong.append("the forward is not the plain one, bit by bit")
    if any(not torch.equal(a, b) for a, b in zip(net.buffers(), twin.buffers(), strict=True)):
        wrong.append("the running statistics are not the plain ones")
    if case.operator.known and seen.fallbacks:
        wrong.append(f"became dense: {dict(seen.fallbacks)}")
    return wrong


def report(cases: Iterable[Any], judge: Callable[[Any], list[str]]) -> str:
    """Empty if every case passes; else how many fail, and the first few in full. A crash is a failure."""

    def verdict(case: Any) -> list[str]:
        try:
            return judge(case)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]

    cases = list(cases)
    failed = [(case, wrong) for case in cases if (wrong := verdict(case))]
    lines = [f"  {'; '.join(wrong)}\n    {case.label}\n    {case}" for case, wrong in failed[:5]]
    return "\n".join([f"{len(failed)} of {len(cases)} cases fail:", *lines]) if failed else ""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients_equal_the_oracle(chunk: int) -> None:
    """Forward bit by bit, gradients to 1e-10, no crash, and nothing becomes dense without need."""
    failed = report(map(make_case, range(chunk, CASES, CHUNKS)), problems)
    assert not failed, failed
