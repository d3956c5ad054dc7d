"""Write the measured tables into README.md and docs/performance.md, from the records in experiments/results,
and the list of recipes into docs/recipes.md, from their files.

    python -m gradfilter bench layers --json experiments/results/layers.json
    python -m gradfilter bench regions --json experiments/results/regions.json
    python experiments/depth_pets.py
    python experiments/steps.py
    python experiments/cached_epochs.py
    python experiments/native_pass.py
    python experiments/kernel_gradient.py
    python experiments/tiles.py
    python experiments/products.py
    python experiments/methods.py
    python experiments/hosvd_speed.py tail, accelerated, eager
    python experiments/peaks.py
    python experiments/training.py
    python experiments/long_run.py
    python experiments/processes.py
    python experiments/tables.py

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end of generated -->``. Nothing is measured
here, so a test can tell whether a document still says what its record says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from gradfilter.bench import report
from gradfilter.bench.environment import conditions
from gradfilter.bench.timing import Interval
from gradfilter.plans import format_bytes
from gradfilter.training.recipes import recipe_names, title_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("performance", "methods", "training", "recipes")),
)
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


README_CASES = {
    "mobilenet_v2_last4": "MobileNetV2, last 4 convolutions",
    "resnet18_last4": "ResNet-18, last 4 convolutions",
    "mobilenet_v2_all": "MobileNetV2, all layers",
    "resnet18_all": "ResNet-18, all layers",
}


def _readme() -> str:
    records = {name: _record(f"steps/{name}") for name in README_CASES}
    if None in records.values():
        return MISSING
    lines = [["one step, batch 8, 224 px, patch 2", "time", "of inference", "kept", "peak above the model"]]
    for name, title in README_CASES.items():
        arms = {row["name"]: row for row in records[name]["arms"]}
        for arm, called in (("inference", "inference"), ("exact", "exact"), ("filter+prefix", "gradfilter")):
            lines.append([f"{title}: {called}", *_step_cells(arms[arm])])
    where = records["resnet18_all"]["environment"]
    note = (
        "Inference and exact training are plain PyTorch, channels-last, each in its own process; gradfilter "
        "also keeps freed memory from step to step, which is part of its gain. "
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}; all methods, layers and "
        "conditions are in [docs/performance.md](docs/performance.md)."
    )
    return f"{report.markdown_table(lines)}\n\n{note}{_depth_sentence()}"


def _step_cells(row: dict[str, Any]) -> list[str]:
    sizes = [format_bytes(row[key]) for key in ("kept_bytes", "peak_bytes")]
    return [f"{row['step_ms']:.0f} ms", f"{row['to_inference']:.2f}x", *sizes]


def _steps() -> str:
    """Every case of experiments/steps.py, and by how much the filter beats exact with the same prefix."""
    records = {file.stem: json.loads(file.read_text()) for file in sorted((RESULTS / "steps").glob("*.json"))}
    if not records:
        return MISSING
    head = [
        "case",
        "arm",
        "step",
        "of inference",
        "kept",
        "peak",
        "forward",
        "backward",
        "gain of the filter",
    ]
    lines = [head]
    for record in records.values():
        arms = {row["name"]: row for row in record["arms"] if "unavailable" not in row}
        gain = arms["exact+prefix"]["step_ms"] / arms["filter+prefix"]["step_ms"]
        s = record["settings"]
        case = f"{s['model']}, {s['layers']}, {s['taps']} {s['patch']}, {s['size']} px"
        case += ", one process" if record["one_process"] else ""
        for name, row in arms.items():
            parts = [f"{row[part]:.1f} ms" for part in ("forward_ms", "backward_ms")]
            ours = f"{gain:.2f}x" if name == "filter+prefix" else ""
            lines.append([case, name, *_step_cells(row), *parts, ours])
    last = list(records.values())[-1]
    return f"{report.markdown_table(lines)}\n\n{conditions(last['environment'])}"


def _cached_epochs() -> str:
    record = _record("cached_epochs")
    if record is None:
        return MISSING
    lines = [["model", "exact, no cache", "making the cache", "epochs from it", "together, of exact"]]
    for row in record["rows"]:
        seconds = [f"{row[key]:.1f} s" for key in ("exact_s", "build_s", "cached_s")]
        lines.append([row["model"], *seconds, f"{(row['build_s'] + row['cached_s']) / row['exact_s']:.2f}x"])
    return f"{report.markdown_table(lines)}\n\n{conditions(record['environment'])}"


def _native_pass() -> str:
    record = _record("native_pass")
    if record is None:
        return MISSING
    lines = [["map", "way", "time", "first call"]]
    for row in record["rows"]:
        shape = " x ".join(map(str, row["shape"]))
        lines.append([shape, row["way"], f"{row['ms']:.2f} ms", f"{row['first_s']:.2f} s"])
    return f"{report.markdown_table(lines)}\n\n{conditions(record['environment'])}"


def _ways(name: str) -> str:
    """Several ways to compute the same, side by side: their times, and errors where they are known."""
    record = _record(name)
    if record is None:
        return MISSING
    ways = list(dict.fromkeys(row["way"] for row in record["rows"]))
    judged = [way for way in ways if "error" in record["rows"][0]]
    lines = [["sizes", *ways, *(f"error of {way}" for way in judged)]]
    for shape in dict.fromkeys(tuple(row["shape"]) for row in record["rows"]):
        own = {row["way"]: row for row in record["rows"] if tuple(row["shape"]) == shape}
        lines.append([" x ".join(map(str, shape)), *(f"{own[way]['ms']:.2f} ms" for way in ways)])
        lines[-1] += [f"{own[way]['error']:.1e}" for way in judged]
    return f"{report.markdown_table(lines)}\n\n{conditions(record['environment'])}"


def _methods() -> str:
    """Every method at its settings; of MobileNetV2 and ResNet-18 side by side."""
    rows = _record("methods")
    if not rows:
        return MISSING
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [["method", *(f"{name}: {what}" for name in models for what in ("kept", "step", "cosine"))]]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["model"]: row for row in rows if row["method"] == method}
        lines.append([f"`{method}`", *(cell for name in models for cell in _method_cells(own[name]))])
    return f"{report.markdown_table(lines)}\n\n{conditions(rows[-1]['environment'])}"


def _training() -> str:
    """Every run of experiments/training.py; the mean where there are several seeds."""
    cases = {
        file.stem: json.loads(file.read_text()) for file in sorted((RESULTS / "training").glob("*.json"))
    }
    if not cases:
        return MISSING
    lines = [["case", "method", "seeds", "score", "best epoch", "last epoch", "kept", "step", "exact, plain"]]
    for case, runs in cases.items():
        for arm in dict.fromkeys(run["arm"] for run in runs):
            lines.append([case, arm, *_training_cells([run for run in runs if run["arm"] == arm])])
    where = [f"{case}: {_training_conditions(runs)}" for case, runs in cases.items()]
    return "\n\n".join([report.markdown_table(lines), *where])


def _training_conditions(runs: list[dict[str, Any]]) -> str:
    """Of the first run, whose steps stand in the table, and where else runs were made."""
    first, *others = (run["environment"] for run in runs)
    elsewhere = dict.fromkeys(
        f"{at['processor']}, {at['threads']} threads, commit {at['commit']}" for at in others
    )
    elsewhere.pop(f"{first['processor']}, {first['threads']} threads, commit {first['commit']}", None)
    return conditions(first) + "".join(f" Other runs: {place}." for place in elsewhere)


def _training_cells(runs: list[dict[str, Any]]) -> list[str]:
    name = runs[0]["scores"][0]
    scores = [f"{mean(run[which][name] for run in runs):.2f} %" for which in ("best", "last")]
    kept, step = (_cost_of(runs[0], what) for what in ("kept", "step"))
    seeds = ", ".join(str(run["seed"]) for run in runs)
    times = [f"{step[arm]:.0f} ms" for arm in ("this run", "exact")]
    return [seeds, name.replace("_", " "), *scores, f"{kept['this run'] / kept['exact']:.3f}x", *times]


def _cost_of(run: dict[str, Any], what: str) -> dict[str, float]:
    return next(values for name, values in run["costs"].items() if name.startswith(what))


def _method_cells(row: dict[str, Any]) -> list[str]:
    cosine = "" if row["cosine"] is None else f"{row['cosine']:.3f}"
    return [f"{row['kept_bytes'] / row['exact_bytes']:.3f}x", f"{row['to_exact']['median']:.2f}x", cosine]


def _peaks() -> str:
    record = _record("peaks")
    if record is None:
        return MISSING
    exact = record["rows"][0]["peak_bytes"]
    lines = [["method", "peak above the model", "of exact"]]
    for row in record["rows"]:
        lines.append([row["method"], format_bytes(row["peak_bytes"]), f"{row['peak_bytes'] / exact:.2f}x"])
    return f"{report.markdown_table(lines)}\n\n{conditions(record['environment'])}"


def _hosvd_speed() -> str:
    record = _record("hosvd_speed")
    if record is None:
        return MISSING
    lines = [["what is timed", "arm", "step", "of exact", "faster than by torch.linalg.svd"]]
    for mode, found in record.items():
        for row in found["rows"]:
            ratios = f"{row['of_exact'][0]:.2f}x", Interval(*row["faster_than_svd"]).as_ratio()
            lines.append([mode, row["arm"], f"{row['ms']:.0f} ms", *ratios])
    return f"{report.markdown_table(lines)}\n\n{conditions(found['environment'])}"


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


def _long_run() -> str:
    record = _record("long_run")
    if record is None:
        return MISSING
    first = "300"  # by then everything has been allocated once
    sizes, held = (_from(first, record[name]) for name in ("resident_bytes", "allocated_bytes"))
    return (
        f"{record['steps']} steps in {record['seconds']:.0f} s: from step {first} on the process had "
        f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}, at the end {format_bytes(sizes[-1])}; "
        f"what it held of that grew by at most {format_bytes(max(held) - held[0])}. It waited for pictures "
        f"{100 * record['waited'] / record['seconds']:.1f} % of the time."
        f"\n\n{conditions(record['environment'])}"
    )


def _from(step: str, sizes: dict[str, int]) -> list[int]:
    return [size for at, size in sizes.items() if int(at) >= int(step)]


def _processes() -> str:
    record = _record("processes")
    if record is None:
        return MISSING
    ways = {"two_processes": "two processes", "two_threads": "one process, two threads"}
    titles = [
        f"{way}: {what}" for way in ways.values() for what in ("same bits", "within 1e-6", "most", "time")
    ]
    lines = [[f"{record['steps']} steps", *titles]]
    for case in dict.fromkeys(row["case"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["case"] == case]
        lines.append([case, *(cell for way in ways for cell in [*_apart(rows, way), _time(rows, way)])])
    return f"{report.markdown_table(lines)}\n\n{conditions(record['environment'])}"


def _apart(rows: list[dict[str, Any]], way: str) -> list[str]:
    distances, count = [row[way] for row in rows], len(rows)
    within = [f"{sum(d <= limit for d in distances)} of {count}" for limit in (0.0, 1e-6)]
    return [*within, f"{max(distances):.0e}" if max(distances) else "0"]


def _time(rows: list[dict[str, Any]], way: str) -> str:
    """Of one process with one thread."""
    return f"{median(row['seconds'][way] / row['seconds']['alone'] for row in rows):.2f}x"


def _recipes() -> str:
    return report.markdown_table([["recipe", "what"], *([f"`{n}`", title_of(n)] for n in recipe_names())])


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
    "steps": _steps,
    "cached_epochs": _cached_epochs,
    "native_pass": _native_pass,
    "kernel_gradient": partial(_ways, "kernel_gradient"),
    "tiles": partial(_ways, "tiles"),
    "products": partial(_ways, "products"),
    "methods": _methods,
    "hosvd_speed": _hosvd_speed,
    "peaks": _peaks,
    "training": _training,
    "long_run": _long_run,
    "processes": _processes,
    "recipes": _recipes,
}

if __name__ == "__main__":
    main()
