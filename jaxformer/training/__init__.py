"""Training: an experiment in, a trained model, its record and its checkpoints out."""
