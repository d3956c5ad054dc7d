"""Which layers train: "last:4", "all", globs, and how they combine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .errors import PlanError, nearest
from .modules import CONVOLUTIONS, LAYERS

__all__ = ["Layer", "Layers", "layers_of", "select"]

Predicate = Callable[[str, nn.Module], bool]
Layers = str | Predicate | Sequence[str | Predicate]


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer of a model. ``head``: it makes the output from plain features."""

    name: str
    module: nn.Module
    head: bool = False


def layers_of(
    model: nn.Module, executed: Sequence[str] | None = None, flat: Iterable[str] = ()
) -> list[Layer]:
    """The layers of a model in execution order where that is known, else in the order they were registered.

    The linear layers after the last convolution are the head. In networks of linear layers (more than three
    behind the last convolution) only the last one is, or those known to read plain features (``flat``).
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}
    names = (
        list(dict.fromkeys(n for n in executed if n in modules)) if executed is not None else list(modules)
    )
    if not names:
        raise PlanError(
            f"{type(model).__name__} has no convolution or linear layer that runs; there is nothing to train."
        )
    tail = len(names)
    while tail and isinstance(modules[names[tail - 1]], nn.Linear):
        tail -= 1
    heads = names[tail:]
    if len(heads) > 3 or tail == 0:
        heads = [n for n in heads if n in set(flat)] or heads[-1:]
    if tail == 0 and len(names) == 1:
        heads = []
    return [Layer(name, modules[name], name in heads) for name in names]


def select(layers: Sequence[Layer], selection: Layers) -> list[Layer]:
    """The layers that a selection names. The head always trains unless ``!name`` leaves it out.

    Terms, combined by comma: "all", "last:N" and "first:N" (N convolutions, or linear layers over maps, as the
    papers count them: the head is not one of them), globs such as "layer4.*", "!glob" to leave out.
    """
    chosen: dict[str, Layer] = {}
    refused: set[str] = set()
    terms = _terms(selection)
    positive = [t for t in terms if not (isinstance(t, str) and t.startswith("!"))]
    for term in positive or ["all"]:
        chosen.update((layer.name, layer) for layer in _matching(layers, term))
    for term in terms:
        if isinstance(term, str) and term.startswith("!"):
            refused.update(layer.name for layer in _matching(layers, term[1:]))
    chosen.update((layer.name, layer) for layer in layers if layer.head)
    result = [layer for layer in layers if layer.name in chosen and layer.name not in refused]
    if not result:
        raise PlanError(f"The selection {selection!r} leaves no layer to train; drop one of its '!' terms.")
    return result


def _terms(selection: Layers) -> list[str | Predicate]:
    given = [selection] if isinstance(selection, str) or callable(selection) else list(selection)
    terms: list[str | Predicate] = []
    for term in given:
        terms += [t.strip() for t in term.split(",") if t.strip()] if isinstance(term, str) else [term]
    if not terms:
        raise PlanError("The selection of layers is empty; say 'last:4', 'all' or a glob such as 'layer4.*'.")
    return terms


def _matching(layers: Sequence[Layer], term: str | Predicate) -> list[Layer]:
    if callable(term):
        found = [layer for layer in layers if term(layer.name, layer.module)]
        if not found:
            raise PlanError("The function given as a selection accepts no layer of the model.")
        return found
    if term == "all":
        return list(layers)
    if term.startswith(("last:", "first:")):
        return _counted(layers, term)
    found = [layer for layer in layers if _under(layer.name, term)]
    if not found:
        names = [layer.name for layer in layers]
        hint = (
            nearest(term, names + _parents(names))
            or f" The model's layers run from {names[0]} to {names[-1]}."
        )
        raise PlanError(f"No layer matches {term!r}.{hint}")
    return found


def _counted(layers: Sequence[Layer], term: str) -> list[Layer]:
    kind, _, number = term.partition(":")
    countable = [layer for layer in layers if not layer.head]
    if any(isinstance(layer.module, CONVOLUTIONS) for layer in countable[1:]):
        countable = [layer for layer in countable if isinstance(layer.module, CONVOLUTIONS)]
    if not number.isdigit() or int(number) < 1:
        raise PlanError(f"{term!r} needs a whole number of at least 1 behind the colon, as in 'last:4'.")
    if int(number) > len(countable):
        raise PlanError(
            f"{term!r} asks for more than the {len(countable)} layers there are; say 'all' instead."
        )
    return countable[-int(number) :] if kind == "last" else countable[: int(number)]


def _under(name: str, pattern: str) -> bool:
    """Whether a glob names the layer, or a module that contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def _parents(names: Sequence[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[0] for name in names if "." in name})
