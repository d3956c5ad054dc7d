"""Energy of a piece of work, from the counters and sensors that a machine has. Nothing here is estimated.

What is measured is the whole processor or board while the work ran, idle power included.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

__all__ = ["Meter", "PowerMeter", "RaplMeter", "energy_of", "find_meter", "pmic_watts"]

Work = Callable[[], object]
FAILURES = (OSError, ValueError, subprocess.SubprocessError)  # of a sensor


@dataclass(frozen=True)
class Meter(ABC):
    """Something that says how much energy a piece of work took; ``name`` says what it reads."""

    name: str

    @abstractmethod
    def joules(self, work: Work) -> float:
        """Do the work; the energy meanwhile."""

    def joules_per_call(self, call: Work, least: float = 1.0) -> float:
        """Call until ``least`` seconds have passed: counters and sensors are slower than a short step."""
        calls = 0

        def work() -> None:
            nonlocal calls
            end = time.perf_counter() + least
            while calls == 0 or time.perf_counter() < end:
                call()
                calls += 1

        return self.joules(work) / calls


@dataclass(frozen=True)
class RaplMeter(Meter):
    """Counters of Intel and AMD processors, in microjoules. They start again at 0 every so many minutes."""

    zones: tuple[Path, ...]

    def joules(self, work: Work) -> float:
        before = [_number(zone / "energy_uj") for zone in self.zones]
        work()
        spent = [_number(zone / "energy_uj") - b for zone, b in zip(self.zones, before, strict=True)]
        return sum(s if s >= 0 else s + self._range(z) for z, s in zip(self.zones, spent, strict=True)) / 1e6

    @staticmethod
    def _range(zone: Path) -> int:
        return _number(zone / "max_energy_range_uj")


@dataclass(frozen=True)
class PowerMeter(Meter):
    """A sensor of power, read by a thread every ``period`` seconds and added up (trapezoids).

    >>> 0.9 < PowerMeter("5 watts", lambda: 5.0).joules(lambda: time.sleep(0.2)) < 5  # a busy machine is late
    True
    """

    watts: Callable[[], float]
    period: float = 0.05

    def joules(self, work: Work) -> float:
        samples = [(time.perf_counter(), self.watts())]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(self.period):
                with suppress(*FAILURES):  # one sample less
                    samples.append((time.perf_counter(), self.watts()))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            work()
        finally:
            done.set()
            watcher.join()
        samples.append((time.perf_counter(), self.watts()))
        pairs = pairwise(samples)
        return sum((end - start) * (p + q) / 2 for (start, p), (end, q) in pairs)


def find_meter(root: Path = Path("/"), command: str = "vcgencmd") -> Meter | str:
    """The machine's meter, or "unavailable: " and why there is none.

    >>> find_meter(Path("/nowhere"), command="nothing")
    'unavailable: no RAPL counter, no INA3221 sensor and no nothing on this machine'
    """
    try:
        found = _rapl(root) or _ina3221(root) or _raspberry_pi(command)
    except PermissionError as error:
        return f"unavailable: {error.filename} may be read by root only"
    except FAILURES as error:
        return _unreadable(error)
    return found or f"unavailable: no RAPL counter, no INA3221 sensor and no {command} on this machine"


def energy_of(call: Work, meter: Meter | str) -> float | str:
    """Joules per call, or why there are none: the reason that stands for the meter, or that it failed."""
    try:
        return meter if isinstance(meter, str) else meter.joules_per_call(call)
    except FAILURES as error:
        return _unreadable(error)


def _unreadable(error: Exception) -> str:
    return f"unavailable: the sensor cannot be read ({error})"


def _rapl(root: Path) -> Meter | None:
    """Packages and their memory. Cores and graphics are part of a package; psys has packages as its parts."""
    zones = {zone: _text(zone / "name") for zone in _glob(root, "sys/class/powercap/intel-rapl:*")}
    chosen = {zone: name for zone, name in zones.items() if name.startswith(("package", "dram"))}
    for zone in chosen:
        _number(zone / "energy_uj")
    return RaplMeter(f"RAPL: {', '.join(chosen.values())}", tuple(chosen)) if chosen else None


def _ina3221(root: Path) -> Meter | None:
    """The sensor of Jetson boards. A rail named ..._IN feeds all others; without one the rails are added."""
    rails = {}
    for sensor in _glob(root, "sys/class/hwmon/hwmon*"):
        if (sensor / "name").exists() and _text(sensor / "name") == "ina3221":
            for current in _glob(sensor, "curr[0-9]_input"):
                number = current.name[4]
                label = sensor / f"in{number}_label"
                name = _text(label) if label.exists() else f"{sensor.name}.{number}"
                rails[name] = (sensor / f"in{number}_input", current)
    inputs = {name: files for name, files in rails.items() if name.endswith("_IN")}
    chosen = inputs or rails

    def watts() -> float:  # from mV and mA
        return sum(_number(volt) * _number(current) for volt, current in chosen.values()) / 1e6

    if not chosen:
        return None
    watts()
    return PowerMeter(f"INA3221: {', '.join(chosen)}", watts)


def _raspberry_pi(command: str) -> Meter | None:
    """The power chip of a Raspberry Pi 5; earlier ones have the command but no such chip."""
    program = shutil.which(command)
    if program is None:
        return None

    def watts() -> float:
        asked = [program, "pmic_read_adc"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
        return pmic_watts(done.stdout)

    watts()
    return PowerMeter("Raspberry Pi PMIC: all rails", watts)


def pmic_watts(printed: str) -> float:
    """The sum over rails that have both a current and a voltage.

    >>> pmic_watts("VDD_CORE_A current(7)=2.0A\\n VDD_CORE_V volt(15)=0.75V\\n EXT5V_V volt(24)=5.1V")
    1.5
    """
    found = {
        (rail, kind): float(value) for rail, kind, value in re.findall(r"(\w+)_([AV]) .*?=([\d.]+)", printed)
    }
    both = [rail for rail, kind in found if kind == "A" and (rail, "V") in found]
    if not both:
        raise ValueError(f"pmic_read_adc printed {printed.strip()[:60]!r}")
    return sum(found[rail, "A"] * found[rail, "V"] for rail in both)


def _glob(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def _text(file: Path) -> str:
    return file.read_text().strip()


def _number(file: Path) -> int:
    return int(_text(file))
