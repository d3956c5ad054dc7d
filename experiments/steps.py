"""Whole training steps: ``gradfilter bench step`` for the networks and layers of docs/performance.md.

    python experiments/steps.py                 all cases; those that are there are skipped
    python experiments/steps.py --again mcunet_last4

A case takes a few minutes. Close everything else first. Needs torchvision.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gradfilter.bench import report
from gradfilter.bench.arm import Settings
from gradfilter.bench.step import measure
from gradfilter.progress import Progress

RESULTS = Path(__file__).parent / "results" / "steps"
SHORT = ("inference", "exact", "filter", "exact+prefix", "filter+prefix")
FULL = (*SHORT[:2], "exact-all", *SHORT[2:], "filter+prefix+cache")
FEW = 5  # rounds, where memory is what is looked at
MANY = 61  # rounds, where the filter's own gain is small beside the noise
CASES = {
    "mobilenet_v2_last4": (Settings("mobilenet_v2", rounds=MANY), FULL),
    "mobilenet_v2_last4_one_process": (Settings("mobilenet_v2", rounds=FEW), FULL),
    "resnet18_last4": (Settings("resnet18", rounds=MANY), FULL),
    "resnet18_last4_collapse": (Settings("resnet18", taps="collapse"), SHORT),
    "mcunet_last4": (Settings("mcunet-5fps", size=128), FULL),
    "mobilenet_v2_half": (Settings("mobilenet_v2", layers="last:26", rounds=MANY), SHORT),
    "resnet18_half": (Settings("resnet18", layers="last:10"), SHORT),
    "mobilenet_v2_all": (Settings("mobilenet_v2", layers="all"), SHORT),
    "resnet18_all": (Settings("resnet18", layers="all"), SHORT),
    "mobilenet_v2_all_collapse": (Settings("mobilenet_v2", layers="all", taps="collapse"), SHORT),
    "resnet18_all_collapse": (Settings("resnet18", layers="all", taps="collapse"), SHORT),
    "mobilenet_v2_last4_patch4": (Settings("mobilenet_v2", patch=4, rounds=FEW), SHORT),
    "resnet18_last4_patch4": (Settings("resnet18", patch=4, rounds=FEW), SHORT),
    "mobilenet_v2_all_patch4": (Settings("mobilenet_v2", layers="all", patch=4, rounds=FEW), SHORT),
    "resnet18_all_patch4": (Settings("resnet18", layers="all", patch=4, rounds=FEW), SHORT),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", nargs="+", choices=list(CASES), default=[], help="measure these anew")
    again = parser.parse_args().again
    RESULTS.mkdir(exist_ok=True)
    for name, (settings, arms) in CASES.items():
        one_process = name.endswith("one_process")
        file = RESULTS / f"{name}.json"
        if file.exists() and name not in again:
            continue
        with Progress() as tell:
            record = measure(settings, arms, tell=tell, one_process=one_process)
        report.write(str(file), json.dumps(record, indent=1) + "\n")
        print(report.text(record), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
