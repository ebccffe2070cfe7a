"""What varies over replicas, and the states and specs of it. May import compressors."""
