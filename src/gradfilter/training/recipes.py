"""Recipes: settings for ``gradfilter train`` as YAML, in the package or in a file of the user."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import yaml

from ..errors import GradFilterError, nearest
from .settings import Config

__all__ = ["read_recipe", "read_text", "recipe_names", "title_of"]

_FOLDER = files("gradfilter.training") / "recipe_files"


def recipe_names() -> tuple[str, ...]:
    """The recipes of the package: our own first, then those of papers; 5 comes before 10.

    >>> "pets" in recipe_names()
    True
    """
    found = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted((n.removesuffix(".yaml") for n in found if n.endswith(".yaml")), key=_order))


def _order(name: str) -> tuple[bool, list[str | int]]:
    parts = re.split(r"(\d+)", name)  # text and numbers in turn
    return "-" in name, [int(part) if part.isdigit() else part for part in parts]


def read_text(name: str) -> str:
    """A recipe of the package as it is written, comments and all."""
    names = recipe_names()
    if name not in names:
        raise GradFilterError(
            f"There is no recipe {name}.{nearest(name, names)} `gradfilter recipes` lists them."
        )
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def title_of(name: str) -> str:
    """What a recipe is for: its first line."""
    return read_text(name).partition("\n")[0].removeprefix("# ")


def read_recipe(name_or_file: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a recipe: one of the package by its name, or a YAML file.

    >>> read_recipe("digits")["data"]
    'digits'
    """
    text, where = _text_of(os.fspath(name_or_file))
    kinds, recipe = get_type_hints(Config), {}
    for name, value in _settings(text, where).items():
        recipe[name] = _meant(value, kinds.get(name))
    Config.of(recipe, where)
    return recipe


def _text_of(spec: str) -> tuple[str, str]:
    """The text of a recipe, and what to call it."""
    if spec in recipe_names():
        return read_text(spec), f"The recipe {spec}"
    path = Path(spec).expanduser()
    try:
        is_path = len(path.parts) > 1 or path.suffix in (".yaml", ".yml") or path.exists()
        return path.read_text(encoding="utf-8") if is_path else read_text(spec), spec
    except OSError as error:
        raise GradFilterError(
            f"{spec} cannot be read ({error.strerror}); give a YAML file, or a name that "
            "`gradfilter recipes` lists."
        ) from None
    except UnicodeDecodeError:
        raise GradFilterError(f"{spec} is no text; a recipe is a YAML file.") from None


def _settings(text: str, where: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f" in line {mark.line + 1}" if mark else ""
        raise GradFilterError(f"{where} is no YAML: {problem or 'it cannot be read'}{place}.") from None
    if not isinstance(found, dict):
        raise GradFilterError(f"{where} holds no settings; write one a line, such as epochs: 10.")
    return {str(name): value for name, value in found.items()}


def _meant(value: Any, kind: Any) -> Any:
    """YAML takes 1e-3, which lacks a point, for a text, and the words on and off for true and false."""
    if kind is float and isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    if get_origin(kind) is Literal and isinstance(value, bool):
        return "on" if value else "off"
    return value
