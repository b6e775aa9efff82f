"""Text to train and tune on: where it comes from, and the index of what was prepared."""
