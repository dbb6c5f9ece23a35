"""``python -m ascend_emulator [--devices N] [--soc NAME] script.py args...`` (or ``-m module``, or ``-c code``)."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from ascend_emulator.load import prepare


def main(arguments: list[str]) -> None:
    """Run a script, a module or a piece of code on an emulated machine."""
    own = argparse.ArgumentParser(prog="python -m ascend_emulator", description=__doc__, usage="%(prog)s [options] command ...")
    own.add_argument("--devices", type=int, default=None, help="number of NPUs (default 8)")
    own.add_argument("--soc", default=None, help="SoC name (default Ascend910B1)")
    split = 0  # our options end where the command begins: a script, -m or -c
    while split < len(arguments) and (arguments[split].startswith("--") or arguments[split] == "-h"):
        split += 1 if "=" in arguments[split] or arguments[split] in ("-h", "--help") else 2
    options, command = own.parse_args(arguments[:split]), arguments[split:]
    if not command:
        own.error("nothing to run: give a script, -m module or -c code")
    prepare(options.devices, options.soc)
    first, *rest = command
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
