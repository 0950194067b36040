"""Ways to run the layers: one scan (the default), reversible layers, stages of a pipeline."""
