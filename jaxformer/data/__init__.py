"""Index -> example -> batch, each a pure function. `sources` and `tasks` hold the configs and cost no heavy import."""
