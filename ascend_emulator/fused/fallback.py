"""``npu::`` operators without a formula: torch_npu's own code where it works, a clear error where it needs an NPU kernel."""

from __future__ import annotations

from typing import Any

from ascend_emulator._torch import next_kernel

_NEEDS_KERNEL = ("is not emulated", "not in libopapi.so", "does not implement")
"""What torch_npu's errors say when it looks for a kernel that the emulated CANN has not."""


class Fallback:
    """Runs torch_npu's kernel and says what is missing if that needs an NPU.

    It is registered for a key that comes before the device's and after autograd, so torch_npu's kernel stays in place.

    Args:
        op: The operator overload.
        name: Its name, ``npu::npu_nms_rotated``.
    """

    def __init__(self, op: Any, name: str) -> None:
        self.op, self.name = op, name

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the operator.

        Raises:
            NotImplementedError: It needs an NPU kernel that has no formula here.
        """
        try:
            return next_kernel(self.op, keys, *args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and any(text in str(error) for text in _NEEDS_KERNEL):
                raise NotImplementedError(
                    f"{self.name} has no formula in the emulator, and torch_npu's own code needs an NPU kernel for it.\n"
                    "Why: the emulated NPU runs torch's CPU kernels and the formulas of ascend_emulator.fused.\n"
                    "Do: use operators of docs/emulator_operators.md or plain torch operators."
                ) from error
            raise
