"""Training data: prepared corpora and synthetic tokens. Which rows a step sees depends on (seed, step, row) alone."""

from trainer.data.dataset import Corpus, Dataset, Synthetic, open_dataset

__all__ = ["Corpus", "Dataset", "Synthetic", "open_dataset"]
