"""Turns the GGUF of SmolLM2 into a Hugging Face model directory; a child process of the demo.

A process of its own, so that the 0.9 GB which the conversion needs for a while and the libraries it
loads are gone when it is done. Run as ``python -m kvferry.engine.demo.convert GGUF DIRECTORY``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["convert", "drop_null_quantization", "generalise_tokenizer"]


def drop_null_quantization(config_file: Path) -> None:
    """Remove ``"quantization_config": null``, which other engines take for a quantised checkpoint."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if config.get("quantization_config", "absent") is None:
        del config["quantization_config"]
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def generalise_tokenizer(directory: Path) -> None:
    """Name a tokenizer class that transformers 4 and 5 both know, and put the chat template where both look.

    What they write themselves cannot be read by the other, and the cache folder outlives an upgrade.
    """
    config_file, template_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    kept = {k: v for k, v in config.items() if k in ("bos_token", "unk_token", "chat_template")}
    if template_file.is_file():
        kept["chat_template"] = template_file.read_text(encoding="utf-8")
        template_file.unlink()
    kept |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }
    config_file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def convert(gguf: Path, directory: Path) -> None:
    """Write ``directory``: config.json, bfloat16 safetensors, tokenizer.json and the chat template.

    Args:
        gguf: The quantised weights; 4-bit, so that bfloat16 loses nothing that is visible.
        directory: Where the files go; created if needed, not atomic (the caller renames it).
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: no request leaves the machine
    import torch
    import transformers
    import transformers.utils.logging

    transformers_logging: Any = transformers.utils.logging
    transformers_logging.disable_progress_bar()  # stderr is kept for the message of a failure
    source, name = str(gguf.parent), gguf.name
    tokenizer_class: Any = transformers.AutoTokenizer
    model_class: Any = transformers.AutoModelForCausalLM
    print("  1/3 tokenizer", flush=True)
    tokenizer = tokenizer_class.from_pretrained(source, gguf_file=name)
    # transformers 5 keeps GGUF weights packed unless told otherwise; 4 always unpacks them, and has
    # another name for the type.
    gguf_config: Any = getattr(transformers, "GgufConfig", None)
    options: dict[str, Any] = {"gguf_file": name}
    if gguf_config is None:
        options["torch_dtype"] = torch.bfloat16
    else:
        options |= {"dtype": torch.bfloat16, "quantization_config": gguf_config(dequantize=True)}
    print("  2/3 weights", flush=True)
    model = model_class.from_pretrained(source, **options)
    if hasattr(model.config, "quantization_config"):
        model.config.quantization_config = None
    print("  3/3 writing", flush=True)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    drop_null_quantization(directory / "config.json")
    generalise_tokenizer(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
