"""Values that vary over replicas: their types, states and specs. May import compressors."""
