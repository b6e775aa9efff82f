"""Text from a model under any layout, one token after another: cached keys and values, sampling, and the source of the weights."""
