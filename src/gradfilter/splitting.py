"""A model in two: what is frozen before its first trained layer, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import GradFilterError
from .graphs import why_untraceable
from .program import Program, has_hooks
from .sizes import Measured, as_rows, from_rows, sizes_in

__all__ = ["Split", "split"]


class Split(NamedTuple):
    """A model in two: ``tail(prefix(x))`` is ``model(x)``, and nothing in ``prefix`` trains.

    prefix gives what the tail reads of it: one tensor or more, the batch first; heights and widths once for
    each picture. frozen: every number prefix uses; signature: what it does with them.
    """

    prefix: Callable[[Tensor], tuple[Tensor, ...]]
    tail: Callable[[Sequence[Tensor]], Any]
    frozen: list[Tensor]
    signature: str


def split(model: nn.Module) -> Split:
    """Cut the model where its first trained layer begins.

    >>> import gradfilter as gf
    >>> model = gf.apply_(gf.models.build("tiny"), gf.GradientFilter(patch=2), "last:2")
    >>> parts, x = gf.split(model), torch.randn(2, 3, 32, 32)
    >>> torch.allclose(parts.tail(parts.prefix(x)), model(x), atol=1e-5)
    True
    """
    program, name = model.__dict__.get("gradfilter_program") or Program(), type(model).__name__
    if why := why_untraceable(model):
        raise GradFilterError(f"{name} cannot be split, because it cannot be traced: {why}")
    with torch.enable_grad():
        ready = program.ready(model, (torch.empty(0),), {})
    if ready is None or _runs_more(model):
        raise GradFilterError(
            f"{name} cannot be split: it has several inputs, hooks, another forward, or autocast is on."
        )
    border = ready.border
    if not ready.prefix or any(node.op == "placeholder" for node in border):
        raise GradFilterError("There is no frozen prefix: the first layer of the model trains.")
    if not ready.tail:
        raise GradFilterError("There is no tail: nothing in the model trains; call gf.apply_ first.")
    program.check_calibrated()
    known = sizes_in(ready.graph)
    sizes = {node.name for node in border if node in known}
    measured = {each for node in border for each in known.get(node, ())}

    def prefix(x: Tensor) -> tuple[Tensor, ...]:
        values = Measured(measured, dict(zip(ready.inputs, [x], strict=True)))
        ready.run_prefix(values)
        program.check_calibrated()  # it begins anew with other weights
        found: list[Any] = [as_rows(values[n], len(x)) if n.name in sizes else values[n] for n in border]
        is_by_picture = all(isinstance(f, Tensor) and f.shape[:1] == x.shape[:1] for f in found)
        if not is_by_picture or values.pictures - {len(x)}:
            raise GradFilterError(
                f"{name} cannot be split: of its frozen part, its trained part reads more than maps and "
                "their heights and widths."
            )
        return tuple(found)

    def tail(features: Sequence[Tensor]) -> Any:
        with torch.enable_grad():  # the mode may have changed, and with it what there is to do
            now = program.ready(model, (torch.empty(0),), {})
        by_name = {node.name: node for node in now.border} if now else {}
        if now is None or _runs_more(model) or [node.name for node in border] != list(by_name):
            raise GradFilterError(
                f"What trains in {name} has changed since it was split, or it has hooks; split again."
            )
        values = {
            node: from_rows(feature) if name in sizes else feature
            for (name, node), feature in zip(by_name.items(), features, strict=True)
        }
        return now.run_tail(values)

    return Split(prefix, tail, ready.prefix_tensors(), ready.signature())


def _runs_more(model: nn.Module) -> bool:
    """Whether to call the model is more, or other, than its program."""
    return has_hooks(model) or "forward" in model.__dict__
