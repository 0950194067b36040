import os
import sys

from jaxformer.cli import main


def run() -> int:
    """The command `jaxformer`, and `python -m jaxformer`."""
    read_paths_as_utf8()
    return main()


def read_paths_as_utf8() -> None:
    """Starts Python again in this process if the locale is not UTF-8: paths and texts are UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    raise SystemExit(run())
