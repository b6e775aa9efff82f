"""Training data: prepared corpora and synthetic tokens. What a sample holds depends on the seed and its number alone."""

from trainer.data.dataset import Corpus, Dataset, Synthetic, TokenFile, open_dataset

__all__ = ["Corpus", "Dataset", "Synthetic", "TokenFile", "open_dataset"]
