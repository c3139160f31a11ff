"""Case C139: every field by file, environment and flag, good and bad; case C136: unknown keys."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Literal, NamedTuple, Union, get_args, get_origin

import pytest
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from kvferry.core.config import Config, DecodeConfig, PrefillConfig, TierConfig
from kvferry.core.config_sources import OTHER_VARIABLES, Flag, Loaded, check_environment, fields, load_config
from kvferry.core.config_types import Kind, Nbytes, Policy, Seconds, Section, Url, allowed, is_secret, show
from kvferry.core.errors import ConfigError


class Example(NamedTuple):
    """One value of a field: as text, as TOML writes it natively, and what it has to become."""

    text: str
    toml: str
    value: object


class Plan(NamedTuple):
    good: list[Example]
    bad: list[str]


def plan(field: FieldInfo) -> Plan:
    """Values to try; worked out from the field's type here, apart from the code under test."""
    union = get_origin(field.annotation) in (Union, UnionType)
    types = [t for t in get_args(field.annotation) if t is not type(None)] if union else [field.annotation]
    optional = union and type(None) in get_args(field.annotation)
    found = _plan(field, types[0])
    if optional:
        found.good.append(Example("none", '"none"', None))
    return found


def _plan(field: FieldInfo, kind: object) -> Plan:
    unit = next((m for m in field.metadata if isinstance(m, Kind)), None)
    url = next((m for m in field.metadata if isinstance(m, Url)), None)
    bound = {n: getattr(m, n) for m in field.metadata for n in ("ge", "le", "max_length") if hasattr(m, n)}
    if get_origin(kind) is Literal:
        return Plan([Example(c, f'"{c}"', c) for c in get_args(kind)], ["nonsense"])
    if kind is bool:
        return Plan([Example("false", "false", False), Example("true", "true", True)], ["maybe", "2"])
    if get_args(kind) and get_args(kind)[0] is TierConfig:
        tiers = (
            TierConfig(kind="disk", options={"directory": "/x", "capacity": 2**20, "read_threads": 2}),
            TierConfig(
                kind="disk", name="c", queue=1024, options={"directories": ["/y"], "capacity": "1GiB"}
            ),
        )
        tables = (
            '[{kind = "disk", directory = "/x", capacity = "1MiB", read_threads = 2}, '
            '{kind = "disk", name = "c", queue = "1KiB", directories = ["/y"], capacity = 1073741824}]'
        )
        text = "disk:/x?capacity=1MiB&read_threads=2, disk:/y?capacity=1GiB&name=c&queue=1024"
        bad = [
            "disk",
            "disk:/x?capacity=1MiB&queue=0",
            "disk:/x",
            "tape:/x",
            "disk:/x?capacity=1MiB&sync=maybe",
        ]
        return Plan([Example(text, tables, tiers)], bad)
    if any(isinstance(m, Policy) for m in field.metadata):
        return Plan([Example("s3fifo", '"s3fifo"', "s3fifo")], ["some text", ""])
    if get_origin(kind) is tuple and url is None:
        hosts = ("10.1.0.0/16", "node-7")
        return Plan(
            [Example("10.1.0.0/16, node-7", '["10.1.0.0/16", "node-7"]', hosts)], ["10.1.0.1/16", "a b"]
        )
    if get_origin(kind) is tuple:
        assert url is not None
        left_out = type(None) in get_args(field.annotation)
        value = (f"{url.default_scheme}://a:1", f"{url.default_scheme}://b:{url.default_port}")
        return Plan([Example("a:1, b", '["a:1", "b"]', value)], ["a:99999", *([] if left_out else [""])])
    if url is not None:
        good = f"{url.default_scheme}://host9:5"
        return Plan([Example("host9:5", '"host9:5"', good)], ["host:99999", "[::1"])
    if unit is Kind.SIZE:
        kib = 2 * bound["ge"] // 1024
        return Plan(
            [
                Example(f"{kib}KiB", f'"{kib} KiB"', kib * 1024),
                Example(str(bound["le"]), str(bound["le"]), bound["le"]),
            ],
            [str(bound["ge"] - 1), str(bound["le"] + 1), "5 parsecs", "-1"],
        )
    if unit is Kind.TIME:
        ms = round(bound["ge"] * 2000)
        low = [f"{bound['ge'] / 2}s"] if bound["ge"] else []
        return Plan(
            [
                Example(f"{ms}ms", f'"{ms} ms"', ms / 1000),
                Example(f"{bound['le']:g}", f"{bound['le']:g}", float(bound["le"])),
            ],
            [*low, f"{bound['le'] * 2:g}s", "soon", "nan", "-1s"],
        )
    if kind is int:
        low, high = bound["ge"], bound["le"]
        return Plan(
            [Example(str(low), str(low), low), Example(str(high), str(high), high)],
            [str(low - 1), str(high + 1), "x", "1.5"],
        )
    if kind is float:
        return Plan([Example("0.9", "0.9", 0.9)], [str(bound["le"] + 0.1), "x", "nan"])
    assert kind is str, f"say here what to try for {kind}"
    return Plan([Example("some text", '"some text"', "some text")], ["x" * (bound["max_length"] + 1)])


KEYS = sorted(fields())


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)


def variable(key: str) -> str:
    return "KVFERRY_" + key.upper().replace(".", "__")


def toml(folder: Path, key: str, value: str) -> Path:
    section, _, name = key.partition(".")
    path = folder / "kvferry.toml"
    path.write_text(f"[{section}]\n{name} = {value}\n")
    return path


def get(loaded: Loaded, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(loaded.config, section), name)


@pytest.mark.parametrize("key", KEYS)
def test_a_good_value_is_the_same_by_file_environment_and_flag(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, native, value in plan(fields()[key]).good:
        for written in (native, json.dumps(text)):
            path = toml(tmp_path, key, written)
            loaded = load_config(path)
            assert get(loaded, key) == value
            assert type(get(loaded, key)) is type(value)
            assert loaded.sources == {key: str(path)}
        with monkeypatch.context() as patch:
            patch.setenv(variable(key), text)
            loaded = load_config()
            assert get(loaded, key) == value
            assert type(get(loaded, key)) is type(value)
            assert loaded.sources == {key: f"environment {variable(key)}"}
        for loaded in (load_config(assignments=[f"{key}={text}"]), load_config(flags={key: text})):
            assert get(loaded, key) == value
            assert type(get(loaded, key)) is type(value)


@pytest.mark.parametrize("key", KEYS)
def test_a_bad_value_names_field_value_source_and_range(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = fields()[key]
    for bad in plan(field).bad:
        messages = []
        with pytest.raises(ConfigError) as caught:
            load_config(toml(tmp_path, key, json.dumps(bad)))
        messages.append((str(caught.value), str(tmp_path)))
        with monkeypatch.context() as patch:
            patch.setenv(variable(key), bad)
            with pytest.raises(ConfigError) as caught:
                load_config()
        messages.append((str(caught.value), variable(key)))
        with pytest.raises(ConfigError) as caught:
            load_config(assignments=[f"{key}={bad}"])
        messages.append((str(caught.value), "--set"))
        for message, source in messages:
            assert key in message
            assert bad[:50] in message or bad == ""
            assert source in message
            assert f"allowed: {allowed(field)}" in message


def test_a_yes_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode.max_running = True .*takes no true; allowed: 1 to 4096"):
        load_config(toml(tmp_path, "decode.max_running", "true"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("decode.listen", "5", "is not an address"),
        ("gateway.prefill", "5", "is not a list"),
        ("gateway.prefill", "[5]", "is not an address"),
        ("model.name", "5", "valid string"),
        ("log.level", "5", "debug"),
        ("wire.max_meta", "[1]", "valid integer"),
    ],
)
def test_wrong_toml_types_are_refused(tmp_path: Path, key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} = .*{says}"):
        load_config(toml(tmp_path, key, value))


def test_all_wrong_values_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(assignments=["decode.max_running=0", "log.level=loud"])
    assert "decode.max_running" in str(caught.value)
    assert "log.level" in str(caught.value)


@pytest.mark.parametrize(
    "given", [("0.9", "0.5"), ("0.7", "0.7"), (None, "0.5"), ("0.9", "0.9"), ("1", "0.99")]
)
def test_watermarks_the_wrong_way_round_are_refused(given: tuple[str | None, str]) -> None:
    names = ("store.low_watermark", "store.high_watermark")
    sets = [f"{name}={value}" for name, value in zip(names, given, strict=True) if value is not None]
    with pytest.raises(ConfigError, match=r"store.high_watermark = .*above low_watermark, which is 0\.\d+|1"):
        load_config(assignments=sets)


@pytest.mark.parametrize("given", [("0", "0.01"), ("0.5", "0.99"), ("0.9", "1"), ("1", "1")])
def test_watermarks_the_right_way_round(given: tuple[str, str]) -> None:
    low, high = given
    store = load_config(
        assignments=[f"store.low_watermark={low}", f"store.high_watermark={high}"]
    ).config.store
    assert (store.low_watermark, store.high_watermark) == (float(low), float(high))


def test_a_wrong_value_of_a_tier_is_named_as_config_show_names_it() -> None:
    with pytest.raises(ConfigError, match=r"store\.tiers\[1\]\.write: no write policy 'foo'"):
        load_config(assignments=["store.tiers=disk:/a?capacity=1GiB, disk:/b?capacity=1GiB&name=b&write=foo"])


def test_the_later_source_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvferry.toml"
    path.write_text("[decode]\nmax_running = 2\nmax_queue = 2\n[prefill]\nmax_queue = 2\nchunk_tokens = 2\n")
    monkeypatch.setenv("KVFERRY_CONFIG", str(path))
    monkeypatch.setenv("KVFERRY_DECODE__MAX_QUEUE", "3")
    monkeypatch.setenv("KVFERRY_PREFILL__MAX_QUEUE", "3")
    monkeypatch.setenv("KVFERRY_PREFILL__CHUNK_TOKENS", "3")
    sets = ["prefill.max_queue=4", " prefill.chunk_tokens = 4 "]
    loaded = load_config(assignments=sets, flags={"prefill.chunk_tokens": 5, "prefill.max_queue": None})
    decode, prefill = loaded.config.decode, loaded.config.prefill
    assert (decode.max_running, decode.max_queue, prefill.max_queue, prefill.chunk_tokens) == (2, 3, 4, 5)
    assert [loaded.sources[f"{k}"] for k in ("decode.max_running", "decode.max_queue")] == [
        str(path),
        "environment KVFERRY_DECODE__MAX_QUEUE",
    ]
    assert (loaded.sources["prefill.max_queue"], loaded.sources["prefill.chunk_tokens"]) == ("--set", "flag")
    other = tmp_path / "other.toml"
    other.write_text("")
    assert load_config(other).config.decode.max_running == DecodeConfig().max_running


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[decode]\npd_backends = 1\n", r"unknown key decode.pd_backends \(.*kvferry.toml\)"),
        ("[decode]\nmax_runing = 1\n", r"unknown key decode.max_runing .*did you mean max_running\?"),
        ("[decoder]\nmax_running = 1\n", r"unknown key decoder .*did you mean decode\?"),
        ("max_running = 1\n", r"unknown key max_running .*did you mean decode.max_running\?"),
        ("decode = 1\n", r"decode .*is a section: write decode.NAME"),
        ("[decode.max_running]\nx = 1\n", r"decode.max_running = \{'x': 1\}"),
        ("[decode]\nmax_running = \n", r"kvferry.toml: cannot be read: .*line 2"),
        ("\xff", r"cannot be read"),
        ("a = " + "[" * 50_000, r"cannot be read"),
    ],
)
def test_unknown_keys_and_broken_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "kvferry.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says):
        load_config(path)


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gone.toml: there is no such file"):
        load_config(tmp_path / "gone.toml")
    monkeypatch.setenv("KVFERRY_CONFIG", str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match=r"gone.toml \(\$KVFERRY_CONFIG\): there is no such file"):
        load_config()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "KVFERRY_LOG_LEVEL",
            r"unknown environment variable KVFERRY_LOG_LEVEL, did you mean KVFERRY_LOG__LEVEL\?",
        ),
        ("KVFERRY_LOG__LEVLE", r"did you mean KVFERRY_LOG__LEVEL\?"),
        ("KVFERRY_CONFG", r"did you mean KVFERRY_CONFIG\?"),
        ("KVFERRY_LOG", r"environment KVFERRY_LOG: log is a section: write KVFERRY_LOG__NAME"),
        ("KVFERRY_GATEWAY_PORT_8400_TCP_ADDR", "enableServiceLinks"),
        ("KVFERRY_GATEWAY_SERVICE_HOST", "enableServiceLinks"),
    ],
)
def test_unknown_variables_are_refused(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=says):
        load_config()


def test_every_variable_that_is_read_is_known() -> None:
    """One that only its reader knows would stop every command of whoever sets it."""
    root = Path(__file__).parents[3]
    files = [
        path
        for top in ("kvstore", "transports", "codecs", "bench")
        for path in (root / top).rglob("*")
        if path.suffix in (".py", ".c", ".h")
    ]
    assert len(files) > 100
    named = {name for path in files for name in re.findall(r"KVFERRY_[A-Z0-9_]*[A-Z0-9]", path.read_text())}
    assert {"KVFERRY_CONFIG", "KVFERRY_NATIVE"} <= named
    assert named - set(OTHER_VARIABLES) - {variable(key) for key in KEYS} == set()


def test_the_variables_that_are_no_fields_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(OTHER_VARIABLES) - {"KVFERRY_CONFIG"}:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KVFERRYBOAT", "1")
    assert load_config().sources == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode.max_running", "write it as key=value"),
        ("=1", "write it as key=value"),
        ("decode.max_runing=1", r"unknown key decode.max_runing \(--set\), did you mean max_running\?"),
        ("decod.max_running=1", r"did you mean decode\?"),
        ("decode=1", r"decode \(--set\) is a section: write decode.NAME, one of listen"),
    ],
)
def test_wrong_assignments_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(assignments=[text])


def test_a_command_cannot_name_a_field_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown key prefill.lissen \(flag\)"):
        load_config(flags={"prefill.lissen": "x"})


def test_defaults_are_safe_and_every_field_is_described() -> None:
    config = Config()
    assert load_config().config == config
    addresses = [config.prefill.listen, config.decode.listen, config.gateway.listen]
    assert addresses == ["tcp://127.0.0.1:8410", "tcp://127.0.0.1:8430", "http://127.0.0.1:8400"]
    for key, field in fields().items():
        assert field.description, key
        assert allowed(field), key
    with pytest.raises(ValueError, match="frozen"):
        config.log.level = "debug"
    with pytest.raises(ValueError, match="Extra inputs"):
        PrefillConfig(lisen="x")  # type: ignore[call-arg]


class Odd(Section):
    secret: SecretStr | None = None
    size: Nbytes = 5
    time: Seconds = 90.0


def test_values_are_shown_as_people_write_them_and_secrets_as_stars() -> None:
    known = {**Odd.model_fields, **fields()}
    assert is_secret(known["secret"])
    assert show(known["secret"], SecretStr("hunter2")) == "***"
    assert show(known["secret"], None) == "(none)"
    assert show(known["size"], 2**30) == "1 GiB"
    assert show(known["size"], 2**30 + 1) == "1073741825 B"
    assert show(known["time"], 0.25) == "250 ms"
    assert show(known["time"], 90.0) == "90 s"
    assert show(known["gateway.prefill"], ("a", "b")) == "a, b"
    assert show(known["wire.checksum"], False) == "false"
    assert allowed(known["log.format"]) == "one of text, json"
    assert allowed(known["wire.max_meta"]) == "4 KiB to 256 MiB"
    assert allowed(known["model.threads"]) == "1 to 1024, or none"
    assert allowed(known["wire.checksum"]) == "true or false"
    assert allowed(known["decode.listen"]) == "an address such as tcp://127.0.0.1:8430"


def test_every_value_has_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_WIRE__MAX_META", "1MiB")
    values = {v.key: v for v in load_config().values()}
    assert list(values) == list(fields())
    assert (values["wire.max_meta"].text, values["wire.max_meta"].value) == ("1 MiB", 2**20)
    assert values["wire.max_meta"].source == "environment KVFERRY_WIRE__MAX_META"
    assert values["wire.checksum"].source == "default"


def test_core_does_not_bring_pydantic() -> None:
    code = "import sys, kvferry.core, kvferry.core.registry; print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_a_wrong_option_is_named_as_the_user_wrote_it() -> None:
    with pytest.raises(ConfigError, match=r"model\.threads = 0 \(from --threads\)"):
        load_config(flags={"model.threads": Flag("--threads", 0)})
    loaded = load_config(
        flags={"model.threads": Flag("--threads", 2), "model.name": Flag("--model-name", None)}
    )
    assert (loaded.config.model.threads, loaded.config.model.name) == (2, None)
    assert loaded.sources == {"model.threads": "--threads"}


def test_a_folder_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a folder, must be a TOML file"):
        load_config(tmp_path)


def test_variables_of_children_are_checked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_MODEL__THREADS", "bogus")
    monkeypatch.setenv("KVFERRY_LOG__LEVEL", "debug")
    check_environment(["KVFERRY_LOG__LEVEL", "KVFERRY_LOG__FORMAT"])
    monkeypatch.setenv("KVFERRY_LOG__LEVEL", "bogus")
    with pytest.raises(ConfigError, match=r"log\.level = 'bogus' \(from environment KVFERRY_LOG__LEVEL\)"):
        check_environment(["KVFERRY_LOG__LEVEL", "KVFERRY_LOG__FORMAT"])
