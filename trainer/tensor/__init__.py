"""Tensor and sequence parallel layers, and how a model is spread over them."""
