"""What a run saves, and where it goes on."""
