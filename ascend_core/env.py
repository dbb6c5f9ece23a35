"""Every environment variable that the packages read, in one typed table.

Nothing else in the packages touches ``os.environ``; a test greps for that. Values are read when asked for, never at
import, so that a test or a launcher may set them late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ascend_core.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name.
        kind: ``str``, ``int`` or ``bool``; the type :func:`read` returns.
        default: The value when it is unset or empty.
        help: What it does, one sentence.
    """

    name: str
    kind: type
    default: str | int | bool | None
    help: str


TABLE: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("ASCEND_CONFIG", str, None, "YAML or JSON file with HybridConfig keys; an argument beats it."),
        Variable("ASCEND_DEVICE", str, None, "'npu' or 'cpu': the device to use instead of the detected one."),
        Variable("ASCEND_RT_VISIBLE_DEVICES", str, None, "CANN's mask of visible NPUs; indices are relative to it."),
        Variable("LIGHTNING_ASCEND_AUTOLOAD", bool, True, "0 switches the registration without import off."),
        Variable("LOCAL_RANK", int, None, "Rank of this process on its node, set by the launcher."),
        Variable("LOCAL_WORLD_SIZE", int, None, "Processes on this node, set by torchrun."),
        Variable("PL_SEED_WORKERS", bool, False, "Set by Lightning's seed_everything(workers=True)."),
        Variable("RANK", int, None, "Global rank of this process, set by the launcher."),
        Variable("WORLD_SIZE", int, None, "Number of processes, set by the launcher."),
    )
}

_FALSE = {"0", "false", "no", "off"}
_TRUE = {"1", "true", "yes", "on"}


def write(name: str, value: int | str) -> None:
    """Set one variable of the table, for this process and those it starts.

    Args:
        name: A name in :data:`TABLE`.
        value: Its value.
    """
    os.environ[TABLE[name].name] = str(value)


def read(name: str) -> str | int | bool | None:
    """Read one variable of the table.

    Args:
        name: A name in :data:`TABLE`.

    Returns:
        The value in the variable's type, or its default when unset or empty.

    Raises:
        ConfigError: The value does not parse as the variable's type.
    """
    variable = TABLE[name]
    text = os.environ.get(name, "").strip()
    if not text:
        return variable.default
    if variable.kind is int:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name}={text!r} is not an integer.", variable.help, f"Set {name} to a number.") from None
    if variable.kind is bool:
        if text.lower() in _FALSE | _TRUE:
            return text.lower() in _TRUE
        raise ConfigError(f"{name}={text!r} is not a switch.", variable.help, f"Set {name} to 0 or 1.")
    return text
