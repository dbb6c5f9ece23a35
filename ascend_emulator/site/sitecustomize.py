"""Runs at the start of every Python child process: emulated NPUs there too, then the machine's own sitecustomize."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("ASCEND_EMULATOR") == "1":
    from ascend_emulator.load import prepare

    prepare()

sys.path = [p for p in sys.path if os.path.abspath(p or ".") != _here]
_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401
except ImportError:
    sys.modules["sitecustomize"] = _own  # there is no other; the import under way expects one
