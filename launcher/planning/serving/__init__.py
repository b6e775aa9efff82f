"""Ways to serve a model on a cluster: their space, rules, limits and plan, and the commands that start an engine. Pure."""
