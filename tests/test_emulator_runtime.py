"""The emulated runtime by itself, without torch: device masks, memory, fork, and functions that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ascend_emulator
from ascend_emulator.build import LIBRARIES, build
from ascend_emulator.errors import EmulatorError

ROOT = Path(__file__).parent.parent
PRELUDE = """
import ctypes, os
from ascend_emulator.build import build
cann = ctypes.CDLL(str(build() / "libascendcl.so"))
cann.aclGetRecentErrMsg.restype = ctypes.c_char_p
message = lambda: cann.aclGetRecentErrMsg().decode()
"""


def run(code: str, **environment: str) -> str:
    env = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("mask", "count"),
    [(None, 4), ("0,1", 2), ("3", 1), ("2,1", 0), ("1,1", 0), ("0,9,1", 1), ("0,1,1", 0), ("9", 0)]
    + [("", 0), ("x", 0), (",0", 0), ("0,", 1), ("0 ,1", 1), ("0, 1", 1), (" 0", 0)],
)
def test_visible_devices(mask: str | None, count: int) -> None:
    """As CANN reads the mask; the reader in torch_npu, which asks the driver, must come to the same."""
    code = """
n = ctypes.c_uint32(); cann.aclrtGetDeviceCount(ctypes.byref(n))
m = ctypes.c_uint32(); ctypes.CDLL(str(build() / "libascend_hal.so")).drvGetDevNum(ctypes.byref(m))
print(n.value, m.value)
"""
    visible = {} if mask is None else {"ASCEND_RT_VISIBLE_DEVICES": mask}
    assert run(code, ASCEND_EMULATOR_DEVICES="4", **visible) == f"{count} 4"


def test_devices_out_of_range() -> None:
    assert (
        run("print(cann.aclrtSetDevice(7), message())", ASCEND_EMULATOR_DEVICES="2")
        == "107001 device 7 does not exist: 2 devices are visible"
    )


def test_contexts_are_on_devices_that_were_set() -> None:
    """Per process: a forked child starts with none, and a reset takes it away."""
    code = """
def active():
    state = ctypes.c_int32(7)
    return [(cann.aclrtGetPrimaryCtxState(i, None, ctypes.byref(state)), state.value)[1] for i in range(3)]
print(active()); cann.aclrtSetDevice(1); print(active(), flush=True)
if os.fork() == 0: print(active(), flush=True); os._exit(0)
os.wait(); cann.aclrtSetDevice(2); cann.aclrtResetDevice(1); print(active())
print(cann.aclrtGetPrimaryCtxState(3, None, ctypes.byref(ctypes.c_int32())))
"""
    seen = run(code, ASCEND_EMULATOR_DEVICES="3").splitlines()
    assert seen == ["[0, 0, 0]", "[0, 1, 0]", "[0, 0, 0]", "[0, 0, 1]", "107001"]


def test_memory_has_a_limit_and_an_owner() -> None:
    code = """
cann.aclrtSetDevice(0)
p, q = ctypes.c_void_p(), ctypes.c_void_p()
cann.aclrtMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
cann.aclrtFree.argtypes = [ctypes.c_void_p]
print(cann.aclrtMalloc(ctypes.byref(p), 6 << 20, 0), cann.aclrtMalloc(ctypes.byref(q), 6 << 20, 0), "in use" in message())
print(cann.aclrtFree(p), cann.aclrtMalloc(ctypes.byref(q), 6 << 20, 0), cann.aclrtFree(q), cann.aclrtFree(q), "no device memory" in message())
"""
    assert run(code, ASCEND_EMULATOR_MEMORY_MB="10").split("\n") == ["0 207001 True", "0 0 0 107000 True"]


def test_host_memory_is_registered_once_and_with_a_size() -> None:
    code = """
p = ctypes.create_string_buffer(64)
register = lambda size: cann.aclrtHostRegisterV2(p, ctypes.c_uint64(size), 0)
print(register(0), register(64), cann.aclrtHostUnregister(p), cann.aclrtHostUnregister(p))
"""
    assert run(code) == "107000 0 0 107000"


def test_a_message_is_given_once() -> None:
    assert run("print(cann.aclrtSetDevice(99), message() != '', message() == '')") == "107001 True True"


def test_a_preloaded_library_can_wrap_the_runtime(tmp_path: Path) -> None:
    source, wrapper = tmp_path / "wrapper.c", tmp_path / "wrapper.so"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n"
        'int wrapped(void) { return ((int (*)(int))dlsym(RTLD_NEXT, "aclrtSetDevice"))(0); }'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(wrapper), str(source)], check=True)
    code = "import ascend_emulator.load as load; load.prepare(1); print(ctypes.CDLL(None).wrapped())"
    assert run(code, LD_PRELOAD=str(wrapper)) == "0"


def test_a_forked_child_cannot_use_the_device() -> None:
    code = """
cann.aclrtSetDevice(0)
child = os.fork()
if child == 0:
    print(cann.aclrtSetDevice(0), "before fork()" in message(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert run(code) == "507048 True"


def test_what_is_not_there_says_so() -> None:
    assert run("print(cann.rtKernelLaunch(), message())") == "207000 the emulated CANN does not implement rtKernelLaunch"


def test_child_processes_start_without_a_word(tmp_path: Path) -> None:
    """With and without a sitecustomize of the machine's own."""
    site = str(ROOT / "ascend_emulator" / "site")
    for folder, said in ((tmp_path / "none", ""), (tmp_path, "the machine's own\n")):
        (tmp_path / "sitecustomize.py").write_text('print("the machine\'s own")')
        env = {**os.environ, "ASCEND_EMULATOR": "1", "PYTHONPATH": os.pathsep.join([site, str(ROOT), str(folder)])}
        done = subprocess.run([sys.executable, "-c", ""], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == (said, "")


def test_every_library_is_built_and_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert all((build() / f"lib{name}.so").is_file() for name in LIBRARIES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EmulatorError, match="No C compiler was found"):
        build()
    assert not list((tmp_path / "ascend_emulator").iterdir())


def test_eight_processes_may_build_at_once(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from ascend_emulator.build import build; print(build())"]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    folders = {p.communicate(timeout=120)[0] for p in processes}
    assert len(folders) == 1 and all(p.returncode == 0 for p in processes)
    assert [p.name for p in (tmp_path / "ascend_emulator").iterdir()] == [Path(folders.pop().strip()).name]


def test_functions_of_an_inactive_emulator_say_so() -> None:
    with pytest.raises(EmulatorError, match="not active in this process"):
        ascend_emulator.traffic()


def test_a_task_queue_that_is_asked_for_is_not_dropped_in_silence() -> None:
    env = {**os.environ, "TASK_QUEUE_ENABLE": "2", "PYTHONPATH": str(ROOT)}
    code = "import os; from ascend_emulator.load import prepare; prepare(); print(os.environ['TASK_QUEUE_ENABLE'])"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0\n"
    assert done.stderr.count("TASK_QUEUE_ENABLE=2 is set to 0: operators of the emulated NPU run in the calling thread") == 1
