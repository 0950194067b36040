"""Commands of a cloud that is not there."""

import os


def install(files, folder, monkeypatch):
    """Writes programs, text by name, into a folder, whose `bin` comes first on the path; its name
    is CLOUD to them."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CLOUD", str(folder))
    return folder
