"""Bytes, memory and times of programs. May import all rooms; none imports it."""
