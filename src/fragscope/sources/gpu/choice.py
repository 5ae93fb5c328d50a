"""Which sources are asked, in which order, and which of them speaks for the figures."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fragscope.model import Gap, Reason
from fragscope.sources.gpu import amd_smi_cli, amdsmi, fdinfo, kfd, nvml, pyrsmi, rocm_smi_cli, sysfs
from fragscope.sources.gpu.device import Source

Registry = Mapping[str, Callable[[], Source]]

VENDORS: Registry = {
    amdsmi.NAME: amdsmi.AmdSmi,
    nvml.NAME: nvml.Nvml,
    pyrsmi.NAME: pyrsmi.PyRsmi,
    amd_smi_cli.NAME: amd_smi_cli.AmdSmiCli,
    rocm_smi_cli.NAME: rocm_smi_cli.RocmSmiCli,
}
"""What asks a vendor's library or tool; making one starts nothing."""

TOOLS = (amd_smi_cli.NAME, rocm_smi_cli.NAME)
"""Each call costs some 0.4 s of CPU: never often, never by themselves."""
AUTOMATIC = (sysfs.NAME, amdsmi.NAME, nvml.NAME)
ATTRIBUTION = (kfd.NAME, fdinfo.NAME)
NAMES = (sysfs.NAME, *ATTRIBUTION, *VENDORS)


class Role(StrEnum):
    """What a slow source is asked for now."""

    FIGURES = "figures"
    CHECK = "check"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Choice:
    """The sources of figures in order of preference, and those that say whose memory it is."""

    figures: tuple[str, ...]
    attribution: tuple[str, ...]
    automatic: bool = True

    @property
    def slow(self) -> tuple[str, ...]:
        """The sources of figures beside sysfs."""
        return tuple(name for name in self.figures if name != sysfs.NAME)


def choose(wanted: Sequence[str], usable: Callable[[str], bool]) -> Choice:
    """The choice for a list of names, which is obeyed, or for an empty one what is `usable` of the automatic ones.

    sysfs is always among the automatic ones: that it is missing has to be said.
    """
    if wanted:
        figures = tuple(name for name in wanted if name not in ATTRIBUTION)
        return Choice(figures, tuple(name for name in wanted if name in ATTRIBUTION), automatic=False)
    figures = tuple(name for name in AUTOMATIC if name == sysfs.NAME or usable(name))
    return Choice(figures, tuple(name for name in ATTRIBUTION if usable(name)))


def speaker(choice: Choice, seeing: Collection[str]) -> str | None:
    """The source whose figures count: the first that sees devices; None while none does."""
    return next((name for name in choice.figures if name in seeing), None)


def role(choice: Choice, name: str, speaking: str | None, sysfs_gaps: Sequence[Gap]) -> Role:
    """What a slow source is asked for.

    Chosen automatically, a library is left alone where sysfs knows of AMD GPUs and cannot read them (it would
    touch the same files, which on an MI300A can crash older kernels), and NVIDIA's where another speaks.
    """
    before = speaking is None or choice.figures.index(name) <= choice.figures.index(speaking)
    if not choice.automatic:
        return Role.FIGURES if before else Role.CHECK
    if any(gap.reason is not Reason.ABSENT for gap in sysfs_gaps):
        return Role.IDLE
    if before:
        return Role.FIGURES
    return Role.IDLE if name == nvml.NAME else Role.CHECK
