"""The settings of a plan of inference: the workload, the limits, and the degrees of freedom. Keys of the same names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from launcher.config.engine import FORMATS
from trainer.shared.run.keys import MOST, key


@dataclass
class WorkloadConfig:
    """Requests: their lengths and their arrivals."""

    input: int = key(512, "tokens of a prompt (the mean of those of a trace)", minimum=1, maximum=MOST)
    output: int = key(128, "tokens generated per request", minimum=1, maximum=MOST)
    longest: Optional[int] = key(None, "tokens of the longest request, prompt and answer together: the length that commands allow; null = input + output", minimum=1, maximum=MOST)
    batch: Optional[int] = key(None, "static batches of so many requests per replica; null = see concurrency and rate", minimum=1, maximum=MOST)
    concurrency: Optional[int] = key(None, "requests in flight over all replicas: one that ends is followed by the next", minimum=1, maximum=MOST)
    rate: Optional[float] = key(None, "requests per second over all replicas, arriving at random; batch, concurrency and rate null = all sizes of serving.batch are compared", minimum=1e-9, maximum=MOST)
    trace: Optional[str] = key(None, "CSV file with columns arrival (s), input, output: lengths, the longest among them, and rate are those of its requests")


@dataclass
class SlaConfig:
    """Limits that a plan has to keep. Times are means."""

    latency_ms: Optional[float] = key(None, "time of a request at most", above=0)
    ttft_ms: Optional[float] = key(None, "time to the first token at most", above=0)
    tpot_ms: Optional[float] = key(None, "time per further token at most", above=0)
    throughput: Optional[float] = key(None, "requests per second at least, over all replicas", above=0)
    devices: Optional[int] = key(None, "devices at most", minimum=1)
    cost: Optional[float] = key(None, "price of a million generated tokens at most, by serving.device_hour", above=0)


@dataclass
class ServingConfig:
    """Degrees of freedom of a plan, and the price of a device."""

    weights: str = key("bf16", "number format of the weights", choices=FORMATS)
    kv: str = key("bf16", "number format of keys and values", choices=FORMATS)
    tensor: list[int] = key(list, "tensor degrees that are compared; empty = all powers of two that divide the heads", minimum=1, maximum=MOST)
    pipeline: list[int] = key(list, "pipeline degrees that are compared; empty = all powers of two that divide the layers", minimum=1, maximum=MOST)
    replicas: list[int] = key(list, "numbers of replicas that are compared; empty = as many as there is room for, and under load all powers of two", minimum=1, maximum=MOST)
    batch: list[int] = key(lambda: [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512], "requests in flight per replica that are compared", minimum=1, maximum=MOST)
    device_hour: float = key(2.0, "price of a device for an hour", above=0, maximum=MOST)
    checkpoint: str = key("MODEL", "what the rendered commands serve: a folder or name that the engine understands")

