"""What a run will send, and which method is predicted to be the fastest."""
