"""The verbs a person types. Each is a module with ``HELP`` and ``main(argv) -> exit code``, imported only when it is called."""
