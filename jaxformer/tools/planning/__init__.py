"""A run planned before its devices are rented: the real step, compiled for a topology that is not here."""
