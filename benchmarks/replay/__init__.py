"""Searches of measured tables in place of a cluster: of layouts (``trials``), of fronts of inference (``fronts``), behind ``trireme search
--replay`` (``table``), and of every sweep of some tables, predicted without its source (``python -m benchmarks.replay``)."""
