"""The models and their objectives."""
