"""Optax transformations that exchange. May import compressors, replicas and exchange."""
