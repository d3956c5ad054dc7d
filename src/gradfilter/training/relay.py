"""Several processes and layers that are the same in all: each runs them for its share of the batches.

What is exchanged are features and targets of the frozen layers. Every process then takes every step of the
trained layers as one alone would, with the very calls: so the weights are the same bits, which sums of
gradients could not be. Tests exchange outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GradFilterError
from ..seeding import seeded
from ..splitting import Split, split
from .processes import any_of, from_process, rank, together

__all__ = ["relayed", "shared_split"]


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
    before = [buffer.clone() for buffer in model.buffers()]
    with seeded(0):
        state = torch.get_rng_state()
        try:
            parts.prefix(example)
        except (RuntimeError, ValueError):  # a batch norm has no statistics of one sample
            return False
        finally:
            unchanged = [_put_back(now, then) for now, then in zip(model.buffers(), before, strict=True)]
        return all(unchanged) and torch.equal(state, torch.get_rng_state())


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
