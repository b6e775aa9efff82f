"""The life of a model as a graph of stages: inputs and outputs (``graph``), identities (``plan``), and execution (``runner``)."""
