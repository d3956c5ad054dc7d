"""What a plan costs, from shapes alone: bytes kept and multiply-adds, exactly and as planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from .methods import Exact, Method
from .plans import LayerCost, NormPolicy, Plan
from .selection import Layers
from .surgery import Methods, apply_plan, make_plan, trained_parameters
from .trace import Trace, kept_by, trace

__all__ = ["cost", "kept_bytes", "plan"]


def plan(
    model: nn.Module,
    method: Methods,
    layers: Layers = "all",
    *,
    norm: NormPolicy = "fixed",
    example: Tensor | None = None,
) -> Plan:
    """What ``apply_`` would do: a table of every layer, its action and method.

    With an ``example`` input the layers are counted in the order they run and the table has costs: bytes kept
    and backward multiply-adds, exact backpropagation against the plan. Only the example's shape matters.

    method: one for all layers, or a dict from globs to methods; the first that matches a layer is its own.

    norm: what happens to norms: "fixed" (statistics and affine stay), "affine" (scale and shift of the norms
    behind trained layers train) or "batch" (those also use and update batch statistics).

    >>> import torch, gradfilter as gf
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    >>> gf.plan(model, gf.GradientFilter(patch=4), "last:1", example=torch.zeros(2, 3, 32, 32)).kept
    (65536, 4096)
    """
    made = make_plan(model, method, layers, norm=norm, example=example)
    return made if example is None else cost(model, made, example)


def cost(model: nn.Module, plan: Plan, example: Tensor) -> Plan:
    """The plan with the costs of a batch like ``example``: bytes kept and multiply-adds of every layer.

    "Before" is exact backpropagation of the same layers, weight and bias, in plain PyTorch with the model in
    eval mode, except norms that use batch statistics. "After" is the plan, in the mode the model is in.
    """
    methods = defaultdict(Exact, {row.name: row.method for row in plan.rows})

    def tokens(name: str) -> tuple[int, int] | None:
        return methods[name].tokens

    before = trace(model, example, lambda copied: _train_exactly(copied, plan), tokens)
    after = trace(model, example, lambda copied: apply_plan(copied, plan), tokens)
    costs = {
        row.name: (
            _layer_cost(row.name, before, before, Exact()),
            _layer_cost(row.name, after, before, row.method),
        )
        for row in plan.rows
    }
    others = [LayerCost(sum(b for n, b in t.kept.items() if n not in costs)) for t in (before, after)]
    return plan.with_costs(costs, (others[0], others[1]))


def _train_exactly(model: nn.Module, plan: Plan) -> None:
    exact = replace(plan, rows=tuple(replace(row, method=Exact()) for row in plan.rows))
    trained = trained_parameters(model, exact)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    model.eval()
    for name in plan.norms if plan.norm == "batch" else ():
        model.get_submodule(name).train()


def _layer_cost(name: str, run: Trace, before: Trace, method: Method) -> LayerCost:
    forward = backward = 0
    for call in before.calls[name]:
        own = Exact() if method.refuses(call.geometry) else method
        want = call.want._replace(weight=call.want.weight and "weight" in own.trains)
        forward += own.forward_macs(call.geometry)
        backward += own.backward_macs(call.geometry, want)
    return LayerCost(run.kept[name], forward, backward)


@contextmanager
def kept_bytes(model: nn.Module | None = None) -> Iterator[dict[str, int]]:
    """Count the bytes that autograd keeps in the ``with`` block, as ``{"": bytes}`` once it has run.

    Unique storages are counted; the parameters and buffers of ``model`` are not.

    >>> import torch
    >>> x = torch.zeros(1000, requires_grad=True)
    >>> with kept_bytes() as kept:
    ...     _ = x.exp()
    >>> sum(kept.values())
    4000
    """
    kept: dict[str, int] = defaultdict(int)
    with kept_by([""], kept, model):
        yield kept
