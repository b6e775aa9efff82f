"""The program of Trireme that runs inside the container: ``python -m trainer CONFIG.yaml`` on every rank."""
