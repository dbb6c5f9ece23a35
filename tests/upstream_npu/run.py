"""Run torch_npu's own tests, unmodified, on the emulated machine, and judge what failed by the list of reasons.

    python -m ascend_emulator --devices 8 -m tests.upstream_npu.run [--only PATTERN ...] [--resume] [--table]

Each file has a process of its own; a test that hangs or crashes ends that process, is noted, and the rest of the file
is run in another one. Without --only, all files are run and docs/upstream-torch-npu.md is written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.upstream_npu import reasons, selection, table
from tests.upstream_npu.fork_server import ForkedFile

Process = subprocess.Popen[bytes] | ForkedFile

TEST_LIMIT_S = 300
"""How long one test may take, as upstream's tests with several processes have it."""
FILE_LIMIT_S = 1800
OUTPUT_BYTES = 8000
"""How much of what a failed test printed is kept."""
MEMORY_LIMIT_GIB = 12.0
"""How much memory a test and its children may hold: device memory is host memory here."""


def _environment(file: str, log: Path, done: list[str], scratch: str) -> dict[str, str]:
    """The variables that upstream's runner sets, and ours."""
    folder = (selection.CLONE / file).parent
    paths = [str(selection.ROOT), str(selection.SITE), str(folder)]
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    cann = selection.BUILD / "upstream-cann"  # what CANN's set_env.sh sets; torch_npu looks for these folders only
    for part in ("runtime", "compiler", "opp"):
        (cann / part).mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
        "PYTHONPATH": os.pathsep.join(paths + inherited),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # tests start "python", "torchrun"
        "PYTHONDONTWRITEBYTECODE": "1",
        "ASCEND_EMULATOR_MEMORY_MB": "32768",  # one test fills a device, and another wants 30 GB of addresses
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "UPSTREAM_LOG": str(log),
        "UPSTREAM_DONE": json.dumps(done),
    }
    if file.startswith("test/distributed"):
        Path(scratch, "barrier").mkdir(exist_ok=True)
        Path(scratch, "test_dir").mkdir(exist_ok=True)
        environment |= {"TEMP_DIR": scratch, "BACKEND": "hccl", "INIT_METHOD": "env://"}
        if file not in selection.FEW_RANKS:
            environment["WORLD_SIZE"] = "8"
    return environment


def _lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []


def _held_gib(group: int) -> float:
    """Memory of a process group; pages that forked processes share are counted once."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getpgid(int(entry.name)) == group:
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
        except OSError:
            continue  # it has just ended
    return total / 2**20


def _watch(process: Process, log: Path, end: float) -> str | None:
    """Wait for the process; kill its group when a test or the file takes too long. Returns why, or None."""
    seen, since = -1, time.monotonic()
    why = None
    try:
        while process.poll() is None and why is None:
            time.sleep(0.2 if time.monotonic() - since < 2 else 1)
            size = log.stat().st_size if log.is_file() else 0
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > TEST_LIMIT_S:
                why = f"no end after {TEST_LIMIT_S} s"
            elif time.monotonic() > end:
                why = "the file's time was over"
            elif _held_gib(process.pid) > MEMORY_LIMIT_GIB:
                why = f"more than {MEMORY_LIMIT_GIB:g} GiB of memory"
        if why:
            os.killpg(process.pid, signal.SIGUSR1)  # say where it hangs
            time.sleep(1)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests left running
        except ProcessLookupError:
            pass
    process.wait()
    return why


def _start(arguments: list[str], environment: dict[str, str], out: Path, own: bool) -> Process:
    folder = selection.CLONE / "test"
    if not own:
        return ForkedFile(arguments, environment, folder, out)
    with out.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=folder,
            env=environment | {"UPSTREAM_SPAWN": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def run_file(file: str) -> dict[str, Any]:
    """Run one test file.

    Returns:
        ``{"seconds": ..., "tests": {name: {"outcome": passed | failed | skipped, "why": ...}}}``.
    """
    tests: dict[str, dict[str, Any]] = {
        test: {"outcome": "failed", "why": why} for test, why in selection.NOT_RUN.get(file, {}).items()
    }
    started = time.monotonic()
    while True:
        with tempfile.TemporaryDirectory(prefix="upstream_") as scratch:
            log, out = Path(scratch, "log.jsonl"), Path(scratch, "out.txt")
            arguments = [
                "-q",
                "-s",
                "--tb=short",
                "-p",
                "no:cacheprovider",
                "-p",
                "tests.upstream_npu.plugin",
                "-c",
                os.devnull,
            ]
            arguments += ["--rootdir", ".", str(selection.CLONE / file)]
            process = _start(arguments, _environment(file, log, sorted(tests), scratch), out, file in selection.OWN_PROCESS)
            why = _watch(process, log, started + FILE_LIMIT_S)
            lines, said = _lines(log), out.read_bytes()
        open_test, again = _take(lines, tests, said)
        if open_test is not None:
            why = why or f"the process ended with status {process.returncode}"
            tests[open_test] |= {"outcome": "failed", "why": why}
        elif not any("collected" in line for line in lines):
            tests.setdefault(
                "*", {"outcome": "failed", "why": f"not collected: {why or process.returncode}", "output": _text(said)}
            )
        if open_test is None or not again:
            return {"seconds": round(time.monotonic() - started), "tests": tests}


def _text(said: bytes) -> str:
    return said[-OUTPUT_BYTES:].decode(errors="replace")


def _take(lines: list[dict[str, Any]], tests: dict[str, dict[str, Any]], said: bytes) -> tuple[str | None, bool]:
    """Take over what was logged. Returns the test that did not end, and whether others are left."""
    collected: list[str] = []
    open_test = None
    start = 0
    for line in lines:
        if "collected" in line:
            collected = line["collected"]
        elif "collect" in line:
            outcome = "skipped" if line["collect"] == "skipped" else "failed"
            tests["*"] = {"outcome": outcome, "why": line["why"]}
        elif "begun" in line:
            open_test, start = line["begun"], line["said"]
            tests[open_test] = {"output": _text(said[start:])}
        elif "done" in line:
            open_test = None
            tests[line["done"]] = {k: v for k, v in line.items() if k not in ("done", "said")}
            if line["outcome"] == "failed":
                tests[line["done"]]["output"] = _text(said[start : line["said"]])
    return open_test, bool(set(collected) - set(tests))


def stored(file: str) -> Path:
    """Where the results of a file are kept."""
    return selection.RESULTS / (file.removesuffix(".py").replace("/", "-") + ".json")


def main() -> int:
    """Run, judge, and write the table."""
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("--only", nargs="+", metavar="PATTERN", help="run only files that contain or match one of these")
    own.add_argument("--resume", action="store_true", help="keep the results at hand, run only files without any")
    own.add_argument("--table", action="store_true", help="write the table from the results at hand, run nothing")
    options = own.parse_args()
    if os.environ.get("ASCEND_EMULATOR") != "1":
        own.error("start it with python -m ascend_emulator --devices 8 -m tests.upstream_npu.run")
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory ends, this ends first; children inherit it
    selection.prepare()
    selection.RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = selection.files(options.only)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not options.table:
        todo = [f for f in chosen if not (options.resume and stored(f).is_file())]
        for number, file in enumerate(todo, 1):
            result = run_file(file)
            stored(file).write_text(json.dumps(result, indent=1))
            outcomes = [t["outcome"] for t in result["tests"].values()]
            counts = ", ".join(f"{outcomes.count(o)} {o}" for o in ("passed", "failed", "skipped") if o in outcomes)
            print(f"[{number}/{len(todo)}] {file}: {counts or 'no tests'} in {result['seconds']} s", flush=True)
    results = {f: json.loads(stored(f).read_text()) for f in chosen if stored(f).is_file()}
    judged = reasons.judge(results, reasons.load())
    if options.table or options.only is None:
        table.write(selection.files(), results, judged, (TEST_LIMIT_S, MEMORY_LIMIT_GIB))
    for problem in judged.problems:
        print(problem)
    print(f"{len(judged.problems)} problems in {len(results)} files")
    return 1 if judged.problems else 0


if __name__ == "__main__":
    sys.exit(main())
