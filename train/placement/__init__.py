"""Devices, and what is on them: parameters on every replica or sharded, batches, messages."""
