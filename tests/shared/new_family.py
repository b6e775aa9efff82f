"""What holds for a family that one new file describes. A program, run in a copy of the project that has this file too."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.cli.main import main as trireme
from launcher.cost.inputs.shape import Shape
from tests.convert.test_logits import checkpoint, loaded, ours
from tests.numerics.test_plain_oracle import run_of, test_the_runtime_trains_what_plain_torch_trains
from trainer.convert import export_weights, import_weights
from trainer.shared.run.resolved import ResolvedModelConfig

FILE = """
from trainer.shared.families.family import ConfigKey, Family, HubFormat
from trainer.shared.families.gguf import GgufFormat

FAMILY = Family(
    name="osprey",
    defaults={"biases": ("qkv", "down"), "positions": "learned", "activation": "squared_relu"},
    embedding_norm=True,
    hub=HubFormat(
        model_type="osprey",
        architecture="OspreyForCausalLM",
        keys=(
            ConfigKey("layers", "depth"),
            ConfigKey("hidden", "width"),
            ConfigKey("heads", "heads"),
            ConfigKey("ffn", "inner", default=None),
            ConfigKey("seq", "length"),
            ConfigKey("norm_eps", "eps", default=1e-5),
        ),
        constants={"scaled": False},
        root="net.",
        ends={"embedding.tokens": "words", "embedding.positions": "places", "embedding.norm": "first", "head.norm": "last"},
        blocks="layer",
        block={
            "attention_norm": "n1",
            "attention.qkv": "query key value",
            "attention.output": "out",
            "mlp_norm": "n2",
            "mlp.up": "up",
            "mlp.down": "down",
        },
        forms={"attention.qkv": "by kind"},
        inputs_first=True,
    ),
    gguf=GgufFormat(architecture="osprey"),
)
"""


def by_hand(weights: dict[str, Tensor], model: ResolvedModelConfig, tokens: Tensor) -> Tensor:
    """Logits [s, b, V] of tokens [s, b]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.weight"]

    x = norm(weights["embedding.tokens.weight"][tokens] + weights["embedding.positions.weight"][: len(tokens), None], "embedding.norm")
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)
    for i in range(model.layers):
        block = f"blocks.{i}"
        made = torch.einsum("sbh,gkdh->sbgkd", norm(x, f"{block}.attention_norm"), weights[f"{block}.attention.qkv.weight"])
        query, key, value = (made + weights[f"{block}.attention.qkv.bias"]).unbind(-2)
        scores = torch.einsum("sbgd,tbgd->bgst", query, key) / query.shape[-1] ** 0.5 + mask
        seen = torch.einsum("bgst,tbgd->sbgd", scores.softmax(-1), value).flatten(2)
        x = x + seen @ weights[f"{block}.attention.output.weight"].t()
        inner = F.relu(norm(x, f"{block}.mlp_norm") @ weights[f"{block}.mlp.up.weight"].t()).square()
        x = x + inner @ weights[f"{block}.mlp.down.weight"].t() + weights[f"{block}.mlp.down.bias"]
    return norm(x, "head.norm") @ weights["head.output.weight"].t()


def check_training() -> ResolvedModelConfig:
    """Our modules compute what is written by hand, with the same gradients; the runtime trains as our modules do."""
    model = run_of(family="osprey").model
    network, tokens = ours(model, seed=1).double(), torch.arange(30).reshape(15, 2) % model.vocab
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in network.named_parameters()}
    for logits in (network(tokens), by_hand(weights, model, tokens)):
        F.cross_entropy(logits[:-1].flatten(0, 1), tokens[1:].flatten()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and weights[name].grad is not None
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-12)
    assert Shape.of(model).parameters == sum(parameter.numel() for parameter in weights.values())
    test_the_runtime_trains_what_plain_torch_trains({"family": "osprey"})
    return model


def check_conversion(model: ResolvedModelConfig, folder: Path) -> None:
    """What is exported is imported again."""
    network = ours(model, seed=2)
    export_weights(checkpoint(network, model, folder / "c"), folder / "hf")
    again = import_weights(folder / "hf", folder / "d")
    assert again.family == "osprey" and json.loads((folder / "hf" / "config.json").read_text())["architectures"] == ["OspreyForCausalLM"]
    back = dict(loaded(folder / "d", again).named_parameters())
    assert all(torch.equal(parameter, back[name]) for name, parameter in network.named_parameters())


def check_plan() -> None:
    """It is planned by its name."""
    with redirect_stdout(said := io.StringIO()):
        assert trireme(["plan", "model.family=osprey", "hardware=h100", "cluster.gpus_per_node=2", "data=synthetic", "--json"]) == 0
    assert json.loads(said.getvalue())["model"]["family"] == "osprey"


if __name__ == "__main__":
    check_conversion(check_training(), Path(sys.argv[1]))
    check_plan()
    print("all holds")
