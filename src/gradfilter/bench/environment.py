"""Under which conditions a number was measured. What cannot be found out is recorded with the reason."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..errors import GradFilterError

__all__ = ["available_memory", "conditions", "device_named", "environment", "wait_for"]


def environment() -> dict[str, str | int]:
    """Commit, versions, processor, threads, load and date, ready for JSON.

    >>> sorted(environment())
    ['commit', 'date', 'load', 'processor', 'python', 'system', 'threads', 'torch']
    """
    return {
        "commit": _commit(Path(__file__).parents[1]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "load": _load(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def conditions(found: dict[str, str | int]) -> str:
    """An environment as a sentence for below a table."""
    return (
        f"Commit {found['commit']}; torch {found['torch']}, Python {found['python']}, {found['system']}, "
        f"{found['processor']}, {found['threads']} threads, load {found['load']} at the start; "
        f"{found['date']}."
    )


def _commit(folder: Path) -> str:
    git = shutil.which("git")
    if git is None:
        return _unavailable("git is not installed")
    try:
        commit = _output(git, "-C", str(folder), "rev-parse", "HEAD")
        changes = _output(git, "-C", str(folder), "status", "--porcelain", "--", str(folder))
    except (OSError, subprocess.SubprocessError):
        return _unavailable("not a git checkout")
    return commit[:12] + (" with uncommitted changes" if changes else "")


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603  git alone
    return done.stdout.strip()


def _processor() -> str:
    """Name and number of cores. In /proc/cpuinfo the name has another key on each architecture."""
    cores = f"{os.cpu_count()} cores"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.processor() or _unavailable('the system does not say')}, {cores}"
    facts = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    name = next((facts[key].strip() for key in ("model name", "Model", "Hardware") if key in facts), None)
    if name and "cpu family" in facts:  # machines that are rented call all of their processors the same
        name += f" (family{facts['cpu family']}, model{facts['model']})"
    return f"{name or _unavailable('not in /proc/cpuinfo')}, {cores}"


def _load() -> str:
    """How many processes wanted to run in the last minute: times taken on a busy machine say little."""
    try:
        return f"{os.getloadavg()[0]:.1f}"
    except (AttributeError, OSError):  # Windows
        return _unavailable("the system does not say")


def _unavailable(reason: str) -> str:
    return f"unavailable ({reason})"


def available_memory() -> int | None:
    """Bytes that new work can have without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def device_named(name: str) -> torch.device:
    """The device, if this machine has it.

    >>> device_named("cpu")
    device(type='cpu')
    """
    try:
        device = torch.empty(0, device=name).device
        wait_for(device)
    except (
        RuntimeError,
        AssertionError,
        AttributeError,
    ) as error:  # an assertion: torch was built without it
        reason = str(error).partition("\n")[0].rstrip(".")
        raise GradFilterError(f"Device {name} cannot be used here ({reason}); cpu always can.") from None
    return device


def wait_for(device: torch.device) -> None:
    """Other devices than the processor work on after a call has returned; wait before reading a clock."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
