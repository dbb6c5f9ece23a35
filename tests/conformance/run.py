"""Run the whole operator database on an emulated NPU and write ``docs/conformance.md``.

``python tests/conformance/run.py [--processes N] [--limit SAMPLES] [--names NAME ...]``. It fails on a difference that ``gaps.toml`` does not
list, and on a listed one that is no more. A part of the database (``--limit``, ``--names``) writes no document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from conformance.gaps import judge, load
from conformance.table import MAIN, SECONDARY, write

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SILENCE_S = 300
"""A worker that finishes no operator for so long is killed."""


class Worker:
    """A process that works through a list of operators; it is started again after an operator that ended it.

    Args:
        names: What to run.
        folder: For its results.
        options: Options of ``worker.py``.
    """

    def __init__(self, names: list[str], folder: Path, options: list[str]) -> None:
        self.names, self.options = names, options
        self.dtype = options[options.index("--dtype") + 1] if "--dtype" in options else MAIN
        self.results = Path(tempfile.mkstemp(suffix=".jsonl", dir=folder)[1])
        self.process: subprocess.Popen[bytes] | None = None
        self.records: list[dict[str, Any]] = []
        self.layers: dict[str, int] = {}
        self._read = 0
        self._since = time.monotonic()
        self._start()

    def _start(self) -> None:
        self._at: str | None = None
        command = [sys.executable, "-m", "ascend_emulator", "--devices", "2", str(HERE / "worker.py"), str(self.results)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ASCEND_EMULATOR_FLOAT64": "allow"}
        with (self.results.with_suffix(".log")).open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.options, "--names", *self.names], cwd=ROOT, env=env, stdout=log, stderr=log
            )

    def poll(self) -> bool:
        """Take in new results; False when all is done."""
        assert self.process is not None
        code = self.process.poll()
        with self.results.open() as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self._take(json.loads(line))
                self._read = file.tell()
        if code is None and time.monotonic() - self._since > SILENCE_S:
            self.process.kill()
            code = self.process.wait()
        if code is None or code == 0:
            return code is None
        return self._died(code)

    def _take(self, line: dict[str, Any]) -> None:
        self._since = time.monotonic()
        if "start" in line:
            self._at = line["start"]
            return
        if "layers" in line:
            self.layers = line["layers"]
            return
        self.records.append(line)
        self._at = None
        self.names = self.names[self.names.index(line["operator"]) + 1 :]

    def _died(self, code: int) -> bool:
        if self._at is None:
            raise RuntimeError(f"a worker ended with {code} before it ran anything; see {self.results.with_suffix('.log')}")
        text = f"the process ended with {code}"
        self.records.append(
            {"operator": self._at, "dtype": self.dtype, "samples": 0, "seconds": 0, "checks": {"process": {"failed": 1}}, "failures": [("process", 0, text)]}
        )  # fmt: skip
        self.names = self.names[self.names.index(self._at) + 1 :]
        if self.names:
            self._start()
        return bool(self.names)


def listing() -> dict[str, list[str]]:
    """Names of operators; see ``worker.listing``."""
    command = [sys.executable, "-m", "ascend_emulator", "--devices", "1", str(HERE / "worker.py"), "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(names: list[str], processes: int, options: list[str]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Run operators in a few processes and show progress.

    Returns:
        The records, and how many operators of torch each layer of the emulator serves.
    """
    folder = Path(tempfile.mkdtemp(prefix="conformance_"))
    workers = [Worker(names[i::processes], folder, options) for i in range(min(processes, len(names)))]
    running, shown = list(workers), 0
    while running:
        running = [w for w in running if w.poll()]
        count = sum(len(w.records) for w in workers)
        if count >= shown + 50 or not running:
            print(f"{count} operators", flush=True)
            shown = count
        time.sleep(0.2)
    return sorted((r for w in workers for r in w.records), key=lambda r: r["operator"]), workers[0].layers


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--limit", type=int, default=None, help="samples of each operator")
    arguments.add_argument("--names", nargs="*", default=None)
    arguments.add_argument("--dtypes", nargs="*", default=None, help=f"default: float32 and {', '.join(SECONDARY)}")
    arguments.add_argument("--records", type=Path, default=None, help="write the records to this file as well")
    options = arguments.parse_args()
    start = time.monotonic()
    whole = options.names is None and options.limit is None and options.dtypes is None
    listed = {} if options.names else listing()
    names = options.names or listed["run"]
    records, layers = [], {}
    for dtype in options.dtypes or (MAIN, *SECONDARY):
        limit = options.limit if dtype == MAIN else 1
        selected = ([] if dtype == MAIN else ["--dtype", dtype]) + (["--limit", str(limit)] if limit else [])
        print(f"{dtype}: {f'the first {limit}' if limit else 'all'} samples")
        more, layers = run(names, options.processes, selected)
        records += [{**r, "main": dtype == MAIN} for r in more]
        if options.records:
            options.records.write_text("\n".join(json.dumps(r) for r in records) + "\n")
    known = load()
    unexplained, stale = judge(known, records, whole=whole)
    for title, lines in (("failures that gaps.toml does not list", unexplained), ("listed gaps that are none", stale)):
        print(f"{len(lines)} {title}")
        for line in lines:
            print("  " + line)
    print(f"{len(records)} records in {time.monotonic() - start:.0f} s; operators by layer: {layers}")
    if whole and not unexplained and not stale:
        write(ROOT / "docs/conformance.md", records, known, layers, listed)
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
