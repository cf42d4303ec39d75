"""The tokenizer of the small models: 1,920 entries, byte-level BPE, GLM's special tokens.

What: `tokenizer.json`, `chat_template.jinja` and `tokenizer_config.json` as every checkpoint folder
carries them, and `train`, which made the committed file. Why committed: merges depend on the text
of the Python that trains them, and every folder must hold the same bytes.

What must stay true: the special tokens are those of GLM-4.5 to 5.3 by text, in the last 32 ids, so
that vLLM's `glm47` reasoning and tool parsers find theirs; the tags of thinking and of tool calls
are ordinary added tokens (kept when special tokens are skipped), the rest are special.

The training text is the documentation strings of Python's standard library, (c) Python Software
Foundation, under the PSF License Version 2.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOKENIZER_FILE = HERE / "tokenizer.json"
TEMPLATE_FILE = HERE / "chat_template.jinja"

CONTROL_ENTRIES = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<|image|>",
    "<|video|>",
)
VISIBLE_ENTRIES = (
    "/nothink",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
END_ENTRIES = ("<|endoftext|>", "<|user|>", "<|observation|>")
MASK_ENTRY = "[MASK]"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def documentation_strings(root: Path | None = None) -> Iterator[str]:
    """The documentation strings of the standard library's top-level modules, in name order."""
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def train(texts: Iterable[str], vocab_size: int) -> str:
    """tokenizer.json trained on `texts`, with `vocab_size` entries including the added ones."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_ENTRIES) - len(VISIBLE_ENTRIES),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL_ENTRIES])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in VISIBLE_ENTRIES])
    return str(tokenizer.to_str(pretty=False))


@cache
def vocabulary() -> dict[str, int]:
    """Entry -> id, byte-level text for the trained ones, plain text for the added ones."""
    document = json.loads(TOKENIZER_FILE.read_text(encoding="utf-8"))
    added = {entry["content"]: int(entry["id"]) for entry in document["added_tokens"]}
    return {text: int(index) for text, index in document["model"]["vocab"].items()} | added


def token_id(text: str) -> int:
    """Id of an added token."""
    return vocabulary()[text]


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json; the chat template is a file of its own."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": {},
    }
