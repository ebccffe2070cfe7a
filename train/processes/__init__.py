"""Devices and processes of a run: how processes connect, agree, watch each other and end."""
