"""What several processes share of a training without changing a bit of it.

The frozen layers, if they are a pure function: each process runs them for every n-th batch, features and
targets are exchanged, and every process takes every step of the trained layers as one alone would, with the
very calls. Or the batches of a step, if it has several and none leaves a trace that the next one sees: their
gradients are exchanged and added up in the order of the batches. Tests exchange outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GradFilterError
from ..seeding import seeded
from ..splitting import Split, split
from ..state import load_method_state_, method_state
from .processes import any_of, from_process, rank, together

__all__ = ["begin_alike_", "gathered", "leaves_no_trace", "relayed", "shared_split"]


def shared_split(model: nn.Module, example: Any) -> tuple[Split | None, str]:
    """The model in two, if several processes can share its frozen part, or why not; all find the same.

    example: inputs of a batch.
    """
    found, why = None, "The model is not accelerated as a whole, or takes more than a tensor."
    if "gradfilter_program" in model.__dict__ and isinstance(example, Tensor):
        try:
            parts = split(model.train())
            found = parts if _is_pure(model, parts, example) else None
            why = "Frozen layers draw random numbers or gather statistics."
        except GradFilterError as error:
            why = str(error)
    return (None, why) if any(any_of(found is None)) else (found, "")


def _is_pure(model: nn.Module, parts: Split, example: Tensor) -> bool:
    """Whether the frozen part neither draws random numbers nor changes anything, as dropout and norms may."""
    states = []

    def run() -> None:
        states.append(torch.get_rng_state())
        parts.prefix(example)
        states.append(torch.get_rng_state())

    return leaves_no_trace(model, run) and torch.equal(*states)


def leaves_no_trace(model: nn.Module, run: Callable[[], object]) -> bool:
    """Whether it changes no statistics of norms and nothing that methods remember; all is put back.

    What cannot run leaves a trace: a batch norm has no statistics of one sample.
    """
    buffers, memory = [buffer.clone() for buffer in model.buffers()], method_state(model)
    try:
        for module in model.modules():
            if "gradfilter_program" in module.__dict__:
                module.__dict__["gradfilter_program"].check_calibrated()  # else this would be part of it
        with seeded(0):
            run()
        remembered = method_state(model)
    except (GradFilterError, RuntimeError, ValueError):
        return False
    finally:
        unchanged = [_put_back(now, then) for now, then in zip(model.buffers(), buffers, strict=True)]
        load_method_state_(model, memory)
    same_memory = remembered.keys() == memory.keys() and all(
        torch.equal(remembered[name], memory[name]) for name in memory
    )
    return same_memory and all(unchanged)


def begin_alike_(model: nn.Module) -> None:
    """Give a model the numbers that the first process's model has, where it has others."""
    own = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    for now, firsts in zip(own, from_process(0, own), strict=True):
        _put_back(now, firsts)


@torch.no_grad()
def _put_back(now: Tensor, then: Tensor) -> bool:
    """Whether it was as it should be."""
    if bool(((now == then) | (now.isnan() & then.isnan())).all()):
        return True
    now.copy_(then)
    return False


def relayed(mine: Iterable[Sequence[Any]], count: int) -> Iterator[Any]:
    """What is made of each of ``count`` batches; ``mine`` is what this process makes, of every n-th."""
    own = iter(mine)
    for first in range(0, count, together()):
        made = next(own) if first + rank() < count else ()
        for owner in range(min(together(), count - first)):
            yield from_process(owner, made)


def gathered(losses: Iterable[float], count: int, parameters: Sequence[nn.Parameter]) -> Iterator[float]:
    """The losses of ``count`` batches, and the sums of their gradients, in the order of the batches.

    losses: of every n-th batch, this process's; each comes with its gradients in ``parameters``.
    """
    own = ([loss, *_taken_gradients(parameters)] for loss in losses)
    sums: list[Tensor | None] = [None] * len(parameters)
    for loss, *gradients in relayed(own, count):
        sums = [_sum(one, other) for one, other in zip(sums, gradients, strict=True)]
        yield loss
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient


def _taken_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one.add_(other)
