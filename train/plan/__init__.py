"""Predicts what a run will send, and which method is fastest."""
