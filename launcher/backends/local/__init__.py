"""Trials as processes of this machine."""

CLUSTER = "launcher.config.schema:LocalCluster"  # with which every configuration begins
BACKEND = "launcher.backends.local.backend:LocalBackend"
