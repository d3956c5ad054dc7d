"""A faster way to run a model: traced once, convolutions fused with what follows, no graph where frozen.

The model stays the owner of every number: parameters, state dict and modules are what they were. Results
differ from the plain model's by rounding, or by that of int8 if asked for. What cannot be traced, or has
hooks, runs as ever.
"""

from __future__ import annotations

import hashlib
import weakref
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.nn.modules.module import _has_any_global_hook

from .allocator import keep_freed_memory
from .errors import GradFilterError
from .fusion import Known, Step, Values, describe, make_steps, run_steps
from .graphs import frozen_nodes, prefix_nodes, trace_module, why_untraceable
from .int8_prefix import Calibration, FeatureChange, Int8Prefix, check_serves
from .modules import RegionModule, region_class
from .plans import table
from .region import region

__all__ = ["Acceleration", "Program", "accelerate_", "accelerate_if_possible_", "acceleration", "has_hooks"]

Model = TypeVar("Model", bound=nn.Module)


def accelerate_(model: Model, *, prefix: Literal["float", "int8"] = "float", calibration: int = 4) -> Model:
    """Run the model fused from now on, trained layers included; returns the model. ``restore_`` undoes it.

    Batch norms with fixed statistics are folded into their convolutions, activations and residual sums run
    with them, and what is frozen before the first trained layer builds no graph. Where a model cannot be
    traced as a whole, the largest of its modules that can are. From then on the process keeps freed memory
    (allocator.py). Modules that are replaced later are not noticed: restore, change, accelerate again.
    ``acceleration`` tells what runs fused.

    >>> import gradfilter as gf
    >>> model = gf.apply_(gf.models.build("tiny"), gf.GradientFilter(patch=2), "last:2")
    >>> x = torch.randn(2, 3, 32, 32)
    >>> before = model(x)
    >>> torch.allclose(before, gf.accelerate_(model)(x), atol=1e-5)
    True

    Args:
        prefix: "int8" runs the convolutions before the first trained layer in int8, which is not exact:
            ``acceleration`` tells how far their features move. Where a gradient of the input is asked for,
            they run in float.
        calibration: how many calls of an int8 prefix run in float, to see the ranges of its maps. It begins
            anew when its weights change.
    """
    if any("gradfilter_program" in module.__dict__ for module in model.modules()):
        raise GradFilterError("The model is accelerated already; gf.restore_(model) undoes that.")
    if prefix not in ("float", "int8"):
        raise GradFilterError(f'prefix must be "float" or "int8", not {prefix!r}.')
    if prefix == "int8":
        _check_int8(model, calibration)
    if not _accelerate(model, calibration if prefix == "int8" else 0):
        raise GradFilterError(f"Nothing in {type(model).__name__} can be traced: {why_untraceable(model)}")
    keep_freed_memory()
    return model


def _check_int8(model: nn.Module, calibration: int) -> None:
    if not isinstance(calibration, int) or calibration < 1:
        raise GradFilterError(f"calibration must be a whole number of at least 1, not {calibration!r}.")
    if why := why_untraceable(model):
        raise GradFilterError(
            f"{type(model).__name__} can have no int8 prefix, because it cannot be traced as a whole: {why}"
        )
    graph, modules = trace_module(model), dict(model.named_modules())
    called = [modules[str(node.target)] for node in prefix_nodes(graph, modules) if node.op == "call_module"]
    check_serves([module for module in called if isinstance(module, nn.Conv2d)])


def _accelerate(module: nn.Module, calibration: int) -> bool:
    """This module if it can be traced, else the largest of its parts that can."""
    if not any(module.children()) or "gradfilter_program" in module.__dict__:
        return False
    if why_untraceable(module):
        done = [_accelerate(child, calibration) for child in module.children()]
        return any(done)
    module.__dict__["gradfilter_program"] = Program(calibration)
    base: Any = type(module)
    module.__class__ = region_class(base, Accelerated)
    return True


class Acceleration(NamedTuple):
    """One row per convolution of an accelerated model: its name, what runs with it, and why no more does.

    int8: what is to be said of an int8 prefix; features: how far it moves them, if it is calibrated.
    """

    rows: list[list[str]]
    int8: str = ""
    features: FeatureChange | None = None

    def __str__(self) -> str:
        rows = table([["layer", "runs as", "why no more"], *self.rows])
        return f"{rows}\n{self.int8}" if self.int8 else rows


def accelerate_if_possible_(model: nn.Module) -> None:
    """As ``accelerate_``; what cannot be traced, or is accelerated already, stays as it is."""
    with suppress(GradFilterError):
        accelerate_(model)


def acceleration(model: nn.Module) -> Acceleration:
    """What runs fused in an accelerated model, and what could not be.

    >>> import gradfilter as gf
    >>> model = nn.Sequential(
    ...     nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding="same")
    ... )
    >>> print(gf.acceleration(gf.accelerate_(model.eval().requires_grad_(False))))
    layer  runs as             why no more
    0      conv + norm + relu
    3      conv                padding='same'
    """
    rows = []
    for name, module in model.named_modules():
        if "gradfilter_program" in module.__dict__:
            found = _describe(module)
            rows += [[f"{name}.{row[0]}" if name else row[0], *row[1:]] for row in found]
    if not rows:
        raise GradFilterError("The model is not accelerated; call gf.accelerate_ first.")
    whole = model.__dict__.get("gradfilter_program")
    int8: Calibration | None = whole and whole.calibration
    return Acceleration(rows, str(int8), int8.change) if int8 else Acceleration(rows)


def _describe(module: nn.Module) -> list[list[str]]:
    graph, modules = trace_module(module), dict(module.named_modules())
    int8: Calibration | None = module.__dict__["gradfilter_program"].calibration
    if int8 is None:
        return describe(graph, modules, frozen_nodes(graph, modules, set()))
    prefix = prefix_nodes(graph, modules)
    return describe(graph, modules, prefix, apart=prefix, in_int8=int8.kept)


class Accelerated(RegionModule):
    """A module whose forward runs its program."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        program: Program = module.__dict__["gradfilter_program"]
        ready = None if torch.compiler.is_compiling() else program.ready(module, args, kwargs)
        if ready is None:
            return module.gradfilter_base.forward(self, *args, **kwargs)
        return ready.run(dict(zip(ready.inputs, args, strict=True)))


@dataclass
class Ready:
    """The steps for one way of calling: what is frozen then, and what is not."""

    graph: Graph
    modules: dict[str, Any]
    frozen: list[Node]
    prefix: list[Step]
    tail: list[Step]
    calibration: Calibration | None

    def __post_init__(self) -> None:
        self.inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.output = next(iter(reversed(self.graph.nodes)))
        self.has_methods = any(hasattr(module, "gradfilter_method") for module in self.modules.values())
        made = {*self.inputs, *(step.node for step in self.prefix)}
        read = [node for step in self.tail for node in step.reads] + self.output.all_input_nodes
        self.border = [node for node in dict.fromkeys(read) if node in made]
        self._int8 = self.calibration and Int8Prefix(self.prefix, self.border, self.calibration)

    def run(self, values: Values) -> Any:
        self.run_prefix(values)
        return self.run_tail(values)

    def run_prefix(self, values: Values) -> None:
        with torch.no_grad():
            if self._int8:
                self._int8.run(values)
            else:
                run_steps(self.prefix, values)

    def run_tail(self, values: Values) -> Any:
        with region() if self.has_methods and torch.is_grad_enabled() else nullcontext():
            run_steps(self.tail, values)
        return _filled(self.output.args[0], values)

    def prefix_tensors(self) -> list[Tensor]:
        loose = [step.run() for step in self.prefix if step.node.op == "get_attr"]
        owned = [t for _, m in self._owners() if m for t in (*m.parameters(), *m.buffers())]
        return owned + loose

    def signature(self) -> str:
        lines = [f"{node.format_node()} {module} {_settings(module)}" for node, module in self._owners()]
        lines += self.calibration.signature() if self.calibration else []
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _owners(self) -> list[tuple[Node, Any]]:
        """The frozen nodes, each with the module it calls, if any."""
        return [(n, self.modules[str(n.target)] if n.op == "call_module" else None) for n in self.frozen]


def _settings(module: nn.Module | None) -> dict[str, Any]:
    """What a module was made with: its own description may leave some of it out."""
    plain = (bool, int, float, str, tuple, type(None))
    entries = {} if module is None else vars(module)
    return {
        name: value
        for name, value in sorted(entries.items())
        if name != "training" and not name.startswith(("_", "gradfilter_")) and isinstance(value, plain)
    }


def _filled(value: Any, values: Values) -> Any:
    """What a forward returns; torch.fx itself would give lists and dicts that cannot be changed."""
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, list):
        return [_filled(v, values) for v in value]
    if isinstance(value, dict):
        return {key: _filled(v, values) for key, v in value.items()}
    return (
        tuple(_filled(v, values) for v in value)
        if type(value) is tuple
        else map_arg(value, values.__getitem__)
    )


_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")


class Program:
    """A module's traces and steps, made when they are first needed; a copy starts anew.

    calls: those that calibrate an int8 prefix; without one if there are none.
    """

    def __init__(self, calls: int = 0) -> None:
        self.calibration = Calibration(calls) if calls else None
        self._ready: dict[Any, Ready] = {}
        self._fused: Known = {}
        self._owner: weakref.ref[nn.Module] | None = None
        self._modules: list[nn.Module] = []
        self._parameters: list[dict[str, Any]] = []
        self._hooks: list[Any] = []

    def __deepcopy__(self, memo: Any) -> Program:
        return Program(*self.__reduce__()[1])

    def __reduce__(self) -> Any:
        return Program, (self.calibration.calls if self.calibration else 0,)

    def check_calibrated(self) -> None:
        if self.calibration:
            self.calibration.check_complete()

    def ready(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready | None:
        """The steps for such a call; None where the module's own forward has to run."""
        if self._owner is None:
            self._owner, self._modules = weakref.ref(module), list(module.modules())
            self._parameters = [m._parameters for m in self._modules]
            self._hooks = _hooks(self._modules[1:])
        if self._owner() is not module or kwargs or any(self._hooks) or _has_any_global_hook():
            return None  # nn.DataParallel's replicas share this program, but not its modules
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            return None
        if not all(type(a) is Tensor for a in args) or _is_watched():
            return None
        parameters = chain.from_iterable(map(dict.values, self._parameters))
        key = (
            torch.is_grad_enabled() and tuple(map(_requires_grad, args)),
            tuple(map(_training, self._modules)),
            tuple([p is not None and p.requires_grad for p in parameters]),
        )
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = _make_ready(module, args, self.calibration, self._fused)
        return ready if len(ready.inputs) == len(args) else None


def _is_watched() -> bool:
    """Whether calls of torch's operators are recorded or transformed now: the native passes are none."""
    c: Any = torch._C
    return (
        c._get_tracing_state() is not None
        or c._functorch.peek_interpreter_stack() is not None
        or c._len_torch_dispatch_stack() > 0
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is to run when this very module is called, besides its forward."""
    return any(_hooks([module]))


def _hooks(modules: list[nn.Module]) -> list[Any]:
    """The dicts in which modules hold their hooks: as long as they are empty nobody looks on."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [module.__dict__[name] for module in modules for name in names]


def _make_ready(
    module: nn.Module, args: tuple[Any, ...], calibration: Calibration | None, known: Known
) -> Ready:
    graph = trace_module(module)
    modules: dict[str, Any] = dict(module.named_modules())
    given = [node for node in graph.nodes if node.op == "placeholder"]
    moving = {n for n, a in zip(given, args, strict=False) if torch.is_grad_enabled() and a.requires_grad}
    frozen = frozen_nodes(graph, modules, moving)
    apart = frozen & prefix_nodes(graph, modules) if calibration else set()
    steps = make_steps(graph, modules, frozen, apart, known)
    prefix = [step for step in steps if step.node in (apart if calibration else frozen)]
    ordered = [node for node in graph.nodes if node in frozen]
    return Ready(graph, modules, ordered, prefix, steps[len(prefix) :], calibration)
