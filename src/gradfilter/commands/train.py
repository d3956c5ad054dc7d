"""gradfilter train: fine-tune a model on pictures, from settings, a recipe, or where a run was stopped."""

from __future__ import annotations

import argparse
import atexit
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_type_hints

from ..errors import GradFilterError, nearest
from ..training.settings import Config, Loop, described, help_of

if TYPE_CHECKING:
    from ..training.history import History
    from ..training.job import Job

__all__ = ["add"]

EXAMPLES = """\
examples:
  gradfilter train                                      the embedded digits, MobileNetV2, last 4 convolutions
  gradfilter train --data pictures/                     a folder of class folders
  gradfilter train --data camvid:CamVid/ --model smp:UPerNet/resnet18 --weights resnet18.pth
  gradfilter train --data cifar10 --download --method "HOSVD(variance=0.8)" --augment false
  gradfilter train --recipe pets --epochs 3 --seed 1    any field of a recipe can be given anew
  gradfilter train --resume runs/1                      go on with a run that was stopped, bit by bit
  torchrun --nproc-per-node 2 -m gradfilter train       frozen layers shared by two processes, same bits
"""


def add(commands: Any) -> None:
    parser = commands.add_parser("train", help="fine-tune a model on pictures: classes or masks")
    parser.read = _read


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    """The whole command line: defaults, then a recipe, then a file of settings, then single options."""
    from jsonargparse import ArgumentError

    from ..training.recipes import read_recipe

    arguments = [*_spelled(arguments)]
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", nargs="?")
    first.add_argument("--config", nargs="?", action="append", default=[])
    files = first.parse_known_args(arguments)[0]
    parser = _parser()
    for file in filter(None, (files.recipe, *files.config)):
        parser.set_defaults(read_recipe(file))
    try:
        found = parser.parse_args(arguments).as_dict()
    except ArgumentError as error:
        raise GradFilterError(_sentence(str(error))) from None
    resume = found.pop("resume")
    if resume == "":
        raise GradFilterError("--resume is empty; give the folder of the run that is to go on.")
    if resume and len(arguments) > (1 if arguments[0].startswith("--resume=") else 2):
        raise GradFilterError("--resume goes on as the run was begun; give no other option with it.")
    values = {name: value for name, value in found.items() if name not in ("recipe", "config")}
    return argparse.Namespace(run=_run, resume=resume, config=None if resume else Config(**values))


def _spelled(arguments: Sequence[str]) -> Iterator[str]:
    """``--lr-end`` for ``--lr_end``, and ``--download`` alone for ``--download true``."""
    flags = {each.name for each in fields(Config) if each.type == "bool"}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, sign, value = argument.partition("=")
        if name.startswith("--"):
            name = f"--{name[2:].replace('-', '_')}"
        is_alone = name[2:] in flags and not sign and following.lower() not in ("true", "false")
        yield f"{name}=true" if is_alone else f"{name}{sign}{value}"


def _parser() -> Any:
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter):
        """Examples as they are written."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return text if text == EXAMPLES else super()._fill_text(text, width, indent)

    parser = ArgumentParser(
        prog="gradfilter train",
        usage="gradfilter train [options]",
        description="Fine-tune a model on pictures. Without options: the embedded digits.",
        epilog=EXAMPLES,
        exit_on_error=False,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", help="settings of the package (`gradfilter recipes`), or a YAML file")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of settings, after the recipe")
    parser.add_argument("--resume", metavar="RUN", help="the folder of a run that was stopped")
    parser.add_class_arguments(Config)
    parser._action_groups[-1].title = "settings"
    helps = help_of(Loop, Config)
    for action in parser._actions:
        if action.dest in helps:
            action.help = helps[action.dest]
    return parser


def _sentence(message: str) -> str:
    """One line of what jsonargparse says in several, with the nearest name where one is unknown."""
    line = " ".join(message.split())
    alone = re.search(r"[Uu]nrecognized arguments: ([^-]\S*)", line)
    if alone:
        return f"{alone[1]} belongs to no option; is it --data {alone[1]}? See gradfilter train --help."
    unknown = re.search(
        r"[Uu]nrecognized arguments: --([\w-]+)"
        r"|(?:Key|Option) [\"']([\w-]+)[\"'] is not (?:expected|accepted)",
        line,
    )
    if unknown:
        name = unknown[1] or unknown[2]
        known = ["recipe", "config", "resume", *(each.name for each in fields(Config))]
        return f"There is no setting {name}.{nearest(name, known)} See gradfilter train --help."
    wrong = re.search(r"key \"(\w+)\":.*?Got value: (.*)$", line)
    if wrong:
        kind = get_type_hints(Config).get(wrong[1])
        return f"{wrong[1]} must be {described(kind) if kind else 'of another kind'}, not {wrong[2]}."
    return line.rstrip(".") + "."


def _run(arguments: argparse.Namespace) -> None:
    from ..progress import Progress
    from ..training.job import go_on, prepare
    from ..training.processes import is_first

    with _processes(), Progress(quiet=not is_first()) as tell:
        if arguments.resume:
            job = go_on(arguments.resume, tell=tell, say=tell.say)
        else:
            job = prepare(arguments.config, tell=tell, say=tell.say)
        try:
            history = job.train()
        except KeyboardInterrupt:
            way_on = f"gradfilter train --resume {job.run.path} goes on."
            raise KeyboardInterrupt(f"interrupted; {way_on}") from None
        if is_first():
            tell.say(_result(job, history))


@contextmanager
def _processes() -> Iterator[None]:
    """Join the other processes, where torchrun has started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()
    except RuntimeError as error:
        dist.destroy_process_group()
        if "gloo" not in str(error):
            raise
        raise GradFilterError("Another process of this training has ended, or does not answer.") from None
    except BaseException:
        dist.destroy_process_group()
        raise
    _leave()


def _leave() -> None:
    """End this process well: gloo's threads may abort one that ends while another has not."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _result(job: Job, history: History) -> str:
    last, best = history.epochs[-1], history.best_scores
    lines = [
        f"{name.replace('_', ' ')}: {best[name]:.2f} % best (epoch {best['epoch']}), {last[name]:.2f} % last"
        for name in history.score_names
    ]
    if history.why_ended:
        lines.append(f"Stopped early: {history.why_ended}.")
    lines.append(f"{last['seconds']:.0f} s. Report: {job.run.path / 'report.html'}")
    return "\n".join(lines)
