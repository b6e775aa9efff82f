"""Fills in rows of encoder-decoders from the recipes of their sizes: rows print few of the widths and less of the layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from benchmarks.published.raw import RawRow

BIASED = "biases=[qkv,output,up,down] norm=layer positions=learned"


@dataclass(frozen=True)
class PairRecipe:
    """A size of T5 or mT5 of a source: the blocks of each stack, and how it was laid out where a row does not say."""

    source: str  # pattern of its name
    model: str  # pattern of the model's
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    tensor: int
    micro_batch: int
    batch: int
    changes: str = BIASED  # from the family: keys of the model
    written: int = 128  # tokens


NEMO, WORDS, MANY_WORDS = "NeMo Framework Launcher", 29184, 250112
"""The vocabularies of BERT's cased words and of mT5, with 100 sentinels, rounded up to 128."""
PAIRS = (
    # NVIDIA/NeMo-Framework-Launcher 26e42fa, conf/training/t5 and conf/training/mt5: kv_channels 64, geglu, 512 and 128 tokens
    PairRecipe(NEMO, r"mt5.?170m", 8, 512, 1024, 6, MANY_WORDS, 1, 64, 2048),
    PairRecipe(NEMO, r"mt5.?390m", 12, 768, 2048, 12, MANY_WORDS, 1, 32, 2048),
    PairRecipe(NEMO, r"mt5.?3b", 24, 2048, 5120, 32, MANY_WORDS, 2, 24, 1920),
    PairRecipe(NEMO, r"t5.?220m", 12, 768, 2048, 12, WORDS, 1, 64, 2048),
    PairRecipe(NEMO, r"t5.?3b", 24, 2048, 5120, 32, WORDS, 2, 24, 1920),
    # NVIDIA/Megatron-LM d98e8a64, tests/functional_tests/test_cases/t5/t5_11b_mcore_tp4_pp1: 30,522 words of BERT, padded
    PairRecipe("Megatron-LM CI", r"t5.?11b", 24, 4096, 10240, 64, 30592, 4, 4, 8, f"activation=gelu {BIASED}"),
)
"""The first whose source and model fit."""
WIDTH = 64.0
"""The width of a head, in all of them."""


def pair_of(row: RawRow) -> PairRecipe | None:
    """The recipe of a row of an encoder and its decoder; None where none is known."""
    if row.text("arch") != "t5":
        return None
    fits = (pair for pair in PAIRS if re.search(pair.source, row.source) and re.search(pair.model, row.text("model"), re.IGNORECASE))
    return next(fits, None)


def recipe_cells(row: RawRow) -> dict[str, str]:
    """Published cells that the recipe says where the row does not."""
    if not (pair := pair_of(row)):
        return {}
    cells = {"layers": pair.layers, "hidden": pair.hidden, "ffn": pair.ffn, "heads": pair.heads, "vocab": pair.vocab, "seq": 512}
    layout = {"tp": pair.tensor, "pp": 1, "mbs": pair.micro_batch, "gbs": pair.batch}
    once = (row.whole("mbs") or pair.micro_batch) * (row.whole("gpus") or 0) // (row.whole("tp") or pair.tensor)
    if once and not (row.whole("gbs") or pair.batch) % once:  # else it was another layout
        cells |= layout
    return {name: str(value) for name, value in cells.items() if not row.text(name)}


def pair_cells(row: RawRow) -> dict[str, Any]:
    """Cells of both stacks: blocks, of which rows count those of one, tokens that the decoder writes, and the width of a head."""
    stacks: dict[str, Any] = {"encoder_layers": 0, "decoder_seq": 0, "model_changes": "none"}
    if row.text("arch") != "t5":
        return stacks
    pair, each = pair_of(row), row.whole("layers")
    if not pair or not each:
        return dict.fromkeys(stacks)
    uneven = re.search(r"EncLayer(\d+)_DecLayer(\d+)", row.notes)
    read, written = map(int, uneven.groups()) if uneven else (each, each)
    relative = re.search(r"\bvariant RPE(_|$)", row.notes)
    stacks = {"layers": read + written, "encoder_layers": read, "decoder_seq": pair.written, "head_width": WIDTH}
    return stacks | {"model_changes": pair.changes.replace("positions=learned", "positions=relative") if relative else pair.changes}
