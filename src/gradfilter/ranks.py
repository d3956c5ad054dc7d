"""Ranks for ``SubspaceIteration`` within a budget of bytes, chosen by their errors on the user's data."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .coarse import densify
from .errors import PlanError
from .geometry import ConvGeometry
from .methods import Exact, Memory, Method
from .ops.exact_conv import Gradients, Want, exact_backward
from .ops.subspace import by_variance, can_decompose, spectrum
from .ops.tucker import compress, is_smaller, stored_elements, tucker_weight_gradient
from .ops.unfolding import at_least_float32
from .plans import Plan
from .selection import Layers
from .surgery import apply_plan, make_plan, restore_

__all__ = ["choose_ranks"]

Ranks = tuple[int, ...]
_Sum = tuple[int, float, "tuple[_Option, ...]"]  # bytes, errors, and the options of the layers so far
MOST_SUMS = 4096  # of choices that are followed at the same time


def choose_ranks(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor],
    layers: Layers,
    budget: int,
    *,
    variances: Sequence[float] = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
) -> dict[str, Ranks]:
    """Ranks of every layer that trains, for ``SubspaceIteration(rank=...)``: at most ``budget`` bytes in all.

    batch: inputs, or a pair (inputs, targets), or a list of such, over which errors are averaged; of the size
    that will be trained with. loss: called with the model's output, and the targets if there are any. The
    model is copied and stays as it is; give it with the head that is to be trained.

    Every layer is tried at the ranks that explain each of ``variances``, and whole. Of all combinations that
    fit, the one with the smallest sum of relative weight gradient errors is chosen: layer by layer, partial
    combinations are followed that no other beats in both bytes and error. That is the best choice as long as
    there are no more than 4096 of them; of more, one is followed per 4096th of the budget.

    >>> import gradfilter as gf
    >>> model, x = gf.models.build("tiny"), torch.randn(8, 3, 16, 16)
    >>> found = gf.choose_ranks(model, x, lambda y: y.square().mean(), "last:2", budget=20_000)
    >>> model = gf.apply_(model, gf.SubspaceIteration(rank=found), "last:2", example=x)
    """
    levels = (*variances, 1.0)
    if not all(0 < v <= 1 for v in levels):
        raise PlanError(f"variances must be above 0 and at most 1, not {tuple(variances)}.")
    batches = [batch] if not isinstance(batch, list) else [tuple(batch)] if _is_pair(batch) else batch
    if not batches:
        raise PlanError("choose_ranks needs at least one batch; give inputs, or a pair (inputs, targets).")
    trials = _tried(model, batches, loss, layers, levels)
    options = {name: _options(found, len(levels)) for name, found in trials.items()}
    return {name: option.ranks for name, option in _cheapest(options, budget).items()}


def _is_pair(batch: list[Any]) -> bool:
    """Whether a list is inputs and targets, as a DataLoader gives them, and not two batches of inputs."""
    return (
        len(batch) == 2
        and all(isinstance(part, Tensor) for part in batch)
        and (batch[0].dtype, batch[0].dim()) != (batch[1].dtype, batch[1].dim())
    )


class _Option(NamedTuple):
    """One of a layer's choices."""

    ranks: Ranks
    bytes: int
    error: float


@dataclass(frozen=True)
class _Trial:
    """One call of a layer: its input's shape, and per level the ranks and the weight gradient's error."""

    shape: tuple[int, ...]
    element_bytes: int
    ranks: list[Ranks]
    errors: list[float]


@dataclass(frozen=True, eq=False)
class _Trying(Method):
    """Exact; tries every level on the way."""

    levels: tuple[float, ...]
    found: list[_Trial] = field(default_factory=list)

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        return (x,)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        grad = densify(grad)
        exact = exact_backward(grad, kept[0] if kept else None, weight, geometry, want)
        if kept and exact.weight is not None and can_decompose(kept[0]):
            self.found.append(_trial(self.levels, grad, kept[0], exact.weight, geometry))
        return exact


def _trial(levels: Sequence[float], grad: Tensor, x: Tensor, exact: Tensor, geometry: ConvGeometry) -> _Trial:
    full = at_least_float32(x)
    modes = [spectrum(full, mode) for mode in range(full.dim())]
    ranks, errors = [], []
    for level in levels:
        enough = by_variance(level)
        own = tuple(min(enough(values, values.sum()), len(values)) for values, _ in modes)
        if level == 1 or not is_smaller(x.shape, own):
            ranks.append(tuple(x.shape))
            errors.append(0.0)
            continue
        core, *factors = compress(x, [vectors[:, :k] for (_, vectors), k in zip(modes, own, strict=True)])
        found = tucker_weight_gradient(grad, core, factors, exact, geometry)
        ranks.append(own)
        errors.append(_relative(found, exact))
    return _Trial(tuple(x.shape), x.element_size(), ranks, errors)


def _relative(found: Tensor, exact: Tensor) -> float:
    norm = float(exact.double().norm())
    return float((found.double() - exact.double()).norm()) / norm if norm else 0.0


def _tried(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Callable[..., Tensor],
    layers: Layers,
    levels: tuple[float, ...],
) -> dict[str, list[list[_Trial]]]:
    """By layer: the trials of its calls, batch by batch."""
    copied = restore_(copy.deepcopy(model))
    example = batches[0][0] if isinstance(batches[0], tuple) else batches[0]
    plan = make_plan(copied, Exact(), layers, example=example)
    methods = {name: _Trying(levels) for name in plan.trained}
    apply_plan(copied, _with_methods(plan, methods))
    trials: dict[str, list[list[_Trial]]] = defaultdict(list)
    devices = {p.device for p in copied.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices), torch.enable_grad():
        for batch in batches:
            inputs, *targets = batch if isinstance(batch, tuple) else (batch,)
            loss(copied(inputs), *targets).backward()
            for name, method in methods.items():
                trials[name].append(list(method.found))
                method.found.clear()
    silent = [name for name, found in trials.items() if not all(found)]
    if silent:
        raise PlanError(f"No weight gradient reached layer {silent[0]}; the loss must depend on it.")
    return trials


def _with_methods(plan: Plan, methods: Mapping[str, Method]) -> Plan:
    rows = tuple(replace(row, method=methods.get(row.name, row.method)) for row in plan.rows)
    return replace(plan, rows=rows)


def _options(batches: list[list[_Trial]], levels: int) -> list[_Option]:
    """A layer's choices: mean ranks and errors over the batches; of several calls the largest ranks."""
    options = []
    for level in range(levels):
        calls = [trial for batch in batches for trial in batch]
        ranks = [tuple(map(max, zip(*(t.ranks[level] for t in batch), strict=True))) for batch in batches]
        mean = tuple(math.ceil(sum(column) / len(ranks)) for column in zip(*ranks, strict=True))
        error = sum(trial.errors[level] for trial in calls) / len(calls)
        options.append(_Option(mean, _bytes(max(batches, key=len), mean), error))
    return options


def _bytes(calls: Sequence[_Trial], ranks: Ranks) -> int:
    """What a layer keeps at these ranks; whole inputs where factors are not smaller."""
    kept = 0
    for call in calls:
        fitting = [min(rank, size) for rank, size in zip(ranks, call.shape, strict=True)]
        kept += call.element_bytes * min(stored_elements(call.shape, fitting), math.prod(call.shape))
    return kept


def _cheapest(options: Mapping[str, list[_Option]], budget: int) -> dict[str, _Option]:
    """One option per layer: the smallest sum of errors within the budget."""
    least = sum(min(option.bytes for option in own) for own in options.values())
    if least > budget:
        raise PlanError(
            f"A budget of {budget} bytes is too small: the least that these layers can keep is {least} bytes;"
            " give that much, smaller variances, or fewer layers."
        )
    sums: list[_Sum] = [(0, 0.0, ())]
    for own in options.values():
        least -= min(option.bytes for option in own)  # what the layers that are still to come need
        longer = [
            (kept + option.bytes, error + option.error, (*chosen, option))
            for kept, error, chosen in sums
            for option in own
            if kept + option.bytes + least <= budget
        ]
        sums = _thinned(_unbeaten(longer), budget / MOST_SUMS)
    return dict(zip(options, sums[-1][2], strict=True))


def _unbeaten(sums: list[_Sum]) -> list[_Sum]:
    """In ascending order of bytes and so in descending order of errors."""
    front: list[_Sum] = []
    for entry in sorted(sums, key=lambda entry: entry[:2]):
        if not front or entry[1] < front[-1][1]:
            front.append(entry)
    return front


def _thinned(sums: list[_Sum], step: float) -> list[_Sum]:
    """Of too many, the one with the fewest bytes in each step, so that the rest always fits."""
    if len(sums) <= MOST_SUMS:
        return sums
    return list({int(entry[0] / step): entry for entry in reversed(sums)}.values())[::-1]
