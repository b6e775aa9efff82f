"""The verbs of the command line: one module each with ``main(argv) -> exit code``, imported when called; ``main.VERBS`` describes them."""
