"""Where a rank finds itself, and the reason why it ends."""
