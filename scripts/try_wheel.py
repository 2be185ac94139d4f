"""Try the installed recapd: every file is there, every module imports, the command answers.

    python -I scripts/try_wheel.py PROJECT_ROOT

Runs where recapd was installed from the wheel; PROJECT_ROOT is only looked at to compare.
"""

import importlib
import subprocess
import sys
import sysconfig
from pathlib import Path

PARTS = ("daemon", "protocol", "storage")


def source_files(root: Path) -> set[str]:
    """Names of the files that the package should hold, relative to it."""
    found = (path for part in PARTS for path in (root / part).rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts}


def module_name(file: str) -> str:
    return f"recapd/{file}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def main() -> None:
    root = Path(sys.argv[1])
    package = Path(str(importlib.import_module("recapd").__file__)).parent
    if not package.is_relative_to(sys.prefix):
        raise SystemExit(f"recapd comes from {package}, not from the wheel")
    files = source_files(root)
    missing = sorted(name for name in {*files, "py.typed"} if not (package / name).is_file())
    if missing:
        raise SystemExit(f"not in the wheel: {', '.join(missing)}")
    modules = sorted(module_name(name) for name in files if name.endswith(".py"))
    for name in modules:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    command = Path(sysconfig.get_path("scripts")) / "recapd"
    print(f"{len(files)} files, {len(modules)} modules", flush=True)
    raise SystemExit(subprocess.run([command, "--version"]).returncode)


if __name__ == "__main__":
    main()
