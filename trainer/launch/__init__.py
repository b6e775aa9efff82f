"""A rank's environment, and why a rank failed."""
