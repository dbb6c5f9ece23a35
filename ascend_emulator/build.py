"""Compile the emulated CANN on first use, into a cache of the user's, keyed by the content of its sources.

Several processes may do so at once: each builds in a folder of its own and renames it into place; the first one wins.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from ascend_emulator.errors import EmulatorError

SOURCES = Path(__file__).parent / "csrc"
OPERATORS = Path(__file__).parent / "cpp" / "ops.cpp"
OPERATOR_LIBRARY = "libascend_emulator_operators.so"
RUNTIME = (
    "runtime.c",
    "memory.c",
    "virtual.c",
    "shared.c",
    "stream.c",
    "event.c",
    "overflow.c",
    "faults.c",
    "aclop.c",
    "unsupported.c",
)
HCCL = ("hccl_comm.c", "hccl_port.c", "hccl_link.c", "hccl_reduce.c", "hccl_ops.c", "hccl_p2p.c")
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
    """Compile the emulated CANN, unless it is done already.

    Returns:
        The folder with the libraries.

    Raises:
        EmulatorError: There is no C compiler, or it fails.
    """
    return _into_cache(cache_folder(), _compile_all)


def build_operators(torch_version: str, torch_folder: Path, npu_folder: Path) -> Path | None:
    """Compile the fast operator layer against the headers of torch and torch_npu, unless it is done already.

    Args:
        torch_version: Version of torch and of torch_npu, for the cache.
        torch_folder: Where the package torch lies.
        npu_folder: Where the package torch_npu lies.

    Returns:
        The library, or None where there is no C++ compiler; the Python layer then does all the work.

    Raises:
        EmulatorError: The compiler fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    cann = build()
    digest = hashlib.sha256(f"{torch_version} {torch_folder} {npu_folder} {cann.name}".encode() + OPERATORS.read_bytes())

    def compile_one(out: Path) -> None:
        includes = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include", npu_folder / "include"]
        links = [(torch_folder / "lib", "torch_cpu", "c10"), (npu_folder / "lib", "torch_npu"), (cann, "ascendcl")]
        _run(
            [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-Wall"]
            + [f"-isystem{i}" for i in (*includes, npu_folder / "include/third_party/acl/inc")]
            + [str(OPERATORS), "-o", str(out / OPERATOR_LIBRARY)]
            + [part for folder, *names in links for part in (f"-L{folder}", *(f"-l{n}" for n in names))],
            OPERATOR_LIBRARY,
        )

    return _into_cache(cann.parent / f"operators_{digest.hexdigest()[:16]}", compile_one) / OPERATOR_LIBRARY


def _into_cache(folder: Path, compile_into: Callable[[Path], None]) -> Path:
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="build_"))
    try:
        compile_into(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"{command[0]} failed on {name}.", done.stderr[-2000:], "Check the compiler.")


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
        _run([*base, *map(str, sources), "-o", str(out / soname), f"-Wl,-soname,{soname}", f"-L{out}", *links], soname)

    empty = out / "empty.c"
    empty.write_text("")
    library("ascendcl", [SOURCES / s for s in RUNTIME])
    library("hccl", [SOURCES / s for s in HCCL], "-lascendcl")
    for name in ALIASES:
        library(name, [empty], "-Wl,--no-as-needed", "-lascendcl")
    library("hcomm", [empty], "-Wl,--no-as-needed", "-lhccl", "-lascendcl")
    empty.unlink()
