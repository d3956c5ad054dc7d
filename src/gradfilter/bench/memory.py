"""Peak memory of a training step, measured in a fresh process: in an old one, freed memory hides new.

The figure is the largest resident size (VmHWM) during three steps, less the resident size before the first,
less the bytes of the gradients and of the optimizer's state. So it is what a step needs above a loaded model,
its gradients and its optimizer: activations, buffers of the operators, and what libraries set up when first
used (torch 2.13 on x86: about 8 MiB in inference, 12 to 19 in training, whatever the batch; less in arms with
``+cache``, where the frozen prefix has run before). Gradients are set to zero between the steps, not freed,
so that they are there all the time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .arm import Settings
from .worker import Worker

__all__ = ["peak_above", "peak_of_process", "peak_of_step"]

STEPS = 3  # the first makes gradients and optimizer state
# glibc keeps freed memory for later; how much depends on what ran before, and peaks of equal runs differ by
# 10 %. With a fixed threshold whatever is larger goes back to the system at once: they differ by 0.5 %.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak_of_step(settings: Settings, arm: str) -> int | str:
    """Peak bytes of an arm's step; where they cannot be measured, "unavailable: " and the reason."""
    if settings.device != "cpu":
        return "unavailable: the memory of the process says nothing about another device"
    with Worker(settings, arm, ALLOCATOR) as worker:
        return worker.peak()


def peak_above(step: Callable[[], object], held: Callable[[], int]) -> int:
    """Peak bytes of this process in a few steps, above what it has now and what is ``held`` at the end."""
    gc.collect()
    with suppress(OSError):  # where it is not allowed, a peak that building the model had would count
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident()
    for _ in range(STEPS):
        step()
    return max(0, peak_of_process() - before - held())


def _resident() -> int:
    try:
        return _status("VmRSS")
    except OSError:  # not Linux
        return peak_of_process()


def peak_of_process() -> int:
    """The largest resident size of this process so far."""
    try:
        return _status("VmHWM")
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024
