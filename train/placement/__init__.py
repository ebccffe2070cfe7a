"""Where a run's parameters are: on every replica, or sharded."""
