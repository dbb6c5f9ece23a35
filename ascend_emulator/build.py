"""Compile the emulated CANN on first use, into a cache of the user's, keyed by the content of its sources.

Several processes may do so at once: each builds in a folder of its own and renames it into place; the first one wins.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ascend_emulator.errors import EmulatorError

SOURCES = Path(__file__).parent / "csrc"
RUNTIME = ("runtime.c", "memory.c", "virtual.c", "shared.c", "stream.c", "event.c", "aclop.c", "unsupported.c")
HCCL = ("hccl_comm.c", "hccl_reduce.c", "hccl_ops.c")
ALIASES = ("acl_op_compiler", "opapi", "nnopbase", "ge_runner", "graph", "acl_tdt_channel", "ascend_hal")
"""Libraries that torch_npu opens by name and that need nothing of their own: they lead to ``ascendcl``."""

LIBRARIES = ("ascendcl", "hccl", *ALIASES, "hcomm")
"""All libraries, in the order in which they must be loaded."""


def cache_folder() -> Path:
    """Folder of the compiled libraries for the present sources."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "ascend_emulator" / digest.hexdigest()[:16]


def build() -> Path:
    """Compile, unless it is done already.

    Returns:
        The folder with the libraries.

    Raises:
        EmulatorError: There is no C compiler, or it fails.
    """
    folder = cache_folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="build_"))
    try:
        _compile_all(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _compile_all(out: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        raise EmulatorError(
            "No C compiler was found.",
            "The emulated CANN is compiled on first use.",
            "Install gcc, or name a compiler in the environment variable CC.",
        )
    base = [compiler, "-O2", "-std=gnu17", "-shared", "-fPIC", "-Wall", "-Wno-unused-function", "-pthread"]

    def library(name: str, sources: list[Path], *links: str) -> None:
        soname = f"lib{name}.so"
        command = [*base, *map(str, sources), "-o", str(out / soname), f"-Wl,-soname,{soname}", f"-L{out}", *links]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulatorError(f"{compiler} failed on {soname}.", done.stderr[-2000:], "Check the compiler.")

    empty = out / "empty.c"
    empty.write_text("")
    library("ascendcl", [SOURCES / s for s in RUNTIME])
    library("hccl", [SOURCES / s for s in HCCL], "-lascendcl")
    for name in ALIASES:
        library(name, [empty], "-Wl,--no-as-needed", "-lascendcl")
    library("hcomm", [empty], "-Wl,--no-as-needed", "-lhccl", "-lascendcl")
    empty.unlink()
