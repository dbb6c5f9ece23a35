"""Which NPU this process gets: the mask of visible devices, the local rank, and no two ranks on one device.

Everything here is known before HCCL starts. It has to be: HCCL's own answer to a wrong binding is a time-out, a port
clash, or an error that names the wrong index.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from ascend_core import env
from ascend_core.errors import ConfigError, DeviceError

MASK = "ASCEND_RT_VISIBLE_DEVICES"


def read_mask() -> list[int] | None:
    """Read ``ASCEND_RT_VISIBLE_DEVICES``.

    Returns:
        The device ids it lists, or None when it is unset or empty: all devices are visible.

    Raises:
        ConfigError: It holds something else than ids, or ids that do not ascend.
    """
    text = env.read(MASK)
    if text is None:
        return None
    ids: list[int] = []
    for part in str(text).split(","):
        if not part.strip().isdecimal():
            raise ConfigError(
                f"{MASK}={text!r}: {part.strip()!r} is not a device id.",
                "The runtime stops reading at the first word it does not understand, and says nothing.",
                f"Write ids with commas between them, such as {MASK}=0,1,2,3.",
            )
        ids.append(int(part))
        if len(ids) > 1 and ids[-1] <= ids[-2]:
            raise ConfigError(
                f"{MASK}={text!r}: id {ids[-1]} comes after {ids[-2]}.",
                "Ids must ascend; in any other order the runtime shows fewer devices, or none, and says nothing.",
                "Write each id once, smallest first.",
            )
    return ids


def check_mask(visible: int) -> None:
    """Compare the mask with what the runtime made of it.

    Args:
        visible: Number of devices the runtime reports under the mask.

    Raises:
        ConfigError: The mask is malformed, or the runtime dropped ids of it.
    """
    ids = read_mask()
    if ids is None or visible >= len(ids):
        return
    usable = ", ".join(map(str, ids[:visible])) or "none"
    raise ConfigError(
        f"{MASK}={','.join(map(str, ids))}: there is no device {ids[visible]}; usable of these: {usable}.",
        f"The runtime counts devices from 0 without gaps, and drops an id it does not have and all after it; {visible} of "
        f"{len(ids)} are left. Slot numbers of a card list are not these ids.",
        "Name ids that npu-smi info lists on this machine, and start one process for each.",
    )


def local_rank(num_nodes: int | None = None, visible: int | None = None) -> int:
    """Find the rank of this process on its node, which is the index of its NPU.

    Args:
        num_nodes: Nodes of the run, where the caller knows.
        visible: Devices this process sees; tells one node from several when nothing else does.

    Returns:
        ``LOCAL_RANK``; without it, ``RANK`` on a single node, and 0 in a run of one process.

    Raises:
        ConfigError: ``LOCAL_RANK`` is missing and the run has several nodes, or may have.
    """
    local = env.read("LOCAL_RANK")
    if local is not None:
        return int(local)
    rank, world = env.read("RANK"), env.read("WORLD_SIZE")
    if rank is None:
        return 0
    on_node = env.read("LOCAL_WORLD_SIZE")
    if num_nodes is None and on_node is not None and world is not None:
        num_nodes = -(-int(world) // int(on_node))
    if num_nodes == 1 or (num_nodes is None and world is not None and visible is not None and int(world) <= visible):
        return int(rank)
    nodes = f"{num_nodes} nodes" if num_nodes else f"an unknown number of nodes (WORLD_SIZE={world}, {visible} visible devices)"
    raise ConfigError(
        f"RANK={rank} is set and LOCAL_RANK is not, in a run with {nodes}.",
        "The global rank is no device index: it goes on counting from node to node.",
        "Set LOCAL_RANK to the number of this process on its node, from 0; torchrun and accelerate launch do that.",
    )


def check_local_rank(local: int, visible: int) -> None:
    """Check that the local rank names a device.

    Raises:
        ConfigError: There are fewer devices.
    """
    if local >= visible:
        raise ConfigError(
            f"LOCAL_RANK={local} (RANK={env.read('RANK')}), but this process uses {visible} devices, 0 to {visible - 1}.",
            f"LOCAL_RANK counts the processes of one node, each with a device; {MASK} is {env.read(MASK)!r}.",
            "Start as many processes per node as it has visible devices, and give each its number on the node as LOCAL_RANK.",
        )


def check_distinct(device: torch.device) -> None:
    """Check that no other rank computes on this rank's NPU; every rank must call it, before the first HCCL collective.

    Args:
        device: This rank's device.

    Raises:
        DeviceError: Two ranks share one; on every rank.

    Communication:
        One object all-gather over the world, by gloo where the process group has it.
    """
    ids = read_mask()
    index = device.index or 0
    slot = ids[index] if ids is not None and index < len(ids) else index
    everyone: list[tuple[tuple[str, ...], int]] = [((), 0)] * dist.get_world_size()
    dist.all_gather_object(everyone, (_machine(), slot))
    first: dict[tuple[tuple[str, ...], int], int] = {}
    for rank, place in enumerate(everyone):
        other = first.setdefault(place, rank)
        if other != rank:
            raise DeviceError(
                f"Ranks {other} and {rank} both use NPU {place[1]} of {place[0][0]}.",
                "HCCL needs a device for each rank, and would fail with a port clash or a time-out. Rank "
                f"{dist.get_rank()} has LOCAL_RANK={env.read('LOCAL_RANK')} and {MASK}={env.read(MASK)!r}.",
                "Give each process of a node another LOCAL_RANK, or each group of processes another mask, and call "
                "torch.npu.set_device(LOCAL_RANK) before anything else touches the NPU.",
            )


def _machine() -> tuple[str, ...]:
    """Name this machine, or container: hosts may share a name, and containers a kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/mnt")
    return (
        socket.gethostname(),
        boot.read_text().strip() if boot.exists() else "",
        os.readlink(space) if space.exists() else "",
    )
