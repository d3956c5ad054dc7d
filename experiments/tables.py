"""Write the measured tables into README.md and docs/performance.md, from the records in experiments/results.

    python -m gradfilter bench layers --json experiments/results/layers.json
    python -m gradfilter bench regions --json experiments/results/regions.json
    python experiments/depth_pets.py
    python experiments/tables.py

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end of generated -->``. Nothing is measured
here, so a test can tell whether a document still says what its record says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from gradfilter.bench import report
from gradfilter.bench.environment import conditions
from gradfilter.plans import format_bytes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
MISSING = "Not measured yet."
BLOCK = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end of generated -->", re.DOTALL)


def main() -> None:
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))


def filled(text: str) -> str:
    """A document with its tables made anew."""
    return BLOCK.sub(_block, text)


def _block(found: re.Match[str]) -> str:
    name = found[1]
    return f"<!-- generated: {name} -->\n{TABLES[name]()}\n<!-- end of generated -->"


def _readme() -> str:
    record = _record("regions")
    if record is None:
        return MISSING
    size = f"batch {record['batch']}, {record['size']} px"
    lines = [[size, "kept for the backward", "backward", "forward"]]
    names = {"exact": "exact (plain PyTorch)", "overlap 2": "patch 2", "overlap 4": "patch 4"}
    for row in record["rows"]:
        if row["arm"] in names:
            faster = "" if row["arm"] == "exact" else f" ({row['backward_ratio'][0]:.1f}x faster)"
            backward, forward = (f"{row[f'{way}_ms'][0]:.0f} ms" for way in ("backward", "forward"))
            kept = f"{format_bytes(row['kept'])} ({row['kept_share']:.2f}x)"
            lines.append([f"{row['region']}: {names[row['arm']]}", kept, backward + faster, forward])
    where = record["environment"]
    note = (
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}; "
        "the other methods and all conditions are in [docs/performance.md](docs/performance.md)."
    )
    return f"{report.markdown_table(lines)}\n\n{note}{_depth_sentence()}"


def _depth_sentence() -> str:
    """Exact and filtered accuracy over the seeds that both have."""
    runs = _record("depth_pets") or []
    seeds = {run["seed"] for run in runs if run["arm"] == "exact"}
    seeds &= {run["seed"] for run in runs if run["arm"] == "overlap"}
    if not seeds:
        return ""
    shared = [run for run in runs if run["seed"] in seeds]
    exact, filtered = (_mean_accuracy(shared, arm) for arm in ("exact", "overlap"))
    return (
        "\nFine-tuning **all** convolutions of MobileNetV2 on Oxford pets (96 px, 3 epochs, seed "
        f"{', '.join(map(str, sorted(seeds)))}): {exact:.1f} % exact, {filtered:.1f} % at patch 2."
    )


def _benchmark(name: str) -> Callable[[], str]:
    def made() -> str:
        record = _record(name)
        return MISSING if record is None else report.markdown(record)

    return made


def _depth() -> str:
    runs = _record("depth_pets")
    if not runs:
        return MISSING
    seeds = sorted({run["seed"] for run in runs})
    lines = [["method", *(f"seed {seed}" for seed in seeds), "mean test accuracy"]]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = {run["seed"]: run for run in runs if run["arm"] == arm}
        accuracy = [f"{own[seed]['test_accuracy']:.1f} %" if seed in own else "" for seed in seeds]
        lines.append([arm, *accuracy, f"{_mean_accuracy(runs, arm):.1f} %"])
    return f"{report.markdown_table(lines)}\n\n{conditions(runs[-1]['environment'])}"


def _mean_accuracy(runs: list[dict[str, Any]], arm: str) -> float:
    return mean(run["test_accuracy"] for run in runs if run["arm"] == arm)


def _record(name: str) -> Any:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


TABLES: dict[str, Callable[[], str]] = {
    "readme": _readme,
    "layers": _benchmark("layers"),
    "regions": _benchmark("regions"),
    "depth": _depth,
}

if __name__ == "__main__":
    main()
