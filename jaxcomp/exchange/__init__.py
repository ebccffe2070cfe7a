"""Trees as buckets, their messages and means. May import compressors and replicas."""
