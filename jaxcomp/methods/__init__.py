"""Optax transformations that exchange data. May import compressors, replicas and exchange."""
