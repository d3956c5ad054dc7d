"""Plan, apply, restore: give a model's layers a method, freeze the rest, and undo it all."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from .errors import PlanError, nearest
from .methods import Exact, Method
from .modules import LAYERS, NORMS, FixedNorm, RegionLayer, RegionModule, geometry_of, region_class, role_of
from .plans import LayerPlan, NormPolicy, Plan
from .selection import Layer, Layers, layers_of, select

__all__ = ["apply_", "is_applied", "make_plan", "restore_"]

Model = TypeVar("Model", bound=nn.Module)
_RECORD = "gradfilter_record"


def make_plan(
    model: nn.Module,
    method: Method,
    layers: Layers = "all",
    *,
    norm: NormPolicy = "fixed",
    executed: list[str] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> Plan:
    """A plan without costs; ``executed`` and ``shapes`` (inputs by layer) come from a traced example."""
    _check(model, method, norm)
    shapes = shapes or {}
    found = layers_of(model, executed, [name for name, shape in shapes.items() if len(shape) == 2])
    chosen = {layer.name for layer in select(found, layers)}
    rows, reached = [], False
    for layer in found:
        reached = reached or layer.name in chosen
        rows.append(_row(layer, method, layer.name in chosen, reached, shapes.get(layer.name)))
    return Plan(tuple(rows), norm)


def _check(model: nn.Module, method: Method, norm: str) -> None:
    if not isinstance(model, nn.Module):
        raise PlanError(f"A plan needs a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(method, Method):
        raise PlanError(f"A plan needs a method such as gf.GradientFilter(patch=2), not {method!r}.")
    if norm not in ("fixed", "affine", "batch"):
        raise PlanError(f"norm must be 'fixed', 'affine' or 'batch', not {norm!r}.")
    if is_applied(model):
        raise PlanError(
            "The model has a plan applied already; call gf.restore_(model) before planning again."
        )


def _row(
    layer: Layer, method: Method, chosen: bool, reached: bool, shape: tuple[int, ...] | None
) -> LayerPlan:
    kind = type(layer.module).__name__
    if not reached:
        return LayerPlan(layer.name, kind, "frozen", Exact())
    own = method.for_layer(layer.name)
    reason = _why_exact(layer, own, shape)
    return LayerPlan(layer.name, kind, "train" if chosen else "pass", Exact() if reason else own, reason)


def _why_exact(layer: Layer, method: Method, shape: tuple[int, ...] | None) -> str:
    if isinstance(method, Exact):
        return ""
    if isinstance(layer.module, nn.Linear):
        if layer.head:
            return "plain features have no map"
        if shape and len(shape) == 3 and not method.tokens:
            return "tokens without a known map; set tokens=(H, W)"
        return "plain features have no map" if shape and len(shape) == 2 else ""
    if shape is None:
        shape = (1, layer.module.in_channels, *[64] * len(layer.module.kernel_size))  # type: ignore[attr-defined,arg-type]
    return method.refuses(geometry_of(layer.module, _batched(shape, layer.module))) or ""


def _batched(shape: tuple[int, ...], module: nn.Module) -> tuple[int, ...]:
    spatial = len(module.kernel_size)  # type: ignore[arg-type]
    return shape if len(shape) == spatial + 2 else (1, *shape)


def is_applied(model: nn.Module) -> bool:
    """Whether the model, or a part of it, has a plan applied."""
    return any(isinstance(module, RegionModule) for module in model.modules())


def apply_plan(model: Model, plan: Plan) -> Model:
    """Change the model as planned, or raise and leave it as it was."""
    modules = dict(model.named_modules())
    missing = [row.name for row in plan.rows if not isinstance(modules.get(row.name), LAYERS)]
    if missing:
        raise PlanError(
            f"The plan is for another model: it has no layer {missing[0]}.{nearest(missing[0], modules)}"
        )
    if is_applied(model):
        raise PlanError("The model has a plan applied already; call gf.restore_(model) first.")
    refused = [name for name, m in modules.items() if "forward" in m.__dict__ and isinstance(m, LAYERS)]
    if refused:
        raise PlanError(
            f"Layer {refused[0]} has its forward replaced on the object; undo that before gf.apply_."
        )
    trained = _trained_parameters(model, plan)
    methods = {row.name: row.method for row in plan.rows if row.action != "frozen"}
    fixed = {name for name in modules if isinstance(modules[name], NORMS)} - _region_norms(model, plan)
    if plan.norm != "batch":
        fixed = {name for name in modules if isinstance(modules[name], NORMS)}
    for name, module in modules.items():
        _change(module, methods.get(name), name in fixed, trained)
    return model


def _change(module: nn.Module, method: Method | None, fixed: bool, trained: set[int]) -> None:
    own = dict(module.named_parameters(recurse=False))
    record = {"training": module.training, "requires_grad": {n: p.requires_grad for n, p in own.items()}}
    module.__dict__[_RECORD] = record
    for parameter in own.values():
        parameter.requires_grad_(id(parameter) in trained)
    role = RegionLayer if method else FixedNorm if fixed else role_of(module)
    if method:
        module.__dict__["gradfilter_method"] = method
    module.__class__ = region_class(type(module), role)
    if fixed:
        module.train(False)


def _region_norms(model: nn.Module, plan: Plan) -> set[str]:
    """Batch norms that belong to a trained layer: those registered behind it and before the next layer."""
    trained, names, owner = set(plan.trained), set(), False
    for name, module in model.named_modules():
        if isinstance(module, LAYERS):
            owner = name in trained
        elif isinstance(module, NORMS) and owner:
            names.add(name)
    return names


def _trained_parameters(model: nn.Module, plan: Plan) -> set[int]:
    names = set(plan.trained)
    if plan.norm != "fixed":
        names |= _region_norms(model, plan)
    return {
        id(parameter)
        for name, module in model.named_modules()
        if name in names
        for parameter in module.parameters(recurse=False)
    }


def restore_(model: Model) -> Model:
    """Give every module its own class, flags and mode back; returns the model.

    >>> import gradfilter as gf
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3))
    >>> type(gf.restore_(gf.apply_(model, gf.GradientFilter()))[0]) is nn.Conv2d
    True
    """
    for module in model.modules():
        if not isinstance(module, RegionModule):
            continue
        record: dict[str, Any] = module.__dict__.pop(_RECORD)
        for leftover in ("gradfilter_method", "gradfilter_scale", "gradfilter_followers"):
            module.__dict__.pop(leftover, None)
        module.__class__ = module.gradfilter_base
        if isinstance(module, NORMS):
            module.training = record["training"]
        for name, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(record["requires_grad"].get(name, parameter.requires_grad))
    return model


def apply_(
    model: Model,
    plan: Plan | Method,
    layers: Layers | None = None,
    *,
    norm: NormPolicy | None = None,
    example: Tensor | None = None,
) -> Model:
    """Train the planned layers of a model with their methods and freeze the rest; returns the model.

    Give a plan, or a method and the layers to plan for ("all" if not said). Only classes, ``requires_grad`` and
    the mode of batch norms change: parameters, state-dict keys and hooks stay, and ``restore_`` undoes it.

    >>> import gradfilter as gf
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    >>> _ = gf.apply_(model, gf.GradientFilter(patch=2), layers="last:1")
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['2.weight', '2.bias']
    """
    if isinstance(plan, Plan):
        if layers is not None or norm is not None:
            raise PlanError("A plan has its layers and norm policy already; give them to gf.plan instead.")
        return apply_plan(model, plan)
    from .costs import plan as plan_with_example

    made = plan_with_example(
        model, plan, "all" if layers is None else layers, norm=norm or "fixed", example=example
    )
    return apply_plan(model, made)
