"""Measures and pictures of models and runs, and the HTML pages that show them."""
