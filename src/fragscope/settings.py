"""Configuration: environment, TOML file, flags, defaults. The only place that knows pydantic.

With nothing set at all it is right for a sidecar. Unknown keys and stray FRAGSCOPE_* names stop the start.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from fragscope.advise.parameters import AdviceParameters
from fragscope.detect.parameters import Parameters, Thresholds

ENV_PREFIX = "FRAGSCOPE_"
NESTED = "__"
_OWN_NAMES = frozenset({"FRAGSCOPE_CONFIG", "FRAGSCOPE_REVISION", "FRAGSCOPE_PROMETHEUS_TOKEN"})
_LABELS = ("namespace", "pod", "container")


class ConfigError(Exception):
    """Bad configuration, in sentences that name the key, the value and what to do."""


def _http_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/metrics")


def _common(name: str) -> Any:
    """A setting of the detector that people do tune, with the detector's own default and explanation."""
    item = next(item for item in fields(Parameters) if item.name == name)
    return Field(default=item.default, description=item.metadata["why"])


def _names(value: Any) -> Any:
    """An environment variable gives one string: a JSON list, or names with commas between them."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


_COMMON = tuple(sorted({item.name for item in fields(Parameters)} - {item.name for item in fields(Thresholds)}))
_PER_TARGET = frozenset(item.name for item in fields(Parameters)) - {"weights"}

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
GpuSource = Literal["sysfs", "kfd", "fdinfo", "amdsmi", "nvml", "pyrsmi", "amd_smi_cli", "rocm_smi_cli"]
AUTO = "auto"


class Target(BaseModel):
    """One vLLM server and the GPUs that are its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="vllm", min_length=1, description="the `target` label: a name, never an address")
    url: Annotated[str, AfterValidator(_http_url)] = Field(
        default="http://127.0.0.1:8000", description="base address of the server, without /metrics"
    )
    gpus: tuple[str, ...] = Field(
        default=(), description="its GPUs: PCI addresses or unique_ids; empty: a rule finds them (see above)"
    )
    expected_gpus: int | None = Field(
        default=None, gt=0, description="how many GPUs it spans (TP x PP); default: as many as `gpus`"
    )
    render_nodes_file: Path | None = Field(
        default=None, description="file with a listing of /dev/dri as the engine's container sees it"
    )
    labels: Mapping[str, str] = Field(
        default_factory=dict,
        description="namespace, pod and container of the watched container, and no others",
    )
    planned_stop_file: Path = Field(
        default=Path("/run/fragscope/planned-stop"),
        description="a preStop hook touches it: the death that follows is a shutdown",
    )
    log: str | None = Field(
        default=None, description="its log: a file, a directory or a pattern (docs/logs.md); unset: no log is read"
    )
    token_file: Path | None = Field(default=None, description="file with a bearer token for /metrics")
    ca_file: Path | None = Field(
        default=None, description="CA bundle to verify the server by; verification is always on"
    )

    thresholds: Mapping[str, float] = Field(
        default_factory=dict,
        description="what this target sets differently: any name of the detector's settings",
    )

    @field_validator("gpus", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return _names(value)

    @field_validator("log")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        """An empty variable sets nothing; a relative path would depend on where the daemon was started."""
        if not value:
            return None
        if not value.startswith("/"):
            raise ValueError("must begin with /: the whole path of a file, a directory or a pattern")
        return value

    @field_validator("thresholds")
    @classmethod
    def _known_thresholds(cls, values: Mapping[str, float]) -> Mapping[str, float]:
        strange = sorted(set(values) - _PER_TARGET)
        if strange:
            raise ValueError(f"has {', '.join(strange)}, which no detector setting is called")
        return values

    @field_validator("labels")
    @classmethod
    def _known_labels(cls, labels: Mapping[str, str]) -> Mapping[str, str]:
        strange = sorted(set(labels) - set(_LABELS))
        if strange:
            raise ValueError(f"has {', '.join(strange)}; only {', '.join(_LABELS)} are allowed")
        return {name: value for name, value in labels.items() if value}


class Settings(BaseSettings):
    """Everything that can be set; durations in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=NESTED,
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    targets: tuple[Target, ...] = Field(default=(Target(),), description="the servers to watch")
    interval_s: Seconds = Field(default=5.0, description="between polls of each server")
    connect_timeout_s: Seconds = Field(default=1.0, description="to connect")
    total_timeout_s: Seconds = Field(default=3.0, description="for a whole answer")
    gpu_sample_hz: float = Field(
        20.0, gt=0, le=1000, description="VRAM reads a second: a peak hides between two scrapes"
    )
    gpu_sources: Annotated[Literal["auto"] | tuple[GpuSource, ...], NoDecode] = Field(
        default="auto", description="who is asked for GPU memory, in order of preference; auto: sysfs first"
    )
    gpu_check_interval_s: Seconds = Field(default=10.0, description="between reads of sources that check another")
    gpu_tolerance_bytes: int = Field(
        default=21 * 2**20,
        ge=0,
        description="two sources may differ by so much: rounding to MiB and one step of PyTorch's allocator",
    )
    sysfs_root: Path = Field(default=Path("/sys"), description="where sysfs is mounted")
    log_lookback_s: Seconds = Field(
        default=900.0, description="lines of a log that were written longer before the start are not read"
    )
    proc_root: Path = Field(default=Path("/proc"), description="where the processes are: the host's /proc if mounted")
    web_listen_address: str = Field(default=":23724", description="host:port; no host: all interfaces")
    web_telemetry_path: str = Field(default="/metrics", pattern="^/[^ ]*$", description="path of the exposition")
    web_cert_file: Path | None = Field(default=None, description="certificate (chain); with web_key_file serves HTTPS")
    web_key_file: Path | None = Field(default=None, description="its private key")
    state_dir: Path | None = Field(
        default=None, description="folder for what survives a restart, and for incident files; unset: nothing is kept"
    )
    state_max_age_s: Seconds = Field(default=86400.0, description="older state is not used")
    incident_history_s: Seconds = Field(default=900.0, description="how much of the past an incident file holds")
    incidents_max_files: int = Field(default=20, gt=0, description="incident files kept; the oldest go first")
    incidents_max_bytes: int = Field(default=200 * 2**20, gt=0, description="and their size")
    history: int = Field(default=500, gt=0, description="phase changes kept for the status page and the API")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["auto", "json", "console"] = Field("auto", description="auto: JSON when not a terminal")
    suspected_probability: float = _common("suspected_probability")
    ticket_probability: float = _common("ticket_probability")
    hold_s: float = _common("hold_s")
    forget_s: float = _common("forget_s")
    episode_gap_s: float = _common("episode_gap_s")
    half_life_s: float = _common("half_life_s")
    stale_after_s: float = _common("stale_after_s")
    peak_window_s: float = _common("peak_window_s")
    thresholds: Thresholds = Field(default_factory=Thresholds, description="the other thresholds of the detector")
    advice: AdviceParameters = Field(default_factory=AdviceParameters, description="when advice recommends a change")

    @field_validator("targets", mode="before")
    @classmethod
    def _indexed(cls, value: Any) -> Any:
        """Environment variables give {"0": {...}, "1": {...}}."""
        if isinstance(value, Mapping) and all(str(key).isdigit() for key in value):
            return [value[key] for key in sorted(value, key=int)]
        return value

    @field_validator("gpu_sources", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        names = value if value == AUTO else _names(value)
        if isinstance(names, (list, tuple)) and len(set(map(str, names))) < len(names):
            raise ValueError("names a source twice")
        if isinstance(names, (list, tuple)) and not set(map(str, names)) - {"kfd", "fdinfo"}:
            raise ValueError("names no source of totals; kfd and fdinfo only say whose memory it is")
        return names

    @field_validator("targets")
    @classmethod
    def _distinct(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        names = [target.name for target in targets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if not targets:
            raise ValueError("is empty; name at least one server")
        if twice:
            raise ValueError(f"names {', '.join(twice)} twice; each target needs a name of its own")
        return targets

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        for target in self.targets:
            self.parameters(target)
        if (self.web_cert_file is None) != (self.web_key_file is None):
            raise ValueError("web_cert_file and web_key_file must be set together")
        return self

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The listed GPU sources; empty for `auto`."""
        return () if isinstance(self.gpu_sources, str) else self.gpu_sources

    def parameters(self, target: Target) -> Parameters:
        """What the detector of one target is set by."""
        values = {item.name: getattr(self.thresholds, item.name) for item in fields(Thresholds)}
        values |= {name: getattr(self, name) for name in _COMMON}
        values |= {name: type(values[name])(value) for name, value in target.thresholds.items()}
        values["stale_after_s"] = max(values["stale_after_s"], 3 * self.interval_s)
        return Parameters(**values)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags over environment over file; nothing is read from .env files."""
        del settings_cls, dotenv_settings, file_secret_settings
        return init_settings, env_settings


class _TomlIndexed(TomlConfigSettingsSource):
    """The TOML file with `[[targets]]` as a table of indexes, so that a variable can override one of them."""

    def __call__(self) -> dict[str, Any]:
        """The file's keys."""
        table = dict(super().__call__())
        if isinstance(table.get("targets"), list):
            table["targets"] = {str(i): target for i, target in enumerate(table["targets"])}
        return table


def load(
    config: Path | None = None, flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> Settings:
    """The effective settings; raises ConfigError with one sentence per mistake.

    `env` only serves the check for stray names; the values come from the process environment.
    """
    environment = os.environ if env is None else env
    config = config or config_from(environment)
    _refuse_strays(environment)
    sources = _with_file(config)
    try:
        return sources(**plain(flags))
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error))) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{config} is not valid TOML: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def plain(flags: Mapping[str, Any] | None) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in (flags or {}).items() if value is not None}


def config_from(environment: Mapping[str, str]) -> Path | None:
    """The file that the environment names."""
    name = environment.get("FRAGSCOPE_CONFIG")
    return Path(name) if name else None


def _with_file(config: Path | None) -> type[Settings]:
    if config is None:
        return Settings
    if not config.is_file():
        raise ConfigError(f"configuration file {config} does not exist; give --config the path of a TOML file")

    class FileSettings(Settings):
        @classmethod
        def settings_customise_sources(cls, settings_cls: type[BaseSettings], *args: Any, **kwargs: Any) -> Any:
            above = super().settings_customise_sources(settings_cls, *args, **kwargs)
            return (*above, _TomlIndexed(settings_cls, config))

    return FileSettings


def _refuse_strays(environment: Mapping[str, str]) -> None:
    """pydantic-settings ignores top-level names that it does not know; a typo must not."""
    known = {name.upper() for name in Settings.model_fields}
    for name in sorted(environment):
        if not name.startswith(ENV_PREFIX) or name in _OWN_NAMES or _kubernetes_made(name, environment[name]):
            continue
        head = name.removeprefix(ENV_PREFIX).split(NESTED)[0].upper()
        if head not in known:
            raise ConfigError(f"{name} is no setting of fragscope; see `fragscope serve --print-config` for the names")


_SERVICE = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?)")
_LINK = re.compile(r"(.*_)?PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")


def _kubernetes_made(name: str, value: str) -> bool:
    """A Service called fragscope or fragscope-x makes Kubernetes inject such names into every pod of its namespace."""
    rest = name.removeprefix(ENV_PREFIX)
    if _SERVICE.fullmatch(rest):
        return True
    numbered = re.search(r"_\d+_(TCP|UDP|SCTP)", rest) is not None
    return _LINK.fullmatch(rest) is not None and (numbered or value.startswith(("tcp://", "udp://", "sctp://")))


def _sentences(error: ValidationError) -> Iterator[str]:
    for mistake in error.errors():
        # pydantic names the branch of a union, too, which nobody has written.
        parts = [str(part) for part in mistake["loc"] if not str(part).startswith(("literal[", "tuple["))]
        key = ".".join(parts) or "configuration"
        message = mistake["msg"].removeprefix("Value error, ")
        if mistake["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            yield f"{key} is no setting of fragscope; see `fragscope serve --print-config` for the names"
        elif mistake["type"] == "value_error" and not mistake["loc"]:
            yield message
        else:
            yield f"{key} is {mistake['input']!r}: {message[:1].lower()}{message[1:]}"
