"""A process on the emulated machine that runs operators and writes one JSON line for each.

Started as ``python -m ascend_emulator worker.py RESULTS [--dtype D] [--limit N] [--names NAME ...]``. A line
``{"start": NAME}`` comes before each, so that whoever reads the file knows what ran when the process died.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch_npu  # noqa: F401

from ascend_emulator.ops import layers
from conformance.gaps import deadly, load
from conformance.samples import main_dtype, operators
from conformance.suite import run_operator


def listing(database: dict[str, Any]) -> dict[str, list[str]]:
    """Names: what can run, what has no CPU kernel, and what returns memory as it is."""
    run = [n for n, op in database.items() if main_dtype(op) is not None]
    uninitialized = [n for n in run if database[n].has_nondeterministic_output]
    return {"run": run, "skipped": [n for n in database if n not in run], "uninitialized": uninitialized}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("results", type=Path, nargs="?")
    arguments.add_argument("--list", action="store_true", help="print names of operators")
    arguments.add_argument("--dtype", default=None)
    arguments.add_argument("--limit", type=int, default=None)
    arguments.add_argument("--names", nargs="*", default=None)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    database, known = operators(), load()
    if options.list:
        print(json.dumps(listing(database)))
        return
    with options.results.open("a") as file:

        def write(record: object) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        write({"layers": Counter(layers().values())})
        for name in options.names or database:
            op = database[name]
            dtype = getattr(torch, options.dtype) if options.dtype else main_dtype(op)
            if dtype is None or dtype not in op.supported_dtypes("cpu"):
                continue
            write({"start": name})
            write(run_operator(name, op, dtype, options.limit, deadly(known, name)))


if __name__ == "__main__":
    main()
