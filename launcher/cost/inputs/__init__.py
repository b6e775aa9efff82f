"""What the cost model is asked about: model, layouts, device, trainer, constants."""
