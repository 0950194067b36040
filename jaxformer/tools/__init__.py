"""What looks at a model or a run from outside: `analysis` draws and measures, `planning` compiles for devices not here."""
