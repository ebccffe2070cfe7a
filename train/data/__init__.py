"""Text and images: reading them, and batches by number."""
