"""Times of several arms, taken in turn, so that a busy moment of the machine does not hit one arm alone."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

__all__ = ["Interval", "geometric_mean", "in_turn", "median_of", "ratio_of", "seconds"]

Sample = TypeVar("Sample")


class Interval(NamedTuple):
    """A median, and the bounds between which it lies in 95 % of the resampled measurements (bootstrap)."""

    median: float
    low: float
    high: float

    def as_ratio(self) -> str:
        """How many times, ready for a table.

        >>> Interval(2.04, 1.9, 2.2).as_ratio()
        '2.0x (1.9 to 2.2)'
        """
        return f"{self.median:.1f}x ({self.low:.1f} to {self.high:.1f})"


def in_turn(
    arms: Mapping[str, Callable[[], Sample]],
    rounds: int,
    warmup: int = 2,
    tell: Callable[[int], None] = lambda step: None,
) -> dict[str, list[Sample]]:
    """Call every arm once per round and collect what the arms return; warm-up rounds are thrown away.

    >>> in_turn({"a": lambda: 1, "b": lambda: 2}, rounds=3)
    {'a': [1, 1, 1], 'b': [2, 2, 2]}
    """
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(warmup + rounds):
        tell(number + 1)
        first = number % len(names)  # another arm goes first each time
        for name in names[first:] + names[:first]:
            sample = arms[name]()
            if number >= warmup:
                samples[name].append(sample)
    return samples


def seconds(call: Callable[[], object], least: float = 0.0) -> float:
    """Seconds per call, calling until ``least`` seconds have passed: short calls need many to be timed."""
    calls = 0
    start = time.perf_counter()
    while True:
        call()
        calls += 1
        passed = time.perf_counter() - start
        if passed >= least:
            return passed / calls


def median_of(samples: Sequence[float]) -> Interval:
    """The median of some samples.

    >>> median_of([2.0, 2.0, 2.0])
    Interval(median=2.0, low=2.0, high=2.0)
    """
    return _bootstrap(median, samples)


def ratio_of(base: Sequence[float], other: Sequence[float]) -> Interval:
    """How many times larger the median of ``base`` is; rounds are resampled together.

    >>> ratio_of([4.0, 6.0], [2.0, 3.0]).median
    2.0
    """
    return _bootstrap(lambda a, b: median(a) / median(b), base, other)


def _bootstrap(statistic: Callable[..., float], *columns: Sequence[float], draws: int = 1000) -> Interval:
    rounds = list(zip(*columns, strict=True))
    generator = random.Random(0)  # noqa: S311  equal samples shall have equal intervals; nothing is secret
    values = sorted(
        statistic(*zip(*generator.choices(rounds, k=len(rounds)), strict=True)) for _ in range(draws)
    )
    return Interval(statistic(*columns), values[draws // 40], values[-1 - draws // 40])


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios.

    >>> round(geometric_mean([2.0, 8.0]), 12)
    4.0
    """
    return math.exp(math.fsum(map(math.log, values)) / len(values))
