"""The verbs a person types. Each is a module of the name with ``main(argv) -> exit code``, imported only when it is called; ``main.VERBS``
says what they do."""
