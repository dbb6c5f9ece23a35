"""Tools for the command line: ``python -m ascend_core plan --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ascend_core import schedule_report
from ascend_core.errors import AscendError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Words after the program's name; default: the command line's.

    Returns:
        Exit status: 0, or 2 when the request cannot be met.
    """
    parser = argparse.ArgumentParser(prog="python -m ascend_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="simulate pipeline schedules", description=schedule_report.__doc__)
    schedule_report.add_arguments(plan)
    plan.set_defaults(run=schedule_report.run)
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(options.run(options))
    except AscendError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
