"""Plan, apply, restore: give a model's layers a method, freeze the rest, and undo it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from inspect import unwrap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .calls import conv_geometry
from .errors import PlanError, nearest
from .geometry import ConvGeometry
from .methods import Exact, Memory, Method
from .modules import (
    BATCH_NORMS,
    LAYERS,
    NORMS,
    AdaptedLayer,
    FixedNorm,
    RegionLayer,
    RegionModule,
    region_class,
    role_of,
)
from .ops.blocks import Blocks
from .ops.storage import STORES
from .plans import DOES_NOT_RUN, Action, LayerPlan, NormPolicy, Plan
from .selection import Layer, Layers, layers_of, select
from .trace import Trace, trace

__all__ = ["Methods", "apply_", "apply_plan", "has_plan", "make_plan", "restore_", "trained_parameters"]

Model = TypeVar("Model", bound=nn.Module)
Methods = Method | Mapping[str, Method]
_RECORD = "gradfilter_record"


def make_plan(
    model: nn.Module,
    method: Methods,
    layers: Layers = "all",
    *,
    norm: NormPolicy = "fixed",
    example: Tensor | None = None,
) -> Plan:
    """A plan without costs."""
    _check(model, method, norm)
    seen = None
    if example is not None:
        tokens = partial(_tokens, method)
        seen = trace(model, example, lambda copied: copied.requires_grad_(True), tokens)
    found = layers_of(model, seen)
    selected = {layer.name for layer in select(found, layers)}
    if isinstance(method, Mapping):
        _check_patterns(method, [layer.name for layer in found], selected)
    methods = {layer.name: _method_for(method, layer.name, layer.name in selected) for layer in found}
    reasons = {
        layer.name: _why_idle(model, layer, methods[layer.name], seen)
        for layer in found
        if layer.name in selected
    }
    idle = {name: why for name, why in reasons.items() if why is not None}
    chosen = selected - idle.keys()
    if not chosen:
        raise PlanError(_nothing_trains(idle))
    rows, reached = [], False
    for layer in found:
        reached = reached or layer.name in chosen
        row = _row(layer, methods[layer.name], layer.name in chosen, reached)
        rows.append(replace(row, reason=row.reason or idle.get(layer.name, "")))
    owners = {name for name in chosen if norm != "fixed" or methods[name].trains_norm}
    if norm == "batch" and any(methods[name].trains_norm for name in owners):
        raise PlanError("NormOnly leaves the statistics of norms as they are; use norm='fixed' with it.")
    return Plan(tuple(rows), norm, _norms_behind(model, owners, seen) if owners else ())


def _check_patterns(methods: Mapping[str, Method], names: Sequence[str], selected: set[str]) -> None:
    """Every pattern must have a layer that is its own, and not frozen; '*' is for whatever is left."""
    left = list(names)
    frozen = set(names[: next(i for i, name in enumerate(names) if name in selected)])
    for pattern, method in methods.items():
        own = [name for name in left if fnmatchcase(name, pattern)]
        left = [name for name in left if name not in own]
        if pattern == "*" or any(name not in frozen for name in own):
            continue
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PlanError(f"No layer matches {pattern!r} of the methods.{nearest(pattern, names)}")
        if not own:
            raise PlanError(
                f"All layers of {pattern!r} have the method of a pattern before it; put it first."
            )
        if method.trains or method.trains_norm or method.adds_parameters:
            raise PlanError(
                f"The layers of {pattern!r} are frozen, so that their {type(method).__name__} does nothing; "
                "select one of them to train, or drop the pattern."
            )


def _why_idle(model: nn.Module, layer: Layer, method: Method, seen: Trace | None) -> str | None:
    """Why nothing of a selected layer trains; None if something does, "" if it is not meant to."""
    parts = {_part(name) for name, _ in layer.module.named_parameters()}
    if method.adds_parameters or method.trains & parts:
        return None
    if method.trains_norm and _norms_behind(model, {layer.name}, seen):
        return None
    missing = "norm behind it" if method.trains_norm else " or ".join(sorted(method.trains))
    return f"has no {missing}; nothing of it trains" if missing else ""


def _nothing_trains(idle: dict[str, str]) -> str:
    name = next((name for name, why in idle.items() if why), next(iter(idle)))
    why = f"layer {name} {idle[name].partition(';')[0]}" if idle[name] else f"layer {name} is frozen"
    return (
        f"Nothing would train: {why}, for example; give a layer another method, as {{'{name}': gf.Exact()}}."
    )


def _method_for(method: Methods, name: str, chosen: bool) -> Method:
    """The method of one layer, where a mapping gives them by glob; the first that matches."""
    if isinstance(method, Method):
        return method
    for pattern, own in method.items():
        if fnmatchcase(name, pattern):
            return own
    if chosen:
        raise PlanError(
            f"No pattern of the methods matches layer {name}; add '*' with a method for the rest."
        )
    return Exact()


def _tokens(method: Methods, name: str) -> tuple[int, int] | None:
    return _method_for(method, name, False).tokens


def _check(model: nn.Module, method: Methods, norm: str) -> None:
    if not isinstance(model, nn.Module):
        raise PlanError(f"A plan needs a torch.nn.Module, not {type(model).__name__}.")
    for own in method.values() if isinstance(method, Mapping) and method else [method]:
        if not isinstance(own, Method):
            raise PlanError(f"A plan needs a method such as gf.GradientFilter(patch=2), not {own!r}.")
        if not isinstance(own.store, Blocks) and own.store not in STORES:
            raise PlanError(f"store must be {' or '.join(map(repr, STORES))}, not {own.store!r}.")
    if norm not in ("fixed", "affine", "batch"):
        raise PlanError(f"norm must be 'fixed', 'affine' or 'batch', not {norm!r}.")
    _check_unchanged(model)


def has_plan(model: nn.Module) -> bool:
    """Whether a plan is applied to the model, or to a part of it."""
    return any(_RECORD in module.__dict__ for module in model.modules())


def _check_unchanged(model: nn.Module) -> None:
    if has_plan(model):
        raise PlanError("The model has a plan applied already; call gf.restore_(model) first.")


def _row(layer: Layer, method: Method, chosen: bool, reached: bool) -> LayerPlan:
    kind = type(layer.module).__name__
    if not layer.runs:
        return LayerPlan(layer.name, kind, "frozen", Exact(), DOES_NOT_RUN)
    if not reached:
        return LayerPlan(layer.name, kind, "frozen", Exact())
    action: Action = "train" if chosen else "pass"
    geometries = _geometries(layer)
    own = method if any(map(method.refuses, geometries)) else _of_layer(method, layer.name, chosen)
    reason = next(filter(None, map(own.refuses, geometries)), "") or (_misfits(layer, own) if chosen else "")
    stays_exact = reason or (own.adds_parameters and not chosen)
    return LayerPlan(layer.name, kind, action, Exact() if stays_exact else own, reason)


def _of_layer(method: Method, name: str, chosen: bool) -> Method:
    """As it is set for this layer; one that only passes gradients on, and has no setting, is exact."""
    try:
        return method.for_layer(name)
    except PlanError:
        if chosen:
            raise
        return Exact()


def _misfits(layer: Layer, method: Method) -> str:
    try:
        return method.misfits(layer.module) or ""
    except PlanError as error:
        raise PlanError(f"Layer {layer.name}: {error}") from None


def _geometries(layer: Layer) -> list[ConvGeometry]:
    """Those of the layer's calls; where they are not known, one of a likely size."""
    conv: Any = layer.module
    if layer.calls:
        return [call.geometry for call in layer.calls]
    if isinstance(conv, nn.Linear):  # a head is known to read plain features
        return [ConvGeometry.pointwise((1, conv.in_features), conv.out_features)] if layer.head else []
    shape = (1, conv.in_channels, *[64] * len(conv.kernel_size))
    output_padding = conv.output_padding if conv.transposed else None
    padding = conv.padding if conv.padding_mode == "zeros" else 0  # other padding is done before the call
    settings = (conv.stride, padding, conv.dilation, conv.groups, output_padding)
    return [conv_geometry(shape, conv.out_channels, conv.kernel_size, *settings)]


def _norms_behind(model: nn.Module, trained: set[str], seen: Trace | None) -> tuple[str, ...]:
    """The norms that belong to trained layers: those that run behind one and before the next layer."""
    modules = dict(model.named_modules())
    names, owned = [], False
    for name in seen.executed if seen else modules:
        if isinstance(modules[name], LAYERS):
            owned = name in trained
        elif isinstance(modules[name], NORMS) and owned:
            names.append(name)
    return tuple(dict.fromkeys(names))


def trained_parameters(model: nn.Module, plan: Plan) -> set[int]:
    """The ids of the parameters that train."""
    modules = dict(model.named_modules())
    ids = {id(parameter) for name in plan.norms for parameter in modules[name].parameters()}
    for row in plan.rows:
        for name, parameter in modules[row.name].named_parameters() if row.action == "train" else ():
            if _part(name) in row.method.trains:
                ids.add(id(parameter))
    return ids


def _part(name: str) -> str:
    """Which part of a layer a parameter is; a reparametrised layer has others in place of its weight."""
    return "bias" if name == "bias" else "weight"


def apply_plan(model: Model, plan: Plan) -> Model:
    """Change the model as planned, or raise and leave it as it was."""
    modules = dict(model.named_modules())
    _check_unchanged(model)
    if any("gradfilter_program" in module.__dict__ for module in modules.values()):
        raise PlanError("The model is accelerated; call gf.restore_(model), apply, and accelerate it again.")
    _check_same_model(modules, plan)
    _check_changeable(modules)
    trained = trained_parameters(model, plan)
    planned = {row.name: row for row in plan.rows if row.action != "frozen"}
    moving = set(plan.norms) if plan.norm == "batch" else set()
    try:
        for name, module in modules.items():
            fixed = isinstance(module, BATCH_NORMS) and name not in moving
            trained |= _change(module, planned.get(name), fixed)
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
    except BaseException:
        restore_(model)
        raise
    return model


def _check_same_model(modules: dict[str, nn.Module], plan: Plan) -> None:
    theirs = {row.name: row.kind for row in plan.rows}
    ours = {name: type(module).__name__ for name, module in modules.items() if isinstance(module, LAYERS)}
    for name, kind in theirs.items():
        if name not in ours:
            raise PlanError(
                f"The plan is for another model: this one has no layer {name}.{nearest(name, ours)}"
            )
        if ours[name] != kind:
            raise PlanError(
                f"The plan is for another model: layer {name} is a {ours[name]} here, not a {kind}."
            )
    for name in ours:
        if name not in theirs:
            raise PlanError(
                f"The plan is for another model: it does not know layer {name}; plan for this one."
            )
    for name in plan.norms:
        if not isinstance(modules.get(name), NORMS):
            raise PlanError(f"The plan is for another model: this one has no norm {name}.")


def _check_changeable(modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"Module {name or 'model'} is compiled by torch.jit; use the model it was made from."
            )
        if isinstance(module, LAYERS) and "forward" in module.__dict__:
            raise PlanError(
                f"Layer {name} has its forward replaced on the object; undo that before gf.apply_."
            )


def _change(module: nn.Module, row: LayerPlan | None, fixed: bool) -> set[int]:
    """Give a module its new class and what belongs to it; the ids of the parameters this added."""
    base: Any = type(module)
    role: Any = FixedNorm if fixed else role_of(module)
    if row:
        role = AdaptedLayer if row.method.adds_parameters else RegionLayer
    if not isinstance(module, torch.fx.GraphModule):  # which writes to its class whenever its graph changes
        module.__class__ = region_class(base, role)
    flags = {name: p.requires_grad for name, p in module.named_parameters(recurse=False)}
    module.__dict__[_RECORD] = {"training": module.training, "requires_grad": flags}
    if fixed:
        module.training = False
    return _give_method(module, row) if row else set()


def _give_method(module: nn.Module, row: LayerPlan) -> set[int]:
    memory: Memory = {}
    module.__dict__.update(gradfilter_method=row.method, gradfilter_memory=memory)
    if row.action != "train":
        return set()
    with torch.no_grad():
        row.method.prepare(row.name, module, memory)
        added = {key: nn.Parameter(value) for key, value in row.method.added(row.name, module).items()}
    for key, parameter in added.items():
        module.register_parameter(f"gradfilter_{key}", parameter)
    return {id(parameter) for parameter in added.values()}


def restore_(model: Model) -> Model:
    """Give every module its own class, flags and mode back; returns the model.

    >>> import gradfilter as gf
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3))
    >>> type(gf.restore_(gf.apply_(model, gf.GradientFilter()))[0]) is nn.Conv2d
    True
    """
    for module in model.modules():
        if _has_a_forward_around_ours(module):
            del module.__dict__["forward"]
        if module.__dict__.pop("gradfilter_program", None) is not None:
            module.__class__ = module.gradfilter_base  # type: ignore[assignment]
    changed: list[Any] = [module for module in model.modules() if _RECORD in module.__dict__]
    for module in changed:
        record = module.__dict__[_RECORD]
        if isinstance(module, FixedNorm):
            module.__dict__["training"] = record["training"]
        for name, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(record["requires_grad"].get(name, parameter.requires_grad))
        for owner in (module.__dict__, module._parameters):
            for ours in [name for name in owner if name.startswith("gradfilter_")]:
                del owner[ours]
        module.__class__ = getattr(module, "gradfilter_base", type(module))
    return model


def _has_a_forward_around_ours(module: nn.Module) -> bool:
    """Whether somebody put one on the object, as accelerate does for bfloat16; without ours it fails."""
    own = module.__dict__.get("forward")
    innermost = unwrap(getattr(own, "__func__", own)) if callable(own) else None
    return isinstance(module, RegionModule) and innermost is type(module).forward


def apply_(
    model: Model,
    plan: Plan | Methods,
    layers: Layers | None = None,
    *,
    norm: NormPolicy | None = None,
    example: Tensor | None = None,
) -> Model:
    """Train the planned layers of a model with their methods and freeze the rest; returns the model.

    Give a plan, or a method and the layers to plan for ("all" if not said); methods can also be given by
    layer, as a dict from globs to methods, of which the first that matches counts. Only classes,
    ``requires_grad`` and the mode of batch norms change: parameters, state-dict keys and hooks stay, and
    adapters add theirs; ``restore_`` undoes it.

    >>> import gradfilter as gf
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    >>> _ = gf.apply_(model, gf.GradientFilter(patch=2), layers="last:1")
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['2.weight', '2.bias']
    """
    if not isinstance(plan, Plan):
        chosen = "all" if layers is None else layers
        return apply_plan(model, make_plan(model, plan, chosen, norm=norm or "fixed", example=example))
    if layers is not None or norm is not None or example is not None:
        raise PlanError(
            "A plan has its layers, norm policy and example already; give them to gf.plan instead."
        )
    return apply_plan(model, plan)
