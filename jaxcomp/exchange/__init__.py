"""Trees as buckets, buckets as messages, and their means. May import compressors, replicas."""
