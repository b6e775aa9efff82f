"""``python -m trainer.health NAMES RANKS NODE...``: every rank of a job tests its device, its memory and its network.

Run before a trial on the same nodes: it finds and names a bad device or node in seconds, where a training would hang or be slow.
Rank 0 writes the names of the bad nodes among NODE... (in the order of their ranks, RANKS on each that is full) to the file NAMES.
Exit code 0 if there are none, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.launch.rank_env import RankEnv, device_index, discover

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

PATIENCE_S = 90.0  # for the slowest rank to import torch and to arrive
COLLECTIVE_S = 60.0
SIDE = 1024  # of the matrices that are multiplied
MESSAGE_BYTES = 16 << 20
CPU_MEMORY_BYTES = 256 << 20
CUDA_MEMORY_FRACTION = 0.9  # of free memory
PIECE_BYTES = 1 << 30  # that are read at once


def main(argv: Sequence[str] | None = None) -> int:
    """Check this rank; rank 0 collects the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m trainer.health", description="Prove the nodes of a job.")
    parser.add_argument("names", type=Path, help="file for the names of bad nodes")
    parser.add_argument("ranks", type=int, help="ranks of a full node")
    parser.add_argument("nodes", nargs="+", help="all nodes of the job, in the order of their ranks")
    arguments = parser.parse_args(argv)
    env = discover(os.environ)
    problem = check_device(env)
    print(f"rank {env.rank}: {problem or 'device and memory are good'}", flush=True)
    bad = confer(env, problem, arguments.ranks, arguments.nodes)
    if bad is None:
        return 1
    if env.rank == 0 and bad:
        arguments.names.write_text("".join(f"{node}\n" for node in bad))
    if bad:
        return 1
    print(f"rank {env.rank}: {check_network(env)}", flush=True)
    return 0


def check_device(env: RankEnv) -> str | None:
    """Names the fault of this rank's device or memory, in one line; None if it is healthy."""
    try:
        import torch

        if torch.cuda.is_available():
            device = torch.device("cuda", device_index(env.local_rank, torch.cuda.device_count(), os.environ))
            wanted = int(torch.cuda.mem_get_info(device)[0] * CUDA_MEMORY_FRACTION)
        else:
            device, wanted = torch.device("cpu"), CPU_MEMORY_BYTES
        if not _holds(device, wanted):
            return f"memory of {device} does not hold what is written to it"
        return _check_arithmetic(device)
    except Exception as error:  # any error means a bad device, and the other ranks wait for the verdict
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _holds(device: torch.device, nbytes: int) -> bool:
    """True if so much memory keeps its contents. All of it is written before it is read, piece by piece: reading takes memory
    too."""
    import torch

    pieces = [torch.full((min(PIECE_BYTES, nbytes - start) // 4,), 1.0, device=device) for start in range(0, nbytes, PIECE_BYTES)]
    return all(int(torch.count_nonzero(piece)) == piece.numel() for piece in pieces)


def _check_arithmetic(device: torch.device) -> str | None:
    """Products of small integers are exact in any order of summation, on every device."""
    import torch

    row = torch.arange(SIDE, dtype=torch.float32, device=device) % 7
    product = torch.outer(row, torch.ones_like(row)) @ torch.ones(SIDE, SIDE, device=row.device)
    expected = (row * SIDE).unsqueeze(1).expand(SIDE, SIDE)
    return None if torch.equal(product, expected) else f"{device} multiplies matrices wrongly"


def confer(env: RankEnv, problem: str | None, per_node: int, nodes: Sequence[str]) -> list[str] | None:
    """Bad nodes as rank 0 sees them: those with a rank that has a problem or does not arrive. None: rank 0 cannot be reached."""
    from torch.distributed import DistError, TCPStore

    try:
        store = TCPStore(
            env.address,
            env.port,
            env.world_size,
            is_master=env.rank == 0,
            timeout=timedelta(seconds=PATIENCE_S),
            wait_for_workers=False,
        )
        store.set(f"rank {env.rank}", problem or "good")
        if env.rank == 0:
            verdict = bad_nodes(_gather(store, env.world_size), env.world_size, per_node, nodes)
            store.set("bad", " ".join(verdict))
            _wait_for_readers(store, env.world_size - 1)
            return verdict
        store.set_timeout(timedelta(seconds=2 * PATIENCE_S))
        text = store.get("bad").decode()
        store.add("readers", 1)
        return text.split()
    except (DistError, RuntimeError) as error:
        print(f"rank {env.rank}: rank 0 at {env.address}:{env.port} cannot be reached: {error}", flush=True)
        return None


def _gather(store: TCPStore, world_size: int) -> dict[int, str]:
    """The verdicts of the ranks that arrive in time."""
    said: dict[int, str] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(said) < world_size and time.monotonic() < deadline:
        for rank in range(world_size):
            if rank not in said and store.check([f"rank {rank}"]):
                said[rank] = store.get(f"rank {rank}").decode()
        time.sleep(0.05)
    return said


def _wait_for_readers(store: TCPStore, readers: int, patience_s: float = 5.0) -> None:
    """The store ends with rank 0, so wait until the others have read the verdict."""
    deadline = time.monotonic() + patience_s
    while store.add("readers", 0) < readers and time.monotonic() < deadline:
        time.sleep(0.02)


def bad_nodes(said: Mapping[int, str], world_size: int, per_node: int, nodes: Sequence[str]) -> list[str]:
    """Names of nodes with a rank that has a problem or said nothing, in order. Ranks fill nodes from the first on, ``per_node`` on each."""
    bad = {rank // per_node for rank in range(world_size) if said.get(rank) != "good"}
    return [nodes[index] for index in sorted(bad)]


def check_network(env: RankEnv) -> str:
    """All-reduce a large message over all ranks; its time. An error ends this rank."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(device_index(env.local_rank, torch.cuda.device_count(), os.environ))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{env.address}:{env.port + 1}",
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    message = torch.full((MESSAGE_BYTES // 4,), float(env.rank), device="cuda" if cuda else "cpu")
    start = time.perf_counter()
    dist.all_reduce(message)
    right = bool((message == env.world_size * (env.world_size - 1) / 2).all())
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    if not right:
        raise RuntimeError("the ranks' sum of a message is wrong")
    return f"all-reduce of {MESSAGE_BYTES >> 20} MiB in {seconds:.3f} s"


if __name__ == "__main__":
    sys.exit(main())
