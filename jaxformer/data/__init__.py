"""Index -> example -> batch, as pure functions. `sources` and `tasks` hold the configs and import nothing heavy."""
