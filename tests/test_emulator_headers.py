"""The emulated functions have the signatures that torch_npu was compiled against: its own headers are in its wheel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ascend_emulator.build import HCCL, RUNTIME, SOURCES
from ascend_emulator.info import functions
from ascend_emulator.load import SITE

INCLUDE = SITE / "torch_npu" / "include"
OPAQUE = (
    r"(?:EmuStream|Event|TensorDesc|DataBuffer|Communicator|PointerAttributes|SendRecvItem|Physical|PhysicalProperties|Region)"
)
UNDECLARED = {
    # private functions of the runtime and of its profiler and log, which no header in the wheel declares
    "MsprofGetHashId", "MsprofRegisterCallback", "MsprofReportAdditionalInfo", "MsprofReportApi", "MsprofReportCompactInfo",
    "MsprofSysCycleTime", "aclAppLog", "rtDevBinaryRegister", "rtFunctionRegister", "rtGetC2cCtrlAddr", "rtKernelLaunch",
    "aclrtDeviceGetBareTgid", "aclrtGetDeviceSatMode",
}  # fmt: skip

COMPARE = """
#include <cstddef>
#include <type_traits>
template <class T> constexpr int kind = std::is_pointer_v<T> ? 1 : std::is_floating_point_v<T> ? 2 : std::is_void_v<T> ? 3 : 4;
template <class T> constexpr size_t width() { if constexpr (std::is_void_v<T>) return 0; else return sizeof(T); }
template <class A, class B> constexpr bool alike = kind<A> == kind<B> && width<A>() == width<B>();
template <class A, class B> struct same : std::false_type {};
template <class R, class... A, class S, class... B> struct same<R (*)(A...), S (*)(B...)> {
  static constexpr bool count = sizeof...(A) == sizeof...(B);
  static constexpr bool check() { if constexpr (count) return alike<R, S> && (true && ... && alike<A, B>); else return false; }
  static constexpr bool value = check();
};
"""


def prototypes(tmp_path: Path) -> dict[str, str]:
    """The compiler's own list of what our sources define."""
    found: dict[str, str] = {}
    for source in (*RUNTIME, *HCCL):
        out = tmp_path / f"{source}.txt"
        command = ["gcc", "-std=gnu17", "-aux-info", str(out), "-c", str(SOURCES / source), "-o", str(tmp_path / "o.o")]
        subprocess.run(command, check=True, timeout=60)
        for line in out.read_text().splitlines():
            match = re.match(rf"/\* {re.escape(str(SOURCES / source))}:\d+:\w+ \*/ extern (.*?)(\w+) \((.*?)\);", line)
            if match and re.match("acl|Hccl|rt|Msprof", match[2]):
                found[match[2]] = f"{match[1]}{match[2]}({match[3]});"
    return found


def test_signatures_match_the_headers(tmp_path: Path) -> None:
    ours = prototypes(tmp_path)
    working, missing = functions()
    assert set(working) <= set(ours), set(working) - set(ours)
    checked = {n: p for n, p in ours.items() if n not in UNDECLARED and n not in missing}
    assert len(checked) > 90
    text = "#include <acl/acl.h>\n#include <acl/acl_op_compiler.h>\n#include <third_party/hccl/inc/hccl/hccl.h>\n" + COMPARE
    text += "namespace ours {\n"
    for prototype in checked.values():
        text += re.sub(rf"\b(?:const )?{OPAQUE} \*", "void *", prototype).replace("_Bool", "bool") + "\n"
    text += "}\n" + "".join(
        f'static_assert(same<decltype(&::{n}), decltype(&ours::{n})>::value, "{n}");\n' for n in sorted(checked)
    )
    source = tmp_path / "compare.cpp"
    source.write_text(text)
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{INCLUDE}", f"-I{INCLUDE}/third_party/acl/inc", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[:6000]
