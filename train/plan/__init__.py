"""Predicts which method is the fastest on a network."""
