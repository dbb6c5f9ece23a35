"""The emulated runtime's virtual memory, and memory shared between processes, without torch."""

from __future__ import annotations

import pytest
from test_emulator_runtime import PRELUDE, run

MEMORY = """
import subprocess, sys
P, S, U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
class Properties(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("handle", "allocation", "attribute", "device", "location")] + [("reserved", U)]
cann.aclrtReserveMemAddress.argtypes = [P, S, S, P, U]
cann.aclrtMallocPhysical.argtypes = [P, S, P, U]
cann.aclrtMapMem.argtypes = [P, S, S, P, U]
cann.aclrtMemExportToShareableHandle.argtypes = [P, ctypes.c_int, U, P]
cann.aclrtMemImportFromShareableHandle.argtypes = [U, ctypes.c_int, P]
cann.aclrtMemSetPidToShareableHandle.argtypes = [U, P, S]
cann.aclrtMalloc.argtypes = [P, S, ctypes.c_int]
cann.aclrtIpcMemGetExportKey.argtypes = [P, S, ctypes.c_char_p, S, U]
cann.aclrtIpcMemImportByKey.argtypes = [P, ctypes.c_char_p, U]
for f in "UnmapMem ReleaseMemAddress FreePhysical Free".split():
    getattr(cann, "aclrt" + f).argtypes = [P]
cann.aclrtSetDevice(0)
MB = 1 << 20
def used():
    free, total = S(), S()
    cann.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total))
    return (total.value - free.value) // MB
def physical(megabytes):
    p = P()
    return cann.aclrtMallocPhysical(ctypes.byref(p), megabytes * MB, ctypes.byref(Properties()), 0), p
def reserve(megabytes):
    p = P()
    assert cann.aclrtReserveMemAddress(ctypes.byref(p), megabytes * MB, 0, None, 1) == 0
    return p.value
"""


def test_virtual_memory() -> None:
    """Memory keeps its content while it moves to other addresses; what is wrong is refused."""
    code = """
at = reserve(1 << 20)
(one, a), (two, b), (three, _), (odd, _) = physical(4), physical(6), physical(2), physical(3)
print(one, two, three, odd, used())
map = lambda offset, size, start, memory: cann.aclrtMapMem(at + offset * MB, size * MB, start * MB, memory, 0)
print(map(0, 4, 0, a), map(4, 6, 0, b), map(2, 2, 0, b), "mapped at" in message())
ctypes.memset(at, 7, 10 * MB)
unmap = lambda offset: cann.aclrtUnmapMem(at + offset * MB)
print(cann.aclrtReleaseMemAddress(at), "still mapped" in message(), unmap(4), unmap(4))
print(map(20, 2, 4, b), ctypes.string_at(at + 20 * MB, 2), map(30, 4, 4, b))
print(cann.aclrtFreePhysical(b), used(), unmap(20), used(), unmap(0), cann.aclrtFreePhysical(a), used())
print(cann.aclrtReleaseMemAddress(at), cann.aclrtReleaseMemAddress(at))
"""
    assert run(MEMORY + code, ASCEND_EMULATOR_MEMORY_MB="10").split("\n") == [
        "0 0 207001 107000 10",
        "0 0 107000 True",
        "107000 True 0 107000",
        "0 b'\\x07\\x07' 107000",
        "0 10 0 4 0 0 0",
        "0 107000",
    ]


SHARED = """
def other(code):
    command = [sys.executable, "-c", prelude + code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        admit(child.pid)
        return child.communicate("go", timeout=60)[0].strip()
def admit(pid):
    pids = (ctypes.c_int * 1)(pid)
    if named:
        assert (cann.aclrtIpcMemSetImportPid(key, pids, 1), cann.aclrtMemSetPidToShareableHandle(handle, pids, 1)) == (0, 0)
key, (_, a), at, handle = ctypes.create_string_buffer(65), physical(2), reserve(2), U()
block = P()
assert cann.aclrtMalloc(ctypes.byref(block), 5000, 0) == 0
ctypes.memset(block, 7, 5000)
assert cann.aclrtMapMem(at, 2 * MB, 0, a, 0) == 0
assert cann.aclrtIpcMemGetExportKey(block, 5000, key, 65, anyone) == 0
assert cann.aclrtMemExportToShareableHandle(a, 0, anyone, ctypes.byref(handle)) == 0
print(other(f'''
sys.stdin.read()
p, h, at = P(), P(), reserve(2)
print(cann.aclrtIpcMemImportByKey(ctypes.byref(p), {key.value}, 0), "not named" in message())
print(cann.aclrtMemImportFromShareableHandle({handle.value}, 0, ctypes.byref(h)))
if p.value:
    print(ctypes.string_at(p.value + 4998, 2), cann.aclrtMapMem(at, 2 * MB, 0, h, 0))
    ctypes.memset(p, 8, 2)
    ctypes.memset(at, 9, 2)
    print(cann.aclrtIpcMemClose({key.value}), cann.aclrtIpcMemClose({key.value}), cann.aclrtUnmapMem(at), cann.aclrtFreePhysical(h))
'''))
print(ctypes.string_at(block, 3), ctypes.string_at(at, 3), cann.aclrtIpcMemClose(key), cann.aclrtFree(block))
"""


@pytest.mark.parametrize(("anyone", "named"), [(0, 0), (0, 1), (1, 0)], ids=["nobody", "named", "anyone"])
def test_memory_shared_between_processes(anyone: int, named: int) -> None:
    """By key and by handle: both processes write into the same memory, if the other one is admitted."""
    code = f"prelude = {PRELUDE + MEMORY!r}\nanyone, named = {anyone}, {named}\n"
    seen = run(code + MEMORY + SHARED).split("\n")
    if anyone or named:
        assert seen == ["0 False", "0", "b'\\x07\\x07' 0", "0 107000 0 0", "b'\\x08\\x08\\x07' b'\\t\\t\\x00' 0 0"]
    else:
        assert seen == ["107000 True", "107000", "b'\\x07\\x07\\x07' b'\\x00\\x00\\x00' 0 0"]
