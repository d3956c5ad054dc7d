"""Methods written as text."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import gradfilter as gf
from gradfilter.methods import METHODS
from gradfilter.methods.text import method_from
from oracles import Sample
from test_conformance import ALL


@pytest.mark.parametrize("sample", [sample for _, sample in ALL], ids=[str(s.method) for _, s in ALL])
def test_what_a_method_prints_is_read_back(sample: Sample) -> None:
    assert method_from(repr(sample.method)) == sample.method


def test_short_names() -> None:
    assert method_from(" filter(patch=4) ") == gf.GradientFilter(patch=4)
    assert method_from("exact") == gf.Exact()
    assert all(type(method_from(name)) is kind for name, kind in METHODS.items() if name not in NEED_SETTINGS)


NEED_SETTINGS: set[str] = set()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is not a method; write it as GradientFilter(patch=4) or HOSVD(variance=0.8)."),
        ("import os", "'import os' is not a method; write it as"),
        ("filter(patch=open('x'))", "is not a method; write it as"),
        ("gf.GradientFilter()", "is not a method; write it as"),
        ("GradientFiler(2)", "There is no method GradientFiler; choose among exact, filter"),
        ("GradientFiler(2)", "Did you mean GradientFilter or"),
        ("filter(patsch=2)", "filter has no setting patsch. Did you mean patch?"),
        ("filter(0)", "patch must be whole numbers of at least 1, not 0; 2 or 4 are usual."),
    ],
)
def test_what_is_none_is_told_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(gf.GradFilterError) as caught:
        method_from(text)
    assert sentence in str(caught.value)


def methods_imported_by(source: str) -> set[str]:
    """Which files of other methods a method's file imports."""
    shared = {"base", "settings"}
    found = {
        n.module or "" for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.level == 1
    }
    return found - shared


def test_methods_do_not_import_one_another() -> None:
    own = {kind.__module__ for kind in METHODS.values()}
    assert len(own) == len(METHODS)
    for name in own:
        assert not methods_imported_by(Path(str(sys.modules[name].__file__)).read_text())
    assert methods_imported_by("from .svd import SVD") == {"svd"}
    assert methods_imported_by("from . import svd") == {""}
