"""Train small byte-level tokenizers with chat templates of our own; no files and no network."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from polar_trl.types import Call, ChatRequest, Completion, Message, TokenIds, Tool, ToolCall

_TEXT = """The quick brown fox jumps over the lazy dog. A panther, a phantom and a pantomime walk into a bar.
{"name": "read_file", "arguments": {"path": "notes.txt", "whole": true}} system user assistant tool
def main():
    return "hello world"
"""
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|header|>", "<|eot|>", "<unk>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
SHOUTING = CHATML.replace("{{ m.content }}", "{{ m.content | upper if not loop.last else m.content }}")
COUNTING = CHATML.replace("{{ m.role }}", "{{ m.role }}{% if loop.last %} {{ loop.length }}{% endif %}")
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
HEADERS = (
    "{% for m in messages %}<|header|>{{ m.role }}<|header|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header|>\n\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # removes the reasoning of every reply but the last
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLED = (  # tools, calls and results of its own; results in a row share one turn
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

READ_FILE = Tool(
    name="read_file",
    description="Reads a file.",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "whole": {"type": "boolean"}, "limit": {"type": "integer"}},
    },
)


@cache
def _train() -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(_SPECIAL + _VISION),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _MARKUP])
    return tokenizer.to_str()


def build_tokenizer(chat_template: str) -> Any:
    """A fast tokenizer of about 500 tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train()),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


def read_trl_template(name: str) -> str:
    """The text of a model's real chat template, from the files of the installed trl (which is not imported)."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def encode(tokenizer: Any, text: str) -> TokenIds:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def encode_oddly(tokenizer: Any, text: str) -> TokenIds:
    """The text as single bytes: ids that encoding the text would not give. Special tokens stay whole."""
    ids: list[int] = []
    for token in encode(tokenizer, text):
        piece = tokenizer.convert_ids_to_tokens(token)
        is_added = token in tokenizer.added_tokens_decoder
        ids += [token] if is_added else [tokenizer.convert_tokens_to_ids(char) for char in piece]
    return tuple(ids)


def user(text: str) -> Message:
    return Message(role="user", text=text)


def system(text: str) -> Message:
    return Message(role="system", text=text)


def result(text: str, call_id: str = "") -> Message:
    return Message(role="tool", text=text, tool_call_id=call_id)


def calling(*arguments: str, text: str = "", reasoning: str | None = None, ids: str = "c") -> Message:
    calls = tuple(ToolCall(id=f"{ids}{i}", name="read_file", arguments=args) for i, args in enumerate(arguments))
    return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=calls)


def record_call(
    index: int, request: ChatRequest, prompt_ids: TokenIds, completion_ids: TokenIds, message: Message
) -> Call:
    completion = Completion(token_ids=completion_ids, logprobs=(-0.5,) * len(completion_ids), finish_reason="stop")
    return Call(
        session_id="s",
        index=index,
        dialect="test",
        request=request,
        prompt_ids=prompt_ids,
        completion=completion,
        message=message,
    )
