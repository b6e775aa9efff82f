"""The schema of the optimizer and of the groups of parameters that it updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from trainer.shared.run.keys import key

OPTIMIZERS = ("adamw", "muon")
DECAY_STYLES = ("cosine", "linear", "sqrt")
ORTHOGONALIZED = "matrices"
"""The group of parameters that ``optimizer.kind=muon`` orthogonalises."""


@dataclass
class GroupConfig:
    """Settings of one group of parameters."""

    lr: Optional[float] = key(None, "peak learning rate, with the schedule of optimizer.lr; null = that one", minimum=0)
    weight_decay: Optional[float] = key(None, "decoupled weight decay; null = optimizer.weight_decay, of vectors none", minimum=0)


@dataclass
class GroupsConfig:
    """Groups of parameters; each layer declares those of its own."""

    embedding: GroupConfig = key(GroupConfig, "embeddings of tokens (and a head that is tied to them) and of positions, virtual tokens")
    head: GroupConfig = key(GroupConfig, "a head of its own")
    matrices: GroupConfig = key(GroupConfig, "matrices of blocks, and those that tuning adds")
    vectors: GroupConfig = key(GroupConfig, "biases, norms and other factors")


@dataclass
class MuonConfig:
    """Orthogonalised momentum of matrices."""

    momentum: float = key(0.95, "momentum of matrices; below 1", minimum=0)
    nesterov: bool = key(True, "the newest gradient counts once more")
    steps: int = key(5, "Newton-Schulz iterations", minimum=1, maximum=100)
    scale: str = key("rms", "factor of an update: rms = 0.2 sqrt(max(rows, columns)), the size of AdamW's, so that its lr and weight_decay can stay; "
        "spectral = sqrt(max(1, rows / columns)); aspect = sqrt(rows / columns), which model.transfer needs", choices=("rms", "spectral", "aspect"))
    cautious: bool = key(False, "weights of matrices decay only where the update makes them smaller")
    row_beta: float = key(0.0, "above 0: rows of an update are divided by the root of the average of their mean squares, which decays by this "
        "(NorMuon: 0.95); below 1", minimum=0)


@dataclass
class OptimizerConfig:
    """AdamW, or Muon with AdamW. The learning rate rises linearly, stays, and falls."""

    kind: str = key("adamw", "adamw, or muon: orthogonalised momentum for the matrices of blocks, AdamW for all else", choices=OPTIMIZERS)
    lr: float = key(1e-3, "peak learning rate", minimum=0)
    min_lr: Optional[float] = key(None, "final learning rate; null = lr / 10", minimum=0)
    warmup_steps: int = key(0, "steps of linear learning-rate warm-up", minimum=0)
    stable_steps: int = key(0, "steps at the peak learning rate between warm-up and decay", minimum=0)
    decay_style: str = key("cosine", "how the learning rate falls with the passed share x of the decay: cosine, linear, or as 1 - sqrt(x)",
        choices=DECAY_STYLES)
    decay_steps: Optional[int] = key(None, "step at which min_lr is reached; null = run.steps", minimum=1)
    beta1: float = key(0.9, "AdamW beta 1", minimum=0)
    beta2: float = key(0.95, "AdamW beta 2", minimum=0)
    eps: float = key(1e-8, "AdamW epsilon; muon adds it to the norm of a matrix", minimum=0)
    weight_decay: float = key(0.1, "decoupled weight decay of matrices (not of biases and norms)", minimum=0)
    clip: float = key(1.0, "global gradient-norm clip; 0 = off", minimum=0)
    groups: GroupsConfig = key(GroupsConfig, "learning rates and weight decays of groups of parameters")
    muon: MuonConfig = key(MuonConfig, "kind=muon: the update of matrices")
    cautious: bool = key(False, "what AdamW updates decays only where the update makes it smaller")
    average_from: Optional[int] = key(None, "steps of the run after which weights are averaged, those of every further step alike: an observer, which "
        "the end validates and checkpoints hold; null = none", minimum=0)
