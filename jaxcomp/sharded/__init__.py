"""Parameters in shards, gathered as codes, and their step. May import all but measure."""
