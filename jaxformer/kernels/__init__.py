"""Kernels for exact attention, one file each: what a kernel computes equals `ops.attention`'s reference, or it refuses."""
