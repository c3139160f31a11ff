"""Runs the demo: starts the processes, has both sides hold the same conversation, compares, reports."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvferry.core.clock import deadline_in
from kvferry.core.config_sources import check_assignments, check_environment
from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.core.units import parse_rate
from kvferry.engine.config import ModelConfig
from kvferry.engine.demo.conversation import Chat, Script, first_prompt, load_chat, load_script
from kvferry.engine.demo.display import Display
from kvferry.engine.demo.processes import LOG_VARIABLES, Child, ChildError, Processes, termination_raises
from kvferry.engine.demo.report import Answer, Outcome, report
from kvferry.engine.demo.sides import Ask, Side, SingleProcess, SplitDeployment
from kvferry.engine.model_folder import KNOWN_MODELS, resolve_model_folder
from kvferry.streaming import StreamCodec

__all__ = ["DemoOptions", "default_threads", "run_demo"]

_START_TIMEOUT_S = 300.0
_WARM_UP_TOKENS = 64
_ITEM_NBYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_MIN_MEMORY_NBYTES = 64 << 20


def default_threads() -> int:
    """Half the cores that this process may use: two workers are busy at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What ``kvferry demo`` was asked for.

    Attributes:
        model: ``smollm2``, ``tiny`` or the folder of a checkpoint.
        prompt_file: A text instead of the licence.
        max_tokens: Longest answer.
        repeat: How often both sides hold the conversation.
        threads: Threads of the model in each process.
        rate: Limit of the link that carries KV, such as ``100MB/s``.
        keep_logs: Folder for the processes' logs.
        settings: ``key=value`` of the configuration, for both workers.
    """

    model: str = "smollm2"
    prompt_file: Path | None = None
    max_tokens: int = 48
    repeat: int = 1
    threads: int = 1
    chunk_tokens: int = 512
    block_tokens: int = 16
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    rate: str | None = None
    keep_logs: Path | None = None
    seed: int = 0
    temperature: float = 0.0
    settings: tuple[str, ...] = ()


def run_demo(options: DemoOptions, display: Display) -> dict[str, Any]:
    """Run it and return the object of :func:`kvferry.engine.demo.report.report`.

    Must be called in the main thread, whose life the children are tied to.

    Raises:
        ConfigError: Options, model or cache folder cannot be used.
        KVFerryError: A process or a request failed.
    """
    codec = _check(options)
    if codec.pipelines:
        display.say(codec.lossy_line() or f"KV travels encoded: {codec.text}")
    script = load_script(options.prompt_file)
    with termination_raises(), Processes(options.keep_logs) as processes:
        directory = resolve_model_folder(options.model, display.say)
        demo = _Demo(options, display, directory, script, processes)
        try:
            demo.start()
            outcomes = demo.converse()
        except ChildError as error:
            display.log_tail(error.name, error.tail)
            raise
        finally:
            demo.close()
    settings = {
        "threads": options.threads,
        "dtype": options.dtype,
        "chunk_tokens": options.chunk_tokens,
        "block_tokens": options.block_tokens,
        "rate": options.rate,
        "stream_codec": codec.text,
        "lossy": codec.accepts_lossy,
    }
    return report(demo.model_name, outcomes, settings)


def _check(options: DemoOptions) -> StreamCodec:
    """Refuse what cannot work before anything is started; how KV will travel."""
    if options.chunk_tokens % options.block_tokens:
        raise ConfigError(
            f"--chunk-tokens {options.chunk_tokens} is no multiple of --block-tokens {options.block_tokens}"
        )
    if options.rate is not None:
        parse_rate(options.rate)
    check_environment(LOG_VARIABLES)
    stream = check_assignments(options.settings).stream
    codec = StreamCodec(stream.codec, allow_lossy=stream.allow_lossy)
    k = TensorSpec("k", (options.block_tokens, 1, 64), DType(options.dtype))
    spec = KVSpec(model="demo", revision="", layers=(LayerSpec((k,)),), block_tokens=options.block_tokens)
    reasons = [pipeline.unsupported(spec) for pipeline in codec.pipelines.values()]
    if reasons and all(reasons):
        raise ConfigError(f"stream.codec={codec.text}: {reasons[0]}; add --dtype bfloat16")
    return codec


class _Demo:
    """The processes and the conversation of one run."""

    def __init__(
        self, options: DemoOptions, display: Display, directory: Path, script: Script, processes: Processes
    ) -> None:
        self._options, self._display, self._directory = options, display, directory
        self._script, self._processes = script, processes
        self._shape = ModelConfig.from_dir(directory)
        self.model_name = KNOWN_MODELS.get(options.model, directory.resolve().name)
        self._chat: Chat
        self._prompt: list[int]
        self._split: SplitDeployment | None = None
        self._single: SingleProcess

    # ---- processes ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything and wait until it is ready; meanwhile build the prompt."""
        options, display = self._options, self._display
        with display.waiting("reading the tokenizer"):
            self._chat = load_chat(self._directory)
        self._prompt = first_prompt(
            self._script, self._chat, self._shape.max_position_embeddings, options.max_tokens
        )
        self._check_vocabulary()
        display.say(
            f"starting gateway, prefill worker, decode worker and a single process to compare with "
            f"({options.threads} thread{'s' if options.threads > 1 else ''} each)"
        )
        deadline = deadline_in(_START_TIMEOUT_S)
        settings = self._worker_settings()
        decode = self._worker("decode", [*settings, "decode.listen=tcp://127.0.0.1:0", self._kv_listen()])
        prefill = self._worker(
            "prefill",
            [*settings, "prefill.listen=tcp://127.0.0.1:0", f"prefill.chunk_tokens={options.chunk_tokens}"],
        )
        self._single = SingleProcess(self._processes.start("single", self._single_command(), talks=True))
        with display.waiting("loading the model"):
            workers = [child.wait_ready(deadline)["listen"] for child in (prefill, decode)]
            self._single.wait_ready(deadline)
            gateway = self._worker("gateway", self._gateway_settings(*workers))
            url = gateway.wait_ready(deadline)["listen"]
            self._split = SplitDeployment(url, self._processes.check)
            self._split.wait_ready(deadline)

    def _check_vocabulary(self) -> None:
        """Say now, not at the first request, that tokenizer and model are not of one checkpoint."""
        follow = self._chat.follow(self._prompt, [], self._script.questions[1])
        largest, size = max(follow), self._shape.vocab_size
        if largest >= size:
            raise ConfigError(
                f"the tokenizer of {self._directory} gives token id {largest}, the model's vocabulary is "
                f"0..{size - 1}: tokenizer.json and config.json are not of the same checkpoint"
            )

    def close(self) -> None:
        """Close the connections; the processes are ended by their owner."""
        if self._split is not None:
            self._split.close()

    def _worker(self, command: str, settings: Sequence[str]) -> Child:
        words = [sys.executable, "-m", "kvferry.cli", command]
        for setting in settings:
            words += ["--set", setting]
        return self._processes.start(command, words)

    def _memory(self) -> int:
        """Bytes of KV of the whole conversation, with some room."""
        shape, options = self._shape, self._options
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _ITEM_NBYTES[options.dtype]
        follow = self._chat.follow(self._prompt, [], self._script.questions[1])
        tokens = len(follow) + 2 * options.max_tokens + 2 * options.block_tokens
        return max(_MIN_MEMORY_NBYTES, per_token * tokens)

    def _worker_settings(self) -> list[str]:
        options, memory = self._options, self._memory()
        timeout = f"{Ask(1).timeout_s:g}s"
        return [
            f"model.path={self._directory.resolve()}",
            f"model.name={self.model_name}",
            f"model.dtype={options.dtype}",
            f"model.threads={options.threads}",
            f"model.block_tokens={options.block_tokens}",
            f"kv.memory={memory * 2}",
            f"store.dram_capacity={memory * 3}",
            f"stream.timeout={timeout}",
            *options.settings,
        ]

    def _kv_listen(self) -> str:
        rate = f"?rate={parse_rate(self._options.rate):.0f}" if self._options.rate else ""
        return f"decode.kv_listen=tcp://127.0.0.1:0{rate}"

    def _gateway_settings(self, prefill: str, decode: str) -> list[str]:
        timeout = f"{Ask(1).timeout_s:g}s"
        return [
            "gateway.listen=http://127.0.0.1:0",
            f"gateway.prefill={prefill}",
            f"gateway.decode={decode}",
            f"gateway.queue_timeout={timeout}",
            f"gateway.total_timeout={timeout}",
            f"model.path={self._directory.resolve()}",  # for its tokenizer
        ]

    def _single_command(self) -> list[str]:
        options, memory = self._options, self._memory()
        settings = {
            "directory": str(self._directory.resolve()),
            "name": self.model_name,
            "dtype": options.dtype,
            "threads": options.threads,
            "block_tokens": options.block_tokens,
            "chunk_tokens": options.chunk_tokens,
            "kv_nbytes": memory * 2,
            "store_nbytes": memory * 3,
        }
        words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        return [sys.executable, "-m", "kvferry.engine.demo.single", *words]

    # ---- conversation ------------------------------------------------------------------------

    def converse(self) -> list[Outcome]:
        """Both sides in turn, as often as asked; while one works the other is idle."""
        options, display = self._options, self._display
        if self._split is None:
            raise ProtocolError("the demo was not started")
        ask = Ask(options.max_tokens, options.temperature, options.seed)
        run = secrets.token_hex(8)
        with display.waiting("warming up"):
            for side in (self._split, self._single):
                warm = Ask(2, timeout_s=ask.timeout_s)
                side.generate(self._prompt[:_WARM_UP_TOKENS], f"{run}-warm-up", warm, lambda _: None)
        outcomes = []
        for repeat in range(1, options.repeat + 1):
            salt = f"{run}-{repeat}"  # nothing of an earlier repeat is reused
            of = f"repeat {repeat} of {options.repeat}: " if options.repeat > 1 else ""
            if repeat == 1:
                split = self._hold(self._split, salt, ask, show=True)
            else:
                with display.waiting(f"{of}split"):
                    split = self._hold(self._split, salt, ask, show=False)
            if repeat == 1:
                display.say("the same conversation in a single process")
            with display.waiting(f"{of}single process"):
                single = self._hold(self._single, salt, ask, show=False)
            outcomes.append(Outcome(split, single))
            if options.repeat > 1:
                display.say(
                    f"{of}first turn {split[0].ttft_s['total']:.3f} s split, "
                    f"{single[0].ttft_s['total']:.3f} s single"
                )
        return outcomes

    def _hold(self, side: Side, salt: str, ask: Ask, *, show: bool) -> tuple[Answer, ...]:
        """The conversation with one side."""
        prompt, answers = self._prompt, list[Answer]()
        for turn, question in enumerate(self._script.questions, 1):
            if answers:
                before = [*prompt, *answers[-1].token_ids]
                follow = self._chat.follow(prompt, answers[-1].token_ids, question)
                if follow[: len(before)] != before:
                    raise ProtocolError(f"the prompt of turn {turn} does not begin with turn {turn - 1}")
                prompt = follow
            if show:
                self._display.question(turn, question, len(prompt))
                with self._display.answer() as shown:
                    answers.append(side.generate(prompt, salt, ask, shown.text))
            else:
                answers.append(side.generate(prompt, salt, ask, lambda _: None))
        return tuple(answers)
