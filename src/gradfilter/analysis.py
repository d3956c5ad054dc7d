"""How far a plan's gradients are from the exact ones: layer by layer, on the user's own model and batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from .coarse import count_fallbacks, densify
from .errors import GradFilterError
from .geometry import ConvGeometry
from .grid import per_axis, pixels, pool
from .methods import Exact, Memory, Method
from .ops.exact_conv import Gradients, Want
from .ops.storage import Store
from .ops.walsh import Basis
from .plans import LayerPlan, Plan, table
from .surgery import apply_plan, restore_

__all__ = ["Analysis", "Comparison", "LayerAnalysis", "analyze"]

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Comparison:
    """A gradient against the exact one: cosine, 20 log10(|exact| / |error|), and the ratio of their norms."""

    cosine: float
    snr_db: float
    norm_ratio: float


@dataclass(frozen=True)
class LayerAnalysis:
    """One trained layer; None where there is nothing to compare (no such gradient, or an exact one of zero).

    weight: the weight gradient; that of an adapter is what a step along its gradients does to the weight that
        it can be merged into.
    output: the gradient that arrives at the layer's output, with the error of all later layers in it.
    input: the gradient that leaves the layer's input, with its own error added.
    dc_energy: how much of the energy of the exact output gradient is in its patch means, or in the
        coefficients of a method that keeps more; the rest is lost.
    """

    name: str
    method: Method
    weight: Comparison | None
    output: Comparison | None
    input: Comparison | None
    dc_energy: float | None


@dataclass(frozen=True)
class Analysis:
    """``rows`` has the trained layers in the order of the backward, so that the error is seen to grow.

    fallbacks: how often, by operator, a gradient left the grid because the operator knows none.
    """

    rows: tuple[LayerAnalysis, ...]
    fallbacks: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        head = ["layer", "method", "DC energy"]
        for gradient in ("weight", "output", "input"):
            head += [f"{gradient} cosine", "dB", "norm"]
        seen = ", ".join(f"{operator} {count}x" for operator, count in self.fallbacks.items())
        return f"{table([head, *map(_cells, self.rows)])}\n\nfallbacks to dense gradients: {seen or 'none'}"


def analyze(model: nn.Module, batch: Any, loss: Loss, plan: Plan) -> Analysis:
    """Run one batch exactly and as planned, and compare the gradients of every trained layer.

    batch: inputs, or a pair (inputs, targets). loss: called with the model's output, and with the targets if
    there are any; returns one number. The model is copied: its weights, gradients and mode stay as they are.
    Both runs draw the same random numbers, and the caller's generator does not notice.

    >>> import gradfilter as gf
    >>> model = gf.models.build("tiny")
    >>> plan = gf.plan(model, gf.GradientFilter(patch=1), "last:2")
    >>> x, y = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    >>> found = gf.analyze(model, (x, y), nn.functional.cross_entropy, plan)
    >>> [(row.name, round(row.weight.cosine, 6)) for row in found.rows]
    [('head', 1.0), ('inverted.body.2.0', 1.0), ('inverted.body.1.0', 1.0)]
    """
    exact = _run(model, batch, loss, plan, exactly=True)
    with count_fallbacks() as fallbacks:
        planned = _run(model, batch, loss, plan, exactly=False)
    methods = {row.name: row.method for row in plan.rows}
    rows = tuple(
        _compare(name, methods[name], record, planned[name])
        for name, record in exact.items()
        if record.arrived
    )
    return Analysis(rows, dict(fallbacks))


@dataclass(eq=False)
class _Record:
    """The gradients of one layer in one backward; those of its maps one per call of the layer."""

    arrived: list[Tensor] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    geometries: list[ConvGeometry] = field(default_factory=list)
    weight: Tensor | None = None
    time: int = -1  # when the last gradient arrived


@dataclass(frozen=True, eq=False)
class _Recording(Method):
    """A method that does what another one does, and notes what passes through it."""

    method: Method
    record: _Record
    clock: Iterator[int]
    tokens: tuple[int, int] | None
    store: Store
    trains: frozenset[str]
    trains_norm: bool
    adds_parameters: bool

    def patches(self, geometry: ConvGeometry) -> tuple[int, ...]:
        return self._fitting(geometry).patches(geometry)

    def basis(self, geometry: ConvGeometry) -> Basis | None:
        return self._fitting(geometry).basis(geometry)

    def forward(self, run: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.method.forward(run, x, weight, bias)

    def prepare(self, name: str, module: nn.Module, memory: Memory) -> None:
        self.method.prepare(name, module, memory)

    def added(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        return self.method.added(name, module)

    def adapt(self, y: Tensor, x: Tensor, run: Callable[..., Tensor], module: nn.Module) -> Tensor:
        return self.method.adapt(y, x, run, module)

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        return self._fitting(geometry).keep(x, geometry, memory)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        result = self._fitting(geometry).gradients(grad, kept, weight, geometry, want)
        self.record.time = next(self.clock)
        self.record.arrived.append(grad)
        self.record.geometries.append(geometry)
        if result.x is not None:
            self.record.left.append(result.x)
        return result

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        return self._fitting(geometry).backward_macs(geometry, want)

    def _fitting(self, geometry: ConvGeometry) -> Method:
        """A layer uses the exact method where its own refuses; here that is for us to do."""
        return Exact() if self.method.refuses(geometry) else self.method


def _run(model: nn.Module, batch: Any, loss: Loss, plan: Plan, *, exactly: bool) -> dict[str, _Record]:
    """One forward and backward of a copy: a record by trained layer, in the order of the backward."""
    copied = restore_(copy.deepcopy(model))
    copied.zero_grad(set_to_none=True)
    records, clock = {name: _Record() for name in plan.trained}, count()
    rows = tuple(_recorded(row, records.get(row.name), clock, exactly) for row in plan.rows)
    apply_plan(copied, replace(plan, rows=rows))
    devices = {p.device for p in copied.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.autograd.backward(_scalar_loss(copied, batch, loss))
    methods = {row.name: row.method for row in plan.rows}
    for name, record in records.items():
        method = Exact() if exactly else methods[name]
        record.weight = _weight_gradient(copied.get_submodule(name), method)
    return dict(sorted(records.items(), key=lambda item: item[1].time))


def _weight_gradient(layer: nn.Module, method: Method) -> Tensor | None:
    """See LayerAnalysis. The layer is not what it was afterwards."""
    weight = layer._parameters.get("weight")
    if weight is None or not method.adds_parameters:
        return None if weight is None else weight.grad
    with torch.no_grad():
        weight.zero_()
        for name, parameter in layer.named_parameters(recurse=False):
            if name.startswith("gradfilter_") and parameter.grad is not None:
                parameter.add_(parameter.grad)
    return method.merged(layer)


def _recorded(row: LayerPlan, record: _Record | None, clock: Iterator[int], exactly: bool) -> LayerPlan:
    method = Exact() if exactly else row.method
    if record is not None:
        same = (method.store, method.trains, method.trains_norm, method.adds_parameters)
        method = _Recording(method, record, clock, row.method.tokens, *same)
    return replace(row, method=method)


def _scalar_loss(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    inputs, *targets = batch if isinstance(batch, tuple | list) else (batch,)
    if not isinstance(inputs, Tensor) or len(targets) > 1:
        raise GradFilterError("The batch to analyze must be an input tensor, or a pair (inputs, targets).")
    value = loss(model(inputs), *targets)
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
        raise GradFilterError(
            "The loss to analyze must return one number that depends on the model, as "
            f"torch.nn.functional.cross_entropy does; it returned {_described(value)}."
        )
    return value


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")


def _compare(name: str, method: Method, exact: _Record, planned: _Record) -> LayerAnalysis:
    return LayerAnalysis(
        name,
        method,
        weight=_comparison([planned.weight], [exact.weight]),
        output=_comparison(planned.arrived, exact.arrived),
        input=_comparison(planned.left, exact.left),
        dc_energy=_dc_energy(method, exact),
    )


def _comparison(planned: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> Comparison | None:
    product = error = norm = exact_norm = 0.0
    if len(planned) != len(exact):  # where only a bias or an adapter trains, nothing may have asked for it
        return None
    for approximate, true in zip(planned, exact, strict=True):
        if approximate is None or true is None:
            return None
        a, b = densify(approximate).double(), densify(true).double()
        product += float((a * b).sum())
        error += float((a - b).square().sum())
        norm += float(a.square().sum())
        exact_norm += float(b.square().sum())
    if exact_norm == 0:
        return None
    cosine = product / math.sqrt(norm * exact_norm) if norm else 0.0
    snr_db = 10 * math.log10(exact_norm / error) if error else math.inf
    return Comparison(cosine, snr_db, math.sqrt(norm / exact_norm))


def _dc_energy(method: Method, exact: _Record) -> float | None:
    """The share of the energy that is in patch means, or in coefficients; all of it for other methods."""
    kept = total = 0.0
    for grad, geometry in zip(exact.arrived, exact.geometries, strict=True):
        full = densify(grad).double()
        total += float(full.square().sum())
        basis = None if method.refuses(geometry) else method.basis(geometry)
        if basis is not None:
            kept += float(basis.analyse(full).square().sum())
            continue
        grid = geometry.output_grid(per_axis(getattr(method, "patch", 1), geometry.spatial))
        patch_means = pool(full, grid)
        kept += float((patch_means.square() * pixels(grid, patch_means)).sum())
    return kept / total if total else None


def _cells(row: LayerAnalysis) -> list[str]:
    cells = [row.name, str(row.method), "-" if row.dc_energy is None else f"{row.dc_energy:.3f}"]
    for found in (row.weight, row.output, row.input):
        if found is None:
            cells += ["-", "-", "-"]
        else:
            cells += [f"{found.cosine:.4f}", f"{found.snr_db:.1f}", f"{found.norm_ratio:.3f}"]
    return cells
