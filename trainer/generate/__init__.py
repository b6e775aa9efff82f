"""Text from a model, one token after another: cached keys and values, sampling, and where the weights come from."""

from trainer.generate.cache import Cached
from trainer.generate.generate import Completion, generate
from trainer.generate.sampling import Sampling

__all__ = ["Cached", "Completion", "Sampling", "generate"]
