"""The models, and what each is asked about data."""
