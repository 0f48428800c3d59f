"""`python -m benchmarks`: the published table; `--list` says what else there is to run."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys

import benchmarks


def runnable() -> dict[str, str]:
    """What can be run, and the first line of what each says about itself."""
    found = {}
    for info in pkgutil.iter_modules(benchmarks.__path__):
        if info.name not in ("__main__", "table"):
            name = f"benchmarks.{info.name}"
            module = importlib.import_module(name)
            if hasattr(module, "main") or (info.ispkg and importlib.util.find_spec(f"{name}.__main__")):
                found[name] = (module.__doc__ or "").partition("\n")[0]
    return found


def main() -> int:
    if sys.argv[1:] == ["--list"]:
        for name, summary in runnable().items():
            print(f"python -m {name}\n    {summary}")
        return 0
    from benchmarks import table

    return table.main()


if __name__ == "__main__":
    sys.exit(main())
