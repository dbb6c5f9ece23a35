"""``python -m ascend_emulator info``: what is emulated, what is not, and the settings in force."""

from __future__ import annotations

import os
import re
from collections import Counter

from ascend_emulator.build import HCCL, RUNTIME, SOURCES

_DEFINED = re.compile(
    r"^(?:int|const char \*|uint32_t|long|void|size_t|\w+ \*)\s*\*?((?:acl|Hccl|rt|Msprof)\w+)\(", re.MULTILINE
)
_UNSUPPORTED = re.compile(r"^UNSUPPORTED\((\w+)\)", re.MULTILINE)

SETTINGS = {
    "ASCEND_EMULATOR_DEVICES": ("8", "NPUs of each node"),
    "ASCEND_EMULATOR_SOC": ("Ascend910B1", "SoC name, as torch_npu knows them"),
    "ASCEND_EMULATOR_MEMORY_MB": ("65536", "memory of each NPU"),
    "ASCEND_EMULATOR_OPS": ("cpp", "operator layer: cpp or python"),
    "ASCEND_EMULATOR_FLOAT64": ("refuse", "allow: compute float64 where NPUs have no kernel"),
    "ASCEND_EMULATOR_FAULTS": ("", "faults on demand"),
    "ASCEND_EMULATOR_LINK_MBPS": ("0", "MB/s between two NPUs of a node; 0: as the host"),
    "ASCEND_EMULATOR_CROSS_MBPS": ("0", "MB/s between two nodes; 0: as the host"),
    "ASCEND_EMULATOR_TCP_PORTS": ("0", "1: HCCL ports that programs of the host hold count as taken"),
    "HCCL_CONNECT_TIMEOUT": ("120", "seconds to wait for peers to join"),
    "HCCL_EXEC_TIMEOUT": ("1836", "seconds to wait for peers in an operation; 0: for ever"),
    "HCCL_IF_BASE_PORT": ("60000", "first host port"),
    "HCCL_HOST_SOCKET_PORT_RANGE": ("", "host ports to choose from, or auto"),
    "ASCEND_RT_VISIBLE_DEVICES": ("", "ascending device ids"),
}


def functions() -> tuple[list[str], list[str]]:
    """Functions of the emulated CANN and HCCL: those that work, and those that fail and say their name."""
    text = "".join((SOURCES / name).read_text() for name in (*RUNTIME, *HCCL))
    missing = sorted(_UNSUPPORTED.findall(text))
    return sorted(set(_DEFINED.findall(text)) - set(missing)), missing


def report() -> str:
    """The report, as text."""
    import torch  # before the rest, which needs it
    import torch_npu

    from ascend_emulator import rules
    from ascend_emulator.fused.registry import FORMULAS
    from ascend_emulator.ops import layers

    done, missing = functions()
    served = Counter(layers().values())
    devices = torch.npu.device_count()  # type: ignore[attr-defined]
    settings = "\n".join(f"  {n:28} {os.environ.get(n) or default:12} {what}" for n, (default, what) in SETTINGS.items())
    return f"""torch {torch.__version__}, torch_npu {torch_npu.__version__}, SoC {rules.soc()}, {devices} NPUs

Settings
{settings}

aten operators: {sum(served.values())} over torch's CPU kernels
  {served["cpp"]} in the C++ layer, {served["python"]} in the Python layer, {served["decomposed"]} decomposed

npu operators with a formula ({len(FORMULAS)}); others run torch_npu's own code where that needs no kernel, or raise
  {" ".join(sorted(FORMULAS))}

CANN and HCCL functions emulated ({len(done)})
  {" ".join(done)}

Not emulated: they fail and say their name ({len(missing)})
  {" ".join(missing)}
  any operator that torch_npu starts itself, but for those in csrc/aclop.c

Not modelled: numerics, formats, speed and timing of NPU kernels; profiler; graph mode; compilation for NPUs
"""
