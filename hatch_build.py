"""Build hook: compile the native passes into the package. Without a compiler the package is pure Python."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "src" / "gradfilter" / "native"


class NativeHook(BuildHookInterface):
    """Run native/build.py; what it made goes into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = runpy.run_path(str(NATIVE / "build.py"))
        problem = builder["build"]()
        if problem:
            self.app.display_warning(f"native passes not built: {problem}; torch's operators serve instead.")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        for name in (builder["LIBRARY"], builder["WIDE"]):
            if (NATIVE / name).exists():
                build_data["artifacts"].append(f"src/gradfilter/native/{name}")
