"""Which layers train: "last:4", "all", globs, and how they combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .errors import PlanError, nearest
from .modules import CONVOLUTIONS, LAYERS
from .trace import LayerCall, Trace

__all__ = ["Layer", "Layers", "layers_of", "select"]

Predicate = Callable[[str, nn.Module], bool]
Layers = str | Predicate | Sequence[str | Predicate]


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer of a model.

    head: it makes the output from plain features. runs: it does on the example. calls: what it then asks for.
    """

    name: str
    module: nn.Module
    head: bool = False
    runs: bool = True
    calls: tuple[LayerCall, ...] = ()


def layers_of(model: nn.Module, trace: Trace | None = None) -> list[Layer]:
    """The layers of a model in execution order where that is known, else in the order they were registered.

    The linear layers after the last convolution are the head. In networks of linear layers (more than three
    behind the last convolution) only the last one is, or those known to read plain features.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}
    names = [n for n in dict.fromkeys(trace.executed if trace else modules) if n in modules]
    if not names:
        raise PlanError(
            f"{type(model).__name__} has no convolution or linear layer that runs; there is nothing to train."
        )
    calls = {name: tuple(trace.calls[name]) if trace else () for name in names}
    tail = len(names)
    while tail and isinstance(modules[names[tail - 1]], nn.Linear):
        tail -= 1
    heads = names[tail:]
    if len(heads) > 3 or tail == 0:
        flat = [n for n in heads if any(call.geometry.spatial == 0 for call in calls[n])]
        heads = flat if 0 < len(flat) < len(heads) else heads[-1:]
    if len(names) == 1:
        heads = []
    run = [Layer(name, modules[name], name in heads, calls=calls[name]) for name in names]
    return run + [Layer(name, modules[name], runs=False) for name in modules if name not in calls]


def select(layers: Sequence[Layer], selection: Layers) -> list[Layer]:
    """The layers that a selection names. The head always trains unless ``!name`` leaves it out.

    Terms, combined by comma: "all", "last:N" and "first:N" (N convolutions, or linear layers over maps, as
    the papers count them: the head is not one of them), globs such as "layer4.*", "!glob" to leave out.
    """
    chosen = {layer.name for layer in layers if layer.head}
    refused: set[str] = set()
    terms = _terms(selection)
    negative = [t for t in terms if isinstance(t, str) and t.startswith("!")]
    for term in [t for t in terms if t not in negative] or ["all"]:
        chosen.update(layer.name for layer in _matching(layers, term))
    for term in negative:
        refused.update(layer.name for layer in _matching(layers, term[1:]))
    result = [layer for layer in layers if layer.name in chosen - refused]
    if not result:
        raise PlanError(f"The selection {selection!r} leaves no layer to train; drop one of its '!' terms.")
    return result


def _terms(selection: Layers) -> list[str | Predicate]:
    given = [selection] if isinstance(selection, str) or callable(selection) else selection
    terms: list[str | Predicate] = []
    for term in given if isinstance(given, Sequence) else [given]:
        if not (isinstance(term, str) or callable(term)):
            raise PlanError(
                f"Layers are selected by strings such as 'last:4', 'layer4.*', or by functions, not {term!r}."
            )
        terms += [t.strip() for t in term.split(",") if t.strip()] if isinstance(term, str) else [term]
    if not terms:
        raise PlanError("The selection of layers is empty; say 'last:4', 'all' or a glob such as 'layer4.*'.")
    return terms


def _matching(layers: Sequence[Layer], term: str | Predicate) -> list[Layer]:
    if isinstance(term, str) and term.startswith(("last:", "first:")):
        return _counted(layers, term)
    if isinstance(term, str):
        found = [layer for layer in layers if term == "all" or _under(layer.name, term)]
    else:
        found = [layer for layer in layers if term(layer.name, layer.module)]
    run = [layer for layer in layers if layer.runs]
    if not found and isinstance(term, str):
        names = [layer.name for layer in layers]
        hint = f" The model's layers run from {run[0].name} to {run[-1].name}."
        raise PlanError(f"No layer matches {term!r}.{nearest(term, names + _parents(names)) or hint}")
    if not found:
        raise PlanError("The function given as a selection accepts no layer of the model.")
    if not any(layer.runs for layer in found):
        raise PlanError(
            f"Layer {found[0].name} does not run on the example; select others, or plan without one."
        )
    return [layer for layer in found if layer.runs]


def _counted(layers: Sequence[Layer], term: str) -> list[Layer]:
    kind, _, number = term.partition(":")
    if not number.isdigit() or int(number) < 1:
        raise PlanError(f"{term!r} needs a whole number of at least 1 behind the colon, as in 'last:4'.")
    countable = _countable([layer for layer in layers if layer.runs and not layer.head])
    if int(number) > len(countable):
        raise PlanError(
            f"{term!r} asks for more than the {len(countable)} layers there are; say 'all' instead."
        )
    return countable[-int(number) :] if kind == "last" else countable[: int(number)]


def _countable(layers: Sequence[Layer]) -> list[Layer]:
    """Convolutions, and linear layers over maps; all linear layers where only the first layer convolves."""
    mixed = any(isinstance(layer.module, CONVOLUTIONS) for layer in layers[1:])

    def counts(layer: Layer) -> bool:
        over_maps = any(call.geometry.spatial for call in layer.calls)
        return isinstance(layer.module, CONVOLUTIONS) or over_maps or not mixed

    return [layer for layer in layers if counts(layer)]


def _under(name: str, pattern: str) -> bool:
    """Whether a glob names the layer, or a module that contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def _parents(names: Sequence[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[0] for name in names if "." in name})
