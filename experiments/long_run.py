"""3,000 steps of `gradfilter train` on JPEG files at 224 px: is memory flat, does the loop wait for pictures?

    python experiments/long_run.py

MobileNetV2, last 4 convolutions, patch 2, batch 8, augmented, pictures decoded once. 1,200 made-up pictures,
800 by 600. Takes ten minutes or so. Close everything else first: readers and the loop share the processors.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from gradfilter.bench.environment import environment
from gradfilter.progress import Progress
from gradfilter.training.job import prepare
from gradfilter.training.settings import Config

RESULTS = Path(__file__).parent / "results" / "long_run.json"
STEPS, PICTURES, CLASSES, WARM = 3000, 1200, 3, 300
PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    sizes: dict[int, int] = {}
    held: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:

        def tell(task: str, step: int, steps: int) -> None:
            progress(task, step, steps)
            if task == "training" and step % 100 == 0:
                sizes[step], held[step] = resident(), allocated()

        make_pictures(Path(folder, "pictures"))
        settings = {"data": f"{folder}/pictures", "out": f"{folder}/run", "model": "mobilenet_v2"}
        job = prepare(Config(**settings, size=224, batch=8, steps=STEPS), tell=tell, say=progress.say)
        last = job.train().epochs[-1]
    grown, more_held = (
        max(size for step, size in seen.items() if step >= WARM) - seen[WARM] for seen in (sizes, held)
    )
    share = last["waited"] / last["seconds"]
    print(
        f"{grown / 2**20:+.1f} MiB at most from step {WARM} on, {more_held / 2**20:+.2f} MiB of it in use; "
        f"waited {100 * share:.1f} % of {last['seconds']:.0f} s"
    )
    record = {
        "environment": environment(),
        "steps": STEPS,
        "resident_bytes": sizes,
        "allocated_bytes": held,
        "seconds": last["seconds"],
        "waited": last["waited"],
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def make_pictures(folder: Path) -> None:
    """Smooth noise, as large in a file as a photograph of that size, in a folder per class."""
    random = np.random.default_rng(0)
    for index in range(PICTURES):
        label = index % CLASSES
        small = random.integers(0, 200, (38, 50, 3))
        small[..., label] += 55
        place = folder / f"class{label}"
        place.mkdir(parents=True, exist_ok=True)
        large = Image.fromarray(small.astype(np.uint8)).resize((800, 600), Image.Resampling.BICUBIC)
        large.save(place / f"{index}.jpg", quality=92)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2: what was mapped stands at 4, what is in use of the rest at 7."""

    _fields_ = (("counts", ctypes.c_size_t * 10),)


def allocated() -> int:
    """The bytes in use among those that the C library has from the system."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo
    counts = library.mallinfo2().counts
    return int(counts[4] + counts[7])


if __name__ == "__main__":
    main()
