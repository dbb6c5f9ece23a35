"""The table of results: docs/upstream-torch-npu.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.upstream_npu import reasons, selection

FILE = selection.ROOT / "docs" / "upstream-torch-npu.md"

HEAD = """# torch_npu's own tests on the emulated machine

The tests of the runtime API (`test/npu`) and of distributed training (`test/distributed`) of the public repository
<{url}>, run unmodified on 8 emulated NPUs. They are cloned, not part of this repository.

```bash
make upstream-npu                                # clone, run all, write this page; one to two hours on 2 cores
make upstream-npu ONLY="test_stream fsdp2"       # only files whose names contain one of these; this page stays
UPSTREAM=/path/of/a/clone make upstream-npu      # clone from there
```

Commit `{commit}`. The commit of the torch_npu 2.13.0 wheel itself is not public; of the public ones this one's Python
files differ least from the wheel's. Where a test does not fit the wheel, or torch 2.13, it is listed as such.

Each file runs under pytest, in unittest's order, in a process of its own, forked from one that has imported torch_npu;
so are the processes that tests spawn. A device has 32 GiB here, and a test ends after {limit} s or when it holds more than
{memory:g} GiB of the host's memory. Every test that does not pass is listed below with its reason. The run fails when
another test fails, when a listed one fails in another way, and when a listed one passes.
"""


def rows(results: dict[str, dict[str, Any]], judged: reasons.Judged) -> dict[str, Counter[str]]:
    """Counts per file: passed, not applicable, explained, skipped, and failures without a reason."""
    counts: dict[str, Counter[str]] = {}
    for file, result in results.items():
        counts[file] = Counter()
        for test, outcome in result["tests"].items():
            reason = judged.reason_of.get((file, test))
            column = outcome["outcome"]
            if reason is not None:
                column = "not applicable" if reason.kind in reasons.NOT_APPLICABLE else "explained"
            counts[file][column] += 1
    return counts


COLUMNS = ("passed", "not applicable", "explained", "skipped")


def text(files: list[str], results: dict[str, dict[str, Any]], judged: reasons.Judged, limits: tuple[int, float]) -> str:
    """The page.

    Args:
        files: All test files, run or not.
        results: What was run.
        judged: Reasons of what failed.
        limits: Seconds and GiB that a test may take.
    """
    counts = rows(results, judged)
    total: Counter[str] = sum(counts.values(), Counter())
    lines = [HEAD.format(url=selection.URL.removesuffix(".git"), commit=selection.COMMIT, limit=limits[0], memory=limits[1])]
    lines += ["## Summary", "", f"{len(results)} of {len(files)} files were run.", "", "| | tests |", "|---|---|"]
    lines += [f"| {c} | {total[c]} |" for c in COLUMNS]
    if total["failed"]:
        lines += [f"| failed without a reason | {total['failed']} |"]
    lines += ["", "| kind of reason | means | tests |", "|---|---|---|"]
    kinds = Counter(r.kind for r in judged.reason_of.values())
    for title, group in (("not applicable", reasons.NOT_APPLICABLE), ("explained", reasons.EXPLAINED)):
        lines += [f"| {title}: {kind} | {means} | {kinds[kind]} |" for kind, means in group.items()]
    lines += ["", "Skipped tests skip themselves, by upstream's own conditions; the last table has their words.", ""]
    lines += ["## Files", "", "| file | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    for file in files:
        if file in counts:
            cells = [str(counts[file][c] or "") for c in COLUMNS]
            if counts[file]["failed"]:
                cells[0] += f" ({counts[file]['failed']} failed without a reason)"
            lines.append(f"| {file.removeprefix('test/')} | " + " | ".join(cells) + " |")
        else:
            lines.append(f"| {file.removeprefix('test/')} | not run | | | |")
    return "\n".join(lines + _reason_lines(judged) + _skip_lines(results)) + "\n"


def _reason_lines(judged: reasons.Judged) -> list[str]:
    lines = ["", "## Reasons", "", "| file | tests | kind | reason |", "|---|---|---|---|"]
    tests: dict[reasons.Reason, list[str]] = {}
    for (_, test), reason in judged.reason_of.items():
        tests.setdefault(reason, []).append(test)
    for reason, names in tests.items():
        names = ["the whole file" if n == "*" else f"`{n.partition('::')[2]}`" for n in names]
        lines.append(f"| {reason.file.removeprefix('test/')} | {', '.join(names)} | {reason.kind} | {_cell(reason.why)} |")
    return lines


def _skip_lines(results: dict[str, dict[str, Any]]) -> list[str]:
    words: dict[str, list[str]] = {}
    for file, result in results.items():
        for outcome in result["tests"].values():
            if outcome["outcome"] == "skipped":
                words.setdefault(_cell(outcome["why"].removeprefix("Skipped: ")), []).append(file.rpartition("/")[2])
    lines = ["", "## Skipped by upstream's own conditions", "", "| words | tests | files |", "|---|---|---|"]
    for why, files in sorted(words.items()):
        names = sorted(set(files))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"| {why} | {len(files)} | {shown} |")
    return lines


def _cell(words: str) -> str:
    first = next((line.strip() for line in words.splitlines() if line.strip()), "no reason given")
    return first.replace("|", "\\|")[:160]


def write(files: list[str], results: dict[str, dict[str, Any]], judged: reasons.Judged, limits: tuple[int, float]) -> None:
    """Write the page; see :func:`text`."""
    FILE.write_text(text(files, results, judged, limits))
