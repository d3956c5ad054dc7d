"""What a plan costs, from shapes alone: the model runs on torch's meta device, where tensors have no numbers.

Because the very code that keeps tensors in training runs here, its bytes are those of training, to the byte.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PlanError
from .geometry import ConvGeometry
from .methods import Exact, Method
from .modules import CONVOLUTIONS, LAYERS, NORMS, geometry_of
from .ops.exact_conv import Want
from .plans import LayerCost, NormPolicy, Plan
from .selection import Layers
from .surgery import apply_plan, make_plan, _trained_parameters

__all__ = ["cost", "kept_bytes", "plan"]


@dataclass
class _Trace:
    """What one forward pass did: layers in order, the shapes they read, bytes kept by module."""

    executed: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    needs: dict[str, Want] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def plan(
    model: nn.Module,
    method: Method,
    layers: Layers = "all",
    *,
    norm: NormPolicy = "fixed",
    example: Tensor | None = None,
) -> Plan:
    """What ``apply_`` would do: a table of every layer, its action and method.

    With an ``example`` input the layers are counted in the order they run and the table has costs: bytes kept
    and backward multiply-adds, exact backpropagation against the plan. Only the example's shape matters.

    norm: what happens to batch norms: "fixed" (statistics and affine stay), "affine" (scale and shift of trained
    layers' norms train) or "batch" (those also use and update batch statistics).

    >>> import gradfilter as gf
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    >>> gf.plan(model, gf.GradientFilter(patch=4), "last:1", example=torch.zeros(2, 3, 32, 32)).kept
    (65536, 4096)
    """
    if example is None:
        return make_plan(model, method, layers, norm=norm)
    trace = _trace(_on_meta(model), example, train_all=True)
    made = make_plan(model, method, layers, norm=norm, executed=trace.executed, shapes=trace.shapes)
    return cost(model, made, example)


def cost(model: nn.Module, plan: Plan, example: Tensor) -> Plan:
    """The plan with the costs of a batch like ``example``: bytes kept and multiply-adds of every layer.

    "Before" is exact backpropagation of the same layers in plain PyTorch with the model in eval mode.
    """
    plain = _on_meta(model).eval()
    trained = _trained_parameters(plain, plan)
    for parameter in plain.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    before = _trace(plain, example)
    after = _trace(apply_plan(_on_meta(model), plan), example)
    modules = dict(plain.named_modules())
    costs = {}
    for row in plan.rows:
        shape = before.shapes.get(row.name)
        geometry = None if shape is None else _geometry(modules[row.name], shape, row.method)
        want = before.needs.get(row.name, Want(False, False))
        costs[row.name] = (
            _layer_cost(before.kept[row.name], geometry, Exact(), want),
            _layer_cost(after.kept[row.name], geometry, row.method, want),
        )
    named = set(costs)
    other = tuple(
        LayerCost(kept=sum(b for n, b in t.kept.items() if n not in named)) for t in (before, after)
    )
    return plan.with_costs(costs, (other[0], other[1]))


def _layer_cost(kept: int, geometry: ConvGeometry | None, method: Method, want: Want) -> LayerCost:
    if geometry is None:
        return LayerCost(kept)
    return LayerCost(kept, geometry.macs, method.backward_macs(geometry, want))


def _geometry(module: nn.Module, shape: tuple[int, ...], method: Method) -> ConvGeometry:
    if isinstance(module, CONVOLUTIONS):
        spatial = len(module.kernel_size)
        return geometry_of(module, shape if len(shape) == spatial + 2 else (1, *shape))
    if len(shape) == 3 and method.tokens:
        shape = (shape[0], *method.tokens, shape[2])
    channels: int = module.out_features  # type: ignore[assignment]
    return ConvGeometry.pointwise((shape[0], shape[-1], *shape[1:-1]), channels)


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors have shapes but no memory."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        with torch.no_grad():
            shell = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(shell, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shell
        )
    return copy.deepcopy(model, memo)


def _trace(model: nn.Module, example: Tensor, train_all: bool = False) -> _Trace:
    """Run a model on the meta device and note what it does."""
    if not isinstance(example, Tensor):
        raise PlanError(f"example must be an input tensor of the model, not {type(example).__name__}.")
    if train_all:
        model.requires_grad_(True)
    trace, stack = _Trace(), [""]
    hooks = []
    for name, module in model.named_modules():
        hooks += _note(name, module, trace, stack)
    try:
        with _kept_by(stack, model) as kept:
            shell = torch.empty_like(example, device="meta", requires_grad=False)
            with torch.enable_grad():
                model(shell)
    except Exception as error:
        raise PlanError(
            f"The model could not be run on the shape {tuple(example.shape)} of the example "
            f"({str(error).splitlines()[0]}); give an input it accepts, or plan without an example."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    trace.kept.update(kept)
    return trace


def _note(name: str, module: nn.Module, trace: _Trace, stack: list[str]) -> list[Any]:
    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        stack.append(name)
        if isinstance(module, LAYERS) and args and isinstance(args[0], Tensor) and name not in trace.shapes:
            trace.executed.append(name)
            trace.shapes[name] = tuple(args[0].shape)
            trace.needs[name] = Want(args[0].requires_grad, module.weight.requires_grad)

    def leave(*_: Any) -> None:
        stack.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


@contextmanager
def _kept_by(stack: list[str], model: nn.Module | None) -> Iterator[dict[str, int]]:
    """Bytes of unique storages saved for the backward, by the module on top of ``stack``."""
    own = [*model.parameters(), *model.buffers()] if model is not None else []
    seen = {tensor.untyped_storage()._cdata: tensor for tensor in own}
    kept: dict[str, int] = defaultdict(int)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = tensor  # held, so that its address is not used again
            kept[stack[-1]] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@contextmanager
def kept_bytes(model: nn.Module | None = None) -> Iterator[dict[str, int]]:
    """Count the bytes that autograd keeps in the ``with`` block, as ``{"": bytes}`` once it has run.

    Unique storages are counted; the parameters and buffers of ``model`` are not.

    >>> x = torch.zeros(1000, requires_grad=True)
    >>> with kept_bytes() as kept:
    ...     _ = x.exp()
    >>> sum(kept.values())
    4000
    """
    with _kept_by([""], model) as kept:
        yield kept
