"""Which render nodes the engine's container sees: a file that its entry point wrote (docs/sources.md)."""

import re
from pathlib import Path

from fragscope.model import Gap, Part, Reason

_NODE = re.compile(r"\brenderD[0-9]+\b")
_MOST_BYTES = 65536
_AMD = "0x1002"


def read_render_nodes(path: Path, root: Path) -> frozenset[str] | Gap:
    """The names in a listing of /dev/dri in whatever form; nodes that are known to be another vendor's are dropped."""
    try:
        with path.open("rb") as stream:
            text = stream.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        return Gap(Part.GPU, Reason.ABSENT, f"{path} cannot be read: {error.strerror}")
    nodes = frozenset(node for node in _NODE.findall(text) if not _foreign(root, node))
    if not nodes:
        return Gap(Part.GPU, Reason.MALFORMED, f"{path} names no render node of an AMD GPU")
    return nodes


def _foreign(root: Path, node: str) -> bool:
    try:
        return (root / "class" / "drm" / node / "device" / "vendor").read_text().strip() != _AMD
    except OSError:
        return False
