"""T5 and mT5 compute what Hugging Face's own networks compute, with the same gradients, and are converted both ways.

All is computed in double precision there, too (``tests.convert.test_decoders.double``), so that what differs is a mistake and not rounding.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.convert.test_decoders import double
from tests.convert.test_logits import checkpoint
from tests.huggingface import MARKS, peft, transformers
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.pieces import whole
from trainer.checkpoint.shards import Reader
from trainer.convert import export_adapter, export_weights, huggingface, import_adapter, import_weights
from trainer.convert.rules import rules
from trainer.models.encoder_decoder import network
from trainer.shared.parallel.boundary import PairTokens
from trainer.shared.records.manifest import read_manifest
from trainer.shared.records.model_files import from_config, read_model, to_config
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ModelConfig

pytestmark = MARKS

VOCAB, SEEDS = 37, 30
Config = dict[str, Any]


def drawn(draw: random.Random) -> Config:
    """A random config.json: heads whose width times number is not the model's, stacks of other depths, all activations."""
    buckets = draw.choice([4, 6, 9, 32])
    kind, gated = draw.choice(["t5", "mt5"]), draw.random() < 0.5
    own = {"t5": {"scale_decoder_outputs": draw.random() < 0.5}, "mt5": {}}[kind]
    return own | {
        "model_type": kind,
        "vocab_size": VOCAB,
        "d_model": draw.choice([8, 10, 15]),
        "num_heads": draw.choice([1, 2, 3]),
        "d_kv": draw.choice([1, 3, 4]),
        "d_ff": draw.choice([7, 12]),
        "num_layers": draw.randint(1, 3),
        "num_decoder_layers": draw.randint(1, 3),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": buckets // 2 + draw.choice([1, 3, 20]),
        "feed_forward_proj": draw.choice(["gated-gelu", "gated-silu"] if gated else ["relu", "gelu", "gelu_new"]),
        "layer_norm_epsilon": draw.choice([1e-6, 1e-3]),
        "dropout_rate": 0.0,
    }


def theirs_of(config: Config, seed: int) -> Any:
    """Their network, all of whose parameters are random numbers of single precision; a head that is not scaled is not tied, either."""
    settings = {name: value for name, value in config.items() if name != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **settings, attn_implementation="eager")
    built = transformers.AutoModelForSeq2SeqLM.from_config(made).double().eval()
    if not config.get("scale_decoder_outputs", False):  # as a folder with a head of its own is read
        built.lm_head.weight = torch.nn.Parameter(torch.empty_like(built.lm_head.weight))
        del built.all_tied_weights_keys["lm_head.weight"]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_((0.5 * torch.randn(parameter.shape, generator=generator)).to(torch.float32))
    return built


def saved(theirs: Any, folder: Path, shard: str) -> dict[str, Tensor]:
    theirs.save_pretrained(folder, max_shard_size=shard)
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def loaded(root: Path, model: ResolvedModelConfig, dtype: torch.dtype = torch.float64) -> Any:
    (found,) = Folder(root, "", 0, "").found()
    reader, built = Reader(found.path, read_manifest(found)), network(model).to(dtype)
    for name, parameter in built.named_parameters():
        reader.read(whole(name, parameter.shape), {"weight": parameter.detach().view(-1)})
    return built.eval()


def random_network(model: ResolvedModelConfig, seed: int) -> Any:
    built, generator = network(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return built.eval()


def compare(seed: int, folder: Path, back: bool) -> None:
    draw = random.Random(seed)
    config = drawn(draw)
    with double(config["model_type"]):
        theirs = theirs_of(config, seed)
    files = saved(theirs, folder / "hf", "10KB" if back else "1GB")
    model = import_weights(folder / "hf", folder / "c")
    assert (model.encoder_layers, model.layers) == (config["num_layers"], config["num_layers"] + config["num_decoder_layers"])
    mine = loaded(folder / "c", model)
    read, written = (torch.randint(0, VOCAB, (2, draw.choice([1, 7, 30]))) for _ in range(2))
    with double(config["model_type"]):
        said, known = mine(PairTokens(read.t(), written.t())).transpose(0, 1), theirs(input_ids=read, decoder_input_ids=written).logits
        torch.testing.assert_close(said, known, rtol=1e-10, atol=1e-10)
        weight = torch.randn_like(said)
        (said * weight).sum().backward()
        (known * weight).sum().backward()
    there, ours = (dict(each.named_parameters()) for each in (theirs, mine))
    compared = set()
    for rule in rules(model):
        for name, gradient in zip(rule.theirs, rule.split(ours[rule.ours].grad)):
            scale = float(there[name].grad.abs().max())
            torch.testing.assert_close(gradient, there[name].grad, rtol=1e-10, atol=1e-10 * scale + 1e-12)
            compared.add(name)
    assert compared == {*there}
    if not back:
        return
    export_weights(folder / "c", folder / "again")
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "again").eval()
    assert {name: value.tolist() for name, value in again.state_dict().items() if name in files} == {
        name: value.float().tolist() for name, value in files.items()
    }
    with double("t5"):  # mT5 is written as the same network of its sibling
        torch.testing.assert_close(again.double()(input_ids=read, decoder_input_ids=written).logits, known, rtol=1e-10, atol=1e-10)
    assert read_model(folder / "again") == model


def test_logits_and_all_gradients_are_theirs_in_random_networks_and_survive_the_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "FILE_BYTES", 10_000)
    torch.manual_seed(1)
    for seed in range(SEEDS):
        compare(seed, tmp_path / str(seed), back=seed < 8)


TINY = ModelConfig(family="t5", layers=5, encoder_layers=2, hidden=12, heads=3, head_width=5, ffn=20, vocab=VOCAB, seq=24, norm_eps=1e-6)
SMALL = {"1.1": TINY, "1.0": replace(TINY, activation="relu", tied=True)}


@pytest.mark.parametrize("name", SMALL)
def test_export_and_import_are_inverse_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = resolve_model(SMALL[name])
    mine = random_network(model, 2)
    export_weights(checkpoint(mine, model, tmp_path / "c"), tmp_path / "hf")
    again = import_weights(tmp_path / "hf", tmp_path / "d")
    assert again == model
    back = dict(loaded(tmp_path / "d", again, torch.float32).named_parameters())
    assert {*back} == {n for n, _ in mine.named_parameters()}
    for parameter, tensor in mine.named_parameters():
        assert torch.equal(tensor, back[parameter]), parameter


def published(folder: Path, **settings: Any) -> Config:
    """A folder as the published ones are: a config.json of old, and copies of the embedding among the weights."""
    config = {
        "model_type": "t5", "architectures": ["T5WithLMHeadModel"], "vocab_size": VOCAB, "d_model": 12, "num_heads": 3, "d_kv": 5, "d_ff": 20,
        "num_layers": 2, "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-06, "dropout_rate": 0.1, "initializer_factor": 1.0,
        "is_encoder_decoder": True, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "n_positions": 256, "output_past": True,
    } | settings  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = from_config(config)
    tensors = {
        name: tensor.contiguous().clone()
        for rule in rules(model)
        for name, tensor in zip(rule.theirs, rule.split(dict(random_network(model, 3).named_parameters())[rule.ours].detach()))
    }
    copies = {f"{stack}.embed_tokens.weight": tensors["shared.weight"].clone() for stack in ("encoder", "decoder")}
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(32, 3)}
    save_file(tensors | copies | unused, folder / "model.safetensors")
    return config


def test_published_folders_of_both_versions_and_of_mt5_are_read(tmp_path: Path) -> None:
    published(tmp_path / "1.0")
    first = import_weights(tmp_path / "1.0", tmp_path / "a")
    assert (first.tied, first.activation, first.seq, first.encoder_layers, first.layers) == (True, "relu", 256, 2, 4)
    published(tmp_path / "1.1", feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=1, dense_act_fn="gelu_new")
    second = import_weights(tmp_path / "1.1", tmp_path / "b")
    assert (second.tied, second.activation, second.layers) == (False, "geglu", 3)
    config = published(tmp_path / "mt5", model_type="mt5", tie_word_embeddings=True)
    third = import_weights(tmp_path / "mt5", tmp_path / "c")
    assert (third.tied, third.activation) == (False, "geglu")
    assert from_config({name: value for name, value in config.items() if name != "n_positions"}).seq == 512


def test_what_begins_and_ends_a_decoders_text_is_kept(tmp_path: Path) -> None:
    published(tmp_path / "hf", pad_token_id=3, eos_token_id=2, decoder_start_token_id=5)
    import_weights(tmp_path / "hf", tmp_path / "c")
    export_weights(tmp_path / "c", tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert [written[f"{name}_token_id"] for name in ("pad", "eos", "decoder_start")] == [3, 2, 5]
    published(tmp_path / "plain", pad_token_id=3, decoder_start_token_id=None)
    import_weights(tmp_path / "plain", tmp_path / "d")
    export_weights(tmp_path / "d", tmp_path / "filled")
    assert json.loads((tmp_path / "filled" / "config.json").read_text())["decoder_start_token_id"] == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoder_window": 3}, "encoder_window=3 of config.json cannot be imported"),
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh' cannot be imported; use"),
        ({"num_layers": 0}, "num_layers=0 of config.json cannot be read"),
        ({"num_decoder_layers": "two"}, "num_decoder_layers='two' of config.json cannot be read"),
        ({"relative_attention_max_distance": 9}, "model.relative_distance=9 is not beyond the 16 exact distances"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False cannot be imported"),
    ],
)
def test_a_config_of_another_network_is_refused_in_one_line(changed: Config, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_config(to_config(resolve_model(TINY)) | changed)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("changed", [{"positions": "learned"}, {"attention_scale": 0.5}, {"norm": "layer"}, {"biases": ["qkv"]}])
def test_what_their_form_cannot_say_is_not_exported(changed: Config) -> None:
    (name,) = changed
    with pytest.raises(ConfigError, match=rf"model\.{name}=.* cannot be exported with model\.family=t5"):
        to_config(resolve_model(replace(TINY, **changed)))


def test_a_folder_that_peft_saved_is_the_same_function_here_and_comes_back(tmp_path: Path) -> None:
    model = resolve_model(TINY)
    base = checkpoint(random_network(model, 2), model, tmp_path / "base")
    export_weights(base, tmp_path / "hf")
    torch.manual_seed(0)
    targets = ["SelfAttention.q", "SelfAttention.v", "SelfAttention.o", "DenseReluDense.wi_0", "DenseReluDense.wo"]
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    theirs = peft.get_peft_model(transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf"), settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    import_adapter(tmp_path / "theirs", tmp_path / "ours", base)
    export_weights(tmp_path / "ours", tmp_path / "merged")
    export_adapter(tmp_path / "ours", tmp_path / "again")
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "again").eval()
    merged = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval()
    given = {"input_ids": torch.randint(0, VOCAB, (2, 9)), "decoder_input_ids": torch.randint(0, VOCAB, (2, 5))}
    with torch.no_grad():
        known = theirs(**given).logits
        for other in (merged, again):
            torch.testing.assert_close(other(**given).logits, known, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")(**given).logits, known)


def test_dropout_stands_where_theirs_does(tmp_path: Path) -> None:
    for seed in range(4):
        config = drawn(random.Random(seed)) | {"dropout_rate": 0.3}
        with double(config["model_type"]):
            theirs = theirs_of(config, seed).train()
        saved(theirs, tmp_path / f"hf{seed}", "1GB")
        model = replace(import_weights(tmp_path / f"hf{seed}", tmp_path / f"c{seed}"), dropout=0.3)
        mine = loaded(tmp_path / f"c{seed}", model).train()
        read, written = torch.randint(0, VOCAB, (1, 9)), torch.randint(0, VOCAB, (1, 7))  # in one row all dimensions are in their order
        tables, (encoder, decoder) = (
            torch.stack([table() for table in mine.embedding.tables]),
            ([block for name, block in mine.blocks.items() if (int(name) < model.encoder_layers) == first] for first in (True, False)),
        )
        with double(config["model_type"]):
            torch.manual_seed(seed)
            memory = theirs.encoder(input_ids=read).last_hidden_state
            hidden = theirs.decoder(input_ids=written, encoder_hidden_states=memory).last_hidden_state
        torch.manual_seed(seed)
        x = mine.embedding._stream(read.t(), None, mine.embedding.dropout)
        for block in encoder:
            x = block(x, tables)
        x = mine.encoder_end(x)
        torch.testing.assert_close(x.transpose(0, 1), memory, rtol=1e-10, atol=1e-10)
        y = mine.embedding.written(written.t())
        for block in decoder:
            y = block(y, x, tables)
        scaled = hidden * config["d_model"] ** -0.5 if model.tied else hidden
        torch.testing.assert_close(mine.head(y, None).transpose(0, 1), theirs.lm_head(scaled), rtol=1e-10, atol=1e-10)
