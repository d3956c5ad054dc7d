"""One way to take a training step: forward and loss, backward, clipping and optimizer.

An arm is a way to train, and what is added to it:

- ``inference``: no training; ``exact-all``: plain PyTorch, all layers; ``exact``: plain PyTorch, the selected
  layers; ``filter``: the selected layers with ``GradientFilter``, or the method that is asked for;
- ``+prefix``: with ``gf.accelerate_``; ``+int8``: with that and its int8 prefix; ``+cache``: from
  the features of the frozen prefix, computed before.

Every model is in eval mode and channels-last, so batch norms are fixed and dropout is off in all arms.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from ..costs import kept_bytes, plan
from ..errors import GradFilterError
from ..methods import Exact, GradientFilter, Method
from ..methods.text import method_from
from ..models import build
from ..outputs import scores_of
from ..plans import DOES_NOT_RUN, Plan, format_bytes
from ..surgery import apply_
from .baseline import train_plainly_
from .environment import available_memory, device_named, wait_for
from .timing import seconds

__all__ = ["CLIP", "Arm", "Case", "Settings", "Times", "facts", "method_in"]

CLIP = 2.0
WARM, TIMED = 0.1, 0.2  # seconds of untimed and of timed steps per turn, one step at least


@dataclass(frozen=True)
class Settings:
    """What is measured: a model by name, the layers that train and how, and the batch."""

    model: str
    layers: str = "last:4"
    patch: int = 2
    taps: Literal["overlap", "collapse"] = "overlap"
    method: str | None = None  # as text; another one than GradientFilter with the two above
    batch: int = 8
    size: int = 224
    classes: int | None = None
    weights: str | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    threads: int = 2
    rounds: int = 31

    @property
    def chosen_method(self) -> Method:
        return method_from(self.method) if self.method else GradientFilter(self.patch, self.taps)

    @contextmanager
    def in_memory(self, arm: str) -> Iterator[None]:
        """Say in one sentence that memory has run out in the block."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            words = ("can't allocate memory", "out of memory", "not enough memory", "overflowed")
            if isinstance(error, MemoryError) or any(word in str(error).lower() for word in words):
                raise self.too_large(arm) from None
            raise

    def too_large(self, arm: str, detail: str = "") -> GradFilterError:
        return GradFilterError(
            f"Batch {self.batch} at {self.size} px is too large for the memory here, in arm {arm}{detail}; "
            "try a smaller --batch or --size, or leave the arm out with --arms."
        )


def method_in(settings: Mapping[str, Any]) -> str:
    """What the filtered arms of a record do, in words."""
    named: str = settings.get("method", "")
    return named or f"patch {settings['patch']} ({settings['taps']})"


class Case:
    """What all arms share: the model, the batch and the plans."""

    def __init__(self, settings: Settings) -> None:
        s = settings
        torch.set_num_threads(s.threads)
        torch.manual_seed(0)
        device, dtype = device_named(s.device), getattr(torch, s.dtype)
        self.settings, self.device = s, device
        model: Any = build(s.model, classes=s.classes, weights=s.weights)
        self.model: nn.Module = model.eval().to(device, dtype, memory_format=torch.channels_last)
        # on the meta device: planning needs no memory
        self._example = torch.empty(s.batch, 3, s.size, s.size, dtype=dtype, device="meta")
        self._plans: dict[str, Plan] = {}

    def plan(self, kind: str) -> Plan:
        """What an arm of this kind trains, and how."""
        if kind not in self._plans:
            s = self.settings
            method = s.chosen_method if kind == "filter" else Exact()
            layers = s.layers if kind in ("exact", "filter") else "all"
            self._plans[kind] = plan(self.model, method, layers, example=self._example)
        return self._plans[kind]

    @cached_property
    def images(self) -> Tensor:
        made = torch.randn(self._example.shape, dtype=self._example.dtype)
        return made.to(self.device, memory_format=torch.channels_last)

    def check_memory(self, arms: Sequence[str]) -> None:
        """Refuse what cannot fit: a step has the kept bytes at once, beside the batch and a model per arm."""
        kept = {arm: 0 if "inference" in arm else self.plan(arm.partition("+")[0]).kept[1] for arm in arms}
        free = available_memory()
        if free is None or self.device.type != "cpu":
            return
        held = sum(p.nbytes for p in self.model.parameters()) * len(arms) + self._example.nbytes
        for arm in arms:
            needed = held + kept[arm]
            if needed > free:
                sizes = f" (it needs at least {format_bytes(needed)}, and {format_bytes(free)} are free)"
                raise self.settings.too_large(arm, sizes)


class Times(NamedTuple):
    """Seconds of the parts of a step."""

    forward: float
    backward: float = 0.0
    optimizer: float = 0.0


class Arm:
    """One way to take a step. Calling it takes one, and gives its times."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case
        kind, *extras = name.split("+")
        self.trains = kind != "inference"
        self.plan = case.plan(kind)
        self.cached = "cache" in extras
        if self.cached and not any(
            row.action == "frozen" and row.reason != DOES_NOT_RUN for row in self.plan.rows
        ):
            raise GradFilterError("the first layer trains, so there is no frozen prefix to keep features of")
        self.model = _prepared(copy.deepcopy(case.model), kind, extras, self.plan)
        self.in_int8 = "int8" in extras
        if self.in_int8:
            with torch.no_grad():
                self.model(case.images)  # the calibration
        self.forward = self._from_features() if self.cached else partial(self.model, case.images)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        # A small rate: the weights, and so the times, shall stay as they are.
        self.optimizer = torch.optim.SGD(parameters, lr=1e-4) if self.trains else None
        self._labels: Tensor | None = None

    def _from_features(self) -> Callable[[], Any]:
        from ..splitting import split

        parts = split(self.model)
        with torch.no_grad():
            features = parts.prefix(self.case.images)
        return partial(parts.tail, features)

    def __call__(self, keep_gradients: bool = False) -> Times:
        start = self._now()
        with torch.set_grad_enabled(self.trains):
            logits = _logits(self.forward())
        if self.optimizer is None:
            return Times(self._now() - start)
        loss = cross_entropy(logits, self._labels_for(logits))
        forward = self._now()
        torch.autograd.backward(loss)
        backward = self._now()
        clip_grad_norm_(self._parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not keep_gradients)
        return Times(forward - start, backward - forward, self._now() - backward)

    def turn(self) -> Times:
        """Steps in a row, as in a training; untimed ones first: the caches are full of another arm."""
        seconds(self, WARM)
        taken, end = [self()], self._now() + TIMED
        while self._now() < end:
            taken.append(self())
        return Times(*map(median, zip(*taken, strict=True)))

    def kept_bytes(self) -> int:
        with kept_bytes(self.model) as kept, torch.set_grad_enabled(self.trains):
            self.forward()
        return sum(kept.values())

    def macs(self) -> dict[str, int]:
        """Multiply-adds; from cached features only what runs behind the frozen prefix counts."""
        rows = [row for row in self.plan.rows if not (self.cached and row.action == "frozen")]
        costs = [row.after for row in rows if row.after]
        backward = sum(cost.backward_macs for cost in costs) if self.trains else 0
        return {"forward": sum(cost.forward_macs for cost in costs), "backward": backward}

    def rounding(self) -> dict[str, str]:
        """How far int8 moves the features."""
        if not self.in_int8:
            return {}
        from ..program import acceleration

        return {"int8": acceleration(self.model).int8}

    def held_bytes(self) -> int:
        """Bytes of gradients and optimizer state."""
        if self.optimizer is None:
            return 0
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        held = [p.grad for p in self._parameters()] + states
        return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))

    def _parameters(self) -> list[Tensor]:
        return [] if self.optimizer is None else self.optimizer.param_groups[0]["params"]

    def _labels_for(self, logits: Tensor) -> Tensor:
        """Random classes, one per picture or pixel; made once."""
        if self._labels is None:
            shape = (logits.shape[0], *logits.shape[2:])
            self._labels = torch.randint(logits.shape[1], shape, device=logits.device)
        return self._labels

    def _now(self) -> float:
        wait_for(self.case.device)
        return time.perf_counter()


def _prepared(model: nn.Module, kind: str, extras: list[str], planned: Plan) -> nn.Module:
    if kind == "inference":
        model.requires_grad_(False)
    elif kind == "filter":
        apply_(model, planned)
    else:
        train_plainly_(model, planned)
    if "prefix" in extras:
        from ..program import accelerate_

        accelerate_(model)
    if "int8" in extras:
        from ..program import accelerate_

        accelerate_(model, prefix="int8", calibration=1)
    return model


def _logits(output: Any) -> Tensor:
    output = scores_of(output)
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise GradFilterError(
            "The model does not give one score per class, as (batch, classes, ...), which the loss of this "
            "benchmark needs; choose a classification or segmentation model."
        )
    return output


def facts(name: str, case: Case) -> tuple[Arm | None, dict[str, Any]]:
    """An arm, its kept bytes, multiply-adds and rounding; None, and why the model does not allow it."""
    with case.settings.in_memory(name):
        try:
            arm = Arm(name, case)
            return arm, {"kept_bytes": arm.kept_bytes(), "macs": arm.macs()} | arm.rounding()
        except GradFilterError as error:
            return None, {"unavailable": str(error)}
