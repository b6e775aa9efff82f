"""This rank's number, the size of the job and the address of rank 0, read from torchrun, Slurm, or a Kubernetes Indexed Job. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from trainer.shared.run.errors import ConfigError


@dataclass(frozen=True)
class RankEnv:
    """A rank's place in its job, and the address of rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # index on this node: selects the device
    address: str = "127.0.0.1"
    port: int = 29500


DEVICE_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # hardware queues: with fewer, a waiting receive blocks the kernels of other streams
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # messages before kernels that are queued behind them
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # buffers of many sizes do not fragment the memory
}
"""Variables that torch reads before CUDA starts; the user's take precedence."""


def prepare_devices(environment: MutableMapping[str, str]) -> None:
    """Sets variables that torch reads at import; call it before."""
    for name, value in DEVICE_ENVIRONMENT.items():
        environment.setdefault(name, value)


REPEATABLE_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one of the two with which products repeat
    "NCCL_ALGO": "Ring",  # sums in one order, whatever sizes and tuning say
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",  # no sums in switches
    "NCCL_COLLNET_ENABLE": "0",
}
"""Further variables of ``run.deterministic`` (torch's notes on reproducibility; torchtitan's settings of NCCL)."""


def prepare_repeatable(environment: MutableMapping[str, str]) -> None:
    """Makes libraries reproduce the same bits. Raises ``ConfigError`` if the user's own setting prevents it."""
    for name, value in REPEATABLE_ENVIRONMENT.items():
        if environment.setdefault(name, value) != value and (name, environment[name]) != ("CUBLAS_WORKSPACE_CONFIG", ":16:8"):
            raise ConfigError(f"run.deterministic=true needs {name}={value}, and the environment has {environment[name]}; unset it")


def device_index(local_rank: int, found: int, environment: Mapping[str, str]) -> int:
    """Returns the CUDA device of a rank that sees ``found``: the only one if a scheduler shows each task its own. Raises
    ``ConfigError``."""
    if found == 1 and len([name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]) == 1:
        return 0
    if local_rank >= found:
        remedy = f"use run.device=cpu, or {found} ranks on it" if found else "use run.device=cpu"
        raise ConfigError(f"run.device=cuda needs CUDA device {local_rank}, but this host has {found}; {remedy}")
    return local_rank


def discover(environment: Mapping[str, str]) -> RankEnv:
    """This rank as the environment names it, or a single process. ``ConfigError`` when half of the variables are missing."""
    for marker, read in (("RANK", _torchrun), ("SLURM_PROCID", _slurm), ("JOB_COMPLETION_INDEX", _indexed_job)):
        if marker in environment:
            try:
                env = read(environment)
            except KeyError as error:
                raise ConfigError(f"{marker} is set but {error.args[0]} is not; start every rank with both") from None
            except ValueError as error:
                raise ConfigError(f"{marker} is set but the job's variables are not numbers: {error}") from None
            return _checked(env)
    return RankEnv()


def _checked(env: RankEnv) -> RankEnv:
    if not 0 <= env.rank < env.world_size:
        raise ConfigError(f"rank {env.rank} is outside of a world of {env.world_size} ranks; ranks count from 0")
    return env


def _torchrun(env: Mapping[str, str]) -> RankEnv:
    return RankEnv(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=int(env.get("MASTER_PORT", "29500")),
    )


def _slurm(env: Mapping[str, str]) -> RankEnv:
    """One task per rank. Rank 0 is on the first node of the list; the port is derived from the job and step ids."""
    job = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env.get("SLURM_STEP_ID", "0"))
    return RankEnv(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env["SLURM_NTASKS"]),
        local_rank=int(env.get("SLURM_LOCALID", "0")),
        address=env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"),
        port=int(env.get("MASTER_PORT") or 20000 + job % 12000),
    )


def _indexed_job(env: Mapping[str, str]) -> RankEnv:
    """One pod per node: the completion index counts nodes, each with LOCAL_WORLD_SIZE ranks (default 1)."""
    local_size, local_rank = int(env.get("LOCAL_WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0"))
    return RankEnv(
        rank=int(env["JOB_COMPLETION_INDEX"]) * local_size + local_rank,
        world_size=int(env["WORLD_SIZE"]),
        local_rank=local_rank,
        address=env["MASTER_ADDR"],
        port=int(env.get("MASTER_PORT", "29500")),
    )


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: ``gpu[03-07,9],login`` is ``gpu03``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    if match is None:
        raise ValueError(f"node list {nodelist!r}")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")
