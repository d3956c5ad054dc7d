"""Whole training steps of any model: forward and loss, backward, clipping and optimizer; all arms in turn.

An arm is a way to train, and what is added to it:

- ``inference``: no training; ``exact-all``: plain PyTorch, all layers; ``exact``: plain PyTorch, the selected
  layers; ``filter``: the selected layers with ``GradientFilter``, or the method that is asked for;
- ``+prefix``: with ``gf.accelerate_``; ``+cache``: from the features of the frozen prefix, computed before.

Every model is in eval mode and channels-last, so batch norms are fixed and dropout is off in all arms.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from ..costs import kept_bytes, plan
from ..errors import GradFilterError, nearest
from ..methods import Exact, GradientFilter, Method
from ..methods.text import method_from
from ..models import build
from ..plans import DOES_NOT_RUN, Plan, format_bytes, format_count
from ..progress import Tell, silent
from ..surgery import apply_
from .baseline import train_plainly_
from .energy import Meter, energy_of, find_meter
from .environment import available_memory, device_named, environment, wait_for
from .layers import WARMUP
from .memory import peak_of_step
from .timing import Interval, in_turn, median_of, ratio_of, seconds
from .worker import Worker

__all__ = ["ARMS", "BASELINES", "Arm", "Case", "Settings", "cells", "lines", "measure", "notes"]

ARMS = (
    "inference",
    "inference+prefix",
    "exact-all",
    "exact",
    "filter",
    "exact+prefix",
    "filter+prefix",
    "exact+cache",
    "filter+prefix+cache",
)
BASELINES = ("inference", "exact")
CLIP = 2.0
WARM, TIMED = 0.1, 0.2  # seconds of untimed and of timed steps per turn, one step at least
PARTS = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")


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
    rounds: int = 9

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
        free = available_memory()
        if free is None or self.device.type != "cpu":
            return
        held = sum(p.nbytes for p in self.model.parameters()) * len(arms) + self._example.nbytes
        for arm in arms:
            needed = held + (0 if "inference" in arm else self.plan(arm.partition("+")[0]).kept[1])
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
        self.forward = self._from_features() if self.cached else partial(self.model, case.images)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        # A small rate: the weights, and so the times, shall stay as they are.
        self.optimizer = torch.optim.SGD(parameters, lr=1e-4) if self.trains else None
        self._labels: Tensor | None = None

    def _from_features(self) -> Callable[[], Any]:
        from ..program import split

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
    return model


def _logits(output: Any) -> Tensor:
    """The class scores among what a model gives; torchvision's segmentation models give a dict."""
    if isinstance(output, dict):
        output = output.get("out", next(iter(output.values())))
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise GradFilterError(
            "The model does not give one score per class, as (batch, classes, ...), which the loss of this "
            "benchmark needs; choose a classification or segmentation model."
        )
    return output


def measure(
    settings: Settings,
    arms: Sequence[str] = ARMS,
    memory: bool = True,
    tell: Tell = silent,
    one_process: bool = False,
) -> dict[str, Any]:
    """Measure every arm; an arm that the model does not allow has the reason instead of numbers.

    Each arm has a process of its own and they take turns, unless all shall be in one: that needs less memory,
    but what one arm leaves to the allocator then speeds up or slows down the others.
    """
    for name in arms:
        if name not in ARMS:
            raise GradFilterError(
                f"There is no arm {name}; choose among {', '.join(ARMS)}.{nearest(name, ARMS)}"
            )
    with settings.in_memory(arms[0]):
        case = Case(settings)
    found = environment()
    case.check_memory(arms)
    meter = find_meter()
    with ExitStack() as workers:
        steps, rows = _prepare(case, list(dict.fromkeys(arms)), None if one_process else workers, tell)
        times = _times(settings, steps, tell) if steps else {}
        for number, (name, step) in enumerate(steps.items()):
            tell("energy", number + 1, len(steps))
            rows[name] |= _summary(times, name) | {"energy_j": energy_of(step, meter)}
    for number, name in enumerate(steps):
        tell("memory", number + 1, len(steps))
        peak = peak_of_step(settings, name) if memory else "unavailable: --no-memory was given"
        rows[name]["peak_bytes"] = peak
    return {
        "benchmark": "step",
        "environment": found,
        "settings": asdict(settings),
        "one_process": one_process,
        "energy_meter": meter.name if isinstance(meter, Meter) else meter,
        "arms": list(rows.values()),
    }


class Step(Protocol):
    """An arm, here or in a process of its own."""

    def __call__(self) -> Times: ...

    def turn(self) -> Times: ...


def _prepare(
    case: Case, arms: list[str], workers: ExitStack | None, tell: Tell
) -> tuple[dict[str, Step], dict[str, dict[str, Any]]]:
    """Each arm that can be had, and what is known of each before."""
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(arms):
        tell("preparing", number + 1, len(arms))
        step: Step | None
        if workers is None:
            step, known = facts(name, case)
        else:
            step = workers.enter_context(Worker(case.settings, name))
            known = step.facts()
        rows[name] = {"name": name} | known
        if step is not None and "unavailable" not in known:
            steps[name] = step
    return steps, rows


def facts(name: str, case: Case) -> tuple[Arm | None, dict[str, Any]]:
    """An arm, and its kept bytes and multiply-adds; None, and why the model does not allow it."""
    with case.settings.in_memory(name):
        try:
            arm = Arm(name, case)
            return arm, {"kept_bytes": arm.kept_bytes(), "macs": arm.macs()}
        except GradFilterError as error:
            return None, {"unavailable": str(error)}


def _times(settings: Settings, steps: dict[str, Step], tell: Tell) -> dict[str, list[Times]]:
    def take(name: str) -> Times:
        with settings.in_memory(name):
            return steps[name].turn()

    calls = {name: partial(take, name) for name in steps}
    title, total = f"steps of {settings.model}", settings.rounds + WARMUP
    return in_turn(calls, settings.rounds, WARMUP, tell=lambda number: tell(title, number, total))


def _summary(times: dict[str, list[Times]], name: str) -> dict[str, Any]:
    """Medians in milliseconds, ratios of step times to those of the baselines, and all their intervals."""
    columns = [[sum(taken) for taken in times[name]], *zip(*times[name], strict=True)]
    found = {part: median_of([1e3 * t for t in column]) for part, column in zip(PARTS, columns, strict=True)}
    for base in BASELINES:
        if base in times:
            found[f"to_{base}"] = ratio_of(columns[0], [sum(taken) for taken in times[base]])
    return {key: interval.median for key, interval in found.items()} | {
        "intervals": {key: [interval.low, interval.high] for key, interval in found.items()}
    }


def lines(record: dict[str, Any]) -> list[list[str]]:
    """The table, one line per arm."""
    s = record["settings"]
    title = f"{s['model']}, {s['layers']}, batch {s['batch']}, {s['size']} px"
    made = [[title, "step", "forward", "backward", "optimizer", "kept", "peak"]]
    made[0] += ["forward MACs", "backward MACs", *(f"of {base}" for base in BASELINES), "energy"]
    for row in record["arms"]:
        if "unavailable" in row:
            made.append([row["name"], *["-"] * (len(made[0]) - 1)])
            continue
        step = Interval(row["step_ms"], *row["intervals"]["step_ms"])
        made.append([row["name"], f"{step.median:.1f} ms ({step.low:.1f} to {step.high:.1f})"])
        made[-1] += [f"{row[part]:.1f} ms" for part in PARTS[1:]]
        made[-1] += [_cell(row[key], format_bytes) for key in ("kept_bytes", "peak_bytes")]
        made[-1] += [format_count(row["macs"][way]) for way in ("forward", "backward")]
        made[-1] += [_cell(row.get(f"to_{base}"), "{:.2f}x".format) for base in BASELINES]
        made[-1].append(_cell(row["energy_j"], "{:.2f} J".format))
    return made


def _cell(value: Any, form: Callable[[Any], str]) -> str:
    return "-" if value is None or isinstance(value, str) else form(value)


def notes(record: dict[str, Any]) -> list[str]:
    """What the table leaves out: the reasons of its gaps, and where its energy comes from."""
    made = [
        f"{row['name']}: unavailable: {row['unavailable']}" for row in record["arms"] if "unavailable" in row
    ]
    peaks = {row["peak_bytes"] for row in record["arms"] if isinstance(row.get("peak_bytes"), str)}
    made += [f"Peak memory: {reason}" for reason in sorted(peaks)]
    return [*made, f"Energy: {record['energy_meter']}"]


def cells(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms as flat rows for a spreadsheet, the settings in each; an interval has two columns."""
    made = []
    for row in record["arms"]:
        flat = {key: value for key, value in row.items() if key not in ("macs", "intervals")}
        flat |= {f"{way}_macs": count for way, count in row.get("macs", {}).items()}
        for key, bounds in row.get("intervals", {}).items():
            flat |= dict(zip((f"{key}_low", f"{key}_high"), bounds, strict=True))
        made.append(flat | record["settings"])
    return made
