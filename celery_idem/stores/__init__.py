"""Where records live: the protocol in ``base``, and memory, Redis and SQL behind it."""
