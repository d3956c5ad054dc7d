"""What a training does, as plain values: no torch here, so that command lines are read fast."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import GradFilterError, nearest

__all__ = ["Config", "Loop", "check_kind", "described", "help_of", "shown"]

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Loop:
    """The loop: how long, how fast, and with which safeguards.

    Args:
        epochs: how often the training set is seen
        steps: if not 0, so many steps of the optimizer instead, in as many epochs as they take
        batch: samples at a time
        accumulate: so many batches make one step of the optimizer
        optimizer: sgd or adamw
        lr: the highest learning rate
        lr_end: the rate that the cosine leads to
        momentum: of SGD
        weight_decay: pulls the trained weights to 0
        warmup: epochs in which the rate rises to lr
        warmup_steps: if not 0, so many steps instead
        schedule: a cosine from lr to lr_end, or constant
        clip: the longest gradient; 0 for no limit
        label_smoothing: the part of a label that all classes share
        precision: bf16 for mixed precision
        head_steps: so many steps at first train the head alone (see head)
        head: names of the parameters that belong to the head, such as "decoder.*"; if "", the last layer's
        minutes: stop after this time; 0 for no limit
        patience: stop when the test score has not grown for so many epochs; 0 for never
        seed: of the order, of augmentation and of new weights
    """

    epochs: int = 10
    steps: int = 0
    batch: int = 32
    accumulate: int = 1
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.02
    lr_end: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: float = 2.0
    label_smoothing: float = 0.0
    precision: Literal["float32", "bf16"] = "float32"
    head_steps: int = 0
    head: str = ""
    minutes: float = 0.0
    patience: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            check_kind(name, value, kind)
            if kind in (int, float) and not isinstance(value, int | float):  # numpy's
                object.__setattr__(self, name, kind(value))
        self._check(1, "epochs", "batch", "accumulate")
        self._check(0, "steps", "lr", "lr_end", "momentum", "weight_decay", "warmup", "warmup_steps", "clip")
        self._check(0, "head_steps", "minutes", "patience")
        if not -(2**63) <= self.seed < 2**63:
            raise GradFilterError(f"seed must be from -2**63 to 2**63 - 1, not {self.seed}.")
        if not 0 <= self.label_smoothing < 1:
            raise GradFilterError(f"label_smoothing must be from 0 to below 1, not {self.label_smoothing}.")

    def _check(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not value >= least:
                raise GradFilterError(f"{name} must be at least {least}, not {value}.")
            if isinstance(value, int) and value >= 2**63:  # torch takes no larger ones
                raise GradFilterError(f"{name} must be from {least} to 2**63 - 1, not {value}.")


@dataclass(frozen=True)
class Config(Loop):
    """Everything that ``gradfilter train`` can be told; a recipe is a file of these.

    Args:
        data: digits, a folder, a file, the name of a data set, or KIND:PATH (docs/data.md)
        task: classify or segment, for data that serves both
        download: fetch data and weights that are not there
        holdout: the part of each class that is held out for the test, where the data has no test part
        shots: so many samples of each class only; 0 for all
        partition: train on one client's part of the data: "shards" or "dirichlet"
        clients: so many clients share the data
        client: which one trains here, from 0
        alpha: of the Dirichlet distribution; a small one makes clients differ
        client_shards: how many shards a client has
        model: a name (`gradfilter models`); if "", MobileNetV2, with an FPN head to segment
        weights: a file, the folder of an earlier run, "auto" for those on this machine, or "none"
        size: side of the pictures; 0 for 224, or 96 where they are small
        layers: which train: "last:4", "all", "layer4.*" ...; if "", last:4, or the new head of smp: models
        patch: of gradient filtering
        taps: of gradient filtering: overlap or collapse
        method: another one, as in docs/methods.md: "HOSVD(variance=0.8)" ...
        methods: methods of single layers by name or glob, before the others: {"features.18.*": "Exact()"}
        norm: batch norms: fixed, affine or batch
        augment: crop, mirror and tint training pictures at random
        cache: keep features of the frozen layers: on, off, or auto: where the result stays the same
        cache_folder: where features are kept, for later runs too; in memory if ""
        views: with augment and a cache: so many random versions of each picture
        accelerate: fold norms and fuse activations, trained layers included
        workers: processes that read pictures; -1 for as many as there are processors, 2 at most
        tensorboard: also write events for TensorBoard
        out: the folder of the run; if "", runs/NUMBER
    """

    data: str = "digits"
    task: Literal["auto", "classify", "segment"] = "auto"
    download: bool = False
    holdout: float = 0.2
    shots: int = 0
    partition: Literal["none", "shards", "dirichlet"] = "none"
    clients: int = 10
    client: int = 0
    alpha: float = 0.5
    client_shards: int = 2
    model: str = ""
    weights: str = "auto"
    size: int = 0
    layers: str = ""
    patch: int = 2
    taps: Literal["overlap", "collapse"] = "overlap"
    method: str = ""
    methods: dict[str, str] = field(default_factory=dict)
    norm: Literal["fixed", "affine", "batch"] = "fixed"
    augment: bool = True
    cache: Literal["auto", "on", "off"] = "auto"
    cache_folder: str = ""
    views: int = 4
    accelerate: bool = True
    workers: int = -1
    tensorboard: bool = False
    out: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise GradFilterError("data is empty; give a folder, a file or the name of a data set.")
        self._check(1, "clients", "client_shards", "patch", "views")
        self._check(0, "shots", "size", "client")
        if self.client >= self.clients:
            raise GradFilterError(
                f"client must be below clients, {self.clients}, but is {self.client}: they count from 0."
            )

    @classmethod
    def of(cls, values: dict[str, Any], where: str) -> Config:
        """From a dictionary; ``where`` it comes from is told if it has a field that is none."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise GradFilterError(f"{where} has {name}, which is no setting.{nearest(name, known)}")
        try:
            return cls(**values)
        except GradFilterError as error:
            raise GradFilterError(f"{where}: {error}") from None

    def loop(self) -> Loop:
        """The part that ``gf.fit`` takes."""
        return Loop(**{each.name: getattr(self, each.name) for each in fields(Loop)})


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another kind; a whole number is a number too.

    >>> check_kind("lr", 1, float)
    >>> check_kind("optimizer", "lion", Literal["sgd", "adamw"])
    Traceback (most recent call last):
    gradfilter.errors.GradFilterError: optimizer must be sgd or adamw, not 'lion'.
    """
    if not _fits(value, kind):
        raise GradFilterError(f"{name} must be {described(kind)}, not {shown(value)}.")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(t, str) for pair in value.items() for t in pair)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, {int: Integral, float: Real}.get(kind, kind))  # numpy's numbers too


def described(kind: Any) -> str:
    """What a value of this kind is, in words.

    >>> described(int)
    'a whole number'
    """
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    return _KINDS.get(kind, 'methods by layer, such as {"layer4.*": "Exact()"}')


def shown(value: Any) -> str:
    """A wrong value, in words.

    >>> shown("many"), shown([1, 2])
    ("'many'", 'a list')
    """
    if isinstance(value, str | int | float | None):
        return repr(value)
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "AEIOUaeiou" else f"a {kind}"


def help_of(*kinds: type) -> dict[str, str]:
    """The line of each field in the docstrings, for --help.

    >>> help_of(Loop)["seed"]
    'of the order, of augmentation and of new weights'
    """
    return {
        name: text
        for kind in kinds
        for name, text in re.findall(r"^ {8}(\w+): (.+)$", kind.__doc__ or "", re.MULTILINE)
    }
