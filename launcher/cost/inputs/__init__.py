"""Inputs of the cost model: model, layouts, device, trainer, constants."""
