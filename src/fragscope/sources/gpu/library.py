"""What sources that ask a vendor's library have in common: a child process loads it, at the first read."""

from collections.abc import Callable

from fragscope.model import Gap
from fragscope.sources.gpu.child import Child
from fragscope.sources.gpu.device import Listing


class Library:
    """The part of such a source that is the same for each; what is asked, and how it is read, is the source's."""

    def __init__(self, child: Child, parse: Callable[[object], Listing]) -> None:
        self._child = child
        self._parse = parse

    def read(self) -> Listing:
        """The GPUs the library sees, at most the child's deadline from now."""
        raw = self._child.ask()
        return Listing(gaps=(raw,)) if isinstance(raw, Gap) else self._parse(raw)

    def rest(self) -> None:
        """Ends the child until the next read."""
        self._child.rest()

    def close(self) -> None:
        """Ends the child for good."""
        self._child.close()
