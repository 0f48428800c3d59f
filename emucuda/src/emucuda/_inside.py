"""The first thing that runs on the card: it puts the pins in place and then becomes the user's program.

Started by its path, so that `sys.path` and `sys.argv` can be made what they would be without it.
"""

import os
import runpy
import sys


def main() -> None:
    arguments = sys.argv[1:]
    del sys.path[0]  # this file's own directory
    if os.environ.get("EMUCUDA_PINS") == "1":
        from emucuda._pins import install

        install()
    kind = arguments[0]
    sys.path.insert(0, "" if kind in ("-c", "-m") else os.path.dirname(os.path.abspath(kind)))
    if kind == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})  # nosec B102
    elif kind == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
