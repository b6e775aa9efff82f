"""The rules of a run by their subject. ``trainer.shared.run.rules`` checks them in turn."""
