"""Data as pure functions: index -> example -> batch.

The configs in `sources` and `tasks` import nothing heavy.
"""
