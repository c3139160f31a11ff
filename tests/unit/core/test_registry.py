"""Plug-ins are found, loaded and refused through real distribution metadata on sys.path."""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.metadata import MetadataPathFinder, entry_points
from pathlib import Path
from textwrap import dedent

import pytest

from kvferry.core.errors import CapacityError, ConfigError, PluginUnavailableError, UnknownPluginError
from kvferry.core.nearest import did_you_mean, nearest
from kvferry.core.registry import GROUPS, Registry
from kvferry.testing.few_files import few_more_files, no_more_files

GROUP = "kvferry_test.things"


def install(folder: Path, name: str, points: str, **modules: str) -> None:
    """Lay out a distribution as pip would, with one group of entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{dedent(points)}")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(dedent(text))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [m for m in sys.modules if m.startswith("kvt_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_a_plugin_is_imported_only_when_it_is_loaded(site: Path) -> None:
    install(site, "dist-a", "one = kvt_lazy:One\ntwo = kvt_missing:Two\n", kvt_lazy="class One: ...")
    registry = Registry[type](GROUP)
    assert registry.names() == ["one", "two"]
    assert "kvt_lazy" not in sys.modules
    one = registry.load("one")
    assert one.__name__ == "One"
    assert registry.load("one") is one


def test_an_unknown_name_is_answered_with_the_nearest_and_all(site: Path) -> None:
    install(site, "dist-a", "compress = kvt_a:A\nraw = kvt_a:A\n", kvt_a="class A: ...")
    with pytest.raises(
        UnknownPluginError, match=r"no plug-in 'compres', did you mean compress\?.*compress, raw"
    ):
        Registry[type](GROUP).load("compres")
    with pytest.raises(UnknownPluginError, match="none is installed"):
        Registry[type]("kvferry_test.empty").load("x")


@pytest.mark.parametrize(
    ("point", "module", "says"),
    [
        (
            "x = kvt_needs:A [turbo]",
            "import kvt_not_there",
            r"needs kvt_not_there: pip install 'dist-a\[turbo\]'",
        ),
        (
            "x = kvt_needs:A",
            "import kvt_not_there.sub",
            "install the distribution that has the module kvt_not_there",
        ),
        ("x = kvt_gone:A", "", "installation of dist-a is incomplete"),
        ("x = kvt_needs:Gone", "", r"'x' of dist-a cannot be loaded from kvt_needs:Gone: AttributeError"),
        ("x = kvt_needs:A", "raise OSError('libturbo.so: not found')", "OSError: libturbo.so: not found"),
    ],
)
def test_what_cannot_be_imported_says_what_is_missing(site: Path, point: str, module: str, says: str) -> None:
    install(site, "dist-a", point, kvt_needs=module)
    registry = Registry[type](GROUP)
    with pytest.raises(PluginUnavailableError, match=says):
        registry.load("x")
    (info,) = registry.describe()
    assert not info.ok
    assert info.problem
    assert info.distribution == "dist-a"


def test_two_distributions_with_one_name_are_refused_and_both_named(site: Path) -> None:
    install(site, "dist-a", "x = kvt_a:A\ny = kvt_a:A\n", kvt_a="class A: ...")
    install(site, "dist-b", "x = kvt_b:B\n", kvt_b="class B: ...")
    registry = Registry[type](GROUP)
    with pytest.raises(ConfigError, match=r"'x' is claimed by .*dist-[ab].* and .*dist-[ab]"):
        registry.load("x")
    assert registry.load("y").__name__ == "A"
    states = {info.name: info for info in registry.describe()}
    assert not states["x"].ok
    assert states["x"].distribution == "dist-a, dist-b"
    assert states["y"].ok


def test_a_distribution_seen_twice_is_one(site: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    install(site, "dist-a", "x = kvt_a:A\n", kvt_a="class A: ...")
    install(other, "Dist.A", "x = kvt_a:A\n")
    sys.path.insert(0, str(other))
    try:
        assert Registry[type](GROUP).load("x").__name__ == "A"
    finally:
        sys.path.remove(str(other))


def test_a_process_can_register_its_own(site: Path) -> None:
    install(site, "dist-a", "x = kvt_a:A\n", kvt_a="class A: ...")
    registry = Registry[type](GROUP)
    registry.register("mine", int)
    assert registry.load("mine") is int
    assert registry.names() == ["mine", "x"]
    with pytest.raises(ConfigError, match="already registered by \\(this process\\)"):
        registry.register("mine", str)
    with pytest.raises(ConfigError, match="already registered by dist-a"):
        registry.register("x", str)
    mine = registry.describe()[0]
    assert (mine.name, mine.distribution, mine.ok) == ("mine", "(this process)", True)
    registry.unregister("mine")
    with pytest.raises(UnknownPluginError):
        registry.load("mine")
    with pytest.raises(UnknownPluginError, match="was not registered by this process"):
        registry.unregister("x")


def test_the_groups_are_those_of_the_design() -> None:
    kinds = ("transports", "regions", "codecs", "tiers", "policies", "devices")
    assert tuple(f"kvferry.{kind}" for kind in kinds) == GROUPS


def test_nearest_ignores_case_and_gives_up_on_strangers() -> None:
    assert nearest("TCPP", ["tcp", "unix"]) == "tcp"
    assert nearest("zzz", ["tcp", "unix"]) is None
    assert did_you_mean("tpc", ["tcp"]) == ", did you mean tcp?"
    assert did_you_mean("zzz", ["tcp"]) == ""


@pytest.mark.parametrize("free", [0, 1, 3])
def test_a_scan_without_descriptors_is_not_kept(site: Path, free: int) -> None:
    install(site, "dist-a", "x = kvt_a:A", kvt_a="class A: ...")
    registry = Registry[type](GROUP)
    with few_more_files(free):
        for call in (registry.names, registry.describe, lambda: registry.load("x")):
            with pytest.raises(CapacityError, match="ulimit -n"):
                call()
    assert registry.names() == ["x"]


@pytest.mark.parametrize("group", GROUPS)
def test_what_somebody_else_found_empty_without_descriptors_is_looked_for_again(group: str) -> None:
    importlib.invalidate_caches()
    MetadataPathFinder().invalidate_caches()
    with no_more_files(), contextlib.suppress(OSError):
        assert not entry_points(group=group), "the system's finder tells: this test is of no use any more"
    assert Registry[object](group).names()


@pytest.mark.parametrize(
    "module",
    [
        "import errno, os; raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))",
        "raise ImportError('libturbo.so: cannot open shared object file: Too many open files', name='turbo')",
        "try: open(bytes(1))\nexcept ValueError as e: raise ImportError('x') from OSError(24, 'no more')",
    ],
)
def test_an_import_without_descriptors_is_no_missing_requirement(site: Path, module: str) -> None:
    install(site, "dist-a", "x = kvt_needs:A", kvt_needs=module)
    registry = Registry[type](GROUP)
    with pytest.raises(CapacityError, match="ulimit -n"):
        registry.load("x")
    (info,) = registry.describe()
    assert "ulimit -n" in info.problem
    (site / "kvt_needs.py").write_text("class A: ...  # longer than before, and of another time")
    importlib.invalidate_caches()
    assert registry.load("x").__name__ == "A"
