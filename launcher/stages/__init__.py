"""The life of a model as a graph of stages: what each takes and gives (``graph``), what makes it the same stage (``plan``), and running
it."""
