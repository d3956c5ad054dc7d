"""gradfilter eval: the scores of a trained run on the test part of its data, or of other data."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..errors import GradFilterError
from .options import add_command, add_run, check_writable

__all__ = ["add"]

EXAMPLES = """\
examples:
  gradfilter eval runs/1
  gradfilter eval runs/1 --weights last --json scores.json
  gradfilter eval runs/1 --data other_pictures/
"""


def add(commands: Any) -> None:
    parser = add_command(commands, "eval", "test a trained run", EXAMPLES)
    add_run(parser)
    parser.add_argument("--data", help="other data than the run's own; all of it, where it has no test part")
    parser.add_argument("--json", metavar="FILE", help="also write the scores to a file")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    import json
    from dataclasses import replace

    from ..data.kinds import is_same_place
    from ..files import write
    from ..progress import Progress
    from ..training.run_folder import RunFolder
    from ..training.saved import open_run
    from ..training.scoring import scores_of_run
    from ..training.sets import open_sets

    check_writable(arguments.json)
    saved = open_run(arguments.folder, arguments.weights)
    config = saved.config
    if arguments.data:
        config = replace(config, data=arguments.data, partition="none", shots=0)
    with Progress() as tell:
        data, _ = open_sets(config, tell, to_train=False)
        if data.classes != saved.classes:
            raise GradFilterError(
                f"{config.data} has the classes {_some(data.classes)}, but {arguments.folder} was trained on "
                f"{_some(saved.classes)}; give data with the same classes."
            )
        if data.left_out:
            print(f"warning: {data.left_out}", file=sys.stderr)
        is_other = data.held_out and not is_same_place(config.data, saved.config.data)
        counts, noted = [len(data.train), len(data.test)], RunFolder.open(arguments.folder).found["samples"]
        is_whole = saved.config.partition == "none" and not saved.config.shots
        if is_other and (counts == noted if is_whole else counts[1] == noted[1]):
            # with all of it, what was trained on would be tested too
            print(
                f"warning: {config.data} has as many pictures as the data of {arguments.folder}; it is taken "
                "for the same, moved, and its test part alone is tested.",
                file=sys.stderr,
            )
            is_other = False
        parts = [data.train, data.test] if is_other else [data.test]
        scores = scores_of_run(saved, parts, tell)
    kind = "pictures" if len(parts) > 1 else "test pictures"
    for name, value in scores.items():
        print(f"{name.replace('_', ' ')}: {value:.2f} % of {sum(map(len, parts))} {kind}")
    if arguments.json:
        write(
            arguments.json, json.dumps({"weights": arguments.weights, "data": config.data, **scores}) + "\n"
        )


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
