"""What tests of the cost model share: machines of the papers, and runs on them."""

from __future__ import annotations

from launcher.config.hardware import hardware_files
from launcher.config.schema import ClusterConfig, HardwareConfig
from trainer.shared.run.schema import LayoutConfig, ModelConfig, RunConfig, ShardingConfig

HARDWARE: dict[str, HardwareConfig] = hardware_files()

GPT3 = ModelConfig(layers=96, hidden=12288, heads=96, vocab=51200, seq=2048, dropout=0.1)
GPT_22B = ModelConfig(layers=48, hidden=6144, heads=64, vocab=51200, seq=2048, dropout=0.1)
GPT_530B = ModelConfig(layers=105, hidden=20480, heads=128, vocab=51200, seq=2048, dropout=0.1)
GPT_1T = ModelConfig(layers=128, hidden=25600, heads=160, vocab=51200, seq=2048, dropout=0.1)


def cluster(gpus: int, hardware: str = "a100_80", per_node: int = 8) -> ClusterConfig:
    return ClusterConfig(nodes=max(1, gpus // per_node), gpus_per_node=min(gpus, per_node), hardware=HARDWARE[hardware])


def mixed(global_batch: int, precision: str = "bf16") -> RunConfig:
    return RunConfig(global_batch=global_batch, precision=precision)


def layout(tensor: int = 1, pipeline: int = 1, data: int = 1, **others: object) -> LayoutConfig:
    """A layout with ZeRO-1 over all replicas unless it says otherwise."""
    virtual = others.get("virtual_pipeline", 1)
    settings = {"schedule": "interleaved" if virtual != 1 else "1f1b", "sharding": ShardingConfig(1, 1, data)} | others
    return LayoutConfig(tensor=tensor, pipeline=pipeline, data=data, **settings)  # type: ignore[arg-type]
