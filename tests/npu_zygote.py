"""A process on the emulated machine that forks NPU ranks for the tests and runs functions on them.

Started as ``python -m ascend_emulator npu_zygote.py ADDRESS``. torch, torch_npu and lightning are imported once, before
the first fork. No device is used or counted before it, so that a rank may still choose which ones are visible.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Listener
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("ASCEND_DEVICE", None)

import lightning.pytorch  # noqa: F401
import torch_npu  # noqa: F401
from rank_pool import RankError, RankPool


def main(address: str) -> None:
    pool = RankPool(8, device_type="npu")
    with Listener(address, "AF_UNIX") as listener, listener.accept() as pipe:
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                break
            if task is None:
                break
            world_size, name, args, options = task
            try:
                pipe.send(("ok", pool.run(world_size, name, *args, **options)))
            except RankError as error:
                pipe.send(("error", str(error), error.errors))
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1])
