"""Export and import of weights as Hugging Face folders and GGUF files: ``python -m trainer.convert``."""

from trainer.convert.adapters import export_adapter, import_adapter
from trainer.convert.huggingface import export, export_gguf, export_weights, import_weights

__all__ = ["export", "export_adapter", "export_gguf", "export_weights", "import_adapter", "import_weights"]
