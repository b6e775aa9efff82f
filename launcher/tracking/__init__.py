"""MLflow: the mirror of a sweep, its database and server."""
