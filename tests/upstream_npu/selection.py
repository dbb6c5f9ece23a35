"""Which of torch_npu's own tests are run: every test file of the runtime API and of distributed training."""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from pathlib import Path

URL = "https://github.com/Ascend/pytorch.git"
COMMIT = "9e73e708ab9350d203475609f36f8a43f6a0c2ab"
"""The public commit whose Python files differ least from those of the torch_npu 2.13.0 wheel (its own is not public)."""

FOLDERS = ("test/npu", "test/distributed")
PACKAGES = ("expecttest==0.3.0", "parameterized==0.9.0")
"""What the tests import beside torch and torch_npu; not part of this project's environment."""

OWN_PROCESS = frozenset(
    {
        "test/npu/test_allocator_envs.py",
        "test/npu/test_fault_mode.py",
        "test/npu/test_torch_npu.py",
        "test/distributed/test_all_to_all_single.py",
        "test/distributed/test_nslb.py",
    }
)
"""Files that set what is fixed when torch_npu is imported, or count on slow ends of processes: they use new interpreters."""

FEW_RANKS = frozenset(f"test/distributed/pipelining/test_{name}.py" for name in ("schedule_multiproc", "stage", "fx_tracer"))
"""Files that take their own default number of ranks, not all devices: some of their pipelines have two stages only."""

NOT_RUN = {
    "test/npu/test_fault_mode.py": {"TestMode::test_aclrtSetDevice": "not run: it starts 100 interpreters at once"},
    "test/npu/test_ipc_event.py": {"Test_ipc_event::test_d2d_copy3": "not run: it needs 32 GiB of host memory"},
}
"""Tests that harm the machine; they count as failed, and have a reason like others that do not pass."""

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
CLONE = BUILD / "upstream-torch-npu"
SITE = BUILD / "upstream-site"
RESULTS = BUILD / "upstream-results"


def prepare() -> None:
    """Clone the tests at the pinned commit and install what they import, unless that is done."""
    if not (CLONE / ".git").is_dir():
        source = os.environ.get("UPSTREAM") or URL
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", source, str(CLONE)], check=True)
    at = subprocess.run(["git", "-C", str(CLONE), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    if at.stdout.strip() != COMMIT or not (CLONE / "test").is_dir():
        subprocess.run(["git", "-C", str(CLONE), "checkout", "--quiet", "--force", COMMIT], check=True)
    changed = subprocess.run(
        ["git", "-C", str(CLONE), "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
    )
    if changed.stdout.strip():
        raise SystemExit(
            f"The upstream tests in {CLONE} were changed:\n{changed.stdout}They are run unmodified: remove the folder."
        )
    if not (SITE / "parameterized").is_dir():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--target",
            str(SITE),
        ]
        subprocess.run([*pip, *PACKAGES], check=True)


def files(patterns: list[str] | None = None) -> list[str]:
    """Test files, relative to the clone, in a fixed order.

    Args:
        patterns: Keep only files that match one of these shell patterns or contain it; None keeps all.
    """
    found = [path.relative_to(CLONE).as_posix() for folder in FOLDERS for path in sorted((CLONE / folder).rglob("test_*.py"))]
    if patterns is None:
        return found
    return [f for f in found if any(p in f or fnmatch.fnmatch(f, p) for p in patterns)]
