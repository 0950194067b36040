"""What a run's record looks like."""
