"""Text from a model under any layout, one token after another: cached keys and values, sampling, and where the weights come from."""
