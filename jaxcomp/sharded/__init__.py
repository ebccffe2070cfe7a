"""Sharded parameters, gathered as codes, and their training step. May import all but measure."""
