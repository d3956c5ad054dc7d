"""What several processes share of a training without changing a bit of it.

The frozen layers, if they are a pure function: each process runs them for every n-th batch, features and
targets are exchanged, and every process takes every step of the trained layers as one alone would, with the
very calls. Or the batches of a step, if it has several and none leaves a trace that the next one sees: their
gradients are exchanged and added up in the order of the batches. Tests exchange outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GradFilterError
from ..seeding import seeded
from ..splitting import Split, split
from ..state import load_method_state_, method_state
from .processes import any_of, from_process, is_first, is_plain, rank, together

__all__ = ["begin_alike_", "gathered", "leaves_no_trace", "relayed", "shared_split"]


def shared_split(model: nn.Module, example: Any) -> tuple[Split | None, str]:
    """The model in two, if several processes can share its frozen part, or why not; all find the same.

    example: inputs of a batch.
    """
    found, why = None, "The model is not accelerated as a whole, or takes more than a tensor."
    if "gradfilter_program" in model.__dict__ and isinstance(example, Tensor):
        try:
            parts = split(model.train())
            found = parts if leaves_no_trace(model, lambda: parts.prefix(example), draws=True) else None
            why = "Frozen layers draw random numbers or gather statistics."
        except GradFilterError as error:
            why = str(error)
    return (None, why) if any(any_of(found is None)) else (found, "")


def leaves_no_trace(model: nn.Module, run: Callable[[], object], draws: bool = False) -> bool:
    """Whether it changes no buffers and nothing that methods remember; all is put back.

    What cannot run leaves a trace: a batch norm has no statistics of one sample.

    draws: random numbers that it draws are a trace too.
    """
    is_usual = all(isinstance(module._buffers, dict) for module in model.modules())  # torch.jit has others
    if not is_usual or not all(is_plain(buffer) for buffer in model.buffers()):
        return False  # it may be none that can be compared
    held = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    memory = {name: value.clone() for name, value in method_state(model).items()}
    try:
        for module in model.modules():
            if "gradfilter_program" in module.__dict__:
                module.__dict__["gradfilter_program"].check_calibrated()  # else this would be part of it
        with seeded(0):
            before = torch.get_rng_state()
            run()
            has_drawn = not torch.equal(before, torch.get_rng_state())
        remembered = method_state(model)
        is_same = [_holds_the_same(now, then) for now, then in held]
    except Exception:  # whatever a forward does that is not made for this sample
        return False
    finally:
        for now, then in held:
            now.clear()
            now.update(then)
        is_same_inside = [_put_back(now, then) for now, then in buffers]
        load_method_state_(model, memory)
    same_memory = _holds_the_same(remembered, memory, torch.equal)
    return same_memory and all(is_same) and all(is_same_inside) and not (draws and has_drawn)


def _holds_the_same(
    now: Mapping[str, Any], then: Mapping[str, Any], same: Callable[[Any, Any], bool] = operator.is_
) -> bool:
    return now.keys() == then.keys() and all(same(now[name], then[name]) for name in then)


@torch.no_grad()
def _put_back(now: Tensor, then: Tensor) -> bool:
    """Whether it was as it should be."""
    if now.shape == then.shape and bool(((now == then) | (now.isnan() & then.isnan())).all()):
        return True
    now.resize_(then.shape).copy_(then)
    return False


@torch.no_grad()
def begin_alike_(model: nn.Module) -> None:
    """Give a model the numbers that the first process's model has."""
    if together() == 1:
        return
    own = [*model.parameters(), *model.buffers()]
    for now, firsts in zip(own, from_process(0, [tensor.detach() for tensor in own]), strict=True):
        if is_first():
            continue
        if is_plain(firsts):  # of what is expanded, the one copy that there is
            there = tuple(slice(None) if step else slice(1) for step in now.stride())
            now[there].copy_(firsts[there])
        else:
            now.copy_(firsts)


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
