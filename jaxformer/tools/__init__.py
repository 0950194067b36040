"""Tools that look at a model or a run from outside.

`analysis` measures and draws. `planning` compiles a run for devices that this machine does not
have. `kernel_check` compares an attention kernel with the reference.
"""
