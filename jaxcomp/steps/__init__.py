"""Steps of replicas that hold all parameters. May import all but sharded and measure."""
