"""What a newcomer runs into: where a request is found in the logs, and a gateway of another model."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from kvferry.core.clock import deadline_in, is_past
from kvferry.core.errors import RequestError
from kvferry.engine.revision import revision
from kvferry.engine.tiny import make_tiny
from kvferry.testing.deployment import SplitDeployment
from kvferry.testing.processes import Command
from kvferry.wire.messages import Generate, GenerateReady, SamplingParams

SETTINGS = ["model.threads=1", "kv.num_blocks=64", "store.dram_capacity=16MiB"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny(folder / "tiny", max_positions=512)
    make_tiny(folder / "other", seed=1, layers=2, max_positions=512)
    return folder


@pytest.fixture
def split(models: Path) -> Iterator[SplitDeployment]:
    with SplitDeployment(models / "tiny", SETTINGS) as deployment:
        yield deployment


def test_one_id_is_in_the_answer_and_in_all_three_logs(split: SplitDeployment) -> None:
    prompt: list[int] = np.random.default_rng(50).integers(0, 256, 33).tolist()
    answer = split.complete(prompt, max_tokens=2)
    stopped = split.complete(prompt, max_tokens=470, stop=[answer["choices"][0]["text"][:1]])
    status, body = split.ask({"prompt": [999_999]})
    assert status == 400
    sampling = SamplingParams(max_tokens=2)
    lost = Generate(request="cmpl-lost", stream="s", prompt_tokens=10**6, sampling=sampling)
    with pytest.raises(RequestError):
        split.call("decode", lost, GenerateReady)
    processes = (split.gateway, split.prefill, split.decode)
    for process in processes:
        process.terminate()
    for process in processes:
        assert f"request {answer['id']}: " in process.err, process.words[0]
    assert body["error"]["request_id"] in split.gateway.err
    assert "request cmpl-lost of 127.0.0.1 failed" in split.decode.err
    line = next(text for text in split.decode.err.splitlines() if stopped["id"] in text)
    assert line.endswith("stopped by the gateway (stop string)")


def test_a_gateway_of_another_model_is_not_ready_and_says_both(split: SplitDeployment, models: Path) -> None:
    with Command("gateway", "--listen", "http://127.0.0.1:0", "--model", str(models / "nope")) as none:
        assert none.wait() == 2
        assert f"--model {models / 'nope'} (model.path): there is no such folder" in none.err
    words = ["--prefill", split.addresses["prefill"], "--decode", split.addresses["decode"]]
    with Command(
        "gateway", "--listen", "http://127.0.0.1:0", "--model", str(models / "other"), *words
    ) as other:
        url = urlsplit(other.wait_ready()["listen"])
        deadline = deadline_in(60)
        text = ""
        while text.count("is another one") < 2 and not is_past(deadline):
            connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
            connection.request("GET", "/ready")
            response = connection.getresponse()
            assert response.status == 503
            text = response.read().decode()
            connection.close()
        assert f"it serves model 'tiny' (revision {revision(models / 'tiny')[:12]}" in text
        assert (
            f"--model {models / 'other'} is another one (revision {revision(models / 'other')[:12]})" in text
        )
        assert other.err.count("is another one") >= 1
