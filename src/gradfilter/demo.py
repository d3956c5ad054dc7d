"""A small network adapts to new pictures, once exactly and twice filtered, side by side.

The pictures are drawn here: six shapes, first bright, upright and clear, later faint, turned and noisy.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from .bench.baseline import train_plainly_
from .costs import kept_bytes, plan
from .methods import GradientFilter
from .models import build
from .plans import format_bytes, table
from .progress import Tell, silent
from .surgery import apply_

__all__ = ["compare", "draw"]

SIZE, BATCH, TEST_PICTURES = 64, 32, 512
LEARNING_RATE = 0.005
Pictures = tuple[Tensor, Tensor]


def compare(steps: int = 80, tell: Tell = silent) -> str:
    """Train on clear pictures, adapt copies to faint ones with each method in turn, and tell what it took."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = build("tiny", classes=6)
    first = _Learner("first training", base, 2 * LEARNING_RATE)
    first_steps = steps + steps // 4
    for step, pictures in enumerate(_batches(first_steps, faint=False), start=1):
        tell("first training", step, first_steps)
        first.step(pictures, 1 - step / first_steps)
    learners = _learners(base)
    for step, pictures in enumerate(_batches(steps, faint=True), start=1):
        tell("adapting", step, steps)
        for learner in learners:  # in turn, so that a busy moment of the machine hits all alike
            learner.step(pictures, 1 - step / steps)
    test = draw(TEST_PICTURES, SIZE, Generator().manual_seed(2), faint=True)
    head = ["method", "kept for the backward", "step", f"loss after {steps} steps", "test accuracy"]
    before = ["before", "", "", "", f"{_accuracy(base, test):.1%}"]
    return table([head, before, *(learner.row(test) for learner in learners)])


@dataclass
class _Learner:
    """A model that learns, with the notes taken of it."""

    name: str
    model: nn.Module
    rate: float = LEARNING_RATE
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    kept: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad])

    def step(self, pictures: Pictures, remaining: float) -> None:
        """One training step; the learning rate falls linearly with what remains."""
        images, labels = pictures
        self.optimizer.param_groups[0]["lr"] = self.rate * remaining
        if not self.kept:
            with kept_bytes(self.model) as kept:
                self.model(images)
            self.kept = sum(kept.values())
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def row(self, test: Pictures) -> list[str]:
        last = self.losses[-10:]  # one batch alone is noise
        accuracy = f"{_accuracy(self.model, test):.1%}"
        step = f"{1e3 * median(self.seconds):.0f} ms"
        return [self.name, format_bytes(self.kept), step, f"{sum(last) / len(last):.3f}", accuracy]


def _learners(base: nn.Module) -> list[_Learner]:
    base.eval()
    plain = copy.deepcopy(base)
    learners = [_Learner("exact (plain PyTorch)", train_plainly_(plain, plan(plain, GradientFilter())))]
    for patch in (2, 4):
        method = GradientFilter(patch)
        learners.append(_Learner(str(method), apply_(copy.deepcopy(base), method)))
    return learners


def _accuracy(model: nn.Module, test: Pictures) -> float:
    images, labels = test
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in images.split(BATCH)])
    return float((guesses == labels).float().mean())


def _batches(count: int, *, faint: bool) -> Iterator[Pictures]:
    generator = Generator().manual_seed(int(faint))
    return (draw(BATCH, SIZE, generator, faint=faint) for _ in range(count))


def draw(count: int, size: int, generator: Generator, *, faint: bool) -> Pictures:
    """Pictures of discs, rings, squares, frames, crosses and triangles, and their labels 0 to 5.

    >>> images, labels = draw(4, 64, Generator().manual_seed(0), faint=False)
    >>> images.shape, labels.shape
    (torch.Size([4, 3, 64, 64]), torch.Size([4]))
    """

    def number(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    line = torch.linspace(-1, 1, size)
    radius, turn = number(0.35, 0.65, 1, 1), number(-0.3, 0.3, 1, 1) * faint
    across = (line - number(-0.25, 0.25, 1, 1)) / radius
    down = (line[:, None] - number(-0.25, 0.25, 1, 1)) / radius
    u, v = across * turn.cos() - down * turn.sin(), across * turn.sin() + down * turn.cos()
    distance, box = u.hypot(v), torch.maximum(u.abs(), v.abs())
    shapes = [
        distance < 1,
        (distance < 1) & (distance > 0.6),
        box < 0.85,
        (box < 0.85) & (box > 0.5),
        (box < 1) & (torch.minimum(u.abs(), v.abs()) < 0.3),
        (v > -0.6) & (v + 1.7 * u.abs() < 1),
    ]
    labels = torch.randint(len(shapes), (count,), generator=generator)
    inside = torch.stack(shapes)[labels, torch.arange(count)].unsqueeze(1).float()
    front, back = number(0.5, 1.5, 3, 1, 1), number(-1, 0, 3, 1, 1)
    if faint:
        front, back = 0.5 * front, back - 0.3 * front
    noise = torch.randn(count, 3, size, size, generator=generator) * (0.3 if faint else 0.2)
    return back + (front - back) * inside + noise, labels
