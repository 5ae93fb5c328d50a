"""Configuration: right with nothing at all, and every mistake a sentence that names its key."""

from pathlib import Path

import pytest

from fragscope.settings import ConfigError, Settings, documented, load, origins
from tests.paths import REPOSITORY


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(__import__("os").environ):
        if name.startswith("FRAGSCOPE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fragscope.toml"
    path.write_text(
        """
interval_s = 2
hold_s = 100
[[targets]]
name = "a"
url = "http://a:1"
thresholds = { hold_s = 50 }
[[targets]]
name = "b"
labels = { namespace = "prod" }
[thresholds]
gate_z = 3
[thresholds.weights]
prior = -2.0
"""
    )
    return path


def test_with_nothing_set_it_is_right_for_a_sidecar() -> None:
    settings = load()
    (target,) = settings.targets
    assert (target.name, target.url) == ("vllm", "http://127.0.0.1:8000")
    assert settings.web_listen_address == ":23724"
    assert settings.parameters(target).stale_after_s == 15


def test_the_file_is_read_and_targets_differ(file: Path) -> None:
    settings = load(file)
    a, b = settings.targets
    assert settings.parameters(a).hold_s == 50
    assert settings.parameters(b).hold_s == 100
    assert settings.parameters(b).gate_z == 3
    assert settings.parameters(b).weights.prior == -2
    assert b.labels == {"namespace": "prod"}


def test_the_environment_overrides_one_key_of_one_target(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_TARGETS__1__URL", "http://b:2/metrics")
    monkeypatch.setenv("FRAGSCOPE_INTERVAL_S", "3")
    settings = load(file)
    assert [target.url for target in settings.targets] == ["http://a:1", "http://b:2"]
    assert settings.targets[1].name == "b"
    assert settings.interval_s == 3


def test_flags_override_everything(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_INTERVAL_S", "3")
    assert load(file, {"interval_s": 1.5}).interval_s == 1.5


def test_the_file_may_be_named_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_CONFIG", str(file))
    assert load().interval_s == 2


@pytest.mark.parametrize("text", ['["0000:c1:00.0", "0000:c6:00.0"]', "0000:c1:00.0, 0000:c6:00.0"])
def test_gpus_in_a_variable_are_json_or_words_with_commas(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_TARGETS__0__GPUS", text)
    assert load().targets[0].gpus == ("0000:c1:00.0", "0000:c6:00.0")


@pytest.mark.parametrize(("text", "log"), [("/var/log/pods/p_*/vllm", "/var/log/pods/p_*/vllm"), ("", None)])
def test_a_log_is_a_whole_path_or_none(text: str, log: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_TARGETS__0__LOG", text)
    assert load().targets[0].log == log


def test_staleness_is_never_less_than_three_intervals() -> None:
    settings = load(flags={"interval_s": 20.0})
    assert settings.parameters(settings.targets[0]).stale_after_s == 60


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FRAGSCOPE_INTERVALS", "3", "FRAGSCOPE_INTERVALS is no setting"),
        ("FRAGSCOPE_INTERVAL_S", "soon", "interval_s is 'soon'"),
        ("FRAGSCOPE_INTERVAL_S", "0", "interval_s is '0'"),
        ("FRAGSCOPE_INTERVAL_S", "inf", "interval_s is 'inf'"),
        ("FRAGSCOPE_HALF_LIFE_S", "0", "half_life_s is 0"),
        ("FRAGSCOPE_TARGETS__0__UR", "http://x", "targets.0.ur is no setting"),
        ("FRAGSCOPE_TARGETS__0__URL", "localhost:8000", "targets.0.url is 'localhost:8000': must begin with http"),
        ("FRAGSCOPE_TARGETS__0__LABELS__NODE", "x", "only namespace, pod, container"),
        ("FRAGSCOPE_TARGETS__0__THRESHOLDS__HOLD", "1", "targets.0.thresholds"),
        ("FRAGSCOPE_TARGETS__0__EXPECTED_GPUS", "0", "targets.0.expected_gpus"),
        ("FRAGSCOPE_TARGETS__0__LOG", "vllm.log", "targets.0.log is 'vllm.log': must begin with /"),
        ("FRAGSCOPE_LOG_LOOKBACK_S", "0", "log_lookback_s is '0'"),
        ("FRAGSCOPE_TARGETS", "[]", "name at least one server"),
        ("FRAGSCOPE_TARGETS", '[{"name":"a"},{"name":"a"}]', "names a twice"),
        ("FRAGSCOPE_TARGETS", "{", "targets"),
        ("FRAGSCOPE_THRESHOLDS__GATE_X", "1", "thresholds.gate_x is no setting"),
        ("FRAGSCOPE_THRESHOLDS__GATE_Z", "-1", "gate_z is -1"),
        ("FRAGSCOPE_THRESHOLDS__WEIGHTS__PRIORS", "1", "thresholds.weights.priors is no setting"),
        ("FRAGSCOPE_HOLD_S", "-1", "hold_s is -1"),
        ("FRAGSCOPE_SUSPECTED_PROBABILITY", "1.5", "suspected_probability is 1.5"),
        ("FRAGSCOPE_WEB_CERT_FILE", "/x", "must be set together"),
        ("FRAGSCOPE_LOG_LEVEL", "loud", "log_level is 'loud'"),
    ],
)
def test_a_mistake_is_a_sentence_that_names_it(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        load()
    assert words in str(raised.value)


def test_what_kubernetes_injects_for_a_service_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("FRAGSCOPE_PORT", "tcp://10.0.0.1:23724")
    monkeypatch.setenv("FRAGSCOPE_PORT_23724_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("FRAGSCOPE_METRICS_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("FRAGSCOPE_METRICS_SERVICE_PORT_HTTP", "23724")
    monkeypatch.setenv("FRAGSCOPE_METRICS_PORT", "tcp://10.0.0.1:23724")
    monkeypatch.setenv("FRAGSCOPE_METRICS_PORT_23724_TCP", "tcp://10.0.0.1:23724")
    load()


def test_a_port_of_our_own_making_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_WEB_PORT", "9100")
    with pytest.raises(ConfigError, match="FRAGSCOPE_WEB_PORT"):
        load()


def test_a_threshold_keeps_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_TARGETS__0__THRESHOLDS__TREND_BUCKETS", "20")
    settings = load()
    assert settings.parameters(settings.targets[0]).trend_buckets == 20
    assert isinstance(settings.parameters(settings.targets[0]).trend_buckets, int)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("interval = 3", "interval is no setting"),
        ("interval_s = ", "not valid TOML"),
        ("[thresholds]\nnope = 1", "thresholds.nope is no setting"),
        ('[[targets]]\nlogg = "x"', "targets.0.logg is no setting"),
    ],
)
def test_a_mistake_in_the_file_is_a_sentence_too(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert words in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.toml")


def test_every_setting_says_where_it_came_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAGSCOPE_HISTORY", "7")
    settings = load(file, {"web_listen_address": ":1"})
    rows = {key: (value, origin) for key, value, origin in origins(settings, file, {"web_listen_address": ":1"})}
    assert rows["web_listen_address"] == (":1", "flag")
    assert rows["history"] == (7, "environment (FRAGSCOPE_HISTORY)")
    assert rows["interval_s"] == (2.0, f"file ({file})")
    assert rows["targets.0.url"] == ("http://a:1", f"file ({file})")
    assert rows["gpu_sample_hz"] == (20.0, "default")
    assert rows["thresholds.weights.prior"] == (-2.0, f"file ({file})")


def test_every_setting_is_documented_with_its_default() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    for key, default, meaning in documented():
        assert f"| `{key}` | `{default}` | {meaning} |" in page, key


def test_every_setting_has_a_meaning() -> None:
    assert all(meaning for _, _, meaning in documented())
    assert len(list(documented())) > len(Settings.model_fields)
