"""Reading token by token, with a memory, gives what the plain network gives for the whole text, whatever the model's options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.numerics.test_plain_oracle import plain_model, run_of
from trainer.comm.collectives import World
from trainer.generate.session import Session
from trainer.state.parameters import OptimizerShard

pytestmark = pytest.mark.slow

LLAMA3 = {"kind": "llama3", "factor": 4.0, "original": 8, "low": 0.5, "high": 2.0}


@pytest.mark.parametrize(
    "model",
    [
        {"family": "llama", "window": 3, "full_every": 2, "score_cap": 0.3, "logit_cap": 0.7},
        {"family": "llama", "window": 4, "full_every": 2, "rope": {"local_theta": 50.0, "share": 0.5, "skip_every": 2}, "head_width": 12},
        {"family": "llama", "rope": LLAMA3, "qk_norm": "width", "norm_at": "both", "attention_scale": 0.3},
        {"family": "gpt", "window": 1, "residual": "parallel_one_norm", "embedding_scale": 3.0, "logit_scale": 0.5},
        {"family": "bloom", "window": 5, "qk_norm": "head", "tied": False, "biases": ["head"]},
    ],
    ids=str,
)
def test_a_text_that_is_read_in_parts_has_the_logits_of_the_whole(model: dict[str, Any]) -> None:
    config = run_of(seq=16, **model)
    network, *_ = plain_model(config)
    tokens = torch.randint(config.model.vocab, (16, 2), generator=torch.Generator().manual_seed(0))
    weights = dict(network.named_parameters())

    def load(shards: Sequence[OptimizerShard]) -> None:
        for shard in shards:
            shard.weight.copy_(weights[shard.record.name].detach().flatten()[shard.offset : shard.offset + shard.numel])

    session = Session(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), load)
    with torch.no_grad():
        whole = network(tokens)
        memory, padded = session.begin([0, 2]), tokens.clone()
        padded[2:, 1] = tokens[:-2, 1]  # the second text begins two columns later
        for first, last in ((0, 6), (6, 7), (7, 8), (8, 13), (13, 16)):
            read = session.read(memory, padded[first:last].t().tolist())
            assert read is not None
            torch.testing.assert_close(read[0], whole[last - 1, 0], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(read[1], whole[last - 3, 1], rtol=1e-10, atol=1e-12)
