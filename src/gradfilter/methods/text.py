"""A method as a line of text, for command lines, recipes and records."""

from __future__ import annotations

import ast
from contextlib import suppress
from inspect import signature

from ..errors import PlanError, nearest
from . import METHODS, Method

__all__ = ["method_from"]


def method_from(text: str) -> Method:
    """The method that a line such as ``GradientFilter(patch=4)`` or ``filter(4)`` names; values are literals.

    >>> method_from("filter(4, taps='collapse')") == method_from(repr(METHODS["filter"](4, taps="collapse")))
    True
    """
    name, args, kwargs = _read(text)
    known = METHODS | {kind.__name__: kind for kind in METHODS.values()}
    if name not in known:
        raise PlanError(
            f"There is no method {name}; choose among {', '.join(METHODS)}.{nearest(name, known)}"
        )
    try:
        return known[name](*args, **kwargs)
    except TypeError as error:
        settings = signature(known[name]).parameters
        for setting in kwargs.keys() - settings.keys():
            raise PlanError(f"{name} has no setting {setting}.{nearest(setting, settings)}") from None
        raise PlanError(f"{text} cannot be a method: {str(error).partition('() ')[2] or error}.") from None


def _read(text: str) -> tuple[str, list[object], dict[str, object]]:
    with suppress(SyntaxError, ValueError):  # what cannot be read is told below, as what is no call
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, [], {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            args = [ast.literal_eval(value) for value in call.args]
            return call.func.id, args, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    raise PlanError(f"{text!r} is not a method; write it as GradientFilter(patch=4) or HOSVD(variance=0.8).")
