"""How a run's parameters lie on its devices: on every replica, or in shards."""
