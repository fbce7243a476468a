"""Each way in which an edit of the file of API keys removes a key."""

import hashlib
from pathlib import Path

KEPT, REMOVED = "kept", "removed"
"""Keys."""


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


WHOLE = f"a {digest(KEPT)}\nb {digest(REMOVED)}\n"
"""The file with both keys."""
EDITS = ["removed", "swapped", "a typo on its line", "a typo on another line", "emptied", "deleted"]
UNREADABLE = ("emptied", "deleted")
"""Edits after which no key is left."""


def edit(path: Path, way: str) -> None:
    """Removes the key REMOVED and keeps KEPT, as far as the edit can."""
    kept = f"a {digest(KEPT)}\n"
    if way == "removed":
        path.write_text(kept)
    elif way == "swapped":
        (path.parent / "new").write_text(kept)
        (path.parent / "new").rename(path)
    elif way == "a typo on its line":
        path.write_text(f"{kept}b {digest(REMOVED)[:-1]}\n")
    elif way == "a typo on another line":
        path.write_text(f"{kept}c nonsense\n")
    elif way == "emptied":
        path.write_text("")
    else:
        path.unlink()
