"""Devices and processes of a run: how they meet, agree, watch each other and end."""
