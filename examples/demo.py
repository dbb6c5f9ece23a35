"""The demo behind ``make demo``: the same script in one process and on eight emulated NPUs, side by side.

It runs ``train_gpt_lightning.py`` twice, with ``strategy="auto"`` in one CPU process and with ``strategy="ascend_hybrid"``
(pipeline 2 x tensor 2 x data 2) on eight NPUs over HCCL, prints both loss curves with their difference, and fails unless
they agree and the model has learned. ``--accelerator cpu`` (``make demo-cpu``) takes eight CPU ranks over gloo instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
AGREE_STEPS, AGREE_WITHIN = 20, 1e-4
LEARNED_BELOW = 2.2  # nats per character; always guessing by letter frequency gives about 3.0


def run(out: Path, accelerator: str, threads: int, environment: dict[str, str], *arguments: str) -> tuple[dict, float]:
    """Run the training script and return what it wrote, and the seconds it took."""
    machine = ["-m", "ascend_emulator", "--devices", "8"] if accelerator == "npu" else []
    script = [str(HERE / "train_gpt_lightning.py"), "--accelerator", accelerator, "--out", str(out)]
    command = [sys.executable, *machine, *script, *arguments]
    start = time.monotonic()
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads), **environment})
    return json.loads((out / "losses.json").read_text()), time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["npu", "cpu"], default="npu", help="of the eight ranks")
    accelerator = parser.parse_args().accelerator
    where = "8 emulated NPUs over HCCL" if accelerator == "npu" else "8 CPU ranks over gloo"
    console = Console()
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="ascend_demo_") as folder:
        console.rule("one process")
        one, one_s = run(Path(folder) / "one", "cpu", cores, {}, "--devices", "1", "--strategy", "auto", "--samples", "0")
        console.rule(f'Trainer(strategy="ascend_hybrid") on {where}: pipeline 2 x tensor 2 x data 2')
        config = {"ASCEND_CONFIG": str(HERE / "hybrid_2x2x2.yaml")}
        hybrid, hybrid_s = run(Path(folder) / "hybrid", accelerator, 1, config, "--devices", "8", "--strategy", "ascend_hybrid")

    table = Table(title="loss, nats per character")
    for column in ("step", "one process", "2 x 2 x 2", "difference"):
        table.add_column(column, justify="right")
    pairs = list(zip(one["losses"], hybrid["losses"], strict=True))
    for step in sorted({*range(0, AGREE_STEPS, 2), AGREE_STEPS - 1, *range(AGREE_STEPS, len(pairs), 20), len(pairs) - 1}):
        a, b = pairs[step]
        table.add_row(str(step + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    table.add_row(
        "validation", f"{one['val_loss']:.6f}", f"{hybrid['val_loss']:.6f}", f"{abs(one['val_loss'] - hybrid['val_loss']):.1e}"
    )
    console.print(table)
    for sample in hybrid["samples"]:
        console.print(sample, markup=False, highlight=False)
        console.rule(style="dim")

    worst = max(abs(a - b) for a, b in pairs[:AGREE_STEPS])
    agree, learned = worst <= AGREE_WITHIN, hybrid["val_loss"] < LEARNED_BELOW
    console.print(f"largest difference over the first {AGREE_STEPS} steps: {worst:.1e} (at most {AGREE_WITHIN:.0e} allowed)")
    console.print(f"validation loss: {hybrid['val_loss']:.3f} nats per character (below {LEARNED_BELOW} expected)")
    console.print(f"time: one process {one_s:.0f} s, {where} {hybrid_s:.0f} s, on {cores} cores")
    if not agree or not learned:
        console.print("[bold red]FAILED")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
