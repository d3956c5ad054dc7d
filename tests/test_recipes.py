"""Recipes: every file fits the settings and its model, and what is wrong with one is told in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradfilter import cli, surgery
from gradfilter.data.kinds import KINDS
from gradfilter.errors import GradFilterError
from gradfilter.methods import SubspaceIteration
from gradfilter.methods.text import method_from
from gradfilter.models import build
from gradfilter.plans import Plan
from gradfilter.trace import Trace, trace
from gradfilter.training import building
from gradfilter.training.recipes import read_recipe, read_text, recipe_names, title_of
from gradfilter.training.settings import Config

OWN_FOLDERS = {"photos", "segment"}  # data that the user names
ASI_BUDGETS = {  # bytes, as the published scripts have them
    "asi-pets-mcunet": 250_000,
    "asi-pets-mobilenet_v2": 769_000,
    "asi-pets-resnet18": 4_430_000,
    "asi-pets-resnet34": 2_160_000,
}


@cache
def model_of(name: str) -> nn.Module:
    """Without numbers: only names and shapes matter here."""
    with torch.device("meta"):
        return build(name, classes=5).eval()


@cache
def trace_of(name: str) -> Trace:
    return trace(model_of(name), torch.zeros(2, 3, 64, 64), lambda copied: copied, lambda _: None)


def checked(config: Config) -> Plan:
    """The plan of a recipe; refused if one of its names or globs fits nothing."""
    with pytest.MonkeyPatch.context() as patch:  # to save time: no costs, and models run once for all recipes
        patch.setattr(building, "planned", surgery.make_plan)
        patch.setattr(surgery, "trace", lambda *_: trace_of(config.model))
        plan = building.plan_of(replace(config, batch=2, size=64), model_of(config.model))
    if config.head_steps:
        heads = [fnmatchcase(f"{name}.weight", config.head) for name in plan.trained]
        if not any(heads) or all(heads):
            raise GradFilterError(f"head {config.head!r} must fit some, but not all, of {plan.trained}.")
    return plan


# The files of the package


def test_names_are_sorted_our_own_first_and_5_before_10() -> None:
    names = recipe_names()
    own = [name for name in names if "-" not in name]
    assert own == list(names[: len(own)]) == sorted(own)
    five = names.index("cvpr2023-voc-fcn-resnet18-5l")
    assert names[five + 1] == "cvpr2023-voc-fcn-resnet18-10l"


def test_titles_are_there_and_unique() -> None:
    titles = {name: title_of(name) for name in recipe_names()}
    assert len(set(titles.values())) == len(titles)
    for name, title in titles.items():
        assert read_text(name).startswith(f"# {title}\n# "), f"{name}: a title, then where it comes from"
        assert 20 < len(title) <= 108, title


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("name", recipe_names())
def test_recipe_fits_its_model(name: str) -> None:
    config = Config(**read_recipe(name))
    assert config.data in KINDS or config.data in OWN_FOLDERS
    trained = checked(config).trained
    assert trained
    layers = {"5l": 5, "10l": 10}.get(name.rpartition("-")[2])
    if layers:  # the classifier is not counted; where smp has more layers than the paper, the recipe says so
        assert layers <= len(trained) <= layers + 3, trained


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(("key", "trained"), [("resnet18", 5), ("mobilenet_v2", 5), ("mcunet", 5)])
def test_four_convolutions_and_the_head_of_the_paper(key: str, trained: int) -> None:
    plan = checked(Config(**read_recipe(f"cvpr2023-cifar10-{key}")))
    assert len(plan.trained) == trained
    assert not any("downsample" in name for name in plan.trained)


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(("name", "budget"), ASI_BUDGETS.items())
def test_ranks_are_the_largest_that_keep_to_the_budget(name: str, budget: int) -> None:
    config = Config(**read_recipe(name))
    found = method_from(config.method)
    assert isinstance(found, SubspaceIteration)
    assert isinstance(found.rank, int)

    def kept(rank: int) -> int:
        asked = replace(config, method=f"SubspaceIteration(rank={rank})")
        plan = building.plan_of(asked, model_of(config.model))
        after = [row.after for row in plan.rows if isinstance(row.method, SubspaceIteration)]
        return sum(cost.kept for cost in after if cost)

    assert kept(found.rank) <= budget < kept(found.rank + 1)


# Negative controls of the check


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"methods": {"decoder.no_such.*": "Exact()"}}, "No layer matches 'decoder.no_such.*'"),
        ({"layers": "encoder.layer9"}, "No layer matches 'encoder.layer9'"),
        ({"layers": "encoder.layer4, decoder"}, "encoder.layer4.0.conv1 does not run"),
        ({"head": "no_such.*"}, "head 'no_such.*' must fit some"),
        ({"head": "*"}, "head '*' must fit some"),
        ({"method": "HOSVD(varience=0.8)"}, "HOSVD has no setting varience. Did you mean variance"),
        ({"methods": {"segmentation_head.0": "Exect()"}}, "There is no method Exect"),
    ],
)
def test_recipe_that_does_not_fit_is_caught(changes: dict[str, Any], says: str) -> None:
    config = Config(**read_recipe("cvpr2023-voc-pspnet-resnet18-5l"))
    checked(replace(config, head="segmentation_head.*"))
    with pytest.raises(GradFilterError) as caught:
        checked(replace(config, **changes))
    assert says in str(caught.value)


# Files of the user


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "mine.yaml").write_text(text)
        return tmp_path / "mine.yaml"

    return write


def test_file_of_the_user(written: Callable[[str], Path]) -> None:
    text = 'lr: 1e-3\nwarmup: 1\ncache: on\nmethods: {"fc": "Exact()"}\n'
    assert read_recipe(written(text)) == {
        "lr": 0.001,
        "warmup": 1,
        "cache": "on",
        "methods": {"fc": "Exact()"},
    }
    assert read_recipe(written(read_text("pets"))) == read_recipe("pets")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epoch: 3", "has epoch, which is no setting. Did you mean epochs"),
        ("1: 3", "has 1, which is no setting."),
        ("- epochs", "holds no settings; write one a line, such as epochs: 10."),
        ("", "holds no settings"),
        ("epochs: [1", "is no YAML: "),
        ("a: b: c", "is no YAML: mapping values are not allowed here in line 1."),
        ("\x07", "is no YAML"),
        ("epochs: ten", "epochs must be a whole number, not 'ten'."),
        ("epochs: true", "epochs must be a whole number, not True."),
        ("lr: fast", "lr must be a number, not 'fast'."),
        ("model:", "model must be a text, not None."),
        ("augment: 3", "augment must be true or false, not 3."),
        ("norm: of", "norm must be fixed or affine or batch, not 'of'."),
        ("methods: Exact()", 'methods must be methods by layer, such as {"layer4.*": "Exact()"}, not'),
        ("epochs: 0", "epochs must be at least 1, not 0."),
    ],
)
def test_file_that_is_no_recipe(text: str, says: str, written: Callable[[str], Path]) -> None:
    with pytest.raises(GradFilterError) as caught:
        read_recipe(written(text))
    assert says in str(caught.value)
    assert str(caught.value)[-1] in ".?"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            "cvpr2023-cifar10-mobilenet",
            "There is no recipe cvpr2023-cifar10-mobilenet. Did you mean cvpr2023-",
        ),
        ("zzz", "There is no recipe zzz. `gradfilter recipes` lists them."),
        ("no_such.yaml", "no_such.yaml cannot be read (No such file or directory)"),
        ("/", "/ cannot be read (Is a directory)"),
    ],
)
def test_recipe_that_is_not_there(spec: str, says: str) -> None:
    with pytest.raises(GradFilterError) as caught:
        read_recipe(spec)
    assert says in str(caught.value)


def test_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "photo").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(GradFilterError, match="is no text; a recipe is a YAML file"):
        read_recipe(tmp_path / "photo")


# The command


def test_command_lists_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["recipe", *recipe_names()]
    assert cli.main(["recipes", "pets"]) == 0
    assert capsys.readouterr().out == read_text("pets")
    assert cli.main(["recipes", "pest"]) == 2
    assert "Did you mean pets" in capsys.readouterr().err


def test_options_override_a_recipe() -> None:
    arguments = ["train", "--recipe", "hosvd-pets", "--epochs", "3", "--methods", '{"fc": "Exact()"}']
    config = cli._parser().parse_args(arguments).config
    assert (config.epochs, config.methods) == (3, {"fc": "Exact()"})
    assert (config.batch, config.method) == (128, "HOSVD(variance=0.8)")
