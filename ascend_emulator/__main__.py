"""Run a script on an emulated Ascend machine, or say what is emulated.

python -m ascend_emulator [--devices N] [--nodes M] [--soc NAME] script.py args...
python -m ascend_emulator [options] -m module args...
python -m ascend_emulator [options] -c code
python -m ascend_emulator info
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import shlex
import sys

from ascend_emulator.load import prepare
from ascend_emulator.nodes import run_nodes


def main(arguments: list[str]) -> None:
    """Run a script, a module or a piece of code on an emulated machine."""
    own = argparse.ArgumentParser(
        prog="python -m ascend_emulator",
        description=__doc__,
        usage="%(prog)s [options] command ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own.add_argument("--devices", type=int, default=None, help="number of NPUs of each node (default 8)")
    own.add_argument("--nodes", type=int, default=None, help="number of nodes; the command runs once on each (default 1)")
    own.add_argument("--soc", default=None, help="SoC name (default Ascend910B1)")
    split = 0  # our options end where the command begins: a script, -m or -c
    while split < len(arguments) and (arguments[split].startswith("--") or arguments[split] == "-h"):
        split += 1 if "=" in arguments[split] or arguments[split] in ("-h", "--help") else 2
    options, command = own.parse_args(arguments[:split]), arguments[split:]
    if not command:
        own.error("nothing to run: give a script, -m module, -c code, info or env")
    if options.devices is not None and not 1 <= options.devices <= 64:
        own.error(f"--devices {options.devices}: a node has 1 to 64 NPUs")
    if options.nodes is not None and not 1 <= options.nodes <= 64:
        own.error(f"--nodes {options.nodes}: there may be 1 to 64 nodes")
    prepare(options.devices, options.soc)
    if options.nodes is not None:
        sys.exit(run_nodes(options.nodes, [], command))
    first, *rest = command
    if command == ["info"]:
        sys.stdout.write(importlib.import_module("ascend_emulator.info").report())  # it needs torch: only now
    elif command == ["env"]:
        names = [n for n in sorted(os.environ) if n.startswith("ASCEND_EMULATOR") and n != "ASCEND_EMULATOR_MACHINE"]
        for name in [*names, "TASK_QUEUE_ENABLE", "PYTHONPATH"]:
            sys.stdout.write(f"export {name}={shlex.quote(os.environ[name])}\n")
    elif first == "-m":
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
