"""The runtime of a layout: collectives, tensor and sequence parallel layers, pipeline, state sharding, recomputation."""
