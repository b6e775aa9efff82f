"""Ways to serve a model on a cluster: their space, the rules, the limits, the plan of all, the commands that start an engine. Pure."""
