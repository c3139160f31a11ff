"""The daemon's live page in real Chromium, and ``kvferry status`` and ``top`` beside it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from kvferry.client import Client
from kvferry.core.clock import deadline_in
from kvferry.daemon.credentials import CredentialFile, Limits, edited, new_credential
from kvferry.testing.blocks import save_blocks, small_spec
from kvferry.testing.processes import Command

SPEC = small_spec("page")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A daemon as a process: its HTTP port and its socket."""
    folder = tmp_path_factory.mktemp("page")
    words = ["serve", "--socket", f"{folder}/d.sock", "--capacity", "4MiB", "--disk", f"{folder}/disk"]
    words += ["--disk-capacity", "64MiB", "--http", "http://127.0.0.1:0", "--set", "daemon.listen=none"]
    with Command(*words, environment={"XDG_RUNTIME_DIR": str(folder)}) as daemon:
        ready = daemon.wait_ready()
        yield ready["http"], ready["listen"]
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.err


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: install it for the tests of pages")
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def kvferry(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def load(client: Client, number: int) -> None:
    ns = client.namespace(SPEC)
    keys = ns.keys([number] * 8 * SPEC.block_tokens)
    save_blocks(ns, keys)
    assert ns.lookup(keys).prefix == 8
    ns.load(keys, deadline=deadline_in(20)).release()


def width_over(page: Page) -> int:
    found: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return found


@pytest.mark.page
@pytest.mark.parametrize(("width", "colours"), [(360, "dark"), (1280, "light")])
def test_figures_change_while_load_runs(
    served: tuple[str, str], browser: Browser, tmp_path: Path, width: int, colours: str
) -> None:
    http, socket = served
    scheme = "dark" if colours == "dark" else "light"
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    problems: list[str] = []
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(http) else problems.append(one.url))
    with Client(socket) as before:  # misses that are no matter any more
        ns = before.namespace(SPEC)
        ns.lookup(ns.keys([width + 1000] * 300 * SPEC.block_tokens))
        ns.load(ns.keys([width + 1000] * 300 * SPEC.block_tokens), deadline=deadline_in(20)).release()
    page.goto(http)
    expect(page.locator("#state")).to_have_text("up")
    page.evaluate(
        """() => { window.seen = new Set();
        new MutationObserver(() => window.seen.add(document.getElementById("tile-saved").textContent))
        .observe(document.getElementById("tiles"), { childList: true }); }"""
    )
    with Client(socket) as client:
        for number in range(40):
            load(client, width + number)
            page.wait_for_timeout(20)
        page.wait_for_function(
            "[...window.seen].some((text) => /^[1-9]/.test(text) || /^0\\.[0-9]*[1-9]/.test(text))"
        )
        expect(page.locator("#clients td").first).to_be_visible()
    for tile in ("hits", "loads"):
        expect(page.locator(f"#tile-{tile}")).to_have_text("100.0 %")
        expect(page.locator(f"#tile-{tile} + span")).to_contain_text("since start")
        expect(page.locator(f"#tile-{tile} + span")).not_to_contain_text("100.0 %")
    expect(page.locator("#tiers .tier")).to_have_count(2)
    expect(page.locator("#operations")).to_contain_text("load")
    expect(page.locator("#tiers")).to_contain_text(re.compile(r"hit rate [1-9][0-9.]+ %"))
    assert width_over(page) <= 0
    page.screenshot(path=tmp_path / f"page-{width}.png", full_page=True)
    page.close()
    assert not problems


@pytest.mark.page
def test_it_says_that_the_daemon_is_away_and_shows_names_as_text(browser: Browser, tmp_path: Path) -> None:
    words = ["serve", "--socket", f"{tmp_path}/d.sock", "--capacity", "1MiB", "--disk", "none"]
    words += ["--http", "http://127.0.0.1:0", "--set", "daemon.listen=none"]
    with Command(*words, environment={"XDG_RUNTIME_DIR": str(tmp_path)}) as daemon:
        ready = daemon.wait_ready()
        page = browser.new_page()
        page.goto(ready["http"])
        with Client(ready["listen"], session="<img src=x onerror=document.title='bad'>") as client:
            load(client, 1)
            expect(page.locator("#clients td").first).to_contain_text("<img")
            assert page.locator("#clients img").count() == 0
        daemon.kill()
        expect(page.locator("#state")).to_contain_text("does not answer", timeout=60_000)
        page.close()


@pytest.mark.page
def test_with_credentials_it_asks_for_a_token_first(browser: Browser, tmp_path: Path) -> None:
    credential, token = new_credential("a", ("read", "write", "admin"))
    with edited(tmp_path / "c.json") as box:
        box[0] = CredentialFile(tenants={"a": Limits(), "b": Limits()}, credentials=(credential,))
    words = ["serve", "--socket", f"{tmp_path}/d.sock", "--capacity", "2MiB", "--disk", "none"]
    words += ["--http", "http://127.0.0.1:0", "--set", "daemon.listen=none"]
    words += ["--credentials", f"{tmp_path}/c.json"]
    with Command(*words, environment={"XDG_RUNTIME_DIR": str(tmp_path)}) as daemon:
        http = daemon.wait_ready()["http"]
        page = browser.new_page(viewport={"width": 360, "height": 800})
        problems: list[str] = []
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(http)
        expect(page.locator("#state")).to_contain_text("who has a token")
        expect(page.locator("#token")).to_be_visible()
        assert width_over(page) <= 0
        assert not problems
        page.fill("#token", "kvf1_nobody_s")
        page.click("#key button")
        expect(page.locator("#state")).to_contain_text("not valid")
        problems.clear()
        page.fill("#token", token)
        page.click("#key button")
        expect(page.locator("#state")).to_have_text("up")
        expect(page.locator("#token")).not_to_be_visible()
        expect(page.locator("#tenant-list")).to_contain_text("1.0 MiB")
        assert page.locator("#tenant-list tbody tr").count() == 1, "the other tenant is none of its business"
        assert width_over(page) <= 0
        assert token not in page.url + page.content()
        page.screenshot(path=tmp_path / "page-token.png", full_page=True)
        page.close()
        assert not problems


def test_status_and_top_show_the_same(served: tuple[str, str]) -> None:
    http, socket = served
    with Client(socket) as client:
        load(client, 7)
        found = json.loads(kvferry("status", "--url", http, "--json").stdout)
        assert found["tenants"][0]["saved_blocks"] >= 8
        text = kvferry("status", "--url", http).stdout
        assert "dram" in text
        assert "load" in text
        shown = kvferry("top", "--url", http, "--count", "2", "--interval", "0.2")
        assert (shown.returncode, "requests/s" in shown.stdout) == (0, True), shown.stderr
        lines = kvferry(
            "top", "--url", http, "--count", "2", "--interval", "0.2", "--json"
        ).stdout.splitlines()
        assert [json.loads(line)["http"] for line in lines] == [http, http]


def test_a_daemon_that_is_not_there_is_one_line() -> None:
    found = kvferry("status", "--url", "http://127.0.0.1:9")
    assert found.returncode == 1
    assert found.stderr.startswith("error: no daemon answers at http://127.0.0.1:9")
    assert "Traceback" not in found.stderr
