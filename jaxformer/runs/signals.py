"""Stopping on a signal: between two steps, and after the same step on all processes."""

import os
import signal

import jax

from jaxformer.parallel import processes


class Interrupted(RuntimeError):
    """A signal ended the run after its state was saved."""

    def __init__(self, signum: int, step: int):
        super().__init__(
            f"stopped by {signal.Signals(signum).name} after step {step}, saved;"
            " the same command goes on"
        )
        self.exit_code = 128 + signum


class Signals:
    """Remembers SIGTERM and SIGINT, so that a run ends between two steps.

    The second signal ends the process at once. With several processes `parallel.peers` handles
    SIGTERM and tells the others; SIGINT is passed on as SIGTERM.
    """

    def __init__(self):
        self._received = 0
        self._several = jax.process_count() > 1

    def __enter__(self) -> "Signals":
        ours = (signal.SIGINT,) if self._several else (signal.SIGTERM, signal.SIGINT)
        try:
            self._before = {s: signal.signal(s, self._handle) for s in ours}
        except ValueError:  # not the main thread: signals belong to another program
            self._before = {}
        return self

    def after(self, step: int) -> int:
        """The signal that stops the run after `step` steps; 0: none. Call it after every step."""
        if self._several:
            return processes.signal_after(step)
        return self._received

    def _handle(self, signum, frame) -> None:
        # A save that is running writes under a temporary name, so half of one never counts.
        if self._received:
            os._exit(128 + signum)
        self._received = signum
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *exception) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
