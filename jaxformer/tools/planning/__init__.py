"""Plans of a run before its devices are rented.

The real step is compiled for a topology that this machine does not have.
"""
