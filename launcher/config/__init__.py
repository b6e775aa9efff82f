"""The launcher's typed configuration and the rules that concern the cluster."""
