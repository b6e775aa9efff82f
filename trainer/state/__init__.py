"""Parameters, gradients and optimizer states: buckets, shards, updates."""
