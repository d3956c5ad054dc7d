"""The frozen prefix of an accelerated model in int8: the ranges of its maps are seen in its first calls."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from .errors import GradFilterError
from .fusion import Step, Values, run_steps
from .ops.int8_conv import Bytes, Int8Conv, has_dot_products, is_available, weight_steps
from .ops.sources import hold, state_of

__all__ = ["Calibration", "FeatureChange", "Int8Prefix", "check_serves"]

ALARMING = 0.3


class FeatureChange(NamedTuple):
    """How far int8 moves what the prefix gives to the rest of the model, on the last batch that was watched.

    relative_error: root mean square of the difference, by that of the features in float.
    """

    cosine: float
    relative_error: float

    @classmethod
    def between(cls, exact: list[Tensor], changed: list[Tensor]) -> FeatureChange:
        """
        >>> FeatureChange.between([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 3.0])])
        FeatureChange(cosine=0.98..., relative_error=0.2)
        """
        none = torch.empty(0, dtype=torch.float64)
        a, b = (torch.cat([none, *(t.double().flatten() for t in parts)]) for parts in (exact, changed))
        if not a.norm() or not b.norm():
            return cls(float(torch.equal(a, b)), float(not torch.equal(a, b)))  # nothing but zeros
        return cls(float(a @ b / (a.norm() * b.norm())), float((a - b).norm() / a.norm()))

    def __str__(self) -> str:
        return f"relative error {self.relative_error:.2g}, cosine {self.cosine:.6f}"


def check_serves(convs: list[nn.Conv2d]) -> None:
    """Refuse convolutions that cannot run in int8 here; warn where they can, but slowly."""
    if not is_available():
        raise GradFilterError("An int8 prefix needs oneDNN, which this torch does not have or may not use.")
    if not convs:
        raise GradFilterError(
            "No 2-d convolution is frozen before the first trained layer, so there is no int8 prefix: freeze "
            "layers first, with gf.apply_, or leave prefix='int8' out."
        )
    for conv in convs:
        weight = conv.weight
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise GradFilterError(
                f"An int8 prefix is made of float32 weights on a CPU, and those here are {weight.dtype} on "
                f"{weight.device.type}: leave prefix='int8' out, or convert the model first."
            )
    if not has_dot_products():
        warnings.warn(
            "This processor has no dot products of int8 (VNNI, or dotprod on ARM): the int8 prefix works, "
            "but may be slower than float, and less exact than on one that has them.",
            stacklevel=4,
        )


class Calibration:
    """What the frozen convolutions of one model read in its first calls, whichever way it is called.

    Values go by the names of their nodes, which are the same in every trace of a model.
    """

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self._begin()

    def _begin(self) -> None:
        self.left = self.calls
        self.kept: dict[str, Bytes] = {}  # how each value is kept, once all calls were seen
        self.change: FeatureChange | None = None
        self._ranges: dict[str, tuple[float, float]] = {}
        self._weights: dict[nn.Module, tuple[Any, list[Tensor]]] = {}

    def follow(self, weights: dict[nn.Module, Any]) -> None:
        """Begin anew if a convolution's weight has another state than before: so have then all ranges."""
        if any(self._weights.get(conv, (state,))[0] != state for conv, state in weights.items()):
            self._begin()
        for conv in weights.keys() - self._weights.keys():
            self._weights[conv] = weights[conv], hold([cast(Tensor, conv.weight)])

    def watch(self, step: Step, *args: Tensor) -> Any:
        """Run a step, and note the ranges of what it reads."""
        for node, value in zip(step.args, args, strict=True):
            if isinstance(node, Node) and _is_map(value):
                low, high = (float(bound) for bound in torch.aminmax(value))
                known = self._ranges.get(node.name, (0.0, 0.0))
                self._ranges[node.name] = (min(low, known[0]), max(high, known[1]))
        return step.run(*args)

    def end_call(self) -> None:
        self.left -= 1
        if not self.left:
            finite = {name: pair for name, pair in self._ranges.items() if all(map(math.isfinite, pair))}
            self.kept = {name: Bytes.between(*pair) for name, pair in finite.items()}

    def check_complete(self) -> None:
        if self.left:
            raise GradFilterError(
                f"The int8 prefix still runs in float, because {self.left} of its {self.calls} calibration "
                "calls are to come: run the model on as many batches first, under torch.no_grad()."
            )

    def signature(self) -> list[str]:
        """Differs where int8 makes other features of the same weights."""
        return [f"int8 {weight_steps()}", *(f"{name} {kept}" for name, kept in sorted(self.kept.items()))]

    def __str__(self) -> str:
        if self.change is None:
            return f"int8 prefix: {self.left} of {self.calls} calibration calls to come, in float until then"
        return f"int8 prefix: features with {self.change}"


class Int8Prefix:
    """The steps of a frozen prefix for one way of calling: in float while they are watched, then in int8.

    border: the values that others read, which are always in float.
    """

    def __init__(self, steps: list[Step], border: list[Node], calibration: Calibration) -> None:
        self._steps, self._border, self._calibration = steps, border, calibration
        self._convs = [step.fused for step in steps if step.fused is not None]
        self._made: tuple[dict[str, Bytes], list[Any], list[Tensor], list[Step]] | None = None

    def run(self, values: Values) -> None:
        seen = self._calibration
        if not self._convs or not all(map(_is_map, values.values())):
            run_steps(self._steps, values)
            return
        state = [state_of(fused.sources()) for fused in self._convs]
        seen.follow({fused.conv: weight for fused, (weight, *_) in zip(self._convs, state, strict=True)})
        if seen.left:
            self._calibrate(values, state)
        else:
            run_steps(self._in_int8(state), values)

    def _calibrate(self, values: Values, state: list[Any]) -> None:
        seen, inputs, random = self._calibration, dict(values), torch.get_rng_state()
        run_steps([replace(s, run=partial(seen.watch, s)) if s.fused else s for s in self._steps], values)
        seen.end_call()
        if seen.left:
            return
        self._repeat(self._in_int8(state), inputs, random)
        computed = [step.node for step in self._steps if step.node in self._border]
        seen.change = FeatureChange.between(
            *([v[n] for n in computed if isinstance(v[n], Tensor)] for v in (values, inputs))
        )
        if seen.change.relative_error > ALARMING:
            warnings.warn(
                f"int8 changes the features of the frozen prefix a lot ({seen.change}): calibrate on batches "
                "like those of the training, or leave prefix='int8' out.",
                stacklevel=2,
            )

    def _repeat(self, steps: list[Step], values: Values, random: Tensor) -> None:
        """The last call in other steps, with the same random numbers, and without a trace in any buffer."""
        modules = [step.run for step in self._steps if isinstance(step.run, nn.Module)]
        buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random)
            run_steps(steps, values)
        for buffer, content in buffers:
            if not torch.equal(buffer, content):
                buffer.copy_(content)

    def _in_int8(self, state: list[Any]) -> list[Step]:
        """Made once, and again when weights or norms have changed."""
        kept = self._calibration.kept
        if self._made is None or self._made[0] is not kept or self._made[1] != state:
            held = [part for fused in self._convs for part in hold(fused.sources())]
            self._made = (kept, state, held, _int8_steps(self._steps, self._border, kept))
        return self._made[3]


def _is_map(value: Any) -> bool:
    return (
        is_available()
        and isinstance(value, Tensor)
        and value.dtype == torch.float32
        and value.device.type == "cpu"
        and value.dim() == 4
        and value.numel() > 0
    )


def _int8_steps(steps: list[Step], border: list[Node], kept: dict[str, Bytes]) -> list[Step]:
    """The same steps with convolutions in int8, and in bytes what none but these read."""
    convs = {step.node for step in steps if step.fused is not None and _known(step.args[0], kept)}
    readers: dict[Node, set[Node]] = defaultdict(set)
    for step in steps:
        for node in step.reads:
            readers[node].add(step.node)
    in_float = {node for node, reading in readers.items() if not reading <= convs}.union(border)
    made = []
    for step in steps:
        run, y = step.run, None if step.node in in_float else kept.get(step.node.name)
        if step.node in convs:
            run = _int8_conv(step, y, kept)
        elif y is not None:
            run = partial(_packed, run, y)
        made.append(replace(step, run=run))
    return made


def _int8_conv(step: Step, y: Bytes | None, kept: dict[str, Bytes]) -> Int8Conv:
    fused: Any = step.fused
    x, *terms = step.args
    if not terms:
        return Int8Conv(fused, kept[x.name], y)
    return Int8Conv(fused, kept[x.name], y, kept.get(terms[0].name), may_write=terms[0] in step.done)


def _packed(run: Callable[..., Tensor], y: Bytes, *args: Any, **kwargs: Any) -> Tensor:
    return y.packed(run(*args, **kwargs))


def _known(value: Any, kept: dict[str, Bytes]) -> bool:
    return isinstance(value, Node) and value.name in kept
