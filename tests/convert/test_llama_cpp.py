"""llama.cpp itself reads the GGUF files that are written here, and computes our probabilities from them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.test_gguf import SHAPES, corpus
from tests.convert.test_logits import checkpoint, logits, ours
from trainer.convert import export_gguf
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.schema import RopeConfig

__all__ = ["corpus"]
pytestmark = [pytest.mark.slow, pytest.mark.campaign("generate")]

pytest.importorskip("xllamacpp", reason="llama.cpp is not asked: pip install xllamacpp")

ASK = """
import json, sys, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup, parameters.verbosity = sys.argv[1], 64, 1, False, -1
server, answers = xllamacpp.Server(parameters), []
for ids in json.load(sys.stdin):
    for seed in range(50):  # a drawn end of the text has no probabilities
        asked = {"prompt": ids, "n_predict": 1, "logprobs": 304, "n_probs": 304, "temperature": 1.0, "top_k": 0, "seed": seed}
        found = server.handle_completions(asked)["choices"][0]["logprobs"]
        if found:
            break
    answers.append({one["id"]: one["logprob"] for one in found["content"][0]["top_logprobs"]})
print("answers", json.dumps(answers))
"""
WIDER: dict[str, Any] = {"vocab": 304, "seq": 64, "hidden": 64, "heads": 2}
LONG = RopeConfig("longrope", factor=4.0, original=16, short=[1 + i / 16 for i in range(16)], long=[1.5 + i / 4 for i in range(16)])


@pytest.mark.parametrize("name", SHAPES)
def test_llama_cpp_gives_the_next_token_our_probabilities(name: str, corpus: Path, tmp_path: Path) -> None:
    model = SHAPES[name]
    changes = WIDER | {"kv_heads": model.kv_heads and 2, "head_width": model.head_width and 32}
    changes |= {"attention_scale": (1 + 0.0707 * log(2)) ** 2 / 36**0.5} if name == "deepseek_v2" else {}
    changes |= {"embedding_scale": 8.0} if name.startswith("gemma") else {"rope": LONG} if model.rope.kind == "longrope" else {}
    resolved = resolve_model(dataclasses.replace(model, **changes))
    network = ours(resolved, seed=1)
    root = checkpoint(network, resolved, tmp_path / "c")
    shutil.copy(corpus / "tokenizer.json", root)
    export_gguf(root, tmp_path / "m.gguf")
    ids = torch.randint(0, 300, (3, 24), generator=torch.Generator().manual_seed(3))
    asked = subprocess.run(
        [sys.executable, "-c", ASK, tmp_path / "m.gguf"], input=json.dumps(ids.tolist()), capture_output=True, text=True, check=True
    )
    (line,) = [line for line in asked.stdout.splitlines() if line.startswith("answers ")]
    for theirs, mine in zip(json.loads(line.removeprefix("answers ")), torch.log_softmax(logits(network, ids)[:, -1], -1)):
        found = torch.tensor([theirs[str(token)] for token in range(304)])
        spread = float(mine.max() - mine.min())
        torch.testing.assert_close(found, mine, rtol=0, atol=2e-3 * spread)  # their weights, keys and values have 16 bits
