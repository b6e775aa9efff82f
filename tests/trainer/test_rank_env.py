"""A rank finds its place from whatever started it."""

from __future__ import annotations

import pytest

from trainer.launch.rank_env import RankEnv, device_index, discover, first_host, prepare_devices
from trainer.shared.run.errors import ConfigError


def test_without_a_starter_there_is_one_process() -> None:
    assert discover({}) == RankEnv(0, 1, 0, "127.0.0.1", 29500)


def test_torchrun() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1234"}
    assert discover(env) == RankEnv(5, 8, 1, "n0", 1234)


def test_slurm_meets_on_the_first_node_and_every_rank_derives_one_port() -> None:
    common = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[03-04]"}
    places = [discover(common | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 2)}) for r in range(4)]
    assert [(p.rank, p.world_size, p.local_rank, p.address) for p in places] == [(r, 4, r % 2, "gpu03") for r in range(4)]
    assert len({p.port for p in places}) == 1 and places[0].port > 1024


def test_torchrun_inside_of_slurm_wins() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert discover(env).rank == 1


def test_indexed_job_counts_pods() -> None:
    env = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "t-0.t", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert discover(env) == RankEnv(7, 8, 1, "t-0.t", 29500)


@pytest.mark.parametrize(
    "env, named",
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2"),
        ({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "'x'"),
    ],
)
def test_half_a_place_is_one_plain_error(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        discover(env)


@pytest.mark.parametrize(
    "nodelist, host",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-07,9],login", "gpu03"),
        ("a[1,3]-ib", "a1-ib"),
        ("rack1-node[12-14]", "rack1-node12"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_task_that_is_shown_one_device_alone_takes_it() -> None:
    """``--gpus-per-task=1`` shows the fourth task of a node one device, number 0 to it."""
    assert device_index(3, 1, {"CUDA_VISIBLE_DEVICES": "3"}) == 0
    assert device_index(3, 4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == 3
    assert device_index(3, 8, {}) == 3
    for found, shown in ((1, {}), (2, {"CUDA_VISIBLE_DEVICES": "0,1"}), (0, {"CUDA_VISIBLE_DEVICES": ""})):
        with pytest.raises(ConfigError, match=f"needs CUDA device 3, but this host has {found}"):
            device_index(3, found, shown)


def test_what_the_user_sets_for_a_device_counts_more_than_the_defaults() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    prepare_devices(environment)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and environment["TORCH_NCCL_HIGH_PRIORITY"] == "1"
