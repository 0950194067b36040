"""What a model costs and what its record looks like."""
