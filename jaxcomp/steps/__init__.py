"""Training steps of replicas that hold all parameters. May import all but sharded, measure."""
