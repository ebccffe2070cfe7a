"""Text and images: where they lie, and batches of them by number."""
