"""How the tests read a text: the whole of it, as `explain` would."""

from fragscope.detect.parameters import Parameters
from fragscope.explain.findings import Finding
from fragscope.explain.postmortem import Explanation, PostMortem
from fragscope.explain.reader import Reader


def findings(text: str) -> list[Finding]:
    reader = Reader()
    found = [each for line in text.split("\n") for each in reader.feed(line)]
    return found + list(reader.flush())


def explanations(text: str) -> list[Explanation]:
    mortem = PostMortem(Parameters())
    told = [each for line in text.split("\n") for each in mortem.feed(line)]
    return told + list(mortem.close())


def cause_of(text: str) -> str:
    told = explanations(text)
    assert len(told) == 1, [each.judged.cause for each in told]
    return str(told[0].judged.cause)


def message(
    tried: str,
    free: str,
    allocated: str,
    unallocated: str,
    total: str = "80.00 GiB",
    backend: str = "HIP",
    private: str | None = None,
    process: str = "",
) -> str:
    """The allocator's message of PyTorch 2.4 and later."""
    pools = f", with {private} allocated in private pools (e.g., {backend} Graphs)" if private else ""
    return (
        f"torch.OutOfMemoryError: {backend} out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
        f"{total} of which {free} is free. {process}Of the allocated memory {allocated} is allocated by PyTorch{pools}, "
        f"and {unallocated} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        f"setting PYTORCH_{backend}_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
