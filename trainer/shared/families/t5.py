"""T5: Raffel et al. 2020 (arXiv 1910.10683); its version 1.1 and mT5 (Shazeer 2020, arXiv 2002.05202; Xue et al. 2021, arXiv 2010.11934).

The defaults are those of 1.1 and mT5: a gated MLP and a head of its own. The first version has ``activation=relu`` and ``tied=true``.
"""

from __future__ import annotations

from trainer.shared.families.family import ConfigKey, Family, HubFormat

FAMILY = Family(
    name="t5",
    title="t5 (with mT5)",
    order=3,
    defaults={"positions": "relative", "activation": "geglu"},
    encoder_decoder=True,
    attention_scale=1.0,
    init_scale=1.0,
    final_dropout=True,
    wide_embedding=True,
    tied_head_scaled=True,
    hub=HubFormat(
        model_type="t5",
        architecture="T5ForConditionalGeneration",
        keys=(ConfigKey("hidden", "d_model"),),
    ),
)
