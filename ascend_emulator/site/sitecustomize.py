"""Runs at the start of every Python child process: emulated NPUs there too, then the machine's own sitecustomize."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("ASCEND_EMULATOR") == "1":
    from ascend_emulator.load import prepare

    prepare()

sys.path = [p for p in sys.path if os.path.abspath(p or ".") != _here]
del sys.modules["sitecustomize"]
try:
    import sitecustomize  # noqa: F401
except ImportError:
    pass
