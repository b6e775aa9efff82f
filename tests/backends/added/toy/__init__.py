"""A backend that is added: this folder and ``conf/cluster/toy.yaml`` are all of it."""

CLUSTER = "launcher.backends.toy.backend:ToyCluster"
BACKEND = "launcher.backends.toy.backend:ToyBackend"
