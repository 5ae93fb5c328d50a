"""Bytes to lines, pure: no line longer than a cap, whatever comes."""

LINE_CAP_BYTES = 256 * 2**10
"""A traceback that a JSON formatter put on one line is some tens of KiB; what is beyond the cap is dropped."""


class Splitter:
    """Cuts a stream of bytes into lines without their ends; keeps at most one unfinished line.

    NUL bytes are dropped: a writer that keeps its position over a truncation leaves a hole of them.
    """

    def __init__(self, cap_bytes: int = LINE_CAP_BYTES, *, amid_line: bool = False) -> None:
        self._cap_bytes = cap_bytes
        self._pending = bytearray()
        # Where the stream began amid a line, the rest of it is no line.
        self._dropping = amid_line

    @property
    def pending(self) -> bool:
        """Whether a line has begun that has no end yet."""
        return bool(self._pending)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes."""
        *ended, rest = chunk.replace(b"\0", b"").split(b"\n")
        lines = []
        for piece in ended:
            if not self._dropping:
                self._take(piece)
                lines.append(bytes(self._pending).removesuffix(b"\r"))
            self._pending.clear()
            self._dropping = False
        if not self._dropping:
            self._take(rest)
        return lines

    def finish(self) -> list[bytes]:
        """The unfinished line, if any: nothing more of it is expected."""
        if not self._pending:
            return []
        line = bytes(self._pending).removesuffix(b"\r")
        self._pending.clear()
        return [line]

    def _take(self, piece: bytes) -> None:
        self._pending += piece[: self._cap_bytes - len(self._pending)]
