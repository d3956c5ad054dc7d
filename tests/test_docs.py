"""The documentation: its code runs, its links lead somewhere, its numbers are those of the records."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gradfilter as gf
from gradfilter import cli
from gradfilter.methods import METHODS
from gradfilter.methods.text import method_from

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_blocks() -> dict[str, str]:
    fenced = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return {
        f"{name(document)}-{i}": code
        for document in DOCUMENTS
        for i, code in enumerate(fenced.findall(document.read_text()))
    }


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("where", python_blocks())
def test_python_in_the_documentation_runs(where: str) -> None:
    exec(compile(python_blocks()[where], where, "exec"), {})  # noqa: S102  our own documentation


def test_the_first_example_of_the_readme_has_eight_lines_and_a_frozen_prefix() -> None:
    code = python_blocks()["README.md-0"]
    assert len(code.splitlines()) == 8
    space: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), space)  # noqa: S102  our own documentation
    trained = [p.requires_grad for p in space["model"].parameters()]
    assert any(trained)
    assert not trained[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_to_files_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def experiment(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return experiment("tables")


def test_every_table_has_its_place(tables: ModuleType) -> None:
    found = [block for document in tables.DOCUMENTS for block in tables.BLOCK.findall(document.read_text())]
    assert sorted(found) == sorted(tables.TABLES)


def test_tables_say_what_the_records_say(tables: ModuleType) -> None:
    for document in tables.DOCUMENTS:
        text = document.read_text()
        assert tables.filled(text) == text, (
            f"{name(document)} is out of date: run python experiments/tables.py"
        )


def test_every_method_has_a_section_with_the_settings_to_measure() -> None:
    families = experiment("methods").families
    _, *sections = re.split(r"^## ", (ROOT / "docs" / "methods.md").read_text(), flags=re.MULTILINE)
    measured = {section.split("\n")[0]: families(section) for section in sections}
    for kind in METHODS.values():
        if kind not in (gf.Exact, gf.Frozen):  # the yardstick, and what has no gradient
            assert measured[kind.__name__]
            assert all(type(method_from(s)) is kind for settings in measured[kind.__name__] for s in settings)
    assert not families("## New\n\nSettings: `New(1)`.\n")


def test_commands_in_the_documentation_parse() -> None:
    for document in DOCUMENTS:
        for command in re.findall(r"^gradfilter (.*?)(?:  .*)?$", document.read_text(), re.MULTILINE):
            assert cli._parser().parse_args(command.split("#")[0].split()).run


def test_the_makefile_calls_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"-m gradfilter (.*?)(?:  #.*)?$", makefile, re.MULTILINE)
    assert commands == ["demo", "bench layers"]
    for command in commands:
        assert cli._parser().parse_args(command.split()).run
