"""Weights out of and into a run, in the Hugging Face layout: ``python -m trainer.convert``."""

from trainer.convert.huggingface import export_weights, import_weights

__all__ = ["export_weights", "import_weights"]
